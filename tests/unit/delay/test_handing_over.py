"""What is due goes to its target: at a pace, past refusals, silence and absence, and it is given up late."""

from __future__ import annotations

import errno
import logging
import os

import numpy as np
import pytest

from delayd.batch.batch import Batch
from delayd.config import DelayConfig
from delayd.errors import BadArgument, BatchMalformed, DiskReserve, DispatchRefused, UnknownServer
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import ANSWER, Frame, Head
from delayd.wire.requests import RequestType
from delayd.wire.status import read_waits
from tests.worlds.delay import TARGET_IDS, World, wanted
from tests.worlds.dispatch_batches import split
from tests.worlds.files import FOLDER
from tests.worlds.target import FakeTarget

TARGET, OTHER = TARGET_IDS[0], 0xBAD
AGAIN_MS = 1_000  # Refused rows are tried again so much later.
SILENCE_MS = DelayConfig().target_silence_ms_max
FRAME_SUBJECTS = 256


def target_of(world: World) -> FakeTarget:
    return world.outside.targets[TARGET]


def state_of(world: World) -> object:
    return world.target_info()["state"]


def frames(world: World) -> list[list[Batch]]:
    """The batches of each frame on its way."""
    return [split(call.asked.body) for call in world.cable.up]


def answer_one(world: World) -> None:
    cable = world.cable
    cable.carry_up()
    cable.target.sync()
    cable.carry_down()


# The pace.


@pytest.mark.parametrize(
    ("settings", "frames_most", "frames_next"),
    [
        ({"frames_in_flight_max": 3}, 3, 3),
        ({"frame_bytes_max": 100, "frames_in_flight_max": 8, "undecided_bytes_max": 800}, 7, 6),
        ({"frames_in_flight_max": 1}, 1, 1),
    ],
)
def test_rule_H2_undecided_batches_are_bounded_and_an_answer_makes_room(
    settings: dict[str, int], frames_most: int, frames_next: int
) -> None:
    world = World.greeted(frame_rows_max=2, **settings)
    world.fall_due(20)
    assert 0 < len(world.cable.up) <= frames_most
    answer_one(world)
    assert 0 < len(world.cable.up) <= frames_next
    assert frames_next > 3 or len(world.cable.up) == frames_next, "the next frame leaves at once"
    world.drain()
    world.check_books()


def test_little_that_is_due_waits_for_the_answer_under_way_and_a_quarter_of_a_frame_does_not() -> None:
    world, quarter = World.greeted(), World.greeted(frame_rows_max=40)
    for each, count, frames_now in ((world, 3, 1), (quarter, 10, 3)):
        for number in range(3):
            each.send_due(count, f"m{number}", 100 + number)
        each.clock.advance(100)
        for _ in range(3):
            each.server.wake()
            each.clock.advance(1)
        assert len(each.cable.up) == frames_now
    answer_one(world)
    assert [sum(batch.count for batch in frame) for frame in frames(world)] == [6], "one frame has all that waited"
    world.drain()
    world.check_books()


def test_a_subject_that_found_no_room_in_a_frame_is_in_the_next_one_whoever_came_meanwhile() -> None:
    world = World.greeted()
    subjects = [b"subject.%d" % number for number in range(FRAME_SUBJECTS + 10)]

    def come_due(name: str, named: list[bytes]) -> None:
        due_ms = world.clock.now_ms() - START_MS + 100
        world.send([each for subject in named for each in wanted(1, due_ms, name + subject.decode(), subject)])
        world.work()
        world.clock.advance(100)
        world.server.wake()

    def sent() -> set[bytes]:
        (frame,) = frames(world)
        return {subject for batch in frame for subject in batch.subjects()}

    come_due("first-", subjects)
    before = sent()
    assert len(before) == FRAME_SUBJECTS
    come_due("second-", sorted(before))
    answer_one(world)
    assert set(subjects) - before <= sent()
    world.drain()
    world.check_books()


@pytest.mark.parametrize("filed", [False, True])
def test_rows_of_many_batches_in_any_order_keep_their_bytes(filed: bool) -> None:
    world = World(segment_bytes=1 << 20)
    draw = np.random.default_rng(5)
    for number in range(30):
        at_ms = draw.integers(5_000, 5_200, 40)
        subjects = [b"orders.eu" if number % 3 else b"mail.%d" % (row % 7) for row in range(40)]
        world.send([wanted(1, int(ms), f"{number}.{row}", subjects[row])[0] for row, ms in enumerate(at_ms)])
    world.settle()
    if filed:
        world.checkpoint()
        world = world.after_crash(PowerLoss.ALL_LOST)
    world.clock.advance(5_300)
    world.pass_ms(2_000)
    assert len(world.bodies()) == 1_200
    world.check_books()


# Refusals.


@pytest.mark.parametrize("error", [BatchMalformed("no"), DispatchRefused("no")])
def test_rule_S3_refused_rows_are_tried_alone_and_dead_when_they_were_refused_for_long_enough(
    error: BatchMalformed | DispatchRefused,
) -> None:
    world = World(dispatch_give_up_after_ms=5_000)
    target = target_of(world)
    target.refused_bodies, target.refuse_with = {b"bad-1"}, error
    world.send([*wanted(2, 0, "bad", b"mail"), *wanted(2, 0, "good")])
    world.pass_ms(AGAIN_MS - 100)
    assert target.refused == 1 and not target.log
    world.pass_ms(200)
    assert world.bodies() == [b"good-0", b"good-1"]
    world.pass_ms(3_500)
    assert 3 <= target.refused <= 6 and world.status("dead_rows") == 0
    world.pass_ms(2_500)
    assert world.status("dead_rows") == 2
    target.refuse_with = None
    again = world.after_crash(PowerLoss.ALL_LOST)
    again.pass_ms(5_000)
    assert again.bodies() == [b"good-0", b"good-1"], "what is dead stays dead"
    assert again.status("dead_rows") == 2
    again.clock.advance(HOUR_MS)
    again.pass_ms(2_000)
    again.checkpoint()
    again.sweep()
    assert again.hours().get(hour_of_ms(START_MS)).sealed
    assert again.status("dead_rows") == again.after_crash(PowerLoss.ALL_LOST).status("dead_rows") == 2


def test_rule_S3_time_during_which_a_target_is_away_makes_nothing_dead() -> None:
    world = World(dispatch_give_up_after_ms=15_000)
    target = target_of(world)
    target.refused_bodies, target.refuse_with = {b"bad-0"}, BatchMalformed("no")
    world.send(wanted(1, 0, "bad"))
    world.pass_ms(1_500)
    for _ in range(4):
        world.crash_target(TARGET)
        world.pass_ms(20_000)
        target.restart()
        world.pass_ms(3_000)
        assert target.refused and world.status("dead_rows") == 0
    target.refuse_with = None
    world.drain()
    world.check_books()


def test_a_target_that_says_later_is_left_alone_for_so_long() -> None:
    world = World.greeted()
    target_of(world).refusals = [DiskReserve("full", retry_after_ms=2_000)]
    world.send_due(3, "b")
    world.pass_ms(1_900)
    assert target_of(world).refused == 1 and len(world.bodies()) == 1
    world.pass_ms(600)
    assert world.bodies()[1:] == [b"b-0", b"b-1", b"b-2"]
    world.check_books()


def test_a_full_disk_with_refused_rows_does_not_spin() -> None:
    world = World()
    target_of(world).refused_bodies, target_of(world).refuse_with = {b"bad-0"}, BatchMalformed("no")
    world.send([*wanted(1, 0, "bad"), *wanted(1, 2_000, "good", b"mail")])
    world.pass_ms(1_500)
    world.disk.capacity_bytes = world.disk.used_bytes
    world.pass_ms(1_000)
    naps = []
    for _ in range(40):
        naps.append(world.idle_ms())
        world.clock.advance(max(1, world.idle_ms()))
        world.settle()
    assert sum(nap <= 0 for nap in naps) <= 2, naps


def test_a_full_disk_of_outcomes_is_told_with_the_error_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    world.send(wanted(1, 2_000, "m"))
    world.pass_ms(500)
    world.disk.capacity_bytes = world.disk.used_bytes
    world.pass_ms(5_000)
    (told,) = (line for line in caplog.messages if line.startswith("dispatch_logs_full"))
    assert told.startswith("dispatch_logs_full hours=1 reason='no space is left for ")
    assert os.strerror(errno.ENOSPC) in told and "free some or move the directory to a larger disk" in told
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(5_000)
    assert caplog.messages[-1].startswith("dispatch_logs_full hours=0")


# Silence and absence.


def test_a_target_that_hangs_is_given_up_after_the_limit_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World.greeted(frame_rows_max=1)
    dials = world.dials
    target_of(world).hangs = True
    world.pass_ms(10 * SILENCE_MS)
    assert world.dials == dials and not world.cable.up, "nothing is asked while nothing is due"
    world.send_due(3, "a")
    with caplog.at_level(logging.WARNING):
        world.pass_ms(SILENCE_MS)
        assert world.dials == dials and state_of(world) == "ready"
        world.pass_ms(6 * SILENCE_MS)
    assert world.dials > dials + 2 and len(world.bodies()) == 1
    (told,) = [line.getMessage() for line in caplog.records if "target_away" in line.getMessage()]
    assert f"no sign of life for {SILENCE_MS} ms" in told and f"{TARGET:016x}" in told
    target_of(world).hangs = False
    world.drain()
    world.check_books()


def test_a_slow_disk_of_the_target_and_a_standstill_of_the_server_itself_are_no_silence() -> None:
    for slow in (True, False):
        world = World.greeted()
        dials = world.dials
        world.fall_due(1)
        if slow:
            target_of(world).slow_disk = True
            world.pass_ms(10 * SILENCE_MS)
        else:
            world.clock.advance(2 * SILENCE_MS)
            world.server.wake()
            assert [call.asked.kind for call in world.cable.up] == [RequestType.DISPATCH]
        assert world.dials == dials and state_of(world) == "ready"
        target_of(world).slow_disk = False
        world.pass_ms(1_000)
        world.check_books()


@pytest.mark.parametrize("sent_in_vain", [False, True])
def test_a_target_that_is_away_is_tried_with_rising_waits_and_what_waits_for_it_is_told(sent_in_vain: bool) -> None:
    world = World.greeted()
    if sent_in_vain:
        world.fall_due(2)
    world.crash_target(TARGET)
    world.settle()
    if not sent_in_vain:
        world.send_due(2, "a")
    tries = [world.dials]
    for _ in range(10):
        world.pass_ms(1_000)
        tries.append(world.dials)
    assert tries[1] - tries[0] >= 3 and tries[-1] - tries[-3] == 1
    head, _ = world.ask(RequestType.STATUS)
    waits = head["waits"]
    assert isinstance(waits, list) and f"2 due messages for realtime server {TARGET:016x}" in str(waits)
    target_of(world).restart()
    world.pass_ms(2_100)
    world.check_books()


def test_rule_H7_a_target_that_is_another_one_raises_an_alarm_until_it_listens_elsewhere() -> None:
    world = World.greeted()
    with pytest.raises(BadArgument, match="no alarm"):
        world.ask(RequestType.TARGET_ACCEPT, {"log_id": TARGET})
    for word in (RequestType.TARGET_LOST, RequestType.TARGET_ACCEPT):
        with pytest.raises(UnknownServer):
            world.ask(word, {"log_id": OTHER})
    world.cut(TARGET)
    target_of(world).log_id = OTHER
    world.send_due(1, "a")
    world.pass_ms(1_000)
    told = world.target_info()
    assert told["state"] == "refused" and told["alarm"] and (told["subjects"], told["waiting"]) == (1, 1)
    target_of(world).log_id = TARGET
    world.server.hears_place(TARGET, f"target-{TARGET}", 2)
    world.settle()
    assert state_of(world) == "ready" and not world.target_info()["alarm"]
    world.pass_ms(1_000)
    world.check_books()


@pytest.mark.parametrize(
    ("count", "what"), [(0, "what falls due"), (1, "1 due message"), (2_000, "2,000 due messages")]
)
def test_a_target_that_refuses_is_told_with_what_waits_for_it(count: int, what: str) -> None:
    world = World.greeted()
    world.cut(TARGET)
    target_of(world).log_id = OTHER
    if count:
        world.send_due(count, "a")
    world.pass_ms(1_000)
    told = [wait.what for wait in read_waits(world.ask(RequestType.STATUS)[0], "waits")]
    assert told == [f"{what} for realtime server {TARGET:016x}"]


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"log_id": TARGET, "end_offset": -1, "batches": []},
        {"log_id": TARGET, "end_offset": 10_000, "batches": [[1, 1, 500_000, 0, 0, 0, 5]]},
    ],
)
def test_a_window_that_makes_no_sense_ends_the_session_and_nothing_else(head: Head) -> None:
    world = World.greeted()
    world.cut(TARGET)
    world.cables[0].carry_down()
    world.clock.advance(100)
    world.server.wake()
    world.cable.carry_down()
    call = world.cable.up.popleft()
    world.cable.down.append(lambda: call.on_answer(Frame(call.asked.kind, ANSWER, 0, head, memoryview(b""))))
    world.settle()
    assert state_of(world) != "ready"
    world.send(wanted(1, 0, "a"))
    world.drain()
    world.check_books()


# What is kept meanwhile, and what is told.


def test_rule_P6_segments_go_when_no_checkpoint_reader_or_row_needs_them() -> None:
    world = World(segment_bytes=4_096)
    world.crash_target(TARGET)
    for number in range(60):
        world.send(wanted(4, 1_000, f"held{number}"))
        world.settle()
    world.checkpoint()
    before = world.disk.list_folder(f"{FOLDER}/message")
    world.pass_ms(310_000)
    world.sweep()
    assert world.disk.list_folder(f"{FOLDER}/message") == before
    target_of(world).restart()
    world.pass_ms(5_000)
    world.delete_hours()
    assert len(world.disk.list_folder(f"{FOLDER}/message")) < len(before)
    world.check_books()


def test_the_lateness_of_the_last_ten_seconds_is_told_message_by_message() -> None:
    world = World.greeted()
    names = ("late_ms_p50", "late_ms_p99", "late_ms_max")
    world.pass_ms(10_000)
    assert not any(map(world.status, (*names, "taken_rows_10s")))
    world.fall_due(7)
    answer_one(world)
    assert world.status("taken_rows_10s") == 7 and not any(map(world.status, names))
    world.fall_due(1, "b")
    world.clock.advance(6_000)
    answer_one(world)
    assert (world.status("taken_rows_10s"), world.status("late_ms_p50"), world.status("late_ms_max")) == (8, 0, 6_000)
    assert 5_800 <= world.status("late_ms_p99") <= 6_000
    world.work()
    world.clock.advance(5_000)
    assert world.status("taken_rows_10s") == 1 and all(5_800 <= world.status(name) <= 6_000 for name in names)
