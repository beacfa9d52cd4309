"""Messages that expire, as programs send and get them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import delayd
from delayd import BatchFailed, MessageState
from delayd.errors import BadExpiry
from delayd.reading.books import audit_directory
from tests.waiting import wait_until

HOUR = timedelta(hours=1)


def test_what_expired_is_not_delivered_and_the_books_balance(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    with (
        delayd.open(tmp_path / "data") as home,
        home.producer() as producer,
        home.consumer("seats", "g") as consumer,
    ):
        old = producer.send("seats", b"old", deliver_at=now - HOUR, ttl=timedelta(minutes=1))
        new = producer.send("seats", b"new", deliver_at=now - HOUR, ttl=2 * HOUR, headers={"a": "b"}, tags=["eu"])
        many = producer.send_batch(
            "seats", [b"1", b"2", b"3"], deliver_at=now - HOUR, expires_at=[now - HOUR / 2, None, now + HOUR]
        )
        found: dict[bytes, datetime | None] = {}
        while len(found) < 3:
            batch = consumer.pull()
            found |= {message.body: message.expires_at for message in batch}
            batch.ack()
        assert set(found) == {b"new", b"2", b"3"} and found[b"2"] is None
        assert found[b"new"] == new.deliver_at + 2 * HOUR
        wait_until(lambda: producer.get("seats", receipt=old).state is MessageState.EXPIRED)
        wait_until(lambda: producer.get_batch("seats", receipt=many)["state"][0] == MessageState.EXPIRED)
        # The server judges what is due so long from now, and names the rows.
        with pytest.raises(BadExpiry):
            producer.send("seats", b"x", delay=2 * HOUR, expires_at=now + HOUR)
        with pytest.raises(BatchFailed) as failed:
            producer.send_batch("seats", [b"x", b"y"], delay=[2 * HOUR, HOUR / 2], expires_at=now + HOUR)
        ((rows, error),) = failed.value.failures
        assert rows.tolist() == [0] and isinstance(error, BadExpiry) and len(failed.value.receipt) == 1
    report = audit_directory(str(tmp_path / "data"), now_ms=time.time_ns() // 1_000_000)
    assert (report.total.expired, report.total.dispatched) == (2, 3)
    assert report.balanced
