"""What HTTP costs: sends through a gateway, one at a time on kept connections, and as one stream of lines.

Run ``python -m bench.gateway [--singles 20000] [--stream 200000] [--connections 64]``: one JSON line. Messages have 200
bytes and are due in an hour; each answer comes when the message is durable. Processor time is the gateway's.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import uvloop

from bench.cpu_side import cpu_ms
from bench.figures import Figures
from bench.servers import servers

BODY = b"x" * 200
WARM = 200
STREAM_HEAD = (
    b"POST /v1/subjects/bench/messages HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
    b"content-type: application/x-ndjson\r\n\r\n"
)
SINGLE = b"POST /v1/subjects/bench/messages?delay=1h HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 200\r\n\r\n" + BODY
LINE = json.dumps({"body": BODY.decode(), "delay": "1h"}).encode() + b"\n"
CHUNK_LINES = 500


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description="Measure sends by HTTP.")
    parser.add_argument("--singles", type=int, default=20_000)
    parser.add_argument("--stream", type=int, default=200_000)
    parser.add_argument("--connections", type=int, default=64)
    wanted = parser.parse_args()
    with servers("realtime", "delay") as running, serving_gateway(running.meta) as (pid, port):
        figures = uvloop.run(_measure(pid, port, wanted.singles, wanted.stream, wanted.connections))
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
    await asyncio.gather(*(_send_singles(port, singles // connections) for _ in range(connections)))
    sent = singles // connections * connections
    figures: Figures = {"singles_s": round(sent / (time.perf_counter() - began))}
    figures["single_cpu_us"] = round((cpu_ms(pid) - before_ms) * 1_000 / sent, 1)
    before_ms, began = cpu_ms(pid), time.perf_counter()
    sent = await _send_stream(port, stream)
    figures["stream_s"] = round(sent / (time.perf_counter() - began))
    figures["line_cpu_us"] = round((cpu_ms(pid) - before_ms) * 1_000 / sent, 1)
    return figures


async def _send_singles(port: int, count: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        writer.write(SINGLE)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 201 "):
            raise RuntimeError(f"a send failed: {head.decode()}")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
    writer.close()


async def _send_stream(port: int, count: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    chunk = LINE * CHUNK_LINES

    async def send() -> None:
        writer.write(STREAM_HEAD)
        for _ in range(count // CHUNK_LINES):
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    sending = asyncio.get_running_loop().create_task(send())
    answers = (await reader.readuntil(b"\r\n\r\n")).count(b'"sequence"')
    expected = count // CHUNK_LINES * CHUNK_LINES
    rest = b""
    while answers < expected:
        heard = await reader.read(1 << 20)
        if not heard:
            raise RuntimeError("the stream ended before its last answer")
        whole, _, rest = (rest + heard).rpartition(b"\n")
        answers += whole.count(b'"sequence"')
    await sending
    writer.close()
    return expected


if __name__ == "__main__":
    main()
