"""Slots: which delay server owns which keys (docs/keys.md, Owners; rule I4).

Invariant: an owner that is given out is durable, and changes only by an operator's word. A slot without an owner gets
one when somebody asks for it: the live delay server that owns the fewest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from delayd.errors import BadArgument, DamagedValue
from delayd.state import State
from delayd.wire.requests import U64_MAX
from delayd.wire.slots import SLOTS, VERSIONS, SlotOwners, SlotSet, Versions, slots_text

Given = dict[int, int]
"""Decisions: the new owner of each slot that is given to somebody."""

log = logging.getLogger(__name__)

STATE_KEY = b"slots"
# Stands for the owner of a slot whose value did not check: only that owner, or an operator, may say who it is.
FORGOTTEN = np.uint64(U64_MAX)
_ENTRY = np.dtype([("log_id", "<u8"), ("version", VERSIONS)])


class SlotTable:
    """The owners of all slots. Slots that are decided and not durable yet count as taken."""

    def __init__(self, stored: SlotOwners) -> None:
        self.durable = stored
        self._decided: Given = {}

    @property
    def lost(self) -> bool:
        """Whether a slot has an owner that meta does not know any more."""
        return bool((self.durable.log_ids == FORGOTTEN).any())

    def has_unsettled(self, wanted: SlotSet) -> bool:
        """Whether the owner of a wanted slot is decided and not durable yet."""
        return any(wanted[slot] for slot in self._decided)

    def assign(self, wanted: SlotSet, live: Sequence[int]) -> Given:
        """Give the wanted slots without an owner to live servers."""
        if not live:
            return {}
        owned = {log_id: int(np.count_nonzero(self.durable.of(log_id))) for log_id in live}
        for log_id in self._decided.values():
            if log_id in owned:
                owned[log_id] += 1
        given: Given = {}
        for slot in self._undecided(wanted & (self.durable.log_ids == 0)):
            given[slot] = least = min(owned, key=lambda log_id: (owned[log_id], log_id))
            owned[least] += 1
        return self._decide(given)

    def claim(self, claimed: SlotSet, log_id: int) -> Given:
        """Take a server's word that it owns slots which nobody owns here: this state is younger than the server's."""
        free = claimed & ((self.durable.log_ids == 0) | (self.durable.log_ids == FORGOTTEN))
        return self._decide(dict.fromkeys(self._undecided(free), log_id))

    def move(self, slots: SlotSet, versions: Versions, to: int) -> Given:
        """Give slots to another server, because an operator says so.

        Raises BadArgument when one of them has another version than the operator knew: it was moved meanwhile.
        """
        others = slots & (self.durable.versions != versions)
        if others.any():
            raise BadArgument(f"the slots {slots_text(others)} were moved meanwhile; see `delayd slots list`")
        return self._decide(dict.fromkeys(np.flatnonzero(slots).tolist(), to))

    def with_given(self, given: Given) -> SlotOwners:
        """The owners once these decisions are durable."""
        owners = SlotOwners(self.durable.log_ids.copy(), self.durable.versions.copy())
        for slot, log_id in given.items():
            owners.log_ids[slot] = log_id
            owners.versions[slot] += np.uint32(1)
        return owners

    def settle(self, given: Given, *, durable: bool) -> None:
        """Note what became of decisions."""
        if durable and given:
            self.durable = self.with_given(given)
        for slot in given:
            del self._decided[slot]

    def _undecided(self, slots: SlotSet) -> list[int]:
        return [slot for slot in np.flatnonzero(slots).tolist() if slot not in self._decided]

    def _decide(self, given: Given) -> Given:
        self._decided |= given
        return given


def slot_table_value(owners: SlotOwners) -> bytes:
    """The owners as the state keeps them."""
    entries = np.empty(SLOTS, _ENTRY)
    entries["log_id"], entries["version"] = owners
    return entries.tobytes()


def read_slot_table(state: State) -> SlotOwners:
    """The owners that the state has; when they do not check, each slot has an owner that nobody knows."""
    try:
        value = state.get(STATE_KEY)
    except DamagedValue as damage:
        log.critical("slots_lost reason=%r", str(damage))
        owners = SlotOwners.nobody()
        owners.log_ids[:] = FORGOTTEN
        return owners
    if value is None:
        return SlotOwners.nobody()
    entries = np.frombuffer(value, _ENTRY, SLOTS)
    return SlotOwners(entries["log_id"].astype(np.uint64), entries["version"].astype(np.uint32))
