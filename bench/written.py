"""Bytes written to disk per message of 200 bytes, over all logs of both servers, from the send to the acknowledgement.

Messages are sent in batches, handed over, pulled and acknowledged, and both servers make a checkpoint: then all that
will be written of them is written. Two figures: what the kernel counted for both processes, which is what the disk had
to write, and the lengths of all files, which is what is kept.
"""

from datetime import timedelta

import uvloop

from bench.arrivals import consume
from bench.figures import Figures
from bench.messages import BODY_BYTES, now_ms, send_batches, spread
from bench.process import file_bytes, written_bytes
from bench.redis_load import fill
from bench.redis_peer import Line, Taker, redis_server
from bench.servers import Servers, servers
from delayd.client.producer import AsyncProducer

SUBJECT = "bench.written"
AHEAD_MS = (4_000, 8_000)
LIMIT_S = 30
REDIS_ROWS = 1_000
ROLES = ("delay", "realtime")


def written(messages: int) -> Figures:
    """Through both servers."""

    async def run(running: Servers) -> Figures:
        async with AsyncProducer(running.meta) as producer:
            await producer.send(SUBJECT + ".warm", b"warm", delay=timedelta(days=1))
            before = _written(running)
            await send_batches(producer, SUBJECT, spread(messages, now_ms() + AHEAD_MS[0], now_ms() + AHEAD_MS[1]))
        arrivals = await consume(running.meta, [SUBJECT], messages, LIMIT_S)
        for role in ROLES:
            await running.checkpoint(role)
        after = _written(running)
        disk, files = ((after[index] - before[index]) / messages for index in range(2))
        return {"messages": arrivals.count, "lost": messages - arrivals.count, **_times(disk, files)}

    with servers("realtime", "delay") as running:
        return uvloop.run(run(running))


def redis_written(messages: int) -> Figures:
    """Through Redis: scheduled, moved, popped."""
    with redis_server() as server, Line(server.port) as line:
        fill(line, spread(messages, now_ms() - AHEAD_MS[1], now_ms() - AHEAD_MS[0]))
        taker = Taker(line, REDIS_ROWS)
        taken = 0
        while taken < messages:
            taken += len(taker.take())
        line.settle()
        disk, files = written_bytes(server.pid), file_bytes(server.append_only_folder)
        return {"messages": taken, **_times(disk / messages, files / messages)}


def _written(running: Servers) -> tuple[int, int]:
    return sum(written_bytes(running.pid(role)) for role in ROLES), file_bytes(running.data)


def _times(disk: float, files: float) -> dict[str, float]:
    return {
        "disk_b": round(disk, 1),
        "disk_times": round(disk / BODY_BYTES, 2),
        "files_b": round(files, 1),
        "files_times": round(files / BODY_BYTES, 2),
    }
