"""Slots: which delay server owns which keys (docs/keys.md, Owners; rule I4).

Invariant: an owner that is given out is durable, and changes only by an operator's word, or when a delay server shows
that this state is older than what it was told. A slot without an owner gets one when somebody asks for it: the live
member that owns the fewest.

`Members` are the delay servers that may own slots, and what to do when meta can't know them all (docs/keys.md, A meta
that begins anew). Invariant: from the peers that any member keeps durably, and the peers of those, and so on, every
member is reached. So a meta that has lost its state knows that all owners are here once all whom it reaches from a
member have registered.

     newcomer ──a member tells that it knows it──▶ member, durable ──told──▶ it keeps this itself: it names itself
     in doubt ──all peers of a member have registered, or an operator's word──▶ sure
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from delayd.errors import BadArgument, DamagedValue, DelaydError
from delayd.machine.state import State
from delayd.wire.heads import U64_MAX
from delayd.wire.meta import (
    MEMBERS_MAX,
    NO_SLOTS,
    SLOTS,
    VERSIONS,
    SlotClaims,
    SlotOwners,
    SlotSet,
    Versions,
    slots_text,
)

Given = dict[int, tuple[int, int]]
"""Decisions: the new owner and the new version of each slot."""

log = logging.getLogger(__name__)

# Of each of the 1,024 slots: u64 log_id of its owner (0: nobody, 2^64 - 1: two servers claim it), u32 version.
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


MEMBER_PREFIX = b"slot_member/"  # `<u64 log_id>` Empty: this delay server may own slots.
DOUBT_KEY = b"slots_in_doubt"  # Empty: meta may not know all owners.


class Members:
    """Belongs to the loop; `durable` and `in_doubt` follow the state."""

    def __init__(self, stored: Iterable[int], *, in_doubt: bool) -> None:
        self.durable = frozenset(stored)
        self.in_doubt = in_doubt
        self.doubts = 0  # How many began in this life.
        self.told: dict[int, SlotClaims] = {}  # Of each delay server that has registered in this life.
        self._admitting: set[int] = set()
        self._moved = NO_SLOTS

    def hear(self, log_id: int, claims: SlotClaims) -> None:
        """Note what a delay server tells with its registration."""
        self.told[log_id] = claims

    def newcomers(self, live: Iterable[int]) -> list[int]:
        """The live servers that become members now."""
        if self.in_doubt:
            return []
        waiting = [log_id for log_id in live if log_id in self.told and log_id not in self.durable]
        if not self.durable:
            # A first one alone: two of them would not know each other.
            return [] if self._admitting else waiting[:1]
        known = frozenset().union(*(self.told[each].peers for each in self.durable if self._names_itself(each)))
        room = MEMBERS_MAX - len(self.durable) - len(self._admitting)
        return [log_id for log_id in waiting if log_id in known and log_id not in self._admitting][: max(0, room)]

    def admit(self, log_id: int) -> None:
        """Note that a newcomer is being stored as a member."""
        self._admitting.add(log_id)

    def admitted(self, log_id: int) -> None:
        """Note that the state has it as a member."""
        self.durable |= {log_id}

    def admission_ended(self, log_id: int, refused: DelaydError | None) -> None:
        """Note that nothing is being stored about a newcomer any more; it waits again when that was refused."""
        self._admitting.discard(log_id)

    def peers_for(self, log_id: int, live: Iterable[int]) -> frozenset[int] | None:
        """What a delay server is told to keep: members and newcomers, itself only as a member; None while in doubt."""
        if self.in_doubt:
            return None
        newcomers = sorted(frozenset(live) - self.durable - {log_id})
        peers = self.durable | frozenset(newcomers[: max(0, MEMBERS_MAX - len(self.durable))])
        if log_id in self.told:
            # From now on it may have the old list or the new one.
            claims = self.told[log_id]
            self.told[log_id] = claims._replace(peers=claims.peers & peers)
        return peers

    def reached(self) -> frozenset[int]:
        """All servers that are reached from members which have registered; none when no member has."""
        reached: set[int] = set()
        ahead = [log_id for log_id in self.told if self._names_itself(log_id)]
        while ahead:
            log_id = ahead.pop()
            if log_id not in reached:
                reached.add(log_id)
                ahead += self.told[log_id].peers if log_id in self.told else ()
        return frozenset(reached)

    def missing(self) -> frozenset[int]:
        """The servers that must register before all owners are known to be here."""
        return self.reached() - self.told.keys()

    def doubt(self) -> str:
        """What a doubt waits for, as a text."""
        missing = self.missing()
        if missing:
            return f"meta waits for {', '.join(f'{log_id:016x}' for log_id in sorted(missing))}"
        return "no delay server that may own some has registered with this meta"

    def vouched(self, owners: SlotOwners, disputed: SlotSet) -> SlotOwners:
        """The owners as they are told. In doubt these are only servers that have said themselves that they own a slot,
        and those to which an operator has moved it since: any other one may have lost it to a server that is away.
        """
        withheld = disputed
        if self.in_doubt:
            sure = self._moved.copy()
            for log_id, claims in self.told.items():
                sure |= claims.owned & owners.of(log_id)
            withheld = withheld | ~sure
        log_ids = np.where(withheld, np.uint64(0), owners.log_ids)
        return SlotOwners(log_ids, owners.versions, withheld, self.durable)

    def moved(self, slots: SlotSet) -> None:
        """Note that an operator has said who owns these slots."""
        self._moved = self._moved | slots

    def present(self) -> frozenset[int]:
        """The members that have registered."""
        return frozenset(log_id for log_id in self.told if self._names_itself(log_id))

    def begin_doubt(self) -> None:
        """Give out nothing from now on; the state will say so soon."""
        self.in_doubt = True
        self.doubts += 1

    def settle(self, members: frozenset[int], doubts: int) -> None:
        """Note that the state is sure of these members; a doubt that began after that was decided goes on."""
        self.in_doubt = self.doubts != doubts
        self.durable |= members

    def remove(self, log_id: int) -> None:
        """Forget a server, because an operator says that it is gone; the state has forgotten it already."""
        self.durable -= {log_id}
        self.told.pop(log_id, None)

    def _names_itself(self, log_id: int) -> bool:
        claims = self.told.get(log_id)
        return claims is not None and log_id in claims.peers


def member_key(log_id: int) -> bytes:
    """Where the state keeps that a server is a member."""
    return MEMBER_PREFIX + log_id.to_bytes(8, "big")


def begin_in_doubt(state: State) -> None:
    """Note durably that this state may be younger, or older, than what it gave to delay servers."""
    state.commit([(DOUBT_KEY, b"")])


def read_members(state: State) -> frozenset[int]:
    """The members that the state has; one whose value does not check is a member, too: only its key says something."""
    damaged: list[DamagedValue] = []
    keys = [key for key, _ in state.scan(MEMBER_PREFIX, damaged)] + [damage.key for damage in damaged]
    return frozenset(int.from_bytes(key[len(MEMBER_PREFIX) :], "big") for key in keys)


def read_in_doubt(state: State) -> bool:
    """Whether the state notes that a doubt has begun and not ended."""
    damaged: list[DamagedValue] = []
    return bool(state.scan(DOUBT_KEY, damaged) or damaged)
