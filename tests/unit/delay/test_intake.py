"""What producers are answered: the durable group, the repetition, and every refusal by its name."""

import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.batch.validate import refused_rows
from delayd.delay.producers import AcceptedBatch
from delayd.errors import (
    BadInstant,
    BadSubject,
    BatchMalformed,
    BatchNumberReused,
    DelaydError,
    DiskReserve,
    HourFull,
    SlowDown,
    Stopping,
)
from delayd.hours import INSTANT_MS_MIN
from delayd.log import group
from delayd.log.group import GroupKind
from delayd.log.log import LogPlace, open_log
from delayd.log.segment import FileKind
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from tests.batches import messages
from tests.worlds.delay import FOLDER, PRODUCER_ID, World, encode_wanted, wanted

Answer = tuple[AcceptedBatch | DelaydError, bool]


def send(world: World, data: bytes) -> list[Answer]:
    """Send a batch as it is; what was answered so far."""
    answers: list[Answer] = []
    world.core.send(parse(data), lambda what, duplicate: answers.append((what, duplicate)))
    return answers


def batch(number: int, due_ms: int = 1_000, count: int = 2, low_water: int = 0, name: str = "") -> bytes:
    return encode_wanted(wanted(count, due_ms, name or f"batch{number}"), ProducerPart(PRODUCER_ID, number, low_water))


def refusal(world: World, data: bytes) -> DelaydError:
    """Send a batch that is refused at once."""
    ((error, duplicate),) = send(world, data)
    assert isinstance(error, DelaydError) and not duplicate
    return error


def test_rule_I1_numbers_below_the_low_water_mark_are_forgotten_and_refused() -> None:
    world = World()
    send(world, batch(1))
    world.settle()
    send(world, batch(2, low_water=2))
    world.settle()
    assert world.core.outcome(PRODUCER_ID, 1) is None
    assert isinstance(refusal(world, batch(1)), BatchNumberReused)
    assert world.core.logs.intake.next_sequence == 5


def test_what_no_instant_or_subject_is_refused_with_its_rows() -> None:
    world = World()
    for wrong in (-1, 0, START_MS // 1000, INSTANT_MS_MIN - 1):
        error = refusal(world, messages([b"x", b"y"], due=[START_MS, wrong], part=ProducerPart(PRODUCER_ID, 1, 0)))
        assert isinstance(error, BadInstant) and refused_rows(error) == [1] and "seconds" in error.message
    error = refusal(world, messages([b"x"], subjects=[b"no spaces"], part=ProducerPart(PRODUCER_ID, 2, 0)))
    assert isinstance(error, BadSubject)
    data = bytearray(batch(3))
    data[-1] ^= 1
    assert isinstance(refusal(world, bytes(data)), BatchMalformed)
    assert not world.moves()


def test_a_group_takes_no_more_batches_than_its_table_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.delay.intake.BATCHES_MAX", 4)
    world = World()
    answers = [send(world, batch(number)) for number in range(1, 12)]
    world.settle()
    assert all(isinstance(answer[0][0], AcceptedBatch) for answer in answers)
    place = LogPlace(f"{FOLDER}/message", FileKind.MESSAGE, world.core.site.identity.log_id)
    log = open_log(world.disk, place, START_MS)
    sizes = [found.header.batch_count for found in log.scan(0, log.durable) if found.header.kind == GroupKind.DATA]
    assert sizes == [1, 4, 4, 2]
    assert group.BATCHES_MAX == 65_536


def test_rule_L8_far_messages_are_refused_before_near_ones() -> None:
    world = World(free_bytes_far=2_000_000, free_bytes_all=1_000_000)
    world.core.reserve(1_500_000)
    assert isinstance(refusal(world, batch(1, due_ms=7_200_000)), DiskReserve)
    assert not send(world, batch(2, due_ms=1_000))
    world.core.reserve(500_000)
    assert isinstance(refusal(world, batch(3)), DiskReserve)
    world.core.reserve(3_000_000)
    assert not send(world, batch(1, due_ms=7_200_000))


def test_an_hour_with_all_the_messages_it_can_hold_is_refused_with_the_rows_in_it() -> None:
    world = World(hour_rows_max=4)
    send(world, batch(1, count=4))
    world.settle()
    world.core.sweep()
    error = refusal(world, encode_wanted([*wanted(1, 7_200_000, "a"), *wanted(1, 5, "b")], ProducerPart(7, 1, 0)))
    assert isinstance(error, HourFull) and refused_rows(error) == [1]
    assert not send(world, batch(2, due_ms=7_200_000))


def test_an_hour_is_full_for_messages_that_are_filed_in_it_after_the_clock_was_set_back() -> None:
    world = World(hour_rows_max=4)
    send(world, batch(1, count=4))
    world.settle()
    world.core.sweep()
    world.clock.step_wall(-7_200_000)
    assert isinstance(refusal(world, batch(2, due_ms=-7_000_000)), HourFull)


def test_every_refusal_that_waiting_helps_says_how_long() -> None:
    refusals: list[DelaydError] = [DiskReserve("x"), SlowDown("x"), Stopping("x")]
    for error in refusals:
        assert error.retry_after_ms > 0


def test_a_stop_on_a_full_disk_ends_and_keeps_what_was_accepted() -> None:
    world = World()
    send(world, batch(1, due_ms=60_000))
    world.settle()
    world.disk.capacity_bytes = world.disk.used_bytes
    send(world, batch(2, due_ms=60_000))
    assert world.stop()
    after = world.after_crash(PowerLoss.ALL_LOST)
    assert after.core.outcome(PRODUCER_ID, 1) is not None
    assert after.core.outcome(PRODUCER_ID, 2) is None
    assert world.disk.exists(f"{FOLDER}/message")
