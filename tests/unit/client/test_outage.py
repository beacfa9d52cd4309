"""Nobody listens: calls hear so within `connect_timeout`, and an empty batch says that it comes from an outage."""

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from socket import socket
from typing import Any

import pytest

import delayd
from delayd.testing import InMemoryBroker
from tests.waiting import DEADLINE_S

SHORT = timedelta(milliseconds=100)
DELAY = timedelta(hours=1)


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


ASKS: dict[str, Callable[[Any], Any]] = {
    "send": lambda producer: producer.send("a", b"1", delay=DELAY),
    "send with spread": lambda producer: producer.send("a", b"1", delay=DELAY, spread=timedelta(minutes=1)),
    "send with a key": lambda producer: producer.send("a", b"1", delay=DELAY, key="k"),
    "send_batch": lambda producer: producer.send_batch("a", [b"1"], delay=DELAY),
    "cancel": lambda producer: producer.cancel("a", key="k"),
    "get": lambda producer: producer.get("a", key="k"),
    "reschedule": lambda producer: producer.reschedule("a", key="k", delay=DELAY),
    "cancel_where": lambda producer: producer.cancel_where("a"),
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_call_of_a_producer_hears_of_a_refused_connection_in_its_time(nowhere: str, ask: str, kind: str) -> None:
    async def scenario() -> None:
        async with delayd.AsyncProducer(nowhere, connect_timeout=SHORT) as producer:
            await ASKS[ask](producer)

    begun = time.monotonic()
    with pytest.raises(delayd.ServerUnavailable, match=nowhere):
        if kind == "asyncio":
            asyncio.run(scenario())
        else:
            with delayd.Producer(nowhere, connect_timeout=SHORT) as producer:
                ASKS[ask](producer)
    assert time.monotonic() - begun < DEADLINE_S / 2, "it need not wait for the time limit, 30 s"


@pytest.mark.parametrize("subject", ["a", ["a", "b"], "a.*"], ids=["one", "list", "pattern"])
@pytest.mark.parametrize("kind", [delayd.Consumer, delayd.AsyncConsumer])
def test_a_pull_hears_of_a_refused_connection_in_its_time(nowhere: str, subject: str | list[str], kind: Any) -> None:
    async def scenario() -> None:
        async with delayd.AsyncConsumer(nowhere, subject, "g", connect_timeout=SHORT) as consumer:
            await consumer.pull(wait=timedelta(seconds=20))

    with pytest.raises(delayd.ServerUnavailable, match=nowhere):
        if inspect.iscoroutinefunction(kind.pull):
            asyncio.run(scenario())
        else:
            with delayd.Consumer(nowhere, subject, "g", connect_timeout=SHORT) as consumer:
                consumer.pull(wait=timedelta(seconds=20))


@pytest.mark.parametrize("subject", ["a", ["a", "b"], "a.*"], ids=["one", "list", "pattern"])
@pytest.mark.parametrize("wait", [timedelta(0), SHORT], ids=str)
def test_an_empty_batch_says_whether_the_server_had_nothing_or_could_not_be_asked(
    nowhere: str, subject: str | list[str], wait: timedelta
) -> None:
    with delayd.Consumer(nowhere, subject, "g") as consumer:
        batch = consumer.pull(wait=wait)
        assert len(batch) == 0 and isinstance(batch.outage, delayd.ServerUnavailable)
        assert nowhere in batch.outage.message
    with InMemoryBroker(tick=True) as broker, broker.consumer(subject, "g") as consumer, broker.producer() as producer:
        producer.send("a", b"1", delay=timedelta(0))
        producer.send("a.b", b"1", delay=timedelta(0))
        batch = consumer.pull(wait=timedelta(seconds=DEADLINE_S))
        assert len(batch) and batch.outage is None
        batch.ack()
        while len(batch := consumer.pull(wait=wait)):
            batch.ack()
        assert batch.outage is None


def test_a_time_to_connect_that_makes_no_sense_is_refused(nowhere: str) -> None:
    for wrong in (timedelta(0), timedelta(days=2)):
        with pytest.raises(delayd.BadSetting, match="connect_timeout"):
            delayd.Producer(nowhere, connect_timeout=wrong)
