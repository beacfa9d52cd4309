"""``delayd get`` and ``delayd cancel``: what became of messages, and an end to those that are pending.

Invariant: a message is called cancelled only when its server has said so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, TextIO

import click
import numpy as np

from delayd.client.instants import utc
from delayd.client.sending.producer import Producer
from delayd.client.sending.receipt import Accepted, BatchReceipt, Receipt, ReceiptPart
from delayd.client.sending.walker import Walked
from delayd.errors import DelaydError
from delayd.wire.ending import AnswerRows, CancelAnswer, MessageState

from .exits import NOT_BALANCED, OK, TRY_LATER, USAGE
from .listing import show
from .offers import offer_subjects
from .options import confirm, examples, format_option, from_option, meta_option, to_option, yes_option
from .progress import progress
from .table import Cell, Column, Kind
from .times import duration

ASKS_FROM = 1_001  # So many messages and more are not cancelled without a question.
COLUMNS = (
    Column("sequence", Kind.NAME),
    Column("state"),
    Column("deliver_at_ms", Kind.INSTANT),
    Column("decided_at_ms", Kind.INSTANT),
    Column("attempt", Kind.NUMBER, spare=True),
    Column("target_log_id", spare=True),
    Column("target_offset", Kind.NAME, spare=True),
    Column("other", Kind.NAME, spare=True),
    Column("log_id", spare=True),
)
_MS = timedelta(milliseconds=1)

receipt_option = click.option(
    "--receipt",
    "tokens",
    multiple=True,
    metavar="RECEIPT",
    help="As `delayd send` told it; may be given again.",
)
receipts_option = click.option(
    "--receipts", "source", type=click.File(), metavar="FILE", help="One receipt a line; - is stdin."
)
timeout_option = click.option("--timeout", type=duration, default="30s", show_default=True, help="Give up after this.")


@click.command(
    epilog=examples(
        "delayd get orders.cancel --receipt 3kj...",
        "delayd get orders.cancel --receipts receipts.txt --format json",
    )
)
@click.argument("subject", shell_complete=offer_subjects)
@receipt_option
@receipts_option
@timeout_option
@meta_option
@format_option
def get(subject: str, tokens: Sequence[str], source: TextIO | None, timeout: timedelta, meta: str, form: str) -> int:
    """Show what became of messages.

    States: `pending`; `in flight` (it is being handed over); `dispatched` (a realtime server has it), `cancelled`,
    `moved`, `replaced`, `rejected`, `kept` (another message took its place: `other`), `dead`, `expired`, `in doubt`;
    and `unknown` (no such message is kept). A message is known as long as the logs of its hour are kept.

    Exit code 2: a message is unknown.
    """
    receipt = _receipt(tokens, source)
    with Producer(meta, timeout_ms=timeout / _MS) as producer:
        answers = producer.get_batch(subject, receipt=receipt)
    show(COLUMNS, _rows(receipt, answers), form)
    return USAGE if (answers["state"] == MessageState.UNKNOWN).any() else OK


@click.command(
    epilog=examples(
        "delayd cancel orders.cancel --receipt 3kj...",
        "delayd cancel orders.cancel --receipts receipts.txt --dry-run",
        "delayd cancel orders.cancel --where --from now --to +2h",
    )
)
@click.argument("subject", shell_complete=offer_subjects)
@receipt_option
@receipts_option
@click.option(
    "--where", is_flag=True, help="All pending messages of SUBJECT that are due from --from on and before --to."
)
@from_option
@to_option
@click.option("--dry-run", is_flag=True, help="Only show, or with --where count, the messages, and change nothing.")
@timeout_option
@meta_option
@format_option
@yes_option
def cancel(
    subject: str,
    tokens: Sequence[str],
    source: TextIO | None,
    where: bool,
    from_ms: int | None,
    to_ms: int | None,
    dry_run: bool,
    timeout: timedelta,
    meta: str,
    form: str,
    yes: bool,
) -> int:
    """End messages that are pending, so that they are never delivered.

    The list says what became of each message. The command asks before it ends more than 1,000 messages, unless you give
    `--yes`. To cancel a message twice does no harm.

    With `--where` it counts the messages first, and then says how many it has ended. When it is interrupted, what it
    has said so far is done; say it again to go on. Messages that leave or end meanwhile are counted on stderr.

    Exit codes: 0 all of them are cancelled; 2 some were dispatched before, have ended in another way, or are unknown; 3
    files of a server can't be read, so messages may be missing; 4 some are being handed over at this moment: say it
    again.
    """
    if where:
        if tokens or source is not None:
            raise click.UsageError("--where takes no receipts")
        return _cancel_where(meta, timeout, subject, Due(_instant(from_ms), _instant(to_ms)), dry_run=dry_run, yes=yes)
    if from_ms is not None or to_ms is not None:
        raise click.UsageError("--from and --to go with --where")
    receipt = _receipt(tokens, source)
    with Producer(meta, timeout_ms=timeout / _MS) as producer:
        if dry_run:
            show(COLUMNS, _rows(receipt, producer.get_batch(subject, receipt=receipt)), form)
            return OK
        if len(receipt) >= ASKS_FROM:
            confirm(
                f"{len(receipt):,} messages of {subject} are never delivered then, as far as they are pending.", yes
            )
        told = producer.cancel_batch(subject, receipt=receipt)
        answers = producer.get_batch(subject, receipt=receipt)
    show(COLUMNS, _rows(receipt, answers), form)
    counts = Counter(map(CancelAnswer, told.tolist()))
    if counts[CancelAnswer.CANCELLED] == len(receipt):
        return OK
    parts = [f"{counts[answer]:,} {what}" for answer, what in _NOT_CANCELLED.items() if counts[answer]]
    click.echo(
        f"delayd: {counts[CancelAnswer.CANCELLED]:,} of {len(receipt):,} messages are cancelled; {', '.join(parts)}",
        err=True,
    )
    return TRY_LATER if set(counts) <= {CancelAnswer.CANCELLED, CancelAnswer.IN_FLIGHT} else USAGE


class Due(NamedTuple):
    """A window of due instants, open where it has None."""

    since: datetime | None
    before: datetime | None


def _instant(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else utc(at_ms)


def _cancel_where(meta: str, timeout: timedelta, subject: str, due: Due, *, dry_run: bool, yes: bool) -> int:
    with Producer(meta, timeout_ms=timeout / _MS) as producer:
        walked = producer.cancel_where(subject, due_from=due.since, due_before=due.before)
        if dry_run or not walked.found:
            click.echo(f"{walked.found:,} messages of {subject} are pending there")
            return _code_of(walked)
        if walked.found >= ASKS_FROM:
            confirm(
                f"{walked.found:,} messages of {subject} are never delivered then, as far as they are pending.", yes
            )
        with progress("messages", walked.found) as advance:
            done = 0

            def told(so_far: Walked) -> None:
                nonlocal done
                advance(so_far.done - done)
                done = so_far.done

            try:
                walked = producer.cancel_where(
                    subject, due_from=due.since, due_before=due.before, dry_run=False, progress=told
                )
            except (KeyboardInterrupt, DelaydError):
                click.echo(f"delayd: {done:,} messages are cancelled so far", err=True)
                raise
    click.echo(f"cancelled {walked.done:,} messages of {subject}")
    return _code_of(walked)


def _code_of(walked: Walked) -> int:
    if walked.ended:
        click.echo(f"delayd: {walked.ended:,} were handed over or ended meanwhile", err=True)
    if walked.in_flight:
        click.echo(f"delayd: {walked.in_flight:,} are being handed over: say it again", err=True)
    if walked.unread:
        click.echo(
            "delayd: files of hours could not be read, so messages may be missing; see `delayd status`", err=True
        )
        return NOT_BALANCED
    return TRY_LATER if walked.in_flight else OK


_NOT_CANCELLED = {
    CancelAnswer.ALREADY_DISPATCHED: "were dispatched before, or have ended in another way",
    CancelAnswer.UNKNOWN: "are unknown there",
    CancelAnswer.IN_FLIGHT: "are being handed over: say it again",
}


def _receipt(tokens: Sequence[str], source: TextIO | None) -> BatchReceipt:
    """The receipts that were given, as one."""
    given = [*tokens, *(line for line in source or () if line.strip())]
    if not given:
        raise click.UsageError("say which messages: --receipt RECEIPT or --receipts FILE")
    parts = []
    for row, receipt in enumerate(map(Receipt.of_token, given)):
        accepted = Accepted(receipt.log_id, receipt.sequence, 1, receipt.accepted_at_ms, False)
        parts.append(ReceiptPart(np.array([row]), np.array([receipt.deliver_at_ms]), accepted))
    return BatchReceipt(parts)


def _rows(receipt: BatchReceipt, answers: AnswerRows) -> Iterator[Sequence[Cell]]:
    for log_id, sequence, answer in zip(receipt.log_ids.tolist(), receipt.sequences.tolist(), answers, strict=True):
        handed_over = int(answer["target_log_id"])
        yield (
            sequence,
            MessageState(int(answer["state"])).name.lower().replace("_", " "),
            int(answer["deliver_at_ms"]),
            int(answer["decided_at_ms"]) or None,
            int(answer["attempt"]),
            f"{handed_over:016x}" if handed_over else None,
            int(answer["target_offset"]) if handed_over else None,
            int(answer["other"]) or None,
            f"{log_id:016x}",
        )
