"""Groups from the command line and from consumers, against real servers: where they begin, pauses and moves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from delayd import Consumer, Producer
from delayd.errors import BadArgument, NaiveDatetime, StaleHandle
from tests.end_to_end.up_process import Up, up
from tests.unit.cli.runner import run
from tests.waiting import wait_until

NOW = timedelta(0)
SHORT = timedelta(seconds=0.2)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("groups"), "--port", "0") as running:
        yield running.until_ready()


def _send(servers: Up, subject: str, *bodies: bytes) -> None:
    with Producer(servers.meta) as producer:
        for body in bodies:
            producer.send(subject, body, delay=NOW)


def _all(consumer: Consumer, count: int) -> list[bytes]:
    """So many messages, in their order, acknowledged."""
    found: list[bytes] = []

    def are_there() -> bool:
        batch = consumer.pull(wait=SHORT)
        found.extend(batch.bodies)
        batch.ack()
        return len(found) >= count

    wait_until(are_there)
    return sorted(found)


def _words(servers: Up, subject: str, word: str, *more: str) -> str:
    secret = ("--data", str(servers.data)) if word != "show" else ()
    ran = run("groups", word, subject, "g", "--meta", servers.meta, *secret, *more)
    assert ran.code == 0, ran.err
    return ran.out


def _row(servers: Up, subject: str) -> dict[str, object]:
    (row,) = json.loads(_words(servers, subject, "show", "--format", "json"))
    assert isinstance(row, dict)
    return row


def test_a_group_goes_back_and_skips(servers: Up) -> None:
    _send(servers, "move", b"1", b"2", b"3")
    with Consumer(servers.meta, "move", "g", prefetch=False) as consumer:
        assert _all(consumer, 3) == [b"1", b"2", b"3"]
        told = _words(servers, "move", "rewind", "--to", "earliest", "--dry-run")
        assert told == "group g of move goes from message 3 to 0, and lets 0 go that it holds\n"
        assert consumer.pull(wait=SHORT).bodies == []
        assert _words(servers, "move", "rewind", "--to", "1", "--yes").endswith("g of move goes on at message 1\n")
        held = consumer.pull(1)
        row = _row(servers, "move")
        assert (row["next"], row["end"], row["oldest_unacked"], row["outstanding"]) == (2, 3, 1, 1)
        assert isinstance(row["oldest_ago_ms"], int)
        _words(servers, "move", "rewind", "--to", "latest", "--yes")
        with pytest.raises(StaleHandle) as stale:
            held.ack()
        assert stale.value.reason == "lease_ended"
        assert _row(servers, "move")["oldest_ago_ms"] is None
        _words(servers, "move", "rewind", "--to", "-1h", "--yes")
        assert _all(consumer, 3) == [b"1", b"2", b"3"]
    refused = run("groups", "rewind", "move", "g", "--to", "9", "--meta", servers.meta, "--data", str(servers.data))
    assert refused.code != 0 and "a group may go on at 0 to 3, not at 9" in refused.err
    refused = run("groups", "pause", "move", "h", "--meta", servers.meta, "--data", str(servers.data))
    assert refused.code != 0 and "no realtime server that lives has a group h of move" in refused.err


def test_a_paused_group_waits_over_a_kill_of_its_server(servers: Up) -> None:
    _send(servers, "pause", b"1")
    with Consumer(servers.meta, "pause", "g", prefetch=False) as consumer:
        assert _all(consumer, 1) == [b"1"]
        assert _words(servers, "pause", "pause") == "group g of pause is paused\n"
        _send(servers, "pause", b"2")
        servers.kill("realtime")
        wait_until(lambda: run("groups", "show", "pause", "g", "--meta", servers.meta).code == 0)
        assert consumer.pull(wait=SHORT).bodies == [] and _row(servers, "pause")["state"] == "paused"
        assert _words(servers, "pause", "resume") == "group g of pause gets messages again\n"
        assert _all(consumer, 1) == [b"2"]


def test_groups_begin_where_their_consumers_say(servers: Up) -> None:
    _send(servers, "begin", b"old")
    with Consumer(servers.meta, "begin", "all") as consumer:
        assert _all(consumer, 1) == [b"old"]
    later = datetime.now(UTC) + timedelta(seconds=1)
    with (
        Consumer(servers.meta, "begin", "new", start="latest") as new,
        Consumer(servers.meta, "begin", "at", start=later) as at,
        Consumer(servers.meta, "begin", "each", broadcast=True) as first,
        Consumer(servers.meta, "begin", "each", broadcast=True) as second,
        Consumer(servers.meta, "begin.>", "each", broadcast=True) as pattern,
        Consumer(servers.meta, ["begin", "begin.too"], "each", broadcast=True) as many,
    ):
        consumers = (new, at, first, second, many)
        for consumer in (*consumers, pattern):
            assert consumer.pull(wait=SHORT).bodies == []
        _send(servers, "begin", b"fresh")
        _send(servers, "begin.more", b"of a pattern")
        for consumer in consumers:
            assert _all(consumer, 1) == [b"fresh"]
        assert _all(pattern, 1) == [b"of a pattern"]


def test_a_start_that_makes_no_sense_is_refused() -> None:
    for start, error in (("first", BadArgument), (7, BadArgument), (datetime(2026, 1, 1), NaiveDatetime)):  # noqa: DTZ001
        with pytest.raises(error):
            Consumer("127.0.0.1:1", "begin", "g", start=start)  # type: ignore[arg-type]
