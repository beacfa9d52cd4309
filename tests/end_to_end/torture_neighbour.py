"""A hostile neighbour: somebody who reaches a server's port and sends what no client sends.

Invariant: it proves no secret and knows no subject, so nothing that it does may show but on its own connections.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence

from delayd.wire.frame import Head, encode_frame
from delayd.wire.requests import RequestType

CONNECTIONS = (4, 24)
PINGS = 400
HANDLES = 2_000
U64_MAX = (1 << 64) - 1
NEIGHBOUR_S = 1.5  # Then it goes, whatever the server has answered.


async def annoy(host: str, port: int, draw: random.Random) -> str:
    """Open some connections and send garbage, halves of frames, floods and extreme numbers; says how many."""
    count = draw.randint(*CONNECTIONS)
    attacks = [_attack(draw) for _ in range(count)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(NEIGHBOUR_S):
            await asyncio.gather(*(_send(host, port, data) for data in attacks))
    return f"a neighbour with {count} connections"


def _attack(draw: random.Random) -> bytes:
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(draw.randint(1, 4_000))
    if kind == 1:
        return b"".join(_frame(RequestType.PING, number, {}) for number in range(1, PINGS))
    if kind == 2:
        handles = [[U64_MAX - number, U64_MAX, U64_MAX] for number in range(HANDLES)]
        return _frame(RequestType.ACK, 1, {"subject": "nobody", "group": "nobody", "handles": handles})
    if kind == 3:
        head: Head = {"log_id": U64_MAX, "target": 0, "epoch": U64_MAX, "instance": 0, "session": U64_MAX}
        return _frame(RequestType.HELLO, 1, head | {"w_epoch": U64_MAX, "w_id": U64_MAX, "named_offset": U64_MAX})
    whole = _frame(RequestType.SEND, 1, {}, draw.randbytes(60_000))
    if kind == 4:
        return whole[: draw.randrange(len(whole))]
    changed = bytearray(whole)
    changed[draw.randrange(64)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _frame(kind: RequestType, request_id: int, head: Head, body: bytes = b"") -> bytes:
    parts: Sequence[bytes | bytearray | memoryview] = encode_frame(kind, request_id, head, (body,) if body else ())
    return b"".join(map(bytes, parts))


async def _send(host: str, port: int, data: bytes) -> None:
    # A server may be down, and may close what it does not understand.
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data)
            await writer.drain()
            while await reader.read(1 << 16):
                pass
        finally:
            writer.close()
