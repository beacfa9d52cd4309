"""Random and hostile requests to a realtime server's core, beside consumers that are honest (rules B2, E1, Q1, Q4).

The same as `delay_core` for the other server: an honest delay server hands messages over, and honest consumers pull,
acknowledge and give back; hostile callers send what the fuzzer draws. Afterwards everybody has left, and

- each request was answered once, but for PULLs that wait, and by name if it was refused;
- no message came again that was acknowledged, and each one came in the end;
- nobody waits, and nobody leads any more; no turn of the loop took longer than `TURN_MS_MAX` of processor time.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from delayd.batch.columns import Buffer
from delayd.errors import BadRequest, DelaydError, RetryLater
from delayd.testing.clock import START_MS
from delayd.wire.frame import Frame, FrameReader, Head, HeadValue
from delayd.wire.heads import (
    need_int,
    need_map,
    need_rows,
    need_u64,
)
from delayd.wire.requests import REALTIME_LIMITS, RequestType
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import SimPeer, World, pull_head

from . import requests as hostile
from .delay_core import Untrue
from .fields import Read, watched

SUBJECT, GROUP = "truth", "honest"
HELD = ("waiting_pulls", "leads")
PEERS = 6
LEASE_MS = 30_000
PULLS_AT_THE_END = 400


class Peer:
    """One hostile connection."""

    def __init__(self, run: RealtimeRun) -> None:
        self._run = run
        self._reader = FrameReader(room=REALTIME_LIMITS.plain)
        self._reader.room_by_type = REALTIME_LIMITS.by_type_trusted
        self._next_id = 0
        self.asked: dict[int, int] = {}  # Types of requests that are not answered, by id.
        self.is_open = True
        self.source = hostile.Requests("realtime", run.random, START_MS)
        self.session: hostile.Session | None = None

    def send(self) -> bool:
        """Send a request that the fuzzer draws; whether the connection goes on."""
        self._next_id += 1
        data = self.source.drawn(self._next_id, self.session)
        buffer = self._reader.get_buffer()
        while data:
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            data = data[size:]
            for frame in self._reader.received(size):
                self.asked[frame.request_id] = frame.type
                self._run.serve(self, frame)
            if self._reader.fault is not None:
                return False
            buffer = self._reader.get_buffer()
        return self.is_open and not self._reader.unfinished_bytes

    def answer(
        self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = (), *, more: bool = False
    ) -> None:
        self._run.counts["answered"] += 1
        self.source.heard(Frame(self.asked[request_id], 0, request_id, dict(head), memoryview(b"")))
        if not more:
            del self.asked[request_id]

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        self._run.counts["refused"] += 1
        del self.asked[request_id]

    def close(self) -> None:
        self.is_open = False


class RealtimeRun:
    """One run over one world."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.counts: Counter[str] = Counter()
        self.read: Read = set()  # The fields that the core has read, by the type of their request.
        self.turn_ms = 0.0
        self.slowest = ""
        self._world = World()
        self._delay, self._consumer = SimPeer(), SimPeer()
        self._world.hello(self._delay, 1)
        self._batch_id = 0
        self._sent: set[bytes] = set()
        self._acked: set[bytes] = set()
        self._given: list[tuple[list[int], list[bytes]]] = []  # Handles, and what they stand for.
        self._peers = [Peer(self) for _ in range(PEERS)]

    def requests(self, count: int) -> None:
        """Make so many requests, then let everybody leave, and judge what is left."""
        gc.collect()
        gc.disable()
        try:
            while self.counts["requests"] < count:
                chance = self.random.random()
                if chance < 0.6:
                    self._hostile()
                elif chance < 0.7:
                    self._dispatch()
                elif chance < 0.85:
                    self._pull()
                else:
                    self._say()
                if self.random.random() < 0.02:
                    self._pass(self.random.choice((1, 100, 5_000)))
                if self.random.random() < 0.001:
                    gc.collect()
        finally:
            gc.enable()
        self._leave()

    def serve(self, peer: Peer, frame: Frame) -> None:
        """Give a request to the core, as the connection of a server does."""
        self.counts["requests"] += 1
        try:
            if frame.fault is not None:
                raise frame.fault
            if frame.body and frame.type not in REALTIME_LIMITS.bodies:
                raise BadRequest("it has no body")
            self._turn(f"request {frame.type}", peer, watched(frame, self.read))
        except DelaydError as error:
            peer.answer_error(frame.request_id, error)
        if self._world.failures:
            raise Untrue(f"request {frame.type} has ended the server: {self._world.failures[0]!r}")

    def _turn(self, name: str, peer: Peer, frame: Frame) -> None:
        # Its threads run inside of a turn here, so that a turn is a little longer than that of a server.
        began = time.thread_time()
        try:
            self._world.core.received(peer, frame)
        finally:
            took_ms = 1_000 * (time.thread_time() - began)
            if took_ms > self.turn_ms:
                self.turn_ms, self.slowest = took_ms, name

    def _hostile(self) -> None:
        peer = self.random.choice(self._peers)
        if not peer.send() or self.random.random() < 0.003:
            self._world.core.disconnected(peer)
            self._peers[self._peers.index(peer)] = Peer(self)

    def _pass(self, ms: int) -> None:
        end = self._world.clock.monotonic_ms() + ms
        while (left := end - self._world.clock.monotonic_ms()) > 0:
            wake_ms = self._world.core.next_wake_ms() - self._world.clock.monotonic_ms()
            self._world.clock.advance(max(1, min(left, wake_ms)))
            self._world.core.wake()
        if self._world.failures:
            raise Untrue(f"the server has ended: {self._world.failures[0]!r}")

    # Honest callers.

    def _ask(self, peer: SimPeer, kind: RequestType, head: Head, *body: bytes) -> tuple[Head, bytes] | None:
        self.counts["requests"] += 1
        try:
            answer = self._world.ask(peer, kind, head, *body)
        except RetryLater:
            self.counts["honest requests refused"] += 1
            return None
        except DelaydError as error:
            raise Untrue(f"an honest {kind.name} was answered {error!r}") from error
        return answer

    def _dispatch(self) -> None:
        self._batch_id += 1
        bodies = [b"%d-%d" % (self._batch_id, row) for row in range(self.random.choice((1, 2, 20)))]
        w = (1, self._batch_id - 1) if self._batch_id > 1 else (0, 0)
        batch = dispatch_batch(self._batch_id, bodies, subject=SUBJECT, w=w)
        if self._ask(self._delay, RequestType.DISPATCH, {"session": 1, "epoch": 1}, batch) is None:
            self._batch_id -= 1
        else:
            self._sent.update(bodies)

    def _pull(self) -> None:
        head = pull_head(GROUP, SUBJECT, most=self.random.choice((1, 10, 500)), lease_ms=LEASE_MS)
        answer = self._ask(self._consumer, RequestType.PULL, head)
        if answer is None:
            return
        told, body = answer
        incarnation, bodies = need_u64(told, "incarnation"), bodies_of(body)
        again = self._acked.intersection(bodies)
        if again:
            raise Untrue(f"acknowledged, and given out again: {sorted(again)[:3]}")
        strange = set(bodies) - self._sent
        if strange:
            raise Untrue(f"given out, and never sent: {sorted(strange)[:3]}")
        at = 0
        for first, _, count, _ in need_rows(told, "parts", 4):
            self._given.append(([incarnation, first, count], bodies[at : at + count]))
            at += count

    def _say(self) -> None:
        """Acknowledge or give back some of what was given out."""
        if not self._given:
            return
        handle, bodies = self._given.pop(self.random.randrange(len(self._given)))
        kind = RequestType.ACK if self.random.random() < 0.7 else RequestType.NACK
        head: Head = {"subject": SUBJECT, "group": GROUP, "handles": [list(handle)]}
        answer = self._ask(self._consumer, kind, head | ({"uncounted": True} if kind is RequestType.NACK else {}))
        if answer is not None and kind is RequestType.ACK and not need_rows(answer[0], "stale", 3):
            self._acked.update(bodies)
            self.counts["acknowledged"] += len(bodies)

    def _leave(self) -> None:
        """What was sent comes in the end; then everybody leaves, and nothing is left."""
        self._pass(2 * LEASE_MS)
        self._given.clear()
        for _ in range(PULLS_AT_THE_END):
            if self._acked == self._sent:
                break
            self._pull()
            while self._given:
                self._say()
            self._pass(1_000)
        if self._acked != self._sent:
            raise Untrue(f"{len(self._sent - self._acked)} messages never came")
        for peer in self._peers:
            owed = Counter(kind for kind in peer.asked.values() if kind != RequestType.PULL)
            if owed:
                raise Untrue(f"requests were never answered: {owed}")
            self._world.core.disconnected(peer)
        self._world.core.disconnected(self._consumer)
        self._pass(2 * LEASE_MS)
        told, _ = self._world.ask(SimPeer(), RequestType.STATUS, {})
        counters = need_map(told, "counters")
        held = {name: need_int(counters, name) for name in HELD if need_int(counters, name)}
        if held:
            raise Untrue(f"everybody has left, and this is held: {held}")
