"""Quotas: each limit refuses exactly the rows that are over it, by name, and the counts are right at any time."""

from __future__ import annotations

import errno
from functools import partial

import numpy as np
import pytest

from delayd.batch.validate import refused_rows
from delayd.delay.quotas import quotas as quotas_module
from delayd.delay.quotas.counting import Counting, Found
from delayd.errors import (
    BadArgument,
    DamagedData,
    DataError,
    DelaydError,
    DiskReserve,
    QuotaReached,
    Shortage,
    SlowDown,
    Stopping,
)
from delayd.log.quota import NO_LIMITS, Limits
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from delayd.wire.ending import CancelAnswer
from tests.unit.delay.quotas.setting import SUBJECT, pending, set_quota, use
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000


def refusal(world: World) -> DelaydError:
    """Why the last batch was refused."""
    world.settle()
    number, error = world.outside.refused.pop()
    world.outside.unanswered.pop(number, None)
    return error


def reached(world: World) -> tuple[list[int], int]:
    """The rows that the last batch was refused for, and the next free instant of the first."""
    error = refusal(world)
    assert isinstance(error, QuotaReached), error
    return refused_rows(error), error.next_free_ms


def test_a_subject_may_have_as_many_pending_messages_as_its_quota_says() -> None:
    world = World()
    world.send(wanted(4, 5_000, "before"))
    assert set_quota(world, Limits(pending=6)) is None
    assert pending(world) == 4
    world.send(wanted(3, 9_000, "many"))
    assert reached(world) == ([2], START_MS + 5_000)
    world.send(wanted(2, 9_000, "fits"))
    world.settle()
    assert (pending(world), world.outside.refused) == (6, [])
    world.send(wanted(1, 9_000, "other", subject=b"orders.us"))
    world.settle()
    world.drain()
    assert pending(world) == 0
    world.send(wanted(6, 90_000, "again"))
    assert pending(world) == 6


def test_a_second_takes_as_many_messages_as_the_quota_says_and_the_next_free_one_is_named() -> None:
    world = World()
    assert set_quota(world, Limits(per_second=2)) is None
    world.send(wanted(4, 5_000, "a", every_ms=500))  # Two of second 5, two of second 6.
    world.send(wanted(3, 5_999, "b", every_ms=1_000))
    assert reached(world) == ([0, 1], START_MS + 7_000)
    world.send(wanted(3, 7_000, "c"))
    assert reached(world) == ([2], START_MS + 8_000)
    world.send(wanted(2, 7_000, "c"))
    world.settle()
    assert (pending(world), use(world).highest) == (6, 2)


def test_a_free_second_is_looked_for_within_a_week_and_no_longer() -> None:
    world = World()
    assert set_quota(world, Limits(per_second=1)) is None
    tally = world.core.quotas._tallies[SUBJECT]
    first_s = START_MS // 1_000 + 60
    tally.profile.add(np.arange(first_s, first_s + 3 * 86_400))
    world.send(wanted(1, 60_000, "a"))
    assert reached(world) == ([0], (first_s + 3 * 86_400) * 1_000)
    tally.profile.add(np.arange(first_s + 3 * 86_400, first_s + 8 * 86_400))
    world.send(wanted(1, 60_000, "a"))
    assert reached(world) == ([0], 0)


def test_what_left_in_this_second_counts_until_the_second_is_over() -> None:
    world = World()
    assert set_quota(world, Limits(per_second=3)) is None
    world.send(wanted(3, -1_000, "now"))
    world.settle()
    world.pass_ms(100)
    assert pending(world) == 0
    world.send(wanted(1, -90_000, "more"))
    assert reached(world) == ([0], START_MS + 1_000)
    world.pass_ms(1_000)
    world.send(wanted(1, 0, "then"))
    world.settle()
    assert not world.outside.refused


def test_bodies_and_headers_of_pending_messages_are_limited() -> None:
    world = World()
    assert set_quota(world, Limits(pending_bytes=30)) is None
    world.send(wanted(3, 5_000, "12345678"))  # Three times ten bytes.
    world.settle()
    assert use(world).bytes == 30
    world.send(wanted(1, 5_000, ""))
    assert reached(world)[0] == [0]
    asked = world.receipts("12345678-1")
    told = world.cancel(asked)
    world.settle()
    assert told == [[CancelAnswer.CANCELLED]]
    assert (use(world).bytes, use(world).rows) == (20, 2)
    world.send(wanted(1, 5_000, "12345678"))
    world.settle()
    assert (use(world).bytes, world.outside.refused) == (30, [])


def test_a_cancelled_message_gives_its_second_back() -> None:
    world = World()
    assert set_quota(world, Limits(per_second=1)) is None
    world.send(wanted(1, 5_000, "a"))
    world.settle()
    world.cancel(world.receipts("a"))
    world.settle()
    world.send(wanted(1, 5_400, "b"))
    world.settle()
    assert (pending(world), world.outside.refused) == (1, [])


def test_a_quota_of_0_lets_nothing_in_and_none_lifts_it() -> None:
    world = World()
    for limits in (Limits(per_second=0), Limits(pending=0), Limits(pending_bytes=0)):
        assert set_quota(world, limits) is None
        world.send(wanted(2, 5_000, "no"))
        assert reached(world) == ([0, 1], 0)
    assert set_quota(world, NO_LIMITS) is None
    assert world.core.quotas.listing() == [] and world.core.intake.gate is None
    world.send(wanted(2, 5_000, "yes"))
    world.settle()
    assert not world.outside.refused
    world.drain()


@pytest.mark.parametrize("filed", [False, True])
@pytest.mark.parametrize("way", [None, PowerLoss.ALL_LOST])
def test_a_restart_counts_again_what_is_pending(filed: bool, way: PowerLoss | None) -> None:
    world = World(load_ahead_ms=1_000)
    assert set_quota(world, Limits(pending=12)) is None
    for due_ms in (500, 5_000, HOUR_MS, 40 * HOUR_MS):
        world.send(wanted(3, due_ms, f"due{due_ms}"))
    world.settle()
    assert pending(world) == 12
    if filed:
        world.checkpoint()
    world.pass_ms(600)
    assert pending(world) == 9
    world.cancel(world.receipts("due3600000-1", "due144000000-2"))
    world.settle()
    assert pending(world) == 7
    world = world.after_crash(way)
    assert [wait.what for wait in world.core.refuses()] == ["sends to 1 subjects with a quota"]
    world.send(wanted(1, 9_000, "early"))
    assert isinstance(refusal(world), SlowDown)
    world.pass_ms(1_000)
    assert pending(world) == 7
    world.send(wanted(6, 9_000, "late"))
    assert reached(world)[0] == [5]
    world.drain(200 * HOUR_MS)
    assert pending(world) == 0
    world.check_books()


def test_rows_that_come_and_end_while_the_logs_are_read_count_once() -> None:
    world = World()
    world.send(wanted(5, 5_000, "before"))
    world.settle()
    told: list[DelaydError | None] = []
    world.send(wanted(2, 6_000, "under-way"))
    world.core.set_quota(SUBJECT, Limits(pending=100), told.append)
    world.send(wanted(4, 7_000, "behind"))
    world.cancel(world.receipts("before-0"))
    commit = world.executors()[0]
    while commit.waiting:
        commit.run_one()
        commit.complete_one()
    assert not told and world.core.quotas.lowest_message_log_offset() == 0
    assert pending(world) == 10
    assert world.core.quotas.lowest_message_log_offset() is None
    assert told == [None]
    world.drain()
    assert pending(world) == 0


def test_rows_that_are_durable_before_their_subject_s_turn_to_be_counted_count_once() -> None:
    world = World()
    told: list[DelaydError | None] = []
    other = b"orders.us"
    world.core.set_quota(SUBJECT, Limits(pending=100), told.append)
    due_ms = np.array([START_MS + 5_000])
    # The counting for the quota has begun; this subject is counted by the next one.
    world.core.places(other, due_ms, 1_000, lambda answer: None)
    world.send(wanted(4, 5_000, "between", subject=other))
    commit = world.executors()[0]
    while commit.waiting:
        commit.run_one()
        commit.complete_one()
    world.send(wanted(3, 5_000, "under-way", subject=other))
    world.settle()
    assert set_quota(world, Limits(pending=8), other) is None
    assert (pending(world, other), use(world, other).highest, told) == (7, 7, [None])
    world.drain()
    assert pending(world, other) == 0


def test_a_batch_that_the_full_disk_refuses_does_not_count() -> None:
    world = World()
    assert set_quota(world, Limits(pending=10, per_second=4)) is None
    world.send(wanted(2, 5_000, "kept"))
    world.settle()
    world.disk.capacity_bytes = 0
    world.send(wanted(2, 5_000, "lost"))
    assert isinstance(refusal(world), DiskReserve)
    assert (pending(world), use(world).highest) == (2, 2)


def test_a_quota_is_set_one_at_a_time_and_the_last_one_counts() -> None:
    world = World()
    told: list[DelaydError | None] = []
    for limits in (Limits(pending=1), NO_LIMITS, Limits(per_second=5)):
        world.core.set_quota(SUBJECT, limits, told.append)
    world.settle()
    assert told == [None] * 3 and use(world).limits == Limits(per_second=5)
    assert use(world.after_crash(PowerLoss.ALL_LOST)).limits == Limits(per_second=5)


def test_more_quotas_than_are_remembered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas_module, "QUOTAS_MAX", 2)
    world = World()
    assert set_quota(world, Limits(pending=1), b"a") is None
    assert set_quota(world, Limits(pending=1), b"b") is None
    with pytest.raises(BadArgument, match="lift another one"):
        set_quota(world, Limits(pending=1), b"c")
    assert set_quota(world, Limits(pending=2), b"b") is None


def test_a_quota_that_takes_too_much_memory_to_count_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.send(wanted(40, 5_000, "many"))
    world.settle()
    monkeypatch.setattr(quotas_module, "BYTES_MAX", 100)
    assert isinstance(set_quota(world, Limits(pending=100)), SlowDown)
    assert world.core.quotas.listing() == []
    world.send(wanted(1, 5_000, "free"))
    world.settle()
    assert not world.outside.refused
    monkeypatch.undo()
    world.pass_ms(10_000)
    assert set_quota(world, Limits(pending=100)) is None


def test_a_server_counts_no_more_than_it_has_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    assert set_quota(world, Limits(pending=100)) is None
    world.send(wanted(40, 5_000, "many"))
    world.settle()
    monkeypatch.setattr(quotas_module, "BYTES_MAX", 600)
    world.pass_ms(1_000)
    world.send(wanted(1, 5_000, "one more"))
    assert isinstance(refusal(world), SlowDown)
    assert [wait.what for wait in world.core.refuses()] == ["sends to subjects with a quota"]
    world.send(wanted(1, 5_000, "another", subject=b"orders.us"))
    world.settle()
    assert not world.outside.refused
    world.drain()
    world.pass_ms(1_000)
    assert not [*world.core.refuses()]


def test_a_server_that_stops_ends_its_counting() -> None:
    world = World()
    told: list[DelaydError | None] = []
    world.core.set_quota(SUBJECT, Limits(pending=1), told.append)
    assert world.stop()
    world.settle()
    (error,) = told
    assert isinstance(error, Stopping)
    with pytest.raises(Stopping):
        world.core.set_quota(SUBJECT, Limits(pending=1), told.append)


@pytest.mark.parametrize("restart", [False, True])
def test_a_moved_message_counts_in_its_new_second_and_no_quota_refuses_it(restart: bool) -> None:
    world = World()
    assert set_quota(world, Limits(pending=3, per_second=1)) is None
    world.send(wanted(3, 60_000, "a", every_ms=1_000))
    world.settle()
    moved = world.reschedule(world.receipts("a-0", "a-1"), START_MS + 62_500, START_MS + 90_000)
    world.settle()
    assert len(moved) == 1 and pending(world) == 3
    if restart:
        world = world.after_crash(PowerLoss.ALL_LOST)
        world.pass_ms(1_100)
    assert (pending(world), use(world).highest, use(world).highest_ms) == (3, 2, START_MS + 62_000)
    world.send(wanted(1, 60_000, "b"))
    assert reached(world)[0] == [0], "three are pending"
    assert set_quota(world, Limits(per_second=1)) is None
    world.send(wanted(2, 60_000, "c", every_ms=1_000))
    world.settle()
    assert not world.outside.refused
    world.send(wanted(1, 90_400, "d"))
    assert reached(world) == ([0], START_MS + 91_000)
    world.drain()
    assert pending(world) == 0


def test_rows_that_met_a_key_count_no_longer_than_their_decision() -> None:
    world = World()
    assert set_quota(world, Limits(pending=3)) is None
    for flags in (0, 1, 2, 0):
        world.send(wanted(1, 60_000 + flags, f"flag{flags}"), [b"key"], [flags])
        world.settle()
        world.pass_ms(100)
        assert pending(world) == 1, "rejected, kept and replaced rows have ended"
    world.send(wanted(3, 60_000, "others"))
    assert reached(world)[0] == [2]
    world = world.after_crash(PowerLoss.ALL_LOST)
    world.pass_ms(1_100)
    assert pending(world) == 1
    world.drain()
    assert pending(world) == 0


@pytest.mark.parametrize("error", [DamagedData("delay/log/0", 0, "rotten"), Shortage("delay/log/0", errno.EMFILE)])
def test_each_quota_that_is_set_while_nothing_can_be_counted_is_answered_and_later_ones_work(
    error: DataError, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.send(wanted(3, 60_000, "row"))
    world.settle()
    told: list[tuple[bytes, DelaydError | None]] = []

    def hear(subject: bytes, answer: DelaydError | None) -> None:
        told.append((subject, answer))

    def fails(counting: Counting) -> Found:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Counting, "run", fails)
        for most in (10, 20, 30):
            for subject in (SUBJECT, b"other"):
                limits = Limits(pending=most)
                world.core.set_quota(subject, limits, partial(hear, subject))
        world.core.places(SUBJECT, np.array([START_MS + 60_000]), 1_000, lambda answer: told.append((b"places", None)))
        world.settle()
    world.pass_ms(60_000)
    assert sorted(subject for subject, _ in told) == sorted([b"places", *[SUBJECT] * 3, *[b"other"] * 3])
    assert [answer for subject, answer in told if subject == SUBJECT][-1] is None
    assert use(world).limits == Limits(pending=30)
    assert set_quota(world, Limits(pending=1)) is None
