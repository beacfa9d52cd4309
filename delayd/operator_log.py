"""Operator log: the decisions of operators at a server, kept in its state together with their effects.

Invariant: an entry is in the same transaction as its effect, so neither exists without the other. The oldest entries
are removed when there are more than ENTRIES_MAX.
"""

import logging
from typing import NamedTuple

import msgpack

from delayd.state import State

PREFIX = b"operator/"
ENTRIES_MAX = 1_000

log = logging.getLogger(__name__)


class Pairs(NamedTuple):
    """The puts and removes of a transaction."""

    puts: list[tuple[bytes, bytes]]
    removes: list[bytes]


class OperatorLog:
    """Numbers the entries of one server."""

    def __init__(self, state: State) -> None:
        self._last = max((int.from_bytes(key[len(PREFIX) :], "big") for key, _ in state.scan(PREFIX, [])), default=0)

    def entry(self, at_ms: int, what: str) -> Pairs:
        """Note a decision; it counts when the transaction that has these pairs is durable."""
        self._last += 1
        log.warning("operator what=%r", what)
        oldest = self._last - ENTRIES_MAX
        return Pairs(
            [(_key(self._last), msgpack.packb({"at_ms": at_ms, "what": what}))], [_key(oldest)] if oldest > 0 else []
        )


def _key(number: int) -> bytes:
    return PREFIX + number.to_bytes(8, "big")
