"""Quotas and places: counts are right whatever is damaged or full, and callers get instants that are free (rule E3)."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from delayd.batch.columns import ProducerPart
from delayd.batch.validate import refused_rows
from delayd.errors import BadArgument, DamagedData, DataError, DelaydError, QuotaReached, Shortage, SlowDown
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.hour import dispatch_path, schedule_path
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import Head
from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import encode_instants, read_instants
from tests.worlds.delay import FOLDER, Answer, World, encode_wanted, wanted

SUBJECT = "orders.eu"
MINUTE_MS = 60_000
GIVEN_MS = 10_000  # An instant that was given out counts for so long.
PLACES_MAX = 65_536
DAY_MS = 24 * HOUR_MS
FAR = hour_of_ms(START_MS) + 5
NO_LIMITS: Head = {"per_second": None, "pending": None, "pending_bytes": None}
Told = list[Answer | DelaydError]


def begin_quota(world: World, subject: str = SUBJECT, **limits: int) -> Told:
    return world.begin(RequestType.SET_QUOTA, NO_LIMITS | {"subject": subject} | limits)


def set_quota(world: World, subject: str = SUBJECT, **limits: int) -> None:
    world.ask(RequestType.SET_QUOTA, NO_LIMITS | {"subject": subject} | limits)


def listing(world: World) -> dict[str, Head]:
    world.settle()
    head, _ = world.ask(RequestType.QUOTAS, {"after": "", "prefix": ""})
    return {str(each["subject"]): each for each in need_maps(head, "quotas")}


def pending(world: World, subject: str = SUBJECT) -> object:
    used = listing(world)[subject]
    assert used["counted"]
    return used["pending_now"]


def reached(world: World) -> tuple[list[int], int]:
    """The rows that the last batch was refused for, and the next free instant of the first."""
    world.settle()
    number, error = world.outside.refused.pop()
    world.outside.unanswered.pop(number, None)
    assert isinstance(error, QuotaReached), error
    assert "row" not in error.message, "senders share batches"
    return refused_rows(error), error.next_free_ms


def begin_places(world: World, due_ms: list[int], spread_ms: int, subject: str = SUBJECT) -> Told:
    body = encode_instants(np.array(due_ms, np.int64) + START_MS)
    return world.begin(RequestType.PLACES, {"subject": subject, "spread_ms": spread_ms}, body)


def read(told: Told) -> list[int]:
    """Instants after START_MS."""
    (answer,) = told
    if isinstance(answer, DelaydError):
        raise answer
    found: list[int] = (read_instants(answer[1]) - START_MS).tolist()
    return found


def places(world: World, due_ms: list[int], spread_ms: int, subject: str = SUBJECT) -> list[int]:
    told = begin_places(world, due_ms, spread_ms, subject)
    world.settle()
    return read(told)


# Counts.


def test_rows_that_come_and_end_while_the_logs_are_read_count_once() -> None:
    world = World()
    world.send(wanted(5, 5_000, "before"))
    world.settle()
    world.send(wanted(2, 6_000, "under-way"))
    told = begin_quota(world, pending=100)
    # This subject is counted by the next counting.
    begin_places(world, [5_000], 1_000, "orders.us")
    world.send([*wanted(4, 7_000, "behind"), *wanted(4, 5_000, "between", subject=b"orders.us")])
    world.cancel(world.receipts("before-0"))
    commit = world.executors()[0]
    while commit.waiting:
        commit.run_one()
        commit.complete_one()
    assert not told
    world.send(wanted(3, 5_000, "late", subject=b"orders.us"))
    assert pending(world) == 10 and len(told) == 1
    set_quota(world, "orders.us", pending=8)
    assert pending(world, "orders.us") == listing(world)["orders.us"]["highest"] == 7
    world.drain()
    assert pending(world) == pending(world, "orders.us") == 0


def test_messages_of_a_subject_that_is_being_counted_are_refused_for_now_and_no_others() -> None:
    world = World()
    set_quota(world, pending=3)
    world.send(wanted(1, 60_000, "a"))
    world.settle()
    world = world.after_crash(PowerLoss.ALL_LOST)
    mixed = [*wanted(1, 60_000, "b", subject=b"orders.us"), *wanted(2, 60_000, "c")]
    (told,) = world.begin(RequestType.SEND, body=encode_wanted(mixed, ProducerPart(7, 1, 0)))
    assert not isinstance(told, DelaydError)
    (result,) = need_maps(told[0], "results")
    assert (result["error"], result["rows"]) == ("slow_down", [1, 2])


@pytest.mark.parametrize("restart", [False, True])
def test_a_moved_message_counts_in_its_new_second_and_no_quota_refuses_it(restart: bool) -> None:
    world = World()
    set_quota(world, pending=3, per_second=1)
    world.send(wanted(3, 60_000, "a", every_ms=1_000))
    world.settle()
    moved = world.reschedule(world.receipts("a-0", "a-1"), START_MS + 62_500, START_MS + 90_000)
    world.settle()
    assert len(moved) == 1
    if restart:
        world = world.after_crash(PowerLoss.ALL_LOST)
        world.pass_ms(1_100)
    used = listing(world)[SUBJECT]
    assert (pending(world), used["highest"], used["highest_ms"]) == (3, 2, START_MS + 62_000)
    world.send(wanted(1, 60_000, "b"))
    assert reached(world)[0] == [0], "three are pending"
    set_quota(world, per_second=1)
    world.send(wanted(2, 60_000, "c", every_ms=1_000))
    world.settle()
    assert not world.outside.refused
    world.send(wanted(1, 90_400, "d"))
    assert reached(world) == ([0], START_MS + 91_000)
    world.drain()
    assert pending(world) == 0


def test_a_quota_that_takes_too_much_memory_to_count_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.send(wanted(40, 5_000, "many"))
    world.settle()
    monkeypatch.setattr("delayd.delay.quotas.quotas.BYTES_MAX", 100)
    with pytest.raises(SlowDown):
        set_quota(world, pending=100)
    assert not listing(world)
    monkeypatch.undo()
    world.pass_ms(10_000)
    set_quota(world, pending=100)


@pytest.mark.parametrize("error", [DamagedData("delay/log/0", 0, "rotten"), Shortage("delay/log/0", errno.EMFILE)])
def test_each_quota_that_is_set_while_nothing_can_be_counted_is_answered_and_later_ones_work(
    error: DataError, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.send(wanted(3, 60_000, "row"))
    world.settle()

    def fails(counting: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("delayd.delay.quotas.counting.Counting.run", fails)
        told = [begin_quota(world, subject, pending=most) for most in (10, 30) for subject in (SUBJECT, "other")]
        told.append(begin_places(world, [60_000], 1_000))
        world.settle()
    world.pass_ms(60_000)
    assert [len(each) for each in told] == [1] * 5 and isinstance(told[2][0], tuple)
    assert listing(world)[SUBJECT]["pending"] == 30
    set_quota(world, pending=1)


@pytest.mark.parametrize("path", [schedule_path(FOLDER, FAR), dispatch_path(FOLDER, FAR)])
@pytest.mark.parametrize("how", ["gone", "cut", "emptied", "rotten"])
def test_rule_B1_a_bad_file_of_a_far_hour_ends_no_server_that_counts(path: str, how: str) -> None:
    world = World()
    world.send([*wanted(5, 5 * HOUR_MS, "far"), *wanted(2, 9 * HOUR_MS, "later")])
    world.settle()
    world.checkpoint()
    world.send(wanted(3, 50_000, "near"))
    world.settle()
    world.cancel(world.receipts("far-0"))
    world.pass_ms(1_000)
    file = world.disk.open(path, write=True)
    if how == "gone":
        world.disk.remove(path)
    elif how == "rotten":
        file.pwritev([b"rotten"], 0)
    else:
        file.truncate(20 if how == "cut" else 0)
    set_quota(world, pending=100)
    # Without the schedule log nothing of the hour is counted, without the outcomes all of it.
    assert pending(world) == (5 if "schedule" in path else 10)


# Places.


def test_an_instant_that_was_given_out_counts_for_some_seconds_or_until_its_message_comes() -> None:
    world = World()
    set_quota(world, per_second=1)
    assert places(world, [MINUTE_MS], 1_000) == [60_000] and places(world, [MINUTE_MS], 1_000) == [61_000]
    for _ in range(2):
        with pytest.raises(QuotaReached):
            places(world, [MINUTE_MS], 1_000)
        world.send(wanted(1, 60_000, "came"))
        world.settle()
    assert len(world.outside.refused) == 1, "only the second one that comes"
    world.pass_ms(GIVEN_MS + 1_000)
    assert places(world, [MINUTE_MS], 1_000) == [61_000]


def test_what_no_server_takes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for due_ms, spread_ms, words in (
        ([0], 7 * DAY_MS + 1, "longer than 7 days"),
        ([0] * 512 + [1_000], 1_000, "ask for 512"),
        ([0, DAY_MS + 2_000], 1_000, "more than a day apart"),
    ):
        with pytest.raises(BadArgument, match=words):
            places(world, due_ms, spread_ms)
    monkeypatch.setattr("delayd.delay.quotas.quotas.WATCHED_MAX", 1)
    places(world, [0], 1_000)
    with pytest.raises(SlowDown):
        places(world, [0], 1_000, "another")


def test_rule_B2_many_places_are_chosen_beside_the_loop_and_later_callers_see_what_was_given() -> None:
    world = World()
    assert places(world, [MINUTE_MS], 0) == [MINUTE_MS]
    told = [begin_places(world, [2 * MINUTE_MS] * count, (PLACES_MAX + 5) * 1_000) for count in (PLACES_MAX, 1)]
    assert not any(told)
    world.settle()
    many, one = map(read, told)
    assert [place // 1_000 for place in (*many, *one)] == [*range(120, 121 + PLACES_MAX)]
