"""What the verdicts of keyed sends must have been, by one dict of subjects and keys, once a life is over.

Invariant: it relies on the order of sequences, on what targets hold and on what callers were told; on nothing of the
server's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from delayd.log.dispatch import Reason
from delayd.log.ended import decode_ended
from tests.worlds.outside import Outside

REJECT, KEEP, REPLACE = 0, 1, 2
VERDICTS = {
    REJECT: {Reason.REJECTED},
    KEEP: {Reason.KEPT},
    REPLACE: {Reason.REPLACED, Reason.IN_FLIGHT},
}
"""What a row may be told that meets another one."""


class _Keys(NamedTuple):
    keys: Sequence[bytes]
    policies: Sequence[int]
    cancelled: frozenset[int]  # Rows that were known to be cancelled when the batch was first sent.


class KeyBooks:
    """Kept over all lives of a delay server."""

    def __init__(self) -> None:
        self._sent: dict[int, _Keys] = {}
        self._delivered: dict[int, frozenset[int]] = {}  # By batch: what targets held when it was seen to be accepted.

    def sent(self, number: int, keys: Sequence[bytes], policies: Sequence[int], outside: Outside) -> None:
        """A batch with keys is on its way."""
        self._sent[number] = _Keys(keys, policies, frozenset(outside.cancelled))

    def look(self, outside: Outside) -> None:
        """Note which batches are accepted by now."""
        new = self._sent.keys() & outside.accepted.keys() - self._delivered.keys()
        if new:
            delivered = _delivered(outside)
            self._delivered.update(dict.fromkeys(new, delivered))

    def check(self, outside: Outside, asked: set[int]) -> None:
        """Go through all rows with keys in the order in which they were decided; ``asked``: rows that somebody wanted
        to cancel.
        """
        self.look(outside)
        at_end = _delivered(outside)
        holders: dict[tuple[bytes, bytes], int] = {}
        numbers = sorted(self._delivered, key=lambda number: outside.accepted[number][1].base_sequence)
        for number in numbers:
            sent, accepted = outside.accepted[number]
            keys, policies, cancelled = self._sent[number]
            told = _verdicts(accepted.base_sequence, accepted.decided)
            rows = zip(sent.wanted, keys, policies, strict=True)
            for sequence, ((_, subject, _), key, policy) in enumerate(rows, accepted.base_sequence):
                reason, other = told.pop(sequence, (None, 0))
                holder = holders.get((subject, key)) if key else None
                what = f"row {sequence} with key {key!r} was told {reason} of row {other}, the key is that of {holder}"
                chain = _moved(outside, holder)
                if reason is None:
                    ended = not chain or chain & (self._delivered[number] | asked)
                    assert ended, f"{what}, which was pending"
                else:
                    assert reason in VERDICTS[policy], f"{what}, and asked for {policy}"
                    assert other in chain, what
                    assert other not in cancelled, f"{what}, which was cancelled before"
                    gone = other if reason is Reason.REPLACED else sequence
                    assert gone not in at_end, f"{what}, and row {gone} was delivered"
                if key and reason in (None, Reason.REPLACED):
                    holders[subject, key] = sequence
            assert not told, f"batch {number} was told of rows that are not its own: {sorted(told)}"


def _verdicts(base_sequence: int, decided: bytes) -> dict[int, tuple[Reason, int]]:
    """By row of the batch: why it met another row, and which."""
    found: dict[int, tuple[Reason, int]] = {}
    for row in decode_ended(decided):
        reason, sequence, other = Reason(row["reason"]), int(row["sequence"]), int(row["other"])
        mine, met = (other, sequence) if reason is Reason.REPLACED else (sequence, other)
        assert mine not in found, f"row {mine} of the batch at {base_sequence} was told two things"
        found[mine] = reason, met
    return found


def _delivered(outside: Outside) -> frozenset[int]:
    kept = [kept for target in outside.targets.values() for kept in target.log]
    return frozenset(sequence for each in kept for sequence in each.sequences)


def _moved(outside: Outside, sequence: int | None) -> set[int]:
    """A row, and those that took its place when it was moved."""
    found: set[int] = set()
    while sequence is not None:
        found.add(sequence)
        sequence = outside.moved_rows[sequence][0] if sequence in outside.moved_rows else None
    return found
