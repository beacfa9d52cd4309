"""Occurrences: what a recurring schedule sends and skips, computed on the worker thread (docs/recurring.md).

A schedule is a *carrier*: a pending row whose body is the record. What is decided about it takes its place:

     carrier s5, decided up to 8:59      carrier s9, decided up to 9:00, due at 8:59:58 of the next day
                                    ─▶   s10: the occurrence of 9:00, an ordinary message
                                         s11: a range of occurrences that are skipped, which ends with this decision

Invariant: nothing here depends on anything but the carriers and the instant that is given, and nothing is written: the
batch is appended with the decision that the carriers end, or not at all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol, cast

import msgpack
import numpy as np

from delayd.batch.batch import PADS, Batch, parse
from delayd.batch.columns import BatchKind, ColumnArray, ColumnId, ProducerPart
from delayd.batch.content import Names, slots_of_names
from delayd.batch.gather import Gathered, GatheredItems, compose_new, item_of
from delayd.batch.labels import (
    OCCURRENCE_MS,
    SCHEDULE,
    SKIPPED,
    SKIPPED_COUNT,
    SKIPPED_UNTIL_MS,
    Headers,
    bloom_of_item,
    encode_tags,
)
from delayd.batch.names import RECURRING_SUBJECT
from delayd.batch.sequences import NO_INDICES, Indices
from delayd.delay.ending.copies import (
    COPY_BYTES,
    COPY_ROWS,
    MOVED_PART,
    READ_BYTES,
    Copied,
    ToMove,
    batch_of,
    by_batch,
    numbers_of,
)
from delayd.delay.ending.overlaps import Answers
from delayd.delay.filing.schedule_log import Sources
from delayd.errors import DelaydError, RecurringConflict, SlowDown
from delayd.machine.executor import Executor
from delayd.recurrence.deciding import SkippedRun, SkipReason, decide
from delayd.recurrence.recurrence import Recurrence
from delayd.wire.meta import SlotSet
from delayd.wire.recurring import (
    RUNS_KEPT,
    AskedSchedule,
    RecurringRecord,
    RecurringRequest,
    RecurringSpec,
    RecurringWish,
)

log = logging.getLogger(__name__)

LEAD_MS = 2_000  # A carrier is due so long before its next occurrence, which is then in the wheel in time.
LOOK_MS = 365 * 86_400_000  # A carrier that has nothing to do is looked at so often: it is due within the horizon.
ROW_BYTES = 256  # A new row takes this much besides its body.
RECURRING = RECURRING_SUBJECT.encode()
RAN = "ran"
ENDS = (RAN, *map(str, SkipReason))  # What becomes of an occurrence.


class DecidedNow(NamedTuple):
    """What is decided about one schedule: the record afterwards, and the instants of what is sent and skipped."""

    record: RecurringRecord
    sent: Sequence[int] = ()
    skips: Sequence[SkippedRun] = ()


class Change(Protocol):
    """What is to become of a record; it runs on the worker thread."""

    @property
    def now_ms(self) -> int:
        """The judged instant at which it is decided."""

    def __call__(self, name: bytes, record: RecurringRecord) -> DecidedNow | None:
        """The decision; None: nothing changes. Raises what the caller is told, and then nothing is done."""


@dataclass(frozen=True, slots=True)
class Recurs:
    """Decides what has come due; a `Change`.

    Fields:
        now_ms: the judged instant.
        until_ms: what recurs up to this instant is decided.
        lost_until_ms: what recurs up to this instant may have been sent by a life that this directory does not know.
        overlaps: which schedules have a message that is unacknowledged, as far as it is known.
        untold: subjects of which nobody could tell that for so long that what is due is skipped.
        served: the slots of keys that this server serves; None: the caller has looked.
        unserved: slots of schedules that were left alone because this server does not serve them.
        unanswered: schedules that were left alone because nothing is known of their messages.
    """

    now_ms: int
    until_ms: int
    lost_until_ms: int = 0
    overlaps: Answers = field(default_factory=dict)
    untold: Set[str] = frozenset()
    served: SlotSet | None = None
    unserved: set[int] = field(default_factory=set)
    unanswered: set[AskedSchedule] = field(default_factory=set)

    def __call__(self, name: bytes, record: RecurringRecord) -> DecidedNow | None:
        """See `Change`."""
        if self.served is not None and not self.served[slot := _slot_of(name)]:
            # Another server decides about it, now or soon (rule I4).
            self.unserved.add(slot)
            return None
        return self.decided(name, record)

    def decided(self, name: bytes, record: RecurringRecord) -> DecidedNow | None:
        """What has come due of a schedule; None: one of its messages may be unacknowledged, and it is `unanswered`."""
        spec, skips = record.spec, list[SkippedRun]()
        skipped = Counter(record.skipped)
        if self.lost_until_ms > record.decided_ms and (lost := _lost(spec.recurrence, record.decided_ms, self)):
            skips.append(lost)
            record = replace(record, decided_ms=self.lost_until_ms)
        # What somebody does up to the instant of an occurrence counts, so it is not decided ahead.
        until_ms = self.until_ms if spec.policy.overlap == "all" else self.now_ms
        decide_now = partial(
            decide, spec.recurrence, spec.policy, record.decided_ms, until_ms, ran=record.sent, paused=record.paused
        )
        decided = decide_now()
        if decided.run and spec.policy.overlap == "skip":
            schedule = AskedSchedule(spec.subject, name.decode())
            if schedule not in self.overlaps and spec.subject not in self.untold:
                self.unanswered.add(schedule)
                return None
            decided = decide_now(busy=self.overlaps.get(schedule, True))
        # The rest is decided at once afterwards, from the last one that is sent now on.
        sent = decided.run[: max(1, COPY_BYTES // (ROW_BYTES + len(spec.body)))]
        decided_ms = decided.decided_ms if len(sent) == len(decided.run) else sent[-1]
        skips += decided.skipped
        for skip in skips:
            skipped[str(skip.reason)] += skip.count
        record = replace(
            record,
            decided_ms=decided_ms,
            sent=record.sent + len(sent),
            last_ms=sent[-1] if sent else record.last_ms,
            skipped=dict(skipped),
        )
        return DecidedNow(record, sent, skips)


def _slot_of(name: bytes) -> int:
    return int(slots_of_names(Names.of_lists([RECURRING], [name]))[0])


def _lost(recurrence: Recurrence, decided_ms: int, recurs: Recurs) -> SkippedRun | None:
    """The occurrences of which nobody knows whether they were sent."""
    instants = recurrence.newest(1, decided_ms, recurs.lost_until_ms)
    if not instants:
        return None
    first_ms = next(recurrence.between(decided_ms, recurs.lost_until_ms))
    return SkippedRun(SkipReason.RESTORED, first_ms, instants[-1], recurrence.count(decided_ms, recurs.lost_until_ms))


class Asks:
    """Decides what a caller asks of one schedule, after what has come due; a `Change`.

    Fields:
        told: the record that the last call has led to, for the caller.
        is_done: whether the last call found nothing to do.
    """

    def __init__(self, request: RecurringRequest, recurs: Recurs) -> None:
        self._request = request
        self._recurs = recurs
        self.told: RecurringRecord | None = None
        self.is_done = False

    @property
    def now_ms(self) -> int:
        """See `Change`."""
        return self._recurs.now_ms

    def __call__(self, name: bytes, record: RecurringRecord) -> DecidedNow | None:
        """See `Change`.

        Raises:
            RecurringConflict: the schedule has another version than the caller has seen.
            SlowDown: more was missed than fits into one decision, and the change would take the place of the rest. Or
                it is not known yet whether a message is unacknowledged.
        """
        self.told = record
        request, now_ms = self._request, self._recurs.now_ms
        self.is_done = is_done(request, record)
        if self.is_done:
            return None
        check_version(request, record)
        decided = self._recurs.decided(name, record)
        if decided is None:
            raise SlowDown(f"whether a message of {name.decode()!r} is unacknowledged is being asked; ask again")
        record = decided.record
        if record.decided_ms < now_ms:
            raise SlowDown(f"occurrences that {name.decode()!r} missed are being sent at this moment; ask again")
        sent = list(decided.sent)
        match request.wish:
            case RecurringWish.PUT:
                assert request.spec is not None, "it was read with one"
                record = record.changed(now_ms, spec=request.spec, decided_ms=max(record.decided_ms, now_ms))
            case RecurringWish.PAUSE:
                record = record.changed(now_ms, paused=True, note=request.note)
            case RecurringWish.RESUME:
                record = record.changed(now_ms, paused=False, note="")
            case RecurringWish.RUN:
                sent.append(now_ms)
                record = replace(record, runs=(*record.runs, request.number)[-RUNS_KEPT:])
        self.told = record
        return DecidedNow(record, sent, decided.skips)


def is_done(request: RecurringRequest, record: RecurringRecord) -> bool:
    """Whether a schedule is as a caller wants it already, perhaps because of an earlier try."""
    match request.wish:
        case RecurringWish.PUT:
            return record.spec == request.spec
        case RecurringWish.PAUSE:
            return record.paused and record.note == request.note
        case RecurringWish.RESUME:
            return not record.paused
        case RecurringWish.RUN:
            return request.number in record.runs


def check_version(request: RecurringRequest, record: RecurringRecord | None) -> None:
    """Raise RecurringConflict unless a schedule has the version that a caller wants to change; None: there is none."""
    name, wanted = request.name.decode(), request.if_version
    if record is None:
        if wanted:
            raise RecurringConflict(f"there is no schedule {name!r}, so it has no version {wanted}", version=0)
    elif wanted is None and request.wish is RecurringWish.PUT:
        raise RecurringConflict(
            f"there is a schedule {name!r} with another specification, in version {record.version}; give that version"
            " to change it, or choose another name",
            version=record.version,
        )
    elif wanted == 0:
        raise RecurringConflict(
            f"there is a schedule {name!r} already, in version {record.version}, with another specification; change"
            " that one, or choose another name",
            version=record.version,
        )
    elif wanted is not None and wanted != record.version:
        raise RecurringConflict(
            f"the schedule {name!r} is in version {record.version}, not {wanted}; look at it, and give that version",
            version=record.version,
        )


def first_record(request: RecurringRequest, now_ms: int) -> RecurringRecord:
    """The record of a schedule that is made now."""
    assert request.spec is not None, "it was read with one"
    return RecurringRecord(request.spec, 1, now_ms, now_ms, now_ms)


def carrier_due_ms(record: RecurringRecord, now_ms: int) -> int:
    """When a carrier is to be looked at next."""
    look_ms = now_ms + LOOK_MS
    if record.paused or not record.spec.recurrence.left(1, record.sent):
        return look_ms
    next_ms = record.spec.recurrence.next_after(record.decided_ms)
    lead_ms = LEAD_MS if record.spec.policy.overlap == "all" else 0
    return look_ms if next_ms is None else min(look_ms, next_ms - lead_ms)


class Row(NamedTuple):
    """A new row, as plain values."""

    subject: bytes
    deliver_at_ms: int
    body: bytes
    key: bytes = b""
    tags: bytes = b""
    headers: bytes = b""
    origin: int = 0
    ordering_hash: int = 0
    expires_at_ms: int = 0


def carrier_of(name: bytes, record: RecurringRecord, now_ms: int, origin: int = 0) -> Row:
    """The row that stands for a schedule; ``origin``: the sequence of its first one."""
    return Row(RECURRING, carrier_due_ms(record, now_ms), record.encode(), key=name, origin=origin)


def batch_of_rows(rows: Sequence[Row], part: ProducerPart = MOVED_PART) -> Batch:
    """Rows as a PRODUCER batch of this server's own."""
    columns: dict[ColumnId, ColumnArray] = {ColumnId.DELIVER_AT_MS: np.array([row.deliver_at_ms for row in rows])}
    numbers: dict[bytes, int] = {}
    subject_of = [numbers.setdefault(row.subject, len(numbers)) for row in rows]
    if len(numbers) > 1:
        columns[ColumnId.SUBJECT] = np.array(subject_of, np.uint32)
    if any(row.tags for row in rows):
        columns[ColumnId.TAG_BLOOM] = np.array([bloom_of_item(row.tags) if row.tags else 0 for row in rows], np.uint64)
    for column, values in (
        (ColumnId.ORIGIN_SEQUENCE, [row.origin for row in rows]),
        (ColumnId.ORDERING_KEY_HASH, [row.ordering_hash for row in rows]),
        (ColumnId.EXPIRES_AT_MS, [row.expires_at_ms for row in rows]),
    ):
        if any(values):
            columns[column] = np.array(values, np.uint64)
    items = (
        (ColumnId.KEY_END, [row.key for row in rows]),
        (ColumnId.TAGS_END, [row.tags for row in rows]),
        (ColumnId.HEADERS_END, [row.headers for row in rows]),
        (ColumnId.BODY_END, [row.body for row in rows]),
    )
    regions = {column: _items(texts) for column, texts in items if column == ColumnId.BODY_END or any(texts)}
    due_ms = columns[ColumnId.DELIVER_AT_MS].astype(np.int64)
    gathered = Gathered(due_ms, regions)
    batch = parse(compose_new(BatchKind.PRODUCER, part, gathered, list(numbers), columns))
    batch.verified = True
    return batch


def _items(items: Sequence[bytes]) -> GatheredItems:
    lengths = np.array([len(item) for item in items], np.int64)
    return GatheredItems(lengths, [item + PADS[-len(item) & 7] for item in items])


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Lets a change take the place of carriers; see `delayd.delay.ending.copies.Rewrites`."""

    change: Callable[[], Change]  # Called on the loop: the change as of now.
    count: Callable[[Mapping[str, int]], None]  # Called with the occurrences of each durable decision, by their ends.

    def work(self, reader: Sources, worker: Executor, moves: ToMove) -> Callable[[], Copied]:
        """See `Rewrites`."""
        return partial(rewrite, reader, worker, moves, self.change())

    def is_durable(self, copied: Copied) -> None:
        """See `Rewrites`."""
        self.count(copied.occurrences)


class _Found(NamedTuple):
    """A carrier, as it was read."""

    place: int  # In the rows that are to be moved.
    name: bytes
    record: RecurringRecord
    origin: int  # The sequence of its first row; 0: it is that one.


class _NewRows:
    """The rows that take the place of carriers, up to a limit."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.occurrences = Counter[str]()
        self._carriers: list[Row] = []
        self._others: list[Row] = []
        self._skipped: list[int] = []  # Places among the others.
        self._room = COPY_BYTES

    def take(self, found: _Found, carrier: Row, decided: DecidedNow) -> bool:
        """Take what was decided about one schedule; False when it does not fit."""
        spec = found.record.spec
        sent = [occurrence_of(found.name, spec, instant_ms) for instant_ms in decided.sent]
        skips = [skip_of(found.name, spec, skip) for skip in decided.skips]
        self._room -= sum(ROW_BYTES + len(row.body) + len(row.headers) for row in (carrier, *sent, *skips))
        rows = len(self.places) + len(self._others) + 1 + len(sent) + len(skips)
        if self.places and (self._room < 0 or rows > COPY_ROWS):
            return False
        self.places.append(found.place)
        self._carriers.append(carrier)
        first = len(self._others) + len(sent)
        self._skipped += range(first, first + len(skips))
        self._others += sent + skips
        # What a caller ran at once is no occurrence, and not in the record.
        self.occurrences[RAN] += decided.record.sent - found.record.sent
        for skip in decided.skips:
            self.occurrences[str(skip.reason)] += skip.count
        return True

    def batch(self) -> tuple[Batch, Indices]:
        """All of them, carriers first, and which rows end with the decision."""
        ended = np.array(self._skipped, np.intp) + len(self._carriers)
        return batch_of_rows([*self._carriers, *self._others]), ended


def rewrite(reader: Sources, worker: Executor, moves: ToMove, change: Change) -> Copied:
    """Let a change take the place of carriers, as many as fit; the others are left for the next time. Closes
    ``reader``.
    """
    found: list[_Found] = []
    stay: list[int] = []
    read_bytes = 0
    try:
        for of_batch in by_batch(moves.hours, moves.locations, COPY_ROWS):
            batch = batch_of(reader, moves.hours, moves.locations, of_batch, moves=True)
            for place, row in zip(of_batch.tolist(), numbers_of(moves.locations.take(of_batch)).tolist(), strict=True):
                carrier = None if batch is None else _carrier(batch, row)
                if carrier is None:
                    stay.append(place)
                else:
                    found.append(_Found(place, *carrier))
            read_bytes += 0 if batch is None else batch.total_bytes
            if read_bytes > READ_BYTES:
                break
            worker.give_way()
    finally:
        reader.close()
    new = _NewRows()
    for each in sorted(found, key=lambda each: each.place):
        decided = change(each.name, each.record)
        if decided is None:
            stay.append(each.place)
            continue
        origin = each.origin or int(moves.sequences[each.place])
        if not new.take(each, carrier_of(each.name, decided.record, change.now_ms, origin), decided):
            break
        worker.give_way()
    left = moves.rows.take(np.array(stay, np.intp))
    if not new.places:
        return Copied(NO_INDICES, None, left)
    made, ended = new.batch()
    return Copied(moves.rows.take(new.places), made, left, ended, new.occurrences)


def _carrier(batch: Batch, row: int) -> tuple[bytes, RecurringRecord, int] | None:
    """The name, the record and the first sequence of a carrier; None when this version can't read it."""
    name, body = (_item(batch, column, row) for column in (ColumnId.KEY_END, ColumnId.BODY_END))
    try:
        record = RecurringRecord.decode(body)
    except DelaydError as error:
        log.error("schedule_not_read name=%r reason=%r", name.decode("utf-8", "replace"), error.message)
        return None
    origins = batch.uint64s(ColumnId.ORIGIN_SEQUENCE) if ColumnId.ORIGIN_SEQUENCE in batch.offsets else None
    return name, record, 0 if origins is None else int(origins[row])


def _item(batch: Batch, column: ColumnId, row: int) -> bytes:
    if column not in batch.offsets:
        return b""
    length, padded_item = item_of(batch, column, row)
    return bytes(padded_item[:length])


def occurrence_of(name: bytes, spec: RecurringSpec, instant_ms: int) -> Row:
    """The message of one occurrence."""
    due_ms = spec.recurrence.due_ms(name.decode(), instant_ms)
    told: Headers = {**spec.headers, SCHEDULE: name.decode(), OCCURRENCE_MS: str(instant_ms)}
    return Row(
        spec.subject.encode(),
        due_ms,
        spec.body,
        tags=encode_tags(spec.tags),
        headers=cast(bytes, msgpack.packb(told)),
        ordering_hash=spec.ordering_hash,
        expires_at_ms=due_ms + spec.ttl_ms if spec.ttl_ms else 0,
    )


def skip_of(name: bytes, spec: RecurringSpec, skip: SkippedRun) -> Row:
    """The row that says that occurrences were skipped: it ends with the decision."""
    told: Headers = {
        SCHEDULE: name.decode(),
        OCCURRENCE_MS: str(skip.first_ms),
        SKIPPED: skip.reason,
        SKIPPED_UNTIL_MS: str(skip.last_ms),
        SKIPPED_COUNT: str(skip.count),
    }
    return Row(spec.subject.encode(), skip.first_ms, b"", headers=cast(bytes, msgpack.packb(told)))
