"""A client written from docs/protocol.md and docs/formats/batch.md alone: nothing of delayd is imported."""

import hashlib
import hmac
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgpack
from crc32c import crc32c

PING, STATUS = 1, 2
CHALLENGE, PROVE = 4, 5
ROUTES, META_SUBJECTS = 12, 13
SEND, OUTCOME = 20, 21
CANCEL, GET, RESCHEDULE = 26, 27, 28
PULL, ACK, NACK, GROUPS, SUBJECTS = 40, 41, 42, 43, 44

Value = object
Head = Mapping[str, Value]


class Answer(NamedTuple):
    """One frame: its type, flags, request_id, head and body."""

    kind: int
    flags: int
    request_id: int
    head: dict[str, Value]
    body: bytes

    @property
    def code(self) -> Value:
        """The code of an error answer; None for any other."""
        return self.head["code"] if self.flags & 2 else None


def listed(head: Head, name: str) -> list[Any]:
    """A field of a head that is a list."""
    value = head[name]
    assert isinstance(value, list)
    return value


def padding(size: int) -> bytes:
    """Zeros up to a multiple of 8."""
    return bytes(-size % 8)


def frame(kind: int, request_id: int, head: Head, body: bytes = b"", pad: bytes | None = None) -> bytes:
    """One request."""
    packed: bytes = msgpack.packb(head)
    checked = struct.pack("<IBBHIII", 0x31594C44, 1, kind, 0, request_id, len(packed), len(body))
    checksum = struct.pack("<I", crc32c(packed, crc32c(checked)))
    return checked + checksum + packed + (padding(len(packed)) if pad is None else pad) + body


class Raw:
    """A connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 20)
        self._last_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def write(self, data: bytes) -> None:
        """Write bytes as they are."""
        self._socket.sendall(data)

    def read(self) -> Answer:
        """The next frame; ConnectionError at the end."""
        header = self._exactly(24)
        magic, version, kind, flags, request_id, head_bytes, body_bytes, checksum = struct.unpack("<IBBHIIII", header)
        assert (magic, version) == (0x31594C44, 1)
        head = self._exactly(head_bytes + len(padding(head_bytes)))
        assert not head[head_bytes:].strip(b"\0")
        assert crc32c(head[:head_bytes], crc32c(header[:20])) == checksum
        return Answer(kind, flags, request_id, msgpack.unpackb(head[:head_bytes]), self._exactly(body_bytes))

    def ask(self, kind: int, head: Head, body: bytes = b"") -> Answer:
        """Ask, and wait for the answer."""
        self._last_id += 1
        self.write(frame(kind, self._last_id, head, body))
        answer = self.read()
        assert answer.request_id == self._last_id and answer.kind == kind and answer.flags & 1
        return answer

    def results(self, *batches: bytes) -> list[dict[str, Value]]:
        """Send batches in one frame; their results."""
        answer = self.ask(SEND, {}, b"".join(batches))
        assert answer.code is None, answer
        return listed(answer.head, "results")

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise ConnectionError("the server ended the connection")
            data += piece
        return bytes(data)


def prove(raw: Raw, secret: bytes) -> None:
    """Prove the secret as the page says, and check the server's proof."""
    nonce = bytes(range(32))
    said = raw.ask(CHALLENGE, {"nonce": nonce}).head
    ids = struct.pack("<QQ", said["log_id"], said["cluster_id"])
    shown = nonce + bytes(said["nonce"]) + ids + str(said["role"]).encode()  # type: ignore[call-overload]
    proof, own = (
        hmac.digest(secret, f"delayd 1, the {who} proves: ".encode() + shown, hashlib.sha256)
        for who in ("server", "dialler")
    )
    assert said["proof"] == proof
    assert raw.ask(PROVE, {"proof": own, "cluster_id": said["cluster_id"]}).code is None


def batch(
    producer_id: int,
    number: int,
    *,
    low_water: int = 0,
    rows: int = 1,
    due_ms: int | None = None,
    subjects: Sequence[bytes] = (b"raw",),
    headers: Sequence[bytes] | None = None,
    body: bytes = b"x",
) -> bytes:
    """A PRODUCER batch; row i has subject i of those given, round and round."""
    due_ms = int(time.time() * 1000) + 3_600_000 if due_ms is None else due_ms
    ends, end = [], 0
    for name in subjects:
        end += len(name)
        ends.append(end)
    table = struct.pack(f"<{len(ends)}I", *ends)
    heap = bytearray(table + padding(len(table)) + b"".join(subjects) + padding(end))
    columns = [(1, 8, struct.pack(f"<{rows}q", *[due_ms] * rows))]
    if len(subjects) > 1:
        columns.append((5, 4, struct.pack(f"<{rows}I", *(row % len(subjects) for row in range(rows)))))
    for column, items in ((8, headers), (9, [body] * rows)):
        if items is not None:
            item_ends = []
            for item in items:
                heap += padding(len(heap)) + item
                item_ends.append(len(heap))
            columns.append((column, 4, struct.pack(f"<{rows}I", *item_ends)))
    heap += padding(len(heap))
    return encoded(1, struct.pack("<QQQ", producer_id, number, low_water), rows, columns, bytes(heap), len(subjects))


def asked(*receipts: tuple[int, int, int], wanted_at_ms: int | None = None) -> bytes:
    """An ASKED batch of receipts: sequence, due instant and instant of acceptance; and to which one to move them."""
    rows = len(receipts)
    sequences, due_ms, accepted_ms = zip(*receipts, strict=True)
    columns = [
        (1, 8, struct.pack(f"<{rows}q", *due_ms)),
        (2, 8, struct.pack(f"<{rows}Q", *sequences)),
        (10, 8, struct.pack(f"<{rows}q", *accepted_ms)),
    ]
    if wanted_at_ms is not None:
        columns.append((21, 8, struct.pack(f"<{rows}q", *[wanted_at_ms] * rows)))
    return encoded(10, b"", rows, columns, b"", 0)


def encoded(
    kind: int, part: bytes, rows: int, columns: Sequence[tuple[int, int, bytes]], heap: bytes, subject_count: int
) -> bytes:
    """A batch of columns, each with its number, the bytes of an item, and its items."""
    place = 40 + len(part) + 8 * len(columns)
    directory, data = b"", b""
    for column, width, values in columns:
        directory += struct.pack("<HHI", column, width, place + len(data))
        data += values + padding(len(values))
    heap_offset = place + len(data)
    counts = (rows, heap_offset, len(columns), len(part), subject_count)
    header = struct.pack("<IBBHIIIHHI", 0x48435442, 1, kind, 0, heap_offset + len(heap), *counts)
    header += struct.pack("<II", crc32c(directory + data), crc32c(heap))
    return header + struct.pack("<I", crc32c(part, crc32c(header))) + part + directory + data + heap


def bodies_of(data: bytes) -> list[bytes]:
    """The bodies of a DISPATCH batch."""
    count, heap_offset, column_count, kind_bytes, subject_count = struct.unpack_from("<IIHHI", data, 12)
    places = {}
    for index in range(column_count):
        column, _, place = struct.unpack_from("<HHI", data, 40 + kind_bytes + 8 * index)
        places[column] = place
    (names_end,) = struct.unpack_from("<I", data, heap_offset + 4 * subject_count - 4)
    start = 4 * subject_count + len(padding(4 * subject_count)) + names_end
    start += len(padding(start))
    if 8 in places:
        (start,) = struct.unpack_from("<I", data, places[8] + 4 * (count - 1))
        start += len(padding(start))
    bodies = []
    for end in struct.unpack_from(f"<{count}I", data, places[9]):
        bodies.append(data[heap_offset + start : heap_offset + end])
        start = end + len(padding(end))
    return bodies
