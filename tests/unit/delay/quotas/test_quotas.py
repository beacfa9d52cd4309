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
    DamagedData,
    DataError,
    DelaydError,
    QuotaReached,
    Shortage,
    SlowDown,
)
from delayd.log.control import QuotaLimits
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from tests.unit.delay.quotas.setting import SUBJECT, pending, set_quota, use
from tests.worlds.delay import World, wanted


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


def test_rows_that_come_and_end_while_the_logs_are_read_count_once() -> None:
    world = World()
    world.send(wanted(5, 5_000, "before"))
    world.settle()
    told: list[DelaydError | None] = []
    world.send(wanted(2, 6_000, "under-way"))
    world.core.set_quota(SUBJECT, QuotaLimits(pending=100), told.append)
    world.send(wanted(4, 7_000, "behind"))
    world.cancel(world.receipts("before-0"))
    commit = world.executors()[0]
    while commit.waiting:
        commit.run_one()
        commit.complete_one()
    assert not told and world.core.asked.quotas.lowest_message_log_offset() == 0
    assert pending(world) == 10
    assert world.core.asked.quotas.lowest_message_log_offset() is None
    assert told == [None]
    world.drain()
    assert pending(world) == 0


def test_rows_that_are_durable_before_their_subject_s_turn_to_be_counted_count_once() -> None:
    world = World()
    told: list[DelaydError | None] = []
    other = b"orders.us"
    world.core.set_quota(SUBJECT, QuotaLimits(pending=100), told.append)
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
    assert set_quota(world, QuotaLimits(pending=8), other) is None
    assert (pending(world, other), use(world, other).highest, told) == (7, 7, [None])
    world.drain()
    assert pending(world, other) == 0


def test_a_quota_that_takes_too_much_memory_to_count_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.send(wanted(40, 5_000, "many"))
    world.settle()
    monkeypatch.setattr(quotas_module, "BYTES_MAX", 100)
    assert isinstance(set_quota(world, QuotaLimits(pending=100)), SlowDown)
    assert world.core.asked.quotas.listing() == []
    world.send(wanted(1, 5_000, "free"))
    world.settle()
    assert not world.outside.refused
    monkeypatch.undo()
    world.pass_ms(10_000)
    assert set_quota(world, QuotaLimits(pending=100)) is None


@pytest.mark.parametrize("restart", [False, True])
def test_a_moved_message_counts_in_its_new_second_and_no_quota_refuses_it(restart: bool) -> None:
    world = World()
    assert set_quota(world, QuotaLimits(pending=3, per_second=1)) is None
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
    assert set_quota(world, QuotaLimits(per_second=1)) is None
    world.send(wanted(2, 60_000, "c", every_ms=1_000))
    world.settle()
    assert not world.outside.refused
    world.send(wanted(1, 90_400, "d"))
    assert reached(world) == ([0], START_MS + 91_000)
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
                limits = QuotaLimits(pending=most)
                world.core.set_quota(subject, limits, partial(hear, subject))
        world.core.places(SUBJECT, np.array([START_MS + 60_000]), 1_000, lambda answer: told.append((b"places", None)))
        world.settle()
    world.pass_ms(60_000)
    assert sorted(subject for subject, _ in told) == sorted([b"places", *[SUBJECT] * 3, *[b"other"] * 3])
    assert [answer for subject, answer in told if subject == SUBJECT][-1] is None
    assert use(world).limits == QuotaLimits(pending=30)
    assert set_quota(world, QuotaLimits(pending=1)) is None
