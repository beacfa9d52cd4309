"""Groups that live by a connection, and leads, while the realtime server is killed or stopped, and over a fork."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from itertools import count

import pytest

import delayd
from tests.end_to_end.up_process import Up, up
from tests.waiting import DEADLINE_S, holds_in_time

NOW = timedelta(0)
SOON = timedelta(milliseconds=200)
LONG = timedelta(seconds=DEADLINE_S)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("up"), "--port", "0") as found:
        yield found


def _pull(consumer: delayd.Consumer, wait: timedelta = LONG) -> delayd.MessageBatch:
    """What comes next, however often the server is away meanwhile."""
    until = time.monotonic() + wait.total_seconds()
    while True:
        try:
            return consumer.pull(wait=timedelta(seconds=max(until - time.monotonic(), 0)))
        except delayd.DelaydError:
            assert time.monotonic() < until


def test_a_pattern_of_ones_own_meets_a_subject_that_is_new_while_the_server_starts(running: Up) -> None:
    with (
        delayd.Producer(running.meta) as producer,
        delayd.Consumer(running.meta, "own.>", "screens", broadcast=True) as consumer,
    ):
        producer.send("own.known", b"1", delay=NOW)
        _pull(consumer).ack()
        for number in range(2):
            running.kill("realtime")
            producer.send(f"own.new{number}", b"2", delay=NOW)
            producer.send("own.known", b"3", delay=NOW)
            found: set[str] = set()
            while found != {f"own.new{number}", "own.known"}:
                batch = _pull(consumer)
                assert len(batch), f"only {found} came"
                found.update(batch.subjects)
                batch.ack()


def test_rule_I2_a_fork_of_a_broadcast_consumer_gets_all_messages_too(running: Up) -> None:
    with delayd.Consumer(running.meta, "forked", "cache", broadcast=True) as consumer:
        consumer.pull(wait=NOW)
        ready, says = os.pipe()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process", DeprecationWarning)
            child = os.fork()
        if child == 0:
            status = 1
            try:
                consumer.pull(wait=NOW)
                os.write(says, b"1")
                bodies: list[bytes] = []
                while len(bodies) < 10 and len(batch := consumer.pull(wait=LONG)):
                    bodies += batch.bodies
                    batch.ack()
                status = len(bodies) != 10
            finally:
                os._exit(status)
        assert os.read(ready, 1) == b"1"
        with delayd.Producer(running.meta) as producer:
            producer.send_batch("forked", [b"%d" % number for number in range(10)], delay=NOW)
        seen = 0
        while seen < 10:
            batch = consumer.pull(wait=LONG)
            assert len(batch)
            batch.ack()
            seen += len(batch)
        _, waited = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(waited) == 0


def test_a_lead_keeps_its_message_while_the_server_is_killed_and_stopped(running: Up) -> None:
    subjects = (f"led{number}" for number in count())
    # A lead that stands still for a window is rightly replaced.
    holds_in_time(timedelta(seconds=2), lambda window: _leads_on(running, next(subjects), window), delayd.StaleHandle)


def _leads_on(running: Up, subject: str, window: timedelta) -> None:
    def consumer() -> delayd.Consumer:
        return delayd.Consumer(
            running.meta, subject, "g", exclusive=window, lease=timedelta(minutes=5), timeout_ms=60_000
        )

    with delayd.Producer(running.meta) as producer, consumer() as lead, consumer() as other:
        producer.send(subject, b"1", delay=NOW)
        held = [lead.pull(1, wait=LONG)[0]]
        taken: list[tuple[bytes, int]] = []
        stop = threading.Event()

        def stand_by() -> None:
            while not stop.is_set():
                taken.extend((message.body, message.attempt) for message in _pull(other, SOON))

        standing = threading.Thread(target=stand_by)
        standing.start()
        try:
            for body in (b"2", b"3"):
                running.kill("realtime")
                producer.send(subject, body, delay=NOW)
                held += _pull(lead)
            assert [message.body for message in held] == [b"1", b"2", b"3"]
            server = running.ready("realtime")[-1].pid
            os.kill(server, signal.SIGSTOP)
            time.sleep(1.5 * window.total_seconds())
            os.kill(server, signal.SIGCONT)
            for message in held:
                message.ack()
        finally:
            stop.set()
            standing.join()
        assert taken == []
        lead.close()
        producer.send(subject, b"4", delay=NOW)
        (message,) = _pull(other)
        assert (message.body, message.attempt) == (b"4", 1)
