"""Slots of keys at meta: who owns which, durably (rule I4)."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.errors import BadArgument, BadRequest, DiskFull, OwnerUnknown, RetryLater, SlowDown, UnknownServer
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.wire.meta import (
    SLOTS,
    SlotOwners,
    SlotSet,
    Versions,
    need_slots,
    read_slot_claims,
    read_slot_owners,
    slots_bytes,
    slots_of_text,
    slots_text,
)
from tests.named_commands import check_commands

from .servers import LEASE_MS, FullState, SteppedMeta, claims, delay_server, realtime_server

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
    world.tell(1, claims())
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
    world.register(realtime_server(9))
    world.meet(1, 2, 3)
    world.clock.advance(LEASE_MS)
    world.meet(1, 2)
    owners(world, slots_of_text("0-4"))
    assert owned(world) == {1: "0,2,4", 2: "1,3"}
    owners(world, slots_of_text("4-5"))
    assert owned(world) == {1: "0,2,4", 2: "1,3,5"}
    world.register(delay_server(3))
    owners(world, slots_of_text("0-9"))
    assert owned(world)[3] == "6-8"
    assert owners(world).versions.tolist()[:11] == [1] * 10 + [0]


def test_an_operator_moves_slots_durably_and_only_from_their_owner() -> None:
    world = SteppedMeta()
    world.meet(1)
    owners(world, slots_of_text("0-3"))
    world.meet(1, 2)
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


def in_doubt() -> SteppedMeta:
    """A meta that takes the place of a lost one."""
    world = SteppedMeta()
    world.replace(MemoryState())
    return world


def told(world: SteppedMeta, *log_ids: int, owned: str = "0-4", peers: tuple[int, ...] = (1, 2)) -> None:
    for log_id in log_ids:
        world.tell(log_id, claims(owned if log_id == 1 else "", peers=peers))


def test_rule_I4_a_meta_that_began_anew_gives_nothing_before_all_who_may_own_slots_have_registered() -> None:
    world = in_doubt()
    for _ in range(2):
        told(world, 1)
        owners(world, ALL)
        assert owned(world) == {1: "0-4"}
        (wait,) = world.meta.waits()
        check_commands(wait.command)
        assert wait.what == "keys of the slots 5-1023" and "0000000000000002" in wait.why
        assert owners(world).withheld.sum() == SLOTS - 5
        assert world.meta.slot_peers(1) is None, "it would make the server forget the others"
        world.restart()
    told(world, 1, 2)
    assert not list(world.meta.waits()) and not owners(world).withheld.any()
    owners(world, slots_of_text("5"))
    assert owned(world) == {1: "0-4", 2: "5"}
    world.restart()
    assert not list(world.meta.waits())


def test_a_meta_that_began_anew_asks_the_peers_of_peers_too() -> None:
    world = in_doubt()
    world.tell(1, claims(peers=(1, 2)))
    world.tell(2, claims(peers=(1, 2, 3)))
    (wait,) = world.meta.waits()
    assert "0000000000000003" in wait.why
    world.tell(3, claims(peers=(2, 3)))
    assert not list(world.meta.waits())


def test_versions_go_on_from_the_highest_that_a_server_knows() -> None:
    world = in_doubt()
    world.tell(1, claims("3", 7, peers=(1, 2)))
    assert world.tell(2, claims(given_up="3-4", version=8, peers=(1, 2))).sum() == 0
    # What 1 had at version 7 was given to 2 since, which has given it up.
    assert slots_text(world.tell(1, claims("3", 7, peers=(1, 2)))) == "3"
    world.tell(1, claims(given_up="3", version=7, peers=(1, 2)))
    owners(world, slots_of_text("3-4"))
    assert owners(world).versions[3:5].tolist() == [9, 9]


def test_rule_I4_a_slot_that_two_servers_claim_is_nobodys_until_an_operator_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = in_doubt()
    world.tell(1, claims("3-4", 7, peers=(1, 2)))
    assert slots_text(world.tell(2, claims("4-5", 7, peers=(1, 2)))) == "4"
    assert "slots_disputed slots=4 log_id=0000000000000002 others=0000000000000001" in caplog.text
    for _ in range(2):
        assert slots_text(world.tell(1, claims("3-4", 7, peers=(1, 2)))) == "4"
        world.tell(2, claims("5", 7, peers=(1, 2)))
        owners(world, ALL)
        assert slots_text(owners(world).withheld) == "4"
        (wait,) = world.meta.waits()
        assert wait.what == "keys of the slots 4" and wait.why == "two delay servers claim them"
        world.restart()
    told(world, 1, 2, owned="")
    move(world, "4", 2)
    assert owners(world).versions[4] == 8 and 4 in np.flatnonzero(owners(world).of(2))


def test_a_server_that_knows_more_than_meta_puts_it_in_doubt(caplog: pytest.LogCaptureFixture) -> None:
    world = SteppedMeta()
    world.meet(1, 2)
    owners(world, slots_of_text("0-3"))
    assert owned(world) == {1: "0,2", 2: "1,3"}
    world.tell(1, claims("0-1", 2, peers=(1, 2, 3)))
    assert "slots_in_doubt log_id=0000000000000001" in caplog.text
    assert owned(world) == {1: "0-1"}
    assert "waits for 0000000000000003" in next(iter(world.meta.waits())).why
    told(world, 3, peers=(1, 2, 3))
    assert slots_text(world.tell(2, claims("1,3", peers=(1, 2, 3)))) == "1"
    assert owned(world) == {1: "0-2", 2: "3"} and not list(world.meta.waits())


def test_rule_I4_an_older_copy_of_meta_is_not_believed_where_its_owner_says_otherwise() -> None:
    world = SteppedMeta()
    world.meet(1, 2)
    owners(world, slots_of_text("0-3"))
    copy = world.state.after_crash()
    world.replace(copy)
    world.tell(2, claims("1", peers=(1, 2)))
    assert owned(world) == {2: "1"}, "slot 3 may have gone to another server since"
    with pytest.raises(OwnerUnknown):
        move(world, "3", 2)
    # An operator's word counts more.
    answers: list[str | RetryLater] = []
    world.meta.move_slots(slots_of_text("3"), owners(world).versions, 2, answers.append, lost=True)
    assert owned(world) == {2: "1,3"}
    world.tell(1, claims("0", peers=(1, 2)))
    world.tell(2, claims("1", peers=(1, 2)))
    assert not list(world.meta.waits())
    assert owned(world) == {1: "0,2", 2: "1,3"}


def test_a_server_may_own_slots_only_when_another_owner_knows_it() -> None:
    world = SteppedMeta()
    world.tell(1, claims())
    world.tell(2, claims(peers=(1,)))
    world.tell(1, claims(peers=(1,)))
    owners(world, slots_of_text("0-1"))
    assert owned(world) == {1: "0-1"}
    with pytest.raises(SlowDown, match="have not heard of"):
        move(world, "1", 2)
    assert world.meta.slot_peers(1) == frozenset({1, 2}) and world.meta.slot_peers(2) == frozenset({1})
    world.tell(1, claims("0-1", peers=(1, 2)))
    assert world.meta.slot_peers(2) == frozenset({1, 2})
    owners(world, slots_of_text("2-3"))
    assert owned(world) == {1: "0-1", 2: "2-3"}


def test_a_full_disk_ends_no_doubt_without_the_claims() -> None:
    state = FullState()
    world = SteppedMeta()
    world.replace(state)
    state.error = DiskFull("state.lmdb")
    told(world, 1, 2)
    assert owned(world) == {} and list(world.meta.waits())
    state.error = None
    told(world, 1, 2)
    assert owned(world) == {1: "0-4"} and not list(world.meta.waits())


def test_a_version_that_cannot_be_is_refused() -> None:
    head = claims("3", 7).to_head()
    assert read_slot_claims(head).versions[3] == 7
    with pytest.raises(BadRequest, match="no slot was given so often"):
        read_slot_claims(claims("3", 0xFFFF_FFFF).to_head())
    with pytest.raises(BadRequest, match="may own slots"):
        read_slot_claims({**head, "slot_peers": list(range(501))})


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
