"""Servers that hang: their kernel takes connections and bytes, and no answer ever comes."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from delayd import Consumer, Producer
from tests.end_to_end.cluster import logged
from tests.end_to_end.pulling import pull_all
from tests.waiting import wait_until

from .processes import HOST, ServerProcess

SILENCE_MS = 1_000


@contextmanager
def deaf_listener() -> Iterator[tuple[int, list[socket.socket]]]:
    """Accepts every connection, keeps it open, and reads nothing; its port, and what it accepted."""
    accepted: list[socket.socket] = []
    with socket.create_server((HOST, 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    accepted.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1], accepted
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for one in accepted:
                one.close()


def test_a_stopped_realtime_server_is_connected_to_anew_and_rows_of_the_other_one_come_meanwhile(
    tmp_path: Path,
) -> None:
    with (
        ServerProcess("meta", tmp_path, {"lease_ms": 60_000}) as meta,
        ServerProcess("realtime", tmp_path / "a", {"meta": meta.address}) as first,
        ServerProcess("realtime", tmp_path / "b", {"meta": meta.address}) as second,
        ServerProcess("delay", tmp_path, {"meta": meta.address, "target_silence_ms_max": SILENCE_MS}) as delay_process,
        Producer(meta.address) as producer,
        Consumer(meta.address, "one", "g") as one,
        Consumer(meta.address, "two", "g") as two,
    ):
        consumers = {"one": one, "two": two}
        for subject, consumer in consumers.items():
            producer.send(subject, b"first", delay=timedelta(0))
            assert pull_all(consumer, 1) == {b"first": 1}
        # Meta gave each of them one of the two subjects; whose it is, its log says.
        stopped = first if "subject=one " in first.log else second
        stopped.signal(signal.SIGSTOP)
        for number in range(10):
            for subject in consumers:
                producer.send(subject, b"%d" % number, delay=timedelta(0))
        assert pull_all(two, 10) == {b"%d" % number: 1 for number in range(10)}
        logged(delay_process, "no sign of life")
        stopped.signal(signal.SIGCONT)
        assert pull_all(one, 10) == {b"%d" % number: 1 for number in range(10)}


def test_a_meta_that_takes_connections_and_says_nothing_holds_up_no_start(tmp_path: Path) -> None:
    with deaf_listener() as (port, accepted):
        deaf = f"{HOST}:{port}"
        with ServerProcess("realtime", tmp_path, {"meta": deaf}) as server:
            wait_until(lambda: len(accepted) >= 2, lambda: server.log)
            assert server.terminate() == 0
        assert server.log.count("away meta=") == 1
