"""``delayd send``: one message, or one for each line, that becomes due later.

Invariant: what it says is kept, is kept: each sentence about a message rests on a server's receipt. After a second of
silence it says for which server it waits, as asked at that moment; the work itself is not touched.
"""

import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, BinaryIO

import click

from delayd.batch.names import MESSAGE_BYTES_MAX
from delayd.client.asking import ask
from delayd.client.asking.looking import silence
from delayd.client.producer import Producer
from delayd.client.sending.receipts import BatchFailed, BatchReceipt, Receipt
from delayd.client.sending.send_options import OnConflict
from delayd.errors import DelaydError, MessageTooLarge, NoDelayServer, OutcomeUnknown, RetryLater, ServerUnavailable
from delayd.hours import duration_text, instant_text
from delayd.machine.operating import counted

from .listing import progress
from .operate import run
from .shared_options import (
    Command,
    at_option,
    in_option,
    meta_option,
    offer_subjects,
    text_format_option,
    timeout_option,
)
from .times import duration, instant

ROWS = 10_000  # One batch of lines has so many: large enough to be fast, and the progress still moves.
BYTES = 8 << 20  # One batch of lines has no more: half of what a batch can hold.
READ_BYTES = 1 << 20
STDIN = "-"

_MS = timedelta(milliseconds=1)
_EPOCH = datetime.fromtimestamp(0, UTC)


@click.command(cls=Command)
@click.argument("subject", shell_complete=offer_subjects)
@click.argument("body", required=False)
@in_option
@at_option
@click.option(
    "--spread",
    type=duration,
    metavar="DURATION",
    help="Or up to so much later, at the least loaded instant, which the server chooses.",
)
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="The body is in this file; - is stdin.",
)
@click.option("--lines", is_flag=True, help="Each line of FILE, or of stdin, is one message.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Sent along; may be given again.")
@click.option(
    "--key", metavar="KEY", help="A name for the message: no two pending messages of SUBJECT have the same one."
)
@click.option(
    "--on-conflict",
    type=click.Choice(["reject", "keep", "replace"]),
    default="reject",
    show_default=True,
    help="When a pending message has KEY: send nothing, let that message stand for this one, or replace it.",
)
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="By which messages can be found; may be given again.")
@click.option(
    "--ordering-key", metavar="KEY", help="Groups that keep an order get the messages of one KEY one after the other."
)
@click.option("--ttl", type=duration, metavar="DURATION", help="So long after it is due it is not delivered any more.")
@click.option(
    "--expires-at",
    "expires_at_ms",
    type=instant,
    metavar="INSTANT",
    help="Or: from then on it is not delivered any more. ISO 8601 with its offset.",
)
@timeout_option
@meta_option
@text_format_option
def send(
    subject: str,
    body: str | None,
    delay: timedelta | None,
    at_ms: int | None,
    spread: timedelta | None,
    file: str | None,
    lines: bool,
    headers: Sequence[str],
    key: str | None,
    on_conflict: OnConflict,
    tags: Sequence[str],
    ordering_key: str | None,
    ttl: timedelta | None,
    expires_at_ms: int | None,
    timeout: timedelta,
    meta: str,
    form: str,
) -> None:
    """Send messages that become due later.

    The command ends when a delay server has the messages safe on disk. From then on that server delivers each of them
    once and never early.

    Exit codes: 2 an argument is refused, or a pending message has the key; 4 no server took the message or nobody knows
    whether one did; the sentence says which.

    $ delayd send orders.cancel "order 42" --in 30m
    $ delayd send orders.cancel "order 42" --in 30m --key order-42 --on-conflict replace --tag eu
    $ delayd send orders.cancel --file order.json --at 2027-01-01T09:00:00+01:00 --header trace=a1
    $ seq 1000000 | delayd send numbers --lines --in 10s
    $ delayd send reports.night --file list.txt --lines --at 2027-01-01T22:00:00+01:00 --spread 8h
    """
    if (delay is None) == (at_ms is None):
        raise click.UsageError("say once when it is due: --in DURATION or --at INSTANT")
    if body is not None and (file is not None or lines):
        raise click.UsageError("give the body once: as BODY, or with --file or --lines")
    if body is None and file is None and not lines:
        raise click.UsageError("there is no body: give BODY, --file FILE or --lines")
    if key is not None and lines:
        raise click.UsageError("--key names one message, and --lines sends many; a program gives each its key")
    if key is None and on_conflict != "reject":
        raise click.UsageError("--on-conflict goes with --key")
    if ttl is not None and expires_at_ms is not None:
        raise click.UsageError("say once when it expires: --ttl DURATION or --expires-at INSTANT")
    expires_at = None if expires_at_ms is None else _EPOCH + expires_at_ms * _MS
    with Producer(meta, timeout_ms=timeout / _MS) as producer:
        # All that one message and many have in common.
        common: dict[str, Any] = {"delay": delay, "deliver_at_ms": at_ms, "spread": spread, "tags": tags or None}
        common |= {"headers": read_headers(headers) or None, "ttl": ttl, "expires_at": expires_at}

        def send_one(body: bytes) -> Receipt:
            with told_whom(meta, duration_text(timeout / _MS)):
                named = partial(producer.send, key=key, on_conflict=on_conflict, ordering_key=ordering_key)
                return named(subject, body, **common)

        def send_many(bodies: list[bytes]) -> BatchReceipt:
            with told_whom(meta, duration_text(timeout / _MS)):
                ordering_keys = None if ordering_key is None else [ordering_key] * len(bodies)
                return producer.send_batch(subject, bodies, **common, ordering_keys=ordering_keys)

        if lines:
            with _open(file or STDIN) as source:
                _send_lines(send_many, subject, source, form)
        else:
            _send_one(partial(send_one, one_body(body, file)), subject, form)


def line_batches(source: BinaryIO) -> Iterator[list[bytes]]:
    """The lines of a source, without their line feeds, some at a time."""
    bodies: list[bytes] = []
    size = number = 0
    # What has no line feeds, such as a disk image, must not be read as one line.
    while line := source.readline(MESSAGE_BYTES_MAX + 2):
        number += 1
        body = line[:-1] if line.endswith(b"\n") else line
        if len(body) > MESSAGE_BYTES_MAX:
            raise MessageTooLarge(
                f"line {number} is over the limit of {MESSAGE_BYTES_MAX}; send a reference to it instead"
            )
        bodies.append(body)
        size += len(body)
        if len(bodies) == ROWS or size >= BYTES:
            yield bodies
            bodies, size = [], 0
    if bodies:
        yield bodies


def _send_one(send: Callable[[], Receipt], subject: str, form: str) -> None:
    try:
        receipt = send()
    except RetryLater as error:
        # Refused by name, or never connected (rule I3): a script may send it again without fear of a second one.
        if isinstance(error, NoDelayServer):
            raise RetryLater(f"{error.message}; see `delayd servers`", retry_after_ms=error.retry_after_ms) from error
        kept = "nothing was sent" if isinstance(error, ServerUnavailable) else "nothing is kept"
        raise RetryLater(f"{kept}: {error.message}", retry_after_ms=error.retry_after_ms) from error
    if form == "json":
        click.echo(json.dumps(_as_json(subject, receipt)))
        return
    place = f"sequence {receipt.sequence} of log {receipt.log_id:016x}"
    due = instant_text(receipt.deliver_at_ms)
    if receipt.kept:
        click.echo(f"not sent: {place}, due {due}, has the key and stands for it")
    else:
        left = "already, so it leaves at once" if receipt.was_due else f"in {_left_text(receipt)}"
        known = "; an earlier try had brought it" if receipt.duplicate else ""
        replaced = "" if receipt.replaced is None else f"; it replaced sequence {receipt.replaced}"
        click.echo(f"kept as {place}, due {due}, {left}{known}{replaced}")
    click.echo(f"receipt {receipt.token}")


def _send_lines(send: Callable[[list[bytes]], BatchReceipt], subject: str, source: BinaryIO, form: str) -> None:
    kept, first_ms, last_ms = 0, None, None
    try:
        with progress("messages", _line_count(source)) as advance:
            for bodies in line_batches(source):
                receipt = send(bodies)
                due_ms = receipt.deliver_at_ms
                first_ms = int(due_ms.min()) if first_ms is None else min(first_ms, int(due_ms.min()))
                last_ms = int(due_ms.max()) if last_ms is None else max(last_ms, int(due_ms.max()))
                kept += len(receipt)
                advance(len(receipt))
    except DelaydError as error:
        _say_what_is_kept(kept, error)
        raise
    if form == "json":
        click.echo(json.dumps({"subject": subject, "kept": kept, "first_due_ms": first_ms, "last_due_ms": last_ms}))
    elif first_ms is None or last_ms is None:
        click.echo("there was no line, so nothing was sent")
    else:
        until = "" if first_ms == last_ms else f" to {instant_text(last_ms)}"
        click.echo(f"kept {counted(kept, 'message|messages')}, due {instant_text(first_ms)}{until}")


def _say_what_is_kept(kept: int, error: DelaydError) -> None:
    partly, unknown = 0, ""
    if isinstance(error, BatchFailed):
        partly = len(error.receipt)
        doubted = sum(len(failure.rows) for failure in error.failures if isinstance(failure.error, OutcomeUnknown))
        unknown = f", {doubted:,} more of it may be" if doubted else ""
    elif isinstance(error, OutcomeUnknown):
        unknown = ", all of it may be"
    click.echo(
        f"delayd: the first {kept:,} lines are kept, and {partly:,} of the batch that begins at line {kept + 1:,}"
        f"{unknown}",
        err=True,
    )


def _line_count(source: BinaryIO) -> int | None:
    # Only a file has an end and can be read twice, and only a person waits for the bar that this is for.
    if not sys.stderr.isatty() or not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
        return None
    count, last = 0, b""
    while chunk := source.read(READ_BYTES):
        count += chunk.count(b"\n")
        last = chunk
    source.seek(0)
    return count + (not last.endswith(b"\n") if last else 0)


def one_body(body: str | None, file: str | None) -> bytes:
    """The body of one message: what was typed, or what is in a file. Raises MessageTooLarge."""
    if body is not None:
        # Bytes of the command line that are no text come back as they were given.
        return os.fsencode(body)
    with _open(file or STDIN) as source:
        data = source.read(MESSAGE_BYTES_MAX + 1)
    if len(data) > MESSAGE_BYTES_MAX:
        where = "stdin" if file in (None, STDIN) else file
        raise MessageTooLarge(f"{where} is over the limit of {MESSAGE_BYTES_MAX}; send a reference to it instead")
    return data


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    if path == STDIN:
        yield sys.stdin.buffer
        return
    with open(path, "rb") as source:
        yield source


def read_headers(given: Sequence[str]) -> dict[str, str | bytes]:
    """The headers of options that say NAME=VALUE. Raises UsageError."""
    headers: dict[str, str | bytes] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--header {item!r} is no NAME=VALUE")
        headers[name] = value
    return headers


def _left_text(receipt: Receipt) -> str:
    return duration_text(receipt.deliver_at_ms - receipt.accepted_at_ms)


def _as_json(subject: str, receipt: Receipt) -> dict[str, str | int | bool | None]:
    return {
        "subject": subject,
        "log_id": f"{receipt.log_id:016x}",
        "sequence": receipt.sequence,
        "deliver_at_ms": receipt.deliver_at_ms,
        "accepted_at_ms": receipt.accepted_at_ms,
        "was_due": receipt.was_due,
        "duplicate": receipt.duplicate,
        "kept": receipt.kept,
        "replaced": receipt.replaced,
        "receipt": receipt.token,
    }


TOLD_AFTER_S = 1.0  # A send takes milliseconds: by then somebody wonders.


@contextmanager
def told_whom(meta: str, given_up: str) -> Iterator[None]:
    """Say on stderr for whom the block waits if it does so for more than a second; ``given_up``: when it stops."""
    ended = threading.Event()

    def tell() -> None:
        if ended.wait(TOLD_AFTER_S):
            return
        whom = _whom(meta)
        if not ended.is_set():
            click.echo(f"delayd: waiting for {whom}; it is given up after {given_up}", err=True)

    # A daemon, so that the end of the program never waits for an answer that nobody reads any more.
    threading.Thread(target=tell, name="delayd-waiting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _whom(meta: str) -> str:
    try:
        servers = run(lambda: _delay_servers(meta))
    except DelaydError as error:
        return f"the meta server at {ask.endpoint_of(meta)}: {error.message}"
    if not servers:
        return f"a delay server: the meta server at {ask.endpoint_of(meta)} knows none; start one with `delayd delay`"
    places = ", ".join(server.address for server in servers)
    if not any(server.alive for server in servers):
        return f"the delay server at {places}: {silence(servers[0])}"
    return f"the delay server at {places}, which is alive and has not answered; see `delayd status`"


async def _delay_servers(meta: str) -> list[ask.Known]:
    async with ask.meta(meta) as connection:
        return await ask.known_servers(connection, "delay")
