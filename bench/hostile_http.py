"""What callers of a gateway feel of others who mean ill: how long sends take, one at a time on each of eight kept
connections, 200 a second, while nobody else asks, and while another process asks in each of these ways.

Run ``python -m bench.hostile_http [--seconds 3] [--rate 200]``: one JSON line, milliseconds. ``rate`` counts the
hostile requests of a second, too. Each send is durable before its answer. Figures of ``alone`` are of both ends of the
run; a ratio is to the p99 of these. With more seconds the gateway's collection of each minute falls into one of them,
and its p99 is 10 ms.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

import numpy as np
import uvloop

from bench.figures import Figures
from bench.gateway import serving_gateway
from bench.servers import servers
from delayd.net.budget import raise_file_limit

HOST = "127.0.0.1"
LINES = 8
POST = b"POST /v1/subjects/bench/messages?delay=1h HTTP/1.1\r\nhost: 127.0.0.1\r\n"
SEND = POST + b"content-length: 200\r\n\r\n" + b"x" * 200
JSON = POST + b"content-type: application/json\r\nconnection: close\r\n"
IDLE = 4_000
SLOW = 500
ENDLESS = 8
CHUNK = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
CHUNK_S = 0.02  # Between two chunks of a body without end: 25 MB/s of all such bodies together.
BEGIN_S = 1.0  # Attacks are under way when the clock begins.
LIMIT_S = 30.0

Attack = Callable[[int, float, float], Awaitable[object]]
"""Asks the gateway at a port, so many times a second, until an instant of the loop's clock."""


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostile_http", description="Measure sends beside attacks.")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rate", type=int, default=200)
    wanted = parser.parse_args()
    raise_file_limit()
    with servers("realtime", "delay") as running, serving_gateway(running.meta) as (_, port):
        uvloop.run(_sends(port, wanted.rate, 1.0))
        alone = uvloop.run(_sends(port, wanted.rate, wanted.seconds))
        beside: dict[str, list[float]] = {}
        for name in ATTACKS:
            with _attacked(name, port, wanted.rate, wanted.seconds):
                time.sleep(BEGIN_S)
                beside[name] = uvloop.run(_sends(port, wanted.rate, wanted.seconds))
        alone += uvloop.run(_sends(port, wanted.rate, wanted.seconds))
    figures: Figures = {"alone_p50_ms": _quantile(alone, 50), "alone_p99_ms": _quantile(alone, 99)}
    for name, took in beside.items():
        figures[f"{name}_p99_ms"] = _quantile(took, 99)
        figures[f"{name}_ratio"] = round(_quantile(took, 99) / _quantile(alone, 99), 2)
    print(json.dumps({"bench": "hostile_http", "rate_s": wanted.rate, **figures}), flush=True)


def _quantile(took: list[float], share: int) -> float:
    return round(float(np.percentile(took, share)) * 1_000, 2)


async def _sends(port: int, rate: int, seconds: float) -> list[float]:
    """How long each send took, from the instant at which it was to begin."""
    began = time.perf_counter()
    took: list[float] = []

    async def line(number: int) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        for count in range(number, int(rate * seconds), LINES):
            at = began + count / rate
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            writer.write(SEND)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
            if not head.startswith(b"HTTP/1.1 201"):
                raise RuntimeError(f"a send failed: {head.decode()}")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            await reader.readexactly(length)
            took.append(time.perf_counter() - at)
        writer.close()

    await asyncio.gather(*map(line, range(LINES)))
    return took


@contextlib.contextmanager
def _attacked(name: str, port: int, rate: int, seconds: float) -> Iterator[None]:
    child = multiprocessing.get_context("spawn").Process(target=_attack, args=(name, port, rate, seconds))
    child.start()
    try:
        yield
    finally:
        child.terminate()
        child.join()


def _attack(name: str, port: int, rate: int, seconds: float) -> None:
    raise_file_limit()
    uvloop.run(_until_end(name, port, rate, seconds))


async def _until_end(name: str, port: int, rate: int, seconds: float) -> None:
    await ATTACKS[name](port, rate, asyncio.get_running_loop().time() + seconds + 5 * BEGIN_S)


async def _asked(port: int, request: bytes) -> None:
    """Ask once, and read what is said until the connection ends."""
    with contextlib.suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(request)
            async with asyncio.timeout(LIMIT_S):
                while await reader.read(1 << 16):
                    pass
        finally:
            writer.close()


def _again(request: bytes) -> Attack:
    """Ask this again and again, each time over a connection of its own."""

    async def attack(port: int, rate: float, until: float) -> None:
        loop, under_way = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        began, count = loop.time(), 0
        while loop.time() < until:
            task = loop.create_task(_asked(port, request))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            count += 1
            await asyncio.sleep(max(0.0, began + count / rate - loop.time()))

    return attack


async def _idle(port: int, rate: float, until: float) -> None:
    """Take connections, and say nothing."""
    del rate
    held = [await asyncio.open_connection(HOST, port) for _ in range(IDLE)]
    await asyncio.sleep(until - asyncio.get_running_loop().time())
    for _, writer in held:
        writer.close()


async def _slow(port: int, rate: float, until: float) -> None:
    """Say a head a byte at a time."""
    del rate
    loop = asyncio.get_running_loop()

    async def one() -> None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, port)
            for at in range(len(POST)):
                if loop.time() >= until:
                    break
                writer.write(POST[at : at + 1])
                await asyncio.sleep(0.5)
            writer.close()

    await asyncio.gather(*(one() for _ in range(SLOW)))


async def _endless(port: int, rate: float, until: float) -> None:
    """Send a body without end, and another one when that is refused."""
    del rate
    loop = asyncio.get_running_loop()

    async def one() -> None:
        while loop.time() < until:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, port)
                writer.write(POST + b"transfer-encoding: chunked\r\n\r\n")
                while loop.time() < until:
                    writer.write(CHUNK)
                    await writer.drain()
                    await asyncio.sleep(CHUNK_S)
                writer.close()

    await asyncio.gather(*(one() for _ in range(ENDLESS)))


def _body(body: bytes) -> bytes:
    return JSON + b"content-length: %d\r\n\r\n" % len(body) + body


ATTACKS: Mapping[str, Attack] = {
    "idle": _idle,
    "slow_heads": _slow,
    "endless_bodies": _endless,
    "declared_4_gib": _again(POST + b"content-length: 4294967296\r\n\r\n"),
    "two_lengths": _again(POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
    "long_heads": _again(POST + b"x: " + b"y" * 1_000_000),
    "deep_json": _again(_body(b'{"body":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
    "many_names": _again(_body(b"{" + b",".join(b'"n%d":1' % number for number in range(10_000)) + b"}")),
    "packed_bodies": _again(_body(b"x").replace(b"connection", b"content-encoding: gzip\r\nconnection")),
    "tls_hello": _again(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 512),
}

if __name__ == "__main__":
    main()
