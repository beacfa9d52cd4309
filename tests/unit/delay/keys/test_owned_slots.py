"""Owned slots: no two servers take keys of one slot at a time, whatever happens in between (rule I4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers

from delayd.delay.keys.owned_slots import STATE_KEY, OwnedSlots
from delayd.errors import (
    DelaydError,
    DiskFull,
    DiskReserve,
    NotOwner,
    OwnerUnknown,
    RetryLater,
    ServerUnavailable,
    SlotsInUse,
    SlowDown,
)
from delayd.machine.identity import Identity, Site
from delayd.testing.clock import SimClock
from delayd.testing.disk import MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.wire.slots import SlotOwners, SlotSet, slot_set, slots_of_text, slots_text
from tests.unit.delay.keys.planted import PLANTED
from tests.unit.meta.servers import LEASE_MS, FullState, SteppedMeta, delay_server

SLOT = slots_of_text("7")
OnSlots = Callable[[SlotOwners | DelaydError], None]
Outcome = DelaydError | None


def slots(text: str) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return np.flatnonzero(slots_of_text(text)).astype(np.uint16)


class Member:
    """One delay server's slots beside a real meta core; questions and answers travel when the test says so."""

    def __init__(self, meta: SteppedMeta, log_id: int, state: MemoryState | None = None) -> None:
        self.meta = meta
        self.log_id = log_id
        self.state = state or MemoryState()
        self.worker = StepExecutor()
        self.pending = 0
        self.reachable = True
        self.asked: list[tuple[SlotSet, OnSlots]] = []
        self.answer: tuple[SlotSet, frozenset[int] | None] | None = None
        site = Site(MemoryDisk(), self.state, "d", Identity(log_id, 1), SimClock(), self.worker)
        self.own = OwnedSlots(site, lambda wanted, answer: self.asked.append((wanted, answer)), self.count)

    def count(self, wanted: SlotSet, told: Callable[[int | DelaydError], None]) -> None:
        told(self.pending)

    def restarted(self) -> Member:
        return Member(self.meta, self.log_id, self.state.after_crash())

    def hear(self) -> None:
        """Meta answers what was asked."""
        asked, self.asked = self.asked, []
        for wanted, answer in asked:
            if not self.reachable:
                answer(ServerUnavailable("meta is away"))
                continue
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

    def take(self, text: str) -> Outcome:
        told: list[Outcome] = []
        self.own.admit(slots(text), told.append)
        self.settle()
        (outcome,) = told
        return outcome

    def release(self, text: str) -> SlotOwners | DelaydError:
        told: list[SlotOwners | DelaydError] = []
        self.own.release(slots_of_text(text), told.append)
        self.settle()
        (outcome,) = told
        return outcome


def two() -> tuple[SteppedMeta, Member, Member]:
    meta = SteppedMeta()
    first, second = Member(meta, 1), Member(meta, 2)
    first.heartbeat()
    assert first.take("0-9") is None
    meet(first, second)
    return meta, first, second


def meet(*members: Member) -> None:
    """Register until all of them may own slots, and know of each other."""
    for _ in range(4):
        for member in members:
            member.heartbeat()
            member.settle()
    assert all(member.own.claims.peers >= {each.log_id for each in members} for member in members)


def move(meta: SteppedMeta, text: str, to: int) -> None:
    told: list[str | RetryLater] = []
    meta.meta.slots(slot_set(np.empty(0, np.intp)), lambda owners: _moved(meta, text, owners, to, told))
    assert isinstance(told[0], str)


def _moved(
    meta: SteppedMeta, text: str, owners: SlotOwners | DelaydError, to: int, told: list[str | RetryLater]
) -> None:
    assert isinstance(owners, SlotOwners)
    meta.meta.move_slots(slots_of_text(text), owners.versions, to, told.append)


def test_owned_slots_need_no_meta_also_after_a_restart() -> None:
    first = Member(SteppedMeta(), 1)
    first.heartbeat()
    assert first.take("0-9") is None
    first.reachable = False
    assert first.take("0,9") is None
    first = first.restarted()
    first.reachable = False
    assert first.take("0,9") is None
    refused = first.take("9,10")
    assert isinstance(refused, SlowDown) and "meta" in str(refused)
    first.reachable = True
    first.heartbeat()
    assert first.take("9,10") is None


def test_rule_I4_another_server_is_told_who_owns_the_keys() -> None:
    _, _, second = two()
    refused = second.take("3")
    assert isinstance(refused, NotOwner) and "0000000000000001" in str(refused)
    assert second.take("20") is None
    assert slots_text(second.own.owned) == "20"


def test_one_question_serves_all_who_wait() -> None:
    meta = SteppedMeta()
    first = Member(meta, 1)
    first.heartbeat()
    told: list[Outcome] = []
    for slot in range(100):
        first.own.admit(slots(str(slot)), told.append)
    assert len(first.asked) == 1
    first.settle()
    assert told == [None] * 100


def test_a_slot_with_pending_rows_is_not_released() -> None:
    _, first, _ = two()
    first.pending = 3
    refused = first.release("0-4")
    assert isinstance(refused, SlotsInUse) and "3 messages" in str(refused)
    assert first.take("0-4") is None


def test_rule_I4_a_released_slot_is_refused_until_it_is_given_anew() -> None:
    meta, first, second = two()
    assert isinstance(first.release("0-4"), SlotOwners)
    for _ in range(2):
        # Meta still names this server: it must not believe that.
        assert isinstance(first.take("4"), SlowDown)
        assert isinstance(second.take("4"), NotOwner)
        first = first.restarted()
    move(meta, "0-4", 2)
    assert isinstance(first.take("4"), NotOwner)
    assert second.take("4") is None
    assert first.take("5-9") is None
    assert isinstance(second.release("4"), SlotOwners)
    move(meta, "4", 1)
    assert first.take("4") is None
    assert isinstance(second.take("4"), NotOwner)


def test_nothing_is_taken_while_a_release_is_under_way() -> None:
    _, first, _ = two()
    told: list[SlotOwners | DelaydError] = []
    first.own.release(slots_of_text("4"), told.append)
    taken: list[Outcome] = []
    first.own.admit(slots("5"), taken.append)
    assert taken == [None]
    first.own.admit(slots("4"), taken.append)
    first.settle()
    assert isinstance(told[0], SlotOwners) and isinstance(taken[1], SlowDown)


def test_a_server_that_was_called_lost_drops_its_slots_when_it_hears_so() -> None:
    meta, first, second = two()
    move(meta, "2-3", 2)
    first.heartbeat()
    assert slots_text(first.own.owned) == "0-1,4-9"
    first.settle()
    assert second.take("2") is None
    assert isinstance(first.restarted().take("2"), NotOwner)


def test_a_full_disk_leaves_everything_as_it_was() -> None:
    meta = SteppedMeta()
    state = FullState()
    first = Member(meta, 1, state)
    first.heartbeat()
    state.error = DiskFull("state.lmdb")
    assert isinstance(first.take("1"), DiskReserve)
    state.error = None
    assert first.take("1") is None
    state.error = DiskFull("state.lmdb")
    assert isinstance(first.release("1"), DiskReserve)
    assert first.take("1") is None


def test_a_value_that_does_not_check_is_asked_of_meta_again() -> None:
    _, first, _ = two()
    first.state.flip(STATE_KEY)
    first = first.restarted()
    assert not first.own.owned.any()
    assert first.take("0-9") is None


def lose_meta(meta: SteppedMeta, *members: Member) -> None:
    """Meta's directory is lost, and another one takes its place."""
    meta.replace(MemoryState())
    for member in members:
        member.heartbeat()
        member.settle()


def test_rule_I4_after_meta_was_lost_nobody_takes_keys_whose_owner_may_be_away() -> None:
    meta, first, second = two()
    assert second.take("20") is None
    lose_meta(meta, second)
    assert second.take("20") is None
    for slot in ("3", "30"):
        refused = second.take(slot)
        assert isinstance(refused, OwnerUnknown) and "delayd status" in str(refused)
    second = second.restarted()
    first.heartbeat()
    assert isinstance(second.take("3"), NotOwner)
    assert first.take("3") is None
    assert second.take("30") is None


def test_with_one_server_nothing_is_to_be_noticed_when_meta_was_lost() -> None:
    meta = SteppedMeta()
    only = Member(meta, 1)
    only.heartbeat()
    assert only.take("0-9") is None
    lose_meta(meta, only)
    assert only.take("0-20") is None


def test_a_server_takes_a_slot_again_that_it_gave_up_before_meta_was_lost() -> None:
    meta, first, second = two()
    for _ in range(3):
        assert isinstance(first.release("4"), SlotOwners)
        move(meta, "4", 2)
        assert second.take("4") is None
        assert isinstance(second.release("4"), SlotOwners)
        move(meta, "4", 1)
        assert first.take("4") is None
    assert isinstance(first.release("4"), SlotOwners)
    lose_meta(meta, first, second)
    assert {type(first.take("4")), type(second.take("4"))} == {type(None), NotOwner}
    # A release in which an empty meta said version 0 must not make a server forget what it knew.
    assert first.own.claims.versions[4] >= 7


def test_rule_I4_an_older_copy_of_meta_gives_no_slot_that_another_server_may_have_by_now() -> None:
    meta, first, second = two()
    assert isinstance(first.release("4"), SlotOwners)
    move(meta, "4", 2)
    copy = meta.state.after_crash()
    # The second one never took it, so it was moved on without it.
    move(meta, "4", 1)
    assert first.take("4") is None
    meta.replace(copy)
    second.heartbeat()
    assert isinstance(second.take("4"), OwnerUnknown)
    first.heartbeat()
    assert isinstance(second.take("4"), NotOwner)


def test_a_server_that_was_put_back_from_a_copy_drops_what_it_gave_up_since() -> None:
    meta, first, second = two()
    copy = Member(meta, 1, first.state.after_crash())
    assert isinstance(first.release("4"), SlotOwners)
    move(meta, "4", 2)
    assert second.take("4") is None
    copy.heartbeat()
    assert isinstance(copy.take("4"), NotOwner)
    assert copy.take("5") is None


def test_rule_I4_neither_of_two_servers_that_claim_a_slot_serves_it_before_an_operator_has_said_who() -> None:
    metas = SteppedMeta(), SteppedMeta()
    both = Member(metas[0], 1), Member(metas[1], 2)
    for member in both:
        member.heartbeat()
        assert member.take("4") is None
    meta, (first, second) = metas[0], both
    second.meta = meta
    meet(first, second)
    for member in both:
        assert isinstance(member.take("4"), OwnerUnknown)
    move(meta, "4", 2)
    assert isinstance(first.take("4"), NotOwner)
    assert second.take("4") is None


def test_meta_hears_of_slots_that_are_being_stored_and_of_peers_that_are_durable() -> None:
    first = Member(SteppedMeta(), 1)
    first.heartbeat()
    first.own.admit(slots("4"), lambda outcome: None)
    first.hear()
    claims = first.own.claims
    assert slots_text(claims.owned) == "4" and claims.versions[4] == 1 and not claims.peers
    first.settle()
    assert first.own.claims.peers == {1}


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
        self.member.own.admit(slots("7"), lambda outcome: None)

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
