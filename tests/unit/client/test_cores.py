"""Parts of clients that neither wait nor speak: columns of instants, waits, clocks, paces, stocks and futures."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pandas as pd
import pytest

from delayd.address import Endpoint
from delayd.batch.batch import encode, encode_subject_table, lay_out, parse
from delayd.batch.columns import BatchKind, ColumnId, DispatchPart
from delayd.client.asking.messages import GET, Joined, Kind, Numbers, Row
from delayd.client.instants import HORIZON_MS, Horizon, monotonic_s, monotonic_us, wish, wish_column
from delayd.client.pulling.message import MessageColumns, MessageView, Pulled, PulledPart
from delayd.client.pulling.stock import AHEAD_S, BATCH_S, HOLD_S, ONE_AHEAD_S, Borrowed, Pace, Stock
from delayd.client.routing import LAST_MS, Groups, MetaView, RetryWaits, ServerAddress, ServerLink, spread_ms
from delayd.client.sending.outbox import SendSlots
from delayd.errors import (
    BadArgument,
    PastHorizon,
    ServerUnavailable,
)
from delayd.wire.asked import ANSWER, AnswerRows, AskedKeys

MS = 1_798_790_400_000  # 2027-01-01 08:00 UTC


AT = datetime(2027, 1, 1, 9, tzinfo=timezone(timedelta(hours=1)))


NAIVE = np.datetime64("2027-01-01T08:00", "ns")


COLUMNS: dict[str, Any] = {
    "a datetime": AT,
    "a list": [AT, AT],
    "a tuple of UTC": (AT.astimezone(UTC),) * 2,
    "datetime64[ns]": np.array([NAIVE, NAIVE]),
    "datetime64[s]": np.array([NAIVE, NAIVE], "datetime64[s]"),
    "datetime64[h]": np.array([NAIVE, NAIVE], "datetime64[h]"),
    "one datetime64": NAIVE,
    "an index": pd.DatetimeIndex([AT, AT]),
    "a series": pd.Series(pd.to_datetime([AT, AT], utc=True)),
    "a series with an index": pd.Series(pd.to_datetime([AT, AT], utc=True), index=[7, 9]),
    "a series in seconds": pd.Series(pd.to_datetime([AT, AT], utc=True)).dt.as_unit("s"),
    "a series elsewhere": pd.Series(pd.to_datetime([AT, AT], utc=True)).dt.tz_convert("Asia/Tokyo"),
    "timestamps": [pd.Timestamp(AT), pd.Timestamp(AT)],
    "objects": pd.Series([AT, AT], dtype=object),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_each_kind_of_column_names_the_same_instant(name: str) -> None:
    column, relative = wish_column(None, COLUMNS[name], None, 2)
    assert column.tolist() == [MS, MS] and column.dtype == np.int64 and not relative


@pytest.mark.parametrize("part", [1, 999_999])
def test_what_is_finer_than_a_millisecond_is_rounded_up(part: int) -> None:
    nanos = np.array([NAIVE, NAIVE + np.timedelta64(part, "ns")])
    for column in (nanos, pd.Series(nanos).dt.tz_localize("UTC")):
        assert wish_column(None, column, None, 2)[0].tolist() == [MS, MS + 1]
    assert wish_column(None, [AT, AT + timedelta(microseconds=1)], None, 2)[0].tolist() == [MS, MS + 1]


@pytest.mark.parametrize(
    "column",
    [
        timedelta(seconds=2),
        [timedelta(seconds=2)] * 2,
        np.array([2, 2], "timedelta64[s]"),
        np.array([1_999_999_001, 2_000_000_000], "timedelta64[ns]"),
        np.timedelta64(2, "s"),
        pd.Series(pd.to_timedelta([2, 2], unit="s")),
        pd.to_timedelta([2, 2], unit="s"),
    ],
)
def test_delays_count_from_the_call_and_are_never_shorter(column: Any) -> None:
    before_us = monotonic_us()
    wanted, relative = wish_column(column, None, None, 2)
    assert relative and len(wanted) == 2
    assert all(before_us + 2_000_000 <= each <= monotonic_us() + 2_000_000 for each in wanted.tolist())


def test_slots_go_to_who_waited_longest_and_never_beyond_the_limit() -> None:
    async def scenario() -> None:
        slots = SendSlots(lambda: 2)
        taken: list[int] = []

        async def take(number: int) -> None:
            await slots.take(asyncio.get_running_loop().time() + 10)
            taken.append(number)

        tasks = [asyncio.create_task(take(number)) for number in range(5)]
        await asyncio.sleep(0.01)
        assert taken == [0, 1] and slots.taken == 2 and not slots.free
        tasks[2].cancel()
        await asyncio.wait([tasks[2]])
        for expected in ([0, 1, 3], [0, 1, 3, 4]):
            slots.give()
            await asyncio.sleep(0.01)
            assert taken == expected and slots.taken == 2
        slots.give()
        slots.give()
        assert slots.taken == 0 and slots.free

    asyncio.run(scenario())


def test_waits_between_tries_grow_to_a_bound_and_differ() -> None:
    backoff = RetryWaits()
    waits = [backoff.next_ms() for _ in range(30)]
    assert waits[0] <= 25 and all(wait <= LAST_MS for wait in waits) and min(waits[-10:]) >= LAST_MS / 2
    assert len(set(waits)) == 30
    backoff.reset()
    assert backoff.next_ms() <= 25
    assert 100 <= spread_ms(100) <= 125 and spread_ms(0) >= 1


def test_the_horizon_itself_is_accepted_and_a_second_more_is_not() -> None:
    now_ms = time.time_ns() // 1_000_000
    wish(timedelta(milliseconds=HORIZON_MS), None, None)
    wish_column(None, None, [now_ms + HORIZON_MS], 1)
    with pytest.raises(PastHorizon):
        wish(timedelta(milliseconds=HORIZON_MS + 1), None, None)
    with pytest.raises(PastHorizon):
        wish_column(None, None, [now_ms, now_ms + HORIZON_MS + 1_000], 2)
    with pytest.raises(PastHorizon):
        wish(timedelta(hours=2), None, None, Horizon(3_600_000))


MOST = 1_000


def paced(each_s: float, lease_s: float = 60.0, messages: int = 50) -> Pace:
    """The pace of a caller that has taken so many messages, one at a time."""
    pace, now = Pace(lease_s), 100.0
    for _ in range(messages):
        pace.came_back(now)
        pace.handed_out(now, 1)
        pace.fetched()
        now += each_s
    pace.came_back(now)
    return pace


@pytest.mark.parametrize(
    ("each_s", "ahead", "batch"),
    [(1e-6, MOST, MOST), (0.001, 250, MOST), (0.01, 25, 100), (0.3, 1, 3), (0.45, 1, 2), (0.6, 0, 1), (10.0, 0, 1)],
)
def test_rule_Q4_what_is_held_ahead_is_a_time_and_no_number(each_s: float, ahead: int, batch: int) -> None:
    pace = paced(each_s)
    assert abs(pace.ahead(MOST) - ahead) <= 1 and abs(pace.batch(MOST) - batch) <= 1
    assert pace.ahead(5) == min(5, ahead) and pace.batch(5) == min(5, batch)


@pytest.mark.parametrize("lease_s", [0.1, 0.5, 2.0, 60.0, 43_200.0])
@pytest.mark.parametrize("each_s", [0.0, 0.0001, 0.01, 0.04, 0.3, 2.0])
def test_rule_Q4_what_is_fetched_ahead_leaves_most_of_its_lease(lease_s: float, each_s: float) -> None:
    pace = paced(each_s, lease_s)
    assert pace.hold_s <= min(HOLD_S, lease_s / 4)
    assert pace.ahead(MOST) * each_s <= min(ONE_AHEAD_S, lease_s / 8)
    assert pace.batch(MOST) == 1 or pace.batch(MOST) * each_s <= min(BATCH_S, lease_s / 8)
    assert pace.ahead(MOST) <= 1 or pace.ahead(MOST) * each_s <= min(AHEAD_S, lease_s / 16)


FAR = 1e12  # When a lease ends that does not.


def pulled(first: int, count: int, lease_ends: float = FAR) -> Pulled:
    """An answer whose messages are numbered from a pull sequence on."""
    table = encode_subject_table([b"a"])
    ends, bodies = lay_out([b"%d" % row for row in range(first, first + count)], len(table))
    columns = [
        (ColumnId.DELIVER_AT_MS, np.zeros(count, np.int64)),
        (ColumnId.SEQUENCE, np.arange(first, first + count, dtype=np.uint64)),
        (ColumnId.BODY_END, ends),
    ]
    encoded = encode(BatchKind.DISPATCH, DispatchPart(1, 1, 1, 0, 0, 0, 0), count, columns, [table, bodies], 1)
    return Pulled("a", 7, (PulledPart(parse(encoded, 0), range(count), first, 1),), lease_ends)


def stock(*answers: Pulled) -> Stock[MessageColumns]:
    made = Stock(MessageColumns)
    for at, answer in enumerate(answers):
        made.put(answer, float(at))
    return made


def next_of(made: Stock[MessageColumns], now: float = 0.0) -> int | None:
    """The pull sequence of the next message."""
    given: list[tuple[MessageColumns, int]] = []
    left = made.next(now, given)
    assert (left >= 0) == (len(given) == 1)
    return given[0][0].pull_sequences[given[0][1]] if given else None


def taken(made: Stock[MessageColumns], most: int, now: float = 0.0) -> list[int]:
    given: list[Pulled] = []
    assert made.take(most, now, given) == bool(given)
    return MessageColumns(given[0]).pull_sequences if given else []


def test_what_outlived_its_lease_is_not_handed_out() -> None:
    made = stock(pulled(10, 3, lease_ends=5.0), pulled(20, 1))
    assert (next_of(made, 4.9), next_of(made, 5.0), next_of(made, 5.0)) == (10, 20, None)
    assert taken(stock(pulled(10, 3, lease_ends=5.0)), 9, 6.0) == []


def test_what_was_taken_and_did_not_arrive_is_the_next_again_and_only_once() -> None:
    made = stock(pulled(10, 3))
    given: list[tuple[MessageColumns, int]] = []
    made.next(0.0, given)
    ((batch, row),) = given
    back = batch.pulled.cut(row)[1].cut(1)[0]
    made.put_back(back, 0.0)
    made.put_back(back, 0.0)
    assert [next_of(made) for _ in range(4)] == [10, 11, 12, None]
    made.put_back(pulled(12, 1), 0.0)
    assert (made.count, taken(made, 9)) == (1, [12])


def test_a_take_joins_the_answers_of_one_connection() -> None:
    made = stock(pulled(10, 3), pulled(20, 2), pulled(30, 4), pulled(40, 1)._replace(incarnation=8))
    assert (taken(made, 4), made.count) == ([10, 11, 12, 20], 6)
    assert (taken(made, 9), taken(made, 9), taken(made, 9)) == ([21, 30, 31, 32, 33], [40], [])
    given: list[Pulled] = []
    made = stock(pulled(10, 1, lease_ends=9.0), pulled(11, 1, lease_ends=5.0))
    made.take(9, 4.0, given)
    assert (given[0].message_count, given[0].lease_ends) == (2, 5.0)
    made = stock(pulled(10, 1, lease_ends=9.0), pulled(11, 1, lease_ends=5.0), pulled(12, 1))
    assert (taken(made, 9, 6.0), taken(made, 9, 6.0)) == ([10], [12])


def test_messages_of_joined_answers_are_as_late_as_their_own_answer_was() -> None:
    answers = [pulled(10 * number, 2) for number in (1, 2)]
    first, second = (
        answer._replace(parts=(answer.parts[0]._replace(received_at_ms=at_ms),))
        for answer, at_ms in zip(answers, (3, 50), strict=True)
    )
    columns = MessageColumns(first.joined(second))
    assert columns.late_ms.tolist() == [3, 3, 50, 50]
    assert [MessageView(columns, row).late_ms for row in range(4)] == [3, 3, 50, 50]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_an_interrupted_take_of_several_answers_loses_nothing_and_repeats_nothing(left: int) -> None:
    made = stock(pulled(10, 3), pulled(20, 2), pulled(30, 4))
    given: list[Pulled] = []
    made.take(7, 0.0, given)
    (whole,) = given
    # The interrupt came when so many of the answers had left; the others are still here.
    made = stock(*[pulled(10, 3), pulled(20, 2), pulled(30, 4)][left:])
    made.put_back(whole, 0.0)
    made.put_back(whole, 0.0)
    assert [next_of(made) for _ in range(10)] == [10, 11, 12, 20, 21, 30, 31, 32, 33, None]


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_and_the_loop_share_a_stock_and_each_message_leaves_once(threads: int) -> None:
    made = stock()
    seen: list[list[int]] = [[] for _ in range(threads)]
    over = threading.Event()

    def take_out(own: list[int]) -> None:
        while not over.is_set() or made.count:
            number = next_of(made) if len(own) % 3 else next(iter(taken(made, 1)), None)
            if number is not None:
                own.append(number)

    workers = [threading.Thread(target=take_out, args=(own,)) for own in seen]
    for worker in workers:
        worker.start()
    back: list[int] = []
    for first in range(0, 6_000, 60):
        made.put(pulled(first, 60), time.monotonic())
        handles = made.give_back_last(1) if first % 120 else made.give_back_older(time.monotonic() - 0.01)
        back += [start + row for _, start, count in handles or () for row in range(count)]
    over.set()
    for worker in workers:
        worker.join(30)
    assert sorted([*back, *(number for own in seen for number in own)]) == list(range(6_000))


def test_rule_I1_the_low_water_mark_of_changes_passes_no_call_that_is_under_way() -> None:
    numbers = Numbers()
    with numbers.of_call(keys=2) as by_keys:
        with numbers.of_call(keys=0) as by_receipt:
            assert ([*by_keys], [*by_receipt]) == ([1, 2, 3], [4])
        assert numbers.head["low_water"] == 1
    assert numbers.head["low_water"] == 5


def test_of_two_threads_that_saw_the_same_place_one_gets_it() -> None:
    async def scenario() -> None:
        in_flight = Borrowed(3, monotonic_s)
        ends = monotonic_s() + 60
        assert in_flight.hand_out([[1, 10, 2]], ends)
        assert in_flight.room == 1  # Two threads read this now.
        assert in_flight.hand_out([[1, 12, 1]], ends)
        assert not in_flight.hand_out([[1, 13, 1]], ends)
        in_flight.let_go([[1, 12, 1]])
        assert in_flight.room == 1

    asyncio.run(scenario())


KIND = (GET, 1, b"s", False)


def test_a_question_that_spoils_a_joined_request_fails_alone() -> None:
    asked: list[list[int]] = []

    async def ask(_: Kind, rows: Sequence[Row | AskedKeys], __: float) -> AnswerRows:
        asked.append([int(row[0]) for row in rows if not isinstance(row, AskedKeys)])
        if 2 in asked[-1]:
            raise BadArgument("no row is 2")
        answers = np.zeros(len(rows), ANSWER)
        answers["sequence"] = asked[-1]
        return answers

    async def story() -> None:
        room = asyncio.Semaphore(1)
        joined = Joined(lambda _: room, ask)
        questions = [joined.ask(KIND, (number, 0, 0), 0.0) for number in (1, 2, 3)]
        one, two, three = await asyncio.gather(*questions, return_exceptions=True)
        assert not isinstance(one, BaseException) and not isinstance(three, BaseException)
        assert [*one["sequence"], *three["sequence"]] == [1, 3] and isinstance(two, BadArgument)

    asyncio.run(story())
    assert asked == [[1, 2, 3], [1], [2], [3]]


def test_servers_that_are_away_are_no_errors_of_tasks_when_another_one_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = {log_id: ServerAddress(log_id, Endpoint("127.0.0.1", log_id), True) for log_id in (1, 2, 3)}
    reached: list[int] = []

    async def connection(link: ServerLink) -> object:
        if link.log_id != 3:
            raise ServerUnavailable("it is away")
        reached.append(3)
        return object()

    async def story() -> list[object]:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        meta = MetaView("127.0.0.1:1")
        monkeypatch.setattr(meta, "delay_servers", servers)
        monkeypatch.setattr(meta, "refresh_soon", lambda: None)
        groups = Groups(meta)
        assert (await groups.find()).log_id == 3
        gc.collect()
        return told

    monkeypatch.setattr(ServerLink, "connection", connection)
    monkeypatch.setattr(ServerLink, "standing", property(lambda link: link.log_id in reached or None))
    monkeypatch.setattr(ServerLink, "connecting", True)
    assert asyncio.run(story()) == []
