"""Whether workers of any speed share a subject evenly: consumers with default settings, a process each.

The clock starts at the instant at which all messages are due, when all workers wait already, and stops with the last
acknowledgement. A message came again when a worker is handed it as a later attempt than the first.
"""

import multiprocessing
import multiprocessing.queues
import time
from datetime import UTC, datetime
from typing import NamedTuple

import delayd
from bench.figures import Figures
from bench.servers import servers

SUBJECT = "bench.fair"
WORKERS = 4
LEAD_S = 4.0  # Until the workers' processes are up and wait.
LATE = 3  # A run ends when it takes this many times the ideal time, and LATE_S more.
LATE_S = 20.0
WAITS_S = 0.1  # A quicker worker does not wait for the disk after each message.


class Handled(NamedTuple):
    """One message at a worker."""

    worker: int
    at: float  # By the wall clock, when its acknowledgement was durable.
    body: bytes
    attempt: int


def fair(messages: int, each_s: float) -> Figures:
    """Share ``messages`` among workers; each message takes a worker ``each_s``."""
    ideal_s = each_s * -(-messages // WORKERS)
    context = multiprocessing.get_context("spawn")
    with servers("realtime", "delay") as running:
        done: multiprocessing.queues.Queue[Handled] = context.Queue()
        workers = [context.Process(target=_work, args=(running.meta, each_s, name, done)) for name in range(WORKERS)]
        for worker in workers:
            worker.daemon = True
            worker.start()
        due = time.time() + LEAD_S
        with delayd.Producer(running.meta) as producer:
            bodies = [b"%d" % number for number in range(messages)]
            producer.send_batch(SUBJECT, bodies, deliver_at=datetime.fromtimestamp(due, UTC))
        handled: list[Handled] = []
        end = due + LATE * ideal_s + LATE_S
        while len({each.body for each in handled}) < messages and time.time() < end:
            handled.append(done.get(timeout=max(end - time.time(), 0.1)))
        for worker in workers:
            worker.terminate()
            worker.join()
    shares = [sum(each.worker == name for each in handled) for name in range(WORKERS)]
    took_s = max(each.at for each in handled) - due
    return {
        "messages_s": round(messages / took_s, 1),
        "took_s": round(took_s, 2),
        "ideal_s": round(ideal_s, 2),
        "came_again": sum(each.attempt > 1 for each in handled),
        "twice": len(handled) - len({each.body for each in handled}),
        "share_least": min(shares),
        "share_most": max(shares),
    }


def _work(meta: str, each_s: float, name: int, done: "multiprocessing.queues.Queue[Handled]") -> None:
    for message in delayd.Consumer(meta, SUBJECT, "workers"):
        time.sleep(each_s)
        message.ack(wait=each_s >= WAITS_S)
        done.put(Handled(name, time.time(), message.body, message.attempt))
