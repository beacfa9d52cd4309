"""Owned slots: no two servers take keys of one slot at a time, whatever happens in between (rule I4)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import data, sampled_from

from delayd.delay.keys import owned_slots
from delayd.delay.keys.owned_slots import STATE_KEY, OwnedSlots
from delayd.errors import (
    DelaydError,
    DiskFull,
    DiskReserve,
    NotOwner,
    RetryLater,
    ServerUnavailable,
    SlotsInUse,
    SlowDown,
)
from delayd.identity import Identity
from delayd.site import Site
from delayd.testing.clock import SimClock
from delayd.testing.disk import MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.wire.slots import SlotOwners, SlotSet, slot_set, slots_of_text, slots_text
from tests.unit.meta.servers import LEASE_MS, FullState, SteppedMeta, delay_server

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

    def heartbeat(self) -> None:
        self.meta.register(delay_server(self.log_id))
        self.meta.meta.claim_slots(self.own.owned, self.log_id)
        self.own.lost(self.meta.meta.owned_by_others(self.own.owned, self.log_id))

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
    second.heartbeat()
    return meta, first, second


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


def _lives(draw: Callable[[list[str]], str], steps: int) -> None:
    """Two servers, their operators and meta in any order; no slot is ever served by both."""
    meta = SteppedMeta()
    members = {1: Member(meta, 1), 2: Member(meta, 2)}
    released: list[tuple[int, SlotOwners | DelaydError]] = []
    slot = slot_set(np.array([7]))
    for member in members.values():
        member.heartbeat()
    for _ in range(steps):
        log_id = int(draw(["1", "2"]))
        member = members[log_id]
        step = draw(["take", "release", "move", "hear", "work", "work", "restart", "heartbeat", "later"])
        if step == "take":
            member.own.admit(slots("7"), lambda outcome: None)
        elif step == "release":
            member.own.release(slot, lambda outcome, log_id=log_id: released.append((log_id, outcome)))  # type: ignore[misc]
        elif step == "move":
            # An operator goes on only when a release was confirmed, maybe long ago.
            confirmed = [(number, owners) for number, owners in released if isinstance(owners, SlotOwners)]
            if confirmed:
                number, owners = confirmed[int(draw(["0", "-1"]))]
                with suppress(DelaydError):
                    meta.meta.move_slots(slot, owners.versions, 3 - number, lambda told: None)
        elif step == "hear":
            member.hear()
        elif step == "work":
            member.worker.step()
        elif step == "restart":
            members[log_id] = member.restarted()
        elif step == "heartbeat":
            member.heartbeat()
        else:
            meta.restart()
            meta.clock.advance(LEASE_MS)
        assert not (members[1].own.owned & members[2].own.owned).any(), "both serve it"


@given(data())
def test_rule_I4_never_both(draws: object) -> None:
    _lives(lambda steps: draws.draw(sampled_from(steps)), 40)  # type: ignore[attr-defined]


def test_planted_bugs_make_both_serve_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is worth something: without the versions it finds harm."""
    generator = np.random.default_rng(3)
    monkeypatch.setattr(owned_slots, "was_given_since", lambda answer, slot, version: True)
    with pytest.raises(AssertionError, match="both serve it"):
        for _ in range(200):
            _lives(lambda steps: str(generator.choice(steps)), 200)
