"""What HTTP costs: sends through a gateway, one at a time on kept connections, and as streams: of lines, of lines with
a key each, and of msgpack; pulls of ten messages, and acknowledgements of one and of ten.

Run ``python -m bench.gateway [--singles 20000] [--stream 200000] [--pulls 2000] [--connections 64]``: one JSON line.
Messages have 200 bytes; those that are sent are due in an hour. Each answer comes when what it says is durable.
Processor time is the gateway's. ``plain_s`` and ``plain_cpu_us`` are of a request that asks no server, `/healthz`, in
the same run: how fast this machine is, and what HTTP costs by itself.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import msgpack
import uvloop

from bench.cpu_side import cpu_ms
from bench.figures import Figures
from bench.servers import servers

BODY = b"x" * 200
WARM = 200
STREAM_HEAD = (
    b"POST /v1/subjects/bench/messages HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
    b"content-type: %b\r\n\r\n"
)
NDJSON, MSGPACK = b"application/x-ndjson", b"application/msgpack"
SINGLE = b"POST /v1/subjects/bench/messages?delay=1h HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 200\r\n\r\n" + BODY
LINE = json.dumps({"body": BODY.decode(), "delay": "1h"}).encode() + b"\n"
KEYED_LINE = b'{"key":"%d",' + LINE[1:]
MAP = msgpack.packb({"body": BODY, "delay": "1h"})
ANSWER = b"sequence"  # Once in each answer of a message that is kept.
CHUNK_ROWS = 500
PLAIN = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
PULL_ROWS = 10
DUE_ROWS = 1_000  # In one list.
DUES = json.dumps([{"body": BODY.decode(), "delay_ms": 0}] * DUE_ROWS).encode()
DUE = (
    b"POST /v1/subjects/due/messages HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(DUES), DUES)
)
PULL = (
    b"POST /v1/subjects/due/groups/g/pull HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 34\r\n\r\n"
    b'{"max_messages":10,"wait_ms":1000}'
)
ACK = b"POST /v1/leases/ack HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description="Measure sends by HTTP.")
    parser.add_argument("--singles", type=int, default=20_000)
    parser.add_argument("--stream", type=int, default=200_000)
    parser.add_argument("--pulls", type=int, default=2_000)
    parser.add_argument("--connections", type=int, default=64)
    wanted = parser.parse_args()
    with servers("realtime", "delay") as running, serving_gateway(running.meta) as (pid, port):
        figures = uvloop.run(_measure(pid, port, wanted.singles, wanted.stream, wanted.connections))
        figures |= uvloop.run(_measure_pulls(pid, port, wanted.pulls, wanted.connections))
    print(json.dumps({"bench": "gateway", "connections": wanted.connections, **figures}), flush=True)


@contextlib.contextmanager
def serving_gateway(meta: str) -> Iterator[tuple[int, int]]:
    """A gateway for the length of the block: its pid and its port."""
    command = [sys.executable, "-m", "delayd", "gateway", "--meta", meta, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.pid, int(child.stdout.readline().split()[2].rpartition(":")[2])
        finally:
            child.terminate()


async def _measure(pid: int, port: int, singles: int, stream: int, connections: int) -> Figures:
    await _send_singles(port, WARM)
    before_ms, began = cpu_ms(pid), time.perf_counter()
    await asyncio.gather(*(_ask(port, PLAIN, singles // connections) for _ in range(connections)))
    sent = singles // connections * connections
    plain: Figures = {"plain_s": round(sent / (time.perf_counter() - began))}
    plain["plain_cpu_us"] = round((cpu_ms(pid) - before_ms) * 1_000 / sent, 1)
    before_ms, began = cpu_ms(pid), time.perf_counter()
    await asyncio.gather(*(_send_singles(port, singles // connections) for _ in range(connections)))
    figures: Figures = {**plain, "singles_s": round(sent / (time.perf_counter() - began))}
    figures["single_cpu_us"] = round((cpu_ms(pid) - before_ms) * 1_000 / sent, 1)
    for name, kind, row in (("stream", NDJSON, LINE), ("keyed", NDJSON, KEYED_LINE), ("packed", MSGPACK, MAP)):
        chunks = [_chunk(row, first) for first in range(0, stream, CHUNK_ROWS)]
        before_ms, began = cpu_ms(pid), time.perf_counter()
        sent = await _send_stream(port, STREAM_HEAD % kind, chunks)
        figures[f"{name}_s"] = round(sent / (time.perf_counter() - began))
        figures[f"{name}_row_cpu_us"] = round((cpu_ms(pid) - before_ms) * 1_000 / sent, 1)
    return figures


async def _measure_pulls(pid: int, port: int, pulls: int, connections: int) -> Figures:
    """Pull what is due by ten on all connections; then acknowledge half of it one by one, and the rest by ten."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(0, pulls * PULL_ROWS, DUE_ROWS):
        await _asked(reader, writer, DUE)
    writer.close()
    leases: list[list[str]] = []

    async def pull() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while pulled := json.loads(await _asked(reader, writer, PULL))["messages"]:
            leases.append([each["lease"] for each in pulled])
        writer.close()

    async def ack(words: list[list[str]]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while words:
            body = json.dumps({"leases": words.pop()}).encode()
            await _asked(reader, writer, ACK % len(body) + body)
        writer.close()

    before_ms = cpu_ms(pid)
    await asyncio.gather(*(pull() for _ in range(connections)))
    figures: Figures = {"pulled": sum(map(len, leases)), "pulls": len(leases)}
    figures["pull_cpu_us"] = round((cpu_ms(pid) - before_ms) * 1_000 / len(leases), 1)
    half = len(leases) // 2
    for name, words in (
        ("ack_cpu_us", [[lease] for some in leases[:half] for lease in some]),
        ("ack_10_cpu_us", leases[half:]),
    ):
        count, before_ms = len(words), cpu_ms(pid)
        await asyncio.gather(*(ack(words) for _ in range(connections)))
        figures[name] = round((cpu_ms(pid) - before_ms) * 1_000 / count, 1)
    return figures


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 20"):
        raise RuntimeError(f"a request failed: {head.decode()}")
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    return await reader.readexactly(int(length))


async def _ask(port: int, request: bytes, count: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        await _asked(reader, writer, request)
    writer.close()


async def _send_singles(port: int, count: int) -> None:
    await _ask(port, SINGLE, count)


def _chunk(row: bytes, first: int) -> bytes:
    """The next rows of a stream; one with a %d has its number there."""
    numbers = range(first, first + CHUNK_ROWS)
    rows = b"".join([row % number for number in numbers]) if b"%d" in row else row * CHUNK_ROWS
    return b"%x\r\n%s\r\n" % (len(rows), rows)


async def _send_stream(port: int, head: bytes, chunks: list[bytes]) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        writer.write(head)
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    sending = asyncio.get_running_loop().create_task(send())
    answers, expected, rest = 0, len(chunks) * CHUNK_ROWS, b""
    while answers < expected:
        heard = await reader.read(1 << 20)
        if not heard:
            raise RuntimeError("the stream ended before its last answer")
        answers += (rest + heard).count(ANSWER)
        rest = heard[1 - len(ANSWER) :]  # The word may be cut here, but is not whole in it.
    await sending
    writer.close()
    return expected


if __name__ == "__main__":
    main()
