"""Files of the two logs that go while the server runs, or are gone at its start: told by name, all else is served."""

from __future__ import annotations

import pytest

from delayd.errors import DamagedData, HandoffRefused
from delayd.log.group import MAGIC_BYTES
from delayd.log.watch import LOOK_MS
from delayd.testing.disk import MemoryDisk
from delayd.testing.state import MemoryState
from delayd.wire.requests import RequestType
from delayd.wire.status import read_list, read_waits
from tests.memory_files import content, files, put
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer, World

MESSAGE = "/data/realtime/message"
PULL = "/data/realtime/pull"
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


def waits(world: World) -> list[str]:
    head, _ = world.ask(SimPeer(), RequestType.STATUS, {})
    return [f"{wait.what}: {wait.why}" for wait in read_waits(head, "waits")]


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


@pytest.mark.parametrize("at", [0, 1, -1])
def test_rule_L10_a_message_file_that_is_removed_is_told_and_all_is_served(at: int) -> None:
    world, bodies = filled()
    path = files(world.disk, MESSAGE)[at]
    whole = content(world.disk, path)
    world.disk.remove(path)
    world.pass_time(LOOK_MS + 1)
    assert listed(world) == [log_id(path)]
    assert any(log_id(path) in wait and "was removed" in wait for wait in waits(world))
    assert pulled(world, "g") == bodies
    put(world.disk, path, whole)
    world.pass_time(LOOK_MS + 1)
    assert listed(world) == [] and waits(world) == []
    assert pulled(world.restarted(), "h") == bodies


def test_an_operator_has_a_removed_file_written_again() -> None:
    world, bodies = filled()
    path = files(world.disk, MESSAGE)[1]
    world.disk.remove(path)
    world.pass_time(LOOK_MS + 1)
    answer, _ = world.ask(SimPeer(), RequestType.MEND, {"id": log_id(path), "decision": "take"})
    assert answer["done"] is True and listed(world) == []
    assert pulled(world.restarted(), "h") == bodies


@pytest.mark.parametrize("folder", [MESSAGE, PULL])
def test_rule_L10_a_server_that_stops_writes_removed_files_again(folder: str) -> None:
    world, bodies = filled()
    first = world.pull(SimPeer(), most=10)
    assert world.ack(SimPeer(), first.handles) == []
    for path in files(world.disk, folder):
        world.disk.remove(path)
    again = world.restarted()
    assert listed(again) == [] and pulled(again, "billing") == bodies[10:] and pulled(again, "g") == bodies


def test_rule_L10_a_message_file_that_is_cut_holds_up_its_own_messages_until_it_is_whole() -> None:
    world, bodies = filled()
    path = files(world.disk, MESSAGE)[1]
    whole = content(world.disk, path)
    file = world.disk.open(path, write=True)
    file.truncate(len(whole) // 2)
    world.pass_time(LOOK_MS + 1)
    assert log_id(path) in listed(world)
    got = pulled(world, "g")
    assert 0 < len(got) < len(bodies) and any(id_.startswith("rows/orders/") for id_ in listed(world))
    file.pwritev([whole], 0)
    world.pass_time(LOOK_MS + 1)
    assert sorted(got + pulled(world, "g")) == sorted(bodies) and listed(world) == []


@pytest.mark.parametrize("same", [True, False])
def test_rule_L10_a_file_in_the_place_of_another_is_taken_only_when_it_is_the_same(same: bool) -> None:
    world, bodies = filled()
    path = files(world.disk, MESSAGE)[1]
    data = bytearray(content(world.disk, path))
    data[len(data) // 2] ^= 0 if same else 4
    put(world.disk, path, bytes(data))
    world.pass_time(LOOK_MS + 1)
    assert listed(world) == ([] if same else [log_id(path)])
    assert pulled(world, "g") == bodies


def test_rule_Q1_a_pull_log_that_is_removed_loses_no_acknowledgement() -> None:
    world, bodies = filled()
    first = world.pull(SimPeer(), most=10)
    assert world.ack(SimPeer(), first.handles) == []
    (path,) = files(world.disk, PULL)
    world.disk.remove(path)
    second = world.pull(SimPeer(), most=10)
    assert world.ack(SimPeer(), second.handles) == []
    world.pass_time(LOOK_MS + 1)
    third = world.pull(SimPeer(), most=10)
    assert world.ack(SimPeer(), third.handles) == []
    disk = world.disk.after_crash()
    again = World(disk, world.state.after_crash(disk), settings=SETTINGS)
    assert listed(again) == [] and pulled(again, "billing") == bodies[30:]


WAYS = ["gone", "cut", "flipped", "of another log"]


def damaged(disk: MemoryDisk, path: str, way: str) -> bytes:
    whole = content(disk, path)
    if way == "gone":
        disk.remove(path)
        disk.sync_folder(MESSAGE)
        return whole
    bad = {"cut": whole[:-8], "flipped": whole[:20] + b"!" + whole[21:]}.get(way, whole[:16] + b"x" + whole[17:])
    put(disk, path, bad)
    return whole


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_rule_L9_a_start_leaves_out_a_message_file_that_it_does_not_need(way: str, at: int) -> None:
    world, bodies = filled()
    disk = world.disk.after_crash()
    path = files(disk, MESSAGE)[at]
    whole = damaged(disk, path, way)
    again = World(disk, world.state.after_crash(disk), settings=SETTINGS)
    assert listed(again) == [log_id(path)]
    got = pulled(again, "g")
    assert set(got) < set(bodies) and bodies[-1] in got
    assert any(id_.startswith("rows/orders/") for id_ in listed(again))
    peer = SimPeer()
    again.hello(peer, 9)
    again.dispatch(peer, 9, dispatch_batch(900, [b"new"], w=(1, 800)))
    put(disk, path, whole)
    again.pass_time(LOOK_MS + 1)
    again.pass_time(1)
    assert sorted(got + pulled(again, "g")) == sorted([*bodies, b"new"]) and listed(again) == []


def test_a_start_that_is_refused_says_what_helps() -> None:
    world, _ = filled()
    world.pull(SimPeer(), most=3)
    world.core.checkpoint()
    disk = world.disk.after_kill()
    file = disk.open(files(disk, MESSAGE)[-1], write=True)
    file.truncate(70)
    with pytest.raises(DamagedData, match=f"delayd mend give-up {MESSAGE}"):
        World(disk, world.state.after_crash(disk), settings=SETTINGS)


def with_a_last_group(acked: bool) -> tuple[MemoryDisk, MemoryState, str, bytes]:
    """What a power loss leaves after a last message, which somebody has acknowledged or nobody has pulled; the last
    file of the message log and its bytes.
    """
    world, _ = filled()
    peer = SimPeer()
    world.hello(peer, 9)
    world.dispatch(peer, 9, dispatch_batch(900, [b"new"], w=(1, 24)))
    assert world.ack(peer, world.pull(peer, most=100 if acked else 3).handles) == []
    disk = world.disk.after_crash()
    path = files(disk, MESSAGE)[-1]
    return disk, world.state.after_crash(disk), path, content(disk, path)


def with_damage(whole: bytes, damage: str) -> bytes:
    return {
        "short": whole[:-8],
        "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        "gone": whole[: whole.rindex(MAGIC_BYTES)],
    }[damage]


@pytest.mark.parametrize("damage", ["short", "flipped", "gone"])
def test_rule_L5_a_last_group_of_which_a_message_was_pulled_is_damage_and_is_not_cut(damage: str) -> None:
    """New messages would get the numbers of those that are gone, which consumers have acknowledged."""
    disk, state, path, whole = with_a_last_group(acked=True)
    bad = with_damage(whole, damage)
    put(disk, path, bad)
    why = r"1 messages of orders (from there on|behind it) were pulled by billing.*give-up"
    for _ in range(2):
        with pytest.raises(DamagedData, match=why) as told:
            World(disk, state, settings=SETTINGS)
        assert told.value.path == path and content(disk, path) == bad
        disk._locks.clear()
    put(disk, path, whole)
    again = World(disk, state, settings=SETTINGS)
    assert again.pull(SimPeer()).bodies == []


@pytest.mark.parametrize("damage", ["short", "flipped"])
def test_rule_L5_a_last_group_of_which_no_message_was_pulled_is_cut_as_torn(damage: str) -> None:
    disk, state, path, whole = with_a_last_group(acked=False)
    put(disk, path, with_damage(whole, damage))
    World(disk, state, settings=SETTINGS)
    assert len(content(disk, path)) < len(whole)


def test_rule_L5_a_pull_log_with_a_torn_end_proves_what_stands_before_it() -> None:
    disk, state, path, whole = with_a_last_group(acked=True)
    put(disk, path, with_damage(whole, "flipped"))
    pulls = files(disk, PULL)[-1]
    put(disk, pulls, content(disk, pulls)[:-1])
    with pytest.raises(DamagedData, match="pulled by billing") as told:
        World(disk, state, settings=SETTINGS)
    assert told.value.path == path


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
