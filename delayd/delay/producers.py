"""Producers: which batch numbers were accepted, so that a retried send is accepted once (rule I1).

A number is looked up before anything else is asked of its batch, and answered only once it is durable.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import msgpack

from delayd.batch import Batch
from delayd.errors import BatchNumberReused, DelaydError

PREFIX = b"producer/"


class Accepted(NamedTuple):
    """What the answer to a batch says, and the checksums that tell it from another one."""

    base_sequence: int
    rows: int
    appended_at_ms: int
    columns_crc32c: int
    heap_crc32c: int


Waiter = Callable[[Accepted | DelaydError, bool], None]


@dataclass(slots=True)
class Producer:
    """One producer's numbers above its low-water mark."""

    low_water: int = 0
    seen_at_ms: int = 0
    accepted: dict[int, Accepted] = field(default_factory=dict)
    waiting: dict[int, tuple[int, int, list[Waiter]]] = field(default_factory=dict)


class Producers:
    """All producers by id; those that changed since the last checkpoint are written with it."""

    def __init__(self) -> None:
        self._producers: dict[int, Producer] = {}
        self._changed: set[int] = set()

    def __len__(self) -> int:
        return len(self._producers)

    def find(self, producer_id: int, number: int) -> Accepted | None:
        """What became of a batch; None when it is not known, or not durable yet."""
        producer = self._producers.get(producer_id)
        return producer.accepted.get(number) if producer else None

    def begin(self, batch: Batch, waiter: Waiter) -> bool:
        """Register a batch that has arrived; False when it is a repetition, which ``waiter`` then hears of.

        The waiter is called with what was accepted, and whether the batch had been accepted before, or with an error.
        """
        producer_id, number, low_water = batch.producer
        producer = self._producers.get(producer_id)
        if producer is None:
            producer = self._producers[producer_id] = Producer()
        if low_water > producer.low_water:
            _forget_below(producer, low_water)
        known = producer.accepted.get(number)
        if known is not None:
            same = known.columns_crc32c == batch.columns_crc32c and known.heap_crc32c == batch.heap_crc32c
            waiter(known if same else _reused(number), same)
            return False
        under_way = producer.waiting.get(number)
        if under_way is not None:
            if under_way[:2] == (batch.columns_crc32c, batch.heap_crc32c):
                under_way[2].append(waiter)
            else:
                waiter(_reused(number), False)
            return False
        if number < producer.low_water:
            waiter(_forgotten(number, producer.low_water), False)
            return False
        producer.waiting[number] = (batch.columns_crc32c, batch.heap_crc32c, [waiter])
        return True

    def accept(self, batch: Batch, base_sequence: int, appended_at_ms: int) -> None:
        """Record a batch that is durable, and tell who waits for it."""
        producer_id, number, low_water = batch.producer
        producer = self._producers.setdefault(producer_id, Producer())
        if low_water > producer.low_water:
            _forget_below(producer, low_water)
        accepted = Accepted(base_sequence, batch.count, appended_at_ms, batch.columns_crc32c, batch.heap_crc32c)
        producer.accepted[number] = accepted
        producer.seen_at_ms = appended_at_ms
        self._changed.add(producer_id)
        _, _, waiters = producer.waiting.pop(number, (0, 0, []))
        for index, waiter in enumerate(waiters):
            waiter(accepted, index > 0)

    def refuse(self, batch: Batch, error: DelaydError) -> None:
        """Forget a batch that was refused, and tell who waits for it."""
        producer_id, number, _ = batch.producer
        _, _, waiters = self._producers[producer_id].waiting.pop(number)
        for waiter in waiters:
            waiter(error, False)

    def changes(self, seen_before_ms: int) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """Take what a checkpoint has to write: puts, and keys of producers not seen since ``seen_before_ms``."""
        removes: list[bytes] = []
        for producer_id, producer in list(self._producers.items()):
            if producer.seen_at_ms < seen_before_ms and not producer.waiting:
                del self._producers[producer_id]
                self._changed.discard(producer_id)
                removes.append(_key(producer_id))
        puts = [(_key(producer_id), _encode(self._producers[producer_id])) for producer_id in sorted(self._changed)]
        self._changed.clear()
        return puts, removes

    def load(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Take over what the last checkpoint wrote."""
        for key, value in pairs:
            producer = Producer()
            fields = msgpack.unpackb(value)
            producer.low_water = cast(int, fields["low_water"])
            producer.seen_at_ms = cast(int, fields["seen_at_ms"])
            for number, *accepted in fields["batches"]:
                producer.accepted[number] = Accepted._make(accepted)
            self._producers[int.from_bytes(key[len(PREFIX) :])] = producer


def _forget_below(producer: Producer, low_water: int) -> None:
    producer.low_water = low_water
    # Numbers are accepted about in order: one that is not at the front yet is forgotten when it gets there.
    while producer.accepted and (number := next(iter(producer.accepted))) < low_water:
        del producer.accepted[number]


def _reused(number: int) -> BatchNumberReused:
    return BatchNumberReused(
        f"batch number {number} was used for another batch; a producer counts its batches up and never reuses a number"
    )


def _forgotten(number: int, low_water: int) -> BatchNumberReused:
    return BatchNumberReused(
        f"batch number {number} is below {low_water}, which this producer said it would not send again"
    )


def _key(producer_id: int) -> bytes:
    return PREFIX + producer_id.to_bytes(8)


def _encode(producer: Producer) -> bytes:
    batches = [[number, *accepted] for number, accepted in producer.accepted.items()]
    fields = {"low_water": producer.low_water, "seen_at_ms": producer.seen_at_ms, "batches": batches}
    return cast(bytes, msgpack.packb(fields))
