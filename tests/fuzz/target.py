"""Hostile realtime servers: they have the cluster's secret, register, are dialled, and answer what can't be.

One thread serves them all. What a delay server asks (CHALLENGE, PROVE, HELLO, DISPATCH, ORIGIN_ACCEPT) is answered as a
realtime server would, and then mostly changed: fields dropped, added or of any value, windows of rows that nobody sent,
errors, answers twice, without an end or never, frames with flipped bytes, requests of its own. One thing it never says:
that it knows more of this delay server than the server itself. A server that has the secret is believed in that, and it
stops the delay server (rule H8).
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import Counter
from functools import partial
from random import Random
from typing import Self

import msgpack

from delayd.batch.batch import parse
from delayd.errors import DelaydError
from delayd.secret import NONCE_BYTES, Exchange, Secret
from delayd.wire.frame import ANSWER, ERROR, MORE, Frame, FrameReader, Head, HeadValue
from delayd.wire.heads import need_bytes
from delayd.wire.requests import RequestType

from .requests import flipped, frame
from .values import BOUNDARY, NUMBERS, RAW_HEADS

HOST = "127.0.0.1"
TARGETS = 6  # After some lies a delay server asks a target again half a minute later: others are dialled meanwhile.
LOOK_S = 0.2
SHARE_OF_TRUTH = 0.4  # Otherwise no frame would ever be handed over.
SHARE_OF_TRUE_PROOFS = 0.9
END_OFFSET = (1 << 63) - 1  # Not below anything that it has acknowledged.
HOUR_MS = 3_600_000
# Such answers do not stop the delay server; no_such_code is one of a later version.
CODES = ("disk_reserve", "batch_malformed", "bad_subject", "stale_session", "slow_down", "no_such_code", "damaged_data")


class Target:
    """One of them: an address and a log_id."""

    def __init__(self, log_id: int) -> None:
        self.log_id = log_id
        self.listener = socket.create_server((HOST, 0))
        self.listener.setblocking(False)
        self.port: int = self.listener.getsockname()[1]

    def registered(self) -> Head:
        """What it says to meta."""
        said: Head = {"role": "realtime", "log_id": self.log_id, "host": HOST, "port": self.port}
        return said | {"epoch": 1, "pid": os.getpid(), "place": self.log_id, "moves_seen": 0}


class LyingTargets:
    """Several of them, in a thread; `counts` says what they were asked and how they answered."""

    def __init__(self, secret: Secret, cluster_id: int, now_ms: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._random = Random(f"{seed} targets")
        self.targets = [Target(self._random.getrandbits(63) | 1 << 62) for _ in range(TARGETS)]
        self.failure: BaseException | None = None
        self._secret = secret
        self._cluster_id = cluster_id
        self._now_ms = now_ms
        self._ending = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="lying targets", daemon=True)
        for target in self.targets:
            self._selector.register(target.listener, selectors.EVENT_READ, partial(self._accept, target))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _run(self) -> None:
        try:
            while not self._ending:
                for key, _ in self._selector.select(LOOK_S):
                    key.data()
        except (AssertionError, DelaydError, LookupError, ValueError, TypeError) as error:
            self.failure = error

    def _accept(self, target: Target) -> None:
        line, _ = target.listener.accept()
        line.settimeout(LOOK_S)
        self.counts["dialled"] += 1
        self._selector.register(line, selectors.EVENT_READ, partial(self._read, target, line, FrameReader(), []))

    def _read(self, target: Target, line: socket.socket, reader: FrameReader, begun: list[Exchange]) -> None:
        try:
            size = line.recv_into(reader.get_buffer())
            frames = reader.received(size) if size else []
            for asked in frames:
                if not asked.flags & ANSWER:  # It answers requests of its target, too.
                    line.sendall(self._answer(target, asked, begun))
            if size and reader.fault is None:
                return
        except OSError:
            self.counts["connections lost"] += 1
        self._selector.unregister(line)
        line.close()

    def _answer(self, target: Target, asked: Frame, begun: list[Exchange]) -> bytes:
        """All that is said to one request; nothing at all now and then."""
        random = self._random
        kind = RequestType(asked.type)
        self.counts[f"asked {kind.name}"] += 1
        head, body = self._true_answer(target, asked, begun)
        proof = kind in (RequestType.CHALLENGE, RequestType.PROVE)
        if random.random() < (SHARE_OF_TRUE_PROOFS if proof else SHARE_OF_TRUTH):
            self.counts["true answers"] += 1
            return frame(kind, asked.request_id, msgpack.packb(head), body, ANSWER)
        self.counts["lies"] += 1
        return self._lie(kind, asked.request_id, dict(head), body)

    def _true_answer(self, target: Target, asked: Frame, begun: list[Exchange]) -> tuple[Head, bytes]:
        if asked.type == RequestType.CHALLENGE:
            nonces = need_bytes(asked.head, "nonce"), self._random.randbytes(NONCE_BYTES)
            exchange = Exchange(*nonces, "realtime", target.log_id, self._cluster_id)
            begun.append(exchange)
            said: Head = {"nonce": exchange.server_nonce, "role": "realtime", "log_id": target.log_id}
            return said | {"cluster_id": self._cluster_id, "proof": self._secret.server_proof(exchange)}, b""
        if asked.type == RequestType.HELLO:
            heard: Head = {"log_id": target.log_id, "end_offset": END_OFFSET, "highest_sequence": 0}
            return heard | {"decided_offset": 0, "batches": []}, b""
        if asked.type == RequestType.DISPATCH:
            position, landed = 0, list[HeadValue]()
            while position < len(asked.body):
                batch = parse(asked.body, position)
                position += batch.total_bytes
                assert batch.dispatch is not None, "a delay server hands over what it says"
                landed.append([batch.dispatch.batch_id, self._random.randrange(1 << 40)])
            return {"appended_at_ms": self._now_ms, "batches": landed}, b""
        return {}, b""

    def _lie(self, kind: RequestType, request_id: int, head: Head, body: bytes) -> bytes:
        random = self._random
        say = partial(frame, kind, request_id)
        if kind is RequestType.HELLO and random.random() < 0.4:
            head["batches"], body = self._window()
            return say(msgpack.packb(head), body, ANSWER)
        chance = random.random()
        if chance < 0.5:
            for _ in range(random.choice([1, 1, 2])):
                _change(head, random)
            return say(msgpack.packb(head), body, ANSWER)
        if chance < 0.6:
            return say(random.choice(RAW_HEADS), body, random.choice([ANSWER, ANSWER | ERROR, ANSWER | MORE]))
        if chance < 0.7:
            error: Head = {"code": random.choice(CODES), "message": "a lie", "retry_after_ms": 5, "details": {}}
            if random.random() < 0.5:
                _change(error, random)
            return say(msgpack.packb(error), b"", ANSWER | ERROR)
        true = say(msgpack.packb(head), body, ANSWER)
        if chance < 0.75:
            return flipped(true, random)
        if chance < 0.8:
            return say(msgpack.packb(head), body, ANSWER | MORE) * random.choice([1, 8, 300]) + true
        if chance < 0.85:
            return true + true
        if chance < 0.9:
            return frame(kind, random.choice([0, request_id + 1, (1 << 32) - 1]), msgpack.packb(head), body, ANSWER)
        if chance < 0.95:
            return frame(random.choice(list(RequestType)), request_id, msgpack.packb(head), body) + true
        return b"" if chance < 0.97 else random.randbytes(random.choice([1, 24, 4_000]))

    def _window(self) -> tuple[list[HeadValue], bytes]:
        """Batches of this delay server or of nobody, in rows that have their form, or nearly."""
        random, batches, body = self._random, list[HeadValue](), b""
        for _ in range(random.choice([1, 2, 5])):
            count = random.choice([0, 1, 1, 3])
            hour = self._now_ms // HOUR_MS
            facts: list[HeadValue] = [random.randrange(4), random.randrange(60), hour, 96, self._now_ms, self._now_ms]
            if random.random() < 0.4:
                facts[random.randrange(len(facts))] = random.choice(NUMBERS)
            rows: HeadValue = count if random.random() < 0.8 else random.choice(NUMBERS)
            batches.append([*facts, rows])
            for values in ([1, 2, 3, 1 << 40], [self._now_ms, -1, (1 << 63) - 1], [0, 1]):
                body += b"".join(random.choice(values).to_bytes(8, "little", signed=True) for _ in range(count))
        return batches, body


def _change(head: Head, random: Random) -> None:
    """Drop or set one field; nothing that would say that the delay server was restored from a copy."""
    assert isinstance(head, dict), "made here"
    name = random.choice([*head, "unknown"])
    values = [value for value in BOUNDARY if not (name == "highest_sequence" and _is_count(value))]
    if random.random() < 0.2:
        head.pop(name, None)
    else:
        head[name] = random.choice(values)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
