"""Sender: it turns due rows of one target into frames and follows them until their outcome is durable (rules H1, H2,
S3).

Rows are here exactly once: waiting, refused and put off, or in an undecided batch.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import encode_bare
from delayd.batch.columns import ROWS_MAX, ColumnId, DispatchPart
from delayd.batch.gather import Gathered, content_hashes_of, reorder
from delayd.batch.sequences import NO_SEQUENCES
from delayd.config import DelayConfig
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.filing.schedule_log import Sources
from delayd.delay.handoff.frames import (
    Single,
    collect,
    collect_singles,
    encode_dispatch,
    split_by_source,
    split_by_subject_and_hour,
)
from delayd.delay.handoff.lateness import Lateness
from delayd.delay.handoff.target_words import TargetEnds
from delayd.delay.handoff.window import MayHaveLeft, SentBatch, WaitingRows, Window, lowest_offset, split_off
from delayd.delay.handoff.wire import Wire
from delayd.delay.rows import NO_ROWS, Rows, due_at_ms, join_rows, latest_due_ms, without
from delayd.delay.timers.loading import Hours
from delayd.errors import BadRequest, CallerError, DamagedData, DelaydError, DispatchRefused, RetryLater, Shortage
from delayd.log.hour import NewPart
from delayd.machine.alarms import FULL_AGAIN_MS, Alarm, Alarms
from delayd.machine.operating import Fence, LogLimit
from delayd.outcome import Outcome
from delayd.wire.frame import Frame
from delayd.wire.heads import (
    LANDED_MOST,
    need_instant,
    need_rows,
)
from delayd.wire.requests import RequestType

log = logging.getLogger(__name__)
limited = LogLimit(log)

REFUSED_AGAIN_MS = 1_000  # After the target refused rows, or put them off without saying for how long.
EXPIRED_PAUSE_MS = 1
# A frame with many subjects has many batches, and each batch has a cost; this bounds the work between two looks at the
# clock.
BATCHES_A_FRAME = 256
SMALL_FRAMES = 4  # Waiting rows that fill less than a quarter of a frame wait for the answer to the frame before.


@dataclass(frozen=True, slots=True)
class ServerLife:
    """The names of this life of the delay server, which go into every hello and batch."""

    log_id: int
    epoch: int
    instance: int


@dataclass(frozen=True, slots=True)
class SenderTerms:
    """What the senders of all targets share."""

    life: ServerLife
    alarms: Alarms
    config: DelayConfig
    sources: Sources
    hours: Hours
    outcomes: OutcomeLog
    ends: TargetEnds
    fence: Fence
    hold: Callable[[Rows, DamagedData], None]  # Called with rows of one batch that can't be read.
    earlier: MayHaveLeft  # What an earlier life may have sent (rule H5).


@dataclass(slots=True, eq=False)  # Each is itself only: its arrays are not compared when one is removed.
class Refused:
    """Rows of one batch that the target refused for good, and when they are tried again, alone.

    ``tried_ms`` counts time between two refusals in one session only: a target that is away gives up nothing (rule S3).
    """

    rows: Rows
    tried_ms: int
    refused_at_ms: int
    session: int
    retry_at_ms: int


class Sender:
    """The rows on their way to one target; ``again`` calls `pump`."""

    def __init__(self, target: int, terms: SenderTerms, again: Alarm) -> None:
        self.waiting = WaitingRows()
        self.window = Window(terms.life.epoch)
        self.frames_in_flight = 0
        self.lateness = Lateness(terms.alarms.clock)
        self._target = target
        self._origin = terms.life
        self._clock = terms.alarms.clock
        self._again = again
        self._config = terms.config
        self._sources = terms.sources
        self._names = terms.hours.subjects.names
        self._outcomes = terms.outcomes
        self._ends = terms.ends
        self._put_back = terms.hours.put_back
        self._fence = terms.fence
        self._hold = terms.hold
        # Rows with an outcome among those that wait; rows that are offered later were checked before.
        self._left_out = NO_SEQUENCES
        self._refused: list[Refused] = []
        self._paused_until_ms = 0
        self.later = ""  # Why the target puts off the rows that it is sent, as the log said it.

    def pump(self, wire: Wire, session: int, current: Callable[[int], bool]) -> None:
        """Send waiting rows as far as the window has room; the others stay waiting, and the next answer calls this
        again.
        """
        now = self._clock.monotonic_ms()
        if now >= self._paused_until_ms:
            self._paused_until_ms = 0
        if self._refused:
            for refused in [refused for refused in self._refused if refused.retry_at_ms <= now]:
                if self._has_room():
                    self._refused.remove(refused)
                    self._send(wire, session, current, refused.rows, refused)
        while self._has_freight() and now >= self._paused_until_ms and self._has_room():
            rows = self.waiting.take(self._config.frame_rows_max, self._config.frame_bytes_max)
            rows = without(rows, self._left_out)
            if len(rows):
                self._send(wire, session, current, rows, None)
        if len(self._left_out) and not len(self.waiting):
            self._left_out = NO_SEQUENCES
        if self._refused or self._paused_until_ms:
            self._set_alarm()

    def leave_out(self, ended: NDArray[np.uint64]) -> None:
        """Note that these rows, sorted, have an outcome. Those that wait are dropped when their turn comes, a frame at
        a time.
        """
        if len(self.waiting):
            self._left_out = ended

    def _set_alarm(self) -> None:
        """Have `pump` called when something that was put off is to be tried again."""
        # Without room in the window there is nothing to do, and whatever makes room wakes the server by itself.
        times = [refused.retry_at_ms for refused in self._refused] if self._has_room() else []
        if self._paused_until_ms:
            times.append(self._paused_until_ms)
        if times:
            self._again.at(min(times))

    def lowest_message_log_offset(self) -> int | None:
        """Lowest message log offset that one of the rows refers to (rule P6)."""
        others = lowest_offset([*self.window.rows(), *(refused.rows for refused in self._refused)])
        waiting = self.waiting.lowest_message_log_offset()
        return others if waiting is None else waiting if others is None else min(others, waiting)

    def parts(self) -> list[Rows]:
        """View all rows that are here, in several arrays."""
        return [*self.waiting_parts(), *self.window.rows()]

    def acknowledge(self, sent: SentBatch, offset: int, appended_at_ms: int) -> None:
        """Record that the target holds a batch; it is decided when that is durable."""
        sent.acknowledged = True
        self._ends.name(self._target, offset)
        part = NewPart(
            sent.rows["sequence"],
            sent.deliver_at_ms,
            Outcome.DISPATCHED,
            sent.claimed_at_ms,
            self._target,
            self._origin.epoch,
            sent.batch_id,
            appended_at_ms,
            offset,
            hashes=sent.hashes,
        )
        self._outcomes.record(sent.hour, part, partial(self.window.decide, sent.batch_id))

    @property
    def waiting_rows(self) -> int:
        """How many rows are not in an undecided batch: those that wait, and those that the target refused."""
        return len(self.waiting) + sum([len(refused.rows) for refused in self._refused])

    @property
    def earlier_settled(self) -> bool:
        """Whether everything that an earlier life sent to the target is decided."""
        return self.window.earlier_settled

    def waiting_parts(self) -> list[Rows]:
        """View the rows that are not in an undecided batch: those that wait, and those that the target refused."""
        return [*self.waiting.parts(), *(refused.rows for refused in self._refused)]

    def take_out(self, sequences: NDArray[np.uint64], arrays: Collection[int]) -> list[Rows]:
        """Take some of these rows: they have ended; returns them, in several arrays. ``sequences`` rise, and ``arrays``
        are the ids of the arrays in which the rows stand.
        """
        taken = self.waiting.take_out(sequences, arrays)
        for refused in list(self._refused):
            kept, found = split_off([refused.rows], sequences, arrays)
            if found:
                taken += found
                if kept:
                    refused.rows = kept[0]
                else:
                    self._refused.remove(refused)
        return taken

    def give_up(self, doubt_until_ms: int | None) -> int:
        """Record the outcome IN_DOUBT for each row that a lost target may hold; return how many rows (rules S2, H5).

        An operator has called the target lost, so nobody can ask it any more. Rows of a batch that it has not
        acknowledged may have reached it or not. They are never sent again, because that could deliver them twice.

        Other rows still wait here. ``doubt_until_ms`` is None if this life of the server knows what earlier lives have
        sent: then no waiting row has left, and all of them may go to another target (`take_rest`). Else an earlier
        life may have sent any row that was due by this instant, so such waiting rows are in doubt too.
        """
        found = [sent.rows for sent in self.window.unacknowledged()]
        for sent in self.window.unacknowledged():
            self.window.decide(sent.batch_id)
        self.frames_in_flight = 0
        if doubt_until_ms is not None:
            waiting = self.waiting.take_all()
            doubtful = due_at_ms(waiting) <= doubt_until_ms
            found.append(waiting.take(np.flatnonzero(doubtful)))
            self.waiting.add(waiting.take(np.flatnonzero(~doubtful)))
        count = 0
        for rows in found:
            for hour in np.unique(rows["hour"]).tolist():
                of_hour = rows.take(np.flatnonzero(rows["hour"] == hour))
                for begin in range(0, len(of_hour), ROWS_MAX):
                    part = of_hour[begin : begin + ROWS_MAX]
                    told = NewPart(part["sequence"], due_at_ms(part), Outcome.IN_DOUBT, target_log_id=self._target)
                    self._outcomes.record(hour, told, _nothing)
                    count += len(part)
        return count

    def take_rest(self) -> Rows:
        """Take the rows that never left for the target: rows that wait, and rows that it refused by name."""
        rows = join_rows([self.waiting.take_all(), *(refused.rows for refused in self._refused)])
        self._refused.clear()
        return rows

    def take_subject(self, number: int) -> Rows:
        """Take the rows of one subject that never left for the target, or that it refused by name."""
        rows = self.take_rest()
        own = rows["subject"] == number
        self.waiting.add(rows.take(np.flatnonzero(~own)))
        return rows.take(np.flatnonzero(own))

    def holds_subject(self, number: int) -> bool:
        """Whether a batch of a subject is undecided at the target, or may be from an earlier life."""
        if not self.window.earlier_settled:
            return True
        return any(bool((rows["subject"] == number).any()) for rows in self.window.rows())

    def take_back(self) -> list[SentBatch]:
        """Let rows wait again that were sent and, as the target's answer shows, are not there; returns their
        batches.
        """
        batches = self.window.unacknowledged()
        for sent in reversed(batches):
            self.window.decide(sent.batch_id)
            self.waiting.give_back(sent.rows)
        self.frames_in_flight = 0
        return batches

    def _has_freight(self) -> bool:
        """Whether waiting rows should leave now: a few rows leave at once when nothing is under way; otherwise they
        wait for more.

        Each frame has a cost on both sides, so under load the target's answers set the pace, as in Nagle's RFC 896.
        An example, with frames of at most 8,000 rows: one row falls due, and leaves at once. While its answer is under
        way 500 more fall due, and wait; with the answer they leave in one frame. Of a herd of 30,000 the first 8,000
        leave at once, and the others need not wait: as long as 2,000 are left, frames leave while there is room.
        """
        waiting = self.waiting
        if not self.frames_in_flight:
            return len(waiting) > 0
        rows_max, bytes_max = self._config.frame_rows_max, self._config.frame_bytes_max
        return SMALL_FRAMES * len(waiting) >= rows_max or SMALL_FRAMES * waiting.size_bytes >= bytes_max

    def _has_room(self) -> bool:
        return (
            self.frames_in_flight < self._config.frames_in_flight_max
            and self.window.size_bytes < self._config.undecided_bytes_max
            and not self._outcomes.blocked
            and not self._fence.is_up
        )

    def _send(
        self, wire: Wire, session: int, current: Callable[[int], bool], rows: Rows, refused: Refused | None
    ) -> None:
        claimed_at_ms = self._clock.now_ms()
        if latest_due_ms(rows) > claimed_at_ms:
            # The clock was set back since these rows were taken: some of them are not due any more.
            early = due_at_ms(rows) > claimed_at_ms
            self._put_back(rows.take(np.flatnonzero(early)))
            rows = rows.take(np.flatnonzero(~early))
            if not len(rows):
                return
        parts, left = split_by_subject_and_hour(rows, BATCHES_A_FRAME)
        self.waiting.give_back(left)
        batches: list[bytes] = []
        sent: list[SentBatch] = []
        singles = collect_singles(parts, self._sources, self._names)
        for place, part in enumerate(parts):
            single = singles.get(place)
            if single is None:
                sent += self._build(part, claimed_at_ms, batches)
            else:
                sent.append(self._build_single(part, single, claimed_at_ms, batches))
        if sent:
            self.frames_in_flight += 1
            head = {"session": session, "epoch": self._origin.epoch}
            answered = partial(self._answered, wire, session, current, sent, refused)
            wire.call(RequestType.DISPATCH, head, batches, answered)

    def _build(self, rows: Rows, claimed_at_ms: int, batches: list[bytes]) -> list[SentBatch]:
        hour, subject = int(rows["hour"][0]), self._names[int(rows["subject"][0])]
        assert subject, "the name of a row's subject is remembered for as long as the row is"
        try:
            collected = collect(rows, self._sources)
        except DamagedData as error:
            pieces = split_by_source(rows)
            if len(pieces) > 1:
                # Rows of other stored batches are not affected by the damaged one.
                return [sent for piece in pieces for sent in self._build(piece, claimed_at_ms, batches)]
            self._hold(rows, error)
            return []
        except Shortage as error:
            # The file is not damaged; the next try may find memory and descriptors.
            if self.later != str(error):
                self.later = str(error)
                log.warning("reads_put_off reason=%r", self.later)
            self._paused_until_ms = self._clock.monotonic_ms() + FULL_AGAIN_MS
            self.waiting.give_back(rows)
            return []
        if isinstance(collected, Gathered) and ColumnId.EXPIRES_AT_MS in collected.kept and self._clock.confirmed:
            rows, collected = self._end_expired(rows, collected, subject, claimed_at_ms)
            if not len(rows):
                return []
        part = self._next_part(claimed_at_ms, hour)
        made, deliver_at_ms, hashes = encode_dispatch(part, rows, collected, subject)
        batches += made
        size_bytes = sum(map(len, made))
        sent = SentBatch(part.batch_id, hour, rows, deliver_at_ms, claimed_at_ms, size_bytes, hashes)
        self.window.add(sent)
        return [sent]

    def _end_expired(self, rows: Rows, gathered: Gathered, subject: bytes, claimed_at_ms: int) -> tuple[Rows, Gathered]:
        """End the rows that expire by now as EXPIRED; return the others (rule S8).

        It is done here and no earlier, because only here the window proves that the target holds none of these rows
        (rule H4).
        """
        expires = gathered.kept[ColumnId.EXPIRES_AT_MS].astype(np.int64, copy=False)
        is_over = (expires > 0) & (expires <= claimed_at_ms)
        over = np.flatnonzero(is_over)
        if not len(over):
            return rows, gathered
        ended, left = rows.take(over), np.flatnonzero(~is_over)
        part = NewPart(
            sequences=ended["sequence"],
            deliver_at_ms=gathered.deliver_at_ms.take(over),
            outcome=Outcome.EXPIRED,
            claimed_at_ms=claimed_at_ms,
            hashes=content_hashes_of(gathered, subject).take(over),
        )
        self._outcomes.record(int(rows["hour"][0]), part, _nothing)
        # Rows that expired fill no window, so this bounds the work of a turn.
        self._paused_until_ms = max(self._paused_until_ms, self._clock.monotonic_ms() + EXPIRED_PAUSE_MS)
        return (rows.take(left), reorder(gathered, left)) if len(left) else (NO_ROWS, gathered)

    def _build_single(self, rows: Rows, single: Single, claimed_at_ms: int, batches: list[bytes]) -> SentBatch:
        hour, subject, row, body, length, deliver_at_ms, hashes = single
        assert subject, "the name of a row's subject is remembered for as long as the row is"
        part = self._next_part(claimed_at_ms, hour)
        made = encode_bare(part, row, subject, body, length)
        batches.append(made)
        sent = SentBatch(part.batch_id, hour, rows, deliver_at_ms, claimed_at_ms, len(made), hashes)
        self.window.add(sent)
        return sent

    def _next_part(self, claimed_at_ms: int, hour: int) -> DispatchPart:
        life, (w_epoch, w_id) = self._origin, self.window.w
        return DispatchPart(life.log_id, life.epoch, self.window.next_id(), w_epoch, w_id, claimed_at_ms, hour)

    def _answered(
        self,
        wire: Wire,
        session: int,
        current: Callable[[int], bool],
        sent: list[SentBatch],
        refused: Refused | None,
        answer: Frame | DelaydError,
    ) -> None:
        if not current(session):
            # The next session asks for the window, which says what became of this frame (rule H4).
            return
        if isinstance(answer, Frame):
            try:
                appended_at_ms, offsets = _read_answer(answer, sent)
            except BadRequest as error:
                answer = error
            else:
                self.frames_in_flight -= 1
                if self.later:
                    limited.info("target_takes", "target_takes target=%016x", self._target)
                    self.later = ""
                for batch, offset in zip(sent, offsets, strict=True):
                    self.acknowledge(batch, offset, appended_at_ms)
                self.lateness.note([batch.deliver_at_ms for batch in sent], appended_at_ms)
                self.pump(wire, session, current)
                return
        if isinstance(answer, RetryLater):
            self.frames_in_flight -= 1
            if self.later != str(answer):
                self.later = str(answer)
                limited.warning("target_later", "target_later target=%016x reason=%r", self._target, self.later)
            self._paused_until_ms = self._clock.monotonic_ms() + (answer.retry_after_ms or REFUSED_AGAIN_MS)
            for batch in reversed(sent):
                self.waiting.give_back(self.window.decide(batch.batch_id).rows)
            self._set_alarm()
        elif isinstance(answer, CallerError | DispatchRefused) and not isinstance(answer, BadRequest):
            self.frames_in_flight -= 1
            for batch in sent:
                self._put_off(self.window.decide(batch.batch_id), session, refused, answer)
            self.pump(wire, session, current)
        else:
            # Nobody knows whether the frame was appended; the next session's window says so.
            limited.warning("session_ended", "session_ended target=%016x reason=%r", self._target, str(answer))
            wire.close()

    def _put_off(self, sent: SentBatch, session: int, refused: Refused | None, error: DelaydError) -> None:
        now = self._clock.monotonic_ms()
        tried_ms = 0
        if refused is None:
            limited.error(
                "rows_refused", "rows_refused target=%016x rows=%d reason=%r", self._target, len(sent.rows), str(error)
            )
        else:
            tried_ms = refused.tried_ms + (now - refused.refused_at_ms if refused.session == session else 0)
        if tried_ms < self._config.dispatch_give_up_after_ms:
            self._refused.append(Refused(sent.rows, tried_ms, now, session, now + REFUSED_AGAIN_MS))
            return
        log.error("rows_dead target=%016x rows=%d reason=%r", self._target, len(sent.rows), str(error))
        part = NewPart(
            sequences=sent.rows["sequence"],
            deliver_at_ms=sent.deliver_at_ms,
            outcome=Outcome.DEAD,
            claimed_at_ms=sent.claimed_at_ms,
            target_log_id=self._target,
            hashes=sent.hashes,
        )
        self._outcomes.record(sent.hour, part, _nothing)


def _read_answer(answer: Frame, sent: list[SentBatch]) -> tuple[int, list[int]]:
    """Read when the target appended the batches, and their offsets there; BadRequest when it names other batches."""
    rows = need_rows(answer.head, "batches", 2, LANDED_MOST)
    if [batch_id for batch_id, _ in rows] != [batch.batch_id for batch in sent]:
        raise BadRequest("the answer names other batches than were sent", field="batches")
    return need_instant(answer.head, "appended_at_ms"), [offset for _, offset in rows]


def _nothing() -> None:
    """Nobody waits for a dead row."""
