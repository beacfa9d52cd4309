"""When a checkpoint begins before its minute is over: by bytes, fewer while little arrives or few hours wait."""

from collections.abc import Sequence

import pytest

from delayd.delay.filing import checkpoint, schedule_writer
from delayd.delay.filing.schedule_writer import FILES_A_SYNC, ScheduleWriter
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000
FAR_MS = 2 * HOUR_MS
BYTES = 64 << 10


def pending(world: World) -> int:
    return world.core.counters()["pending_rows"]


def send(world: World, count: int, apart_hours: int) -> None:
    """Messages of about 250 bytes each in the log, due in hours that are not loaded."""
    world.send([wanted(1, FAR_MS + row * apart_hours * HOUR_MS, "m" * 200)[0] for row in range(count)])
    world.settle()


def test_a_flood_over_many_hours_waits_for_its_bytes_and_its_rest_for_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CALM_BYTES", 1_000)
    world = World(checkpoint_bytes=BYTES)
    apart = FILES_A_SYNC // 50
    send(world, 100, apart)
    assert pending(world) == 100, "a quarter of the bytes is enough for a few files only"
    send(world, 200, apart)
    assert pending(world) < 300, "all the bytes"
    world.pass_ms(checkpoint.CALM_MS)
    send(world, 60, apart)
    left = pending(world)
    assert left >= 60
    world.pass_ms(4 * checkpoint.CALM_MS)
    assert pending(world) == 0, "nothing arrived for a second"
    world.check_logs()


def test_few_hours_are_filed_at_a_quarter_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CALM_BYTES", 0)
    world = World(checkpoint_bytes=BYTES)
    send(world, 50, 0)
    assert pending(world) == 50
    send(world, 50, 0)
    assert pending(world) == 0
    world.check_logs()


def test_what_is_little_waits_for_its_minute_also_when_nothing_else_arrives() -> None:
    world = World(checkpoint_bytes=BYTES)
    send(world, 10, 0)
    world.pass_ms(30_000)
    assert pending(world) == 10
    world.pass_ms(31_000)
    assert pending(world) == 0


def test_a_checkpoint_of_many_hours_holds_no_more_files_open_than_the_process_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule_writer, "unsynced_files_max", lambda: 16)
    append, most = ScheduleWriter._append, 0

    def counting(writer: ScheduleWriter, hour: int, batches: list[Sequence[bytes]], count: int) -> None:
        nonlocal most
        append(writer, hour, batches, count)
        most = max(most, len(writer._open))

    monkeypatch.setattr(ScheduleWriter, "_append", counting)
    world = World()
    send(world, 100, 1)
    world.checkpoint()
    assert pending(world) == 0 and 0 < most <= 16
    world.check_logs()
