"""Requests: what each type has in its head and body, and how one is mutated.

A case is the bytes of one frame. The sweep makes one for each type, field and boundary value; after it mutations are
drawn: fields dropped, added or changed, heads and frames with flipped bytes, bodies of batches whose checksums hold and
whose fields do not.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

import msgpack
import numpy as np
from crc32c import crc32c

from delayd.batch.columns import BatchKind, DispatchPart, Int64s, ProducerPart
from delayd.wire.asked import Asked, AskedKeys, encode_asked, encode_asked_keys
from delayd.wire.frame import HEADER_BYTES, MAGIC, VERSION, Frame, HeadValue
from delayd.wire.heads import need_rows, need_u64
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import encode_instants
from tests.batches import messages, with_true_checksums

from . import values
from .values import BOUNDARY, NUMBERS, RAW_HEADS, Make

HOUR_MS = 3_600_000
RECORDED_EVERY = 7  # One of so many batches has records of sends.
SHARE_OF_VALID = 0.2
SHARE_OF_CHECKPOINTS = 0.02  # Few are drawn: each writes files, and others wait for its disk.
# A cut holds back all that the delay server would hand over, for 2 s: with more of them nobody would get a message.
SHARE_OF_CUTS = 0.01
SHARES: dict[int, float] = {RequestType.CHECKPOINT: SHARE_OF_CHECKPOINTS, RequestType.CUT: SHARE_OF_CUTS}
SHARE_OF_TRUE_HANDLES = 0.8
WORDS = (RequestType.ACK, RequestType.NACK, RequestType.EXTEND, RequestType.RETRY, RequestType.REJECT)
SHARE_OF_MANY = 0.2  # Of what may be of one subject or of many.
# Most requests leave these out: consumers that want different things of one group refuse each other.
OF_A_GROUP = frozenset(
    {"start", "ephemeral", "tags_any", "tags_all", "ordered", "exclusive_ms", "was", "in_flight_max", "subscription"}
)
# And these, which must fit what the request is about.
SELDOM: dict[int, frozenset[str]] = {
    **dict.fromkeys(WORDS, frozenset({"log_id", "subjects"})),
    RequestType.CANCEL: frozenset({"subject"}),
    RequestType.GET: frozenset({"subject"}),
    RequestType.RESCHEDULE: frozenset({"subject"}),
}
SHARE_OF_TERMS = 0.15
HANDLES_KEPT = 500
HEADER = struct.Struct("<IBBHIII")
# The field of rows in a request that is an acknowledgement, too, and what a row has behind its handle.
LATER: dict[int, tuple[str, HeadValue, HeadValue]] = {
    RequestType.RETRY: ("retries", 0, "no"),
    RequestType.REJECT: ("rejects", "bad", "no"),
}

Fields = Mapping[str, Make]

# How fields are made that a request declares: by their names, where a type alone would seldom be right, or by types.
BY_NAME: dict[str, Make] = {
    "after": values.text,
    "ahead": values.one_of(0, 0, 1, 500),
    "decision": values.one_of("take", "release", "give-up", "fuzzed"),
    "exclusive_ms": values.one_of(0, 1_000, 60_000),
    "flow_rate": values.one_of("", "10/s", "0/s"),
    "headers": values.one_of("", "x-a: b", "host: b"),
    "host": values.one_of("127.0.0.1", "localhost", "delay-1"),
    "in_flight_max": values.one_of(0, 0, 5),
    "keys": values.one_of(f"whsec_{'A' * 40}", f"whsk_{'A' * 43}=", "whsec_"),
    "lease_ms": values.one_of(0, 50, 100, 30_000, 60_000),
    "low_water": values.small,
    "named_offset": values.one_of(0, 0, 0, 96),
    "number": values.small,
    "pattern": values.one_of("*", ">", "fuzz.*", "*.1", "fuzz.>.1", "fuzz*"),
    "pending": values.one_of(None, 0, 1, 1_000),
    "pending_bytes": values.one_of(None, 0, 100_000),
    "per_second": values.one_of(None, 0, 1, 1_000),
    "port": values.one_of(1, 2, 3),
    "proof": values.nonce,
    "rate": values.one_of("", "5/m", "fast"),
    "spread_ms": values.one_of(0, 1_000, 3_600_000, 1 << 40),
    "subject": values.subject,
    "subscription": values.one_of(1, 2, 3),
    "tags_all": values.tags,
    "tags_any": values.tags,
    "to_ms": values.u64,
    "unread_hours": values.watermark,
    "used": values.one_of({}, {"sender": 1}, {"sender": -1}),
    "url": values.one_of("https://example.com/a", "http://[::1/", "ftp://a"),
    "w": values.watermark,
    "wait_ms": values.wait_ms,
    "was": values.one_of(0, 1),
}
BY_TYPE: dict[str, Make] = {
    **dict.fromkeys(("u32", "int", "instant"), values.small),
    "u64": values.u64,
    "bool": values.flag,
    "str": values.text,
    "group": values.group,
    "bytes32": values.nonce,
    "slots": values.slots,
    "versions": values.versions,
    "position": values.position,
    "pair": values.pair,
    "[str]": values.subjects,
    "[u64]": values.log_ids,
    "[handle]": values.handles,
    "[named]": values.one_of([["fuzz.1", 1]]),
    "[retry]": values.retries,
    "[reject]": values.rejects,
    "[schedule]": values.schedules,
}
OF_ONE: dict[tuple[RequestType, str], Make] = {
    (RequestType.GROUPS, "after"): values.pair,
    (RequestType.GROUPS, "subject"): values.subject_or_none,
    (RequestType.SERVERS, "role"): values.one_of(None, "delay", "realtime"),
    (RequestType.HELLO, "instance"): values.small,
    (RequestType.DRAIN, "sequence"): values.small,
    (RequestType.FIND, "sequence"): values.small,
    (RequestType.FIND, "origin"): values.small,
}


def make_of(kind: RequestType, name: str, declared: str) -> Make:
    """How a field of a request is made."""
    declared = declared.removesuffix("|nil")
    if "/" in declared:
        return values.one_of(*declared.split("/"), "fuzzed")
    if declared == "0..2":
        return values.one_of(0, 1, 2)
    by_type = values.small if ".." in declared else BY_TYPE.get(declared, values.text)
    return OF_ONE.get((kind, name)) or BY_NAME.get(name, by_type)


SPECS: dict[str, dict[RequestType, Fields]] = {
    role: {
        kind: {name: make_of(kind, name, declared) for name, declared in kind.terms.types.items()}
        for kind in RequestType
        if role in kind.terms.servers
    }
    for role in ("meta", "delay", "realtime")
}


# What changes something, and may meet itself or its opposite while it is being stored.
MEETING: dict[str, list[RequestType]] = {
    "meta": [
        RequestType.REGISTER,
        RequestType.ROUTES,
        RequestType.FORGET_SERVER,
        RequestType.MOVE_ROUTE,
        RequestType.SLOTS,
        RequestType.MOVE_SLOTS,
        RequestType.SETTLE_SLOTS,
        RequestType.META_SUBJECTS,
        RequestType.PUSH_TARGETS,
        RequestType.SET_PUSH_TARGET,
        RequestType.DELETE_PUSH_TARGET,
        RequestType.TOKENS,
        RequestType.SET_TOKEN,
        RequestType.REVOKE_TOKEN,
    ],
    "delay": [
        RequestType.SEND,
        RequestType.SEND,
        RequestType.OUTCOME,
        RequestType.TARGET_LOST,
        RequestType.TARGET_ACCEPT,
        RequestType.TRUST_CLOCK,
        RequestType.TARGETS,
        RequestType.CANCEL,
        RequestType.GET,
        RequestType.SET_QUOTA,
        RequestType.QUOTAS,
        RequestType.DUE_HOURS,
        RequestType.PLACES,
    ],
    "realtime": [
        RequestType.HELLO,
        RequestType.ORIGIN_ACCEPT,
        RequestType.DISPATCH,
        RequestType.PULL,
        RequestType.PULL,
        RequestType.ACK,
        RequestType.NACK,
        RequestType.RETRY,
        RequestType.REJECT,
        RequestType.PULL_END,
        RequestType.SUBSCRIBE,
        RequestType.DELETE_GROUP,
        RequestType.MOVE_GROUP,
        RequestType.PAUSE_GROUP,
        RequestType.UNFINISHED,
        RequestType.GROUPS,
    ],
}

Case = tuple[RequestType, dict[str, HeadValue], bytes]


class Handle(NamedTuple):
    """Messages that a server has given out."""

    subject: str
    group: str
    incarnation: int
    first: int
    rows: int


class Session(NamedTuple):
    """What the requests of one connection refer to, so that some of them are taken: a greeted origin at its target."""

    log_id: int
    target: int
    epoch: int


class Requests:
    """Cases for one role, from one seed."""

    def __init__(self, role: str, random: Random, now_ms: int) -> None:
        self._role = role
        self._random = random
        self._now_ms = now_ms
        self._number = 0
        self._types = list(SPECS[role])
        self._pulls: dict[int, tuple[str, str]] = {}  # Subject and group of the PULLs of one connection, by id.
        self._given: deque[Handle] = deque(maxlen=HANDLES_KEPT)
        self.true_handles = 0  # How many were sent, as they were given out or near it.

    def heard(self, answer: Frame) -> None:
        """Remember what a PULL has brought, to acknowledge it truly, in part, twice and along with what is no one's."""
        names = self._pulls.pop(answer.request_id, None)
        if names is not None and "parts" in answer.head:
            incarnation = need_u64(answer.head, "incarnation")
            for first, _, count, _ in need_rows(answer.head, "parts", 4):
                self._given.append(Handle(*names, incarnation, first, count))

    def meeting(self, session: Session | None) -> list[Case]:
        """Requests about one and the same thing, for several connections at once."""
        random = self._random
        number, subject = random.randrange(1, 4), random.choice(values.SUBJECTS[:3])
        same: dict[str, HeadValue] = {
            "log_id": number,
            "to": number,
            "subject": subject,
            "subjects": [subject],
            "group": random.choice(values.GROUPS[:2]),
            "assign": True,
        }
        cases: list[Case] = []
        sent = self._body(RequestType.SEND, session)
        for _ in range(random.choice([2, 3, 8])):
            kind = random.choice(MEETING[self._role])
            head = self._head(kind, session)
            if kind not in (RequestType.ACK, RequestType.NACK, *LATER):
                head |= {name: value for name, value in same.items() if name in head}
            cases.append((kind, head, sent if kind is RequestType.SEND else self._body(kind, session)))
        return cases

    def sweep(self) -> Iterator[Case]:
        """Each field of each type at each boundary value, the others as they should be; each field missing."""
        for kind, fields in SPECS[self._role].items():
            for name in fields:
                for value in BOUNDARY:
                    yield kind, {**self._head(kind, None), name: value}, self._body(kind, None)
                whole = self._head(kind, None)
                whole.pop(name, None)
                yield kind, whole, self._body(kind, None)

    def around(self, among: Sequence[HeadValue]) -> Iterator[tuple[str, HeadValue, Case]]:
        """Each field of each type at each of these values: field, value, and the request that has it."""
        for kind, fields in SPECS[self._role].items():
            for name in fields:
                for value in among:
                    yield name, value, (kind, {**self._head(kind, None), name: value}, self._body(kind, None))

    def swept(self, request_id: int, case: Case) -> bytes:
        """The frame of one case of the sweep, or of a meeting."""
        kind, head, body = case
        self._keep(request_id, kind, head)
        return frame(kind, request_id, _packed(head), body)

    def drawn(self, request_id: int, session: Session | None) -> bytes:
        """A mutated request."""
        random = self._random
        kind: int = random.choice(self._types)
        share = SHARES.get(kind)
        if share is not None and random.random() > share:
            kind = RequestType.PING
        head, body = self._head(kind, session), self._body(kind, session)
        self._of_many(kind, head)
        chance = random.random()
        self._keep(request_id, kind, head)
        if chance < SHARE_OF_VALID:
            return frame(kind, request_id, _packed(head), body)
        if chance < 0.6:
            for _ in range(random.choice([1, 1, 2, 3])):
                self._change(head)
            return frame(kind, request_id, _packed(head), body)
        if chance < 0.7:
            return frame(kind, request_id, random.choice(RAW_HEADS), body)
        if chance < 0.8:
            return frame(kind, request_id, flipped(_packed(head), random), body)
        if chance < 0.96 or not body:
            return frame(kind, request_id, _packed(head), self._mutated(body) if body else b"")
        if chance < 0.98:
            kind = random.choice([0, 9, 99, 255, *RequestType])
            return frame(kind, request_id, _packed(head), body)
        # The framing itself: this ends the connection.
        return flipped(frame(kind, request_id, _packed(head), body), random)

    def _head(self, kind: int, session: Session | None) -> dict[str, HeadValue]:
        fields = SPECS[self._role].get(RequestType(kind), {})
        head = {
            name: make(self._random)
            for name, make in fields.items()
            if not (name in OF_A_GROUP or name in SELDOM.get(kind, ())) or self._random.random() < SHARE_OF_TERMS
        }
        if kind in WORDS and self._given and self._random.random() < SHARE_OF_TRUE_HANDLES:
            true = self._true_handles()
            if kind in LATER:
                field, *rest = LATER[RequestType(kind)]
                true[field] = [[*need_row(handle), *rest] for handle in need_row(true.pop("handles"))]
            head |= true
        if session is not None and kind == RequestType.DISPATCH:
            head |= {"session": 1, "epoch": session.epoch}
        if session is not None and kind == RequestType.HELLO:
            # Another origin than the connection's own, which a newer hello would end.
            head["target"] = session.target
        return head

    def _of_many(self, kind: int, head: dict[str, HeadValue]) -> None:
        """Have some requests name several subjects."""
        if kind == RequestType.SUBSCRIBE:
            del head[self._random.choice(["subjects", "pattern"])]
        handles = head.get("handles")
        if isinstance(handles, list) and handles and self._random.random() < SHARE_OF_MANY:
            first = self._random.randrange(1, len(handles) + 1)
            head["subjects"] = [[head["subject"], first], ["fuzz.1", len(handles) - first]]

    def _keep(self, request_id: int, kind: int, head: Mapping[str, HeadValue]) -> None:
        if kind == RequestType.PULL:
            subject, group = head.get("subject"), head.get("group")
            if isinstance(subject, str) and isinstance(group, str):
                self._pulls[request_id] = (subject, group)

    def _true_handles(self) -> dict[str, HeadValue]:
        """Handles that were given out: as they were, a part of them, more than them, overlapping, repeated."""
        random = self._random
        chosen = random.choice(self._given)
        of_group = [each for each in self._given if (each.subject, each.group) == (chosen.subject, chosen.group)]
        handles: list[HeadValue] = []
        for each in random.choices(of_group, k=random.choice([1, 1, 3, 20])):
            first, count = each.first, each.rows
            change = random.randrange(8)
            if change == 0:
                first += random.randrange(count)
                count = max(1, count - random.randrange(count))
            elif change == 1:
                first, count = max(0, first - random.randrange(3)), count + random.choice([1, 5, 1 << 40])
            elif change == 2:
                first += random.choice([1, count, 1 << 40])
            handles.append([each.incarnation + (change == 3), first, count])
            if change == 4:
                handles.append([each.incarnation, first, count])
        self.true_handles += len(handles)
        return {"subject": chosen.subject, "group": chosen.group, "handles": handles}

    def _change(self, head: dict[str, HeadValue]) -> None:
        random = self._random
        name = random.choice([*head, "unknown", ""])
        chance = random.random()
        if chance < 0.15:
            head.pop(name, None)
        elif chance < 0.85:
            head[name] = random.choice(BOUNDARY)
        else:
            found = head.get(name)
            if isinstance(found, list) and found:
                found = list(found)
                at = random.randrange(len(found))
                inner = found[at]
                if isinstance(inner, list) and inner:
                    inner = list(inner)
                    inner[random.randrange(len(inner))] = random.choice(BOUNDARY)
                    found[at] = inner
                else:
                    found[at] = random.choice(BOUNDARY)
                head[name] = found

    def _body(self, kind: int, session: Session | None) -> bytes:
        if kind == RequestType.SEND:
            return b"".join(self._producer_batch() for _ in range(self._random.choice([1, 1, 1, 2, 8])))
        if kind in (RequestType.SEND_AGAIN, RequestType.SEND_DRAINED):
            return self._producer_batch()
        if kind == RequestType.DISPATCH:
            return b"".join(self._dispatch_batch(session) for _ in range(self._random.choice([1, 1, 4])))
        if kind in (RequestType.CANCEL, RequestType.GET, RequestType.RESCHEDULE):
            moves = kind == RequestType.RESCHEDULE
            return self._asked_batch(moves) if self._random.random() < 0.6 else self._asked_keys(moves)
        if kind == RequestType.PLACES:
            return encode_instants(self._instants(self._random.choice([1, 3, 40])))
        return b""

    def _asked_batch(self, moves: bool) -> bytes:
        rows = self._random.choice([1, 1, 3, 40])
        sequences = self._random.sample(range(1, 400), rows)
        asked = Asked(np.array(sequences, np.uint64), self._instants(rows), np.full(rows, self._now_ms, np.int64))
        return encode_asked(asked, self._instants(rows) if moves else None)

    def _asked_keys(self, moves: bool) -> bytes:
        random = self._random
        keys = [key or b"k" for key in self._keys(random.choice([1, 1, 3, 40]))]
        numbers = [random.randrange(40) for _ in keys] if random.random() < 0.5 else ()
        asked = AskedKeys(random.choice(values.SUBJECTS).encode(), keys, numbers)
        return encode_asked_keys(asked, self._instants(len(keys)) if moves else None)

    def _instants(self, count: int) -> Int64s:
        later_ms = [self._random.choice([0, 1_000, HOUR_MS * 30]) for _ in range(count)]
        return np.array(later_ms, np.int64) + self._now_ms

    def _keys(self, rows: int) -> list[bytes]:
        # So few that they meet, and some rows without one.
        return [self._random.choice([b"", b"k", b"12345678", "ä".encode(), b"k" * 200]) for _ in range(rows)]

    def _tags(self, rows: int) -> list[list[str]]:
        return [self._random.choice([[], ["eu"], ["eu", "urgent"], ["ä" * 32]]) for _ in range(rows)]

    def _producer_batch(self) -> bytes:
        random = self._random
        self._number += 1
        rows = random.choice([1, 1, 2, 40])
        names = [name.encode() for name in random.sample(values.SUBJECTS, random.randrange(1, min(rows, 5) + 1))]
        keys = self._keys(rows) if random.random() < 0.3 else None
        if self._number % RECORDED_EVERY == 0:
            return self._recorded_batch(names[0])
        return messages(
            [random.randbytes(random.choice([0, 1, 8, 100])) for _ in range(rows)],
            keys=keys,
            flags=None if keys is None or random.random() < 0.3 else [len(key) and random.randrange(3) for key in keys],
            tags=self._tags(rows) if random.random() < 0.3 else None,
            due=[self._now_ms + random.choice([0, 1_000, HOUR_MS * 30]) for _ in range(rows)],
            headers=[b""] * rows if random.random() < 0.3 else None,
            subjects=names,
            subject_of=[row % len(names) for row in range(rows)] if len(names) > 1 else None,
            part=ProducerPart(random.randrange(1, 30), self._number, 0),
        )

    def _recorded_batch(self, subject: bytes) -> bytes:
        """Records and messages behind them (docs/once.md), in any order, and one that is on the wrong subject."""
        kinds = [(0, 3), (1, 0), (0, 3), (0, 3), (1, 2), (1, self._number % 2 * 3)]
        keys = [b"", b"k", b"r" * 43, b"\xff"]
        return messages(
            [b"r" * 57 if flag == 3 else b"" for _, flag in kinds],
            keys=[
                keys[(self._number + row) % 3] if flag == 0 else b"r%d" % (row % 2)
                for row, (_, flag) in enumerate(kinds)
            ],
            flags=[flag for _, flag in kinds],
            due=[self._now_ms + 1_000 * row for row in range(len(kinds))],
            subjects=[b"%once", subject],
            subject_of=[number for number, _ in kinds],
            part=ProducerPart(1, self._number, 0),
        )

    def _dispatch_batch(self, session: Session | None) -> bytes:
        random = self._random
        self._number += 1
        origin, epoch = (1, 1) if session is None else (session.log_id, session.epoch)
        rows = random.choice([1, 3])
        # W right below: the target need not remember what is settled here.
        w = (epoch, self._number - 1) if self._number > 1 else (0, 0)
        part = DispatchPart(origin, epoch, self._number, *w, self._now_ms, self._now_ms // HOUR_MS)
        return messages(
            [b"x" * 8] * rows,
            tags=self._tags(rows) if random.random() < 0.3 else None,
            due=[self._now_ms] * rows,
            subjects=[random.choice(values.SUBJECTS).encode()],
            sequences=[self._number * 8 + row for row in range(rows)],
            kind=BatchKind.DISPATCH,
            part=part,
        )

    def _mutated(self, body: bytes) -> bytes:
        """A body with a few fields changed, mostly with checksums that hold all the same."""
        random = self._random
        changed = bytearray(body)
        for _ in range(random.choice([1, 1, 2, 4])):
            width = random.choice([1, 2, 4, 8])
            at = random.randrange(0, max(1, min(len(changed), 400) - 8)) & -width
            value = random.choice(NUMBERS) & ((1 << 8 * width) - 1)
            changed[at : at + width] = value.to_bytes(width, "little")
        if random.random() < 0.1:
            del changed[random.randrange(len(changed)) & -8 :]
        return bytes(with_true_checksums(changed)) if random.random() < 0.9 and len(changed) > 40 else bytes(changed)


def frame(kind: int, request_id: int, packed: bytes, body: bytes = b"", flags: int = 0) -> bytes:
    """One frame with a checksum that holds; the body is cut to whole words."""
    body = body[: len(body) & -8]
    begin = HEADER.pack(MAGIC, VERSION, kind & 255, flags, request_id, len(packed), len(body))
    checksum = crc32c(packed, crc32c(begin)).to_bytes(4, "little")
    assert len(begin) + 4 == HEADER_BYTES
    return b"".join((begin, checksum, packed, bytes(-len(packed) & 7), body))


def _packed(head: Mapping[str, HeadValue]) -> bytes:
    packed: bytes = msgpack.packb(head)
    return packed


def need_row(value: HeadValue) -> list[HeadValue]:
    """A list that was made here."""
    assert isinstance(value, list)
    return value


def flipped(data: bytes, random: Random) -> bytes:
    """The same bytes, some of which are others."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 5])):
        if changed:
            changed[random.randrange(len(changed))] = random.choice([0, 1, 127, 128, 255, random.randrange(256)])
    return bytes(changed)
