"""Servers that start again at other addresses: clients follow them by themselves."""

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import delayd
from tests.end_to_end.cluster import Cluster, cluster
from tests.waiting import DEADLINE_S

LATER = timedelta(hours=1)
# What a producer that has asked nothing else asks, the second time of a server that has moved.
ASKS: dict[str, Callable[[delayd.Producer, delayd.Receipt], object]] = {
    "get": lambda producer, receipt: producer.get("s", receipt=receipt),
    "reschedule": lambda producer, receipt: producer.reschedule("s", receipt=receipt, delay=LATER),
    "cancel": lambda producer, receipt: producer.cancel("s", receipt=receipt),
    "get by key": lambda producer, receipt: producer.get("s", key="k"),
    "send": lambda producer, receipt: producer.send("s", b"", delay=LATER),
    "send with key": lambda producer, receipt: producer.send("s", b"", delay=LATER, key=f"{receipt.sequence}"),
}


def _move(servers: Cluster, role: str) -> None:
    server = getattr(servers, role)
    before = server.port
    server.kill()
    server.port = 0
    server.start()
    assert server.port != before


def test_a_producer_follows_a_delay_server_whatever_it_asks(tmp_path: Path) -> None:
    with cluster(tmp_path / "data") as servers, ExitStack() as stack:
        producers = {name: stack.enter_context(delayd.Producer(servers.meta.address)) for name in ASKS}
        sender = producers["send"]
        receipts = {name: [sender.send("s", b"", delay=LATER) for _ in range(2)] for name in ASKS}
        for name, ask in ASKS.items():
            assert ask(producers[name], receipts[name][0])
        _move(servers, "delay")
        for name, ask in ASKS.items():
            assert ask(producers[name], receipts[name][1]), name


def test_a_consumer_follows_a_realtime_server(tmp_path: Path) -> None:
    with cluster(tmp_path / "data") as servers, delayd.Consumer(servers.meta.address, "s", group="g") as consumer:
        for body in ("1", "2"):
            servers.send(body)
            batch = consumer.pull(wait=timedelta(seconds=DEADLINE_S))
            assert batch.bodies == [body.encode()]
            batch.ack()
            _move(servers, "realtime")
