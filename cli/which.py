"""Which messages a command means, by receipts or by keys: its options, and what servers or files say of them.

Invariant: each message is named once, by one receipt or by one key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, NamedTuple, TextIO, TypeVar

import click
import numpy as np
from numpy.typing import NDArray

from delayd.client.sending.producer import Producer
from delayd.client.sending.receipt import Accepted, BatchReceipt, Receipt, ReceiptPart
from delayd.client.sending.rescheduled import RescheduledBatch
from delayd.errors import BadArgument
from delayd.wire.ending import AnswerRows, MessageState

from .table import Cell, Column, Kind
from .times import duration

ASKS_FROM = 1_001  # So many messages and more are not ended or moved without a question.
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
KEY = Column("key")
MS = timedelta(milliseconds=1)

Command = TypeVar("Command", bound=Callable[..., Any])

timeout_option = click.option("--timeout", type=duration, default="30s", show_default=True, help="Give up after this.")
_OPTIONS = (
    click.option(
        "--receipt",
        "tokens",
        multiple=True,
        metavar="RECEIPT",
        help="As `delayd send` told it; may be given again.",
    ),
    click.option(
        "--receipts", "receipt_file", type=click.File(), metavar="FILE", help="One receipt a line; - is stdin."
    ),
    click.option(
        "--key", "keys", multiple=True, metavar="KEY", help="The newest message with this key; may be given again."
    ),
    click.option("--keys", "key_file", type=click.File(), metavar="FILE", help="One key a line; - is stdin."),
)


class Given(NamedTuple):
    """What was given of the options."""

    tokens: Sequence[str]
    receipt_file: TextIO | None
    keys: Sequence[str]
    key_file: TextIO | None

    @property
    def anything(self) -> bool:
        """Whether any of them was."""
        return any(each is not None and each != () for each in self)


def which_options(command: Command) -> Command:
    """Add the options that say which messages are meant; `given_of` takes them out of a command's arguments."""
    return reduce(lambda made, option: option(made), reversed(_OPTIONS), command)


class Which:
    """The messages of a subject that a command means."""

    def __init__(self, subject: str, given: Given) -> None:
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
            raise BadArgument(f"{twice:,} keys are given twice; name each message once")

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
        return self.with_names(COLUMNS)

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
