"""Delay servers: their requests, read and checked before anything is kept (docs/handoff.md, docs/protocol.md).

hello ──▶ commit ──▶ welcome: the batches in doubt ──▶ dispatch ──▶ commit ──▶ answered by the core

Invariant: a frame is queued for the message log only in the session whose hello was heard last, and only when all of
its batches check: one that does not refuses the whole frame (rule H6). A disk near its reserve refuses frames by name
(rule L8).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from functools import partial

from crc32c import crc32c

from delayd.batch.batch import BARE_COLUMNS_AT, BARE_DIRECTORY, BARE_HEAP_AT, PADS, Batch, parse, read_directory
from delayd.batch.columns import (
    HEADER,
    HEADER_BYTES,
    HEADER_CHECKED,
    MAGIC,
    PARTS,
    VERSION,
    BatchKind,
    Buffer,
    ColumnId,
    DispatchPart,
    padded,
)
from delayd.batch.names import HEADERS_BYTES_MAX
from delayd.batch.validate import check_batch, names_one_subject
from delayd.errors import (
    BadArgument,
    BadRequest,
    BatchMalformed,
    DelaydError,
    DiskReserve,
    HandoffRefused,
    RestoredOrigin,
    StaleSession,
)
from delayd.hours import INSTANT_MS_MAX, hour_of_ms
from delayd.log.control import OriginAccepted
from delayd.machine.clock import Clock
from delayd.machine.disk import Disk
from delayd.machine.operating import LogLimit, Wait, WaitKind
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import INT_MAX, WINDOW_ROW_BYTES, need_int, need_ints, need_u64

from .commit import DispatchFrame, Greeting, GroupCommit, Note
from .handoff import Hello, InDoubt, Origin, Peer, W
from .recovery import Recovered
from .unread import Unread

WINDOW_BODY_BYTES = 8 << 20  # One frame of a window's answer has no more; a batch of 65,536 rows needs 1.5 MiB.
WINDOW_BATCHES = 4_096  # Seven numbers for each: a third of the room in a head.

# A batch of one row without headers, up to its heap: header, kind part with its reserve, directory, columns.
BARE = struct.Struct(f"{HEADER.format} {PARTS[BatchKind.DISPATCH][0].format[1:].replace('4x', 'I')} 32s qQIIQ")
BARE_DIRECTORY_AT = BARE_HEAP_AT - 64
BARE_BEGIN = (MAGIC, VERSION, BatchKind.DISPATCH, 0)
BARE_SHAPE = (1, BARE_HEAP_AT, 4, BARE_DIRECTORY_AT - HEADER_BYTES, 1)  # From the count of rows to that of subjects.
BARE_LAYOUT = read_directory(BARE_DIRECTORY, 1, BARE_COLUMNS_AT, BARE_HEAP_AT)
NAME_BYTES = struct.Struct("<I")
HOUR_MAX = hour_of_ms(INSTANT_MS_MAX)
FRAME_BATCHES_MAX = 32_768  # Batches of a DISPATCH: the answer names each, and must fit one head.
PLENTY_BYTES = 1 << 30  # This much above the reserve is several times what all frames within PLENTY_MS can hold.
PLENTY_MS = 100  # For this long a disk with plenty of space is not asked again: each question is a system call.

log = logging.getLogger(__name__)
limited = LogLimit(log)  # Lines that delay servers can provoke.


class DelayServers:
    """Reads the requests of delay servers; belongs to the loop."""

    def __init__(self, recovered: Recovered, commit: GroupCommit, unread: Unread, reserve: SpaceLook) -> None:
        self.counters = {"refused": 0, "fenced": 0}
        self._log_id = recovered.identity.log_id
        self._index, self._stored, self._origins = recovered.index, recovered.stored, recovered.origins
        self._lost_offers = recovered.lost_offers
        self._commit = commit
        self._unread = unread
        self._reserve = reserve
        self._restored: dict[int, str] = {}  # Delay servers that were refused as restored, and why.

    def hello(self, peer: Peer, frame: Frame) -> None:
        """Begin a session of a delay server (rule H3); `welcome` answers when the hello is durable."""
        head = frame.head
        meant = need_u64(head, "target")
        if meant != self._log_id:
            # The hello's session and W belong to that server: here they would fence off and forget the batches of
            # another.
            raise HandoffRefused(f"this hello is for the realtime server {meant:016x}, and this is {self._log_id:016x}")
        self._unread.check_window()
        named = need_int(head, "named_offset") if "named_offset" in head else None
        if named and not self._stored.holds(named, need_u64(head, "log_id")):
            # The end offset cannot show that a log was cut: the hellos that came since have made it grow again.
            raise HandoffRefused(
                f"this log holds no batch of yours at offset {named}, which it had acknowledged: it has lost data"
            )
        w_epoch, w_id = need_ints(head, "w", 2)
        if w_epoch > need_u64(head, "epoch"):
            raise BadRequest(f"w is of epoch {w_epoch}, which has not begun", field="w")
        hello = Hello(
            need_u64(head, "log_id"),
            need_u64(head, "epoch"),
            need_u64(head, "instance"),
            need_u64(head, "session"),
            (w_epoch, w_id),
        )
        if named is not None and "unread_hours" in head:
            heard = self._origins.known(hello.log_id)
            decided = 0 if heard is None else heard.decided_offset
            unread = set(need_ints(head, "unread_hours"))
            # A delay server that has not given the numbers of messages that are here is a copy, whatever is damaged
            # there.
            gave_all = heard is None or heard.highest_sequence < need_u64(head, "next_sequence")
            if gave_all and named < decided and self._stored.may_be_of(unread, decided, hello.log_id):
                # One of its damaged dispatch logs names the offset, so a low figure does not prove a copy.
                named = None
        try:
            origin, older = self._origins.greet(peer, hello, named)
        except RestoredOrigin as error:
            self._restored[hello.log_id] = error.message
            limited.critical("origin_restored", "origin_restored origin=%016x reason=%r", hello.log_id, error.message)
            raise
        self._restored.pop(hello.log_id, None)
        self._drop(origin, StaleSession(f"session {hello.session} of epoch {hello.epoch} was heard meanwhile"))
        if older is not None:
            older.close()
        limited.info("hello", "hello origin=%016x epoch=%d session=%d", hello.log_id, hello.epoch, hello.session)
        self._commit.put(Greeting(peer, frame.request_id, origin, hello))

    def accept(self, peer: Peer, frame: Frame) -> None:
        """Take a delay server as it is, though it was restored from a copy: an operator decided so (rule H8)."""
        log_id = need_u64(frame.head, "log_id")
        origin = self._origins.known(log_id)
        if origin is None:
            raise BadArgument(f"nothing was ever heard of a delay server {log_id:016x}")
        answer: Head = {"log_id": self._log_id, "epoch": origin.epoch, "highest_sequence": origin.highest_sequence}
        self._drop(origin, StaleSession("an operator had everything forgotten that was heard of this delay server"))
        older = self._origins.forget(origin)
        if older is not None:
            older.close()
        self._restored.pop(log_id, None)
        log.warning("operator accepts=origin origin=%016x", log_id)
        self._commit.put(Note(origin, OriginAccepted(log_id), partial(peer.answer, frame.request_id, answer)))

    def dispatch(self, peer: Peer, frame: Frame) -> None:
        """Take a frame of batches for the next commit, which answers it."""
        epoch, session = need_u64(frame.head, "epoch"), need_u64(frame.head, "session")
        try:
            origin = self._origins.session_of(peer, epoch, session)
        except StaleSession as error:
            self.counters["fenced"] += 1
            peer.answer_error(frame.request_id, error)
            peer.close()
            return
        try:
            self._reserve.check(self._commit.queued_bytes + len(frame.body))
            batches, parts, highest = read_frame(frame.body, origin)
            origin.check_room(len(batches))
            self._index.check_room(batches)
        except DelaydError:
            self.counters["refused"] += 1
            raise
        origin.expected.update((part.epoch, part.batch_id) for part in parts)
        # This counts even if the frame is dropped: its numbers were used all the same.
        origin.highest_sequence = max(origin.highest_sequence, highest)
        self._commit.put(DispatchFrame(peer, frame.request_id, origin, batches, parts, len(frame.body)))

    def welcome(self, greeting: Greeting, end: int) -> None:
        """Answer a durable hello with the batches in doubt; ``end`` is the end of the message log."""
        origin, hello = greeting.origin, greeting.hello
        origin.advance(hello.w)
        if origin.peer is not greeting.peer or (origin.epoch, origin.session) != (hello.epoch, hello.session):
            greeting.peer.answer_error(greeting.request_id, StaleSession("a newer hello was heard meanwhile"))
            return
        held = [origin.window[key] for key in origin.keys]
        limited.info("window", "window origin=%016x session=%d batches=%d", origin.log_id, origin.session, len(held))
        facts: Head = {"log_id": self._log_id, "end_offset": end, "highest_sequence": origin.highest_sequence}
        facts["decided_offset"] = origin.decided_offset
        if self._lost_offers.epoch:
            facts["lost_epoch"], facts["lost_age_ms"] = self._lost_offers.epoch, self._lost_offers.age_ms
        for head, body, more in window_frames(facts, held):
            greeting.peer.answer(greeting.request_id, head, body, more=more)

    def waits(self) -> Iterator[Wait]:
        """List what keeps messages of delay servers away until an operator acts."""
        for log_id, reason in self._restored.items():
            own, origin = f"{self._log_id:016x}", f"{log_id:016x}"
            yield WaitKind.ORIGIN_RESTORED.wait(reason, origin=origin, log_id=own)
        if self._reserve.reached:
            yield WaitKind.TARGET_DISK_FULL.wait("free disk space is at its reserve")

    def _drop(self, origin: Origin, why: StaleSession) -> None:
        """Take the frames of a delay server out that were not given to the disk; they will never be appended."""
        for item in self._commit.drop(origin):
            if isinstance(item, DispatchFrame):
                item.origin.expected.difference_update((part.epoch, part.batch_id) for part in item.parts)
            item.peer.answer_error(item.request_id, why)


assert BARE.size == BARE_HEAP_AT, "its columns end where its heap begins"


def read_frame(body: memoryview, origin: Origin) -> tuple[list[Batch], list[DispatchPart], int]:
    """The batches of a frame of the current session of ``origin``, verified, and their highest sequence.

    Raises:
        BatchMalformed, BadSubject, MessageTooLarge: one of them can't be taken, so none is.
    """
    batches: list[Batch] = []
    parts: list[DispatchPart] = []
    keys: set[W] = set()
    highest = 0
    position = 0
    while position < len(body):
        batch, part, sequence = read_bare(body, position) or read_batch(body, position)
        position += batch.total_bytes
        if sequence > highest:
            highest = sequence
        key = (part.epoch, part.batch_id)
        _check_part(part, key, origin)
        batches.append(batch)
        parts.append(part)
        keys.add(key)
    if not 0 < len(batches) <= FRAME_BATCHES_MAX:
        raise BatchMalformed(f"a frame of {len(batches)} batches; it has 1 to {FRAME_BATCHES_MAX}")
    if len(keys) < len(batches):
        raise BatchMalformed("two batches of a frame have one number")
    return batches, parts, highest


def read_bare(body: memoryview, position: int) -> tuple[Batch, DispatchPart, int] | None:
    """The result of `read_batch` for a batch that `encode_bare` made; None for any other or faulty batch.

    With many subjects nearly every batch of a frame is made so. This takes a third of the time, because there is only
    one layout.
    """
    if len(body) - position < BARE.size:
        return None
    front = BARE.unpack_from(body, position)
    if front[:4] != BARE_BEGIN or front[5:10] != BARE_SHAPE or front[20] or front[21] != BARE_DIRECTORY or front[25]:
        return None
    total_bytes, columns_crc32c, heap_crc32c, header_crc32c = front[4], front[10], front[11], front[12]
    heap_bytes = total_bytes - BARE_HEAP_AT
    if not 8 <= heap_bytes <= HEADERS_BYTES_MAX or total_bytes & 7 or total_bytes > len(body) - position:
        return None
    view = body[position : position + total_bytes]
    heap = view[BARE_HEAP_AT:]
    checked = crc32c(view[HEADER_BYTES:BARE_DIRECTORY_AT], crc32c(view[:HEADER_CHECKED]))
    columns = view[BARE_DIRECTORY_AT:BARE_HEAP_AT]
    if checked != header_crc32c or crc32c(columns) != columns_crc32c or crc32c(heap) != heap_crc32c:
        return None
    (name_bytes,) = NAME_BYTES.unpack_from(heap)
    table_bytes = 8 + padded(name_bytes)
    due, sequence, end = front[22], front[23], front[24]
    if not table_bytes <= end <= heap_bytes or padded(end) != heap_bytes or heap[end:] != PADS[heap_bytes - end]:
        return None
    claimed_at_ms, hour = front[18], front[19]
    if not 0 <= due <= INSTANT_MS_MAX or sequence > INT_MAX or not 0 <= claimed_at_ms <= INSTANT_MS_MAX:
        return None
    if hour > HOUR_MAX or not names_one_subject(bytes(heap[:table_bytes])):
        return None
    batch = Batch(view, BatchKind.DISPATCH, front[:13], BARE_LAYOUT)
    batch.verified = True
    return batch, DispatchPart._make(front[13:20]), sequence


def read_batch(body: memoryview, position: int) -> tuple[Batch, DispatchPart, int]:
    """The verified batch at ``position``, its kind part, and its highest sequence; raises as `read_frame` does."""
    batch = parse(body, position)
    if batch.kind != BatchKind.DISPATCH:
        raise BatchMalformed(f"a {batch.kind.name} batch can't be dispatched")
    batch.verify()
    check_batch(batch)
    part = batch.dispatch
    return batch, part, _check_values(batch, part)


def _check_values(batch: Batch, part: DispatchPart) -> int:
    """Check that all instants are dates that can be shown, and all sequences numbers that logs can store; return the
    highest sequence.
    """
    if not 0 <= part.claimed_at_ms <= INSTANT_MS_MAX:
        raise BatchMalformed(f"batch {part.batch_id} was claimed at {part.claimed_at_ms}, which is no instant")
    if part.hour > HOUR_MAX:
        raise BatchMalformed(f"batch {part.batch_id} is of the hour {part.hour}, behind the last one of the calendar")
    for column in (ColumnId.DELIVER_AT_MS, ColumnId.ACCEPTED_AT_MS, ColumnId.EXPIRES_AT_MS):
        # Read as unsigned, an instant before 1970 is above the limit, too.
        if column in batch.offsets and batch.highest(column) > INSTANT_MS_MAX:
            instants = batch.int64s(column)
            row = int(((instants < 0) | (instants > INSTANT_MS_MAX)).argmax())
            name = column.name.lower()
            raise BatchMalformed(f"row {row}: {name} is {int(instants[row])}, which is no instant")
    highest = batch.highest(ColumnId.SEQUENCE)
    if highest > INT_MAX:
        raise BatchMalformed(f"batch {part.batch_id} has a sequence above {INT_MAX}")
    return highest


def _check_part(part: DispatchPart, key: W, origin: Origin) -> None:
    if part.origin_log_id != origin.log_id or part.epoch != origin.epoch:
        raise BatchMalformed(
            f"batch {part.batch_id} is of the server {part.origin_log_id:016x} in epoch {part.epoch}, its session "
            f"is of {origin.log_id:016x} in epoch {origin.epoch}"
        )
    if part.w_epoch > part.epoch:
        raise BatchMalformed(f"batch {part.batch_id} of epoch {part.epoch} names a W of epoch {part.w_epoch}")
    if origin.decided_or_held(key):
        raise BatchMalformed(f"batch {part.batch_id} of epoch {part.epoch} was sent before")
    if (part.w_epoch, part.w_id) >= key:
        raise BatchMalformed(f"batch {part.batch_id} of epoch {part.epoch} is not above its own W")


class SpaceLook:
    """Compares free space with the reserve at each frame, unless there was plenty a moment ago. A change is logged."""

    def __init__(self, disk: Disk, folder: str, reserve_bytes: int, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock
        self._plenty_until_ms = 0
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._reached = False

    @property
    def free_bytes(self) -> int:
        """What the disk has free now."""
        return self._disk.free_bytes(self._folder)

    @property
    def reached(self) -> bool:
        """Whether nothing is taken now."""
        return self.free_bytes < self._reserve_bytes

    def check(self, size_bytes: int) -> None:
        """Raise DiskReserve when ``size_bytes`` more do not fit above it."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._plenty_until_ms:
            return
        free_bytes = self._disk.free_bytes(self._folder)
        if free_bytes >= self._reserve_bytes + size_bytes + PLENTY_BYTES:
            self._plenty_until_ms = now_ms + PLENTY_MS
        reached = free_bytes < self._reserve_bytes + size_bytes
        if reached != self._reached:
            self._reached = reached
            level, taken = (logging.WARNING, "none") if reached else (logging.INFO, "all")
            log.log(level, "dispatch_taken which=%s free_bytes=%d", taken, free_bytes)
        if reached:
            raise DiskReserve(
                f"free space of {self._folder} is at its reserve of {self._reserve_bytes} bytes; "
                "free some or move the directory to a larger disk"
            )


def window_frames(facts: Head, held: Sequence[InDoubt]) -> Iterator[tuple[Head, list[Buffer], bool]]:
    """The frames of a window's answer: head, body, and whether more follow; one frame when the window is empty. Each
    head has the ``facts``.
    """
    at = 0
    while True:
        rows: list[list[int]] = []
        body: list[Buffer] = []
        size = 0
        while at < len(held) and len(rows) < WINDOW_BATCHES and size < WINDOW_BODY_BYTES:
            one = held[at]
            rows.append(
                [one.epoch, one.batch_id, one.hour, one.offset, one.appended_at_ms, one.claimed_at_ms, one.rows]
            )
            body.extend((one.sequences, one.deliver_at_ms, one.hashes))
            size += WINDOW_ROW_BYTES * one.rows
            at += 1
        more = at < len(held)
        yield {**facts, "batches": [*rows]}, body, more
        if not more:
            return
