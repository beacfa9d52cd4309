"""Subjects without a group: their messages are removed by age alone, which is told before and when it happens."""

import errno
import logging

import pytest

from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from realtime import index, retention
from tests.worlds.dispatch_batches import DUE_MS, dispatch_batch
from tests.worlds.realtime import SUBJECT, SimPeer, World

HOUR_MS = 3_600_000
RETENTION_MS = 72 * HOUR_MS
SETTINGS = {"segment_bytes": 4096, "tail_bytes": 0}


def filled() -> tuple[World, SimPeer]:
    """A server with two segments of messages for one subject."""
    world, peer = World(settings=SETTINGS), SimPeer()
    world.hello(peer, 1)
    for batch_id in range(1, 5):
        world.dispatch(peer, 1, dispatch_batch(batch_id, [bytes(1_500)], w=(1, batch_id - 1)))
    return world, peer


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [line for line in (record.getMessage() for record in caplog.records) if line.startswith(event)]


def listed(world: World) -> dict[str, object]:
    head, _ = world.ask(SimPeer(), RequestType.SUBJECTS, {"prefix": "", "after": "", "limit": 5})
    (row,) = need_maps(head, "subjects")
    return {name: row[name] for name in ("messages", "groups", "oldest_ms_ago")}


def test_a_subject_that_stays_without_a_group_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    world, _ = filled()
    with caplog.at_level(logging.WARNING):
        world.core.retain()
        assert not told(caplog, "subject_without_group")
        for _ in range(3):
            world.pass_time(600_000)
            world.core.retain()
    (line,) = told(caplog, "subject_without_group")
    assert f"subject={SUBJECT} messages=4 kept_for_ms={RETENTION_MS}" in line


def test_a_subject_whose_first_consumer_comes_before_the_second_look_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, peer = filled()
    with caplog.at_level(logging.WARNING):
        world.core.retain()
        world.pull(peer)
        world.core.retain()
        world.core.retain()
    assert not told(caplog, "subject_without_group")


@pytest.mark.parametrize("group", [False, True])
def test_messages_that_go_unseen_are_told_and_those_that_a_group_waits_for_stay(
    caplog: pytest.LogCaptureFixture, group: bool
) -> None:
    world, peer = filled()
    for _ in range(2):
        world.core.retain()
    if group:
        world.pull(peer, most=1)
    world.pass_time(RETENTION_MS)
    # A new segment ends the old ones.
    for batch_id in range(5, 8):
        world.dispatch(peer, 1, dispatch_batch(batch_id, [bytes(2_000)], w=(1, batch_id - 1)))
    world.pass_time(1_000)
    with caplog.at_level(logging.WARNING):
        world.core.retain()
    lines = told(caplog, "messages_removed_unseen")
    if group:
        assert not lines and listed(world)["messages"] == 7
    else:
        (line,) = lines
        assert f"subject={SUBJECT} messages={7 - int(str(listed(world)['messages']))}" in line
        assert int(str(listed(world)["messages"])) < 7


@pytest.mark.parametrize("restarted", [False, True])
def test_a_subject_that_keeps_nothing_takes_no_place_among_those_that_are_followed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    monkeypatch.setattr(retention, "SUBJECTS_MAX", 1)
    world, peer = filled()
    for _ in range(0 if restarted else 2):
        world.core.retain()
    world.pass_time(RETENTION_MS)
    for batch_id in range(5, 9):
        world.dispatch(peer, 1, dispatch_batch(batch_id, [bytes(2_000)], subject="other", w=(1, batch_id - 1)))
        world.pass_time(RETENTION_MS)
    world.core.retain()
    world.pass_time(1_000)
    if restarted:
        world.core.checkpoint()
        world = world.restarted()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            world.core.retain()
    (line,) = told(caplog, "subject_without_group")
    assert "subject=other messages=" in line and "messages=0" not in line


def test_a_consume_log_that_can_not_be_read_does_not_hold_up_retention(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*where: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    world, peer = filled()
    for _ in range(2):
        world.core.retain()
    world.pass_time(RETENTION_MS)
    for batch_id in range(5, 9):
        world.dispatch(peer, 1, dispatch_batch(batch_id, [bytes(2_000)], subject="other", w=(1, batch_id - 1)))
    world.core.checkpoint()
    world.pass_time(1_000)
    before = world.disk.list_folder("/data/realtime/message")
    monkeypatch.setattr(index, "read_entries", broken)
    with caplog.at_level(logging.WARNING):
        world.core.retain()
    assert len(world.disk.list_folder("/data/realtime/message")) < len(before)
    assert told(caplog, f"unseen_not_known subject={SUBJECT}")


@pytest.mark.parametrize("restarted", [False, True])
def test_the_listing_says_how_many_groups_there_are_and_how_old_the_oldest_message_is(restarted: bool) -> None:
    world, peer = filled()
    world.pass_time(HOUR_MS)
    if restarted:
        world.core.checkpoint()
        world = world.restarted()
    age_ms = world.clock.now_ms() - DUE_MS - 1
    assert listed(world) == {"messages": 4, "groups": 0, "oldest_ms_ago": age_ms}
    world.pull(peer, "one")
    world.pull(peer, "two")
    assert listed(world) == {"messages": 4, "groups": 2, "oldest_ms_ago": age_ms}
