"""How long the console's pages take when much is there: many subjects, and very many pending messages.

Run ``python -m bench.console [--pending 1000000] [--subjects 1000] [--rounds 9]``: one JSON line, medians in
milliseconds of the whole answer, each over a connection of its own, as a browser's first request. Half of the messages
are of one subject. They are due within two hours to come, and some subjects have a group with messages that wait.
"""

import argparse
import http.client
import json
import time
from datetime import timedelta
from statistics import median

import numpy as np

import delayd
from bench.figures import Figures
from bench.gateway import serving_gateway
from bench.servers import servers

BODY = b"x" * 200
BATCH = 50_000
GROUPS = 50


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.console", description="Measure pages of the console.")
    parser.add_argument("--pending", type=int, default=1_000_000)
    parser.add_argument("--subjects", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=9)
    wanted = parser.parse_args()
    with servers("realtime", "delay") as running, serving_gateway(running.meta) as (_, port):
        _fill(running.meta, wanted.pending, wanted.subjects)
        figures = _measure(port, wanted.rounds)
    print(
        json.dumps({"bench": "console", "pending": wanted.pending, "subjects": wanted.subjects, **figures}), flush=True
    )


def _fill(meta: str, pending: int, subjects: int) -> None:
    random = np.random.default_rng(1)
    with delayd.Producer(meta) as producer:
        for number in range(subjects):
            count = pending // 2 // subjects
            _send(producer, f"subject.{number:05}", count, random)
            producer.send(f"subject.{number:05}", BODY, delay=timedelta(0))
        for _ in range(0, pending // 2, BATCH):
            _send(producer, "subject.large", BATCH, random)
    for number in range(min(GROUPS, subjects)):
        with delayd.Consumer(meta, f"subject.{number:05}", group="g") as consumer:
            consumer.pull(1, wait=timedelta(seconds=10))


def _send(producer: delayd.Producer, subject: str, count: int, random: np.random.Generator) -> None:
    now_ms = time.time_ns() // 1_000_000
    due_ms = now_ms + random.integers(600_000, 7_200_000, count)
    producer.send_batch(subject, [BODY] * count, deliver_at_ms=due_ms)


def _measure(port: int, rounds: int) -> Figures:
    pages = {
        "overview_ms": "/",
        "subjects_ms": "/subjects",
        "subject_ms": "/subjects/subject.large",
        "pending_ms": "/subjects/subject.large/pending",
        "tagged_ms": "/subjects/subject.large/pending?tag=none",
        "groups_ms": "/groups",
        "servers_ms": "/servers",
    }
    return {name: round(median(_took_ms(port, path) for _ in range(rounds)), 1) for name, path in pages.items()}


def _took_ms(port: int, path: str) -> float:
    began = time.perf_counter()
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    line.request("GET", path)
    answer = line.getresponse()
    answer.read()
    line.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} was answered {answer.status}")
    return (time.perf_counter() - began) * 1_000


if __name__ == "__main__":
    main()
