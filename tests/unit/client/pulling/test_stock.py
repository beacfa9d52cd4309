"""Stock: each message leaves it once, whoever takes it and whatever interrupts them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from delayd.batch.batch import encode, encode_subject_table, lay_out, parse
from delayd.batch.columns import BatchKind, ColumnId, DispatchPart
from delayd.client.pulling.message import MessageColumns, Pulled, PulledPart
from delayd.client.pulling.stock import Stock

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
    return Pulled("a", 7, (PulledPart(parse(encoded, 0), range(count), first, 1),), 0, lease_ends)


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


def test_messages_leave_in_the_order_in_which_they_came_one_by_one_or_many_at_once() -> None:
    made = stock(pulled(10, 3), pulled(20, 4))
    assert (next_of(made), made.count, taken(made, 500), taken(made, 2), next_of(made)) == (
        10,
        6,
        [11, 12],
        [20, 21],
        22,
    )
    assert (made.count, next_of(made), next_of(made), taken(made, 1), made.count) == (1, 23, None, [], 0)
    assert made.oldest is None


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


def test_what_is_old_or_wanted_goes_back_and_the_rest_stays() -> None:
    made = stock(pulled(10, 4), pulled(20, 4), pulled(30, 4))
    assert next_of(made) == 10
    assert made.give_back_last(6) == [[7, 22, 2], [7, 30, 4]]
    assert made.give_back_older(0.5) == [[7, 11, 3]]
    assert made.oldest == 1.0
    assert (made.count, taken(made, 9), next_of(made)) == (2, [20, 21], None)
    assert made.give_back_last(3) == [] and made.give_back_older(9.0) == []


def test_after_the_close_nothing_is_handed_out() -> None:
    made = stock(pulled(10, 2), pulled(20, 1))
    assert next_of(made) == 10
    assert made.close() == [[7, 11, 1], [7, 20, 1]]
    assert next_of(made) is None and taken(made, 1) == [] and made.close() == []


def test_the_loop_never_waits_for_a_thread_that_takes_something_out() -> None:
    made = stock(pulled(10, 2))
    inside, leave = threading.Event(), threading.Event()

    def stand_inside() -> None:
        with made._lock:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=stand_inside)
    thread.start()
    inside.wait(10)
    try:
        assert made.give_back_older(9.0) is None and made.give_back_last(1) is None
        made.put(pulled(20, 1), 0.0)
        assert made.count == 3
    finally:
        leave.set()
        thread.join()
    assert made.give_back_last(1) == [[7, 20, 1]]


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
