"""Unsent: rows on their way to a delay server, and the callers that wait for their outcome.

Invariant: each row ends exactly once, accepted or failed, however often it was regrouped on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self, TypeVar

from delayd.batch import ProducerPart
from delayd.client.instants import ServerClock
from delayd.client.sending.receipt import Accepted
from delayd.errors import DelaydError

Outcome = TypeVar("Outcome", contravariant=True)


class Waiter(Protocol[Outcome]):
    """A caller that waits for one outcome: a future of asyncio or of a thread."""

    def done(self) -> bool:
        """Whether nobody waits any more."""

    def set_result(self, outcome: Outcome, /) -> None:
        """Tell that it is accepted."""

    def set_exception(self, error: DelaydError, /) -> None:
        """Tell that it failed."""


class KeyedRows(NamedTuple):
    """Rows that have a key, with their subjects and keys."""

    rows: Sequence[int]
    subjects: Sequence[bytes]
    keys: Sequence[bytes]


NO_KEYED_ROWS = KeyedRows((), (), ())


class UnsentRows(Protocol):
    """The rows of a batch, with the callers that wait for them."""

    @property
    def count(self) -> int:
        """How many rows."""

    @property
    def held_bytes(self) -> int:
        """How many bytes of memory they hold."""

    def encode(self, part: ProducerPart, clock: ServerClock) -> Sequence[bytes]:
        """Encode the batch for one server, whose clock resolves `delay=`, in pieces that follow one another."""

    def accept(self, accepted: Accepted) -> None:
        """Note that all rows are kept; only after `encode`, because the receipts repeat its instants."""

    def fail(self, error: DelaydError) -> None:
        """Note that all rows failed."""

    def keyed_rows(self) -> KeyedRows:
        """The rows that have a key, by rising number."""

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """Split into the named rows and the others; neither side may be empty."""
