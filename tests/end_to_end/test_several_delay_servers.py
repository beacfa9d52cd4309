"""Two real delay servers, one of which is full, held, stopped, hung or back: no send fails, and none waits its time out
(rule I3; docs/clients.md, Several delay servers).
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

import delayd
from delayd.client.routing import SILENT_S
from tests.end_to_end.cluster import META, logged
from tests.end_to_end.processes import ServerProcess
from tests.unit.cli.runner import run
from tests.waiting import wait_until

HOUR = timedelta(hours=1)
TIMEOUT_MS = 10_000
ALL_BYTES = 1 << 46  # A reserve that no disk has free.
FULL = {"free_bytes_far": ALL_BYTES, "free_bytes_all": ALL_BYTES}


class Pair(NamedTuple):
    """Two delay servers, and a producer that runs all the while."""

    meta: ServerProcess
    other: ServerProcess
    other_data: Path
    producer: delayd.Producer

    def shares(self, sends: int = 40) -> list[int]:
        """Send messages one by one; how many each server took. Each must succeed, and soon."""
        began = time.monotonic()
        taken = Counter(self.producer.send("s", b"x", delay=HOUR).log_id for _ in range(sends))
        assert time.monotonic() - began < TIMEOUT_MS / 1000 / 2, "no send waits its time out"
        return sorted(taken.values())

    def until_even(self) -> None:
        """Wait until both servers get their share, of sends that go on all the while."""
        wait_until(lambda: self.shares(10) == [5, 5], "both are used again", within_s=10.0)


@contextmanager
def pair_in(folder: Path) -> Iterator[Pair]:
    with (
        ServerProcess("meta", folder, META) as meta,
        ServerProcess("delay", folder / "one", {"meta": meta.address}),
        ServerProcess("delay", folder / "other", {"meta": meta.address}) as other,
        delayd.Producer(meta.address, timeout_ms=TIMEOUT_MS) as producer,
    ):
        yield Pair(meta, other, folder / "other", producer)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_in(tmp_path_factory.mktemp("pair")) as found:
        yield found


def test_rule_I3_a_server_that_stops_costs_no_send_and_is_used_again_when_it_is_back(pair: Pair) -> None:
    pair.until_even()
    futures = [pair.producer.send_nowait("s", b"x", delay=HOUR) for _ in range(2_000)]
    assert pair.other.terminate() == 0
    futures += [pair.producer.send_nowait("s", b"x", delay=HOUR) for _ in range(2_000)]
    assert [future.exception() for future in futures] == [None] * len(futures)
    assert pair.shares() == [40]
    pair.other.start()
    pair.until_even()


def test_rule_I3_a_full_disk_moves_batches_to_the_other_server_at_once(pair: Pair) -> None:
    assert pair.other.terminate() == 0
    pair.other.settings |= FULL
    pair.other.start()
    assert pair.shares() == [40]
    futures = [pair.producer.send_nowait("s", b"x", delay=HOUR) for _ in range(4_000)]
    assert [future.exception() for future in futures] == [None] * len(futures)
    receipt = pair.producer.send_batch("s", [b"x"] * 20_000, delay=HOUR)
    assert len(set(receipt.log_ids.tolist())) == 1 and len(receipt) == 20_000
    placed = [pair.producer.send("s", b"x", delay=HOUR, spread=timedelta(minutes=1)) for _ in range(10)]
    assert len({each.log_id for each in placed}) == 1
    assert pair.other.terminate() == 0
    for name in FULL:
        del pair.other.settings[name]
    pair.other.start()
    pair.until_even()


def test_rule_I3_a_server_that_hangs_costs_what_was_under_way_there_and_nothing_else(pair: Pair) -> None:
    pair.until_even()
    pair.other.signal(signal.SIGSTOP)
    stuck: list[delayd.SendFuture] = []
    while not stuck:
        future = pair.producer.send_nowait("s", b"x", delay=HOUR)
        try:
            future.exception(timedelta(seconds=2 * SILENT_S))
        except TimeoutError:
            stuck.append(future)
    assert pair.shares() == [40]
    pair.other.signal(signal.SIGCONT)
    # What was under way is answered now: its time is not over.
    assert [future.exception() for future in stuck] == [None]
    pair.until_even()


def test_rule_I3_a_server_that_is_held_by_a_damaged_file_costs_no_send(tmp_path: Path) -> None:
    with pair_in(tmp_path) as pair:
        pair.until_even()
        for _ in range(2):
            pair.producer.send_batch("s", [b"x" * 200] * 1_000, delay=HOUR)
        pair.until_even()  # More stands behind the damage, so that it is no torn tail.
        pair.other.kill()
        message_log = min((pair.other_data / "delay" / "message").glob("*.log"))
        good = message_log.read_bytes()
        message_log.write_bytes(good[:20_000] + bytes(64) + good[20_064:])
        pair.other.start_held()
        assert pair.shares() == [40]
        restored = message_log.with_suffix(".tmp")
        restored.write_bytes(good)
        restored.replace(message_log)
        pair.other.until_ready()
        pair.until_even()


def test_rule_I4_a_send_whose_owner_is_away_says_which_server_that_is_and_what_to_do(tmp_path: Path) -> None:
    with pair_in(tmp_path) as pair:
        attempts = count()

        def owned() -> dict[int, str] | None:
            # A key that is new falls into a slot that no server may own yet.
            keys = [f"{next(attempts)}-{number}" for number in range(20)]
            receipt = pair.producer.send_batch("s", [b"x"] * len(keys), delay=HOUR, keys=keys)
            owners = dict(zip(receipt.log_ids.tolist(), keys, strict=True))
            return owners if len(owners) == 2 else None

        owners = wait_until(owned, "both own keys", every_s=0.1)
        assert owners is not None
        assert pair.other.terminate() == 0
        free = pair.producer.send("s", b"x", delay=HOUR)
        (key,) = [key for owner, key in owners.items() if owner != free.log_id]
        began = time.monotonic()
        with (
            delayd.Producer(pair.meta.address, timeout_ms=1_000) as impatient,
            pytest.raises(delayd.ServerUnavailable) as raised,
        ):
            impatient.send("s", b"x", delay=HOUR, key=key)
        assert time.monotonic() - began < TIMEOUT_MS / 1000
        assert pair.other.address in raised.value.message
        assert "delayd status" in raised.value.message and "delayd slots move" in raised.value.message


def test_a_quota_holds_for_the_cluster_when_a_delay_server_is_added_later(tmp_path: Path) -> None:
    with (
        ServerProcess("meta", tmp_path, META) as meta,
        ServerProcess("delay", tmp_path / "one", {"meta": meta.address}) as one,
    ):
        words = ("--meta", meta.address, "--data", str(tmp_path))
        logged(one, "registered")
        assert run("subjects", "set", "mails", "--pending", "51", *words).code == 0
        with (
            ServerProcess("delay", tmp_path / "other", {"meta": meta.address}) as other,
            delayd.Producer(meta.address, timeout_ms=TIMEOUT_MS) as producer,
        ):
            # The servers hear of each other, and share what the quota allows: the new one may do so when it gets it.
            for server in (one, other):
                logged(server, " servers=2")
            with pytest.raises(delayd.BatchFailed) as raised:
                producer.send_batch("mails", [b"x"] * 100, delay=HOUR)
            taken = Counter(raised.value.receipt.log_ids.tolist())
            assert sorted(taken.values()) == [25, 26]
            with pytest.raises(delayd.QuotaReached):
                producer.send("mails", b"x", delay=HOUR)
            producer.send("other", b"x", delay=HOUR)
