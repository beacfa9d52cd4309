"""Link: the connection to one realtime server, and the sessions of the handoff over it (rules H3, H4, H7).

A session sends nothing before the target's window was answered and the answer is durable in the dispatch logs.
docs/handoff.md has the states as a table.

An example: epoch 7 sent the batches 4, with the rows 1 and 2, and 5, with row 3, and was killed when the outcomes of
batch 4 were durable. Epoch 8 says hello with W = (0, 0), so the target names both batches. The rows 1 and 2 have their
outcomes, so nothing is recorded of batch 4; row 3 becomes DISPATCHED by epoch 7, and its copy in the wheel is dropped.
When that is durable the link is ready, W is (8, 0), and the target forgets what epoch 7 sent.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from delayd.address import Endpoint
from delayd.batch.sequences import NO_SEQUENCES, Sequences, among
from delayd.delay.handoff.sender import Sender, SenderTerms
from delayd.delay.handoff.target_words import Refusers
from delayd.delay.handoff.window import MayHaveLeft, SentBatch
from delayd.delay.handoff.wire import OnAnswer, WatchedWire, Wire
from delayd.delay.intake import Intake
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.rows import Rows
from delayd.errors import (
    BadArgument,
    BadRequest,
    DelaydError,
    EpochOutOfRange,
    FencedInstance,
    HandoffRefused,
    NotReady,
    RequestTimedOut,
    RestoredOrigin,
    StaleEpoch,
)
from delayd.hours import INSTANT_MS_MAX
from delayd.log.hour import NewPart
from delayd.machine.alarms import DAMAGED_AGAIN_MS
from delayd.machine.operating import LogLimit, Wait, WaitKind, counted
from delayd.outcome import Outcome
from delayd.wire.frame import MORE, Frame, Head, HeadValue
from delayd.wire.heads import (
    WINDOW_MOST,
    WINDOW_ROW_BYTES,
    need_int,
    need_rows,
    need_u64,
)
from delayd.wire.requests import RequestType

log = logging.getLogger(__name__)
limited = LogLimit(log)

CLOCKS_MS = 5_000  # Two clocks measure an age with a smaller difference.
RETRY_MS = 50  # How long to wait before a target that was away is tried again; it doubles each time.
RETRY_MS_MAX = 2_000
WINDOW_FRAMES_MAX = 4_096  # The answer to a hello has at most this many frames, of 4,096 batches each.
WINDOW_BYTES_MAX = 1 << 30  # The rows of that answer, at 24 bytes each; rule H2 keeps undecided rows far below this.

InDoubt = tuple[list[int], Sequences, NDArray[np.int64], NDArray[np.uint64]]
"""A batch of a window's answer: the values in the head for it, and its rows' sequences, instants and content hashes."""


ORIGIN_REFUSALS = (StaleEpoch, EpochOutOfRange, FencedInstance, RestoredOrigin)
"""How a target refuses a delay server that was restored from a copy; an operator may have the target take it all the
same.
"""


class Dial(Protocol):
    """Opens a connection: calls ``connected`` once, or ``lost``; and ``lost`` when an open one ends."""

    def __call__(
        self, endpoint: Endpoint, connected: Callable[[Wire], None], lost: Callable[[DelaydError], None]
    ) -> None: ...


class Phase(Enum):
    """States of a link."""

    CLOSED = "closed"
    CONNECTING = "connecting"
    ASKED = "asked"  # A hello is under way.
    RECORDING = "recording"  # The window's answer is being made durable.
    READY = "ready"


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """What the links of all targets share."""

    sender: SenderTerms
    dial: Dial
    ledger: Ledger
    refusers: Refusers
    intake: Intake
    earlier_seen_ms: int  # The latest time that earlier lives of this server are known to have read.


class Link:
    """One target: its address, its connection and session, and its `Sender`."""

    def __init__(self, target: int, terms: LinkTerms) -> None:
        shared = terms.sender
        self.target = target
        self.sender = Sender(target, shared, shared.alarms.alarm(self.pump))
        self.phase = Phase.CLOSED
        self.endpoint: Endpoint | None = None
        self.alarm = ""
        self.is_elsewhere = False  # Another server answers at the target's address.
        # What consumers may have had that the target has lost (rule C1), of the rows that this life sent, sorted;
        # `lost_offers` has those of earlier lives.
        self.lost_rows = NO_SEQUENCES
        self._lost_by_hour: dict[int, Sequences] = {}  # The same by hour.
        self.is_lost = False  # An operator has given the target up: it is never spoken to again.
        self.refusal: HandoffRefused | None = None  # Why the target refused the last hello, until that is resolved.
        # Whether an operator wants the target to take this server as it is.
        self._accepts_origin = terms.refusers.is_accepted(target)
        self._origin = shared.life
        self._earlier = shared.earlier
        self._earlier_seen_ms = terms.earlier_seen_ms
        self._began_ms = shared.alarms.clock.monotonic_ms()
        # When the life of the target began that may have lost what earlier lives sent, and the number that was next.
        self._lost_before: tuple[int, int] | None = None
        self._dial = terms.dial
        self._alarms = shared.alarms
        self._outcomes = shared.outcomes
        self._ledger = terms.ledger
        self._ends = shared.ends
        self._silence_ms_max = shared.config.target_silence_ms_max
        self._fence = shared.fence
        self._refusers = terms.refusers
        self._intake = terms.intake
        self._wire: WatchedWire | None = None
        self._away = ""  # Why the target is away, as the log said it; a state that lasts is logged once.
        self._session = 0
        self._lost_epoch: int | None = None  # The life of the target that may have lost offers, as it said last.
        self.on_ready: Callable[[], None] = _nothing
        self._asked: list[OnAnswer] = []  # Those who wait for an answer of the target.
        self._retry_ms = RETRY_MS
        self._dial_again = shared.alarms.alarm(self.pump)  # While it is on, the target is not dialled.
        self._answer: list[Frame] = []
        self._answer_bytes = 0
        self._recorded: set[tuple[int, int]] = set()
        self._closed = False
        if target in terms.refusers:
            self.ask_first()

    def waits(self) -> Iterator[Wait]:
        """List what waits for this target while it is not connected."""
        if self.phase is Phase.READY or self.is_lost:
            return
        rows = self.rows
        due = counted(rows, "due message|due messages") if rows else "what falls due"
        words = {"due_messages": due, "target": f"{self.target:016x}"}
        if self.alarm:
            if isinstance(self.refusal, ORIGIN_REFUSALS):
                kind = WaitKind.ROWS_TARGET_REFUSES
            else:
                kind = WaitKind.ROWS_TARGET_AWAY if self.is_elsewhere else WaitKind.ROWS_TARGET_HAS_LOST
            yield kind.wait(self.alarm, **words)
        elif rows:
            yield WaitKind.ROWS_TARGET_AWAY.wait(self._away or "it is being connected to", **words)

    @property
    def rows(self) -> int:
        """How many rows wait for this target, also those that it was sent in vain."""
        return self.sender.waiting_rows + sum(len(sent.rows) for sent in self.sender.window.unacknowledged())

    @property
    def holds_up(self) -> str:
        """Why the rows of this target wait, as far as this server knows."""
        if self.phase is Phase.READY:
            return self.sender.later
        return self.alarm or self._away or "it is not connected to"

    @property
    def _name(self) -> str:
        return f"target {self.target:016x}"

    def offer(self, rows: Rows) -> None:
        """Take due rows of this target's subjects; `pump` sends them."""
        self.sender.waiting.add(rows)

    def move(self, endpoint: Endpoint) -> None:
        """Take the target's new address: findings at its last address don't apply to the new one."""
        self.endpoint = endpoint
        self._dial_again.off()
        self.pump()

    def pump(self) -> None:
        """Connect if need be, or send waiting rows."""
        if self._closed or self.is_lost:
            return
        if self._fence.by_meta:
            # Another server with this log_id may be the right one: a hello from here would end its session at the
            # target.
            if self.phase is not Phase.CLOSED:
                self._end_session(RETRY_MS)
            return
        if self.phase is Phase.READY and self._wire is not None:
            self.sender.pump(self._wire, self._session, self._is_current)
        elif self.phase is Phase.CLOSED and self.endpoint and self._dial_again.at_ms is None:
            self.phase = Phase.CONNECTING
            self._session += 1
            session = self._session
            self._dial(self.endpoint, partial(self._connected, session), partial(self._lost, session))

    def ask(self, request: RequestType, head: Head, answer: OnAnswer) -> None:
        """Ask the target something; ``answer`` is called once, with NotReady when the link is not ready or its session
        ends.
        """
        if self.phase is not Phase.READY or self._wire is None:
            answer(self._not_ready())
            return
        self._asked.append(answer)
        self._wire.call(request, head, (), partial(self._told, answer))

    def _told(self, answer: OnAnswer, told: Frame | DelaydError) -> None:
        # The end of a session has told everybody who waited for an answer.
        if answer in self._asked:
            self._asked.remove(answer)
            answer(told)

    def _not_ready(self) -> NotReady:
        return NotReady(f"realtime server {self.target:016x} can't be asked: {self.holds_up}")

    def _silent(self, session: int) -> None:
        silence = f"no sign of life for {self._silence_ms_max} ms, though something was asked"
        self._lost(session, RequestTimedOut(silence, sent=True))

    def hold(self) -> None:
        """Speak to the target no more while an operator's decision about it is being stored."""
        self.is_lost = True
        self._end_session(RETRY_MS)

    def go_on(self) -> None:
        """Speak to the target again: the operator's decision is stored, or could not be stored."""
        self.is_lost = False

    def lose(self) -> None:
        """Speak to the target no more, for good: an operator decided so, durably."""
        self.hold()
        self.alarm, self.refusal = "", None
        self._fence.take_down(self._name)

    def accept(self, *, restored: bool) -> None:
        """Try again at once; ``restored``: have the target take this server as it is, if it still refuses it as a
        restored one.
        """
        self._accepts_origin = restored and isinstance(self.refusal, ORIGIN_REFUSALS)
        self._dial_again.off()
        self.pump()

    def ask_first(self) -> None:
        """Serve nobody until this target has answered a hello: it may hold messages that this directory does not know
        (H8).
        """
        if self.is_lost or self.refusal is not None:
            return
        why = NotReady(
            "this directory may have been moved, restored or copied, and that realtime server "
            "was not asked yet whether it holds more than is known here"
        )
        self._fence.put_up(self._name, why, WaitKind.TARGET_NOT_ASKED, f"{self.target:016x}")
        if self.phase is not Phase.CLOSED:
            self._end_session(RETRY_MS)

    def close(self) -> None:
        """Send nothing more; the next start asks what became of batches that are under way."""
        self._closed = True
        if self._wire is not None:
            self._wire.close()

    def _is_current(self, session: int) -> bool:
        return session == self._session and self.phase is Phase.READY

    def _connected(self, session: int, wire: Wire) -> None:
        if session != self._session or self._closed or self.is_lost:
            wire.close()
            return
        watched = self._wire = WatchedWire(wire, self._alarms, self._silence_ms_max, partial(self._silent, session))
        self.phase, self._answer, self._answer_bytes = Phase.ASKED, [], 0
        if self._accepts_origin:
            head: dict[str, HeadValue] = {"log_id": self._origin.log_id, "target": self.target}
            watched.call(RequestType.ORIGIN_ACCEPT, head, (), partial(self._origin_accepted, session))
        else:
            self._greet(session, watched)

    def _origin_accepted(self, session: int, answer: Frame | DelaydError) -> None:
        if session != self._session or self.phase is not Phase.ASKED or self._wire is None:
            return
        # A target that has never heard of this server, such as one with a new directory, has nothing to forget.
        if isinstance(answer, DelaydError) and not isinstance(answer, BadArgument):
            self._lost(session, answer)
            return
        self._accepts_origin = False
        # This must be durable: if a later life made the target forget again, it would send rows again that are in doubt
        # there by then.
        self._refusers.forget(self.target, partial(self._forgotten, session))

    def _forgotten(self, session: int, refused: DelaydError | None) -> None:
        self._accepts_origin = refused is not None
        if session != self._session or self.phase is not Phase.ASKED or self._wire is None:
            return
        if refused is not None:
            self._lost(session, refused)
            return
        self._greet(session, self._wire)

    def _greet(self, session: int, watched: WatchedWire) -> None:
        hello: dict[str, HeadValue] = {
            "log_id": self._origin.log_id,
            "target": self.target,  # Sessions and W count per target: another server at its address must refuse them.
            "epoch": self._origin.epoch,
            "instance": self._origin.instance,
            "session": session,
            "w": list(self.sender.window.w),
        }
        named = self._ends.said(self.target)
        if named is not None:
            hello["named_offset"] = named
        if self._ends.unread:
            # The damaged dispatch logs were durable, and may be the only ones that named the offsets that the target
            # heard.
            hello["unread_hours"] = sorted(self._ends.unread)
            hello["next_sequence"] = self._intake.next_sequence
        watched.call(RequestType.HELLO, hello, (), partial(self._greeted, session))

    def _lost(self, session: int, error: DelaydError) -> None:
        if session != self._session or self.phase is Phase.CLOSED or self._closed:
            return  # After `close` the connection has ended because this server ended it.
        if self._away != str(error):
            self._away = str(error)
            limited.warning("target_away", "target_away target=%016x reason=%r", self.target, self._away)
        self._end_session(self._retry_ms)
        self._retry_ms = min(2 * self._retry_ms, RETRY_MS_MAX)

    def _end_session(self, retry_ms: int) -> None:
        self.phase = Phase.CLOSED
        self._dial_again.after(retry_ms)
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        asked, self._asked = self._asked, []
        for answer in asked:
            answer(self._not_ready())

    def _greeted(self, session: int, answer: Frame | DelaydError) -> None:
        if session != self._session or self.phase is not Phase.ASKED:
            return
        if isinstance(answer, HandoffRefused):
            self._refused(answer)
            return
        if isinstance(answer, DelaydError):
            self._lost(session, answer)
            return
        self._answer.append(answer)
        self._answer_bytes += len(answer.body)
        if len(self._answer) > WINDOW_FRAMES_MAX or self._answer_bytes > WINDOW_BYTES_MAX:
            self._answer = []
            self._lost(session, BadRequest("the answer to a hello does not end", field="batches"))
            return
        if answer.flags & MORE:
            return
        try:
            log_id, end_offset = need_u64(answer.head, "log_id"), need_int(answer.head, "end_offset")
            highest = need_int(answer.head, "highest_sequence") if "highest_sequence" in answer.head else 0
            decided = need_int(answer.head, "decided_offset") if "decided_offset" in answer.head else 0
            lost_epoch = need_int(answer.head, "lost_epoch") if "lost_epoch" in answer.head else 0
            age_ms = need_int(answer.head, "lost_age_ms") if lost_epoch else 0
            window = [batch for frame in self._answer for batch in _read_window(frame)]
        except BadRequest as error:
            self._lost(session, error)
            return
        named = self._ends.of(self.target)
        # A restored server leaves the sequences unused that it may have given since its copy was made. So the number of
        # a message that it knows nothing of lies among these, not above all that it has given.
        if highest and not self._intake.has_given(highest):
            self._refused(
                RestoredOrigin(
                    f"it holds message {highest} of this delay server, which knows of no message with this number: "
                    "this directory was restored from a copy"
                )
            )
        elif log_id != self.target:
            self.is_elsewhere = True
            self._answered()
            self._raise_alarm(f"its log_id is {log_id:016x} now")
        elif end_offset < named:
            self._answered()
            self._raise_alarm(f"its log ends at {end_offset}, and it had acknowledged {named}")
        else:
            self.alarm, self.refusal, self.is_elsewhere = "", None, False
            self._answered()
            if self._ends.unread and decided <= end_offset and self._ends.said(self.target) is not None:
                # The offset is known again this way, even if nobody ever restores the dispatch log that named it.
                self._ends.name(self.target, decided)
            has_lost, is_first = lost_epoch != (self._lost_epoch or 0), self._lost_epoch is None
            if has_lost and is_first:
                self._lost_before = self._alarms.clock.monotonic_ms() - age_ms, self._intake.next_sequence
            self._lost_epoch = lost_epoch
            self._record(session, window, has_lost=has_lost and not is_first)

    @property
    def lost_offers(self) -> MayHaveLeft | None:
        """Rows that earlier lives of this server sent, and that the target may have given to consumers, and lost,
        before a life of it that has begun since.

        An example: this server starts at 12:05, and the target says that its life began five minutes before. A row that
        was due at 12:00:03 and still waits here may have been given out. One that was due at 12:01 was not, and may be
        cancelled. But when an earlier life read 12:40, the clock was set back since: then only what is due later than
        that was certainly not sent. While the clock is in doubt, as after a boot, nobody can tell.
        """
        if self._lost_before is None:
            return None
        (lost_ms, sequences_below), due_until_ms = self._lost_before, self._earlier.due_until_ms
        clock = self._alarms.clock
        now_ms, monotonic_ms = clock.now_ms(), clock.monotonic_ms()
        if clock.confirmed and now_ms - (monotonic_ms - self._began_ms) >= self._earlier_seen_ms:
            due_until_ms = min(now_ms - (monotonic_ms - lost_ms) + CLOCKS_MS, due_until_ms)
        return MayHaveLeft(sequences_below, due_until_ms)

    def _note_lost(self, batches: list[SentBatch]) -> None:
        """The target began a life after an unclean end, and these batches, which this life sent, are not there: its
        consumers may have had them.
        """
        lost = self._lost_by_hour
        for sent in batches:
            lost[sent.hour] = np.union1d(lost.get(sent.hour, NO_SEQUENCES), sent.rows["sequence"])
        for hour, rows in list(lost.items()):
            # What has an outcome by now is of no interest any more.
            lost[hour] = rows.compress(among(rows, self._ledger.undecided_of(hour)))
            if not len(lost[hour]):
                del lost[hour]
        self.lost_rows = np.sort(np.concatenate([NO_SEQUENCES, *lost.values()]))

    def _answered(self) -> None:
        """The target accepts this server."""
        self._fence.take_down(self._name)
        # If a full disk keeps the note in the state, the next start asks the target first; nothing worse happens.
        self._refusers.forget(self.target, _nobody_waits)

    def _refused(self, why: HandoffRefused) -> None:
        """Stop speaking to the target, because the two sides do not fit, until an operator decides or the cause is
        mended.
        """
        self.refusal = why
        self._raise_alarm(str(why))
        is_origins = isinstance(why, ORIGIN_REFUSALS)
        # A server that asks its targets first waits on, and says what for: this target has answered now.
        if is_origins or self._fence.is_up_by(self._name):
            kind = WaitKind.TARGET_REFUSES if is_origins else WaitKind.TARGET_HAS_LOST
            self._fence.put_up(self._name, why, kind, f"{self.target:016x}")
        if is_origins:
            self._refusers.note(self.target)

    def _raise_alarm(self, what: str) -> None:
        if self.alarm != what:
            log.critical(
                "target_refused target=%016x reason=%r nothing_is_sent_until=an_operator_decides see=%r",
                self.target,
                what,
                "delayd target list, then delayd target accept or delayd target lost",
            )
        self.alarm = what
        self._end_session(DAMAGED_AGAIN_MS)

    def _record(self, session: int, window: list[InDoubt], *, has_lost: bool) -> None:
        """Record the batches that the answer names. A batch that was sent and is not named has not arrived, and never
        will; or it has, and the target ``has_lost`` it.
        """
        self.phase = Phase.RECORDING
        for held in window:
            self._arrived(*held)
        self._ledger.drop_named()
        self._answer = []
        taken_back = self.sender.take_back()
        if has_lost:
            self._note_lost(taken_back)
        self._outcomes.when_durable(partial(self._ready, session))
        self._outcomes.commit()

    def _arrived(
        self, facts: list[int], sequences: Sequences, deliver_at_ms: NDArray[np.int64], hashes: NDArray[np.uint64]
    ) -> None:
        epoch, batch_id, hour, offset, appended_at_ms, claimed_at_ms = facts
        if epoch == self._origin.epoch:
            sent = self.sender.window.get(batch_id)
            if sent is not None and not sent.acknowledged:
                self.sender.acknowledge(sent, offset, appended_at_ms)
            return
        if self.sender.window.earlier_settled or (epoch, batch_id) in self._recorded:
            return
        self._recorded.add((epoch, batch_id))
        new = self._ledger.without_outcome(hour, sequences)
        if new.any():
            self._ends.name(self.target, offset)
            sequences = sequences.compress(new)
            self._ledger.name(hour, sequences)
            part = NewPart(
                sequences,
                deliver_at_ms.compress(new),
                Outcome.DISPATCHED,
                claimed_at_ms,
                self.target,
                epoch,
                batch_id,
                appended_at_ms,
                offset,
                hashes=hashes.compress(new),
            )
            self._outcomes.record(hour, part, _nothing)

    def _ready(self, session: int) -> None:
        if session != self._session or self.phase is not Phase.RECORDING:
            return
        limited.info("target_ready", "target_ready target=%016x session=%d", self.target, session)
        self.sender.window.earlier_settled = True
        self._recorded.clear()
        self._retry_ms, self._away = RETRY_MS, ""
        self.phase = Phase.READY
        self.pump()
        self.on_ready()


def _read_window(frame: Frame) -> list[InDoubt]:
    """The batches that a frame of a window's answer names; BadRequest when its body does not hold their rows."""
    found: list[InDoubt] = []
    position = 0
    for *facts, count in need_rows(frame.head, "batches", 7, WINDOW_MOST):
        if position + WINDOW_ROW_BYTES * count > len(frame.body):
            raise BadRequest(
                f"a window of {len(frame.body)} bytes ends within a batch of {count} rows", field="batches"
            )
        sequences = np.frombuffer(frame.body, np.uint64, count, position)
        deliver_at_ms = np.frombuffer(frame.body, np.int64, count, position + 8 * count)
        if count and not 0 <= int(deliver_at_ms.min()) <= int(deliver_at_ms.max()) <= INSTANT_MS_MAX:
            raise BadRequest("a window names a row that is due at no instant", field="batches")
        hashes = np.frombuffer(frame.body, np.uint64, count, position + 16 * count)
        found.append((facts, sequences, deliver_at_ms, hashes))
        position += WINDOW_ROW_BYTES * count
    return found


def _nothing() -> None:
    """Nobody waits: the callback after the whole answer of a target waits for its outcomes, too."""


def _nobody_waits(refused: DelaydError | None) -> None:
    """The session goes on without waiting for this."""
