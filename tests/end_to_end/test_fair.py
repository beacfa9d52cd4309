"""Workers with default settings share a subject of the real servers evenly, whatever their pace is (rule Q4).

The same at full length, with a process for each worker: `python -m bench fair-300ms fair-1ms fair-10s`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest

import delayd
from tests.end_to_end.up_process import up
from tests.waiting import holds_once, wait_until

DEADLINE_S = 60.0
AT_ONCE_S = 14.0  # What a consumer only holds goes back by itself after a quarter of its lease, 15 s.


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("fair")
    with up(folder, "--port", "0") as running:
        yield running.meta


class Worker:
    """Handles messages on a thread of its own; ``takes`` says how long the next one takes."""

    def __init__(self, meta: str, subject: str, takes: Callable[[int], float]) -> None:
        self.consumer = delayd.Consumer(meta, subject, "workers")
        self.bodies: list[bytes] = []
        self.attempts: list[int] = []
        self._takes = takes
        self.stopping = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the consumer behind the message under way, or while it waits for one."""
        self.stopping = True
        self._thread.join(0.1)
        if self._thread.is_alive():
            self.consumer.close()
            self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def _work(self) -> None:
        for message in self.consumer:
            takes_s = self._takes(len(self.bodies))
            if takes_s:
                time.sleep(takes_s)
            self.bodies.append(message.body)
            self.attempts.append(message.attempt)
            message.ack(wait=False)
            if self.stopping:
                break
        self.consumer.close()


class Work:
    """Messages of one subject and those who work them off."""

    def __init__(self, meta: str, subject: str) -> None:
        self.meta, self.subject = meta, subject
        self.workers: list[Worker] = []
        self.sent = 0

    def worker(self, takes: float | Callable[[int], float]) -> Worker:
        """One more worker."""
        made = Worker(self.meta, self.subject, takes if callable(takes) else lambda _: takes)
        self.workers.append(made)
        return made

    def send(self, count: int) -> None:
        """More messages, due at once."""
        with delayd.Producer(self.meta) as producer:
            bodies = [b"%d" % number for number in range(self.sent, self.sent + count)]
            producer.send_batch(self.subject, bodies, delay=timedelta(0))
        self.sent += count

    def until(self, condition: Callable[[], bool]) -> float:
        """Wait for a condition; how long it took."""
        began = time.monotonic()
        wait_until(condition, lambda: self.shares, DEADLINE_S)
        return time.monotonic() - began

    @property
    def shares(self) -> list[int]:
        """How many each worker has handled."""
        return [len(worker.bodies) for worker in self.workers]

    def all_done(self) -> bool:
        """Whether every message was handled."""
        return sum(self.shares) >= self.sent

    def end(self) -> None:
        """Each message was handled once, as its first attempt."""
        for worker in self.workers:
            worker.stop()
        assert sorted(int(body) for worker in self.workers for body in worker.bodies) == list(range(self.sent))
        assert {attempt for worker in self.workers for attempt in worker.attempts} == {1}


@pytest.mark.parametrize(("each_s", "messages", "least"), [(0.2, 24, 5), (0.7, 8, 2), (0.001, 1_200, 150)])
def test_rule_Q4_four_default_workers_have_even_shares(meta: str, each_s: float, messages: int, least: int) -> None:
    tries = count()

    def judged() -> None:
        # One thread that gets no processor for a moment makes shares uneven.
        work = Work(meta, f"fair.even.{each_s}.{next(tries)}")
        for _ in range(4):
            work.worker(each_s)
        time.sleep(0.3)
        work.send(messages)
        work.until(work.all_done)
        work.end()
        assert min(work.shares) >= least, work.shares

    holds_once(judged)


def test_rule_Q4_a_slow_worker_holds_nothing_that_a_fast_one_could_do(meta: str) -> None:
    work, others_are_done = Work(meta, "fair.mixed"), threading.Event()

    def slowly(done: int) -> float:
        if done >= 2:
            others_are_done.wait(DEADLINE_S)
        return 0.5

    slow, fast = work.worker(slowly), work.worker(0.002)
    work.send(300)
    assert work.until(lambda: work.sent - sum(work.shares) <= 2) < AT_ONCE_S
    assert len(slow.bodies) <= 3 and len(fast.bodies) >= 295
    others_are_done.set()
    work.until(work.all_done)
    work.end()


def test_rule_Q4_what_a_worker_holds_that_stalls_is_done_by_others(meta: str) -> None:
    work, others_are_done = Work(meta, "fair.stall"), threading.Event()

    def stalls(done: int) -> float:
        if done == 60:
            others_are_done.wait(DEADLINE_S)
        return 0.002

    stalling = work.worker(stalls)
    other = work.worker(0.002)
    work.send(600)
    work.until(lambda: len(stalling.bodies) == 60)
    assert work.until(lambda: work.sent - sum(work.shares) == 1) < AT_ONCE_S
    assert len(stalling.bodies) == 60 and len(other.bodies) == 539
    others_are_done.set()
    work.until(work.all_done)
    work.end()


def test_rule_Q4_workers_that_come_later_share_what_the_first_one_has_fetched(meta: str) -> None:
    tries = count()

    def judged() -> None:
        work = Work(meta, f"fair.late.{next(tries)}")
        work.send(160)
        work.worker(0.04)
        work.until(lambda: work.shares[0] >= 8)
        for _ in range(3):
            work.worker(0.04)
        work.until(work.all_done)
        work.end()
        assert min(work.shares[1:]) >= 15, work.shares

    holds_once(judged)


def test_rule_Q4_what_a_consumer_holds_at_its_close_is_done_by_others_at_once(meta: str) -> None:
    work = Work(meta, "fair.close")
    stops = threading.Event()

    def until_the_close(done: int) -> float:
        if done >= 40:
            stops.wait(DEADLINE_S)
        return 0.005

    first = work.worker(until_the_close)
    work.send(200)
    work.until(lambda: len(first.bodies) >= 40)
    closing = threading.Thread(target=first.stop)
    closing.start()
    wait_until(lambda: first.stopping)
    stops.set()
    closing.join()
    done = len(first.bodies)
    assert done == 41, "it has ended the message under way, and no other one"
    work.worker(0.0)
    assert work.until(work.all_done) < AT_ONCE_S
    assert work.shares[1] == 200 - done
    work.end()
