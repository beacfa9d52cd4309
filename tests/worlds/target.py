"""A realtime server for tests of the delay server: its side of the handoff, exactly, and the connections to it.

Invariant: nothing moves by itself. Bytes travel when a test carries them, so they can be late, cut off or overtaken by
a crash, and a log that is not synced loses any part of its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import Buffer, ColumnId, DispatchPart
from delayd.batch.validate import check_batch
from delayd.errors import (
    ConnectionLost,
    DelaydError,
    FencedInstance,
    HandoffRefused,
    RestoredOrigin,
    StaleEpoch,
    StaleSession,
)
from delayd.wire.frame import ANSWER, MORE, Frame, Head, HeadValue
from delayd.wire.heads import (
    need_int,
    need_ints,
    need_u64,
)
from delayd.wire.requests import RequestType
from tests.batches import bodies_of

OnAnswer = Callable[[Frame | DelaydError], None]
GROUP_BYTES = 96  # Before the first batch of a group, so that no batch of a log is at offset 0.


@dataclass(frozen=True, slots=True)
class Kept:
    """A batch in the target's log."""

    part: DispatchPart
    offset: int
    end: int
    appended_at_ms: int
    subject: bytes
    sequences: tuple[int, ...]
    deliver_at_ms: tuple[int, ...]
    bodies: tuple[bytes, ...]
    hashes: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int]:
        """The pair that the watermark W is compared with."""
        return (self.part.epoch, self.part.batch_id)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on its way to a target."""

    kind: int
    head: Head
    body: bytes

    def look(self) -> object:
        """Equal for requests that say the same."""
        return (self.kind, repr(self.head), self.body)


@dataclass(slots=True)
class Call:
    """A request and who waits for its answer."""

    asked: Asked
    on_answer: OnAnswer


class Cable:
    """One connection: requests on their way up to the target, answers on their way down."""

    def __init__(self, target: FakeTarget, lost: Callable[[DelaydError], None]) -> None:
        self.target = target
        self.up: deque[Call] = deque()
        self.down: deque[Callable[[], None]] = deque()
        self.ended = False  # For the delay server: it was told, or will be with the next answer that is carried.
        self._lost = lost
        self._open_calls: list[Call] = []

    # What the delay server does with it.

    def call(self, frame_type: int, head: Mapping[str, HeadValue], body: Sequence[Buffer], on_answer: OnAnswer) -> None:
        """Put a request on its way."""
        call = Call(Asked(frame_type, dict(head), b"".join(bytes(part) for part in body)), on_answer)
        self._open_calls.append(call)
        if self.ended:
            self.down.append(self._end_calls)
        else:
            self.up.append(call)

    def close(self) -> None:
        """Answers do not come any more; what is on its way up may arrive."""
        self.cut(keep=len(self.up))

    # What the test and the target do with it.

    def carry_up(self) -> None:
        """Let the oldest request arrive."""
        call = self.up.popleft()
        self.target.receive(self, call.asked, lambda answer: self._answer(call, answer))

    def carry_down(self) -> None:
        """Let the oldest answer arrive, or the news that the connection is gone."""
        self.down.popleft()()

    def cut(self, keep: int, keep_down: int = 0) -> None:
        """Break it: the oldest ``keep`` requests arrive later all the same, ``keep_down`` answers before the news."""
        while len(self.up) > keep:
            self.up.pop()
        if self.ended:
            return
        self.ended = True
        while len(self.down) > keep_down:
            self.down.pop()
        self.down.append(self._end)

    def _answer(self, call: Call, answer: Frame | DelaydError) -> None:
        def arrive() -> None:
            if not (isinstance(answer, Frame) and answer.flags & MORE):
                self._open_calls.remove(call)
            call.on_answer(answer)

        if not self.ended:
            self.down.append(arrive)

    def _end(self) -> None:
        self._end_calls()
        self._lost(ConnectionLost("the connection ended", sent=True))

    def _end_calls(self) -> None:
        calls, self._open_calls = self._open_calls, []
        for call in calls:
            call.on_answer(ConnectionLost("the connection ended", sent=True))


@dataclass(slots=True)
class FakeTarget:
    """One realtime server with a log; ``origin`` is what it durably knows of the one delay server."""

    log_id: int
    now_ms: Callable[[], int]
    log: list[Kept] = field(default_factory=list)
    synced: int = 0  # Batches that a crash can't take.
    origin: tuple[int, int] = (0, 0)  # Epoch and instance, durable.
    up: bool = True
    hangs: bool = False  # Nothing is read, synced or answered, and no connection ends.
    slow_disk: bool = False  # Only syncs stand still.
    frame_batches: int = 2  # The most batches in one frame of a window's answer.
    refusals: list[DelaydError] = field(default_factory=list)  # For the next dispatch frames.
    refused_bodies: set[bytes] = field(default_factory=set)  # Frames with one of these are refused.
    refuse_with: DelaydError | None = None
    lives: int = 1
    lost_life: int = 0  # The life that followed a crash, and when it began: what was given before may be lost.
    lost_ms: int = 0
    given: set[int] = field(default_factory=set)  # All that consumers ever got, synced or not.
    refused: int = 0
    fenced: int = 0
    _heard: tuple[int, int] = (0, 0)  # Epoch and session of the newest hello in this life.
    _w: tuple[int, int] = (0, 0)
    _forgotten: int = 0  # Batches of before an operator's word: nothing of them counts any more.
    _cable: Cable | None = None
    _answers: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # When the log is synced so far.

    @property
    def end_offset(self) -> int:
        """End of its log."""
        return self.log[-1].end if self.log else 0

    @property
    def can_sync(self) -> bool:
        """Whether a sync has something to do, and is done."""
        works = self.up and not self.hangs and not self.slow_disk
        return works and (self.synced < len(self.log) or bool(self._answers))

    def copy(self, now_ms: Callable[[], int]) -> FakeTarget:
        """Its twin in another world, without connections."""
        twin = replace(self, now_ms=now_ms, log=list(self.log), refusals=list(self.refusals), _answers=[], _cable=None)
        twin.refused_bodies, twin.given = set(self.refused_bodies), set(self.given)
        return twin

    def look(self) -> object:
        """What it holds and knows, but for whoever waits for an answer: equal where it goes on in the same way."""
        heard = (self.origin, self._heard, self._w, self._forgotten)
        return (self.log_id, tuple(self.log), self.synced, self.up, self.hangs, self.slow_disk, heard)

    def receive(self, cable: Cable, asked: Asked, answer: Callable[[Frame | DelaydError], None]) -> None:
        """Serve a request, as far as that goes before a sync."""
        if not self.up:
            return
        try:
            if asked.kind == RequestType.PING:
                answer(Frame(RequestType.PING, ANSWER, 0, {"now_ms": self.now_ms()}, memoryview(b"")))
            elif asked.kind == RequestType.ORIGIN_ACCEPT:
                self.origin, self._heard, self._w, self._forgotten = (0, 0), (0, 0), (0, 0), len(self.log)
                answer(Frame(RequestType.ORIGIN_ACCEPT, ANSWER, 0, {"log_id": self.log_id}, memoryview(b"")))
            elif asked.kind == RequestType.HELLO:
                self._hello(cable, asked, answer)
            else:
                self._dispatch(cable, asked, answer)
        except DelaydError as error:
            answer(error)
            if isinstance(error, StaleSession) and asked.kind == RequestType.DISPATCH:
                self.fenced += 1
                cable.cut(keep=0, keep_down=len(cable.down))

    def forget_outcomes(self) -> None:
        """Be as if the delay server had named no durable outcome yet."""
        self._w = (0, 0)

    def sync(self) -> None:
        """Make the log durable, and send the answers that waited for it."""
        self.synced = len(self.log)
        ready, self._answers = self._answers, []
        for _, answer in ready:
            answer()

    def crash(self, random: Random) -> None:
        """Lose what was not synced, or part of it, and every connection; nothing is served before `restart`."""
        del self.log[random.randint(self.synced, len(self.log)) :]
        self.up = False
        self._answers.clear()
        self._heard, self._w, self._cable = (0, 0), (0, 0), None

    def restart(self) -> None:
        """Start anew: what is found is made durable before anything is answered."""
        self.up = True
        self.lives += 1
        self.lost_life, self.lost_ms = self.lives, self.now_ms()
        self.synced = len(self.log)
        self._w = max((kept.part.w_epoch, kept.part.w_id) for kept in self.log) if self.log else (0, 0)

    def _hello(self, cable: Cable, asked: Asked, answer: Callable[[Frame | DelaydError], None]) -> None:
        if need_u64(asked.head, "target") != self.log_id:
            raise HandoffRefused("this hello is for another server")
        epoch, instance = need_int(asked.head, "epoch"), need_u64(asked.head, "instance")
        session = need_int(asked.head, "session")
        w_epoch, w_id = need_ints(asked.head, "w", 2)
        if epoch < self.origin[0]:
            raise StaleEpoch(f"epoch {self.origin[0]} was heard, {epoch} is older")
        if epoch == self.origin[0] and instance != self.origin[1]:
            raise FencedInstance("another instance holds this epoch")
        decided = self._decided
        unread = need_ints(asked.head, "unread_hours") if "unread_hours" in asked.head else []
        gave_all = not unread or self._highest_sequence < need_u64(asked.head, "next_sequence")
        unknown = gave_all and decided is not None and decided.part.hour in unread
        told = decided is None or unknown or "named_offset" not in asked.head
        if decided is not None and not told and need_int(asked.head, "named_offset") < decided.offset:
            raise RestoredOrigin("its dispatch logs lack what they had")
        if (epoch, session) <= self._heard:
            raise StaleSession(f"session {self._heard} was heard, {session} is not newer")
        self.origin, self._heard, self._cable = (epoch, instance), (epoch, session), cable
        self._advance((w_epoch, w_id))
        self.sync()
        window = [kept for kept in self.log[self._forgotten :] if kept.key > self._w]
        end = self.end_offset
        pieces = [window[at : at + self.frame_batches] for at in range(0, len(window), self.frame_batches)] or [[]]
        for index, piece in enumerate(pieces):
            answer(self._window_frame(piece, end, more=index < len(pieces) - 1))

    @property
    def _highest_sequence(self) -> int:
        return max((max(kept.sequences) for kept in self.log[self._forgotten :]), default=0)

    @property
    def _decided(self) -> Kept | None:
        """The last batch that W has passed."""
        decided = [kept for kept in self.log[self._forgotten :] if kept.key <= self._w]
        return max(decided, key=lambda kept: kept.offset, default=None)

    def _window_frame(self, window: list[Kept], end_offset: int, *, more: bool) -> Frame:
        rows = [
            [*kept.key, kept.part.hour, kept.offset, kept.appended_at_ms, kept.part.claimed_at_ms, len(kept.sequences)]
            for kept in window
        ]
        body = b"".join(
            np.array(kept.sequences, np.uint64).tobytes()
            + np.array(kept.deliver_at_ms, np.int64).tobytes()
            + np.array(kept.hashes, np.uint64).tobytes()
            for kept in window
        )
        head: dict[str, HeadValue] = {
            "log_id": self.log_id,
            "end_offset": end_offset,
            "highest_sequence": self._highest_sequence,
            "decided_offset": 0 if self._decided is None else self._decided.offset,
            "batches": [*rows],
        }
        if self.lost_life:
            head["lost_epoch"], head["lost_age_ms"] = self.lost_life, max(0, self.now_ms() - self.lost_ms)
        return Frame(RequestType.HELLO, ANSWER | (MORE if more else 0), 0, head, memoryview(body))

    def _dispatch(self, cable: Cable, asked: Asked, answer: Callable[[Frame | DelaydError], None]) -> None:
        session = (need_int(asked.head, "epoch"), need_int(asked.head, "session"))
        if session != self._heard or cable is not self._cable:
            raise StaleSession(f"session {self._heard} is current, {session} is not")
        batches = _batches(asked.body)
        if self.refusals:
            self.refused += 1
            raise self.refusals.pop(0)
        if self.refuse_with and any(not self.refused_bodies.isdisjoint(bodies_of(batch)) for batch in batches):
            self.refused += 1
            raise self.refuse_with
        known = {kept.key for kept in self.log[self._forgotten :]}
        now_ms = self.now_ms()
        first = len(self.log)
        for batch in batches:
            kept = _kept(batch, self.end_offset + GROUP_BYTES, now_ms)
            assert kept.key not in known, f"batch {kept.key} was handed over twice"
            assert kept.part.epoch == session[0], "a batch is of the epoch of its session"
            self.log.append(kept)
            self.given.update(kept.sequences)
            self._advance((kept.part.w_epoch, kept.part.w_id))
        ids: list[HeadValue] = [[kept.part.batch_id, kept.offset] for kept in self.log[first:]]
        head: dict[str, HeadValue] = {"log_id": self.log_id, "appended_at_ms": now_ms, "batches": ids}
        frame = Frame(RequestType.DISPATCH, ANSWER, 0, head, memoryview(b""))
        self._answers.append((len(self.log), lambda: answer(frame)))

    def _advance(self, w: tuple[int, int]) -> None:
        self._w = max(self._w, w)


def _batches(body: bytes) -> list[Batch]:
    found: list[Batch] = []
    position = 0
    while position < len(body):
        batch = parse(body, position)
        batch.verify()
        check_batch(batch)
        found.append(batch)
        position += batch.total_bytes
    return found


def _kept(batch: Batch, offset: int, now_ms: int) -> Kept:
    return Kept(
        batch.dispatch,
        offset,
        offset + batch.total_bytes,
        now_ms,
        batch.subjects()[0],
        tuple(batch.uint64s(ColumnId.SEQUENCE).tolist()),
        tuple(batch.int64s(ColumnId.DELIVER_AT_MS).tolist()),
        tuple(bodies_of(batch)),
        tuple(batch.content_hashes().tolist()),
    )
