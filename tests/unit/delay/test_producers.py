"""What is remembered of producers: every retry of theirs is known, and all of it together is bounded (rule B1)."""

from __future__ import annotations

import tracemalloc

import pytest

from delayd.batch.batch import Batch, encode_single, parse
from delayd.batch.columns import ProducerPart
from delayd.delay import producers as module
from delayd.delay.producers import (
    IDLE_MS,
    NEW_AT_ONCE,
    NEW_EVERY_MS,
    NUMBER_BYTES,
    PRODUCER_BYTES,
    AcceptedBatch,
    Allowance,
    Producers,
)
from delayd.errors import DelaydError, SlowDown
from delayd.testing.clock import SimClock

Answer = tuple[AcceptedBatch | DelaydError, bool]


def batch(producer_id: int, number: int, low_water: int = 0) -> Batch:
    return parse(encode_single(ProducerPart(producer_id, number, low_water), 1_800_000_000_000, b"s", b"x"))


def begin(producers: Producers, one: Batch, allowance: Allowance | None = None) -> list[Answer]:
    answers: list[Answer] = []
    producers.begin(one, lambda what, duplicate: answers.append((what, duplicate)), allowance)
    return answers


def send(producers: Producers, producer_id: int, number: int, low_water: int = 0, at_ms: int = 0) -> Answer:
    """Send a batch and have it accepted, if it is taken; the answer."""
    one = batch(producer_id, number, low_water)
    answers = begin(producers, one)
    if not answers:
        producers.look()
        producers.accept(one, 1, at_ms)
    (answer,) = answers
    return answer


def is_taken(producers: Producers, producer_id: int, number: int, low_water: int = 0, at_ms: int = 0) -> bool:
    what, _ = send(producers, producer_id, number, low_water, at_ms)
    assert isinstance(what, AcceptedBatch) or (isinstance(what, SlowDown) and what.retry_after_ms > 0)
    return isinstance(what, AcceptedBatch)


def small(places: int, clock: SimClock | None = None) -> Producers:
    """Room for so many producers with one number each."""
    return Producers((clock or SimClock()).monotonic_ms, places * (PRODUCER_BYTES + NUMBER_BYTES))


@pytest.mark.parametrize(("ids", "numbers"), [(8_000, 1), (40, 500), (1, 30_000)])
def test_rule_B1_the_bytes_that_are_counted_are_those_that_are_held(ids: int, numbers: int) -> None:
    sent = [batch(7_919 * id_ << 30, number) for id_ in range(1, ids + 1) for number in range(numbers)]
    producers = Producers()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for index, one in enumerate(sent):
            producers.begin(one, lambda what, duplicate: None)
            producers.accept(one, index << 33, 1_800_000_000_000 + index)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held <= producers.held_bytes <= 3 * held


def test_rule_B1_when_all_places_are_taken_known_producers_go_on_and_those_that_were_idle_make_room() -> None:
    clock = SimClock()
    producers = small(10, clock)
    for id_ in range(1, 11):
        clock.advance(1_000)
        assert is_taken(producers, id_, 1, at_ms=clock.monotonic_ms())
    assert not any(is_taken(producers, id_, 1) for id_ in range(11, 1_000))
    assert len(producers) == 10 and producers.is_full
    assert send(producers, 3, 1) == (producers.find(3, 1), True)
    clock.advance(1_000)
    assert is_taken(producers, 1, 2, low_water=2, at_ms=clock.monotonic_ms())  # The oldest is used again.
    clock.advance(IDLE_MS - 7_000)
    assert all(is_taken(producers, id_, 1, at_ms=clock.monotonic_ms()) for id_ in (101, 102, 103))
    assert [id_ for id_ in range(1, 11) if producers.find(id_, 1 if id_ > 1 else 2) is None] == [2, 3, 4]
    assert not is_taken(producers, 104, 1), "the next one sent less than IDLE_MS ago: it may still try again"


def test_rule_B1_a_producer_that_never_raises_its_mark_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    flooded = small(10)
    assert sum(is_taken(flooded, 1, number) for number in range(1, 200)) < 40
    assert is_taken(flooded, 1, 1_000, low_water=999)  # The mark gives them back.
    assert flooded.held_bytes == PRODUCER_BYTES + NUMBER_BYTES
    monkeypatch.setattr(module, "NUMBERS_MAX", 100)
    producers = Producers()
    assert all(is_taken(producers, 1, number) for number in range(1, 101))
    error, _ = send(producers, 1, 101)
    assert isinstance(error, SlowDown) and "low-water mark 0" in error.message
    assert is_taken(producers, 2, 1) and is_taken(producers, 1, 101, low_water=50)
    assert send(producers, 1, 60)[1] is True


def test_rule_B1_a_connection_brings_so_many_new_producers_and_then_one_each_second() -> None:
    clock = SimClock()
    producers, allowance, other = Producers(clock.monotonic_ms), Allowance(), Allowance()
    assert not any(begin(producers, batch(id_, 1), allowance) for id_ in range(1, NEW_AT_ONCE + 1))
    ((error, _),) = begin(producers, batch(5_000, 1), allowance)
    assert isinstance(error, SlowDown) and error.retry_after_ms == NEW_EVERY_MS
    assert not begin(producers, batch(1, 2), allowance)  # One that is known takes no place,
    assert not begin(producers, batch(5_000, 1), other)  # and other connections have places of their own.
    clock.advance(2 * NEW_EVERY_MS)
    assert [not begin(producers, batch(id_, 1), allowance) for id_ in (6_001, 6_002, 6_003)] == [True, True, False]


def test_rules_B1_I6_what_is_refused_leaves_nothing_and_answers_that_wait_or_bind_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    producers = small(10)
    for id_ in range(1, 1_000):
        one = batch(id_, 1)
        assert not begin(producers, one)
        producers.refuse(one, SlowDown("x"))
    assert len(producers) == 0 and producers.held_bytes == 0
    monkeypatch.setattr(module, "WAITERS_MAX", 5)
    producers, one = Producers(), batch(1, 1)
    waiting = [begin(producers, one) for _ in range(5)]
    for refused in (begin(producers, one), begin(producers, batch(1, 2)), begin(producers, batch(2, 1))):
        assert isinstance(refused[0][0], SlowDown)
    with pytest.raises(SlowDown):
        producers.ask(1, 1, lambda found: None)
    producers.accept(one, 1, 1)
    assert [duplicate for ((_, duplicate),) in waiting] == [False, True, True, True, True]
    assert not begin(producers, batch(2, 1))
    monkeypatch.setattr(module, "FENCED_MAX", 3)
    clock = SimClock()
    producers = Producers(clock.monotonic_ms)
    for number in (1, 2, 3, 3):
        producers.ask(1, number, lambda found: None)
    with pytest.raises(SlowDown):
        producers.ask(1, 4, lambda found: None)
    clock.advance(IDLE_MS)
    producers.ask(1, 4, lambda found: None)


def test_a_checkpoint_removes_the_forgotten_and_keeps_those_that_came_back() -> None:
    clock = SimClock()
    producers = small(3, clock)
    for id_ in (1, 2, 3):
        send(producers, id_, 1, at_ms=10)
    stored = dict(producers.changes(0)[0])
    clock.advance(IDLE_MS)
    send(producers, 4, 1, at_ms=20)
    send(producers, 5, 1, at_ms=20)
    send(producers, 1, 9, at_ms=30)  # Forgotten a moment ago, for 4.
    puts, removes = producers.changes(0)
    stored.update(puts)
    for key in removes:
        del stored[key]
    again = Producers(clock.monotonic_ms)
    again.load(sorted(stored.items()))
    assert len(again) == len(producers) == 3 and again.held_bytes == producers.held_bytes
    for id_, number in ((1, 9), (4, 1), (5, 1)):
        assert again.find(id_, number) == producers.find(id_, number) is not None
    assert again.changes(25)[1] == [module.PREFIX + id_.to_bytes(8) for id_ in (4, 5)]
