"""Subjects without a group: their messages are removed by age alone, which is told before and when it happens."""

import logging

import pytest

from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import dispatch_batch
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
