"""How late messages arrive while somebody looks at the servers' files and figures, and while nobody does.

1,000 messages a second with delays of 1 to 5 s are sent all the time, and others are pending for the coming day. By
turns of five seconds nobody looks, or `delayd schedule find`, `schedule forecast` and `top` run one after the other,
each as a process of its own. Turns hide what else the machine does.
"""

import asyncio
import subprocess
import sys
import time
from itertools import cycle, pairwise

import numpy as np
import uvloop

from bench.arrivals import consume, percentiles
from bench.cancels import tomorrow
from bench.figures import Figures
from bench.messages import now_ms, send_batches
from bench.servers import Servers, servers
from bench.steady import DRAIN_S, producing, subject_name
from delayd.client.producer import AsyncProducer

RATE = 1_000
CALM_S = 7  # Until as many fall due as are sent.
TURN_S = 5
EVERY_S = 1.0  # A look begins so long after the one before, or when that has ended.
PENDING = "bench.pending"


def inspected(turns: int, pending: int) -> Figures:
    """So many turns in which nobody looks, and as many in which somebody does; so many other messages are pending."""
    total_s = CALM_S + 2 * turns * TURN_S

    async def run(running: Servers) -> Figures:
        arriving = asyncio.create_task(consume(running.meta, [subject_name(0)], RATE * total_s, total_s + DRAIN_S))
        await asyncio.sleep(CALM_S)
        looks, edges = 0, [now_ms()]
        for _ in range(turns):
            await asyncio.sleep(TURN_S)
            edges.append(now_ms())
            looks += await _look(running, edges[-1] + 1_000 * TURN_S)
            edges.append(now_ms())
        arrivals = await arriving
        spans = [arrivals.between(*span) for span in pairwise(edges)]
        alone, beside = np.concatenate(spans[::2]), np.concatenate(spans[1::2])
        figures = {**percentiles("alone_late_ms", alone), **percentiles("inspected_late_ms", beside)}
        return {
            "messages": arrivals.count,
            "lost": RATE * total_s - arrivals.count,
            "early": arrivals.figures()["early"],
            "looks": looks,
            **figures,
            "times": round(figures["inspected_late_ms_p99"] / figures["alone_late_ms_p99"], 2),
        }

    with servers("realtime", "delay") as running:
        uvloop.run(_fill(running, pending))
        with producing("delayd", running.meta, RATE, total_s):
            return uvloop.run(run(running))


async def _fill(running: Servers, pending: int) -> None:
    """Messages to be looked at, half of them filed."""
    batches = tomorrow(pending)
    async with AsyncProducer(running.meta) as producer:
        await send_batches(producer, PENDING, batches[::2])
        await running.checkpoint("delay")
        await send_batches(producer, PENDING, batches[1::2])


async def _look(running: Servers, until_ms: int) -> int:
    """Run the commands one after the other; how many ended in time."""
    data = str(running.data)
    commands = (
        ("schedule", "find", PENDING, "--data", data, "--grep", "never there", "--count"),
        ("schedule", "forecast", "--data", data, "--by", "hour"),
        ("top", "--meta", running.meta, "--once"),
    )
    for looks, command in enumerate(cycle(commands)):
        began = time.monotonic()
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "delayd", *command), stdout=subprocess.DEVNULL
        )
        if await child.wait():
            raise RuntimeError(f"delayd {command[0]} failed; its message is above")
        if now_ms() >= until_ms:
            return looks
        await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))
    raise AssertionError("the commands never end")
