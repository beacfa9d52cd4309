"""Tracing: what a handler sends belongs to the trace of its message."""

from __future__ import annotations

import contextvars
from datetime import timedelta
from typing import Any

import pytest

import delayd
from delayd.batch.labels import traceparent_of
from delayd.testing import InMemoryBroker

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
AT_ONCE = timedelta(0)
OWN: list[dict[str, Any] | None] = [None, {"a": "b"}, {"traceparent": "mine"}, None]


def test_what_is_sent_in_a_trace_gets_it_and_keeps_its_own_headers() -> None:
    def send() -> None:
        delayd.traceparent.set(TRACE)
        for number, own in enumerate(OWN):
            producer.send("orders", b"%d" % number, delay=AT_ONCE, headers=own)
        producer.send_batch("orders", [b"4", b"5"], delay=AT_ONCE)
        producer.send_batch("orders", [b"6", b"7"], delay=AT_ONCE, headers=[None, {"a": "b"}])
        with pytest.raises(delayd.DelaydError, match="headers are a mapping"):
            producer.send("orders", b"", delay=AT_ONCE, headers=[("a", "b")])  # type: ignore[arg-type]

    with InMemoryBroker() as broker, broker.producer() as producer:
        contextvars.copy_context().run(send)
        producer.send("orders", b"8", delay=AT_ONCE)
        producer.send_batch("orders", [b"9"], delay=AT_ONCE)
        found: dict[int, dict[str, Any]] = {}
        with broker.consumer("orders", "g") as consumer:
            while len(found) < 10:
                found |= {int(message.body): dict(message.headers) for message in consumer.pull()}
    traced = {"traceparent": TRACE}
    with_own = {"a": "b", **traced}
    assert [found[number] for number in range(10)] == [
        *(traced, with_own, {"traceparent": "mine"}, traced),
        *(traced, traced, traced, with_own),
        *({}, {}),
    ]


@pytest.mark.parametrize("trace", [TRACE, f"{TRACE}-later", TRACE.replace("00-", "cc-", 1)])
def test_a_trace_in_the_form_of_the_w3c_is_found(trace: str) -> None:
    assert traceparent_of({"traceparent": trace}) == traceparent_of({"traceparent": trace.encode()}) == trace


@pytest.mark.parametrize(
    "trace", ["", "yes", TRACE.upper(), TRACE.replace("00-", "ff-", 1), f"00-{'0' * 32}-b7ad6b7169203331-01", b"\xff"]
)
def test_any_other_is_none(trace: str | bytes) -> None:
    assert traceparent_of({"traceparent": trace}) == ""
