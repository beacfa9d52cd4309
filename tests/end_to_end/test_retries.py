"""Messages that come again, and dead letters: from a real consumer through real servers, killed in between."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from delayd import Consumer, Producer
from delayd.client.asking import ask
from delayd.client.asking.ask import groups_at
from tests.end_to_end.cluster import Cluster, cluster, command
from tests.waiting import DEADLINE_S, wait_until

SOON = timedelta(milliseconds=50)
WAIT = timedelta(seconds=DEADLINE_S)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> object:
    with cluster(tmp_path_factory.mktemp("retries")) as running:
        yield running


def test_what_is_given_back_while_the_delay_server_is_away_comes_when_it_is_back(tmp_path: Path) -> None:
    with cluster(tmp_path / "data") as servers:
        meta = servers.meta.address
        with Producer(meta) as producer, Consumer(meta, "away", "g") as consumer:
            producer.send_batch("away", [b"1", b"2", b"3"], delay=timedelta(0))
            pulled: list[delayd.Message] = []
            while len(pulled) < 3:
                pulled += list(consumer.pull(3, wait=WAIT))
            servers.delay.kill()
            pulled[0].nack(SOON, error="one")
            pulled[1].reject("two")
            servers.realtime.kill()
            servers.realtime.start()
            pulled[2].nack(SOON, error="three")
            servers.delay.start()
            again = sorted((message.body, message.attempt, message.last_error) for message in _two(consumer))
            assert again == [(b"1", 2, "one"), (b"3", 2, "three")]
            assert len(consumer.pull(1, wait=timedelta(seconds=0.3))) == 0


def _two(consumer: Consumer) -> list[delayd.Message]:
    found: list[delayd.Message] = []
    while len(found) < 2:
        batch = consumer.pull(2, wait=WAIT)
        assert len(batch), "what was given back comes again"
        found += list(batch)
        batch.ack()
    return found


def test_dead_letters_are_listed_shown_sent_again_and_ended(servers: Cluster) -> None:
    meta = servers.meta.address
    with Producer(meta) as producer, Consumer(meta, "dead", "g", prefetch=False) as consumer:
        producer.send_batch("dead", [b"42", b"43", b"44"], delay=timedelta(0))
        left = 3
        while left:
            for message in consumer.pull(3, wait=WAIT):
                message.reject(f"no order {message.text()}", error="KeyError")
                left -= 1

        def listed() -> list[dict[str, object]]:
            rows = json.loads(command("dead", "list", "--meta", meta, "--format", "json"))
            return [row for row in rows if row["subject"] == "dead"]

        wait_until(lambda: listed() == [{"subject": "dead", "group": "g", "dead": 3}], listed)
        words = ("dead", "g", "--meta", meta)
        shown = json.loads(command("dead", "show", *words, "--format", "json"))
        assert sorted((row["body"], row["reason"], row["error"], row["attempts"]) for row in shown) == [
            (body, f"no order {body}", "KeyError", 1) for body in ("42", "43", "44")
        ]
        some = json.loads(command("dead", "show", *words, "--reason", "43", "--format", "json"))
        assert [row["body"] for row in some] == ["43"]
        assert "3 messages" in command("dead", "redrive", *words, "--dry-run")
        assert "0 messages" in command("dead", "redrive", *words, "--to", "-1h")
        assert "sent again 3 messages" in command("dead", "redrive", *words)
        again: list[delayd.Message] = []
        while len(again) < 3:
            again += list(consumer.pull(3, wait=WAIT))
        assert {(message.attempt, message.last_error) for message in again} == {(1, "KeyError")}
        again[0].ack()
        again[1].reject("never")
        again[2].reject("never")
        wait_until(lambda: listed() == [{"subject": "dead", "group": "g", "dead": 2}], listed)
        assert "purged 2 messages" in command("dead", "purge", *words)
        assert listed() == []
        books = json.loads(command("audit", "--data", str(servers.data), "--format", "json"))
        assert books["balanced"], books["findings"]
        again_by_books = [each for each in books["subjects"] if each["redriven"]]
        # What was sent again, and what was purged then, ended on the retry subject; nothing of it came to nobody.
        assert [(each["cancelled"], each["moved"], each["redriven"]) for each in again_by_books] == [(5, 3, 3)]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_deleted_group_takes_its_dead_letters_and_retries_along(servers: Cluster, keeps: bool) -> None:
    meta, subject = servers.meta.address, f"deleted.{keeps}"
    with Producer(meta) as producer:
        producer.send_batch(subject, [b"1", b"2", b"3"], delay=timedelta(0))
        retries = _give_back_and_reject(meta, subject, 3)
        wait_until(lambda: producer.cancel_where(retries).found == 3)
        waiting = json.loads(command("groups", "retries", subject, "g", "--meta", meta, "--format", "json"))
        assert waiting and all(row["attempts"] == 1 for row in waiting)
        words = ("--meta", meta, "--data", str(servers.data), "--yes")
        told = command("groups", "delete", subject, "g", *words, *(["--keep-pending"] if keeps else []))
        ended = "" if keeps else "ended 3 messages: dead letters, and what was to come to it again\n"
        assert told == f"group g of {subject} is deleted\n{ended}"
        assert producer.cancel_where(retries).found == (3 if keeps else 0)


def test_what_a_deleted_group_leaves_comes_to_no_group_of_another_life(servers: Cluster) -> None:
    meta = servers.meta.address
    with Producer(meta) as producer, Consumer(meta, "heir", "h", prefetch=False) as consumer:
        producer.send_batch("left", [b"secret-one", b"secret-two"], delay=timedelta(0))
        kept_as = _give_back_and_reject(meta, "left", 2)
        wait_until(lambda: producer.cancel_where(kept_as).found == 2)
        command("groups", "delete", "left", "g", "--keep-pending", "--yes", "--meta", meta, "--data", str(servers.data))
        servers.realtime.terminate()
        servers.realtime.start()
        producer.send("heir", b"own", delay=timedelta(0))
        consumer.pull(1, wait=WAIT)[0].reject("mine")

        def listed() -> list[str]:
            told = command("dead", "show", "heir", "h", "--meta", meta, "--format", "json")
            return [row["body"] for row in json.loads(told)]

        wait_until(lambda: "own" in listed())
        assert listed() == ["own"]
        assert producer.cancel_where(kept_as).found == 2


def _give_back_and_reject(meta: str, subject: str, count: int) -> str:
    """Give the first message back for a day and reject the others; the subject under which they are kept."""
    seen = 0
    with Consumer(meta, subject, "g", prefetch=False) as consumer:
        while seen < count:
            for message in consumer.pull(count, wait=WAIT):
                if seen:
                    message.reject("no")
                else:
                    message.nack(timedelta(days=1))
                seen += 1

    async def found() -> str:
        async with ask.meta(meta) as connection:
            (server,) = await ask.known_servers(connection, "realtime")
        (place,) = await groups_at([server], subject)
        return place.kept_as

    return asyncio.run(found())
