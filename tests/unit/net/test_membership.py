"""Before meta is heard, only a server in the place where it was made or taken last may serve."""

from functools import partial

import pytest

from delayd.errors import (
    DelaydError,
    DiskReserve,
    EpochOutOfRange,
    FencedInstance,
    NotTrusted,
    PlaceTaken,
    ServerFenced,
    StaleEpoch,
    WrongCluster,
)
from delayd.machine.operating import Fence, WaitKind
from delayd.net.trust import Membership
from delayd.testing.state import MemoryState
from tests.trust import SECRET

PLACE, OTHER_PLACE, CLUSTER = 5, 6, 0xC1


def life(state: MemoryState, place: int, *, fresh: bool = False) -> Membership:
    """A start of a server in a place."""
    membership = Membership(SECRET, state, "state.lmdb", place, Fence("delay", 1))
    membership.begin(fresh=fresh)
    return membership


def test_a_new_server_and_one_that_is_back_in_its_place_serve_without_meta() -> None:
    state = MemoryState()
    assert not life(state, PLACE, fresh=True).fence.is_up
    assert not life(state, PLACE).fence.is_up


def test_rule_H8_a_directory_in_another_place_serves_when_meta_has_taken_it() -> None:
    state = MemoryState()
    life(state, PLACE, fresh=True)
    moved = life(state, OTHER_PLACE)
    with pytest.raises(ServerFenced, match="meta has not taken it there"):
        moved.fence.check()
    ((what, why, command),) = moved.fence.waits()
    assert "delay server 0000000000000001" in what and "another place" in why and "start meta" in command
    moved.joined(CLUSTER)
    moved.fence.check()
    assert not life(state, OTHER_PLACE).fence.is_up
    assert life(state, PLACE).fence.is_up


def test_rule_H8_targets_are_asked_first_when_a_directory_may_be_a_copy() -> None:
    state, asked = MemoryState(), [0]

    def ask() -> None:
        asked[0] += 1

    def begun(place: int, *, fresh: bool = False) -> Membership:
        membership = Membership(SECRET, state, "state.lmdb", place, Fence("delay", 1), ask)
        membership.begin(fresh=fresh)
        return membership

    begun(PLACE, fresh=True)
    at_home = begun(PLACE)
    at_home.refused(DiskReserve("full"))
    assert asked == [0]
    # A folder that was removed and made again can have the number of the old one.
    at_home.refused(PlaceTaken("another process"))
    assert asked == [1]
    begun(OTHER_PLACE)
    assert asked == [2]


def test_rule_H8_targets_are_asked_again_by_the_next_start_if_they_have_not_answered() -> None:
    state = MemoryState()
    life(state, PLACE, fresh=True)
    for answered in (False, True):
        fence = Fence("delay", 1)
        doubt = partial(fence.put_up, "target 7", ServerFenced("not asked yet"), WaitKind.TARGET_NOT_ASKED)
        membership = Membership(SECRET, state, "state.lmdb", OTHER_PLACE, fence, doubt)
        membership.begin(fresh=False)
        membership.joined(CLUSTER)
        assert fence.is_up, "meta has taken it, and the target has not answered"
        if answered:
            fence.take_down("target 7")
        membership.joined(CLUSTER)
        assert fence.is_up is not answered
    assert not life(state, OTHER_PLACE).fence.is_up


def test_a_place_that_does_not_check_is_asked_of_meta() -> None:
    state = MemoryState()
    life(state, PLACE, fresh=True)
    state.commit([(b"place", b"\xc1")])
    assert life(state, PLACE).fence.is_up


@pytest.mark.parametrize("kind", [PlaceTaken, FencedInstance, StaleEpoch, EpochOutOfRange, WrongCluster])
def test_rule_H8_a_server_that_meta_takes_for_a_copy_serves_no_more(kind: type[DelaydError]) -> None:
    membership = life(MemoryState(), PLACE, fresh=True)
    membership.refused(kind("the reason"))
    with pytest.raises(ServerFenced, match=f"meta says {kind.code}: the reason"):
        membership.fence.check()
    assert membership.fence.by_meta and membership.fence.waits()[0][2]
    membership.joined(CLUSTER)
    assert not membership.fence.is_up


@pytest.mark.parametrize("error", [DiskReserve("full"), NotTrusted("another secret")])
def test_a_refusal_that_says_nothing_of_copies_stops_nobody(error: DelaydError) -> None:
    membership = life(MemoryState(), PLACE, fresh=True)
    membership.refused(error)
    assert not membership.fence.is_up


def test_the_cluster_is_kept_with_the_first_registration() -> None:
    state = MemoryState()
    life(state, PLACE, fresh=True).joined(CLUSTER)
    commits = state.commits
    again = life(state, PLACE)
    again.joined(CLUSTER)
    assert again.cluster_id == CLUSTER
    assert state.commits == commits
