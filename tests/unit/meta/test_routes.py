"""Routes: chosen once, durable before they are given out, and never changed."""

from __future__ import annotations

import pytest

from delayd.address import HOST_BYTES_MAX, Endpoint
from delayd.errors import DamagedData, DiskFull, DiskReserve, SyncFailed
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.wire.frame import HEAD_BYTES_MAX, Head, encode_frame
from delayd.wire.meta import SERVERS_MAX, SUBJECTS_MAX, Registered, Routes, ServerInfo, servers_head

from .servers import LEASE_MS, FullState, SteppedMeta, delay_server, realtime_server


def test_subjects_go_to_the_live_realtime_server_with_the_fewest_the_lowest_log_id_first() -> None:
    world = SteppedMeta()
    world.register(realtime_server(30), realtime_server(10), realtime_server(20), delay_server(1))
    answer = world.routes("a", "b", "c", "d")
    assert answer.routes == {"a": 10, "b": 20, "c": 30, "d": 10}
    assert [info.server.log_id for info in answer.servers] == [10, 20, 30]
    world.clock.advance(LEASE_MS)
    world.register(realtime_server(30))
    assert world.routes("e", "f", "g").routes == {"e": 30, "f": 30, "g": 30}
    world.register(realtime_server(10), realtime_server(20))
    assert world.routes("h", "i", "j").routes == {"h": 20, "i": 10, "j": 20}


def test_a_route_is_given_out_when_it_is_durable_and_not_before() -> None:
    executor = StepExecutor()
    world = SteppedMeta(executor=executor)
    world.register(realtime_server(10), realtime_server(20))
    executor.run_all()
    first = world.ask(["a"])
    executor.run_one()
    # Durable, though meta has not heard of it: a crash now keeps the route that nobody was told.
    same, other, known = world.ask(["a"]), world.ask(["b", "a"]), world.ask(["z"], assign=False)
    assert (first, same, other) == ([], [], [])
    assert known == [Routes({}, [], ["z"])]
    executor.complete_one()
    (answer,) = first
    assert isinstance(answer, Routes)
    assert answer.routes == {"a": 10}
    executor.run_all()
    assert [each.routes for each in (*same, *other) if isinstance(each, Routes)] == [{"a": 10}, {"b": 20, "a": 10}]


def test_a_route_that_is_asked_for_by_many_at_once_is_decided_once() -> None:
    executor = StepExecutor()
    world = SteppedMeta(executor=executor)
    world.register(realtime_server(10), realtime_server(20))
    executor.run_all()
    answers = [world.ask(["a", "a"]) for _ in range(10)]
    executor.run_all()
    assert [answer.routes for (answer,) in answers if isinstance(answer, Routes)] == [{"a": 10}] * 10
    assert world.meta.route_count == 1


def test_a_full_disk_refuses_by_name_and_what_was_decided_is_taken_back() -> None:
    state = FullState()
    world = SteppedMeta(state)
    world.register(realtime_server(10))
    world.routes("kept")
    state.error = DiskFull("state.lmdb")
    (refused,) = world.ask(["new"])
    assert isinstance(refused, DiskReserve)
    assert refused.retry_after_ms > 0
    assert [type(answer) for answer in world.register(realtime_server(20))] == [DiskReserve]
    assert world.routes("kept", "new", assign=False) == Routes({"kept": 10}, world.routes("kept").servers, ["new"])
    state.error = None
    # Nobody was told anything of `new`, so it may be chosen again; 20 registers again with its next heartbeat.
    assert world.register(realtime_server(20)) == [None]
    assert world.routes("new", "newer").routes == {"new": 20, "newer": 10}
    assert world.stopped == []


def test_a_failed_sync_stops_the_server_and_nobody_is_answered() -> None:
    state = FullState()
    world = SteppedMeta(state)
    world.register(realtime_server(10))
    state.error = SyncFailed("state.lmdb", "input/output error")
    assert world.ask(["a"]) == []
    assert [type(error) for error in world.stopped] == [SyncFailed]


def test_the_largest_answers_fit_a_head() -> None:
    most = (1 << 64) - 1
    server = Registered("realtime", most, Endpoint("h" * HOST_BYTES_MAX, 65_535), (1 << 63) - 1, (1 << 63) - 1)
    servers = [ServerInfo(server, True, (1 << 63) - 1)] * SERVERS_MAX
    subjects = [f"{number:0255d}" for number in range(SUBJECTS_MAX)]
    listed: Head = {"servers": servers_head(servers)}
    page: Head = {"subjects": [[subject, most] for subject in subjects], "more": True}
    for head in (
        Routes(dict.fromkeys(subjects, most), servers, []).to_head(),
        Routes({}, servers, subjects).to_head(),
        listed,
        page,
    ):
        assert len(encode_frame(12, 1, {**head, "now_ms": most})[0]) < HEAD_BYTES_MAX


def test_a_listing_never_shows_a_route_that_is_not_durable() -> None:
    executor = StepExecutor()
    world = SteppedMeta(executor=executor)
    world.register(realtime_server(10))
    executor.run_all()
    world.ask(["a"])
    assert world.meta.subjects("", "", 10).subjects == []
    executor.run_all()
    assert world.meta.subjects("", "", 10).subjects == [("a", 10)]


def test_a_state_that_is_damaged_is_named() -> None:
    for key, value in ((b"route/a", b""), (b"route/a", b"\xc0"), (b"server/delay/12345678", b"\x80")):
        state = MemoryState()
        state.commit([(key, value)])
        with pytest.raises(DamagedData, match=r"state\.lmdb"):
            SteppedMeta(state)
