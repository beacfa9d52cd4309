"""How late near messages arrive while far ones flood in, and while all of those are filed.

1,000 messages a second with delays of 1 to 5 s are sent all the time. First another process sends batches due evenly
over two years as fast as they are taken; when it has ended, a checkpoint of everything is asked for.
"""

import asyncio
import subprocess
import sys
import time

import uvloop

from bench.arrivals import consume, percentiles
from bench.figures import Figures
from bench.messages import HOUR_MS, TWO_YEARS_MS, now_ms, send_batches, spread
from bench.servers import Servers, servers
from bench.steady import DRAIN_S, producing, subject_name
from delayd.client.producer import AsyncProducer

RATE = 1_000
CALM_S = 2  # Until the first near messages are due.
FLOOD = "bench.flood"
TURN_ROWS = 20_000


def near(flood_s: int, filing_s: int) -> Figures:
    """Flood, then file all of it. Near messages are sent for as long as both should take."""
    seconds = CALM_S + flood_s + filing_s

    async def run(running: Servers) -> Figures:
        # Flood and producer have processes of their own, so that nothing holds the consumer up.
        arriving = asyncio.create_task(consume(running.meta, [subject_name(0)], RATE * seconds, seconds + DRAIN_S))
        await asyncio.sleep(CALM_S)
        flood_began = now_ms()
        rows = await flood(running.meta, flood_s)
        flood_ended = now_ms()
        began = time.monotonic()
        await running.checkpoint("delay")
        filed_s = time.monotonic() - began
        filed = now_ms()
        arrivals = await arriving
        return {
            "messages": arrivals.count,
            "lost": RATE * seconds - arrivals.count,
            "early": arrivals.figures()["early"],
            "flood_messages_s": round(rows / (flood_ended - flood_began) * 1e3),
            **percentiles("flood_late_ms", arrivals.between(flood_began, flood_ended)),
            "checkpoint_s": round(filed_s, 2),
            **percentiles("checkpoint_late_ms", arrivals.between(flood_ended, filed)),
        }

    with servers("realtime", "delay") as running, producing("delayd", running.meta, RATE, seconds):
        return uvloop.run(run(running))


async def flood(meta: str, seconds: int) -> int:
    """Send far messages from another process for a time; returns how many."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.near", meta, str(seconds), stdout=subprocess.PIPE
    )
    output, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError("the flood failed; its messages are above")
    return int(output)


async def _send_flood(meta: str, seconds: int) -> int:
    rows = 0
    end = time.monotonic() + seconds
    first_ms = now_ms() + 2 * HOUR_MS
    batches = spread(TURN_ROWS, first_ms, first_ms + TWO_YEARS_MS)
    async with AsyncProducer(meta) as producer:
        while time.monotonic() < end:
            await send_batches(producer, FLOOD, batches)
            rows += TURN_ROWS
    return rows


if __name__ == "__main__":
    print(uvloop.run(_send_flood(sys.argv[1], int(sys.argv[2]))))
