"""Bugs to plant in the realtime server: each takes one rule out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from delayd.batch.batch import Batch
from delayd.batch.columns import DispatchPart
from delayd.delay.handoff.link import Link
from delayd.log.log import Log
from delayd.wire import heads as wire_heads
from delayd.wire.frame import HeadValue
from realtime import checkpoint, unreadable
from realtime.commit import Commit, DispatchFrame, Greeting, GroupCommit, PullCommit
from realtime.core import Core
from realtime.delay_servers import DelayServers
from realtime.group_records import GroupRecords
from realtime.group_window import Became, GroupWindow
from realtime.groups import Group, GroupCopy
from realtime.handoff import Hello, LostOffers, Origin, Origins, Peer
from realtime.kept import Marks
from realtime.polls import WaitingPulls
from realtime.pulls import Pulls
from realtime.rebuild import Rebuilder
from realtime.removal import keep_from
from realtime.subject_index import Index, Subject
from realtime.words import GivenOut
from tests.worlds import port_bugs
from tests.worlds.patches import Bugs, Patch, changed
from tests.worlds.realtime_bugs import ACKNOWLEDGE_FOR_ANYBODY, ENTRIES_ON_BOTH_SIDES_OF_NEXT

Groups = Iterable[Group | GroupCopy]
NEVER_MS = 1 << 50

# The handoff.


def _answer_the_window_at_once(self: GroupCommit, item: DispatchFrame | Greeting) -> None:
    if isinstance(item, Greeting):
        next_sequence = self._next_sequence
        commit = Commit([item], [], [], [], self._appended_at_ms, next_sequence)
        commit.end, commit.crc32c = self._log.durable, self._log.crc32c
        self.on_durable(commit)
    else:
        _put(self, item)


def _take_any_session(self: Origins, peer: Peer, epoch: int, session: int) -> Origin:
    return next(iter(self))


def _drop_nothing(self: GroupCommit, origin: Origin) -> list[DispatchFrame | Greeting]:
    return []


def _refuse_no_hello(self: Origin, hello: Hello) -> None:
    """Whatever it says, it is heard."""


def _know_every_origin(self: Origin, named_offset: int) -> None:
    """Whatever its dispatch logs lack, it is heard."""


def _remember_nothing(
    self: Origin, batch: Batch, part: DispatchPart, offset: int, group_offset: int, appended_at_ms: int
) -> None:
    self.advance((part.w_epoch, part.w_id))


def _forget_older_epochs(self: Origin, hello: Hello) -> None:
    if hello.epoch > self.epoch:
        self.window.clear()
        self.keys.clear()
    _hear(self, hello)


def _keep_no_window(self: Origins, end: int) -> int:
    return end


# Checkpoints and retention.


def _checkpoint_before_the_pull_log(self: Core) -> None:
    if not self._checkpoints.under_way and not self._failed:
        self._checkpoints.begin()
        self._snapshots.begin(self._marks(), ends=False)
        while (snapshot := self._snapshots.step()) is None:
            pass
        self._checkpoints.take(snapshot, self._checkpointed)


def _keep(change: Callable[[Marks, Groups], tuple[Marks, Groups]]) -> Callable[[Log, int, Marks, Groups, Index], int]:
    """`keep_from`, which hears something else of what must be kept."""

    def kept(message_log: Log, oldest_ms: int, marks: Marks, groups: Groups, index: Index) -> int:
        return keep_from(message_log, oldest_ms, *change(marks, groups), index)

    return kept


def _no_group(marks: Marks, groups: Groups) -> tuple[Marks, Groups]:
    return marks, ()


def _no_doubt(marks: Marks, groups: Groups) -> tuple[Marks, Groups]:
    return replace(marks, window_offset=marks.indexed_offset), groups


def _begin_at_what_leaves(self: Index, subject: Subject) -> int:
    leaving_below, self.leaving_below = self.leaving_below, 0
    found = _first(self, subject)
    self.leaving_below = leaving_below
    return found


# Damage.


def _rebuild_nothing(self: Rebuilder) -> None:
    """A consumer that waits for a consume log goes on waiting."""


# Consumers.


def _acknowledge_before_the_sync(self: PullCommit, callback: Callable[[], None]) -> None:
    callback()


def _lapse_never(self: Pulls) -> None:
    list(self._ends.due(self.clock.monotonic_ms()))
    for waiting in self.waiting.deadlines.due(self.clock.monotonic_ms()):
        self.waiting.answer_empty(waiting)


# Strangers.


def _take_any_row(value: HeadValue, name: str, width: int | None) -> list[int]:
    return _row(value, name, None)


def _recall_nobody(self: WaitingPulls, group: object) -> None:
    """Whoever has messages ahead keeps them."""


def _end_no_pull(self: Pulls, peer: Peer, group: Group) -> None:
    """It waits until its time is up."""


def _forget_nobody(self: Pulls, peer: Peer) -> None:
    """Its requests go on waiting."""


def _nothing() -> None:
    """A sync that is left out."""


_row = wire_heads._row
_put = GroupCommit.put
_hear = Origin.hear
_first = Index.first

_HEARD_ALL_THE_SAME = [
    Patch(Origin, "check_known", _know_every_origin),
    Patch(Link, "_greeted", changed(Link._greeted, "highest and not self._intake.has_given(highest)", "False")),
]

IN_REALTIME: Bugs = {
    "C1: T does not say that it may have lost what consumers have": [
        Patch(
            DelayServers,
            "welcome",
            changed(DelayServers.welcome, "if self._lost_offers.epoch:", "if False:"),
        )
    ],
    "C1: T forgets at a clean stop that it may have lost what consumers have": [
        Patch(
            LostOffers,
            "kept",
            changed(LostOffers.kept, "KeptOffers(self.epoch", "KeptOffers(0 if ends else self.epoch"),
        )
    ],
    "L9: a consume log that is damaged is not rebuilt": [Patch(Rebuilder, "_start", _rebuild_nothing)],
    "L10: what could not be read is never tried again": [Patch(unreadable, "RETRY_MS", NEVER_MS)],
    "H3: T answers a frame and its log is not synced": port_bugs.unsynced("/realtime/message/"),
    "H3: T answers a window before its fsync": [Patch(GroupCommit, "put", _answer_the_window_at_once)],
    "H3: T takes frames of any session": [Patch(Origins, "session_of", _take_any_session)],
    # To drop none does no harm by itself: what is queued is in the window by the time at which a hello is answered.
    "H3: T answers a hello without the queued frames of an older session": [
        Patch(GroupCommit, "drop", _drop_nothing),
        Patch(
            Core,
            "_written",
            changed(
                Core._written,
                "touched: dict[Subject, None] = {}",
                "touched = {}\n    for one in commit.greetings:\n        self._delay_servers.welcome(one, commit.end)",
            ),
        ),
        Patch(Core, "_durable", changed(Core._durable, "in commit.greetings", "in ()")),
    ],
    "H3: T hears a hello that comes late": [Patch(Origin, "check_hello", _refuse_no_hello)],
    "H7: T hears hellos that are for another server": port_bugs.HELLOS_ARE_FOR_ANYBODY,
    "H2: T forgets a batch when it has answered": [Patch(Origin, "remember", _remember_nothing)],
    "H2: T forgets what an older epoch sent": [Patch(Origin, "hear", _forget_older_epochs)],
    "H2: T's checkpoint passes batches that are in doubt": [Patch(Origins, "window_offset", _keep_no_window)],
    "H2: T's retention passes batches that are in doubt": [Patch(checkpoint, "keep_from", _keep(_no_doubt))],
    "Q1: T's checkpoint does not wait for the pull log": [Patch(Core, "checkpoint", _checkpoint_before_the_pull_log)],
    "Q1: an acknowledgement is answered before its fsync": [
        Patch(PullCommit, "when_durable", _acknowledge_before_the_sync)
    ],
    "Q1: the pull log is not synced": port_bugs.unsynced("/realtime/pull/"),
    "Q1: acknowledgements of lost pulls count": [
        Patch(
            GivenOut,
            "became",
            lambda self, group, next_pull, incarnation, run: [run._replace(state=Became.ACKNOWLEDGED)],
        )
    ],
    "Q3: retention passes what a group has not acknowledged": [Patch(checkpoint, "keep_from", _keep(_no_group))],
    "Q3: a new group begins at messages that are being removed": [Patch(Index, "first", _begin_at_what_leaves)],
    "H8: nobody notices that a delay server was restored": _HEARD_ALL_THE_SAME,
    "H8: nobody notices a copy of a delay server": [
        *_HEARD_ALL_THE_SAME,
        Patch(Origin, "check_hello", changed(Origin.check_hello, "hello.instance != self.instance", "False")),
    ],
    "H7: T greets though it lost what it had acknowledged": [
        Patch(DelayServers, "hello", changed(DelayServers.hello, "if named and not", "if False and not")),
        Patch(Link, "_greeted", changed(Link._greeted, "end_offset < named", "False")),
    ],
    "Q1: acknowledgements of anybody count": [ACKNOWLEDGE_FOR_ANYBODY],
    "Q4: what no handler was given counts as an attempt": [
        Patch(GroupWindow, "_move", changed(GroupWindow._move, "run.attempt if word is GroupWord.RETURNED else ", ""))
    ],
    "Q4: nobody hears that others have empty hands": [Patch(WaitingPulls, "recall", _recall_nobody)],
    "Q4: the end of a pull leaves it waiting": [Patch(Pulls, "end_waiting", _end_no_pull)],
    "Q5: an entry holds messages of both sides of next": ENTRIES_ON_BOTH_SIDES_OF_NEXT,
    "E1: rows of any width are taken": [Patch(wire_heads, "_row", _take_any_row)],
    "L10: what an operator gave up is offered again by the next start": [
        Patch(
            GroupRecords,
            "give_up",
            changed(GroupRecords.give_up, "self._log.append(passed_over(group, offer, at, now_ms))", "pass"),
        )
    ],
    "B1: what a connection waits for stays when it has gone": [Patch(Pulls, "disconnected", _forget_nobody)],
    "T3: a lease never lapses": [Patch(Pulls, "wake", _lapse_never)],
}
