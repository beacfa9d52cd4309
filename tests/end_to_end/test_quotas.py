"""Quotas with real servers: set and shown by the command line, refused by name, kept over a restart."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

import delayd
from tests.end_to_end.up_process import Up, up
from tests.unit.cli.runner import run
from tests.waiting import wait_until

HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("quotas"), "--port", "0") as servers:
        yield servers.until_ready()


def set_quota(running: Up, subject: str, *options: str, code: int = 0) -> str:
    ran = run("subjects", "set", subject, *options, "--meta", running.meta, "--data", str(running.data))
    assert ran.code == code, ran.err
    return ran.out or ran.err


def shown(running: Up, subject: str) -> list[dict[str, object]]:
    ran = run("subjects", "show", "--prefix", subject, "--meta", running.meta, "--format", "json")
    assert ran.code == 0, ran.err
    return [row for row in json.loads(ran.out) if row["subject"] == subject]


def test_a_forecast_is_held_against_the_quota_that_a_running_server_has(running: Up) -> None:
    due_ms = int((datetime.now(UTC) + HOUR).timestamp()) * 1_000
    with delayd.Producer(running.meta) as producer:
        producer.send_batch("bills", deliver_at_ms=np.full(4, due_ms, np.int64), bodies=[b"x"] * 4)
    set_quota(running, "bills", "--per-second", "3")
    words = ("schedule", "forecast", "--subject", "bills", "--data", str(running.data), "--format", "json")
    ran = run(*words, "--meta", running.meta)
    assert ran.code == 0 and "bills may have per_second 3\n" in ran.err, ran.err
    assert [(row["fullest_second_messages"], row["above"]) for row in json.loads(ran.out)] == [(4, "quota")]
    away = run(*words, "--meta", "127.0.0.1:1")
    assert away.code == 0 and "the quota of bills is not known: no meta server" in away.err, away.err
    assert [row["above"] for row in json.loads(away.out)] == [""]


def test_what_is_over_the_quota_is_refused_by_name_and_the_rest_is_kept(running: Up) -> None:
    assert "mails may have per_second 3, pending 8" in set_quota(
        running, "mails", "--per-second", "3", "--pending", "8"
    )
    with delayd.Producer(running.meta) as producer:
        first = producer.send("mails", b"1", delay=HOUR)
        second_ms = first.deliver_at_ms // 1000 * 1000
        same = np.full(5, second_ms, np.int64)
        with pytest.raises(delayd.BatchFailed) as raised:
            producer.send_batch("mails", deliver_at_ms=same, bodies=[b"x"] * 5)
        assert len(raised.value.receipt) == 2
        (failure,) = raised.value.failures
        assert list(failure.rows) == [2, 3, 4]
        refused = failure.error
        assert isinstance(refused, delayd.QuotaReached)
        assert refused.next_free_ms == second_ms + 1_000
        wait_until(lambda: shown(running, "mails")[0]["pending_now"] == 3, lambda: shown(running, "mails"))
        (row,) = shown(running, "mails")
        assert (row["state"], row["highest"], row["per_second"], row["pending"]) == ("counted", 3, 3, 8)
        with pytest.raises(delayd.QuotaReached):
            producer.send("mails", b"over", deliver_at_ms=second_ms)
        producer.send("mails", b"next", deliver_at_ms=refused.next_free_ms)
        set_quota(running, "mails", "--none")
        producer.send("mails", b"free", deliver_at_ms=second_ms)
    assert shown(running, "mails") == []


def test_bad_quotas_are_refused_where_they_are_given(running: Up) -> None:
    assert "name at least one limit" in set_quota(running, "mails", code=2)
    assert "not both" in set_quota(running, "mails", "--none", "--pending", "1", code=2)
    assert "--pending" in set_quota(running, "mails", "--pending", "-1", code=2)
    assert "--per-second" in set_quota(running, "mails", "--per-second", str(1 << 63), code=2)
    assert "a b" in set_quota(running, "a b", "--pending", "1", code=2)
    ran = run("subjects", "set", "unheard", "--none", "--meta", running.meta, "--data", str(running.data))
    assert (ran.code, ran.err.startswith("delayd: nobody has sent to unheard yet")) == (0, True)


def test_sends_with_spread_take_seconds_of_their_own_and_the_receipt_says_which(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        begin_ms = producer.send("calls", b"first", delay=HOUR).deliver_at_ms // 1000 * 1000
        spread = timedelta(seconds=9)
        found = [producer.send("calls", b"x", deliver_at_ms=begin_ms, spread=spread) for _ in range(9)]
        assert [each.deliver_at_ms // 1000 for each in found] == [begin_ms // 1000 + second for second in range(1, 10)]
        batch = producer.send_batch("calls", [b"y"] * 40, begin_ms, spread=spread)
        loads = np.bincount(batch.deliver_at_ms // 1000 - begin_ms // 1000)
        assert loads.tolist() == [4] * 10
        future = producer.send_nowait("calls", b"z", delay=HOUR, spread=timedelta(minutes=1))
        assert 0 <= future.receipt(20).deliver_at_ms - begin_ms <= 120_000
        own = [begin_ms + 3_600_000 + 10_000 * row for row in range(600)]
        apart = producer.send_batch("calls", [b"a"] * 600, own, spread=spread)
        assert ((apart.deliver_at_ms - own >= 0) & (apart.deliver_at_ms - own <= 9_000)).all()
        keyed = producer.send("calls", b"k", delay=HOUR, key="k", spread=spread)
        again = producer.send("calls", b"k", delay=HOUR, key="k", on_conflict="keep", spread=spread)
        assert again.kept and again.deliver_at_ms == keyed.deliver_at_ms
        with pytest.raises(delayd.BadArgument, match="spread"):
            producer.send("calls", b"x", delay=HOUR, spread=timedelta(days=8))
        with pytest.raises(delayd.BadArgument, match="spread"):
            producer.send("calls", b"x", delay=HOUR, spread=timedelta(seconds=-1))


def test_awaited_sends_with_spread_that_ask_together_share_no_second(running: Up) -> None:
    async def send() -> list[int]:
        async with delayd.AsyncProducer(running.meta) as producer:
            spread = timedelta(seconds=100)
            futures = [producer.send("texts", b"x", delay=HOUR, spread=spread) for _ in range(50)]
            receipts = [await future for future in futures]
            batch = await producer.send_batch("texts", [b"x"] * 50, delay=HOUR, spread=spread)
            kept = producer.send("texts", b"flushed", delay=HOUR, spread=spread)
            await producer.flush()
            assert kept.done()
            return [*(each.deliver_at_ms for each in receipts), *batch.deliver_at_ms.tolist()]

    due = asyncio.run(send())
    assert len({instant_ms // 1000 for instant_ms in due}) == 100


def test_spread_keeps_within_the_quota_and_says_when_there_is_no_room(running: Up) -> None:
    set_quota(running, "alarms", "--per-second", "2")
    with delayd.Producer(running.meta) as producer:
        at_ms = producer.send("alarms", b"1", delay=HOUR).deliver_at_ms // 1000 * 1000
        spread = timedelta(milliseconds=2_999)
        receipt = producer.send_batch("alarms", [b"x"] * 5, at_ms, spread=spread)
        assert np.bincount(receipt.deliver_at_ms // 1000 - at_ms // 1000).tolist() == [1, 2, 2]
        with pytest.raises(delayd.QuotaReached) as raised:
            producer.send("alarms", b"x", deliver_at_ms=at_ms, spread=spread)
        assert raised.value.next_free_ms == at_ms + 3_000


@pytest.mark.parametrize(("columns", "heads"), [("80", ["subject", "state", "highest"]), ("40", ["subject", "state"])])
def test_quotas_are_shown_in_any_width_and_as_csv(running: Up, columns: str, heads: list[str]) -> None:
    set_quota(running, "shown", "--per-second", "5", "--pending-bytes", "1000000")
    arguments = ("subjects", "show", "--prefix", "shown", "--meta", running.meta)
    ran = run(*arguments, environment={"COLUMNS": columns, "LINES": ""})
    assert ran.code == 0, ran.err
    assert max(map(len, ran.out.splitlines())) <= int(columns)
    assert all(head in ran.out for head in heads)
    assert "counted" in ran.out and "5" in ran.out
    (row,) = csv.DictReader(run(*arguments, "--format", "csv").out.splitlines())
    assert (row["subject"], row["per_second"], row["pending"], row["pending_bytes"]) == ("shown", "5", "", "1000000")
    assert (row["pending_now"], row["bytes_now"], row["highest"], row["highest_at_ms"]) == ("0", "0", "0", "")


def test_a_quota_outlives_the_death_of_its_server_and_counts_what_was_pending(running: Up) -> None:
    set_quota(running, "kept", "--pending", "5")
    with delayd.Producer(running.meta) as producer:
        producer.send_batch("kept", [b"x"] * 4, delay=HOUR)
        before = len(running.ready("delay"))
        running.kill("delay")
        running.until(lambda: len(running.ready("delay")) > before, "no new life")
        with pytest.raises(delayd.BatchFailed) as raised:
            producer.send_batch("kept", [b"y"] * 2, delay=HOUR)
        assert len(raised.value.receipt) == 1
        (row,) = shown(running, "kept")
        assert (row["state"], row["pending"], row["pending_now"]) == ("counted", 5, 5)
        assert producer.cancel_batch("kept", receipt=raised.value.receipt).tolist() == [delayd.CancelAnswer.CANCELLED]
        producer.send("kept", b"z", delay=HOUR)


def test_the_command_line_spreads_messages_and_tells_when_there_is_room(running: Up) -> None:
    set_quota(running, "night", "--per-second", "2")
    begin = (datetime.now(UTC) + 9 * HOUR).replace(minute=0, second=0, microsecond=0)
    begin_ms = int(begin.timestamp()) * 1_000
    sent = ("send", "night", "--at", begin.isoformat(), "--meta", running.meta, "--format", "json")
    ran = run(*sent, "--lines", "--spread", "4s", stdin=b"x\n" * 10)
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert (told["kept"], told["first_due_ms"]) == (10, begin_ms)
    assert begin_ms + 4_000 <= told["last_due_ms"] <= begin_ms + 4_999
    over = run(*sent, "y")
    assert over.code == 2
    assert "(per_second 2)" in over.err and f"begins at {begin:%Y-%m-%dT%H:00:05Z}" in over.err
    placed = json.loads(run(*sent, "y", "--spread", "1h").out)
    assert placed["deliver_at_ms"] == begin_ms + 5_000
