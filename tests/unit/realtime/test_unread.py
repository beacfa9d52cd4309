"""A pull log that can't be read above its checkpoint keeps consumers waiting and nobody else, until it is mended."""

from __future__ import annotations

import pytest

from delayd.errors import NotReady
from delayd.log.control import encode_records
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import LogPlace, open_log
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.testing.disk import MemoryDisk
from delayd.testing.state import MemoryState
from delayd.wire.frame import Head
from delayd.wire.recurring import AskedSchedule, schedules_head
from delayd.wire.requests import RequestType
from realtime.unread import REST_MS
from tests.memory_files import content, files, put
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, Pulled, SimPeer, World, pull_head

PULL = "/data/realtime/pull"
SETTINGS = {"segment_bytes": 1 << 20, "retention_ms": 1_000, "lease_ms": 5_000}


def filled() -> tuple[World, Pulled, list[bytes]]:
    """Twenty messages: five are acknowledged below the checkpoint, five above it, five held; and a group is made."""
    world, peer = World(settings=SETTINGS), SimPeer()
    world.hello(peer, 1)
    bodies = [f"{number}".encode() for number in range(20)]
    world.dispatch(peer, 1, dispatch_batch(1, bodies))
    assert world.ack(peer, world.pull(peer, most=5).handles) == []
    world.core.checkpoint()
    assert world.ack(peer, world.pull(peer, most=5).handles) == []
    held = world.pull(peer, most=5)
    assert len(world.pull(peer, "late", most=20).bodies) == 20
    return world, held, bodies


def damaged(world: World) -> tuple[MemoryDisk, MemoryState, str, bytes]:
    """What a kill leaves, with a flipped bit in the pull log right above the checkpoint; its path, and what it was."""
    disk = world.disk.after_kill()
    (path,) = files(disk, PULL)
    whole = content(disk, path)
    at = FILE_HEADER_BYTES + world.core._checkpoints.last.pull_offset + 70
    put(disk, path, whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    return disk, world.state.after_crash(disk), path, whole


def refused(world: World, kind: RequestType, head: Head | None = None) -> str:
    peer = SimPeer()
    number = world.send(peer, kind, {"subject": SUBJECT, "group": GROUP, **(head or {})})
    error = peer.errors[number]
    assert isinstance(error, NotReady) and error.retry_after_ms
    return error.message


def again(world: World) -> None:
    """Let the files be looked at three times: the second look sees a change, the third that it has rested."""
    for _ in range(3):
        world.pass_time(REST_MS)


def decide(world: World, decision: str) -> tuple[bool, str]:
    head, _ = world.ask(SimPeer(), RequestType.MEND, {"id": "pull", "decision": decision})
    return bool(head["done"]), str(head["message"])


@pytest.mark.parametrize("restarts", [False, True])
def test_rule_Q1_what_was_acknowledged_in_an_unread_pull_log_never_comes_again_once_it_is_back(restarts: bool) -> None:
    before, held, bodies = filled()
    disk, state, path, whole = damaged(before)
    world = World(disk, state, settings=SETTINGS)
    peer = SimPeer()
    world.hello(peer, 9)
    world.dispatch(peer, 9, dispatch_batch(2, [b"new"]))
    # Checkpoints and retention go on, and say nothing new of groups.
    world.clock.advance(3_600_000)
    world.core.retain()
    world.core.checkpoint()
    if restarts:
        world = world.restarted()
    put(disk, path, whole)
    again(world)
    assert not list(world.core.waits())
    assert world.ack(SimPeer(), held.handles) == [], "what was pulled before is acknowledged"
    assert world.pull(SimPeer()).bodies == [*bodies[15:], b"new"]
    world.pass_time(60_000)
    assert world.pull(SimPeer(), "late").bodies == [*bodies, b"new"], "its lease has ended"
    later = world.restarted()
    assert later.pull(SimPeer(), "late").bodies == []
    assert not world.failures


def test_nobody_is_told_what_is_unfinished_while_nobody_knows_what_is_acknowledged() -> None:
    disk, state, path, whole = damaged(filled()[0])
    world, asked = World(disk, state, settings=SETTINGS), schedules_head([AskedSchedule(SUBJECT, "daily")])
    assert "nobody can say what was acknowledged" in refused(world, RequestType.UNFINISHED, asked)
    put(disk, path, whole)
    again(world)
    assert world.ask(SimPeer(), RequestType.UNFINISHED, asked)[0]["unfinished"] == []


def test_rule_Q3_nothing_is_removed_while_nobody_knows_what_is_acknowledged() -> None:
    world, _, _ = filled()
    for number in range(2, 12):
        peer = SimPeer()
        world.hello(peer, number)
        world.dispatch(peer, number, dispatch_batch(number, [bytes(400_000)]))
    disk, state, path, whole = damaged(world)
    unread = World(disk, state, settings=SETTINGS)
    unread.hello(SimPeer(), 90, w=(1, 50))
    unread.clock.advance(3_600_000)
    retain(unread)
    assert unread.recovered.message_log.start == 0
    put(disk, path, whole)
    again(unread)
    unread.pass_time(60_000)
    for group in (GROUP, "late"):
        while (pulled := unread.pull(SimPeer(), group, max_bytes=16 << 20)).bodies:
            unread.ack(SimPeer(), pulled.handles, group)
            unread.pass_time(1)
    retain(unread)
    assert unread.recovered.message_log.start > 0


def retain(world: World) -> None:
    """Have all removed that may be."""
    for _ in range(20):
        world.core.retain()
        world.pass_time(1_000)


def test_rule_L5_entries_that_no_server_writes_are_damage_with_a_name() -> None:
    before, _, bodies = filled()
    disk = before.disk.after_kill()
    marks = before.core._checkpoints.last
    place = LogPlace(PULL, FileKind.PULL, before.core.log_id, SETTINGS["segment_bytes"])
    pulls = open_log(disk, place, 0, marks.pull_offset, marks.pull_crc32c, leave_out=True)
    strange = NewGroup(GroupKind.CONTROL, [encode_records([{"type": "group"}])], 1, before.clock.now_ms(), 0, 0)
    pulls.append([strange], before.clock.now_ms())
    pulls.flush()
    pulls.close()
    world = World(disk, before.state.after_crash(disk), settings=SETTINGS)
    assert "a control record of type 'group' has no group_id" in refused(world, RequestType.PULL, pull_head())
    assert decide(world, "give-up")[0]
    assert world.pull(SimPeer(), "late", most=20).bodies == [] and not world.failures
    assert world.restarted().pull(SimPeer(), most=20).bodies == bodies[15:]


def test_rule_Q2_groups_that_were_made_in_a_given_up_pull_log_keep_their_ids() -> None:
    before, _, _ = filled()
    lost = before.core.groups.roster.groups[SUBJECT, "late"].group_id
    disk, state, _, _ = damaged(before)
    world = World(disk, state, settings=SETTINGS)
    assert decide(world, "give-up")[0]
    for number in range(3):
        world.pull(SimPeer(), f"new-{number}")
        assert world.core.groups.roster.groups[SUBJECT, f"new-{number}"].group_id > lost
