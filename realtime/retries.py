"""Retries: messages that a group is done with for now, and that come to it again through their delay server (rule Q2,
docs/formats/pull.md, Retries).

    a consumer asks ──▶ decided (pull log, fsynced) ──▶ answered
                                  └──▶ sent to the delay server as batch n, until it takes it ──▶ accepted (pull log)

Invariant: a batch is sent only when its decision is durable, and until it is accepted always under the same number to
the same delay server, which takes a number once (rule I1). Its messages count as unacknowledged until then (rule Q3).
The batch is made from the stored messages, so that each try has the same bytes.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import msgpack
import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import DTYPES, SPARSE, BatchKind, Buffer, ColumnArray, ColumnId, ProducerPart
from delayd.batch.gather import Gathered, GatheredItems, compose_new, item_of, row_bytes
from delayd.batch.labels import (
    ATTEMPT,
    DEAD_AT_MS,
    DEAD_KEPT_MS,
    DEAD_TAG,
    ERROR,
    ERROR_BYTES_MAX,
    FIRST_DUE_MS,
    HISTORY,
    HISTORY_MAX,
    KEY,
    LIFE_PREFIX,
    OCCURRENCE_MS,
    ORIGIN,
    REASON,
    REASON_BYTES_MAX,
    SCHEDULE,
    Headers,
    bloom_of_item,
    cut_text,
    decode_headers,
    decode_tags,
    encode_tags,
    number_in,
)
from delayd.batch.names import (
    HEADERS_BYTES_MAX,
    LIFE_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    ORDERED_WAIT_MS_MAX,
    TAGS_MAX,
    retry_subject,
)
from delayd.errors import BadArgument, BadHeaders, DelaydError, SlowDown
from delayd.log.control import RetryAccepted, RetryDecided
from delayd.log.pull import GroupDecision, RetryRow, encode_rows
from delayd.machine.clock import Clock
from delayd.machine.operating import LogLimit, Wait, WaitKind, counted
from delayd.wire.consuming import StaleRow
from delayd.wire.frame import Head
from delayd.wire.meta import Cordons

from .commit import PullCommit
from .group_records import GroupRecords
from .group_window import HELD, StateRun
from .groups import Group
from .polls import RETRY_MS
from .pulls import HANDLES_MAX, Pulls, PutOff
from .subject_index import Index, StoredBatches
from .words import ConsumerWord, by_source, found

BATCH_ROWS = 4_096  # Messages of one decision: making its batch takes some 30 ms.
BATCH_BYTES = 4 << 20  # And their bytes with what is said of them; one message may come on top.
UNDONE_MAX = 4_096  # Decisions that delay servers have not taken yet: with BATCH_ROWS small ones 64 MiB of rows.

limited = LogLimit(logging.getLogger(__name__))


class AskedPulls(NamedTuple):
    """What a consumer asks for pulled messages: pull sequences [first, end) of one incarnation."""

    incarnation: int
    first: int
    end: int
    delay_ms: int
    reason: str = ""  # Why they are dead letters; empty: they come again after ``delay_ms``.
    error: str = ""


class Undone(NamedTuple):
    """A batch that its delay server has not taken yet."""

    producer: int
    number: int
    origin_log_id: int


class _RetryPiece(NamedTuple):
    """Messages of one stored batch, before they are part of a decision."""

    group: Group
    origin: int
    row: RetryRow
    size: int


class Retries:
    """Takes decisions, and keeps them until their delay servers have taken the batches; belongs to the loop.

    ``on_new`` is called with the log_id of a delay server for which there is something new.
    """

    def __init__(
        self, log_id: int, groups: GroupRecords, pulls: Pulls, stored: StoredBatches, pull_log: PullCommit
    ) -> None:
        self.on_new: Callable[[int], None] = lambda origin: None
        self.counters = dict.fromkeys(("retried", "died", "retries_accepted"), 0)
        # Delay servers that an operator has cordoned or retired, and those that take messages, as meta tells.
        self.cordons = Cordons(frozenset(), frozenset())
        self._log_id = log_id
        # Two lives must not use one number twice, even when the directory was restored from a copy.
        self._producer = secrets.randbits(64) | 1
        self._groups = groups
        self._pulls = pulls
        self._stored = stored
        self._log = pull_log
        self._index: Index = pulls.index
        self._clock: Clock = pulls.clock
        self._next = 1
        # By origin, then by producer and number; in the order in which they were decided.
        self._undone: dict[int, dict[tuple[int, int], tuple[Group, GroupDecision]]] = {}
        self._durable: set[tuple[int, int]] = set()
        self._accepted: set[tuple[int, int]] = set()  # Accepted, and that is not durable yet.
        self._refusals: dict[tuple[int, int], str] = {}
        self._count = 0
        groups.on_deleted.append(self._forget)

    def begin(self) -> None:
        """Go on with the decisions that a start has found."""
        for group in self._pulls.groups.values():
            for decision in group.window.leaving.values():
                self._keep(group, decision)
                self._durable.add(decision.key)
        for origin in self._undone:
            self.on_new(origin)

    def hear(self, cordons: Cordons) -> None:
        """Hear from meta which delay servers take messages. What was decided before stays with its server."""
        self.cordons = cordons

    def decide(self, group: Group, wanted: Sequence[AskedPulls], answer: Callable[[list[StaleRow]], None]) -> None:
        """Let messages come again later, or keep them as dead letters; ``answer`` gets the handles that are stale, when
        the decision is durable.

        Raises:
            DamagedData: a message can't be read now; nothing is decided about any.
            SlowDown: too many decisions wait for delay servers.
        """
        if group.order is not None and not any(each.reason for each in wanted):
            self._put_off(group, wanted, answer)
            return
        if self._count >= UNDONE_MAX:
            what = f"{self._count} batches of messages that come again wait for their delay servers"
            raise SlowDown(what, retry_after_ms=RETRY_MS)
        now_ms = self._clock.now_ms()
        stale, pieces = self._look(group, wanted, now_ms)
        for piece in pieces:
            self._child_of(piece.group.front)
        decided = [self._decide(batch, now_ms) for batch in _batches(pieces)]
        self._log.when_durable(partial(self._decided, decided, partial(answer, stale)))
        self._pulls.serve(group)

    def undone(self) -> dict[str, int]:
        """Figures for STATUS: how many batches wait for each delay server."""
        return {f"retries_for_{origin:016x}": len(of_origin) for origin, of_origin in self._undone.items()}

    def origins(self) -> list[int]:
        """The delay servers for which there are batches."""
        return list(self._undone)

    def waiting(self, origin: int) -> Iterator[Undone]:
        """The batches to send to a delay server, in order."""
        for producer, number in list(self._undone.get(origin, ())):
            if (producer, number) in self._durable and (producer, number) not in self._accepted:
                yield Undone(producer, number, origin)

    def batch_of(self, undone: Undone) -> bytes:
        """Make the batch of a decision.

        Raises:
            DelaydError: its messages can't be read now; try again later.
        """
        of_origin = self._undone[undone.origin_log_id]
        group, decision = of_origin[undone.producer, undone.number]
        low_water = min([number for producer, number in of_origin if producer == undone.producer])
        sources: list[RetriedRows] = []
        for how in decision.rows:
            run = self._index.locate(group.subject, how.consume_first)
            sources.append(RetriedRows(self._stored.fetch(run.offset), run.row, how))
        part = ProducerPart(undone.producer, undone.number, low_water)
        subject = retry_subject(self._log_id, group.front.group_id)
        return retry_batch(part, subject, sources, decision.at_ms)

    def accepted(self, undone: Undone, result: Head | None = None) -> None:
        """The delay server has taken a batch; from now on it is responsible for the messages."""
        key = (undone.producer, undone.number)
        held = self._undone.get(undone.origin_log_id, {}).get(key)
        if held is None or key in self._accepted:
            return
        group, decision = held
        try:
            self._log.append_record(RetryAccepted(undone.producer, undone.number, group.group_id))
        except DelaydError as error:
            # The disk is full. It is sent again, and accepted again.
            limited.warning("retry_not_noted", "retry_not_noted number=%d reason=%r", undone.number, error.message)
            return
        group.changing().leaving.pop(key, None)
        self._accepted.add(key)
        self._refusals.pop(key, None)
        self.counters["retries_accepted"] += decision.messages
        self._log.when_durable(partial(self._done, undone.origin_log_id, key))

    def refused(self, undone: Undone, error: DelaydError) -> None:
        """The delay server has refused a batch by name; it is sent again later."""
        number, what = undone.number, error.message
        limited.warning("retry_refused", "retry_refused number=%d code=%s reason=%r", number, error.code, what)
        self._refusals[undone.producer, undone.number] = what

    def unread(self, undone: Undone, error: DelaydError) -> None:
        """The messages of a batch can't be read now."""
        limited.warning("retry_unread", "retry_unread number=%d reason=%r", undone.number, error.message)
        self._refusals[undone.producer, undone.number] = error.message

    def waits(self) -> Iterator[Wait]:
        """List the delay servers that refuse messages which are to come again."""
        for origin, of_origin in self._undone.items():
            refused = [self._refusals[key] for key in of_origin if key in self._refusals]
            if refused:
                why = f"delay server {origin:016x} refuses them: {refused[0]}"
                yield WaitKind.RETRIES_REFUSED.wait(why, batches=counted(len(refused), "batch|batches"))

    def _put_off(self, group: Group, wanted: Sequence[AskedPulls], answer: Callable[[list[StaleRow]], None]) -> None:
        """Let messages of an ordered group wait here: each keeps its place before the others of its key (rule Q8)."""
        if any(each.delay_ms > ORDERED_WAIT_MS_MAX for each in wanted):
            what = f"group {group.name} of {group.subject.name} is ordered, so a message waits in its place"
            raise BadArgument(f"{what}, and for {ORDERED_WAIT_MS_MAX // 3_600_000} hours at most; name a shorter delay")
        rows = [PutOff((each.incarnation, each.first, each.end - each.first), each.delay_ms) for each in wanted]
        self._pulls.put_off(group, rows, answer)

    def _look(
        self, group: Group, wanted: Sequence[AskedPulls], now_ms: int
    ) -> tuple[list[StaleRow], list[_RetryPiece]]:
        """Find the messages that these handles hold, and the handles that are stale."""
        stale: list[StaleRow] = []
        pieces: list[_RetryPiece] = []
        for each in wanted:
            handle = [each.incarnation, each.first, each.end - each.first]
            for source, handles in by_source(group, [handle]):
                said = ConsumerWord.REJECT if each.reason else ConsumerWord.RETRY
                known = found(said, source, handles, self._pulls.given_out, self._pulls.next_pull, now_ms)
                stale += known.stale
                for incarnation, first, covered in handles:
                    for run in source.window.handles.within(first, first + covered):
                        if run.state == HELD and run.incarnation == incarnation:
                            pieces += self._pieces(source, run, each, now_ms)
        return stale[:HANDLES_MAX], pieces

    def _pieces(self, group: Group, run: StateRun, each: AskedPulls, now_ms: int) -> Iterator[_RetryPiece]:
        """Cut a run where one stored batch ends, or one decision would get too large."""
        kept_ms = DEAD_KEPT_MS if each.reason else each.delay_ms
        reason, error = cut_text(each.reason, REASON_BYTES_MAX), cut_text(each.error, ERROR_BYTES_MAX)
        # The next life of each message has both, and one of them once more in its history.
        in_history = cut_text(error or reason, REASON_BYTES_MAX)
        said_bytes = sum(len(text.encode()) for text in (reason, error, in_history))
        at = 0
        while at < run.messages:
            located = self._index.locate(group.subject, run.consume_first + at)
            batch = self._stored.fetch(located.offset)
            rows = min(located.rows, run.messages - at, BATCH_ROWS)
            sizes = (row_bytes(batch, located.row, rows) + said_bytes).cumsum()
            rows = max(1, int(sizes.searchsorted(BATCH_BYTES, "right")))
            row = RetryRow(
                run.incarnation,
                run.first + at,
                run.consume_first + at,
                rows,
                run.attempt,
                now_ms + kept_ms,
                reason,
                error,
            )
            yield _RetryPiece(group, self._taker(batch.dispatch.origin_log_id), row, int(sizes[rows - 1]))
            at += rows

    def _taker(self, origin: int) -> int:
        """The delay server that takes a message again: the one that it came from, unless that one takes no more."""
        if origin not in self.cordons.closed or not self.cordons.takes:
            return origin
        return min(self.cordons.takes, key=lambda log_id: (len(self._undone.get(log_id, ())), log_id))

    def _child_of(self, group: Group) -> None:
        """Make sure that messages which come again find the group."""
        if group.child is None:
            self._groups.create(retry_subject(self._log_id, group.group_id), group.name)

    def _decide(self, pieces: Sequence[_RetryPiece], now_ms: int) -> GroupDecision:
        group, origin = pieces[0].group, pieces[0].origin
        rows = tuple([piece.row for piece in pieces])
        decision = GroupDecision(self._producer, self._next, group.group_id, origin, now_ms, rows)
        self._log.append_record(RetryDecided(*decision[:-1], encode_rows(rows)))
        self._next += 1
        self._pulls.leave(group, decision)
        self._keep(group, decision)
        self.counters["died" if rows[0].reason else "retried"] += decision.messages
        return decision

    def _keep(self, group: Group, decision: GroupDecision) -> None:
        self._undone.setdefault(decision.origin, {})[decision.key] = (group, decision)
        self._count += 1

    def _decided(self, decided: Sequence[GroupDecision], answer: Callable[[], None]) -> None:
        self._durable.update(decision.key for decision in decided)
        answer()
        for origin in {decision.origin for decision in decided}:
            self.on_new(origin)

    def _done(self, origin: int, key: tuple[int, int]) -> None:
        self._accepted.discard(key)
        self._drop(origin, key)

    def _drop(self, origin: int, key: tuple[int, int]) -> None:
        of_origin = self._undone.get(origin)
        if of_origin is None or of_origin.pop(key, None) is None:
            return
        self._durable.discard(key)
        self._refusals.pop(key, None)
        self._count -= 1
        if not of_origin:
            del self._undone[origin]

    def _forget(self, group: Group) -> None:
        """A group was deleted: what it held goes to nobody."""
        for key, decision in list(group.window.leaving.items()):
            self._drop(decision.origin, key)


def _batches(pieces: Sequence[_RetryPiece]) -> Iterator[list[_RetryPiece]]:
    """Divide pieces into those of one decision each: of one group and one delay server, and not too large."""
    open_ones: dict[tuple[int, int], tuple[list[_RetryPiece], int, int]] = {}
    for piece in pieces:
        key = (piece.group.group_id, piece.origin)
        batch, rows, size = open_ones.get(key, ([], 0, 0))
        if batch and (rows + piece.row.covered > BATCH_ROWS or size + piece.size > BATCH_BYTES):
            yield batch
            batch, rows, size = [], 0, 0
        batch.append(piece)
        open_ones[key] = (batch, rows + piece.row.covered, size + piece.size)
    for batch, _, _ in open_ones.values():
        yield batch


class RetriedRows(NamedTuple):
    """Neighbouring rows of a stored batch, and how they live on."""

    batch: Batch
    row: int
    how: RetryRow


def retry_batch(part: ProducerPart, subject: str, sources: Sequence[RetriedRows], at_ms: int) -> bytes:
    """The PRODUCER batch of these rows; ``at_ms`` is when they were decided about."""
    rows = list(_rows(sources))
    bodies = [item_of(batch, ColumnId.BODY_END, row) for batch, row, _ in rows]
    lives = [
        _headers(batch, row, how, at_ms, length) for (batch, row, how), (length, _) in zip(rows, bodies, strict=True)
    ]
    regions = {ColumnId.HEADERS_END: _items([headers for headers, _ in lives])}
    others: dict[ColumnId, ColumnArray] = {
        ColumnId.DELIVER_AT_MS: np.array([how.due_ms for _, _, how in rows], np.int64),
        ColumnId.ORIGIN_SEQUENCE: np.array([origin for _, origin in lives], np.uint64),
    }
    tags = [_tags(batch, row, dead=bool(how.reason)) for batch, row, how in rows]
    if any(tags):
        regions = {ColumnId.TAGS_END: _items(tags), **regions}
        others[ColumnId.TAG_BLOOM] = np.array([bloom_of_item(item) for item in tags], np.uint64)
    for column in SPARSE:
        values = [_value(batch, column, row) for batch, row, _ in rows]
        if column == ColumnId.EXPIRES_AT_MS:
            # A dead letter waits for an operator, however long that takes.
            values = [0 if how.reason else value for value, (_, _, how) in zip(values, rows, strict=True)]
        if any(values):
            others[column] = np.array(values, DTYPES[column])
    lengths = np.array([length for length, _ in bodies], np.int64)
    regions[ColumnId.BODY_END] = GatheredItems(lengths, [item for _, item in bodies])
    gathered = Gathered(others[ColumnId.DELIVER_AT_MS].astype(np.int64, copy=False), regions)
    return compose_new(BatchKind.PRODUCER, part, gathered, [subject.encode()], others)


def _rows(sources: Sequence[RetriedRows]) -> Iterator[tuple[Batch, int, RetryRow]]:
    for batch, first, how in sources:
        for row in range(first, first + how.covered):
            yield batch, row, how


def _items(items: Sequence[bytes]) -> GatheredItems:
    pieces: list[Buffer] = [item + bytes(-len(item) & 7) for item in items]
    return GatheredItems(np.array([len(item) for item in items], np.int64), pieces)


def _value(batch: Batch, column: ColumnId, row: int) -> int:
    """What a message has in a sparse column; 0 where it states nothing."""
    return int(batch.column(column)[row]) if column in batch.offsets else 0


def _headers(batch: Batch, row: int, how: RetryRow, at_ms: int, body_bytes: int) -> tuple[bytes, int]:
    """The headers of a message in its next life, packed, and the sequence of its first one."""
    before = headers_of(batch, row)
    sequence, due_ms = int(batch.uint64s(ColumnId.SEQUENCE)[row]), int(batch.int64s(ColumnId.DELIVER_AT_MS)[row])
    # A dead letter that was sent back to its group begins anew.
    attempts = how.attempt + (0 if REASON in before else number_in(before, ATTEMPT))
    origin = number_in(before, ORIGIN) or sequence
    kept: Headers = {name: value for name, value in before.items() if not name.startswith(LIFE_PREFIX)}
    kept |= {name: before[name] for name in (SCHEDULE, OCCURRENCE_MS) if name in before}
    kept |= {ATTEMPT: str(attempts), ORIGIN: str(origin), FIRST_DUE_MS: str(number_in(before, FIRST_DUE_MS) or due_ms)}
    if key := _key(batch, row) or before.get(KEY):
        kept[KEY] = key
    if how.reason:
        kept |= {REASON: how.reason, DEAD_AT_MS: str(at_ms)}
    error = how.error or before.get(ERROR, "")
    told: Headers = {ERROR: error} if error else {}
    last = [attempts, at_ms, cut_text(how.error or how.reason, REASON_BYTES_MAX)]
    history = [*_history(before), last][-HISTORY_MAX:]
    room = min(HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX - body_bytes) + LIFE_BYTES_MAX
    for more in ({**told, HISTORY: json.dumps(history, ensure_ascii=False, separators=(",", ":"))}, told):
        packed = cast(bytes, msgpack.packb({**kept, **more}))
        if len(packed) <= room:
            return packed, origin
    left = room - len(cast(bytes, msgpack.packb({**kept, ERROR: ""}))) - 2
    if isinstance(error, str) and left > 0:
        kept[ERROR] = cut_text(error, left)
    return cast(bytes, msgpack.packb(kept)), origin


def headers_of(batch: Batch, row: int) -> Headers:
    """The headers of a stored row; none where nobody can decode them."""
    if ColumnId.HEADERS_END not in batch:
        return {}
    length, item = item_of(batch, ColumnId.HEADERS_END, row)
    try:
        return decode_headers(bytes(item[:length]))
    except BadHeaders:
        return {}


def _history(headers: Headers) -> list[object]:
    value = headers.get(HISTORY)
    if not isinstance(value, str):
        return []
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _key(batch: Batch, row: int) -> str:
    """The key with which a message was sent; empty without one, and for a message that came again."""
    length, item = item_of(batch, ColumnId.KEY_END, row) if ColumnId.KEY_END in batch else (0, b"")
    return bytes(item[:length]).decode()


def _tags(batch: Batch, row: int, *, dead: bool) -> bytes:
    """A message's tags, with that of dead letters first where it is one."""
    length, item = item_of(batch, ColumnId.TAGS_END, row) if ColumnId.TAGS_END in batch else (0, b"")
    own = [tag for tag in decode_tags(bytes(item[:length])) if tag != DEAD_TAG]
    return encode_tags([DEAD_TAG, *own][:TAGS_MAX] if dead else own)
