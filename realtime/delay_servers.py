"""Delay servers: their requests, read and checked before anything is kept (docs/handoff.md, docs/protocol.md).

hello ──▶ commit ──▶ welcome: the batches in doubt ──▶ dispatch ──▶ commit ──▶ answered by the core

Invariant: a frame is queued for the message log only in the session whose hello was heard last.
"""

import logging
from collections.abc import Iterator
from functools import partial

from delayd.errors import BadArgument, BadRequest, DelaydError, HandoffRefused, RestoredOrigin, StaleSession
from delayd.log.control import OriginAccepted
from delayd.machine.operating import LogLimit, Wait, WaitKind
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import (
    need_int,
    need_ints,
    need_u64,
)

from .answers import window_frames
from .commit import DispatchFrame, Greeting, GroupCommit, Note
from .handoff import Hello, Origin
from .intake import read_frame
from .peer import Peer
from .recovery import Recovered
from .reserve import Reserve
from .unread import Unread

log = logging.getLogger(__name__)
limited = LogLimit(log)  # Lines that delay servers can provoke.


class DelayServers:
    """Reads the requests of delay servers; belongs to the loop."""

    def __init__(self, recovered: Recovered, commit: GroupCommit, unread: Unread, reserve: Reserve) -> None:
        self.counters = {"refused": 0, "fenced": 0}
        self._log_id = recovered.identity.log_id
        self._index, self._stored, self._origins = recovered.index, recovered.stored, recovered.origins
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
        for head, body, more in window_frames(self._log_id, end, origin.highest_sequence, origin.decided_offset, held):
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
