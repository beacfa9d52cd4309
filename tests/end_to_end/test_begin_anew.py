"""A server takes a file back by beginning anew in place: beside traffic, and though it is told to stop meanwhile (rule
L10).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from delayd.machine.operating import WaitKind
from tests.end_to_end.cluster import Cluster, cluster, decide, flip, logged, put_back, stopped
from tests.unit.cli.runner import run
from tests.waiting import wait_until

EVERY_S = 0.005


def damaged(production: Cluster) -> tuple[Path, bytes]:
    """A running server whose dispatch log was damaged while it was away; the file, and what it held."""
    production.send("early")
    assert production.consumed(1) == ["early"]
    with stopped(production.delay):
        (path,) = (production.data / "delay/dispatch").glob("*/*.log")
        whole = flip(path, -1)
    production.operator.until_told(WaitKind.FILE_SET_ASIDE_OR_GIVEN_UP)
    return path, whole


def with_damaged_pull_log(production: Cluster) -> tuple[Path, bytes]:
    """A realtime server that was killed, and whose pull log was cut above its checkpoint while it was away; the file,
    and what it held.
    """
    production.send("early")
    assert production.consumed(1) == ["early"]
    with stopped(production.realtime):
        pass
    production.send("acknowledged behind the checkpoint")
    assert production.consumed(1) == ["acknowledged behind the checkpoint"]
    production.realtime.kill()
    (path,) = (production.data / "realtime/pull").glob("*.log")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 4])
    production.realtime.start()
    production.operator.until_told(WaitKind.PULLS_UNREAD)
    return path, whole


def epoch_of(production: Cluster, role: str = "delay") -> int | None:
    """The number of a server's life; None while it does not answer."""
    shown = json.loads(run("status", "--meta", production.meta.address, "--format", "json").out)
    (epoch,) = (server["epoch"] for server in shown["servers"] if server["role"] == role)
    assert epoch is None or isinstance(epoch, int)
    return epoch


def release(production: Cluster, path: Path) -> None:
    decide(production, "mend", "take", f"dispatch/{path.stem}")


@contextmanager
def sending(production: Cluster, sent: list[str]) -> Iterator[None]:
    """Messages that are sent one by one meanwhile; each is accepted."""
    ended = threading.Event()
    failed: list[delayd.DelaydError] = []

    def send() -> None:
        try:
            with delayd.Producer(production.meta.address) as producer:
                while not ended.wait(EVERY_S):
                    producer.send("s", str(len(sent)).encode(), delay=timedelta(seconds=1))
                    sent.append(str(len(sent)))
        except delayd.DelaydError as error:
            failed.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        wait_until(lambda: len(sent) > 10 or failed, "messages are accepted")
        yield
        so_far = len(sent)
        wait_until(lambda: len(sent) > so_far + 10 or failed, "messages are accepted behind it")
    finally:
        ended.set()
        thread.join()
    assert not failed, failed


def test_rule_L10_a_server_that_begins_anew_keeps_its_process_and_address_and_no_send_fails(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        path, whole = damaged(production)
        process, address, epoch, sent = (
            production.delay.pid,
            production.delay.address,
            epoch_of(production),
            list[str](),
        )
        with sending(production, sent):
            put_back(path, whole)
            release(production, path)
            wait_until(lambda: epoch_of(production) == (epoch or 0) + 1, "it has begun anew")
        assert (production.delay.pid, production.delay.address) == (process, address) and production.delay.running
        assert production.consumed(len(sent)) == sorted(sent)
        production.operator.until_gone(WaitKind.FILE_SET_ASIDE_OR_GIVEN_UP)


def test_rule_L10_a_realtime_server_takes_its_pull_log_back_in_place_and_nothing_is_lost_or_comes_again(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path) as production:
        path, whole = with_damaged_pull_log(production)
        server, sent = production.realtime, list[str]()
        process, address, epoch = server.pid, server.address, epoch_of(production, "realtime")
        with sending(production, sent):
            put_back(path, whole)
            decide(production, "mend", "take", "pull")
            wait_until(lambda: epoch_of(production, "realtime") == (epoch or 0) + 1, "it has begun anew")
        assert (server.pid, server.address) == (process, address) and server.running
        assert production.consumed(len(sent)) == sorted(sent), "what was acknowledged does not come again"
        production.operator.until_gone(WaitKind.PULLS_UNREAD)


def test_a_realtime_server_that_is_told_to_stop_while_it_begins_anew_stops_in_good_order(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        path, whole = with_damaged_pull_log(production)
        put_back(path, whole)
        decide(production, "mend", "take", "pull")
        logged(production.realtime, "begins_anew")
        assert production.realtime.terminate() == 0
        production.realtime.start()
        production.send("later")
        assert production.consumed(1) == ["later"]


def test_a_server_that_is_told_to_stop_while_it_begins_anew_stops_in_good_order(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        path, whole = damaged(production)
        put_back(path, whole)
        release(production, path)
        logged(production.delay, "begins_anew")
        assert production.delay.terminate() == 0
        production.delay.start()
        production.send("later")
        assert production.consumed(1) == ["later"]


def test_rule_L10_a_home_takes_a_file_back_while_it_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.delay.damage.mending.DAMAGED_AGAIN_MS", 500)
    with delayd.open(tmp_path) as home, home.producer() as producer, home.consumer("s", "g") as consumer:
        producer.send("s", b"early", delay=timedelta(0))
        consumer.pull(wait=timedelta(seconds=20)).ack()
    (path,) = (tmp_path / "delay/dispatch").glob("*/*.log")
    whole = flip(path, -1)
    with delayd.open(tmp_path) as home, home.producer() as producer, home.consumer("s", "g") as consumer:
        producer.send("s", b"waits", delay=timedelta(0))
        assert not consumer.pull(wait=timedelta(seconds=0.5)), "it may have been delivered before"
        put_back(path, whole)
        batch = consumer.pull(wait=timedelta(seconds=20))
        assert batch.bodies == [b"waits"]
        batch.ack()
        producer.send("s", b"later", delay=timedelta(0))
        assert consumer.pull(wait=timedelta(seconds=20)).bodies == [b"later"]
