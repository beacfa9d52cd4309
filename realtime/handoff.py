"""Handoff, the receiving side: which session of each delay server counts, and which batches are still in doubt
(docs/handoff.md).

A batch is taken only from the session whose hello was heard last in this life; a batch is remembered until W passes it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from delayd.batch.batch import Batch
from delayd.batch.columns import HEADER_BYTES, Buffer, ColumnId, DispatchPart
from delayd.errors import DelaydError, FencedInstance, RestoredOrigin, SlowDown, StaleEpoch, StaleSession
from delayd.hours import INSTANT_MS_MAX
from delayd.machine.clock import Clock
from delayd.machine.identity import check_epoch
from delayd.wire.frame import HeadValue

W = tuple[int, int]
"""A watermark: epoch and batch id; everything up to it, in lexicographic order, is decided (rule H1)."""

W_NONE: W = (0, 0)
UNTIL_NOW = INSTANT_MS_MAX  # An instant in the past, and nobody knows which.
RETRY_MS = 1_000  # The hint to a sender whom a bound refuses.
ORIGINS_MAX = 1_000  # Delay servers that were ever heard: half a kilobyte each, and one LMDB row.
# Batches of one delay server above W, 0.4 KB each. No delay server leaves even half as many undecided.
WINDOW_BATCHES_MAX = 262_144


class Peer(Protocol):
    """One connection, told apart from others by its identity."""

    @property
    def is_open(self) -> bool:
        """Whether answers can still leave; if not, the core is soon told of its end."""

    def answer(
        self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = (), *, more: bool = False
    ) -> None:
        """Answer a request; with ``more`` a further frame of the answer follows."""

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        """Answer a request with an error."""

    def close(self) -> None:
        """End the connection once all answers have left."""


class Hello(NamedTuple):
    """The contents of a delay server's hello (rule H3)."""

    log_id: int
    epoch: int
    instance: int
    session: int
    w: W


class InDoubt(NamedTuple):
    """A stored batch above W: everything that its acknowledgement would have said, in case that was lost (rule H6)."""

    epoch: int
    batch_id: int
    hour: int
    offset: int
    appended_at_ms: int
    claimed_at_ms: int
    rows: int
    # All of the batch's columns, as bytes: a window's answer needs three of them, and few windows are ever asked for.
    columns: bytes
    columns_at: int
    places: Mapping[int, int]  # By column: where in the batch it begins.
    group_offset: int

    @property
    def sequences(self) -> bytes:
        """The sequences of the rows, u64 each."""
        return self._column(ColumnId.SEQUENCE)

    @property
    def deliver_at_ms(self) -> bytes:
        """The due instants of the rows, i64 each."""
        return self._column(ColumnId.DELIVER_AT_MS)

    @property
    def hashes(self) -> bytes:
        """The content hashes of the rows, u64 each; zeros where the batch states none."""
        return self._column(ColumnId.CONTENT_HASH) if ColumnId.CONTENT_HASH in self.places else bytes(8 * self.rows)

    def _column(self, column: ColumnId) -> bytes:
        begin = self.places[column] - self.columns_at
        return self.columns[begin : begin + 8 * self.rows]


@dataclass(slots=True)
class Origin:
    """One delay server. ``peer`` is the connection of its current session; None until a hello in this life."""

    log_id: int
    epoch: int = 0
    instance: int = 0
    session: int = 0
    w: W = W_NONE
    peer: Peer | None = None
    dirty: bool = True
    # The highest offset of a batch that W has passed: its outcome is durable at the delay server.
    decided_offset: int = 0
    highest_sequence: int = 0  # The highest sequence of all its batches since an operator accepted it.
    window: dict[W, InDoubt] = field(default_factory=dict)
    keys: list[W] = field(default_factory=list)  # The batches of the window, rising.
    expected: set[W] = field(default_factory=set)  # Taken and not yet durable.

    def check_hello(self, hello: Hello) -> None:
        """Refuse a hello that is not newer than the last one heard, or that can't be the next one."""
        check_epoch(hello.epoch, self.epoch, f"delay server {hello.log_id:016x}")
        if hello.epoch < self.epoch:
            raise StaleEpoch(f"epoch {self.epoch} of this delay server was heard, {hello.epoch} is an older life of it")
        if hello.epoch == self.epoch and hello.instance != self.instance:
            raise FencedInstance(
                f"another instance of this delay server holds epoch {hello.epoch}; two of them run on one directory "
                "or on copies of it: stop one"
            )
        if hello.epoch == self.epoch and hello.session <= self.session:
            raise StaleSession(f"session {self.session} was heard, {hello.session} is not newer")

    def check_known(self, named_offset: int) -> None:
        """Refuse a delay server whose dispatch logs lack an outcome that it once called durable (rule H8)."""
        if named_offset < self.decided_offset:
            raise RestoredOrigin(
                f"this delay server had recorded a batch at offset {self.decided_offset}, its dispatch logs name none "
                f"above {named_offset} now: it was restored from a copy. Bring back its newest directory; or `delayd "
                "target accept`, after which what was delivered since the copy was made is delivered again"
            )

    def accept(self) -> None:
        """Take the delay server as it is, because an operator says so: nothing that was heard of it counts any more."""
        self.epoch, self.instance, self.session = 0, 0, 0
        self.w, self.decided_offset, self.highest_sequence = W_NONE, 0, 0
        self.window.clear()
        self.keys.clear()
        self.expected.clear()
        self.dirty = True

    def accepted(self) -> None:
        """The operator's decision is durable. Batches that landed before its record, after it was made, don't count
        either.
        """
        self.w, self.decided_offset, self.highest_sequence = W_NONE, 0, 0
        self.window.clear()
        self.keys.clear()
        self.dirty = True

    def forget_window(self) -> None:
        """Forget the batches in doubt, because they are read again."""
        self.window.clear()
        self.keys.clear()

    def hear(self, hello: Hello) -> None:
        """Move the fence: from now on only this hello's session counts."""
        self.epoch, self.instance, self.session = hello.epoch, hello.instance, hello.session
        self.dirty = True

    def remember(self, batch: Batch, part: DispatchPart, offset: int, group_offset: int, appended_at_ms: int) -> None:
        """Put a stored batch into the window, unless W has passed it; its own W counts too."""
        self.advance((part.w_epoch, part.w_id))
        key = (part.epoch, part.batch_id)
        if key <= self.w:
            return
        columns_at = HEADER_BYTES + batch.kind_bytes
        self.window[key] = InDoubt(
            part.epoch,
            part.batch_id,
            part.hour,
            offset,
            appended_at_ms,
            part.claimed_at_ms,
            batch.count,
            bytes(batch.buffer[columns_at : batch.heap_offset]),
            columns_at,
            batch.offsets,
            group_offset,
        )
        if self.keys and key < self.keys[-1]:
            bisect.insort(self.keys, key)
        else:
            self.keys.append(key)

    def advance(self, w: W) -> None:
        """Forget the batches that W has passed."""
        if w <= self.w:
            return
        self.w = w
        self.dirty = True
        passed = bisect.bisect_right(self.keys, w)
        for key in self.keys[:passed]:
            self.decided_offset = max(self.decided_offset, self.window.pop(key).offset)
        del self.keys[:passed]

    def check_room(self, batches: int) -> None:
        """Refuse more undecided batches than any delay server has, with SlowDown."""
        if len(self.window) + len(self.expected) + batches > WINDOW_BATCHES_MAX:
            raise SlowDown(f"{len(self.window)} batches of this delay server are above its W", retry_after_ms=RETRY_MS)

    def decided_or_held(self, key: W) -> bool:
        """Whether a batch with this number was taken or decided before."""
        return key <= self.w or key in self.window or key in self.expected


class KeptOffers(NamedTuple):
    """What LMDB has of `LostOffers`. ``open``: the life that wrote it offers ahead of its fsyncs, and has not stopped
    cleanly.
    """

    lost_epoch: int = 0
    lost_ms: int = 0
    open: bool = False


class LostOffers:
    """When the latest life began that followed an end which may have taken messages that consumers had (rule C1).

    Only a power cut takes them, but nobody can tell a power cut from a kill afterwards. A clean stop takes nothing,
    because its last checkpoint is durable behind both logs.
    """

    def __init__(self, clock: Clock, before: KeptOffers, epoch: int, *, ahead: bool) -> None:
        self.epoch = epoch if before.open else before.lost_epoch  # The number of that life; 0 if there was none.
        self._is_own = before.open
        self._clock = clock
        self._ahead = ahead
        self._known_ms = None if before.open or before.lost_ms == UNTIL_NOW else before.lost_ms
        self._begun_ms = clock.monotonic_ms()

    @property
    def at_ms(self) -> int:
        """When it began; 0 if there was none; UNTIL_NOW while nothing has confirmed this life's clock."""
        if self._known_ms is None:
            if not self._clock.confirmed:
                return UNTIL_NOW
            self._known_ms = self._clock.now_ms() - (self._clock.monotonic_ms() - self._begun_ms)
        return self._known_ms

    def kept(self, *, ends: bool) -> KeptOffers:
        """What the next life is to find; ``ends``: this one offers nothing more, and what it did is durable by then."""
        return KeptOffers(self.epoch, self.at_ms, self._ahead and not ends)

    @property
    def age_ms(self) -> int:
        """How long ago it began, so that nobody compares clocks of two machines; 0 while nobody knows."""
        if self._is_own:
            return self._clock.monotonic_ms() - self._begun_ms
        return max(0, self._clock.now_ms() - self.at_ms)


class Origins:
    """All delay servers that were ever heard."""

    def __init__(self) -> None:
        self._origins: dict[int, Origin] = {}
        self._of_peer: dict[Peer, Origin] = {}

    def __iter__(self) -> Iterator[Origin]:
        return iter(self._origins.values())

    def origin(self, log_id: int) -> Origin:
        """The delay server with a log_id; a new one has heard nothing yet."""
        found = self._origins.get(log_id)
        if found is None:
            found = self._origins[log_id] = Origin(log_id)
        return found

    def known(self, log_id: int) -> Origin | None:
        """The delay server with a log_id; None when nothing was heard of it."""
        return self._origins.get(log_id)

    def forget(self, origin: Origin) -> Peer | None:
        """Take a delay server as it is, because an operator says so; return the connection that it had."""
        peer, origin.peer = origin.peer, None
        if peer is not None:
            self._of_peer.pop(peer, None)
        origin.accept()
        return peer

    def greet(self, peer: Peer, hello: Hello, named_offset: int | None = None) -> tuple[Origin, Peer | None]:
        """Hear a hello: return its origin, and the connection that it fences off. When this raises, nothing has
        changed.

        Raises:
            StaleEpoch, StaleSession, FencedInstance, EpochOutOfRange: it is not newer than the one heard.
            RestoredOrigin: its dispatch logs lack outcomes that they had; with a ``named_offset`` of None that is not
            checked.
        """
        origin = self._origins.get(hello.log_id)
        if origin is None:
            if len(self._origins) >= ORIGINS_MAX:
                raise SlowDown(f"{ORIGINS_MAX} delay servers were heard here, no more are", retry_after_ms=RETRY_MS)
            origin = Origin(hello.log_id)
        origin.check_hello(hello)
        if named_offset is not None:
            origin.check_known(named_offset)
        self._origins[hello.log_id] = origin
        origin.hear(hello)
        older, origin.peer = origin.peer, peer
        if older is not None:
            self._of_peer.pop(older, None)
        self._of_peer[peer] = origin
        return origin, older if older is not peer else None

    def session_of(self, peer: Peer, epoch: int, session: int) -> Origin:
        """The origin whose current session this connection is.

        Raises:
            StaleSession: it is not; the connection must be closed (rule H3).
        """
        origin = self._of_peer.get(peer)
        if origin is None:
            raise StaleSession("no hello was heard on this connection, or a newer one on another")
        if (origin.epoch, origin.session) != (epoch, session):
            heard = f"epoch {origin.epoch}, session {origin.session}"
            raise StaleSession(f"{heard} was heard, epoch {epoch}, session {session} is not current")
        return origin

    def disconnected(self, peer: Peer) -> None:
        """Forget a connection that has ended; the batches that it brought stay."""
        origin = self._of_peer.pop(peer, None)
        if origin is not None and origin.peer is peer:
            origin.peer = None

    def window_offset(self, end: int) -> int:
        """The lowest offset of a group with a batch above W; ``end`` when there is none."""
        # A window has its batches in the order of the log.
        firsts = (next(iter(origin.window.values())) for origin in self if origin.window)
        return min((held.group_offset for held in firsts), default=end)
