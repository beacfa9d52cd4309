"""Tracing: what a handler sends belongs to the trace of its message."""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import numpy as np
import pytest

from delayd.batch.labels import decode_headers, traceparent, traceparent_of
from delayd.client.limits import pack_headers
from delayd.client.sending.send_options import Sends, Single, columns_of
from delayd.hours import INSTANT_MS_MIN

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Noted(Sends[Single]):
    """A producer that returns the row that it would queue."""

    def _begin(self, meta: str) -> None:
        pass

    def _queue(self, row: Single) -> Single:
        return row

    def _queue_spread(self, row: Single, window_ms: int) -> Single:
        raise NotImplementedError


def in_trace(work: Callable[[], None], trace: str = TRACE) -> None:
    """Do it as a handler of a message with this trace does."""

    def traced() -> None:
        traceparent.set(trace)
        work()

    contextvars.copy_context().run(traced)


def test_a_single_send_gets_the_trace_and_keeps_its_own_headers() -> None:
    producer = Noted()

    def headers(own: dict[str, str | bytes] | None) -> dict[str, str | bytes]:
        return decode_headers(producer.send_nowait("orders", b"", deliver_at_ms=INSTANT_MS_MIN, headers=own)[4])

    def send() -> None:
        assert headers(None) == {"traceparent": TRACE}
        assert headers({"a": "b"}) == {"a": "b", "traceparent": TRACE}
        assert headers({"traceparent": "mine"}) == {"traceparent": "mine"}

    for _ in range(2):  # The subject is known the second time, which is another path.
        in_trace(send)
        assert headers(None) == {}


def test_each_row_of_a_batch_gets_the_trace() -> None:
    wishes = np.array([INSTANT_MS_MIN] * 2), False

    def send() -> None:
        for own in (None, {"a": "b"}, [None, {"a": "b"}]):
            columns = columns_of(b"orders", [b"", b""], own, wishes)
            assert columns.headers is not None
            assert all(decode_headers(packed)["traceparent"] == TRACE for packed in columns.headers)

    in_trace(send)
    assert columns_of(b"orders", [b"", b""], None, wishes).headers is None


@pytest.mark.parametrize("trace", [TRACE, f"{TRACE}-later", TRACE.replace("00-", "cc-", 1)])
def test_a_trace_in_the_form_of_the_w3c_is_found(trace: str) -> None:
    assert traceparent_of({"traceparent": trace}) == traceparent_of({"traceparent": trace.encode()}) == trace


@pytest.mark.parametrize(
    "trace", ["", "yes", TRACE.upper(), TRACE.replace("00-", "ff-", 1), f"00-{'0' * 32}-b7ad6b7169203331-01", b"\xff"]
)
def test_any_other_is_none(trace: str | bytes) -> None:
    assert traceparent_of({"traceparent": trace}) == ""


def test_what_is_no_mapping_is_refused_in_a_trace_as_outside() -> None:
    def send() -> None:
        with pytest.raises(Exception, match="headers are a mapping"):
            pack_headers([("a", "b")])  # type: ignore[arg-type]

    in_trace(send)
