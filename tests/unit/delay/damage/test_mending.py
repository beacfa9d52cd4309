"""Logs of hours that are set aside, and what a start joins, keeps and puts in doubt when they are back (rule L10)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from delayd.delay.books.outcomes import quarantine_path
from delayd.delay.damage import mending
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.hour import dispatch_path, schedule_beside_path, schedule_path
from delayd.log.log import segment_name
from delayd.machine.alarms import DAMAGED_AGAIN_MS, LOOK_MS
from delayd.outcome import Outcome
from delayd.reading.files.directory import find_directories
from delayd.reading.files.origins import read_outcomes
from delayd.reading.verify import verify_files
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES
from delayd.testing.tree import PowerLoss
from tests.memory_files import content, put
from tests.worlds.delay import FOLDER, World, wanted

HOUR = hour_of_ms(START_MS)
FAR, FAR_MS = HOUR + 5, 5 * HOUR_MS
PATH, BESIDE = schedule_path(FOLDER, FAR), schedule_beside_path(FOLDER, FAR)
DISPATCH = dispatch_path(FOLDER, HOUR)
FIRST = f"{FOLDER}/message/{segment_name(0)}"
AWAY = f"{FOLDER}/away.log"
SCHEDULE_ID, DISPATCH_ID = f"schedule/{hour_name(FAR)}", f"dispatch/{hour_name(HOUR)}"


def filed(world: World, count: int, name: str) -> None:
    world.send(wanted(count, FAR_MS, name))
    world.settle()
    world.checkpoint()


def aside() -> World:
    """A life with five rows of a far hour: three in a file that is away, two in the file beside it."""
    world = World()
    filed(world, 3, "filed")
    world.disk.rename(PATH, AWAY)
    filed(world, 2, "beside")
    assert world.disk.exists(BESIDE) and ids(world) == [SCHEDULE_ID]
    return world


def ids(world: World) -> list[str]:
    return [entry.id for entry in world.core.memory.quarantine]


def decided(world: World, id_: str, *, drop: bool = False) -> tuple[bool, str]:
    told: list[tuple[bool, str]] = []
    (world.core.repair.decisions.drop if drop else world.core.repair.decisions.release)(
        id_, lambda done, text: told.append((done, text))
    )
    world.settle()
    (answer,) = told
    return answer


def delivered(world: World) -> None:
    world.drain(2 * FAR_MS)
    world.check_books()
    world.check_sealing()


# A file of a far hour, and the one beside it.


def test_a_file_beside_an_hour_is_not_taken_for_an_earlier_one_that_joined_it() -> None:
    world = aside()
    world.disk.rename(AWAY, PATH)
    assert decided(world, SCHEDULE_ID)[0] and not world.disk.exists(BESIDE)
    world.disk.rename(PATH, AWAY)
    filed(world, 2, "second")
    world.clock.advance(FAR_MS - 10_000)
    world.pass_ms(12_000)
    assert world.missing() == {b"filed-0", b"filed-1", b"filed-2", b"beside-0", b"beside-1"}
    world.disk.rename(AWAY, PATH)
    assert decided(world, SCHEDULE_ID)[0]
    delivered(world)


def test_rule_L8_a_start_that_finds_no_space_to_join_files_goes_on_with_both_and_joins_them_later() -> None:
    world = aside()
    world.disk.rename(AWAY, PATH)
    world.disk.capacity_bytes = world.disk.used_bytes + len(content(world.disk, BESIDE)) // 2
    for _ in range(2):
        world = world.after_crash()
        assert ids(world) == [SCHEDULE_ID] and world.disk.exists(BESIDE)
        epoch = world.core.site.identity.epoch
        world.pass_ms(DAMAGED_AGAIN_MS + 1_000)
        assert ids(world) == [SCHEDULE_ID]
        assert world.core.site.identity.epoch == epoch, "no start is tried that would find no space either"
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(DAMAGED_AGAIN_MS + 1_000)
    assert not ids(world) and not world.disk.exists(BESIDE) and world.hours().get(FAR).rows == 5
    delivered(world)


def test_what_still_checks_of_a_given_up_file_is_kept_in_front_of_what_stands_beside_it() -> None:
    world = World()
    for number in range(5):
        filed(world, 2, f"filed-{number}")
    world.disk.rename(PATH, AWAY)
    filed(world, 2, "beside")
    world.disk.rename(AWAY, PATH)
    file = world.disk.open(PATH, write=True)
    file.pwritev([b"?"], file.size() - 1)
    assert decided(world, SCHEDULE_ID, drop=True)[0] and not ids(world)
    world.checkpoint()
    assert world.hours().get(FAR).rows == 10 and verify_files([PATH], disk=world.disk).sound
    world.drain(FAR_MS + HOUR_MS)
    assert world.missing() == {b"filed-4-0", b"filed-4-1"}


def test_rule_B2_files_are_looked_at_in_pieces_of_one_group_each(monkeypatch: pytest.MonkeyPatch) -> None:
    world = aside()
    for number in range(7):
        filed(world, 2, f"beside-{number}")
    world.disk.rename(AWAY, PATH)
    gave_way: list[int] = []
    monkeypatch.setattr(world.threads.worker, "give_way", lambda: gave_way.append(1))
    assert decided(world, SCHEDULE_ID)[0] and len(gave_way) >= 9, "between any two groups that are read"


# When a server begins anew.


def test_a_file_that_is_whole_again_waits_for_a_message_log_without_which_a_start_is_held() -> None:
    world = aside()
    whole = content(world.disk, FIRST)
    world.disk.remove(FIRST)
    world.pass_ms(LOOK_MS + 2_000)
    world.disk.rename(AWAY, PATH)
    log_id = f"log/{segment_name(0).removesuffix('.log')}"
    epoch = world.core.site.identity.epoch
    for drop in (False, True):
        done, text = decided(world, SCHEDULE_ID, drop=drop)
        assert not done and f"when {log_id} is whole, too" in text
    world.pass_ms(DAMAGED_AGAIN_MS + 1_000)
    assert world.core.site.identity.epoch == epoch, "a start would be held, and this life goes on"
    put(world.disk, FIRST, whole)
    world.pass_ms(LOOK_MS + DAMAGED_AGAIN_MS + 2_000)
    assert not ids(world) and world.core.site.identity.epoch == epoch + 1
    delivered(world)


def test_a_file_that_only_looks_whole_has_the_server_begin_anew_once_in_thirty_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = aside()
    monkeypatch.setattr(mending, "check_schedule", lambda *args: None)
    begun = [world.clock.monotonic_ms()]
    while len(begun) < 4:
        epoch = world.core.site.identity.epoch
        world.pass_ms(500)
        if world.core.site.identity.epoch > epoch:
            begun.append(world.clock.monotonic_ms())
    assert all(later - earlier >= DAMAGED_AGAIN_MS for earlier, later in pairwise(begun[1:]))


# Dispatch logs, and the files beside them.


def rotten_in_a_row(world: World, count: int) -> dict[str, bytes]:
    """Damage an hour's dispatch log, then each file that stands in for it, with an outcome in each: what they held."""
    held: dict[str, bytes] = {}
    paths = [DISPATCH, *(quarantine_path(FOLDER, HOUR, number) for number in range(1, count))]
    for number, path in enumerate(paths):
        world.send([*wanted(1, 500, f"now{number}"), *wanted(1, HOUR_MS, f"next{number}")])
        world.pass_ms(1_000)
        assert f"now{number}-0".encode() not in world.missing()
        held[path] = content(world.disk, path)
        put(world.disk, path, b"rotten" + held[path][6:])
        world.pass_ms(31_000)
    world.send(wanted(1, 500, "last"))
    world.pass_ms(1_000)
    assert world.disk.exists(quarantine_path(FOLDER, HOUR, count)) and ids(world) == [DISPATCH_ID]
    return held


def live_on(world: World) -> World:
    return world


def start_with_the_last_one_rotten(world: World) -> World:
    last = quarantine_path(FOLDER, HOUR, 3)
    put(world.disk, last, b"rotten" + content(world.disk, last)[6:])
    return world.after_crash(PowerLoss.ALL_LOST)


@pytest.mark.parametrize("begin", [live_on, start_with_the_last_one_rotten])
def test_rule_L10_however_many_files_beside_a_dispatch_log_are_damaged_all_hours_are_delivered(
    begin: Callable[[World], World],
) -> None:
    world = World()
    held = rotten_in_a_row(world, 3)
    last = quarantine_path(FOLDER, HOUR, 3)
    held[last] = content(world.disk, last)
    world = begin(world)
    world.clock.advance(HOUR_MS)
    world.pass_ms(2_000)
    assert not world.missing()
    for path, whole in held.items():
        assert ids(world) == [DISPATCH_ID]
        put(world.disk, path, whole)
        world.pass_ms(31_000)
        if path == last or (begin is live_on and path == quarantine_path(FOLDER, HOUR, 2)):
            break
    assert not ids(world) and not world.disk.list_folder(f"{FOLDER}/quarantine")
    delivered(world)


def test_an_operator_gives_up_only_those_files_of_an_hour_that_are_damaged() -> None:
    world = World()
    held = rotten_in_a_row(world, 3)
    second = quarantine_path(FOLDER, HOUR, 2)
    for path in held.keys() - {second}:
        put(world.disk, path, held[path])
    assert decided(world, DISPATCH_ID, drop=True)[0] and not ids(world)
    assert world.disk.list_folder(f"{FOLDER}/quarantine") == [f"{hour_name(HOUR)}.2.dispatch.dropped"]
    assert content(world.disk, DISPATCH).startswith(held[DISPATCH])


def test_rule_H8_a_damaged_dispatch_log_makes_nobody_a_restored_delay_server_also_when_it_is_given_up() -> None:
    world = World()
    world.send(wanted(3, 500, "m"))
    world.pass_ms(2_000)
    world.checkpoint()
    remains = world.remains(PowerLoss.ALL_LOST)
    put(remains.disk, DISPATCH, content(remains.disk, DISPATCH)[:-8])
    world = World(remains)
    for target in world.outside.targets.values():
        target.crash(world.random)  # It forgets W, so its answer names what only the damaged log has.
        target.restart()
    for _ in range(2):
        world.pass_ms(31_000)
        assert not world.core.fence.is_up
        if ids(world):
            assert decided(world, DISPATCH_ID, drop=True)[0]
    world.checkpoint()
    again = world.after_crash(PowerLoss.ALL_LOST)
    again.pass_ms(31_000)
    assert not again.core.fence.is_up


def test_rule_L10_a_server_that_stops_writes_removed_files_again() -> None:
    world = World()
    world.send([*wanted(3, 500, "m"), *wanted(3, FAR_MS, "n")])
    world.pass_ms(2_000)
    for path in (FIRST, DISPATCH):
        world.disk.remove(path)
    assert world.stop()
    world.core.close()
    again = world.after_crash(None)
    assert not ids(again) and again.disk.exists(DISPATCH)
    delivered(again)


def test_bodies_that_can_not_be_read_are_given_up_with_the_outcome_dead() -> None:
    world = World(tail_bytes=0, source_cache_bytes=1 << 20)
    filed(world, 3, "rotten")
    whole = content(world.disk, PATH)
    world.disk.open(PATH, write=True).pwritev([b"ROTTEN-1"], whole.index(b"rotten-1"))
    world.clock.advance(FAR_MS - 10_000)
    world.pass_ms(15_000)
    id_ = f"rows/{hour_name(FAR)}"
    assert ids(world) == [id_] and not decided(world, id_)[0]
    assert decided(world, id_, drop=True)[0] and not ids(world)
    (directory,) = find_directories(world.disk, FOLDER)
    rows = read_outcomes(world.disk, directory, FAR)
    assert rows.parts["outcome"].take(rows.part_of).tolist() == [Outcome.DEAD] * 3
