"""``delayd get``, ``delayd cancel``, ``delayd reschedule`` and ``delayd pending``: what became of messages, an end or
another instant for those that are pending, and which ones are.

Invariant: a message is named once, by one receipt or by one key, and called cancelled or moved only when its server has
said so. Messages of a window are counted first, then cancelled or moved, with progress and a true account.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, Protocol, TextIO, TypeVar

import click
import numpy as np
from numpy.typing import NDArray

from delayd.client.asking.walking import PendingMessage, Walked
from delayd.client.instants import utc
from delayd.client.producer import Producer
from delayd.client.sending.receipts import Accepted, BatchReceipt, Receipt, ReceiptPart, RescheduledBatch
from delayd.errors import BadArgument, DelaydError, LogId
from delayd.hours import duration_text
from delayd.machine.disk import RealDisk
from delayd.machine.operating import counted
from delayd.outcome import MessageState, Outcome
from delayd.reading.trace import Trace, trace
from delayd.wire.asked import AnswerRows, CancelAnswer, RescheduleAnswer

from .file_commands import shown_body
from .listing import Cell, Column, columns, progress, show
from .main import NOT_BALANCED, OK, TRY_LATER, USAGE
from .shared_options import (
    Command,
    DataFolder,
    Shown,
    at_option,
    bundle,
    confirm,
    format_option,
    from_option,
    in_option,
    meta_option,
    offer_subjects,
    shown_options,
    timeout_option,
    to_option,
    yes_option,
)
from .times import check_order
from .times import shift as shift_type

STATE_COLUMNS = columns(
    "sequence:name state deliver_at_ms:instant decided_at_ms:instant attempt:number,spare target_log_id:spare "
    "target_offset:name,spare other:name,spare log_id:spare"
)
KEY = Column("key")
MS = timedelta(milliseconds=1)

_WHICH = (
    click.option(
        "--receipt", "tokens", multiple=True, metavar="RECEIPT", help="As `delayd send` told it; may be given again."
    ),
    click.option(
        "--receipts", "receipt_file", type=click.File(), metavar="FILE", help="One receipt a line; - is stdin."
    ),
    click.option(
        "--key", "keys", multiple=True, metavar="KEY", help="The newest message with this key; may be given again."
    ),
    click.option("--keys", "key_file", type=click.File(), metavar="FILE", help="One key a line; - is stdin."),
)


class GivenOptions(NamedTuple):
    """What was given of the options."""

    tokens: Sequence[str]
    receipt_file: TextIO | None
    keys: Sequence[str]
    key_file: TextIO | None

    @property
    def anything(self) -> bool:
        """Whether any of them was."""
        return any(each is not None and each != () for each in self)


given_options = bundle("given", GivenOptions, *_WHICH)


class Which:
    """The messages of a subject that a command means."""

    def __init__(self, subject: str, given: GivenOptions) -> None:
        """Read what was given; UsageError, BadArgument when it names no messages."""
        self.subject = subject
        tokens = [*given.tokens, *_lines(given.receipt_file)]
        self.keys = [*given.keys, *_lines(given.key_file)]
        if bool(tokens) == bool(self.keys):
            raise click.UsageError(
                "say which messages, by one of them: --receipt RECEIPT, --receipts FILE, --key KEY or --keys FILE"
            )
        self.receipts = list(map(Receipt.of_token, tokens))
        twice = len(self.keys) - len(set(self.keys))
        if twice:
            raise BadArgument(f"{counted(twice, 'key is|keys are')} given twice; name each message once")

    def __len__(self) -> int:
        return len(self.receipts) or len(self.keys)

    @property
    def _receipt(self) -> BatchReceipt:
        parts = []
        for row, receipt in enumerate(self.receipts):
            accepted = Accepted(receipt.log_id, receipt.sequence, 1, receipt.accepted_at_ms, False)
            parts.append(ReceiptPart(np.array([row]), np.array([receipt.deliver_at_ms]), accepted))
        return BatchReceipt(parts)

    @property
    def _named(self) -> dict[str, Any]:
        return {"keys": self.keys} if self.keys else {"receipt": self._receipt}

    def get(self, producer: Producer) -> AnswerRows:
        """Ask what became of them."""
        return producer.get_batch(self.subject, **self._named)

    def cancel(self, producer: Producer) -> NDArray[np.uint8]:
        """Cancel them."""
        return producer.cancel_batch(self.subject, **self._named)

    def reschedule(self, producer: Producer, delay: timedelta | None, deliver_at_ms: int | None) -> RescheduledBatch:
        """Move them to one instant."""
        return producer.reschedule_batch(self.subject, delay=delay, deliver_at_ms=deliver_at_ms, **self._named)

    @property
    def columns(self) -> Sequence[Column]:
        """Those of `rows`."""
        return self.with_names(STATE_COLUMNS)

    def with_names(self, columns: Sequence[Column]) -> Sequence[Column]:
        """Columns of a listing, with the keys before them if keys were given."""
        return (KEY, *columns) if self.keys else columns

    def named(self, rows: Iterator[Sequence[Cell]]) -> Iterator[Sequence[Cell]]:
        """Rows of a listing, each with its key before it if keys were given."""
        if not self.keys:
            return rows
        return ((key, *row) for key, row in zip(self.keys, rows, strict=True))

    def rows(self, answers: AnswerRows) -> Iterator[Sequence[Cell]]:
        """What became of them, for a listing."""
        return self.named(self._rows(answers))

    def _rows(self, answers: AnswerRows) -> Iterator[Sequence[Cell]]:
        log_ids: Sequence[str | None] = [f"{receipt.log_id:016x}" for receipt in self.receipts] or [None] * len(answers)
        for log_id, answer in zip(log_ids, answers, strict=True):
            handed_over = int(answer["target_log_id"])
            sequence = int(answer["sequence"])
            yield (
                sequence or None,
                state_text(int(answer["state"])),
                int(answer["deliver_at_ms"]) if sequence else None,
                int(answer["decided_at_ms"]) or None,
                int(answer["attempt"]),
                f"{handed_over:016x}" if handed_over else None,
                int(answer["target_offset"]) if handed_over else None,
                int(answer["other"]) or None,
                log_id,
            )


def state_text(state: int) -> str:
    """The name of a state, for people."""
    return MessageState(state).name.lower().replace("_", " ")


def _lines(file: TextIO | None) -> list[str]:
    return [line.removesuffix("\n") for line in file or () if line.strip()]


ASKS_FROM = 1_001  # So many messages and more are not ended or moved without a question.


class Walk(Protocol):
    """`Producer.cancel_where`, or what moves messages."""

    def __call__(self, *, dry_run: bool, progress: Callable[[Walked], object] | None) -> Walked: ...


class Wording(NamedTuple):
    """How a command says what it does to messages."""

    done: str  # "cancelled 3 messages"
    cost: str  # "3 messages of orders.cancel ..."
    goes_on: bool = False  # Whether it goes on by a word that it tells when it was interrupted.


class Due(NamedTuple):
    """A window of instants, as walks take it; None sets no bound."""

    since: datetime | None
    before: datetime | None

    @classmethod
    def of(cls, from_ms: int | None, to_ms: int | None) -> Due:
        """Take the options of a command."""
        check_order(from_ms, to_ms)
        return cls(None if from_ms is None else utc(from_ms), None if to_ms is None else utc(to_ms))


due_options = bundle("due", Due.of, from_option, to_option)


def in_bulk(subject: str, walk: Walk, wording: Wording, *, dry_run: bool, yes: bool) -> int:
    """Count, ask, and do; the exit code."""
    walked = walk(dry_run=True, progress=None)
    found = f"{counted(walked.found, 'message|messages')} of {subject}"
    if dry_run or not walked.found:
        click.echo(f"{found} {'is' if walked.found == 1 else 'are'} pending there")
        return _code_of(walked)
    if walked.found >= ASKS_FROM:
        confirm(f"{found} {wording.cost}", yes)
    walked = walk_all(walk, wording, walked.found)
    click.echo(f"{wording.done} {counted(walked.done, 'message|messages')} of {subject}")
    return _code_of(walked)


def walk_all(walk: Walk, wording: Wording, found: int) -> Walked:
    """Do it, with progress; stderr says how much is done if it is interrupted."""
    with progress("messages", found) as advance:
        last = Walked()

        def told(so_far: Walked) -> None:
            nonlocal last
            advance(so_far.done - last.done)
            last = so_far

        try:
            return walk(dry_run=False, progress=told)
        except (KeyboardInterrupt, DelaydError) as error:
            servers = error.details.get("servers") if isinstance(error, DelaydError) else None
            if isinstance(servers, str):
                click.echo(f"delayd: not all is done at the delay servers {servers}", err=True)
            rest = f"; to go on, say it again with --resume {last.resume}" if wording.goes_on and last.resume else ""
            click.echo(f"delayd: {counted(last.done, 'message is|messages are')} {wording.done} so far{rest}", err=True)
            raise


def _code_of(walked: Walked) -> int:
    if walked.ended:
        click.echo(f"delayd: {walked.ended:,} were handed over or ended meanwhile", err=True)
    if walked.in_flight:
        click.echo(f"delayd: {walked.in_flight:,} are being handed over: say it again", err=True)
    return told_unread(walked.unread) or (TRY_LATER if walked.in_flight else OK)


def told_unread(unread: int) -> int:
    """The exit code of a walk that met so many files which can't be read; stderr says so."""
    if not unread:
        return OK
    click.echo("delayd: files of hours could not be read, so messages may be missing; see `delayd status`", err=True)
    return NOT_BALANCED


MOVED_COLUMNS = columns("sequence:name answer deliver_at_ms:instant receipt:spare")
FILE_COLUMNS = columns("sequence:name state deliver_at_ms:instant decided_at_ms:instant log_id:spare")

where_option = click.option(
    "--where", is_flag=True, help="All pending messages of SUBJECT that are due from --from on and before --to."
)
tag_option = click.option("--tag", metavar="TAG", help="With --where: only messages with this tag.")
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Only show, or with --where count, the messages, and change nothing."
)
running_option = click.option(
    "--data",
    type=DataFolder(),
    metavar="DIR",
    help="Refused: files do not say whether a message may still end. Only running servers decide.",
    hidden=True,
)

Told = TypeVar("Told", bound=IntEnum)


# The outcomes that need no further word.
_ENDED = ", ".join(
    f"`{state_text(outcome.state)}`" for outcome in Outcome if outcome not in (Outcome.DISPATCHED, Outcome.CANCELLED)
)
_GET = f"""Show what became of messages.

States: `pending`; `in flight` (it is being handed over); `dispatched` (a realtime server has it), `cancelled`,
`moved`, `replaced`, `rejected`, `kept` (another message took its place: `other`), `drained` (another delay server
has it, and is not here to be asked), {_ENDED}; and `unknown` (no such message is kept). A
message is known as long as the logs of its hour are kept.

Exit code 2: a message is unknown.

$ delayd get orders.cancel --receipt 3kj...
$ delayd get orders.cancel --key order-42
$ delayd get orders.cancel --receipts receipts.txt --format json
$ delayd get orders.cancel --key order-42 --data /var/lib/delayd
"""


@click.command(cls=Command, help=_GET)
@click.argument("subject", shell_complete=offer_subjects)
@given_options
@click.option(
    "--data", type=DataFolder(), metavar="DIR", help="Read the files there, of servers that run or not; ask nobody."
)
@timeout_option
@meta_option
@format_option
def get(subject: str, data: str | None, timeout: timedelta, meta: str, form: str, given: GivenOptions) -> int:
    """Show what became of messages."""
    which = Which(subject, given)
    if data is not None:
        found = _from_files(which, data)
        show(which.with_names(FILE_COLUMNS), which.named(iter(found)), form)
        return USAGE if any(row[1] == "unknown" for row in found) else OK
    with Producer(meta, timeout_ms=timeout / MS) as producer:
        answers = which.get(producer)
    show(which.columns, which.rows(answers), form)
    return USAGE if (answers["state"] == MessageState.UNKNOWN).any() else OK


@click.command(cls=Command)
@click.argument("subject", shell_complete=offer_subjects)
@given_options
@where_option
@due_options
@tag_option
@dry_run_option
@running_option
@timeout_option
@meta_option
@format_option
@yes_option
def cancel(
    subject: str,
    where: bool,
    due: Due,
    tag: str | None,
    dry_run: bool,
    data: str | None,
    timeout: timedelta,
    meta: str,
    form: str,
    yes: bool,
    given: GivenOptions,
) -> int:
    """End messages that are pending, so that they are never delivered.

    The list says what became of each message. The command asks before it ends more than 1,000 messages, unless you give
    `--yes`. To cancel a message twice does no harm.

    With `--where` it counts the messages first, and then says how many it has ended. When it is interrupted, what it
    has said so far is done; say it again to go on. Messages that leave or end meanwhile are counted on stderr.

    Exit codes: 0 all of them are cancelled; 2 some were dispatched before, have ended in another way, or are unknown; 3
    files of a server can't be read, so messages may be missing; 4 some are being handed over at this moment: say it
    again.

    $ delayd cancel orders.cancel --receipt 3kj...
    $ delayd cancel orders.cancel --key order-42
    $ delayd cancel orders.cancel --receipts receipts.txt --dry-run
    $ delayd cancel orders.cancel --where --from now --to +2h
    """
    _check(data, where, (*due, tag), given)
    cost = "are never delivered then, as far as they are pending."
    with Producer(meta, timeout_ms=timeout / MS) as producer:
        if where:
            walk = partial(producer.cancel_where, subject, due_from=due.since, due_before=due.before, tag=tag)
            return in_bulk(subject, walk, Wording("cancelled", cost), dry_run=dry_run, yes=yes)
        which = Which(subject, given)
        if dry_run:
            show(which.columns, which.rows(which.get(producer)), form)
            return OK
        if len(which) >= ASKS_FROM:
            confirm(f"{len(which):,} messages of {subject} {cost}", yes)
        told = which.cancel(producer)
        answers = which.get(producer)
    show(which.columns, which.rows(answers), form)
    return _account(told, CancelAnswer, CancelAnswer.CANCELLED)


@click.command(cls=Command)
@click.argument("subject", shell_complete=offer_subjects)
@given_options
@in_option
@at_option
@where_option
@due_options
@tag_option
@click.option("--resume", metavar="WORD", help="With --where: go on with a run that told this when it was interrupted.")
@click.option(
    "--shift",
    type=shift_type,
    metavar="DURATION",
    help="With --where: due so much later, or with a - before it, earlier.",
)
@dry_run_option
@running_option
@timeout_option
@meta_option
@format_option
@yes_option
def reschedule(
    subject: str,
    delay: timedelta | None,
    at_ms: int | None,
    where: bool,
    due: Due,
    tag: str | None,
    shift: timedelta | None,
    resume: str | None,
    dry_run: bool,
    data: str | None,
    timeout: timedelta,
    meta: str,
    form: str,
    yes: bool,
    given: GivenOptions,
) -> int:
    """Move messages that are pending to another instant.

    A message keeps its key, tags, headers and body, and its earlier receipts go on to stand for it; the list has the
    new one. The command asks before it moves more than 1,000 messages, unless you give `--yes`.

    With `--where` it counts the messages first, and then moves each by `--shift`. When it is interrupted, what it has
    said so far is done, and it tells a word for `--resume`: with it the same command goes on, and moves nothing twice.
    Messages that leave or end meanwhile are counted on stderr.

    Exit codes: 0 all of them are moved; 2 some were dispatched before, have ended in another way, or are unknown; 3
    files of a server can't be read, so messages may be missing; 4 some are being handed over at this moment: say it
    again.

    $ delayd reschedule orders.cancel --receipt 3kj... --in 2h
    $ delayd reschedule orders.cancel --key order-42 --at 2027-01-01T09:00:00+01:00
    $ delayd reschedule sms.night --where --from now --to +8h --shift 2h
    """
    _check(data, where, (*due, tag), given)
    if where:
        if delay is not None or at_ms is not None or shift is None:
            raise click.UsageError("with --where say by how much messages move: --shift DURATION")
        length = duration_text(abs(shift) / MS)
        wording = Wording(
            "moved", f"are due {length} {'earlier' if shift < timedelta() else 'later'} then.", goes_on=True
        )
        with Producer(meta, timeout_ms=timeout / MS) as producer:
            move = partial(producer.reschedule_where, subject, shift=shift, tag=tag, resume=resume)
            walk = partial(move, due_from=due.since, due_before=due.before)
            return in_bulk(subject, walk, wording, dry_run=dry_run, yes=yes)
    if shift is not None or resume is not None:
        raise click.UsageError("--shift and --resume go with --where; say --in DURATION or --at INSTANT")
    if (delay is None) == (at_ms is None):
        raise click.UsageError("say once when they are to be due: --in DURATION or --at INSTANT")
    which = Which(subject, given)
    with Producer(meta, timeout_ms=timeout / MS) as producer:
        if dry_run:
            show(which.columns, which.rows(which.get(producer)), form)
            return OK
        if len(which) >= ASKS_FROM:
            confirm(f"{len(which):,} messages of {subject} are due at another instant then.", yes)
        moved = which.reschedule(producer, delay, at_ms)
    show(which.with_names(MOVED_COLUMNS), which.named(_moved_rows(moved)), form)
    return _account(moved.answers, RescheduleAnswer, RescheduleAnswer.MOVED)


def _check(data: str | None, where: bool, window: tuple[object, ...], given: GivenOptions) -> None:
    """Refuse options that do not go together."""
    if data is not None:
        raise click.UsageError(
            "only running servers can decide about messages, so --data is refused: start them, and give --meta"
        )
    if where and given.anything:
        raise click.UsageError("--where takes no receipts and no keys")
    if not where and any(each is not None for each in window):
        raise click.UsageError("--from, --to and --tag go with --where")


_NOT_DONE = {
    "ALREADY_DISPATCHED": "were dispatched before, or have ended in another way",
    "CANCELLED": "are cancelled",
    "UNKNOWN": "are unknown there",
    "IN_FLIGHT": "are being handed over: say it again",
}


def _account(told: NDArray[np.uint8], answers: type[Told], done: Told) -> int:
    """Say what was not done, if anything; the exit code."""
    counts = Counter(map(answers, told.tolist()))
    if counts[done] == len(told):
        return OK
    parts = [f"{counts[each]:,} {_NOT_DONE[each.name]}" for each in answers if each is not done and counts[each]]
    click.echo(
        f"delayd: {counts[done]:,} of {len(told):,} messages are {done.name.lower()}; {', '.join(parts)}", err=True
    )
    return TRY_LATER if {each.name for each in counts} <= {done.name, "IN_FLIGHT"} else USAGE


def _moved_rows(moved: RescheduledBatch) -> Iterator[Sequence[Cell]]:
    columns = (moved.answers, moved.log_ids, moved.sequences, moved.deliver_at_ms, moved.accepted_at_ms)
    for answer, log_id, sequence, due_ms, accepted_ms in zip(*(column.tolist() for column in columns), strict=True):
        told = RescheduleAnswer(answer)
        known = told is not RescheduleAnswer.UNKNOWN
        receipt = Receipt(LogId(log_id), sequence, due_ms, accepted_ms, due_ms <= accepted_ms, False)
        yield (
            sequence or None,
            told.name.lower().replace("_", " "),
            due_ms if known else None,
            receipt.token if known else None,
        )


def _from_files(which: Which, data: str) -> list[Sequence[Cell]]:
    """What the files of servers say of messages."""
    return [_row_of(which.subject, data, None, key) for key in which.keys] or [
        _row_of(which.subject, data, receipt.log_id, receipt.sequence) for receipt in which.receipts
    ]


def _row_of(subject: str, data: str, log_id: int | None, message: int | str) -> Sequence[Cell]:
    try:
        found = trace(RealDisk(), data, subject, message, log_id)
    except BadArgument:
        return (message if isinstance(message, int) else None, "unknown", None, None, None)
    newest = max(found, key=lambda each: each.sequence)
    state, decided_at_ms = _outcome_of(newest)
    return (newest.sequence, state_text(state), newest.deliver_at_ms, decided_at_ms, f"{newest.log_id:016x}")


def _outcome_of(found: Trace) -> tuple[MessageState, int | None]:
    """What became of a traced message: a moved or drained one is what became of the row in its place.

    A drained one of which no file here tells more stays drained.
    """
    state, decided_at_ms = MessageState.PENDING, None
    for step in found.steps:
        told = _STATES.get(step.what)
        if step.what == "drained":
            state, decided_at_ms = MessageState.DRAINED, step.at_ms
        elif step.what in ("moved", "accepted", "filed"):
            state, decided_at_ms = MessageState.PENDING, None
        elif told is not None:
            return told, step.at_ms
    return state, decided_at_ms


_STATES = {state_text(state): state for state in MessageState} | {"claimed": MessageState.DISPATCHED}


PENDING_COLUMNS = columns("deliver_at_ms:instant key tags size:size receipt:name")
BODY = Column("body")


@click.command(cls=Command)
@click.argument("subject", shell_complete=offer_subjects)
@due_options
@click.option("--key", metavar="KEY", help="The message with this key.")
@click.option("--tag", metavar="TAG", help="Messages with this tag.")
@click.option("--body", "with_body", is_flag=True, help="Show bodies, too.")
@meta_option
@shown_options
def pending(subject: str, due: Due, key: str | None, tag: str | None, with_body: bool, meta: str, shown: Shown) -> int:
    """List the pending messages of a subject, without the files of a server.

    They come from one delay server after another, hour by hour of the instant at which they are due. `receipt` is what
    `delayd get`, `cancel` and `reschedule` take. `delayd schedule find` searches bodies and headers, in the files.

    Exit codes: 3 files of a delay server can't be read, so messages may be missing; everything else is shown.

    $ delayd pending orders.cancel --to +1h
    $ delayd pending orders.cancel --tag vip --body
    $ delayd pending orders.cancel --key order-42 --body --format json
    """
    with Producer(meta) as producer:
        pages = producer.pending(
            subject, due_from=due.since, due_before=due.before, key=key, tag=tag, contents=with_body
        )
        rows = (_pending_row(message, shown.form) for page in pages for message in page)
        shown.show((*PENDING_COLUMNS, BODY) if with_body else PENDING_COLUMNS, rows)
        if pages.in_flight:
            click.echo(
                f"delayd: {counted(pages.in_flight, 'message is|messages are')} being handed over at this moment",
                err=True,
            )
        return told_unread(pages.unread)


def _pending_row(message: PendingMessage, form: str) -> tuple[Cell, ...]:
    receipt = message.receipt
    told = (receipt.deliver_at_ms, message.key, " ".join(message.tags) or None, message.size, receipt.token)
    return told if message.body is None else (*told, shown_body(message.body, "text", form))
