"""Before meta is heard, only a server in the place where it was made or taken last may serve."""

from functools import partial

import pytest

from delayd.errors import (
    DelaydError,
    EpochOutOfRange,
    FencedInstance,
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
