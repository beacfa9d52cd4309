"""What is remembered of producers: every retry of theirs is known, and all of it together is bounded in bytes."""

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
    PIECE_PRODUCERS,
    PRODUCER_BYTES,
    AcceptedBatch,
    Allowance,
    Producers,
)
from delayd.errors import DelaydError, SlowDown

Answer = tuple[AcceptedBatch | DelaydError, bool]


class Clock:
    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        return self.now_ms


def batch(producer_id: int, number: int, low_water: int = 0, body: bytes = b"x") -> Batch:
    part = ProducerPart(producer_id, number, low_water)
    return parse(encode_single(part, 1_800_000_000_000, b"s", body))


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


def small(places: int, clock: Clock | None = None) -> Producers:
    """Room for so many producers with one number each."""
    return Producers(clock or Clock(), places * (PRODUCER_BYTES + NUMBER_BYTES))


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


def test_rule_B1_new_producers_are_refused_when_all_places_are_taken_and_known_ones_go_on() -> None:
    producers = small(10)
    for id_ in range(1, 11):
        assert isinstance(send(producers, id_, 1)[0], AcceptedBatch)
    for id_ in range(11, 1_000):
        error, _ = send(producers, id_, 1)
        assert isinstance(error, SlowDown) and error.retry_after_ms > 0
    assert len(producers) == 10 and producers.is_full
    assert send(producers, 3, 1) == (producers.find(3, 1), True)
    assert isinstance(send(producers, 3, 2, low_water=2)[0], AcceptedBatch)


def test_rule_B1_the_producers_that_were_idle_for_the_longest_make_room() -> None:
    clock = Clock()
    producers = small(10, clock)
    for id_ in range(1, 11):
        clock.now_ms += 1_000
        send(producers, id_, 1, at_ms=clock.now_ms)
    clock.now_ms += 1_000
    send(producers, 1, 2, low_water=2, at_ms=clock.now_ms)  # The oldest is used again.
    clock.now_ms = 4_000 + IDLE_MS
    for id_ in (101, 102, 103):
        assert isinstance(send(producers, id_, 1, at_ms=clock.now_ms)[0], AcceptedBatch)
    assert [id_ for id_ in range(1, 11) if producers.find(id_, 1 if id_ > 1 else 2) is None] == [2, 3, 4]
    # The next one sent less than IDLE_MS ago: its retry may still be under way.
    assert isinstance(send(producers, 104, 1)[0], SlowDown)


def test_rule_B1_a_flood_of_numbers_counts_as_a_flood_of_producers_does() -> None:
    producers = small(10)
    accepted = sum(isinstance(send(producers, 1, number)[0], AcceptedBatch) for number in range(1, 200))
    assert accepted < 40
    assert isinstance(send(producers, 1, 1_000, low_water=999)[0], AcceptedBatch)  # The mark gives them back.
    assert producers.held_bytes == PRODUCER_BYTES + NUMBER_BYTES


def test_rule_B1_a_producer_that_never_raises_its_mark_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUMBERS_MAX", 100)
    producers = Producers()
    for number in range(1, 101):
        assert isinstance(send(producers, 1, number)[0], AcceptedBatch)
    error, _ = send(producers, 1, 101)
    assert isinstance(error, SlowDown) and "low-water mark 0" in error.message
    assert isinstance(send(producers, 2, 1)[0], AcceptedBatch)
    assert isinstance(send(producers, 1, 101, low_water=50)[0], AcceptedBatch)
    assert send(producers, 1, 60)[1] is True


def test_rule_B1_a_connection_brings_so_many_new_producers_and_then_one_each_second() -> None:
    clock = Clock()
    producers, allowance, other = Producers(clock), Allowance(), Allowance()
    for id_ in range(1, NEW_AT_ONCE + 1):
        assert not begin(producers, batch(id_, 1), allowance)
    ((error, _),) = begin(producers, batch(5_000, 1), allowance)
    assert isinstance(error, SlowDown) and error.retry_after_ms == NEW_EVERY_MS
    assert not begin(producers, batch(1, 2), allowance)  # One that is known takes no place,
    assert not begin(producers, batch(5_000, 1), other)  # and other connections have places of their own.
    clock.now_ms += 2 * NEW_EVERY_MS
    for id_, taken in ((6_001, True), (6_002, True), (6_003, False)):
        assert (begin(producers, batch(id_, 1), allowance) == []) is taken


def test_rule_B1_what_is_refused_leaves_nothing_behind() -> None:
    producers = small(10)
    for id_ in range(1, 1_000):
        one = batch(id_, 1)
        assert not begin(producers, one)
        producers.refuse(one, SlowDown("x"))
    assert len(producers) == 0 and producers.held_bytes == 0


def test_rule_B1_answers_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rule_I6_no_more_answers_that_bind_are_given_than_can_be_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FENCED_MAX", 3)
    clock = Clock()
    producers = Producers(clock)
    for number in (1, 2, 3, 3):
        producers.ask(1, number, lambda found: None)
    with pytest.raises(SlowDown):
        producers.ask(1, 4, lambda found: None)
    clock.now_ms += IDLE_MS
    producers.ask(1, 4, lambda found: None)


def test_a_checkpoint_removes_the_forgotten_and_keeps_those_that_came_back() -> None:
    clock = Clock()
    producers = small(3, clock)
    for id_ in (1, 2, 3):
        send(producers, id_, 1, at_ms=10)
    stored = dict(producers.changes(0)[0])
    assert len(stored) == 3
    clock.now_ms += IDLE_MS
    send(producers, 4, 1, at_ms=20)
    send(producers, 5, 1, at_ms=20)
    send(producers, 1, 9, at_ms=30)  # Forgotten a moment ago, for 4.
    puts, removes = producers.changes(0)
    stored.update(puts)
    for key in removes:
        del stored[key]
    again = Producers(clock)
    again.load(sorted(stored.items()))
    assert len(again) == len(producers) == 3 and again.held_bytes == producers.held_bytes
    for id_, number in ((1, 9), (4, 1), (5, 1)):
        assert again.find(id_, number) == producers.find(id_, number) is not None
    assert again.changes(25)[1] == removes_of(4, 5)


def removes_of(*ids: int) -> list[bytes]:
    return [module.PREFIX + id_.to_bytes(8) for id_ in ids]


def test_rule_B2_a_checkpoint_collects_producers_in_bounded_pieces() -> None:
    producers = Producers()
    count = 3 * PIECE_PRODUCERS + 1
    for producer_id in range(1, count + 1):
        send(producers, producer_id, 1)
    puts: dict[bytes, bytes] = {}
    removes: set[bytes] = set()
    pieces, before = 0, 0
    for _ in producers.collect(0, puts, removes):
        assert 0 < len(puts) - before <= PIECE_PRODUCERS
        pieces, before = pieces + 1, len(puts)
        # A producer that goes on meanwhile is in the next one too, and a new one is not lost.
        send(producers, count + pieces, 1)
    assert pieces == 3 and len(puts) == count and not removes
    assert len(producers.changes(0)[0]) == 3
    removed: set[bytes] = set()
    assert sum(1 for _ in producers.collect(1 << 60, {}, removed)) == 6
    assert len(removed) == count + 3 and not len(producers)
