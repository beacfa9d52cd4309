"""Producers: which batch numbers were accepted, so that a retried send is accepted once (rule I1).

The server looks a batch's number up before it checks anything else, and answers from it only once it is durable.

A producer numbers its batches 1, 2, 3 … and names a low-water mark in each: it will repeat no batch with a lower
number. The server keeps the accepted numbers from the mark on. Say the mark of producer A is 4, and 4, 5 and 7 are
accepted:

1. Batch 6 is new and is taken.
2. Batch 5 with the same checksums is a repetition: it gets the answer of the first time, and nothing is appended.
3. Batch 5 with other checksums is refused: a number names one batch for ever (BatchNumberReused).
4. Batch 3 is below the mark: nobody knows any more whether it was accepted, so it is refused (BatchNumberReused).
5. Batch 8 arrives twice before its group is fsynced: after the fsync both requests get the same answer.
6. A asks what became of 9, which never arrived: "not kept". From then on number 9 is refused (rule I6).
7. Batch 10 names 7 as its mark: numbers 4 and 5 are forgotten.

What producers make this server remember is bounded in bytes (rule B1). At the bound the server forgets the producers
that have been idle for the longest, if none of their retries can be under way any more; otherwise it refuses batches of
new producers for now.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count as count_from
from typing import NamedTuple, cast

import msgpack

from delayd.batch.batch import Batch
from delayd.batch.columns import MOVED_PRODUCER_ID, ColumnId
from delayd.errors import BatchMalformed, BatchNumberReused, DelaydError, ProducerLost, SlowDown
from delayd.log.hour import ENDED_BYTES, decode_ended

PIECE_PRODUCERS = 1_000  # One turn of the loop looks at this many producers; each takes some microseconds.
# `<u64 id>` {low_water, seen_at_ms, batches: bytes}, 40 bytes a batch: u64 number · u64 base_sequence · u32 count · i64
# appended_at_ms · u32 columns_crc · u32 heap_crc · u32 decided_bytes, and as many bytes of the rows that its sender is
# told (docs/keys.md, Records).
PREFIX = b"producer/"
BYTES_MAX = 128 << 20  # All producers: 160,000 of them with one number each, or 560,000 numbers.
PRODUCER_BYTES = 640  # One producer takes this much memory, without its numbers.
NUMBER_BYTES = 240  # One accepted number takes this much memory.
NUMBERS_MAX = 65_536  # Numbers of one producer above its low-water mark, which may stand for a minute.
IDLE_MS = 600_000  # No client still retries a batch after this long: the time limit of a send is 30 s.
WAITERS_MAX = 131_072  # Answers that wait for the disk, those to repetitions included; some 500 bytes each.
FENCED_MAX = 65_536  # Numbers that OUTCOME called unknown within ten minutes; some 200 bytes each.
NEW_AT_ONCE = 256  # New producers that one connection brings at once; then one more a second.
NEW_EVERY_MS = 1_000
FULL_RETRY_MS = 10_000  # A place comes free when another producer has been idle for long enough.

# An accepted batch: its number, the fields of `AcceptedBatch`, and how many bytes of decisions follow.
_NUMBER = struct.Struct("<QQIqIII")


class AcceptedBatch(NamedTuple):
    """The fields of the answer to a batch, and the checksums that tell this batch from another one with its number."""

    base_sequence: int
    rows: int
    appended_at_ms: int
    columns_crc32c: int
    heap_crc32c: int
    decided: bytes = b""  # Rows of `delayd.log.hour`: what was decided because rows met others by their keys.


Waiter = Callable[[AcceptedBatch | DelaydError, bool], None]


@dataclass(slots=True)
class ProducerNumbers:
    """One producer's numbers above its low-water mark, packed as they are stored."""

    low_water: int = 0
    seen_at_ms: int = 0  # By the judged clock: when its last batch was appended.
    used_ms: int = 0  # The same in monotonic time.
    accepted: dict[int, bytes] = field(default_factory=dict)


class Allowance:
    """How many new producers one connection may introduce (rule B1)."""

    __slots__ = ("_left", "_since_ms")

    def __init__(self) -> None:
        self._left = NEW_AT_ONCE
        self._since_ms: int | None = None

    def take(self, now_ms: int) -> bool:
        """Use one place; False when none is left for now."""
        if self._since_ms is None:
            self._since_ms = now_ms
        earned = (now_ms - self._since_ms) // NEW_EVERY_MS
        self._since_ms += earned * NEW_EVERY_MS
        self._left = min(NEW_AT_ONCE, self._left + earned)
        if not self._left:
            return False
        self._left -= 1
        return True


class Producers:
    """All producers by id, the one that was used last at the end; a checkpoint writes those that changed."""

    def __init__(self, monotonic_ms: Callable[[], int] = lambda: 0, bytes_max: int = BYTES_MAX) -> None:
        self._monotonic_ms = monotonic_ms
        self._bytes_max = bytes_max
        self._now_ms = monotonic_ms()  # When `look` was called.
        self._producers: dict[int, ProducerNumbers] = {}
        self.held_bytes = 0  # About how much memory the producers and their numbers take.
        # Producers whose numbers did not check at the start: batches of them that are not known are refused.
        self.lost: set[int] = set()
        self._changed: set[int] = set()
        self._forgotten: set[int] = set()  # Removed from the state with the next checkpoint.
        self._waiting: dict[tuple[int, int], tuple[int, int, list[Waiter]]] = {}
        self._waiters = 0
        # Producers that are not known yet but have batches under way: how many batches each.
        self._arriving: dict[int, int] = {}
        # Room for what may be decided about batches with keys that are under way.
        self._reserved: dict[tuple[int, int], int] = {}
        self._fenced: dict[tuple[int, int], int] = {}  # Numbers that were answered "not kept", and when (rule I6).
        self._asking: dict[tuple[int, int], list[Callable[[AcceptedBatch | None], None]]] = {}

    def __len__(self) -> int:
        return len(self._producers)

    @property
    def is_full(self) -> bool:
        """Whether new producers are refused, unless an idle one can be forgotten."""
        return self.held_bytes + PRODUCER_BYTES + NUMBER_BYTES > self._bytes_max

    def find(self, producer_id: int, number: int) -> AcceptedBatch | None:
        """Return what became of a batch; None when it is not known, or not durable yet."""
        producer = self._producers.get(producer_id)
        packed = producer.accepted.get(number) if producer else None
        return None if packed is None else _unpack(packed)

    def ask(self, producer_id: int, number: int, answer: Callable[[AcceptedBatch | None], None]) -> None:
        """Call ``answer`` with what became of a batch, as soon as that can't change any more (rule I6).

        While the batch is under way the answer waits. None says that the batch is not kept and never will be: the
        server refuses a batch with that number from then on.

        Raises:
            SlowDown: the server can't remember any more numbers that were answered "not kept", or waiters.
            ProducerLost: the numbers of this producer did not check, so nobody knows.
        """
        key = (producer_id, number)
        if key in self._waiting:
            if self._waiters >= WAITERS_MAX:
                raise _many_wait()
            self._waiters += 1
            self._asking.setdefault(key, []).append(answer)
            return
        found = self.find(producer_id, number)
        if found is None:
            if producer_id in self.lost:
                raise _lost(producer_id)
            self._fence(key)
        answer(found)

    def begin(self, batch: Batch, waiter: Waiter, allowance: Allowance | None = None, *, drained: bool = False) -> bool:
        """Register a batch that has arrived; False when it is not to be appended, and then ``waiter`` is told why.

        The waiter is called with the accepted batch and whether it had been accepted before, or with an error. A new
        producer uses one place of ``allowance``. ``drained``: another delay server sends the rows, and its number alone
        says which batch this is; when it is sent again, rows that have their outcomes already are missing.
        """
        producer_id, number, low_water = batch.producer
        key = (producer_id, number)
        producer = self._producers.get(producer_id)
        if producer is not None:
            if low_water > producer.low_water:
                self._forget_below(producer, low_water)
            low_water = producer.low_water
            packed = producer.accepted.get(number)
            if packed is not None:
                known = _unpack(packed)
                same = known.columns_crc32c == batch.columns_crc32c and known.heap_crc32c == batch.heap_crc32c
                same |= drained
                waiter(known if same else _reused(number), same)
                return False
        if self.lost and producer_id in self.lost:
            waiter(_lost(producer_id), False)
            return False
        reserved = ENDED_BYTES * batch.count if ColumnId.KEY_END in batch.offsets else 0
        under_way = self._waiting.get(key)
        crcs = (batch.columns_crc32c, batch.heap_crc32c)
        if under_way is not None and under_way[:2] != crcs and not drained:
            waiter(_reused(number), False)
            return False
        # Fast path: nearly every batch is the next one of a producer that is known, and there is room.
        if (
            producer is None
            or number < low_water
            or len(producer.accepted) >= NUMBERS_MAX
            or self._waiters >= WAITERS_MAX
            or self.held_bytes + NUMBER_BYTES + reserved > self._bytes_max
            or key in self._fenced
        ):
            refusal = self._refusal(key, producer, low_water, under_way is None, allowance, reserved)
            if refusal is not None:
                waiter(refusal, False)
                return False
        self._waiters += 1
        if under_way is not None:
            under_way[2].append(waiter)
            return False
        self._waiting[key] = (batch.columns_crc32c, batch.heap_crc32c, [waiter])
        if producer is None:
            self._arrive(producer_id, 1)
        if reserved:
            self._reserved[key] = reserved
            self.held_bytes += reserved
        return True

    def look(self) -> None:
        """Read the clock once for all batches that `accept` takes next."""
        self._now_ms = self._monotonic_ms()

    def accept(self, batch: Batch, base_sequence: int, appended_at_ms: int, decided: bytes = b"") -> None:
        """Record a batch that is durable, and call its waiters; a batch of moved rows was sent by nobody.

        ``decided`` is what its sender is told of its rows that met others.
        """
        producer_id, number, low_water = batch.producer
        if producer_id == MOVED_PRODUCER_ID:
            return
        # The producer is removed and put back, so that the dict is in the order of last use.
        producer = self._producers.pop(producer_id, None)
        if producer is None:
            producer = ProducerNumbers()
            self.held_bytes += PRODUCER_BYTES
            self._forgotten.discard(producer_id)
        self._producers[producer_id] = producer
        if low_water > producer.low_water:
            self._forget_below(producer, low_water)
        crcs = batch.columns_crc32c, batch.heap_crc32c
        accepted = AcceptedBatch(base_sequence, batch.count, appended_at_ms, *crcs, decided)
        if number not in producer.accepted:
            self.held_bytes += NUMBER_BYTES + len(decided)
        producer.accepted[number] = _pack(number, accepted)
        producer.seen_at_ms = appended_at_ms
        producer.used_ms = self._now_ms
        self._changed.add(producer_id)
        self._end((producer_id, number), accepted)

    def check_room(self) -> None:
        """Raise SlowDown when no further try can be remembered."""
        if self.is_full:
            self._forget_idle(0)
        if self.is_full:
            raise SlowDown("this server remembers as many tries as it can; ask later", retry_after_ms=FULL_RETRY_MS)

    def tried(self, asker: int, number: int, low_water: int, ended: bytes) -> None:
        """Record that a try has ended a row, durably; ``ended`` is the row as `delayd.log.hour` has it.

        An asker counts like a producer, and its tries like batches of one row. The first row that a number has ended
        stays. Of an asker that asks for more rows at once than are remembered, the first ones are forgotten.
        """
        producer = self._producers.pop(asker, None)
        if producer is None:
            producer = ProducerNumbers()
            self.held_bytes += PRODUCER_BYTES
            self._forgotten.discard(asker)
        self._producers[asker] = producer
        if low_water > producer.low_water:
            self._forget_below(producer, low_water)
        (row,) = decode_ended(ended)
        producer.seen_at_ms = int(row["decided_at_ms"])
        producer.used_ms = self._monotonic_ms()
        if number not in producer.accepted:
            if len(producer.accepted) >= NUMBERS_MAX:
                oldest = producer.accepted.pop(next(iter(producer.accepted)))
                self.held_bytes -= NUMBER_BYTES - _NUMBER.size + len(oldest)
            self.held_bytes += NUMBER_BYTES + len(ended)
            producer.accepted[number] = _pack(number, AcceptedBatch(0, 1, producer.seen_at_ms, 0, 0, ended))
        self._changed.add(asker)

    def knows(self, producer_id: int) -> bool:
        """Whether anything of a producer or an asker is remembered."""
        return producer_id in self._producers

    def row_of_try(self, asker: int, number: int) -> bytes:
        """The row that a try has ended; empty when it has ended none that is known."""
        found = self.find(asker, number)
        return b"" if found is None else found.decided

    def refuse(self, batch: Batch, error: DelaydError) -> None:
        """Forget a batch that was refused, and call its waiters."""
        producer_id, number, _ = batch.producer
        self._end((producer_id, number), error)

    def changes(self, seen_before_ms: int) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """Take what a checkpoint has to write: pairs to store, and keys of producers not seen since
        ``seen_before_ms``.
        """
        puts: dict[bytes, bytes] = {}
        removes: set[bytes] = set()
        for _ in self.collect(seen_before_ms, puts, removes):
            pass
        return sorted(puts.items()), sorted(removes)

    def collect(self, seen_before_ms: int, puts: dict[bytes, bytes], removes: set[bytes]) -> Iterator[None]:
        """Take what a checkpoint has to write, as `changes` does, a bounded piece at a time (rule B2).

        A change between two pieces may be in this checkpoint or not: it lies above the replay offset, so the next one
        has it.
        """
        for count in count_from(1):
            producer_id, producer = next(iter(self._producers.items()), (0, None))
            if producer is None or producer.seen_at_ms >= seen_before_ms:
                break
            self._forget(producer_id)
            if count % PIECE_PRODUCERS == 0:
                yield
        changed, self._changed = self._changed, set()
        forgotten, self._forgotten = self._forgotten, set()
        for count, producer_id in enumerate(forgotten, 1):
            removes.add(_key(producer_id))
            if count % PIECE_PRODUCERS == 0:
                yield
        for count, producer_id in enumerate(changed, 1):
            found = self._producers.get(producer_id)
            # Only a part of a lost producer's numbers is known, and that part must not pass for all of them.
            if found is not None and producer_id not in self.lost:
                puts[_key(producer_id)] = _encode(found)
            if count % PIECE_PRODUCERS == 0:
                yield

    def kept_of(self, producer_id: int) -> tuple[bytes, bytes | None]:
        """The key of a producer, and the value that says what is known of it now; None when nothing is known."""
        found = self._producers.get(producer_id)
        return _key(producer_id), None if found is None else _encode(found)

    def find_again(self, producer_id: int) -> None:
        """Take a lost producer's batches again. An operator decided so, and that and the numbers that are known are
        durable.
        """
        self.lost.discard(producer_id)
        if producer_id in self._producers:
            self._changed.add(producer_id)
        else:
            self._forgotten.add(producer_id)

    def load(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Take over the producers that the last checkpoint wrote."""
        found: list[tuple[int, ProducerNumbers]] = []
        for key, value in pairs:
            fields = msgpack.unpackb(value)
            producer = ProducerNumbers(cast(int, fields["low_water"]), cast(int, fields["seen_at_ms"]), self._now_ms)
            packed = cast(bytes, fields["batches"])
            at = 0
            while at < len(packed):
                number, *_, decided_bytes = _NUMBER.unpack_from(packed, at)
                end = at + _NUMBER.size + decided_bytes
                producer.accepted[number] = packed[at:end]
                at = end
            self.held_bytes += PRODUCER_BYTES + _bytes_of(producer.accepted.values())
            found.append((int.from_bytes(key[len(PREFIX) :]), producer))
        found.sort(key=lambda item: item[1].seen_at_ms)
        self._producers.update(found)

    def _refusal(
        self,
        key: tuple[int, int],
        producer: ProducerNumbers | None,
        low_water: int,
        new: bool,
        allowance: Allowance | None,
        reserved: int,
    ) -> DelaydError | None:
        """Return why a batch that is not known is refused; None when it is taken. ``new``: it is not under way
        either. ``reserved``: bytes that may be decided about it.
        """
        if self._waiters >= WAITERS_MAX:
            return _many_wait()
        if not new:
            return None
        producer_id, number = key
        if producer_id == MOVED_PRODUCER_ID:
            return BatchMalformed("a producer's id is not 0, which stands for the server itself")
        if number < low_water:
            return _forgotten(number, low_water)
        if key in self._fenced:
            return _was_not_kept(number)
        if producer is not None and len(producer.accepted) >= NUMBERS_MAX:
            return SlowDown(
                f"this producer has {NUMBERS_MAX} accepted batches above its low-water mark {low_water}; raise it",
                retry_after_ms=NEW_EVERY_MS,
            )
        brings = producer is None and producer_id not in self._arriving
        needed = NUMBER_BYTES + reserved + PRODUCER_BYTES * brings
        if self.held_bytes + needed > self._bytes_max:
            self._forget_idle(needed)
            if self.held_bytes + needed > self._bytes_max:
                return SlowDown(
                    f"this server remembers {len(self._producers)} producers and their batches, as many as it can; "
                    "send again later, or to another one",
                    retry_after_ms=FULL_RETRY_MS,
                )
        if brings and allowance is not None and not allowance.take(self._monotonic_ms()):
            return SlowDown(
                f"this connection has brought {NEW_AT_ONCE} new producers and may bring one each {NEW_EVERY_MS} ms; "
                "a producer keeps its id for all of its batches",
                retry_after_ms=NEW_EVERY_MS,
            )
        return None

    def _end(self, key: tuple[int, int], what: AcceptedBatch | DelaydError) -> None:
        """Call everybody who waits for a batch with what became of it."""
        under_way = self._waiting.pop(key, None)
        if under_way is None:
            return  # Replayed from the log: nobody waits for it.
        if self._reserved:
            self.held_bytes -= self._reserved.pop(key, 0)
        if key[0] in self._arriving:
            self._arrive(key[0], -1)
        waiters, asking = under_way[2], self._asking.pop(key, [])
        self._waiters -= len(waiters) + len(asking)
        kept = isinstance(what, AcceptedBatch)
        for index, waiter in enumerate(waiters):
            waiter(what, kept and index > 0)
        if asking and not kept:
            self._fence(key, room=True)
        for answer in asking:
            answer(what if isinstance(what, AcceptedBatch) else None)

    def _arrive(self, producer_id: int, change: int) -> None:
        """Count a batch of a producer that is not known yet; the first such batch reserves the producer's place."""
        before = self._arriving.pop(producer_id, 0)
        if before + change:
            self._arriving[producer_id] = before + change
        self.held_bytes += PRODUCER_BYTES * (bool(before + change) - bool(before))

    def _fence(self, key: tuple[int, int], *, room: bool = False) -> None:
        now_ms = self._monotonic_ms()
        while self._fenced:
            first, fenced_ms = next(iter(self._fenced.items()))
            if now_ms - fenced_ms < IDLE_MS:
                break
            del self._fenced[first]
        if len(self._fenced) >= FENCED_MAX and not room and key not in self._fenced:
            raise SlowDown(
                "so many batches were asked for that no more can be remembered", retry_after_ms=FULL_RETRY_MS
            )
        self._fenced.pop(key, None)
        self._fenced[key] = now_ms

    def _forget_idle(self, needed: int) -> None:
        """Make room for so many bytes: forget producers whose retries can't be under way any more."""
        needed = max(needed, PRODUCER_BYTES + NUMBER_BYTES)
        limit_ms = self._monotonic_ms() - IDLE_MS
        while self._producers and self.held_bytes + needed > self._bytes_max:
            producer_id, producer = next(iter(self._producers.items()))
            if producer.used_ms > limit_ms:
                return
            self._forget(producer_id)

    def _forget(self, producer_id: int) -> None:
        self.held_bytes -= PRODUCER_BYTES + _bytes_of(self._producers.pop(producer_id).accepted.values())
        self._changed.discard(producer_id)
        self._forgotten.add(producer_id)

    def _forget_below(self, producer: ProducerNumbers, low_water: int) -> None:
        producer.low_water = low_water
        # Numbers are accepted roughly in order: one that is not at the front yet is forgotten when it gets there.
        while producer.accepted and (number := next(iter(producer.accepted))) < low_water:
            self.held_bytes -= NUMBER_BYTES - _NUMBER.size + len(producer.accepted.pop(number))


def _pack(number: int, accepted: AcceptedBatch) -> bytes:
    decided = accepted.decided
    return _NUMBER.pack(number, *accepted[:-1], len(decided)) + decided


def _unpack(packed: bytes) -> AcceptedBatch:
    return AcceptedBatch._make((*_NUMBER.unpack_from(packed)[1:-1], packed[_NUMBER.size :]))


def _bytes_of(packed: Iterable[bytes]) -> int:
    """How much memory accepted numbers take."""
    return sum(NUMBER_BYTES + len(each) - _NUMBER.size for each in packed)


def _reused(number: int) -> BatchNumberReused:
    return BatchNumberReused(
        f"batch number {number} was used for another batch; a producer counts its batches up and never reuses a number"
    )


def _forgotten(number: int, low_water: int) -> BatchNumberReused:
    return BatchNumberReused(
        f"batch number {number} is below {low_water}, which this producer said it would not send again"
    )


def _was_not_kept(number: int) -> BatchNumberReused:
    return BatchNumberReused(
        f"batch number {number} was asked for before it came and called not kept, which binds; send it under another"
    )


def _many_wait() -> SlowDown:
    return SlowDown(f"{WAITERS_MAX} batches wait for this server's disk; send again later")


def _key(producer_id: int) -> bytes:
    return PREFIX + producer_id.to_bytes(8)


def _encode(producer: ProducerNumbers) -> bytes:
    batches = b"".join(producer.accepted.values())
    fields = {"low_water": producer.low_water, "seen_at_ms": producer.seen_at_ms, "batches": batches}
    return cast(bytes, msgpack.packb(fields))


def _lost(producer_id: int) -> ProducerLost:
    return ProducerLost(
        f"what producer {producer_id:016x} has sent is not known here any more, for it was damaged on the disk; "
        "send with a new producer, or have an operator release it with `delayd mend release`"
    )
