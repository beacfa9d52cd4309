"""Messages in files: by what they say (``delayd schedule find``), one of them through all logs (``delayd trace``), and
all of them as Parquet or CSV (``delayd export``).

Invariant: what is listed was read from the named byte of the named file, and what could not be seen is said on stderr.
Other processes search and this one writes, so memory holds some pieces of files and never all that is found.
"""

import json
import multiprocessing
import os
import re
import signal
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice

import click

from delayd.client.sending.receipts import Receipt
from delayd.errors import BadArgument
from delayd.hours import instant_text
from delayd.machine.disk import RealDisk
from delayd.machine.operating import counted
from delayd.reading.export import FORMATS, export_directory
from delayd.reading.files.stored_groups import ReadMemory
from delayd.reading.find import (
    BytesPattern,
    FileFinder,
    FilePiece,
    FoundRow,
    FoundRows,
    Search,
    WantedMessages,
    find_pieces,
)
from delayd.reading.trace import trace as follow

from .hour_commands import HourRange, HourSteps, LeftOut, hours_options
from .listing import Cell, Column, JsonText, columns, printable, progress, show
from .shared_options import (
    Command,
    LogIdParam,
    Shown,
    data_option,
    format_option,
    from_option,
    offer_subjects,
    shown_options,
    subject_option,
    to_option,
)
from .times import check_order

FOUND_COLUMNS = columns(
    "sequence:name subject deliver_at_ms:instant accepted_at_ms:instant,spare key:spare tags:spare "
    "body_bytes:size,spare state delay_log_id:detail"
)
ALONE_TASKS = 2  # So much is searched in this process: to start others would take longer.
TASKS_AHEAD = 2  # For each process: one that it searches, and one that waits.
NICE = 5  # Servers on this machine come first.

_MEMORY = ReadMemory()  # One for each process, which searches one piece at a time.


@click.command(cls=Command)
@click.argument("name", metavar="[SUBJECT]", required=False, shell_complete=offer_subjects)
@data_option
@subject_option
@from_option
@to_option
@click.option(
    "--key",
    metavar="KEY",
    help="Messages with this key; without a SUBJECT their later lives, too: retries and dead letters.",
)
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Messages with this tag; may be given often.")
@click.option(
    "--grep", metavar="PATTERN", help="A regular expression on bytes matches in the body, or in the headers as stored."
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=PATTERN",
    help="There is such a header, and PATTERN matches in its value; may be given often.",
)
@click.option("--sequence", type=click.IntRange(min=1), metavar="N", help="The message with this sequence.")
@click.option("--all", "ended", is_flag=True, help="Messages that have an outcome, too.")
@click.option("--count", "only_count", is_flag=True, help="Only say how many there are.")
@click.option(
    "--body",
    "body_form",
    type=click.Choice(["text", "json", "hex"]),
    default="text",
    show_default=True,
    help="How bodies are shown.",
)
@click.option("--no-body", is_flag=True, help="Show no bodies.")
@shown_options
def find(
    name: str | None,
    data: str,
    subject: str | None,
    from_ms: int | None,
    to_ms: int | None,
    key: str | None,
    tags: tuple[str, ...],
    grep: str | None,
    headers: tuple[str, ...],
    sequence: int | None,
    ended: bool,
    only_count: bool,
    body_form: str,
    no_body: bool,
    shown: Shown,
) -> int:
    """Find pending messages by subject, time, key, tag, or what their bodies and headers say.

    All options must hold. Messages that no checkpoint has filed come first, then the others hour by hour.

    Exit codes: 3 something is damaged; stderr names it, and everything else is searched.

    $ delayd schedule find orders.cancel --grep "customer 4711"
    $ delayd schedule find --data /var/lib/delayd --tag night --from now --to +12h --count
    $ delayd schedule find --header "tenant=^acme$" --body json --format json
    """
    if name is not None and subject is not None and name != subject:
        raise BadArgument(f"SUBJECT {name} and --subject {subject} differ; give one of them")
    check_order(from_ms, to_ms)
    wanted = WantedMessages(
        from_ms,
        to_ms,
        _bytes(name or subject),
        sequence,
        _bytes(key),
        tags,
        None if grep is None else BytesPattern(os.fsencode(grep)),
        tuple(_header(text) for text in headers),
    )
    search = Search(wanted, ended, with_rows=not only_count, with_bodies=not no_body)
    finder, left_out = FileFinder(RealDisk(), data, search, in_processes), LeftOut()
    if only_count:
        click.echo(sum(found.row_count for found in _found(finder, left_out)))
    else:
        columns = FOUND_COLUMNS if no_body else (*FOUND_COLUMNS, Column("body"))
        lines = (
            _line(row, None if no_body else body_form, shown.form)
            for found in _found(finder, left_out)
            for row in found.rows
        )
        shown.show(columns, lines)
    return left_out.end()


def _found(finder: FileFinder, left_out: LeftOut) -> Iterator[FoundRows]:
    with progress("MiB", None) as done:
        seen = 0
        for found in finder.found():
            before, seen = seen, seen + found.size_bytes
            done((seen >> 20) - (before >> 20), finder.total_bytes >> 20)
            for error in found.damage:
                left_out.add(error)
            yield found


def in_processes(tasks: Iterator[list[FilePiece]], search: Search) -> Iterator[FoundRows]:
    """Search a little in this process, and the rest in one process for each core; results come in order."""
    disk = RealDisk()
    for task in islice(tasks, ALONE_TASKS):
        yield find_pieces(disk, task, search, _MEMORY)
    first = next(tasks, None)
    if first is None:
        return
    processes = len(os.sched_getaffinity(0))
    # A process begins as a copy of this one: to import everything again would take longer than most searches.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin)
    waiting: deque[Future[FoundRows]] = deque()
    try:
        with warnings.catch_warnings():
            # Newer Pythons warn of threads in this process; a thread that draws progress holds nothing that is needed.
            warnings.simplefilter("ignore", DeprecationWarning)
            waiting.append(pool.submit(_search, first, search))
        for task in tasks:
            waiting.append(pool.submit(_search, task, search))
            if len(waiting) >= processes * TASKS_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    # Ctrl-C reaches the whole group of processes; this one ends when its parent does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)


def _search(task: list[FilePiece], search: Search) -> FoundRows:
    return find_pieces(RealDisk(), task, search, _MEMORY)


def _line(row: FoundRow, body_form: str | None, form: str) -> tuple[Cell, ...]:
    line: tuple[Cell, ...] = (
        row.sequence,
        row.subject,
        row.deliver_at_ms,
        row.accepted_at_ms or None,
        row.key,
        ", ".join(row.tags) or None if form != "json" else JsonText(json.dumps(row.tags)),
        row.body_bytes,
        row.state,
        f"{row.log_id:016x}",
    )
    return line if body_form is None else (*line, shown_body(row.body, body_form, form))


def shown_body(body: bytes | None, body_form: str, form: str) -> Cell:
    """A body as a listing shows it: whole in JSON and CSV, and its beginning in a table."""
    if body is None:
        return None
    if body_form == "hex":
        return printable(body.hex().encode()) if form == "table" else body.hex()
    if body_form == "json":
        text = _json(body)
        return printable(text.encode()) if form == "table" and text is not None else text
    return printable(body) if form == "table" else body.decode("utf-8", "backslashreplace")


def _json(body: bytes) -> JsonText | None:
    """A body that is JSON, in one line; None for another one."""
    try:
        return JsonText(json.dumps(json.loads(body), ensure_ascii=False, separators=(",", ":")))
    except (ValueError, RecursionError):
        return None


def _header(text: str) -> tuple[str, BytesPattern]:
    name, equals, pattern = text.partition("=")
    if not name or not equals:
        raise BadArgument(f"--header {text} is not NAME=PATTERN; write for example tenant=acme")
    return name, BytesPattern(os.fsencode(pattern))


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


LIKE_A_RECEIPT = r"[A-Za-z0-9]{44,52}"  # A receipt has 48 letters and digits; a few were lost or typed twice.
STEP_COLUMNS = columns("step at_ms:instant late_ms:duration detail byte:name,spare file:spare log_id:detail")


@click.command(cls=Command)
@click.argument("subject", shell_complete=offer_subjects)
@click.argument("which", metavar="SEQUENCE|RECEIPT|KEY")
@click.option(
    "--key",
    "is_key",
    is_flag=True,
    help="What is given is a key, also when it has only digits or looks like a receipt.",
)
@click.option("--server", type=LogIdParam(), metavar="LOG_ID", help="The delay server that gave the sequence.")
@data_option
@format_option
def trace(subject: str, which: str, is_key: bool, server: int | None, data: str, form: str) -> None:
    """Follow one message through all logs.

    A RECEIPT names the sequence and the delay server. With a KEY the newest message that took it is followed; one
    that looks like a mistyped receipt is refused without --key. The steps are `accepted`, `filed`, `due` (the
    instant that was wished), `claimed` (the message was due and is handed over), `appended` by the realtime server,
    `indexed`, and for each group `pulled` and then `acknowledged`, `given back`, `returned`, `lapsed` or `let go`
    (the group was moved or deleted). In place of `claimed` there may be another outcome, such as `cancelled` or
    `expired`; or `moved` or `replaced`, and then the steps of the message in its place; or `drained`, and then the
    steps of the message at the delay server that took it, when its directory is in DIR. A message that a group gave
    back is `retried` (it comes again later) or `rejected` (it is a dead letter), and then come the steps of its
    next life. Each step has the file and the byte where it stands. The last row says what the message waits for.
    stderr says what could not be seen. `stood still`, `clock in doubt` and `clock set back` say what kept its server
    from handing it over, from the next checkpoint on. `late` of `claimed` and `appended` is measured from the later of
    due and accepted. docs/operations.md, "Why was it late?", goes from a late step to its cause.

    $ delayd trace orders.cancel 4711 --data /var/lib/delayd
    $ delayd trace orders.cancel 3kj...
    $ delayd trace orders.cancel order-42
    """
    message, log_id = (which, server) if is_key else _message_of(which, server)
    found = follow(RealDisk(), data, subject, message, log_id)
    rows: list[tuple[Cell, ...]] = []
    for each in found:
        rows += [
            (
                step.what,
                step.at_ms,
                step.late_ms,
                step.detail,
                step.position,
                step.path,
                f"{step.log_id or each.log_id:016x}",
            )
            for step in each.steps
        ]
        if each.waits_for:
            due = f"due {instant_text(each.deliver_at_ms)}; waits for {each.waits_for}"
            rows.append(("next", None, None, due, None, None, f"{each.log_id:016x}"))
    show(STEP_COLUMNS, rows, form)
    for each in found:
        if each.earlier:
            earlier = counted(each.earlier, "earlier message|earlier messages")
            click.echo(f"delayd: {earlier} had this key; the newest is followed", err=True)
        for sentence in each.unseen:
            click.echo(f"delayd: not seen: {sentence}", err=True)


def _message_of(word: str, server: int | None) -> tuple[int | str, int | None]:
    """The sequence or key that a word means, and the delay server that it must be of; None for any."""
    if word.isdecimal():
        return int(word), server
    try:
        receipt = Receipt.of_token(word)
    except BadArgument:  # Its check bytes tell a receipt from a key.
        if re.fullmatch(LIKE_A_RECEIPT, word):
            raise BadArgument(
                f"{word} looks like a receipt that was mistyped or cut; if it is a key, add --key"
            ) from None
        return word, server
    if server not in (None, receipt.log_id):
        raise BadArgument(
            f"the receipt is of delay server {receipt.log_id:016x}, --server names {server:016x}; leave --server out"
        )
    return receipt.sequence, receipt.log_id


TABLE_COLUMNS = columns("table rows:number")


@click.command(cls=Command)
@data_option
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    required=True,
    metavar="FOLDER",
    help="A new folder, or an export to go on with.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default=FORMATS[0],
    show_default=True,
    help="Parquet needs pyarrow: pip install 'delayd[spark]'.",
)
@hours_options
@subject_option
def export(data: str, out: str, form: str, hours: HourRange, subject: str | None) -> None:
    """Write the logs as tables: schedule, dispatch, message, and what an audit of them needs.

    The servers may run or not; a copy of their files will do, too. Bodies are not written. Run it again with the same
    folder to add the hours that were sealed since; hours that are not sealed are written anew.

    $ delayd export --data /var/lib/delayd --out books --from -24h
    $ delayd export --data /var/lib/delayd --out books --format csv --subject orders.cancel
    """
    with progress("hours", None) as advance:
        counts = export_directory(
            data,
            out,
            now_ms=time.time_ns() // 1_000_000,
            form=form,
            hours=hours,
            subject=subject,
            progress=HourSteps(advance),
        )
    show(TABLE_COLUMNS, ((f"{out}/{name}", count) for name, count in counts.items()), "table")
