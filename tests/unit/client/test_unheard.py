"""Sends that fail and whose outcome nobody asks for: the close says so, once."""

import asyncio
import gc
import logging
from collections.abc import Iterator
from datetime import timedelta
from socket import socket

import pytest

import delayd

DELAY = timedelta(hours=1)


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()  # asyncio tells of an exception that nobody has fetched when its future is gone.
    kept = ("sends_failed", "Future exception", "Task exception")
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(kept)]


def _is_one_warning(told: list[str], messages: int, nowhere: str) -> None:
    assert len(told) == 1, told
    assert told[0].startswith(f"sends_failed messages={messages} code=server_unavailable reason=")
    assert nowhere in told[0]


@pytest.mark.parametrize("flushes", [False, True], ids=["closed", "flushed and closed"])
def test_a_close_tells_how_many_sends_have_failed_unheard_and_why(
    nowhere: str, caplog: pytest.LogCaptureFixture, flushes: bool
) -> None:
    with delayd.Producer(nowhere, timeout_ms=100) as producer:
        futures = [producer.send_nowait("a", b"1", delay=DELAY) for _ in range(5)]
        if flushes:
            producer.flush()
    _is_one_warning(_told(caplog), 5, nowhere)
    assert all(isinstance(future.exception(), delayd.ServerUnavailable) for future in futures), (
        "the futures say it, too"
    )


@pytest.mark.parametrize("flushes", [False, True], ids=["closed", "flushed and closed"])
@pytest.mark.parametrize("settings", [{}, {"spread": timedelta(minutes=1)}], ids=["plain", "spread"])
def test_an_asynchronous_close_tells_the_same_in_one_line(
    nowhere: str, caplog: pytest.LogCaptureFixture, flushes: bool, settings: dict[str, timedelta]
) -> None:
    async def scenario() -> None:
        async with delayd.AsyncProducer(nowhere, timeout_ms=100) as producer:
            for _ in range(5):
                producer.send("a", b"1", delay=DELAY, **settings)  # type: ignore[arg-type]
            if flushes:
                await producer.flush()

    asyncio.run(scenario())
    _is_one_warning(_told(caplog), 5, nowhere)


def test_what_somebody_has_heard_of_is_not_told_again(nowhere: str, caplog: pytest.LogCaptureFixture) -> None:
    with delayd.Producer(nowhere, timeout_ms=100) as producer:
        with pytest.raises(delayd.ServerUnavailable):
            producer.send("a", b"1", delay=DELAY)
        heard, asked, called, unheard = [producer.send_nowait("a", b"1", delay=DELAY) for _ in range(4)]
        called.add_done_callback(lambda future: future.exception())
        with pytest.raises(delayd.ServerUnavailable):
            heard.result()
        assert asked.exception() is not None
    _is_one_warning(_told(caplog), 1, nowhere)
    assert unheard.done()

    async def scenario() -> None:
        async with delayd.AsyncProducer(nowhere, timeout_ms=100) as producer:
            sends = [producer.send("a", b"1", delay=DELAY) for _ in range(3)]
            assert len(await asyncio.gather(*sends, return_exceptions=True)) == 3

    caplog.clear()
    asyncio.run(scenario())
    assert not _told(caplog)


def test_a_producer_of_which_all_fails_keeps_what_was_heard_no_longer(
    nowhere: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("delayd.client.sending.receipts.SWEPT_AT", 10)
    monkeypatch.setattr("delayd.client.sending.receipts.KEPT_MAX", 40)
    with delayd.Producer(nowhere, timeout_ms=20) as producer:
        for _ in range(10):
            sent = [producer.send_nowait("a", b"1", delay=DELAY) for _ in range(20)]
            producer.flush()
            for future in sent[::2]:
                assert future.exception() is not None
    _is_one_warning(_told(caplog), 100, nowhere)
