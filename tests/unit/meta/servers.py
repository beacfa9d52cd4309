"""A meta core on fakes, whose transactions happen when the test says so, and servers that register with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from delayd.address import Endpoint
from delayd.errors import RetryLater
from delayd.testing.clock import SimClock
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.wire.meta import NO_SLOTS, Registered, Routes, SlotClaims, SlotSet, slots_of_text
from meta.core import Meta
from meta.registry import RegistryTerms
from meta.slots import begin_in_doubt
from tests.worlds.executor import InlineExecutor

LEASE_MS = 5_000


def delay_server(log_id: int, *, port: int = 0, epoch: int = 1, pid: int = 1, place: int = 0) -> Registered:
    return Registered("delay", log_id, Endpoint("127.0.0.1", port or 1_000 + log_id), epoch, pid, place)


def realtime_server(log_id: int, *, port: int = 0, epoch: int = 1, pid: int = 1) -> Registered:
    return Registered("realtime", log_id, Endpoint("127.0.0.1", port or 2_000 + log_id), epoch, pid)


def claims(owned: str = "", version: int = 1, *, given_up: str = "", peers: Iterable[int] = ()) -> SlotClaims:
    """What a delay server keeps about slots: all of them at one version."""
    own, other = (slots_of_text(text) if text else NO_SLOTS for text in (owned, given_up))
    return SlotClaims(own, np.where(own | other, np.uint32(version), np.uint32(0)), frozenset(peers))


class FullState(MemoryState):
    """Has no space left for as long as a test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def commit(self, puts: Iterable[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        if self.error is not None:
            raise self.error
        super().commit(puts, removes)


class SteppedMeta:
    """One meta server that can be stepped, stopped and started again."""

    def __init__(self, state: MemoryState | None = None, executor: InlineExecutor | StepExecutor | None = None) -> None:
        self.clock = SimClock()
        self.state = state or MemoryState()
        self.executor = executor or InlineExecutor()
        self.stopped: list[BaseException] = []
        self.meta = self._open()

    def restart(self, *, moved: bool = False) -> None:
        self.state = self.state.after_crash()
        self.meta = self._open(moved=moved)

    def replace(self, state: MemoryState, *, in_doubt: bool = True) -> None:
        """Another directory in the place of this one: that of a meta which takes over, or an older copy."""
        self.state = state
        if in_doubt:
            begin_in_doubt(state)
        self.meta = self._open()

    def tell(self, log_id: int, told: SlotClaims) -> SlotSet:
        """A delay server registers with what it keeps about slots; those that it must not serve any more."""
        answers: list[RetryLater | None] = []
        self.meta.register(delay_server(log_id), answers.append, told)
        return self.meta.slots_lost(told, log_id)

    def meet(self, *log_ids: int) -> None:
        """Delay servers register until all of them may own slots."""
        for _ in log_ids:
            for log_id in log_ids:
                self.tell(log_id, claims(peers=log_ids))

    def register(self, *servers: Registered) -> list[RetryLater | None]:
        """What each of them was answered, as far as it was."""
        answers: list[RetryLater | None] = []
        for server in servers:
            self.meta.register(server, answers.append)
        return answers

    def ask(self, subjects: Sequence[str], *, assign: bool = True) -> list[Routes | RetryLater]:
        """The answer, once it was given."""
        answers: list[Routes | RetryLater] = []
        self.meta.routes(subjects, assign, answers.append)
        return answers

    def routes(self, *subjects: str, assign: bool = True) -> Routes:
        (answer,) = self.ask(subjects, assign=assign)
        assert isinstance(answer, Routes)
        return answer

    def alive(self, role: str | None = None) -> dict[int, bool]:
        return {info.server.log_id: info.alive for info in self.meta.servers(role)}

    def _open(self, *, moved: bool = False) -> Meta:
        terms = RegistryTerms(LEASE_MS, moved)
        return Meta(self.state, "state.lmdb", self.executor, self.clock, terms, self.stopped.append)
