"""Slots of keys at meta: who owns which, durably (rule I4)."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.errors import BadArgument, BadRequest, DiskFull, RetryLater, SlowDown, UnknownServer
from delayd.testing.executor import StepExecutor
from delayd.wire.slots import (
    SLOTS,
    SlotOwners,
    SlotSet,
    Versions,
    need_slots,
    read_slot_owners,
    slots_bytes,
    slots_of_text,
    slots_text,
)
from meta.slots import STATE_KEY

from .servers import LEASE_MS, FullState, SteppedMeta, delay_server, realtime_server

ALL = slots_of_text(f"0-{SLOTS - 1}")
NONE = np.zeros(SLOTS, np.bool_)


def owners(world: SteppedMeta, wanted: SlotSet = NONE) -> SlotOwners:
    """As a client hears of them."""
    answers: list[SlotOwners | RetryLater] = []
    world.meta.slots(wanted, answers.append)
    (answer,) = answers
    assert isinstance(answer, SlotOwners)
    return read_slot_owners(answer.to_head())


def owned(world: SteppedMeta) -> dict[int, str]:
    """The slots of each owner."""
    found = owners(world)
    return {log_id: slots_text(found.of(log_id)) for log_id in np.unique(found.log_ids).tolist() if log_id}


def move(world: SteppedMeta, slots: str, to: int, versions: Versions | None = None) -> str:
    told: list[str | RetryLater] = []
    known = owners(world).versions if versions is None else versions
    world.meta.move_slots(slots_of_text(slots), known, to, told.append)
    (message,) = told
    assert isinstance(message, str)
    return message


def test_rule_I4_an_owner_is_durable_before_it_is_told_and_stays() -> None:
    executor = StepExecutor()
    world = SteppedMeta(executor=executor)
    world.register(delay_server(1))
    executor.run_all()
    answers: list[SlotOwners | RetryLater] = []
    world.meta.slots(slots_of_text("3"), answers.append)
    # Somebody who asks for other slots need not wait, and does not hear of what is not durable.
    assert owned(world) == {}
    assert answers == []
    executor.run_all()
    assert len(answers) == 1
    for _ in range(2):
        assert owned(world) == {1: "3"}
        world.register(delay_server(2))
        executor.run_all()
        world.restart()


def test_free_slots_go_to_the_live_server_with_the_fewest() -> None:
    world = SteppedMeta()
    assert owners(world, ALL).log_ids.any() == False, "nobody is there"  # noqa: E712
    world.register(delay_server(1), delay_server(2), delay_server(3), realtime_server(9))
    world.clock.advance(LEASE_MS)
    world.register(delay_server(1), delay_server(2))
    owners(world, slots_of_text("0-4"))
    assert owned(world) == {1: "0,2,4", 2: "1,3"}
    owners(world, slots_of_text("4-5"))
    assert owned(world) == {1: "0,2,4", 2: "1,3,5"}
    world.register(delay_server(3))
    owners(world, slots_of_text("0-9"))
    assert owned(world)[3] == "6-8"
    assert owners(world).versions.tolist()[:11] == [1] * 10 + [0]


def test_a_full_disk_gives_no_slot_to_anybody() -> None:
    state = FullState()
    world = SteppedMeta(state)
    world.register(delay_server(1))
    state.error = DiskFull("state.lmdb")
    answers: list[SlotOwners | RetryLater] = []
    world.meta.slots(ALL, answers.append)
    assert isinstance(answers[0], RetryLater)
    assert owned(world) == {}
    state.error = None
    owners(world, ALL)
    assert owned(world) == {1: "0-1023"}


def test_an_operator_moves_slots_durably_and_only_from_their_owner() -> None:
    world = SteppedMeta()
    world.register(delay_server(1))
    owners(world, slots_of_text("0-3"))
    world.register(delay_server(2))
    before = owners(world).versions
    assert move(world, "1-2", 2) == "moved the slots 1-2 to 0000000000000002"
    assert move(world, "8", 2).startswith("moved the slots 8 to")
    for _ in range(2):
        assert owned(world) == {1: "0,3", 2: "1-2,8"}
        assert owners(world).versions.tolist()[:4] == [1, 2, 2, 1]
        world.restart()
    with pytest.raises(BadArgument, match="the slots 1 were moved meanwhile"):
        move(world, "0-1", 2, before)
    with pytest.raises(UnknownServer):
        move(world, "0", 5)


def test_nothing_is_given_while_an_operators_word_is_being_stored() -> None:
    executor = StepExecutor()
    world = SteppedMeta(executor=executor)
    world.register(delay_server(1), delay_server(2))
    executor.run_all()
    world.meta.move_slots(slots_of_text("7"), owners(world).versions, 2, lambda _: None)
    with pytest.raises(SlowDown):
        world.meta.slots(slots_of_text("7"), lambda _: None)
    executor.run_all()
    assert owned(world) == {2: "7"}


def test_a_servers_own_slots_come_back_to_a_meta_that_does_not_know_them() -> None:
    world = SteppedMeta()
    world.register(delay_server(1), delay_server(2))
    world.meta.claim_slots(slots_of_text("5-6"), 2)
    owners(world, slots_of_text("5-8"))
    # Who has a slot keeps it, whatever another one says.
    world.meta.claim_slots(slots_of_text("5-9"), 1)
    assert owned(world) == {1: "7-9", 2: "5-6"}
    assert slots_text(world.meta.owned_by_others(slots_of_text("4-9"), 1)) == "5-6"


def test_owners_that_do_not_check_are_told_by_themselves_or_by_an_operator_and_not_guessed() -> None:
    world = SteppedMeta()
    world.register(delay_server(1), delay_server(2))
    owners(world, slots_of_text("0-9"))
    world.state.flip(STATE_KEY)
    for _ in range(2):
        world.restart()
        world.register(delay_server(1), delay_server(2))
        owners(world, slots_of_text("0-9"))
        assert owned(world).get(2) is None
        (wait,) = world.meta.waits()
        assert wait.command.startswith("delayd slots move ") and wait.command.endswith(" --to LOG_ID")
        world.meta.claim_slots(slots_of_text("0,2"), 1)
    move(world, "1,3-1023", 1)
    assert owned(world) == {1: "0-1023"}
    assert not list(world.meta.waits())


@pytest.mark.parametrize("text", ["", "0-", "-1", "5-4", "1024", "a", "1,,2", "1-2-3", "٣٤٥٦٧٨"])
def test_a_text_that_names_no_slots_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="slot"):
        slots_of_text(text)


def test_sets_of_slots_survive_text_and_bytes() -> None:
    draw = np.random.default_rng(1)
    for density in (0.0, 0.01, 0.5, 0.99, 1.0):
        slots = draw.random(SLOTS) < density
        assert (need_slots({"slots": slots_bytes(slots)}, "slots") == slots).all()
        if slots.any():
            assert (slots_of_text(slots_text(slots)) == slots).all()


def test_an_answer_that_names_a_slot_twice_is_refused() -> None:
    world = SteppedMeta()
    world.register(delay_server(1))
    head = owners(world, ALL).to_head()
    head["owners"] = [[1, slots_bytes(ALL)], [2, slots_bytes(slots_of_text("4"))]]
    with pytest.raises(BadRequest, match="twice"):
        read_slot_owners(head)
    with pytest.raises(BadRequest, match="set of slots"):
        need_slots({"slots": b"x"}, "slots")
