"""Registrations: leases in monotonic time, lives of one directory, and what a restart knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delayd.address import INSIDE_SUFFIX, Endpoint
from delayd.errors import EpochOutOfRange, FencedInstance, PlaceTaken, SlowDown
from delayd.machine.identity import EPOCH_MAX, EPOCH_STEPS_MAX
from delayd.wire.meta import SERVERS_MAX

from .servers import LEASE_MS, SteppedMeta, delay_server, realtime_server


def test_a_server_is_alive_for_one_lease_after_its_last_registration() -> None:
    world = SteppedMeta()
    assert world.register(delay_server(1)) == [None]
    world.clock.advance(LEASE_MS - 1)
    assert world.alive() == {1: True}
    assert world.meta.servers(None)[0].seen_ms_ago == LEASE_MS - 1
    world.register(delay_server(1))
    world.clock.advance(LEASE_MS - 1)
    assert world.alive() == {1: True}
    world.clock.advance(1)
    assert world.alive() == {1: False}
    world.register(delay_server(1))
    assert world.alive() == {1: True}


def test_a_server_that_was_heard_right_after_meta_stood_still_was_not_seen_in_the_future() -> None:
    world = SteppedMeta()
    world.register(delay_server(1), delay_server(2))
    world.clock.advance(700)
    world.register(delay_server(2))
    world.meta.stood_still(500)
    assert {info.server.log_id: info.seen_ms_ago for info in world.meta.servers(None)} == {1: 200, 2: 0}


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
def test_rule_T3_a_step_of_the_wall_clock_ends_no_lease(step_ms: int) -> None:
    world = SteppedMeta()
    world.register(delay_server(1), delay_server(2))
    world.clock.advance(LEASE_MS - 1)
    world.register(delay_server(2))
    world.clock.step_wall(step_ms)
    assert world.alive() == {1: True, 2: True}
    world.clock.advance(1)
    assert world.alive() == {1: False, 2: True}


def test_a_heartbeat_that_says_nothing_new_costs_no_transaction() -> None:
    world = SteppedMeta()
    world.register(delay_server(1))
    before = world.state.commits
    assert world.register(*[delay_server(1)] * 20) == [None] * 20
    assert world.state.commits == before


def test_a_server_that_starts_on_an_empty_directory_ends_the_lease_of_what_was_at_its_address() -> None:
    world = SteppedMeta()
    world.register(realtime_server(9, port=2_000), realtime_server(5, port=2_001))
    world.register(realtime_server(6, port=2_000))
    assert world.alive() == {5: True, 6: True, 9: False}


def test_when_no_place_is_left_the_server_unseen_for_longest_is_forgotten_but_none_that_is_needed() -> None:
    world = SteppedMeta()
    world.register(realtime_server(5_000))
    world.routes("a.subject")
    world.clock.advance(1)
    for log_id in range(1, SERVERS_MAX):
        world.register(delay_server(log_id))
    with pytest.raises(SlowDown, match="stop some"):
        world.register(delay_server(6_000))
    world.clock.advance(LEASE_MS)
    world.register(delay_server(1))
    world.register(delay_server(6_000))
    # 5,000 has a subject and 1 is alive, so 2 had to go; also from the state.
    for _ in range(2):
        known = world.alive()
        assert len(known) == SERVERS_MAX
        assert {1, 3, 5_000, 6_000} <= set(known)
        assert 2 not in known
        world.restart()


def test_rule_H8_a_copy_that_starts_beside_a_server_is_refused_for_good_when_the_server_is_heard_again() -> None:
    world = SteppedMeta()
    world.register(delay_server(1, epoch=1, place=5))
    world.clock.advance(100)
    copy = delay_server(1, port=9, epoch=2, pid=2, place=6)
    with pytest.raises(PlaceTaken) as taken:
        world.register(copy)
    assert taken.value.retry_after_ms == LEASE_MS - 100
    world.clock.advance(100)
    with pytest.raises(PlaceTaken):
        world.register(copy)
    world.register(delay_server(1, epoch=1, place=5))
    with pytest.raises(FencedInstance, match="copy of its directory"):
        world.register(copy)
    assert [info.server for info in world.meta.servers(None)] == [delay_server(1, epoch=1, place=5)]
    # The copy changed nothing: the next start of the right one has the same epoch and is taken at once.
    world.register(delay_server(1, epoch=2, place=5))
    assert world.alive() == {1: True}


@pytest.mark.parametrize("epoch", [EPOCH_MAX + 1, (1 << 63) - 1, 7 + EPOCH_STEPS_MAX + 1])
def test_rule_H8_an_epoch_that_no_server_can_have_reached_is_refused(epoch: int) -> None:
    world = SteppedMeta()
    world.register(delay_server(1, epoch=7))
    with pytest.raises(EpochOutOfRange, match="epoch 7 was heard last"):
        world.register(delay_server(1, epoch=epoch))
    assert world.register(delay_server(1, epoch=8)) == [None]


def test_addresses_of_a_home_that_has_ended_are_told_to_nobody() -> None:
    world = SteppedMeta()
    inside = f"p1-1{INSIDE_SUFFIX}"
    world.register(replace(realtime_server(1), endpoint=Endpoint(inside, 1)), delay_server(2))
    world.restart()
    assert [info.server.log_id for info in world.meta.servers(None)] == [2]
    assert not world.routes("a").servers
    world.register(realtime_server(1, port=9, epoch=2, pid=7))
    assert [info.server.endpoint.port for info in world.routes("a").servers] == [9]


def test_rule_H8_a_copy_of_meta_sends_nobody_to_the_servers_that_it_was_copied_from() -> None:
    world = SteppedMeta()
    world.register(realtime_server(1), delay_server(2, epoch=4, place=5))
    assert world.routes("a").routes == {"a": 1}
    world.restart(moved=True)
    assert world.meta.servers(None) == []
    answer = world.routes("a")
    assert answer.routes == {"a": 1} and not answer.servers
    # Nobody's place is kept either: what was copied with it serves at once.
    world.register(realtime_server(1, port=9, epoch=2, pid=7), delay_server(2, port=8, epoch=5, place=6))
    assert [info.server.endpoint.port for info in world.meta.servers(None)] == [8, 9]
    assert [info.server.endpoint.port for info in world.routes("a").servers] == [9]
