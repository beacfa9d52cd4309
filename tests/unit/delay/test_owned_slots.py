"""Owned slots: no two servers take keys of one slot at a time, whatever happens in between (rule I4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers

from delayd.delay.keys.owned_slots import OwnedSlots
from delayd.errors import DelaydError, RetryLater
from delayd.machine.alarms import Alarms
from delayd.machine.identity import Identity, Site
from delayd.testing.clock import SimClock
from delayd.testing.disk import MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.wire.meta import SlotOwners, SlotSet, slots_of_text
from tests.unit.delay.planted import PLANTED
from tests.unit.meta.servers import LEASE_MS, SteppedMeta, delay_server

SLOT = slots_of_text("7")
OnSlots = Callable[[SlotOwners | DelaydError], None]


def _none_pending(wanted: SlotSet, told: Callable[[int | DelaydError], None]) -> None:
    told(0)


class Member:
    """One delay server's slots beside a real meta core; questions and answers travel when the test says so."""

    def __init__(self, meta: SteppedMeta, log_id: int, state: MemoryState | None = None) -> None:
        self.meta = meta
        self.log_id = log_id
        self.state = state or MemoryState()
        self.worker = StepExecutor()
        self.asked: list[tuple[SlotSet, OnSlots]] = []
        self.answer: tuple[SlotSet, frozenset[int] | None] | None = None
        site = Site(MemoryDisk(), self.state, "d", Identity(log_id, 1), Alarms(SimClock()), self.worker)
        self.own = OwnedSlots(site, lambda wanted, answer: self.asked.append((wanted, answer)), _none_pending)

    def restarted(self) -> Member:
        return Member(self.meta, self.log_id, self.state.after_crash())

    def hear(self) -> None:
        """Meta answers what was asked."""
        asked, self.asked = self.asked, []
        for wanted, answer in asked:
            try:
                self.meta.meta.slots(wanted, answer)
            except RetryLater as error:
                answer(error)

    def settle(self) -> None:
        while self.asked or self.worker.waiting or self.worker.ran:
            self.hear()
            self.worker.run_all()

    def register(self) -> None:
        """Meta hears the claims; its answer comes when `registered` says so."""
        claims, meta = self.own.claims, self.meta.meta

        def stored(refused: RetryLater | None) -> None:
            self.answer = None if refused else (meta.slots_lost(claims, self.log_id), meta.slot_peers(self.log_id))

        self.answer = None
        meta.register(delay_server(self.log_id), stored, claims)

    def registered(self) -> None:
        """The answer has come."""
        if self.answer is not None:
            lost, peers = self.answer
            self.answer = None
            self.own.lost(lost)
            if peers is not None:
                self.own.met(peers)

    def heartbeat(self) -> None:
        self.register()
        self.registered()


class Lives:
    """Three servers, their operators and meta in any order; no slot is ever served by two of them."""

    OFTEN = ("take", "hear", "work", "register", "answered", "beat", "beat")
    SELDOM = ("release", "move", "restart", "later", "empty", "copy_", "older", "settle")
    STEPS = OFTEN * 4 + SELDOM

    def __init__(self, draw: Callable[[Sequence[str]], str]) -> None:
        self.draw = draw
        self.meta = SteppedMeta()
        self.members = {log_id: Member(self.meta, log_id) for log_id in (1, 2, 3)}
        self.released: list[tuple[int, SlotOwners | DelaydError]] = []
        self.heard: set[int] = set()  # By this directory of meta.
        self.copy = self.meta.state.after_crash()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            step = self.draw(self.STEPS)
            getattr(self, step)()
            assert sum(int(member.own.owned[7]) for member in self.members.values()) <= 1, "two serve it"

    @property
    def member(self) -> Member:
        return self.members[int(self.draw(("1", "2", "3")))]

    def take(self) -> None:
        self.member.own.admit(np.flatnonzero(SLOT).astype(np.uint16), lambda outcome: None)

    def release(self) -> None:
        member = self.member
        member.own.release(SLOT, lambda outcome: self.released.append((member.log_id, outcome)))

    def move(self) -> None:
        """An operator goes on only when the owner has confirmed a release, maybe long ago."""
        confirmed = [
            (number, owners)
            for number, owners in self.released
            if isinstance(owners, SlotOwners) and owners.of(number)[7]
        ]
        if confirmed:
            number, owners = confirmed[int(self.draw(("0", "-1")))]
            with suppress(DelaydError):
                to = self.draw([str(other) for other in self.members if other != number])
                self.meta.meta.move_slots(SLOT, owners.versions, int(to), lambda told: None)

    def hear(self) -> None:
        self.member.hear()

    def work(self) -> None:
        self.member.worker.step()

    def restart(self) -> None:
        member = self.member
        self.members[member.log_id] = member.restarted()

    def register(self) -> None:
        member = self.member
        member.register()
        self.heard.add(member.log_id)

    def answered(self) -> None:
        self.member.registered()

    def beat(self) -> None:
        """A whole heartbeat, with all that was asked and stored."""
        member = self.member
        member.heartbeat()
        self.heard.add(member.log_id)
        member.settle()

    def later(self) -> None:
        self.meta.restart()
        self.meta.clock.advance(LEASE_MS)

    def empty(self) -> None:
        """Meta's directory is lost."""
        self._replace(MemoryState())

    def copy_(self) -> None:
        """Somebody copies meta's directory."""
        self.copy = self.meta.state.after_crash()

    def older(self) -> None:
        """The copy takes the place of meta's directory."""
        self._replace(self.copy.after_crash())

    def settle(self) -> None:
        """An operator says that all servers are here, and is right."""
        if len(self.heard) == len(self.members):
            with suppress(DelaydError):
                self.meta.meta.settle_slots(lambda told: None)

    def _replace(self, state: MemoryState) -> None:
        self.meta.replace(state)
        self.heard = set()
        for member in self.members.values():
            # The connection to the old one has ended.
            member.answer = None


@given(integers(0, 1 << 32))
@settings(max_examples=8)
def test_rule_I4_never_two(seed: int) -> None:
    _live(np.random.default_rng(seed))


def _live(generator: np.random.Generator) -> None:
    Lives(lambda steps: str(generator.choice(steps))).run(200)


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_make_two_serve_a_slot(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is worth something: with each of these bugs it finds harm."""
    for patch in PLANTED[bug]:
        monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError, match="two serve it"):
        for seed in range(100):
            _live(np.random.default_rng(seed))


def test_what_is_asked_for_when_a_change_is_stored_is_stored_once_and_after_it() -> None:
    member = Member(SteppedMeta(), 1)
    heard: list[object] = []
    pair = slots_of_text("7"), slots_of_text("9")
    owners = SlotOwners(np.zeros(len(SLOT), np.uint64), np.full(len(SLOT), 3, np.uint32))

    def again(outcome: SlotOwners | DelaydError) -> None:
        heard.append(outcome)
        member.own.release(pair[1], heard.append)
        # Meta answers at once, so the second change comes within the first one's end.
        member.asked.pop()[1](owners)

    member.own.release(pair[0], again)
    member.asked.pop()[1](owners)
    member.worker.run_all()
    member.worker.run_all()
    assert heard == [owners, owners]
