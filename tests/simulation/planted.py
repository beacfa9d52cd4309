"""Bugs to plant in the servers, to see that the simulation catches them, and after how many seeds.

Invariant: each takes one rule out and leaves all else as it is; nothing stays planted behind `planted`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

from delayd.clock import Clock
from delayd.delay import core as delay_core
from delayd.delay import outcomes as delay_outcomes
from delayd.delay.dispatcher import Dispatcher
from delayd.delay.outcomes import OutcomeLog
from delayd.delay.sender import Sender, Wire
from delayd.delay.window import Window
from delayd.disk import File
from delayd.errors import DiskFull
from delayd.identity import Identity, open_identity
from delayd.log.dispatch import NewPart
from delayd.log.group import NewGroup
from delayd.log.log import Log
from delayd.testing.clock import SimClock
from delayd.wire.frame import Frame
from realtime import checkpoint as realtime_checkpoint
from realtime import commit as realtime_commit
from realtime.commit import Commit, DispatchFrame, Greeting, GroupCommit, Written
from realtime.core import Core
from realtime.groups import Group, Pull
from realtime.handoff import Origin, Origins
from realtime.peer import Peer
from realtime.pull_commit import PullCommit
from realtime.pulls import Pulls
from realtime.ranges import Ranges
from tests.property.test_delay_lives import PLANTED as PLANTED_IN_DELAY
from tests.simulation.run import STEPS, Run

SLOT_MS = 500


class Patch(NamedTuple):
    """One name that stands for something else while a bug is planted."""

    where: object
    name: str
    what: object


# The realtime server.


def _answer_before_the_sync(message_log: Log, groups: Sequence[NewGroup], now_ms: int) -> Written:
    offsets = message_log.append(groups, now_ms)
    return Written(offsets, message_log.end, message_log.crc32c)


def _answer_the_window_at_once(self: GroupCommit, item: DispatchFrame | Greeting) -> None:
    if isinstance(item, Greeting):
        next_sequence = self._next_sequence
        commit = Commit([item], [], [], [], self._appended_at_ms, next_sequence)
        commit.end, commit.crc32c = self._log.durable, self._log.crc32c
        self.on_commit(commit)
    else:
        _put(self, item)


def _take_any_session(self: Origins, peer: Peer, epoch: int, session: int) -> Origin:
    return next(iter(self))


def _drop_nothing(self: GroupCommit, origin: Origin) -> list[DispatchFrame | Greeting]:
    return []


def _hear_any_hello(self: Core, peer: Peer, frame: Frame) -> None:
    _hello(self, peer, frame._replace(head=frame.head | {"target": self.log_id}))


def _keep_no_window(self: Origins, end: int) -> int:
    return end


def _close_consume_logs_without_a_sync(disk: object, path: str, unsynced: list[File]) -> None:
    while unsynced:
        unsynced.pop().close()


def _checkpoint_before_the_pull_log(self: Core) -> None:
    if not self._checkpoints.under_way and not self._failed:
        self._checkpoints.begin()
        self._checkpoints.take(self._snapshot(), self._checkpointed)


# Consumers.


def _acknowledge_before_the_sync(self: PullCommit, callback: Callable[[], None]) -> None:
    callback()


def _sync_nothing(self: PullCommit) -> None:
    if self._under_way is None and self._waiting:
        self._under_way, self._waiting = self._waiting, []
        self._executor.submit(_nothing, self._synced)


def _count_what_is_lost(
    self: Pulls, group: Group, incarnation: int, start: int, end: int, held: Sequence[Pull]
) -> Ranges:
    return Ranges()


def _lapse_never(self: Pulls) -> None:
    list(self._leases.due(self._clock.monotonic_ms()))
    for waiting in self._deadlines.due(self._clock.monotonic_ms()):
        self._expire(waiting)


# The delay server.


def _write_without_a_sync(self: OutcomeLog, by_hour: dict[int, list[NewPart]], now_ms: int) -> set[int]:
    full: set[int] = set()
    for hour, parts in by_hour.items():
        try:
            self._open(hour, now_ms).append(delay_outcomes._groups(hour, parts, self._epoch, now_ms))
        except DiskFull:
            full.add(hour)
    return full


def _a_step_too_far(self: Window) -> tuple[int, int]:
    if not self.earlier_settled:
        return (0, 0)
    return (self._epoch, next(iter(self._undecided), self._last_id))


def _pass_what_is_unsettled(self: Window) -> tuple[int, int]:
    return (self._epoch, next(iter(self._undecided), self._last_id + 1) - 1)


def _note_nothing(self: Dispatcher, routes: dict[bytes, int], unrouted: list[bytes]) -> None:
    log_control, self._log_control = self._log_control, _heard_at_once
    _routed(self, routes, unrouted)
    self._log_control = log_control
    self.changed.clear()


def _heard_at_once(batch: bytes, on_durable: Callable[[], None]) -> None:
    on_durable()


def _keep_the_epoch(*arguments: object) -> Identity:
    return open_identity(*arguments)._replace(epoch=1)  # type: ignore[arg-type]


class _Ahead(SimClock):
    """A clock that is one slot ahead of another."""

    def __init__(self, clock: Clock) -> None:
        assert isinstance(clock, SimClock)
        super().__init__(machine=clock.machine)
        self._clock = clock

    def now_ms(self) -> int:
        return self._clock.now_ms() + SLOT_MS

    @property
    def confirmed(self) -> bool:
        return self._clock.confirmed


def _step_early(self: Dispatcher) -> None:
    _look_ahead(self)
    _step(self)


def _pump_early(self: Sender, wire: Wire, session: int, current: Callable[[int], bool]) -> None:
    _look_ahead(self)
    _pump(self, wire, session, current)


def _look_ahead(part: Dispatcher | Sender) -> None:
    if not isinstance(part._clock, _Ahead):
        part._clock = _Ahead(part._clock)


def _nothing() -> None:
    """A sync that is left out."""


_put = GroupCommit.put
_hello = Core._hello
_routed = Dispatcher.routed
_step = Dispatcher.step
_pump = Sender.pump

PLANTED: dict[str, list[Patch]] = {
    **{name: [Patch(*patch)] for name, patch in PLANTED_IN_DELAY.items()},
    "D_h is not synced": [Patch(OutcomeLog, "_write", _write_without_a_sync)],
    "W is a step too far": [Patch(Window, "w", property(_a_step_too_far))],
    "W passes what earlier epochs left unsettled": [Patch(Window, "w", property(_pass_what_is_unsettled))],
    "a note is not logged": [Patch(Dispatcher, "routed", _note_nothing)],
    "an epoch is used again": [Patch(delay_core, "open_identity", _keep_the_epoch)],
    "rows leave a slot early": [Patch(Dispatcher, "step", _step_early), Patch(Sender, "pump", _pump_early)],
    "T answers a frame before its fsync": [Patch(realtime_commit, "_write", _answer_before_the_sync)],
    "T answers a window before its fsync": [Patch(GroupCommit, "put", _answer_the_window_at_once)],
    "T takes frames of any session": [Patch(Origins, "session_of", _take_any_session)],
    "T does not drop the queued frames of an older session": [Patch(GroupCommit, "drop", _drop_nothing)],
    "T hears hellos that are for another server": [Patch(Core, "_hello", _hear_any_hello)],
    "T's checkpoint passes batches that are in doubt": [Patch(Origins, "window_offset", _keep_no_window)],
    "T's checkpoint counts consume logs that are not synced": [
        Patch(realtime_checkpoint, "_sync", _close_consume_logs_without_a_sync)
    ],
    "T's checkpoint does not wait for the pull log": [Patch(Core, "checkpoint", _checkpoint_before_the_pull_log)],
    "an acknowledgement is answered before its fsync": [
        Patch(PullCommit, "when_durable", _acknowledge_before_the_sync)
    ],
    "the pull log is not synced": [Patch(PullCommit, "_sync", _sync_nothing)],
    "acknowledgements of lost pulls count": [Patch(Pulls, "_lost", _count_what_is_lost)],
    "a lease never lapses": [Patch(Pulls, "wake", _lapse_never)],
}

QUICK = (
    "L2: a send is answered before its fsync",
    "H4: a session sends before the window is answered",
    "P2: a checkpoint counts schedule logs that are not durable",
    "P4: recovery ignores the dispatch logs",
    "I1: a checkpoint passes batches and forgets their numbers",
    "W is a step too far",
    "W passes what earlier epochs left unsettled",
    "a note is not logged",
    "an epoch is used again",
    "rows leave a slot early",
    "T answers a frame before its fsync",
    "T's checkpoint passes batches that are in doubt",
    "the pull log is not synced",
    "acknowledgements of lost pulls count",
)
"""Those that few seeds catch, for every run of the tests."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have a bug in the servers."""
    with ExitStack() as stack:
        for where, attribute, what in PLANTED[name]:
            stack.enter_context(patch.object(where, attribute, what))
        yield


def seeds_to_catch(name: str, seeds_max: int, first: int = 0, steps: int = STEPS) -> tuple[int, str] | None:
    """How many seeds it takes until a run with a planted bug goes wrong, and how; None when none does."""
    with planted(name):
        for count in range(1, seeds_max + 1):
            try:
                Run(first + count - 1, steps).run()
            except AssertionError as error:
                return count, str(error).partition("\n")[0]
    return None
