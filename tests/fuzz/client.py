"""One hostile connection: it sends bursts of frames and counts what comes back.

Invariant: whatever the server answers is a frame that checks, and no answer is an `internal_error`.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from delayd.secret import NONCE_BYTES, Exchange, Secret
from delayd.wire.frame import ERROR, MORE, Frame, FrameReader, Head, encode_frame
from delayd.wire.heads import (
    need_bytes,
    need_int,
    need_str,
    need_u64,
)
from delayd.wire.requests import RequestType
from tests.waiting import DEADLINE_S

from .requests import Session

HOST = "127.0.0.1"
BURST_S = 5.0  # For the answers of a burst.
SILENT_S = 0.05  # What is not answered by then waits for something: a pull for messages, a batch for the disk.
UNANSWERED_MAX = 400  # Then the connection is made anew: a server takes no more than 1,024 at once.


class Hostile:
    """A connection to one server, made again whenever it ends; with a secret it is trusted."""

    def __init__(self, role: str, port: int, secret: Secret | None, random: Random) -> None:
        self.role = role
        self.counts: Counter[str] = Counter()
        self.session: Session | None = None
        self.cluster_id = 0  # As the server has told it, behind its proof.
        self.heard: Callable[[Frame], None] = lambda answer: None  # Told each answer that is no error.
        self._port = port
        self._secret = secret
        self._random = random
        self._socket: socket.socket | None = None
        self._reader = FrameReader()
        self._last_id = 0
        self._waiting: set[int] = set()

    def next_id(self) -> int:
        """A number for the next request."""
        self._last_id += 1
        return self._last_id

    def open(self) -> None:
        """Connect if need be; a server that takes no connection is asked again for a while."""
        if self._socket is not None:
            return
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                self._socket = socket.create_connection((HOST, self._port), timeout=DEADLINE_S)
                self._reader, self._waiting, self._last_id = FrameReader(), set(), 0
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._prove()
                return
            except (OSError, ConnectionError):
                self.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self.counts["closed"] += 1

    def burst(self, frames: Sequence[bytes]) -> None:
        """Send frames, whose ids were drawn here, and read until all are answered, no more answers come or it ends."""
        self.send(frames)
        self.read()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send frames, whose ids were drawn here."""
        self.open()
        assert self._socket is not None
        first = self._last_id - len(frames) + 1
        self._waiting.update(range(first, self._last_id + 1))
        self.counts["requests"] += len(frames)
        try:
            self._socket.settimeout(BURST_S)
            self._socket.sendall(b"".join(frames))
        except OSError:
            self.close()

    def read(self) -> None:
        """Read until all is answered, no more answers come, or the connection ends."""
        if self._socket is None:
            return
        try:
            deadline = time.monotonic() + BURST_S
            while self._waiting and time.monotonic() < deadline:
                self._socket.settimeout(SILENT_S)
                for answer in self._receive():
                    self._answered(answer)
        except TimeoutError:
            self.counts["unanswered bursts"] += 1
        except OSError:
            self.close()
            return
        if len(self._waiting) > UNANSWERED_MAX:
            self.close()

    def ask(self, kind: RequestType, head: Head, body: bytes = b"") -> Frame:
        """One request that is answered; ConnectionError if it is not."""
        assert self._socket is not None
        request_id = self.next_id()
        self._socket.sendall(b"".join(bytes(piece) for piece in encode_frame(kind, request_id, head, [body])))
        while True:
            for answer in self._receive():
                if answer.request_id == request_id:
                    return answer

    def _receive(self) -> list[Frame]:
        assert self._socket is not None
        size = self._socket.recv_into(self._reader.get_buffer())
        if not size:
            raise ConnectionError("the server ended the connection")
        found = self._reader.received(size)
        assert self._reader.fault is None, f"the {self.role} server answered no frame: {self._reader.fault}"
        return found

    def _answered(self, answer: Frame) -> None:
        assert answer.fault is None, f"the {self.role} server answered a head that is none: {answer.fault}"
        if not answer.flags & MORE:
            self._waiting.discard(answer.request_id)
        if answer.flags & ERROR:
            code = need_str(answer.head, "code")
            assert code not in ("internal_error", "head_too_large"), f"{self.role}: {answer.head}"
            self.counts["refused"] += 1
        else:
            self.counts["answered"] += 1
            self.heard(answer)

    def _prove(self) -> None:
        self.session = None
        if self._secret is None:
            return
        nonce = os.urandom(NONCE_BYTES)
        told = self.ask(RequestType.CHALLENGE, {"nonce": nonce}).head
        exchange = Exchange(
            nonce,
            need_bytes(told, "nonce"),
            need_str(told, "role"),
            need_u64(told, "log_id"),
            need_u64(told, "cluster_id"),
        )
        shown: Head = {"proof": self._secret.dialler_proof(exchange), "cluster_id": exchange.cluster_id}
        answer = self.ask(RequestType.PROVE, shown)
        assert not answer.flags & ERROR, f"the {self.role} server takes no proof: {answer.head}"
        self.cluster_id = exchange.cluster_id
        if self.role == "realtime":
            self._greet(exchange.log_id)

    def _greet(self, target: int) -> None:
        session = Session(self._random.randrange(1_000, 1_008), target, self._random.randrange(1, 1 << 20))
        head: Head = {
            "log_id": session.log_id,
            "target": target,
            "epoch": session.epoch,
            "instance": 1,
            "session": 1,
            "w": [0, 0],
            "named_offset": 0,
        }
        if not self.ask(RequestType.HELLO, head).flags & ERROR:
            self.session = session


def log_id_of(port: int) -> int:
    """The log_id of a server."""
    one = Hostile("any", port, None, Random(0))
    one.open()
    log_id = need_u64(one.ask(RequestType.STATUS, {}).head, "log_id")
    one.close()
    return log_id


def loop_wait_ms(port: int) -> int:
    """The longest wait of a server's loop since its start."""
    one = Hostile("any", port, None, Random(0))
    one.open()
    wait_ms = need_int(one.ask(RequestType.STATUS, {}).head, "loop_wait_ms_max")
    one.close()
    return wait_ms
