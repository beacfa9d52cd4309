"""Slots: which delay server owns which keys (docs/keys.md, Owners; rule I4).

Invariant: an owner that is given out is durable, and changes only by an operator's word, or when a delay server shows
that this state is older than what it was told. A slot without an owner gets one when somebody asks for it: the live
member that owns the fewest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from delayd.errors import BadArgument, DamagedValue
from delayd.machine.state import State
from delayd.wire.heads import U64_MAX
from delayd.wire.slots import SLOTS, VERSIONS, SlotClaims, SlotOwners, SlotSet, Versions, slots_text

Given = dict[int, tuple[int, int]]
"""Decisions: the new owner and the new version of each slot."""

log = logging.getLogger(__name__)

STATE_KEY = b"slots"
NOBODY = 0
# Stands for the owner of a slot that two servers claim with one version: only an operator may say who it is.
DISPUTED = U64_MAX
_ENTRY = np.dtype([("log_id", "<u8"), ("version", VERSIONS)])


class SlotTable:
    """The owners of all slots. Slots that are decided and not durable yet count as taken."""

    def __init__(self, stored: SlotOwners) -> None:
        self.durable = stored
        self._decided: Given = {}

    @property
    def disputed(self) -> SlotSet:
        """The slots that two servers claim."""
        return self.durable.of(DISPUTED)

    @property
    def free(self) -> SlotSet:
        """The slots that nobody owns."""
        return self.durable.of(NOBODY)

    @property
    def owners(self) -> frozenset[int]:
        """The servers that own slots."""
        return frozenset(np.unique(self.durable.log_ids).tolist()) - {NOBODY, DISPUTED}

    def has_unsettled(self, wanted: SlotSet) -> bool:
        """Whether the owner of a wanted slot is decided and not durable yet."""
        return any(wanted[slot] for slot in self._decided)

    def assign(self, wanted: SlotSet, to: Sequence[int]) -> Given:
        """Give the wanted slots without an owner to some servers."""
        if not to:
            return {}
        owned = {log_id: int(np.count_nonzero(self.durable.of(log_id))) for log_id in to}
        for log_id, _ in self._decided.values():
            if log_id in owned:
                owned[log_id] += 1
        given: Given = {}
        for slot in self._undecided(wanted & self.free):
            least = min(owned, key=lambda log_id: (owned[log_id], log_id))
            given[slot] = (least, self._next_version(slot))
            owned[least] += 1
        return self._decide(given)

    def judge(self, log_id: int, claims: SlotClaims) -> Given:
        """Compare what a delay server keeps about slots with this table; decide where the table must be older.

        A server stores a version only after it was durable here, so a higher one than ours shows that ours is older.
        Two servers that had one version of a slot were told so by two lives of meta that knew nothing of each other.
        """
        ours, own = self.durable.versions, self.durable.of(log_id)
        newer = claims.versions > ours
        given: Given = {}
        for slot in self._undecided(newer):
            # A slot that it gave up at that version belongs to whoever got a higher one, or to nobody yet.
            given[slot] = (log_id if claims.owned[slot] else NOBODY, int(claims.versions[slot]))
        disputed = claims.owned & (claims.versions == ours) & ~own & ~self.disputed
        if disputed.any():
            others = ",".join(f"{each:016x}" for each in np.unique(self.durable.log_ids.compress(disputed)).tolist())
            log.critical("slots_disputed slots=%s log_id=%016x others=%s", slots_text(disputed), log_id, others)
        for slot in self._undecided(disputed):
            given[slot] = (DISPUTED, int(ours[slot]))
        return self._decide(given)

    def lost(self, log_id: int, claims: SlotClaims) -> SlotSet:
        """Which slots a delay server must not serve any more.

        Among them are slots of which it has an older version than its own here: it asks for these again.
        """
        ours, own = self.durable.versions, self.durable.of(log_id)
        lost: SlotSet = claims.owned & ((claims.versions < ours) | ((claims.versions == ours) & ~own))
        return lost

    def move(self, slots: SlotSet, versions: Versions, to: int) -> Given:
        """Give slots to another server, because an operator says so.

        Raises BadArgument when one of them has another version than the operator knew: it was moved meanwhile.
        """
        others = slots & (self.durable.versions != versions)
        if others.any():
            raise BadArgument(f"the slots {slots_text(others)} were moved meanwhile; see `delayd slots list`")
        return self._decide({slot: (to, self._next_version(slot)) for slot in np.flatnonzero(slots).tolist()})

    def with_given(self, given: Given) -> SlotOwners:
        """The owners once these decisions are durable."""
        owners = SlotOwners(self.durable.log_ids.copy(), self.durable.versions.copy())
        for slot, (log_id, version) in given.items():
            owners.log_ids[slot] = log_id
            owners.versions[slot] = version
        return owners

    def settle(self, given: Given, *, durable: bool) -> None:
        """Note what became of decisions."""
        if durable and given:
            self.durable = self.with_given(given)
        for slot in given:
            del self._decided[slot]

    def _next_version(self, slot: int) -> int:
        return int(self.durable.versions[slot]) + 1

    def _undecided(self, slots: SlotSet) -> list[int]:
        return [slot for slot in np.flatnonzero(slots).tolist() if slot not in self._decided]

    def _decide(self, given: Given) -> Given:
        self._decided |= given
        return given


def slot_table_value(owners: SlotOwners) -> bytes:
    """The owners as the state keeps them."""
    entries = np.empty(SLOTS, _ENTRY)
    entries["log_id"], entries["version"] = owners.log_ids, owners.versions
    return entries.tobytes()


def read_slot_table(state: State) -> SlotOwners | None:
    """The owners that the state has; None when they do not check."""
    try:
        value = state.get(STATE_KEY)
    except DamagedValue as damage:
        log.critical("slots_lost reason=%r", str(damage))
        return None
    if value is None:
        return SlotOwners.nobody()
    entries = np.frombuffer(value, _ENTRY, SLOTS)
    return SlotOwners(entries["log_id"].astype(np.uint64), entries["version"].astype(np.uint32))
