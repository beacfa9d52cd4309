"""A lie: what is done to a directory, and what must be said of it.

Invariant: a lie is one thing that a person with write access and delayd's own writers could do to the books. One told
*thoroughly* also makes the seals anew, and the digest that the checkpoint notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from delayd.log.hour import SEALED
from tests.tamper.liar import Liar

HOUR_MS = 3_600_000
Tell = Callable[[Liar], None]
Told = Iterator[tuple[str, Tell, str]]
"""What a lie is called, how it is told, and the names that are right for it."""


@dataclass(frozen=True)
class Lie:
    """What is done, and what is said of it: any of these names is right."""

    name: str
    tell: Tell
    names: frozenset[str]
    kind: str


def hour_that_is(liar: Liar, which: str) -> int:
    """An hour of the honest directory, by what became of it."""
    rows = liar.hours
    sealed = [int(row["hour"]) for row in rows if row["flags"] == SEALED]
    pending = [int(row["hour"]) for row in rows if not row["flags"] & SEALED]
    return {"sealed": sealed[0], "last sealed": sealed[-1], "open": sealed[-1] + 1, "pending": pending[-1]}[which]
