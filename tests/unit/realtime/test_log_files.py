"""Files of the two logs that go while the server runs, or are gone at its start: told by name, all else is served."""

from __future__ import annotations

import pytest

from delayd.errors import HandoffRefused
from delayd.machine.alarms import LOOK_MS
from delayd.testing.disk import MemoryDisk
from delayd.wire.requests import RequestType
from delayd.wire.status import read_list
from tests.memory_files import content, files, put
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer, World

MESSAGE = "/data/realtime/message"
SETTINGS = {"tail_bytes": 0, "segment_bytes": 4096, "retention_ms": 3_600_000_000}


def filled(batches: int = 24, w: int = 1_000, settings: dict[str, int] | None = None) -> tuple[World, list[bytes]]:
    """A server with some files of messages, all decided at the delay server up to W, and a checkpoint behind them."""
    world, peer = World(settings=SETTINGS | (settings or {})), SimPeer()
    world.hello(peer, 1)
    bodies: list[bytes] = []
    for number in range(1, batches + 1):
        sent = [f"{number}-{row}".encode().ljust(400, b".") for row in range(2)]
        world.dispatch(peer, 1, dispatch_batch(number, sent, w=(1, min(w, number - 1))))
        bodies += sent
    world.hello(SimPeer(), 2, w=(1, min(w, batches)))
    world.core.checkpoint()
    return world, bodies


def listed(world: World) -> list[str]:
    head, _ = world.ask(SimPeer(), RequestType.MEND_LIST, {"after": "", "limit": 100})
    return [entry.id for entry in read_list(head)[0]]


def log_id(path: str) -> str:
    """The id of an entry for a file."""
    folder, _, name = path.rpartition("/")
    return f"log/{folder.rpartition('/')[2]}/{name.removesuffix('.log')}"


def pulled(world: World, group: str) -> list[bytes]:
    found: list[bytes] = []
    for _ in range(60):
        answer = world.pull(SimPeer(), group, most=7)
        if not answer.bodies:
            return found
        found += answer.bodies
        assert world.ack(SimPeer(), answer.handles, group) == []
    return found


def damaged(disk: MemoryDisk, path: str, way: str) -> bytes:
    whole = content(disk, path)
    if way == "gone":
        disk.remove(path)
        disk.sync_folder(MESSAGE)
        return whole
    bad = {"cut": whole[:-8], "flipped": whole[:20] + b"!" + whole[21:]}.get(way, whole[:16] + b"x" + whole[17:])
    put(disk, path, bad)
    return whole


@pytest.mark.parametrize("how", ["restored", "released", "dropped"])
def test_rule_H2_nobody_hands_over_while_what_is_in_doubt_can_not_be_read(how: str) -> None:
    world, _ = filled(w=4)
    disk = world.disk.after_crash()
    path = files(disk, MESSAGE)[1]
    whole = damaged(disk, path, "flipped")
    again = World(disk, world.state.after_crash(disk), settings=SETTINGS)
    assert listed(again) == [log_id(path), "window"]
    with pytest.raises(HandoffRefused, match="delayd mend give-up window"):
        again.hello(SimPeer(), 9)
    assert pulled(again, "g")
    # A checkpoint meanwhile does not pass over what nobody has read.
    again.core.checkpoint()
    if how != "dropped":
        put(disk, path, whole)
    if how == "restored":
        again.pass_time(LOOK_MS + 1)
        again.pass_time(LOOK_MS + 1)
    for id_ in [log_id(path), "window"] if how == "released" else ["window"] if how == "dropped" else []:
        decision = "give-up" if how == "dropped" else "take"
        assert again.ask(SimPeer(), RequestType.MEND, {"id": id_, "decision": decision})[0]["done"] is True
    assert "window" not in listed(again)
    window = again.hello(SimPeer(), 9)
    if how != "dropped":
        assert [row[1] for row in window] == list(range(5, 25))
