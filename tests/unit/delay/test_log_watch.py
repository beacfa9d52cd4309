"""Files of the delay server's logs that go while it runs, or that a start does not need: told, and nothing is lost."""

from __future__ import annotations

import pytest

from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.log import segment_name
from delayd.log.schedule import dispatch_path
from delayd.log.watch import LOOK_MS
from tests.faults.harness import files_of
from tests.memory_files import content, put
from tests.unit.delay.sealed import sealed_hour
from tests.worlds.delay import FOLDER, World
from tests.worlds.outside import wanted

FIRST = f"{FOLDER}/message/{segment_name(0)}"
ID = f"log/{segment_name(0).removesuffix('.log')}"


def test_rule_L10_a_message_log_that_is_removed_under_the_server_is_told_and_loses_nothing() -> None:
    world = World()
    world.send(wanted(3, 5 * HOUR_MS, "before"))
    world.settle()
    world.disk.remove(FIRST)
    world.pass_ms(LOOK_MS + 2_000)
    assert [entry.id for entry in world.core.quarantine] == [ID]
    assert any(ID in wait.what and "was removed" in wait.why for wait in world.core.waits())
    world.send(wanted(2, 5 * HOUR_MS, "after"))
    world.settle()
    again = world.after_crash(None)
    again.clock.advance(5 * HOUR_MS - 10_000)
    again.pass_ms(15_000)
    again.drain()
    again.check_books()


def test_a_message_log_that_is_cut_under_the_server_is_told_and_released_when_it_is_whole_again() -> None:
    world = World()
    world.send(wanted(3, 5 * HOUR_MS, "m"))
    world.settle()
    world.checkpoint()
    file = world.disk.open(FIRST, write=True)
    whole = file.pread(file.size(), 0)
    file.truncate(len(whole) - 8)
    told: list[tuple[bool, str]] = []
    world.pass_ms(LOOK_MS + 2_000)
    assert [entry.id for entry in world.core.quarantine] == [ID]
    world.core.release(ID, lambda done, text: told.append((done, text)))
    world.settle()
    file.pwritev([whole[-8:]], len(whole) - 8)
    world.core.release(ID, lambda done, text: told.append((done, text)))
    world.settle()
    assert [done for done, _ in told] == [False, True] and "8 bytes were cut" in told[0][1]
    assert not len(world.core.quarantine)


def test_an_operator_has_a_removed_message_log_written_again_from_what_the_server_still_has_open() -> None:
    world = World()
    world.send(wanted(3, 5 * HOUR_MS, "m"))
    world.settle()
    whole = content(world.disk, FIRST)
    world.disk.remove(FIRST)
    world.pass_ms(LOOK_MS + 2_000)
    told: list[tuple[bool, str]] = []
    world.core.release(ID, lambda done, text: told.append((done, text)))
    world.settle()
    assert not len(world.core.quarantine) and content(world.disk, FIRST).startswith(whole)


@pytest.mark.parametrize("same", [True, False])
def test_rule_L10_a_file_in_the_place_of_another_is_told_and_taken_only_when_it_is_the_same_log(same: bool) -> None:
    world = World()
    world.send(wanted(3, 5 * HOUR_MS, "m"))
    world.settle()
    data = bytearray(content(world.disk, FIRST))
    data[len(data) // 2] ^= 0 if same else 1
    put(world.disk, FIRST, bytes(data))
    world.pass_ms(LOOK_MS + 2_000)
    assert [entry.id for entry in world.core.quarantine] == [ID]
    assert "another file was put in its place" in str(world.core.quarantine.find(ID))
    world.pass_ms(LOOK_MS + 2_000)
    assert [entry.id for entry in world.core.quarantine] == ([] if same else [ID])


def test_rule_L10_a_dispatch_log_that_is_removed_under_the_server_is_written_again() -> None:
    world = World()
    world.send(wanted(3, 500, "m"))
    world.pass_ms(2_000)
    path = dispatch_path(FOLDER, hour_of_ms(world.clock.now_ms()))
    world.disk.remove(path)
    world.send(wanted(2, 500, "n"))
    world.pass_ms(LOOK_MS + 2_000)
    again = world.after_crash(None)
    again.drain()
    again.check_books()


def test_rule_L10_the_seal_log_that_is_removed_under_the_server_stops_sealing_until_it_is_back() -> None:
    world = World()
    sealed_hour(world, "a")
    path = f"{FOLDER}/seal/{segment_name(0)}"
    whole = content(world.disk, path)
    world.disk.remove(path)
    world.pass_ms(LOOK_MS + 2_000)
    assert [entry.id for entry in world.core.quarantine] == ["seal/log"]
    sealed_hour(world, "b", sealed=False)
    put(world.disk, path, whole)
    world.pass_ms(LOOK_MS + 2_000)
    assert not len(world.core.quarantine)
    world.sweep()
    world.check_sealing()


def test_every_operator_hears_what_came_of_the_seal_log_also_while_it_is_opened_for_another_one() -> None:
    world = World()
    sealed_hour(world, "a")
    path = f"{FOLDER}/seal/{segment_name(0)}"
    whole = content(world.disk, path)
    world.disk.remove(path)
    world.pass_ms(LOOK_MS + 2_000)
    told: list[tuple[bool, str]] = []
    for mended in (False, True):
        for _ in range(2):
            world.core.release("seal/log", lambda done, text: told.append((done, text)))
        world.settle()
        assert [done for done, _ in told] == [mended] * 2
        told.clear()
        put(world.disk, path, whole)


def test_rule_L10_a_server_that_stops_writes_removed_files_again() -> None:
    world = World()
    sealed_hour(world, "a")
    world.send([*wanted(3, 500, "m"), *wanted(3, 5 * HOUR_MS, "n")])
    world.pass_ms(2_000)
    open_hour = dispatch_path(FOLDER, hour_of_ms(world.clock.now_ms()))
    for path in files_of(world.disk, FOLDER):
        if path.split("/")[-2] in ("message", "seal") or path == open_hour:
            world.disk.remove(path)
    assert world.stop()
    world.core.close()
    again = world.after_crash(None)
    assert not len(again.core.quarantine)
    again.clock.advance(5 * HOUR_MS - 60_000)
    again.pass_ms(90_000)
    again.drain()
    again.check_books()


def test_rule_S4_no_hour_is_sealed_in_a_file_that_was_removed_a_moment_ago() -> None:
    world = World()
    sealed_hour(world, "a")
    world.disk.remove(f"{FOLDER}/seal/{segment_name(0)}")
    sealed_hour(world, "b", sealed=False)
    assert [entry.id for entry in world.core.quarantine] == ["seal/log"]


@pytest.mark.parametrize("what", ["gone", "cut", "flipped", "of another log"])
def test_rule_L9_a_message_log_file_below_the_checkpoint_refuses_no_start(what: str) -> None:
    world = World(segment_bytes=4096)
    paths: list[str] = []
    for number in range(40):
        world.send(wanted(10, 5 * HOUR_MS, f"m{number}"))
        world.settle()
        paths = [path for path in files_of(world.disk, FOLDER) if "/message/" in path]
    assert len(paths) > 2
    world.checkpoint()
    remains = world.remains().after_crash(None)
    file = remains.disk.open(paths[1])
    whole = file.pread(file.size(), 0)
    if what == "gone":
        remains.disk.remove(paths[1])
    else:
        bad = {"cut": whole[:-8], "flipped": whole[:20] + b"!" + whole[21:]}.get(what, whole[:16] + b"x" + whole[17:])
        put(remains.disk, paths[1], bad)
    again = World(remains, segment_bytes=4096)
    (entry,) = again.core.quarantine
    assert entry.kind == "log" and entry.error.path == paths[1]
    put(again.disk, paths[1], whole)
    again.pass_ms(LOOK_MS + 2_000)
    assert not len(again.core.quarantine)
    again.clock.advance(5 * HOUR_MS - 60_000)
    again.pass_ms(90_000)
    again.drain()
    again.check_books()
