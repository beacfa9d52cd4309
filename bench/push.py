"""What push costs: how fast due messages are POSTed to a server of this machine, and how late at a steady rate.

Run ``python -m bench.push [--burst 20000] [--rate 500] [--seconds 20]``: one JSON line. Bodies have 200 bytes. The
burst is due before its target is there; its rate counts from the first POST to the last. Steady messages are late from
their due instants to the receiver, which runs beside the servers. Processor time is the gateway's.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvloop
from numpy.typing import NDArray

import delayd
from bench.cpu_side import cpu_ms
from bench.figures import Figures
from bench.servers import servers
from delayd.secret import SECRET_FILE

BODY_BYTES = 200
BEGIN_S = 3.0  # Steady messages begin so much later, when all are sent.
ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"
LIMIT_S = 120.0
Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]
OF_BURST, OF_RATE = "bench.burst", "bench.rate"


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.push", description="Measure push.")
    parser.add_argument("--burst", type=int, default=20_000)
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--seconds", type=int, default=20)
    wanted = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url, heard = stack.enter_context(_receiver())
        running = stack.enter_context(servers("realtime", "delay"))
        pid, port = stack.enter_context(_gateway(running.meta, running.data))
        figures = _burst(running.meta, port, pid, url, heard, wanted.burst)
        figures |= _steady(running.meta, port, pid, url, heard, wanted.rate, wanted.seconds)
    print(json.dumps({"bench": "push", **figures}), flush=True)


def _burst(meta: str, port: int, pid: int, url: str, heard: Connection, count: int) -> Figures:
    with delayd.Producer(meta) as producer:
        producer.send_batch(OF_BURST, [_body(number) for number in range(count)], delay=timedelta(0))
    before_ms = cpu_ms(pid)
    _create(port, OF_BURST, url)
    _, came_at = _came(heard, count)
    cpu_us = (cpu_ms(pid) - before_ms) * 1_000 / count
    return {"burst_s": round((count - 1) / float(came_at.max() - came_at.min())), "burst_cpu_us": round(cpu_us)}


def _steady(meta: str, port: int, pid: int, url: str, heard: Connection, rate: int, seconds: int) -> Figures:
    _create(port, OF_RATE, url)
    count = rate * seconds
    due_ms = round((time.time() + BEGIN_S) * 1_000) + np.arange(count) * 1_000 // rate
    with delayd.Producer(meta) as producer:
        producer.send_batch(OF_RATE, [_body(number) for number in range(count)], deliver_at_ms=due_ms)
    before_ms = cpu_ms(pid)
    numbers, came_at = _came(heard, count)
    late_ms: Float64s = came_at * 1_000.0 - due_ms[numbers]
    figures: Figures = {"rate_s": rate, "rate_cpu_us": round((cpu_ms(pid) - before_ms) * 1_000 / count)}
    for name, share in (("late_p50_ms", 50), ("late_p99_ms", 99), ("late_max_ms", 100)):
        figures[name] = round(float(np.percentile(late_ms, share)), 1)
    return figures


def _body(number: int) -> bytes:
    return b"%d " % number + b"x" * (BODY_BYTES - len(str(number)) - 1)


def _create(port: int, subject: str, url: str) -> None:
    body = json.dumps({"name": subject, "subject": subject, "url": url}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/push", body, {"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        answer.read()


def _came(heard: Connection, count: int) -> tuple[Int64s, Float64s]:
    """The numbers of so many messages, each once, and when each came."""
    heard.send(count)
    if not heard.poll(LIMIT_S):
        raise RuntimeError("not all messages came")
    numbers, came_at = heard.recv()
    if len(np.unique(numbers)) != count:
        raise RuntimeError("a message came twice")
    return np.array(numbers), np.array(came_at)


@contextlib.contextmanager
def _gateway(meta: str, data: Path) -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-m", "delayd", "gateway", "--meta", meta, "--port", "0", "--allow-private"]
    command += ["--secret-file", str(data / SECRET_FILE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.pid, int(child.stdout.readline().split()[2].rpartition(":")[2])
        finally:
            child.terminate()


@contextlib.contextmanager
def _receiver() -> Iterator[tuple[str, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_receive, args=(theirs,))
    child.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/hook", ours
    finally:
        child.terminate()
        child.join()


def _receive(told: Connection) -> None:
    uvloop.run(_serve(told))


async def _serve(told: Connection) -> None:
    numbers: list[int] = []
    came_at: list[float] = []
    wanted: list[int] = []

    class Hook(asyncio.Protocol):
        def __init__(self) -> None:
            self._rest = b""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._transport = transport

        def data_received(self, data: bytes) -> None:
            self._rest += data
            while (end := self._rest.find(b"\r\n\r\n")) >= 0 and len(self._rest) >= end + 4 + BODY_BYTES:
                numbers.append(int(self._rest[end + 4 :].split(b" ", 1)[0]))
                came_at.append(time.time())
                self._rest = self._rest[end + 4 + BODY_BYTES :]
                self._transport.write(ANSWER)
            tell()

    def tell() -> None:
        if wanted and len(numbers) >= wanted[0]:
            os.set_blocking(told.fileno(), True)  # The loop has made it one that takes only what fits its buffer.
            told.send(([*numbers], [*came_at]))
            numbers.clear()
            came_at.clear()
            wanted.clear()

    def ask() -> None:
        wanted.append(told.recv())
        tell()

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Hook, "127.0.0.1", 0)
    loop.add_reader(told.fileno(), ask)
    told.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


if __name__ == "__main__":
    main()
