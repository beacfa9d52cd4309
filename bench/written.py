"""Bytes written to disk per message of 200 bytes, over all logs of both servers, from the send to the acknowledgement.

Messages are sent in batches, handed over, pulled and acknowledged; the delay server makes a checkpoint and both stop,
so all that will be written of them is written. Two figures: what the kernel counted for both processes in their lives,
which is what the disk had to write, and the lengths of all files, which is what is kept.
"""

import uvloop

from bench.arrivals import consume
from bench.figures import Figures
from bench.messages import BODY_BYTES, now_ms, send_batches, spread
from bench.process import file_bytes, written_by_children_bytes
from bench.redis_load import fill
from bench.redis_peer import Line, Taker, redis_server
from bench.servers import Servers, servers
from delayd.client.producer import AsyncProducer

SUBJECT = "bench.written"
AHEAD_MS = (4_000, 8_000)
LIMIT_S = 30
REDIS_ROWS = 1_000


def written(messages: int) -> Figures:
    """Through both servers."""

    async def run(running: Servers) -> int:
        async with AsyncProducer(running.meta) as producer:
            await send_batches(producer, SUBJECT, spread(messages, now_ms() + AHEAD_MS[0], now_ms() + AHEAD_MS[1]))
        arrivals = await consume(running.meta, [SUBJECT], messages, LIMIT_S)
        await running.checkpoint("delay")
        return arrivals.count

    with servers("realtime", "delay") as running:
        count = uvloop.run(run(running))
        before = written_by_children_bytes()
        for role in ("delay", "realtime"):
            running.stop(role)
        disk = written_by_children_bytes() - before
        return {"messages": count, "lost": messages - count, **_times(messages, disk, file_bytes(running.data))}


def redis_written(messages: int) -> Figures:
    """Through Redis: scheduled, moved, popped."""
    with redis_server() as server:
        with Line(server.port) as line:
            fill(line, spread(messages, now_ms() - AHEAD_MS[1], now_ms() - AHEAD_MS[0]))
            taker = Taker(line, REDIS_ROWS)
            taken = 0
            while taken < messages:
                taken += len(taker.take())
            line.settle()
        before = written_by_children_bytes()
        server.stop()
        disk = written_by_children_bytes() - before
        return {"messages": taken, **_times(messages, disk, file_bytes(server.append_only_folder))}


def _times(messages: int, disk: int, files: int) -> dict[str, float]:
    return {
        "disk_b": round(disk / messages, 1),
        "disk_times": round(disk / messages / BODY_BYTES, 2),
        "files_b": round(files / messages, 1),
        "files_times": round(files / messages / BODY_BYTES, 2),
    }
