"""Owned slots: the slots of keys that this server serves (docs/keys.md, Owners; rule I4).

Invariant: a row with a key is taken only while its slot stands in the state. A slot is put there by meta's word alone,
and a slot that was given up is put there again only when meta has given it anew since: with a higher version. All of
this is told to meta with each registration, so that a meta which has lost its own state learns it again.

     row's slot is owned ──▶ taken at once
     it is not ──▶ ask meta ──▶ meta names this server ──▶ stored ──▶ taken
                          ├──▶ another one: NotOwner      └──▶ given up, or no answer: SlowDown
                          └──▶ meta does not know: OwnerUnknown
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgpack
import numpy as np
from numpy.typing import NDArray

from delayd.errors import (
    BadArgument,
    DamagedValue,
    DelaydError,
    DiskFull,
    DiskReserve,
    NotOwner,
    OwnerUnknown,
    SlotsInUse,
    SlowDown,
    key_text,
)
from delayd.machine.executor import Done
from delayd.machine.identity import Site
from delayd.wire.heads import need_u64
from delayd.wire.meta import (
    NO_SLOTS,
    OWNER_UNKNOWN,
    SLOTS,
    SlotClaims,
    SlotOwners,
    SlotSet,
    Versions,
    need_slots,
    read_slot_claims,
    slot_set,
    slots_bytes,
    slots_text,
)

log = logging.getLogger(__name__)

# The slots that it owns, the version of each, and its peers, as REGISTER has them (docs/keys.md, Owners).
STATE_KEY = b"slots"
LEAVING_KEY = b"slots_leaving"  # The slots that a drain takes away (docs/drain.md).
ASK_RETRY_AFTER_MS = 200  # Meta comes back, or an operator's move goes on.

Slots = NDArray[np.uint16]
Go = Callable[[DelaydError | None], None]
"""Called when rows may be taken, or with why not."""
AskSlots = Callable[[SlotSet, Callable[[SlotOwners | DelaydError], None]], None]
"""Asks meta for the owners of all slots; the named ones get one if they have none."""
CountPending = Callable[[SlotSet, Callable[[int | DelaydError], None]], None]
"""Counts the pending rows with keys of some slots, those included that are being taken at this moment."""
OnReleased = Callable[[SlotOwners | DelaydError], None]
Change = Callable[[SlotClaims], SlotClaims]


@dataclass(slots=True)
class _Asking:
    slots: Slots
    go: Go


class OwnedSlots:
    """Belongs to the loop; the state is written on the worker thread."""

    def __init__(self, site: Site, ask: AskSlots, count_pending: CountPending) -> None:
        self._kept = _read(site)
        # Slots that are served no more, though this server owns them: their messages are on their way to the server
        # ``_leaving_to``, which gets the slots when it has all of them (docs/drain.md).
        self.leaving, self.leaving_to = _read_leaving(site)
        self._site = site
        self._ask = ask
        self._count_pending = count_pending
        self._releasing = NO_SLOTS
        self._taken_away = NO_SLOTS  # By meta, while the state does not say so yet.
        self._waiting: list[_Asking] = []
        self._asked: list[_Asking] = []  # Those that the question under way is for.
        self._is_asking = False
        self._changes: deque[tuple[Change, Go]] = deque()  # The first one is being stored.

    @property
    def owned(self) -> SlotSet:
        """The slots that this server serves."""
        return self._kept.owned & ~self._taken_away

    @property
    def claims(self) -> SlotClaims:
        """What meta is told with each registration: slots also while they are being stored, and peers only when they
        are durable whatever happens.
        """
        owned, versions, peers = self._kept
        for change, _ in self._changes:
            after = change(self._kept)
            owned, versions = owned | after.owned, np.maximum(versions, after.versions)
            peers &= after.peers
        return SlotClaims(owned & ~self._taken_away, versions, peers)

    def met(self, peers: frozenset[int]) -> None:
        """Hear from meta which delay servers may own slots, and which may soon."""
        # While something else is being stored, the next registration comes early enough.
        if peers != self._kept.peers and not self._changes:
            self._change(lambda kept: kept._replace(peers=peers), lambda error: None)

    def admit(self, slots: Slots, go: Go) -> None:
        """Call ``go`` when rows of these slots may be taken: at once when all of them are owned."""
        if self.are_served(slots):
            go(None)
            return
        self._waiting.append(_Asking(slots, go))
        self._ask_meta()

    def lost(self, slots: SlotSet) -> None:
        """Hear from meta that another server owns these slots: an operator said that this one was lost."""
        gone = self.owned & slots
        if gone.any():
            # Slots whose messages have left were to go.
            if (gone & ~self.leaving).any():
                log.critical("slots_taken_away slots=%s", slots_text(gone))
            else:
                log.warning("slots_left slots=%s", slots_text(gone))
            # From this moment on nothing of them is taken. If the state can't follow, meta says it again.
            self._taken_away = self._taken_away | gone
            self._change(lambda kept: kept._replace(owned=kept.owned & ~gone), partial(self._gone, gone))

    def _gone(self, slots: SlotSet, error: DelaydError | None) -> None:
        if error is None:
            self._taken_away = self._taken_away & ~slots
            if (self.leaving & slots).any():
                self._keep_leaving(self.leaving & ~slots, self.leaving_to, lambda error: None)

    def leave(self, slots: SlotSet, to: int, done: Go) -> None:
        """Serve these slots no more, durably, because their messages go to another server; ``done`` is called then.

        It is called with BadArgument when others go to another server at this moment, with SlowDown while rows with
        such keys are being taken, or DiskReserve.
        """
        if self.leaving.any() and self.leaving_to not in (0, to):
            what = f"slots are on their way to {self.leaving_to:016x}; let that one get these messages, too"
            done(BadArgument(what))
            return
        slots = slots & self.owned
        if not (slots & ~self.leaving).any():
            done(None)
            return
        self._keep_leaving(self.leaving | slots, to, done)

    def _keep_leaving(self, slots: SlotSet, to: int, done: Go) -> None:
        # From this moment on nothing of them is taken; what was taken before is found by the walk that follows.
        before = (self.leaving, self.leaving_to)
        self.leaving, self.leaving_to = slots, to if slots.any() else 0
        value = msgpack.packb({"slots": slots_bytes(slots), "to": to})

        def stored(ended: Done[None]) -> None:
            try:
                ended.result()
            except DiskFull as error:
                self.leaving, self.leaving_to = before
                done(DiskReserve(f"this server can't store which keys leave it: {error.message}"))
                return
            done(None)

        self._site.worker.submit(partial(self._site.state.commit, [(LEAVING_KEY, value)]), stored)

    def release(self, slots: SlotSet, done: OnReleased) -> None:
        """Serve these slots no more, when no row of them is pending. Another server may get them then.

        ``done`` is called with the owners and versions from before the move when that is durable, or with SlotsInUse,
        SlowDown, DiskReserve or what meta answers: then nothing has changed.
        """
        if self._releasing.any():
            done(SlowDown("this server is releasing slots; say it again", retry_after_ms=ASK_RETRY_AFTER_MS))
            return
        self._releasing = slots.copy()
        self._ask(NO_SLOTS, partial(self._release_known, slots, done))

    def _release_known(self, slots: SlotSet, done: OnReleased, answer: SlotOwners | DelaydError) -> None:
        if isinstance(answer, DelaydError):
            self._end_release(done, answer)
        else:
            self._count_pending(slots, partial(self._release_counted, slots, answer, done))

    def _release_counted(self, slots: SlotSet, owners: SlotOwners, done: OnReleased, count: int | DelaydError) -> None:
        if isinstance(count, DelaydError):
            self._end_release(done, count)
            return
        if count:
            message = f"{count} messages with keys of these slots are pending; wait for them, or cancel them"
            self._end_release(done, SlotsInUse(message))
            return
        self._change(
            lambda kept: kept._replace(
                owned=kept.owned & ~slots,
                versions=np.where(slots, np.maximum(owners.versions, kept.versions), kept.versions),
            ),
            lambda error: self._end_release(done, owners if error is None else error),
        )

    def _end_release(self, done: OnReleased, outcome: SlotOwners | DelaydError) -> None:
        self._releasing = NO_SLOTS
        done(outcome)

    def are_served(self, slots: Slots) -> bool:
        """Whether rows of these slots may be taken now."""
        served: NDArray[np.bool_] = self.owned.take(slots)
        if self._releasing.any():
            served &= ~self._releasing.take(slots)
        if self.leaving.any():
            served &= ~self.leaving.take(slots)
        return bool(served.all())

    def _ask_meta(self) -> None:
        """Ask for all who wait; one question is under way at a time."""
        if self._is_asking or not self._waiting:
            return
        self._is_asking = True
        self._asked, self._waiting = self._waiting, []
        wanted = slot_set(np.concatenate([each.slots for each in self._asked])) & ~self.owned
        self._ask(wanted, self._answered)

    def _answered(self, answer: SlotOwners | DelaydError) -> None:
        if isinstance(answer, DelaydError):
            message = f"meta must say whether this server owns these keys, and does not answer: {answer.message}"
            self._tell(lambda each: SlowDown(message, retry_after_ms=ASK_RETRY_AFTER_MS))
            return
        mine = answer.of(self._site.log_id)

        def taken(kept: SlotClaims) -> SlotClaims:
            anew = mine & was_given_since(answer, kept.versions)
            return SlotClaims(
                kept.owned | anew,
                np.where(anew, answer.versions, kept.versions),
                # Whoever owns a slot knows from the same moment on who else may own some.
                kept.peers | answer.members | {self._site.log_id} if anew.any() else kept.peers,
            )

        if np.array_equal(taken(self._kept).owned, self.owned):
            self._stored(answer, None)
        else:
            self._change(taken, partial(self._stored, answer))

    def _stored(self, answer: SlotOwners, error: DelaydError | None) -> None:
        self._tell(lambda each: error or self._refusal(each.slots, answer))

    def _tell(self, outcome: Callable[[_Asking], DelaydError | None]) -> None:
        asked, self._asked = self._asked, []
        self._is_asking = False
        for each in asked:
            each.go(None if self.are_served(each.slots) else outcome(each))
        self._ask_meta()

    def _refusal(self, slots: Slots, owners: SlotOwners) -> DelaydError:
        others = np.setdiff1d(owners.log_ids.take(slots), np.array([0, self._site.log_id], np.uint64))
        if len(others):
            return NotOwner(f"the delay server {int(others[0]):016x} owns these keys; ask meta, and send to that one")
        if owners.withheld.take(slots).any():
            return OwnerUnknown(OWNER_UNKNOWN, retry_after_ms=ASK_RETRY_AFTER_MS)
        return SlowDown(
            "an operator is moving these keys to another server; send again later", retry_after_ms=ASK_RETRY_AFTER_MS
        )

    def _change(self, change: Change, done: Go) -> None:
        """Store a change; ``done`` is called when it is durable, or with DiskReserve: then nothing has changed."""
        self._changes.append((change, done))
        if len(self._changes) == 1:
            self._store()

    def _store(self) -> None:
        after = self._changes[0][0](self._kept)
        work = partial(self._site.state.commit, [(STATE_KEY, msgpack.packb(after.to_head()))])
        self._site.worker.submit(work, partial(self._committed, after))

    def _committed(self, after: SlotClaims, ended: Done[None]) -> None:
        refused: DelaydError | None = None
        try:
            ended.result()
            self._kept = after
        except DiskFull as error:
            refused = DiskReserve(f"this server can't store which keys it owns: {error.message}")
        _, done = self._changes[0]
        done(refused)  # What it asks for at once stands behind it in the queue, and is stored after it.
        self._changes.popleft()
        if self._changes:
            self._store()


def was_given_since(owners: SlotOwners, versions: Versions) -> SlotSet:
    """Which slots meta has given to their owners after they were given up at these versions."""
    since: SlotSet = owners.versions > versions
    return since


def _read_leaving(site: Site) -> tuple[SlotSet, int]:
    try:
        value = site.state.get(LEAVING_KEY)
    except DamagedValue as error:
        # Nobody knows which keys left, so none is served until an operator drains this server or takes it back.
        log.critical("slots_leaving_lost key=%s", key_text(error.key))
        return ~NO_SLOTS, 0
    if value is None:
        return NO_SLOTS, 0
    head = msgpack.unpackb(value)
    return need_slots(head, "slots"), need_u64(head, "to")


def _read(site: Site) -> SlotClaims:
    nothing = SlotClaims(NO_SLOTS, np.zeros(SLOTS, np.uint32))
    try:
        value = site.state.get(STATE_KEY)
    except DamagedValue as error:
        # Meta says again which slots are this server's.
        log.warning("value_rebuilt key=%s source=meta", key_text(error.key))
        return nothing
    if value is None:
        return nothing
    return read_slot_claims(msgpack.unpackb(value))
