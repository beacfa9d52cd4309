"""A delay and a realtime server in one process: the real cores on real files, a clock that is moved, a wire of calls.

Invariant: nothing happens by itself; `settle` does all that is to be done at an instant, so a day takes minutes.
"""

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from delayd.address import Endpoint
from delayd.batch.batch import Batch
from delayd.batch.columns import Buffer
from delayd.config import DelayConfig, RealtimeConfig
from delayd.delay.core import DelayCore, Surroundings, Threads
from delayd.delay.handoff.wire import OnAnswer, Wire
from delayd.delay.producers import AcceptedBatch
from delayd.errors import DelaydError
from delayd.machine.disk import RealDisk
from delayd.machine.state import LmdbState
from delayd.testing.clock import SimClock
from delayd.testing.executor import StepExecutor
from delayd.wire.frame import ANSWER, MORE, Frame, HeadValue
from delayd.wire.meta import SlotOwners
from realtime.core import Core, Executors
from realtime.core import Surroundings as RealtimeSurroundings
from realtime.recovery import recover

STATE = "state.lmdb"

Move = Callable[[], object]


class Pair:
    """Both servers over one folder, from a first start to a stop."""

    def __init__(self, delay: DelayConfig, realtime: RealtimeConfig) -> None:
        self.clock = SimClock()
        self._disk = RealDisk()
        self._moves: deque[Move] = deque()
        self._threads = [StepExecutor() for _ in range(6)]
        self._states = [LmdbState(self._state_path(config)) for config in (delay, realtime)]
        draw = partial(secrets.randbits, 64)
        recovered = recover(realtime, self._disk, self._states[1], self.clock, draw, self._state_path(realtime))
        executors = Executors(*self._threads[:3])
        around = RealtimeSurroundings(self._disk, self._states[1], self.clock, executors, _begin_anew)
        self.realtime = Core(realtime, around, recovered, _fail)
        self.delay = DelayCore(
            disk=self._disk,
            state=self._states[0],
            config=delay,
            threads=Threads(*self._threads[3:]),
            around=Surroundings(
                clock=self.clock,
                dial=self._dial,
                ask_routes=self._route,
                ask_slots=lambda wanted, answer: answer(SlotOwners.nobody()),
                random_id=draw,
                evidence=self.clock.restart_evidence,
                rest=_rest,
                begin_anew=_begin_anew,
            ),
        )

    def send(self, batch: Batch) -> None:
        """Send a batch; a refusal ends the run."""
        self.delay.send(batch, _accepted)

    def settle(self) -> None:
        """Do all work that is possible while the clock stands still."""
        while True:
            while self._moves:
                self._moves.popleft()()
            stepped = sum(thread.step() for thread in self._threads)
            if not stepped and not self._moves:
                self.delay.wake()
                if self.realtime.next_wake_ms() <= self.clock.monotonic_ms():
                    self.realtime.wake()
                if not self._moves and not any(thread.waiting for thread in self._threads):
                    return

    def close(self) -> None:
        """Stop both and close all files."""
        for core in (self.delay, self.realtime):
            stopped: list[bool] = []
            core.stop(partial(stopped.append, True))
            while not stopped:
                self.settle()
            core.close()
        for state in self._states:
            state.close()
        self._disk.close()

    def _state_path(self, config: DelayConfig | RealtimeConfig) -> str:
        self._disk.make_folder(config.folder)
        return str(Path(config.folder, STATE))

    def _route(self, subjects: list[bytes]) -> None:
        log_id = self.realtime.log_id
        self.delay.handoff.dispatcher.place(log_id, Endpoint("realtime", 1))
        routes = dict.fromkeys(subjects, log_id)
        self._moves.append(partial(self.delay.handoff.dispatcher.routed, routes, []))

    def _dial(self, endpoint: Endpoint, connected: Callable[[Wire], None], lost: Callable[[DelaydError], None]) -> None:
        self._moves.append(partial(connected, _Line(self.realtime, self._moves)))


class _Line:
    """A connection: a Wire for the delay server, a Peer for the realtime server."""

    def __init__(self, realtime: Core, moves: deque[Move]) -> None:
        self._realtime = realtime
        self._moves = moves
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[int, OnAnswer]] = {}

    def call(self, frame_type: int, head: Mapping[str, HeadValue], body: Sequence[Buffer], on_answer: OnAnswer) -> None:
        request_id = next(self._ids)
        self._waiting[request_id] = (frame_type, on_answer)
        frame = Frame(frame_type, 0, request_id, dict(head), memoryview(b"".join(body)))
        self._moves.append(partial(self._realtime.received, self, frame))

    def answer(
        self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = (), *, more: bool = False
    ) -> None:
        frame_type, on_answer = self._waiting[request_id] if more else self._waiting.pop(request_id)
        flags = ANSWER | (MORE if more else 0)
        frame = Frame(frame_type, flags, request_id, dict(head), memoryview(b"".join(body)))
        self._moves.append(partial(on_answer, frame))

    @property
    def is_open(self) -> bool:
        """The connection ends with the run."""
        return True

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        raise error

    def close(self) -> None:
        """No bytes are ever lost on the way."""


def _accepted(what: AcceptedBatch | DelaydError, duplicate: bool) -> None:
    if isinstance(what, DelaydError):
        raise what


def _fail(error: BaseException) -> None:
    raise error


def _rest() -> None:
    """Does nothing: no other work needs the disk."""


def _begin_anew(why: str) -> None:
    raise AssertionError(f"nothing is damaged here: {why}")
