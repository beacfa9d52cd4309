"""What the verdicts of keyed sends must have been, by one dict of subjects and keys, once a life is over.

Invariant: it relies on the order of sequences, on what targets hold and on what callers were told; on nothing of the
server's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from delayd.hours import hour_of_ms
from delayd.log.hour import decode_ended
from delayd.outcome import Reason
from tests.worlds.outside import Outside

REJECT, KEEP, REPLACE, RECORD = 0, 1, 2, 3
RECORDS = b"%once"  # The subject of records of sends (docs/once.md).
Name = tuple[bytes, bytes]
"""A subject and a key."""
NO_TAKER = (0, 0, 0)
NEVER_MS = 1 << 62
VERDICTS = {
    REJECT: {Reason.REJECTED},
    KEEP: {Reason.KEPT, Reason.IN_FLIGHT},
    REPLACE: {Reason.REPLACED, Reason.IN_FLIGHT},
    RECORD: {Reason.KEPT, Reason.IN_FLIGHT},
}
"""What a row may be told that meets another one."""
IN_DOUBT = {Reason.REJECTED, Reason.IN_FLIGHT}
"""What it may be told when nobody can read whether the other one has ended."""


def _no_hours() -> AbstractSet[int]:
    return frozenset()


class _Keys(NamedTuple):
    keys: Sequence[bytes]
    policies: Sequence[int]
    cancelled: frozenset[int]  # Rows that were known to be cancelled when the batch was first sent.


class KeyBooks:
    """Kept over all lives of a delay server."""

    def __init__(self, hidden: Callable[[], AbstractSet[int]] = _no_hours) -> None:
        """``hidden``: the hours whose files have been damaged so far; their rows may count as being in flight."""
        self._hidden_now = hidden
        self._hidden: dict[int, frozenset[int]] = {}  # By batch: those hours when it was seen to be accepted.
        self._sent: dict[int, _Keys] = {}
        self._delivered: dict[int, frozenset[int]] = {}  # By batch: what targets held when it was seen to be accepted.
        # By name, in their order, the rows that took it: sequence, due instant, and the instant of the filing hour.
        self._takers: dict[Name, list[tuple[int, int, int]]] = {}

    def sent(self, number: int, keys: Sequence[bytes], policies: Sequence[int], outside: Outside) -> None:
        """A batch with keys is on its way."""
        self._sent[number] = _Keys(keys, policies, frozenset(outside.cancelled))

    def look(self, outside: Outside) -> None:
        """Note which batches are accepted by now."""
        new = self._new(outside)
        if new:
            delivered = _delivered(outside)
            self._delivered.update(dict.fromkeys(new, delivered))
            self._hidden.update(dict.fromkeys(new, frozenset(self._hidden_now())))
            for number in new:
                self._note_takers(number, outside)

    def has_new(self, outside: Outside) -> bool:
        """Whether `look` would find anything."""
        return bool(self._new(outside))

    def names(self) -> list[Name]:
        """All names that a row has taken."""
        return sorted(self._takers)

    def newest(self, outside: Outside, name: Name) -> tuple[int, int, int]:
        """Of the newest row that is known to have a name: sequence, due instant, and the instant of its filing hour."""
        return outside.newest(*max(self._takers.get(name, [NO_TAKER])))

    def takers(self, name: Name) -> list[tuple[int, int, int]]:
        """The rows that took a name, in their order: sequence, due instant, and the instant of the filing hour."""
        return self._takers.get(name, [])

    def rows_of(self, outside: Outside, name: Name) -> set[int]:
        """All rows that ever had a name."""
        return {row for taker, _, _ in self._takers.get(name, []) for row in outside.followers(taker)}

    def check(self, outside: Outside, cancelled_at: Mapping[int, int]) -> None:
        """Go through all rows with keys in the order in which they were decided; ``cancelled_at`` says of rows that
        may have been cancelled when that was at the earliest.
        """
        self.look(outside)
        at_end = _delivered(outside)
        filed_ms = self._filed_ms(outside)
        holders: dict[tuple[bytes, bytes], int] = {}
        undone: dict[int, tuple[Name, int]] = {}  # Records whose message was refused, with the instant of that.
        numbers = sorted(self._delivered, key=lambda number: outside.accepted[number][1].base_sequence)
        for number in numbers:
            sent, accepted = outside.accepted[number]
            keys, policies, cancelled = self._sent[number]
            told = _verdicts(accepted.base_sequence, accepted.decided)
            record: tuple[Reason | None, int] | None = (
                None  # What the record before this row was told, if there is one.
            )
            rows = zip(sent.wanted, keys, policies, strict=True)
            for sequence, ((_, subject, _), key, policy) in enumerate(rows, accepted.base_sequence):
                behind, record = record, None
                reason, other = told.pop(sequence, (None, 0))
                if policy == RECORD:
                    record = reason, other
                if behind is not None and policy != RECORD and _settled(sequence, behind, (reason, other)):
                    assert sequence not in at_end, f"row {sequence} was delivered, and its record says that it is not"
                    continue
                holder = holders.get((subject, key)) if key else None
                what = f"row {sequence} with key {key!r} was told {reason} of row {other}, the key is that of {holder}"
                if policy == RECORD and reason is Reason.REJECTED:
                    undone[sequence] = (subject, key), accepted.appended_at_ms
                    continue
                chain = set() if holder is None else set(outside.followers(holder))
                if reason is None:
                    ended = not chain or not chain.isdisjoint(self._delivered[number])
                    ended |= any(cancelled_at.get(row, NEVER_MS) <= accepted.appended_at_ms for row in chain)
                    assert ended, f"{what}, which was pending"
                elif undone.get(other) != ((subject, key), accepted.appended_at_ms):
                    assert reason in VERDICTS[policy], f"{what}, and asked for {policy}"
                    assert other in chain, what
                    in_doubt = reason in IN_DOUBT and hour_of_ms(filed_ms[other]) in self._hidden[number]
                    assert other not in cancelled or in_doubt, f"{what}, which was cancelled before"
                    gone = other if reason is Reason.REPLACED else sequence
                    assert gone not in at_end, f"{what}, and row {gone} was delivered"
                if key and reason in (None, Reason.REPLACED):
                    holders[subject, key] = sequence
            assert not told, f"batch {number} was told of rows that are not its own: {sorted(told)}"

    def _filed_ms(self, outside: Outside) -> dict[int, int]:
        """Of all rows that ever had a name, the instants of their filing hours."""
        found = {row: filed_ms for takers in self._takers.values() for row, _, filed_ms in takers}
        return found | {row: filed_ms for row, _, filed_ms in outside.moved_rows.values()}

    def _new(self, outside: Outside) -> set[int]:
        return self._sent.keys() & outside.accepted.keys() - self._delivered.keys()

    def _note_takers(self, number: int, outside: Outside) -> None:
        sent, accepted = outside.accepted[number]
        told = _verdicts(accepted.base_sequence, accepted.decided)
        rows = zip(sent.wanted, self._sent[number].keys, strict=True)
        for sequence, ((due_ms, subject, _), key) in enumerate(rows, accepted.base_sequence):
            if key and told.get(sequence, (Reason.REPLACED,))[0] is Reason.REPLACED:
                taker = sequence, due_ms, max(due_ms, accepted.appended_at_ms)
                self._takers.setdefault((subject, key), []).append(taker)


def _verdicts(base_sequence: int, decided: bytes) -> dict[int, tuple[Reason, int]]:
    """By row of the batch: why it met another row, and which."""
    found: dict[int, tuple[Reason, int]] = {}
    for row in decode_ended(decided):
        reason, sequence, other = Reason(row["reason"]), int(row["sequence"]), int(row["other"])
        mine, met = (other, sequence) if reason is Reason.REPLACED else (sequence, other)
        assert mine not in found, f"row {mine} of the batch at {base_sequence} was told two things"
        found[mine] = reason, met
    return found


def _settled(sequence: int, record: tuple[Reason | None, int], told: tuple[Reason | None, int]) -> bool:
    """Whether what a row behind a record was told follows from what the record was told: nothing of it is kept then."""
    what = f"row {sequence} was told {told}, and its record {record}"
    if record[0] is None:
        assert told[0] not in (Reason.REJECTED, Reason.IN_FLIGHT), f"{what}: a record of a message that was not sent"
        return False
    if record[0] is Reason.REJECTED:
        # The record is refused because of its message, which is judged as all others are.
        assert told[0] in (Reason.REJECTED, Reason.IN_FLIGHT) and told[1] == record[1], what
        return False
    assert told == (Reason.REJECTED, record[1]), what
    return True


def _delivered(outside: Outside) -> frozenset[int]:
    kept = [kept for target in outside.targets.values() for kept in target.log]
    return frozenset(sequence for each in kept for sequence in each.sequences)
