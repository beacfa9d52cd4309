"""Memory of the delay server per pending message: before its checkpoint, in a loaded hour after it, and later.

Messages come in two equal halves, and what the second half added counts: buffers of a fixed size, which the first half
has filled (64 MiB of the newest log, and what the allocator keeps), are the server's and not the messages'.
"""

import asyncio
import time
from datetime import timedelta

import uvloop

from bench.far import over_two_years
from bench.figures import Figures
from bench.messages import BATCH_ROWS, HOUR_MS, Instants, now_ms, send_batches, spread
from bench.process import memory_bytes
from bench.redis_load import fill
from bench.redis_peer import Line, redis_server
from bench.servers import Servers, servers
from delayd.client.producer import AsyncProducer

SUBJECT = "bench.memory"
STILL_S = 0.5
STILL_BYTES = 512 << 10  # A smaller change counts as none.
STILL_WITHIN_S = 15
LOG_BYTES_MAX = 64 << 30  # So large that no run reaches a sixteenth of it, at which a checkpoint may begin.

# Only checkpoints that are asked for; and the whole coming hour is loaded, whatever the minute is.
OPTIONS = (
    *("--checkpoint-every-ms", str(HOUR_MS), "--load-ahead-ms", str(HOUR_MS)),
    *("--checkpoint-bytes", str(LOG_BYTES_MAX), "--replay-lag-bytes-max", str(LOG_BYTES_MAX)),
)


def memory(messages: int) -> Figures:
    """All three, each with a server of its own."""
    next_hour_ms = (now_ms() // HOUR_MS + 1) * HOUR_MS
    soon = spread(messages, next_hour_ms, next_hour_ms + HOUR_MS)
    later = over_two_years(messages)
    figures: Figures = {"messages": messages}
    for name, due, filed in (("before", later, False), ("loaded", soon, True), ("later", later, True)):
        with servers("delay", delay=OPTIONS) as running:
            empty, half, full = uvloop.run(_fill(running, due, filed))
        figures[f"{name}_b"] = round((full - half) / (messages / 2), 1)
        figures[f"{name}_total_b"] = round((full - empty) / messages, 1)
        figures[f"{name}_empty_mb"] = round(empty / 1e6, 1)
    return figures


def redis_memory(messages: int) -> Figures:
    """The same for the sorted set."""
    with redis_server() as server, Line(server.port) as line:
        sizes = [memory_bytes(server.pid)]
        due = over_two_years(messages)
        half = len(due) // 2
        for first, part in ((0, due[:half]), (half, due[half:])):
            fill(line, part, first * BATCH_ROWS)
            sizes.append(memory_bytes(server.pid))
    empty, middle, full = sizes
    return {
        "messages": messages,
        "pending_b": round((full - middle) / (messages / 2), 1),
        "pending_total_b": round((full - empty) / messages, 1),
    }


async def _fill(running: Servers, due: list[Instants], filed: bool) -> list[int]:
    """Memory of the empty server, with half and with all of the messages."""
    pid = running.pid("delay")
    async with AsyncProducer(running.meta) as producer:
        await producer.send(SUBJECT, b"warm", delay=timedelta(days=1))
        sizes = [await _still(pid)]
        half = len(due) // 2
        for part in (due[:half], due[half:]):
            await send_batches(producer, SUBJECT, part)
            if filed:
                await running.checkpoint("delay")
            sizes.append(await _still(pid))
    return sizes


async def _still(pid: int) -> int:
    """The memory of the server, once it has stopped changing."""
    end = time.monotonic() + STILL_WITHIN_S
    last = memory_bytes(pid)
    while True:
        await asyncio.sleep(STILL_S)
        now = memory_bytes(pid)
        if abs(now - last) < STILL_BYTES or time.monotonic() > end:
            return now
        last = now
