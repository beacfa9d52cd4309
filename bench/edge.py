"""How late near messages arrive over an hour's edge while far ones flood in, with a checkpoint always under way.

The coming hour falls due for its load in the midst of the flood, and begins in the midst of it too. It holds messages
already, which are due later. The servers' wall clock is set ahead, so that the edge comes when the run wants it.
"""

import asyncio
import tempfile
from pathlib import Path

import uvloop

from bench.arrivals import consume, percentiles
from bench.figures import Figures
from bench.messages import HOUR_MS, now_ms, send_batches, spread
from bench.near import CALM_S, RATE, flood
from bench.servers import Servers, servers
from bench.steady import DRAIN_S, producing, subject_name
from delayd.client.producer import AsyncProducer
from tests.end_to_end.wall_clock import WallClock

LATER = "bench.later"
PARTS = 4  # The flood comes in four parts: the load falls due after the first, the hour begins after the second.
FILL_S = 5  # Until the servers are up, with 50,000 messages a second more to fill the coming hour.
FILL_MESSAGES_S = 50_000
CHECKPOINT_BYTES = 64 << 20
LATER_MS = HOUR_MS // 2


def edge(flood_s: int, later: int) -> Figures:
    """Flood for so long; the coming hour holds ``later`` messages."""
    seconds = CALM_S + flood_s
    part_ms = 1_000 * flood_s // PARTS
    fill_s = FILL_S + later // FILL_MESSAGES_S

    async def run(running: Servers, clock: WallClock, edge_ms: int) -> Figures:
        async with AsyncProducer(running.meta) as producer:
            await send_batches(producer, LATER, spread(later, edge_ms + LATER_MS, edge_ms + HOUR_MS))
        await running.checkpoint("delay")
        # Do not set the clock back: servers do not believe such a step for half a minute.
        left_ms = edge_ms - clock.now_ms() - 1_000 * CALM_S - 2 * part_ms
        if left_ms < 0:
            raise RuntimeError(f"the coming hour was filled {-left_ms} ms too late for this run")
        await asyncio.sleep(left_ms / 1_000)
        ahead_ms = clock.ahead_ms
        # Flood and producer have processes of their own, so that nothing holds the consumer up.
        arriving = asyncio.create_task(
            consume(running.meta, [subject_name(0)], RATE * seconds, seconds + DRAIN_S, ahead_ms)
        )
        with producing("delayd", running.meta, RATE, seconds):
            await asyncio.sleep(CALM_S)
            began = now_ms() + ahead_ms
            rows = await flood(running.meta, flood_s)
            ended = now_ms() + ahead_ms
            arrivals = await arriving
        return {
            "messages": arrivals.count,
            "lost": RATE * seconds - arrivals.count,
            "early": arrivals.figures()["early"],
            "flood_messages_s": round(rows / (ended - began) * 1e3),
            **percentiles("late_ms", arrivals.between(began, ended)),
            **percentiles("edge_late_ms", arrivals.between(edge_ms - part_ms, edge_ms + part_ms)),
        }

    options = ("--load-ahead-ms", str(part_ms), "--checkpoint-bytes", str(CHECKPOINT_BYTES))
    with tempfile.TemporaryDirectory(prefix="delayd-clock-") as folder:
        clock = WallClock(Path(folder))
        clock.step(HOUR_MS - now_ms() % HOUR_MS - 1_000 * (fill_s + CALM_S) - 2 * part_ms)
        edge_ms = (clock.now_ms() // HOUR_MS + 1) * HOUR_MS
        with clock.preloaded(), servers("realtime", "delay", delay=options) as running:
            return uvloop.run(run(running, clock, edge_ms))
