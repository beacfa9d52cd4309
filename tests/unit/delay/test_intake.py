"""What producers are answered: the durable group, the repetition, and every refusal by its name."""

import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.batch.validate import refused_rows
from delayd.delay.producers import AcceptedBatch
from delayd.errors import (
    BadHeaders,
    BadInstant,
    BadSubject,
    BatchMalformed,
    BatchNumberReused,
    DelaydError,
    DiskReserve,
    HourFull,
    PastHorizon,
    SlowDown,
    Stopping,
)
from delayd.hours import INSTANT_MS_MIN
from delayd.log import group
from delayd.log.group import GroupKind
from delayd.log.log import LogPlace, open_log
from delayd.log.segment import FileKind
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES
from delayd.testing.tree import PowerLoss
from tests.batches import messages
from tests.worlds.delay import FOLDER, PRODUCER_ID, World, encode_wanted, wanted

DAY_MS = 86_400_000
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


def test_a_batch_is_answered_when_its_group_is_durable_and_not_before() -> None:
    world = World()
    answers = send(world, batch(1))
    world.executors()[0].run_one()
    assert not answers
    world.executors()[0].complete_one()
    assert [(what, duplicate) for what, duplicate in answers] == [
        (world.core.outcome(PRODUCER_ID, 1), False),
    ]
    assert world.core.outcome(PRODUCER_ID, 1) is not None


def test_rule_I1_a_repetition_is_answered_as_the_first_time_once_that_is_durable() -> None:
    world = World()
    first = send(world, batch(1))
    early = send(world, batch(1))
    assert not early
    world.settle()
    late = send(world, batch(1))
    assert first[0][0] == early[0][0] == late[0][0]
    assert [answers[0][1] for answers in (first, early, late)] == [False, True, True]
    assert world.core.logs.intake.next_sequence == 3


def test_rule_I1_a_number_is_known_after_a_crash_from_the_log_and_from_the_checkpoint() -> None:
    world = World()
    first = send(world, batch(1))
    world.settle()
    world.checkpoint()
    second = send(world, batch(2))
    world.settle()
    world = world.after_crash(PowerLoss.ALL_LOST)
    assert send(world, batch(1)) == [(first[0][0], True)]
    assert send(world, batch(2)) == [(second[0][0], True)]
    assert not world.moves()


def test_rule_I1_a_known_number_with_other_checksums_is_refused_by_name_waiting_or_durable() -> None:
    world = World()
    first = send(world, batch(1))
    assert isinstance(refusal(world, batch(1, name="other")), BatchNumberReused)
    world.settle()
    assert isinstance(refusal(world, batch(1, name="other")), BatchNumberReused)
    assert isinstance(first[0][0], AcceptedBatch)


def test_rule_I1_numbers_below_the_low_water_mark_are_forgotten_and_refused() -> None:
    world = World()
    send(world, batch(1))
    world.settle()
    send(world, batch(2, low_water=2))
    world.settle()
    assert world.core.outcome(PRODUCER_ID, 1) is None
    assert isinstance(refusal(world, batch(1)), BatchNumberReused)
    assert world.core.logs.intake.next_sequence == 5


def test_rule_I1_a_refused_batch_is_not_known_and_may_be_sent_again() -> None:
    world = World()
    world.core.logs.intake.reserve.behind = True
    assert isinstance(refusal(world, batch(1)), SlowDown)
    world.core.logs.intake.reserve.behind = False
    answers = send(world, batch(1))
    world.settle()
    assert isinstance(answers[0][0], AcceptedBatch) and not answers[0][1]


def test_rule_I1_a_repetition_is_answered_even_when_new_batches_are_refused() -> None:
    world = World()
    first = send(world, batch(1))
    world.settle()
    world.core.logs.intake.close()
    assert send(world, batch(1)) == [(first[0][0], True)]
    assert isinstance(refusal(world, batch(2)), Stopping)


def test_a_batch_past_the_horizon_is_refused_with_its_rows() -> None:
    world = World(horizon_days=1)
    near, far = wanted(1, 1_000, "near"), wanted(1, DAY_MS + 1_000, "far")
    error = refusal(world, encode_wanted([*near, *far], ProducerPart(PRODUCER_ID, 1, 0)))
    assert isinstance(error, PastHorizon) and refused_rows(error) == [1]


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


def test_a_full_queue_slows_producers_down_and_takes_more_when_it_is_empty() -> None:
    world = World(intake_queue_bytes_max=1_000, group_bytes_max=400)
    answers = [send(world, batch(number)) for number in range(1, 20)]
    refused = [answer[0][0] for answer in answers if answer]
    assert refused and all(isinstance(error, SlowDown) for error in refused)
    world.settle()
    assert all(answer for answer in answers)
    number = 1 + next(index for index, answer in enumerate(answers) if isinstance(answer[0][0], SlowDown))
    assert not send(world, batch(number))


def test_batches_that_wait_for_a_commit_share_the_next_group() -> None:
    world = World()
    for number in range(1, 6):
        send(world, batch(number))
    syncs = world.disk.syncs
    world.settle()
    assert world.core.logs.intake.durable.offset > 0
    assert [operation for operation in world.disk.operations[-10:] if operation.startswith("write")]
    assert world.disk.syncs - syncs <= 4  # Two groups, and what the first dispatch needs.


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


def test_rule_L8_a_full_disk_refuses_everything_that_waits_by_name_and_recovers_by_itself() -> None:
    world = World()
    send(world, batch(1))
    world.settle()
    world.disk.capacity_bytes = world.disk.used_bytes + 100
    answers = [send(world, batch(number)) for number in (2, 3, 4)]
    world.settle()
    assert all(isinstance(answer[0][0], DiskReserve) for answer in answers)
    assert isinstance(refusal(world, batch(5)), DiskReserve)
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.look_around()
    again = [send(world, batch(number)) for number in (2, 3, 4, 5)]
    world.settle()
    assert all(isinstance(answer[0][0], AcceptedBatch) for answer in again)
    assert world.after_crash(PowerLoss.ALL_LOST).core.logs.intake.next_sequence == world.core.logs.intake.next_sequence


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


@pytest.mark.parametrize("due_ms", [-10_000_000, 0])
def test_rule_P5_a_row_is_filed_in_the_later_hour_of_its_wish_and_its_append(due_ms: int) -> None:
    world = World()
    send(world, batch(1, due_ms=due_ms))
    world.settle()
    world.pass_ms(100)
    (kept,) = world.outside.targets[0x7001].log
    assert kept.part.hour == START_MS // 3_600_000
    assert np.array_equal(kept.deliver_at_ms, [START_MS + due_ms] * 2)


def test_rule_P5_appended_at_never_decreases_when_the_clock_is_set_back() -> None:
    world = World()
    stamps: list[int] = []
    for number in range(1, 4):
        answers = send(world, batch(number))
        world.settle()
        accepted = answers[0][0]
        assert isinstance(accepted, AcceptedBatch)
        stamps.append(accepted.appended_at_ms)
        world.clock.step_wall(-1_000)
    world = world.after_crash()
    answers = send(world, batch(9))
    world.settle()
    accepted = answers[0][0]
    assert isinstance(accepted, AcceptedBatch)
    assert [*stamps, accepted.appended_at_ms] == [START_MS] * 4


def test_rule_P5_an_idle_server_writes_a_tick_when_an_hour_has_ended() -> None:
    world = World()
    send(world, batch(1, due_ms=0))
    world.pass_ms(2_000)
    before = world.core.logs.intake.durable.offset
    world.pass_ms(2_000)
    assert world.core.logs.intake.durable.offset == before
    world.clock.advance(3_600_000)
    world.pass_ms(2_000)
    assert world.core.logs.intake.durable.offset > before
    assert world.core.logs.intake.appended_at_ms >= START_MS + 3_600_000


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


@pytest.mark.parametrize(
    "bad", [b"\xc1\xff", b"\x81\xa1a", b"\x92\xa1a\xa1b", b"\x81\x01\xa1b", b"\x81\xa1a\xa2\xff\xff"]
)
def test_rule_E2_headers_that_no_consumer_can_read_are_refused_with_their_rows(bad: bytes) -> None:
    world = World()
    due = [START_MS + 1_000] * 5
    headers = [b"", bad, b"\x81\xa1a\xa1b", bad, b"\x80"]
    error = refusal(world, messages([b"x"] * 5, due=due, headers=headers))
    assert isinstance(error, BadHeaders) and refused_rows(error) == [1, 3]
    assert world.core.logs.intake.idle
    answers = send(world, messages([b"x"] * 2, due=due[:2], headers=headers[:1] + headers[2:3]))
    world.settle()
    assert isinstance(answers[0][0], AcceptedBatch)
