"""An operator's word at a realtime server is durable before it is answered: no crash and no restart takes it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from delayd.errors import StaleEpoch, StaleSession
from delayd.testing.disk import Crash
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import Head
from delayd.wire.heads import need_maps, need_str
from delayd.wire.requests import RequestType
from tests.memory_files import content, files, put
from tests.worlds.dispatch_batches import ORIGIN, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World
from tests.worlds.rotten import BAD, flip, flip_value, pull_all, served

MESSAGE, PULL = "/data/realtime/message", "/data/realtime/pull"
WAYS = (None, PowerLoss.ALL_LOST, PowerLoss.REORDERED)


class Word(NamedTuple):
    """One word: what stands before it, its request, and what must hold in each life behind its answer."""

    prepare: Callable[[], World]
    kind: RequestType
    head: Head
    is_kept: Callable[[World], bool]


def next_life(world: World, way: PowerLoss | None = None) -> World:
    disk = world.disk.after_kill() if way is None else world.disk.after_crash(way)
    return World(disk, world.state.after_crash(disk), settings=world.settings)


def acknowledged() -> World:
    """A group that has acknowledged one message of two, above the checkpoint, and another one that has both."""
    world, _ = served([b"a"], [b"b"])
    pull_all(world, "other")
    world.core.checkpoint()
    pulled = world.pull(SimPeer(), most=1)
    world.ack(SimPeer(), pulled.handles)
    return world


def with_lost_group() -> World:
    world = acknowledged()
    world.core.checkpoint()
    disk = world.disk.after_crash()
    state = world.state.after_crash(disk)
    flip_value(state, max(key for key in state._pairs if key.startswith(b"group/")))
    return World(disk, state, settings=world.settings)


def with_rotten_batch() -> World:
    world, _ = served([b"a"], [BAD], [b"c"], [b"d"])
    world.core.checkpoint()
    flip(world.disk, BAD)
    assert pull_all(world) == [b"a", b"c", b"d"]
    return world


def with_unread_window() -> World:
    settings = {"tail_bytes": 0, "segment_bytes": 4096, "retention_ms": 3_600_000_000}
    world, peer = World(settings=settings), SimPeer()
    world.hello(peer, 1)
    for number in range(1, 25):
        sent = [f"{number}-{row}".encode().ljust(400, b".") for row in range(2)]
        world.dispatch(peer, 1, dispatch_batch(number, sent, w=(1, min(4, number - 1))))
    world.core.checkpoint()
    disk = world.disk.after_crash()
    path = files(disk, MESSAGE)[1]
    whole = content(disk, path)
    put(disk, path, whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    return World(disk, world.state.after_crash(disk), settings=settings)


def with_unread_pulls() -> World:
    world = acknowledged()
    disk = world.disk.after_kill()
    (path,) = files(disk, PULL)
    whole = content(disk, path)
    at = 64 + world.core._checkpoints.last.pull_offset + 70
    put(disk, path, whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    return World(disk, world.state.after_crash(disk), settings=world.settings)


def with_restored_origin() -> World:
    """The delay server was restored: what was heard here is of a later life of it."""
    world, _ = served([b"a"])
    world.hello(SimPeer(), 2, epoch=50)
    return world


def quarantined(world: World) -> list[str]:
    head, _ = world.ask(SimPeer(), RequestType.MEND_LIST, {"after": "", "limit": 100})
    ids = [need_str(entry, "id") for entry in need_maps(head, "entries")]
    return [id_ for id_ in ids if not id_.startswith("log/")]


def no_rows_wait(world: World) -> bool:
    # A damaged row is found when somebody pulls it. It is also in doubt, which needs a decision of its own.
    pull_all(world)
    return not any(id_.startswith("rows/") for id_ in quarantined(world))


def has_no_group(world: World) -> bool:
    return (SUBJECT, GROUP) not in world.core._pulls.groups and nothing_waits(world)


def nothing_waits(world: World) -> bool:
    return not quarantined(world)


def hears_an_earlier_epoch(world: World) -> bool:
    try:
        world.hello(SimPeer(), 1, epoch=3)
    except StaleEpoch:
        return False
    except StaleSession:
        pass  # It was heard in a life before.
    return True


def comes_again(world: World) -> bool:
    """Nobody acknowledged anything since the move: both messages are offered, or held by an earlier look."""
    return world.core._pulls.groups[SUBJECT, GROUP].oldest == 0


def is_paused(world: World) -> bool:
    return world.pull(SimPeer()).bodies == [] and world.core._pulls.groups[SUBJECT, GROUP].held_back


def paused() -> World:
    world = acknowledged()
    world.ask(SimPeer(), RequestType.PAUSE_GROUP, {**NAMES, "paused": True})
    return world


def is_resumed(world: World) -> bool:
    return not world.core._pulls.groups[SUBJECT, GROUP].held_back


NAMES: Head = {"subject": SUBJECT, "group": GROUP}
WORDS = {
    "groups rewind": Word(acknowledged, RequestType.MOVE_GROUP, {**NAMES, "to": "earliest"}, comes_again),
    "groups pause": Word(acknowledged, RequestType.PAUSE_GROUP, {**NAMES, "paused": True}, is_paused),
    "groups resume": Word(paused, RequestType.PAUSE_GROUP, {**NAMES, "paused": False}, is_resumed),
    "groups delete": Word(acknowledged, RequestType.DELETE_GROUP, NAMES, has_no_group),
    "mend release group": Word(
        with_lost_group,
        RequestType.MEND,
        {"id": "group/00000002", "decision": "release"},
        lambda world: nothing_waits(world) and (SUBJECT, GROUP) in world.core._pulls.groups,
    ),
    "mend give-up group": Word(
        with_lost_group, RequestType.MEND, {"id": "group/00000002", "decision": "give-up"}, has_no_group
    ),
    "mend give-up rows": Word(with_rotten_batch, RequestType.MEND, {"decision": "give-up"}, no_rows_wait),
    "mend give-up window": Word(
        with_unread_window, RequestType.MEND, {"id": "window", "decision": "give-up"}, nothing_waits
    ),
    "mend give-up pull": Word(
        with_unread_pulls, RequestType.MEND, {"id": "pull", "decision": "give-up"}, nothing_waits
    ),
    "target accept, of a restored delay server": Word(
        with_restored_origin, RequestType.ORIGIN_ACCEPT, {"log_id": ORIGIN}, hears_an_earlier_epoch
    ),
}


def said(world: World, word: Word) -> bool:
    """Say it, and have a checkpoint; whether it was answered before a crash."""
    peer = SimPeer()
    try:
        named: Head = {"id": min(quarantined(world))} if word.kind is RequestType.MEND and "id" not in word.head else {}
        world.send(peer, word.kind, {**word.head, **named})
        for _ in range(3):
            world.pass_time(5_000)
        answered = bool(peer.answers)
        world.core.checkpoint()
    except Crash:
        answered = bool(peer.answers)
    else:
        assert not peer.errors, peer.errors
        assert answered
    if answered and "done" in (told := peer.answers[peer.last_id][0][0]):
        assert told["done"] is True, told
    return answered


@pytest.mark.parametrize("name", WORDS)
def test_a_word_that_was_answered_is_kept_whichever_disk_operation_the_server_dies_at(name: str) -> None:
    word = WORDS[name]
    world = word.prepare()
    first = len(world.disk.operations) + 1
    assert said(world, word)
    last = len(world.disk.operations) + 1
    assert word.is_kept(world)
    for at in range(first, last + 1):
        world = word.prepare()
        world.disk.faults.crash_at = at
        told = said(world, word)
        for way in WAYS:
            life = next_life(world, way)
            if not told and not word.is_kept(life):
                # It may be said again, and then it counts.
                assert said(life, word)
            for each in (life, next_life(life), next_life(life, PowerLoss.ALL_LOST)):
                assert word.is_kept(each), f"died {way} at {at}, {world.disk.operations[-1]}, told {told}"
                assert not each.failures
