"""Rows on their way to a delay server, and who is told what became of them.

Invariant: each row ends exactly once, accepted or failed, however often it was regrouped on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

from delayd.batch import ProducerPart
from delayd.client.instants import ServerClock
from delayd.client.sending.receipt import Accepted
from delayd.errors import DelaydError

Outcome = TypeVar("Outcome", contravariant=True)


class Waiter(Protocol[Outcome]):
    """Who waits for one outcome: futures of asyncio and of threads alike."""

    def done(self) -> bool:
        """Nobody waits any more."""

    def set_result(self, outcome: Outcome, /) -> None:
        """It is accepted."""

    def set_exception(self, error: DelaydError, /) -> None:
        """It failed."""


class UnsentRows(Protocol):
    """What a batch is made of, and who is told what became of it."""

    @property
    def count(self) -> int:
        """How many."""

    @property
    def held_bytes(self) -> int:
        """What they hold in memory."""

    def encode(self, part: ProducerPart, clock: ServerClock) -> Sequence[bytes]:
        """The batch for one server, whose clock resolves `delay=`: pieces that follow one another."""

    def accept(self, accepted: Accepted) -> None:
        """All rows are kept; only after `encode`, whose instants the receipts repeat."""

    def fail(self, error: DelaydError) -> None:
        """All rows failed."""

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """The named rows, and the others; neither side is empty."""
