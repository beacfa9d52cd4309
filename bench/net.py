"""Micro-benchmark of frames and connections: one JSON line a figure, done in well under a minute.

Run ``python -m bench.net [--seconds 1.0]``. The echo has client and server in one process and loop, so a figure of it
is what both sides cost together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Coroutine

import uvloop

from delayd.address import Endpoint
from delayd.errors import DelaydError
from delayd.net.connection import Connection
from delayd.net.entry import connect
from delayd.net.server import Server
from delayd.net.timer import Timer
from delayd.wire.frame import Frame, FrameReader, encode_frame

HOST = "127.0.0.1"
REPEATS = 5
SMALL_BODY = bytes(352)  # About a batch of one message of 200 bytes.
LARGE_BODY = bytes(2 << 20)  # About a dispatch frame of 10,000 such messages.


class Echo:
    """Answers every request with its own body."""

    def connected(self, connection: Connection) -> None:
        """It keeps nothing of a connection."""

    def received(self, connection: Connection, frame: Frame) -> None:
        connection.answer(frame.request_id, {}, [frame.body])

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """It kept nothing of the connection."""

    def crashed(self, error: Exception) -> None:
        raise error


def main() -> None:
    """Run every benchmark and print its figures."""
    parser = argparse.ArgumentParser(description="Measure frames and connections.")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each echo runs")
    seconds = parser.parse_args().seconds
    bench_encode()
    bench_read(count=500, repeats=100, body=SMALL_BODY, name="read: small frames")
    bench_read(count=8, repeats=50, body=LARGE_BODY, name="read: frames of 2 MiB")
    for name, body, depth in (
        ("echo: small, one at a time", SMALL_BODY, 1),
        ("echo: small, 64 at a time", SMALL_BODY, 64),
        ("echo: small, 512 at a time", SMALL_BODY, 512),
        ("echo: 2 MiB, 4 at a time", LARGE_BODY, 4),
    ):
        uvloop.run(echo(name, body, depth, seconds))
    uvloop.run(timer_lateness())


def bench_encode() -> None:
    """Lay out frames of one small batch."""
    count = 50_000
    body = [SMALL_BODY]

    def encode() -> None:
        for request_id in range(count):
            encode_frame(20, request_id, {}, body)

    report("encode: small frames", "frames/s", [count / timed_s(encode) for _ in range(REPEATS)])


def bench_read(count: int, repeats: int, body: bytes, name: str) -> None:
    """Cut a stream into frames, the copy that stands for the socket's included."""
    stream = memoryview(b"".join(b"".join(encode_frame(20, number, {}, [body])) for number in range(count)))

    def read() -> None:
        reader = FrameReader()
        for _ in range(repeats):
            position = 0
            while position < len(stream):
                room = reader.get_buffer()
                piece = stream[position : position + len(room)]
                room[: len(piece)] = piece
                reader.received(len(piece))
                position += len(piece)

    seconds = [timed_s(read) for _ in range(REPEATS)]
    report(name, "frames/s", [count * repeats / taken for taken in seconds], body_bytes=len(body))


def echo(name: str, body: bytes, depth: int, seconds: float) -> Coroutine[object, object, None]:
    """Keep `depth` requests under way for a while."""

    async def measure() -> None:
        server = Server(Echo())
        client = await connect(await server.listen(Endpoint(HOST, 0)))
        rates: list[float] = []
        delays_ms: list[float] = []
        for _ in range(REPEATS):
            done = await ask_for(client, body, depth, seconds / REPEATS, delays_ms)
            rates.append(done / (seconds / REPEATS))
        report(name, "round trips/s", rates, body_bytes=len(body), p99_ms=percentile(delays_ms, 99))
        client.close()
        await server.close()

    return measure()


async def ask_for(client: Connection, body: bytes, depth: int, seconds: float, delays_ms: list[float]) -> int:
    """Ask again at each answer until the time is over; returns how many answers came."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    end = time.perf_counter() + seconds
    done = 0
    under_way = depth

    def ask() -> None:
        asked = time.perf_counter()

        def answered(answer: Frame | DelaydError) -> None:
            nonlocal done, under_way
            if isinstance(answer, DelaydError):
                raise answer
            now = time.perf_counter()
            delays_ms.append((now - asked) * 1000)
            done += 1
            if now < end:
                ask()
                return
            under_way -= 1
            if not under_way:
                over.set_result(None)

        client.call(20, {}, [body], answered)

    for _ in range(depth):
        ask()
    await over
    return done


async def timer_lateness() -> None:
    """How late the timer fires, on a loop with nothing else to do."""
    loop = asyncio.get_running_loop()
    fired = asyncio.Event()
    timer = Timer(loop, fired.set)
    late_ms: list[float] = []
    for number in range(300):
        delay_ms = 0.3 + number % 7 * 0.45
        due = time.perf_counter() + delay_ms / 1000
        timer.set_after_ms(delay_ms)
        await fired.wait()
        late_ms.append((time.perf_counter() - due) * 1000)
        fired.clear()
    timer.close()
    report("timer: lateness", "ms", late_ms, p99=percentile(late_ms, 99))


def timed_s(work: Callable[[], None]) -> float:
    """The seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def percentile(values: list[float], percent: int) -> float:
    """The value that `percent` of them do not exceed."""
    return round(sorted(values)[min(len(values) * percent // 100, len(values) - 1)], 3)


def report(name: str, unit: str, values: list[float], **more: float) -> None:
    """Print one figure as one JSON line."""
    figure = {
        "bench": "net",
        "name": name,
        "unit": unit,
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }
    print(json.dumps(figure | more))


if __name__ == "__main__":
    main()
