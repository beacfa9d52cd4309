"""A request with an Idempotency-Key is done once, whatever is killed, and answered as the first time (docs/once.md)."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

import delayd
from tests.end_to_end.gateways import LINES, Answer, Gateway, Json, gateway_of
from tests.end_to_end.processes import ServerProcess


class Cluster(NamedTuple):
    meta: str
    gateway: Gateway
    other: Gateway
    folder: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("once")
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", folder))
        for role in ("realtime", "delay"):
            stack.enter_context(ServerProcess(role, folder, {"meta": meta.address}))
        gateways = [stack.enter_context(gateway_of(meta.address, folder)) for _ in range(2)]
        yield Cluster(meta.address, *gateways, folder)
        for gateway in gateways:
            assert gateway.stop() == 0
            assert " ERROR " not in gateway.log, gateway.log


def send(gateway: Gateway, subject: str, wish: Json | list[Json] | bytes, key: str, query: str = "") -> Answer:
    return gateway.ask("POST", f"/v1/subjects/{subject}/messages{query}", wish, {"idempotency-key": key})


def pending(gateway: Gateway, subject: str) -> int:
    total = gateway.ask("GET", f"/v1/subjects/{subject}/messages").lines[-1]["pending"]
    assert isinstance(total, int)
    return total


def first(answer: Answer) -> Json:
    """An answer without the word that the message was known."""
    assert answer.status == 201, answer
    return {name: value for name, value in answer.json.items() if name not in ("duplicate", "replaced")}


def test_a_request_that_comes_again_is_answered_as_the_first_time(cluster: Cluster) -> None:
    wish: Json = {"body": "a", "delay": "1h", "headers": {"h": "v"}}
    sent = send(cluster.gateway, "again", wish, "order-1")
    assert sent.status == 201 and "duplicate" not in sent.json
    for gateway in (cluster.gateway, cluster.other):
        again = send(gateway, "again", wish, "order-1")
        assert again.json["duplicate"] is True and first(again) == first(sent)
    assert pending(cluster.gateway, "again") == 1
    other = send(cluster.gateway, "again", wish, "order-2")
    assert other.json["sequence"] != sent.json["sequence"] and pending(cluster.gateway, "again") == 2
    assert cluster.gateway.ask("DELETE", f"/v1/subjects/again/messages/{sent.json['id']}").status == 200
    assert first(send(cluster.other, "again", wish, "order-1")) == first(sent), "also when it is cancelled"
    raw = send(cluster.gateway, "again", b"\xff", "order-3", "?delay=1h")
    assert first(send(cluster.gateway, "again", b"\xff", "order-3", "?delay=1h")) == first(raw)


@pytest.mark.parametrize(
    ("subject", "wish"),
    [
        ("same", {"body": "b", "delay": "1h"}),
        ("same", {"body": "a", "delay": "2h"}),
        ("same", {"body": "a", "delay": "1h", "key": "k"}),
        ("same", [{"body": "a", "delay": "1h"}]),
        ("different", {"body": "a", "delay": "1h"}),
    ],
)
def test_another_request_with_the_same_name_is_refused(cluster: Cluster, subject: str, wish: Json) -> None:
    assert send(cluster.gateway, "same", {"body": "a", "delay": "1h"}, "same").status == 201
    refused = send(cluster.other, subject, wish, "same")
    assert (refused.status, refused.code) == (422, "other_request")
    assert pending(cluster.gateway, "same") == 1 and pending(cluster.gateway, "different") == 0


def test_a_message_that_was_due_at_once_keeps_its_answer(cluster: Cluster) -> None:
    wish: Json = {"body": "now", "delay_ms": 0}
    sent = send(cluster.gateway, "now", wish, "now")
    (message,) = cluster.gateway.pull("now")
    assert message["body"] == "now"
    cluster.gateway.say("ack", message["lease"])
    again = send(cluster.other, "now", wish, "now")
    assert first(again) == first(sent)
    state = cluster.gateway.ask("GET", f"/v1/subjects/now/messages/{again.json['id']}").json["state"]
    assert state in ("dispatched", "in_flight")
    assert cluster.gateway.pull("now", wait_ms=200) == []


def test_messages_with_keys_are_sent_once_and_refusals_are_not_kept(cluster: Cluster) -> None:
    wish: Json = {"body": "a", "delay": "1h", "key": "k"}
    sent = send(cluster.gateway, "keyed", wish, "one")
    assert first(send(cluster.other, "keyed", wish, "one")) == first(sent)
    taken = send(cluster.gateway, "keyed", wish, "two")
    assert (taken.status, taken.code) == (409, "key_pending")
    keep = send(cluster.gateway, "keyed", {**wish, "on_conflict": "keep"}, "three")
    assert keep.json["kept"] is True and keep.json["sequence"] == sent.json["sequence"]
    assert cluster.gateway.ask("DELETE", "/v1/subjects/keyed/messages?key=k").status == 200
    again = send(cluster.gateway, "keyed", {**wish, "on_conflict": "keep"}, "three")
    assert first(again) == first(keep), "it stood for this message, which is not sent after all"
    assert pending(cluster.gateway, "keyed") == 0
    anew = send(cluster.gateway, "keyed", wish, "two")
    assert anew.status == 201, "a message that was refused may be sent"
    replace: Json = {**wish, "on_conflict": "replace", "body": "b"}
    replaced = send(cluster.gateway, "keyed", replace, "four")
    assert replaced.json["replaced"] == anew.json["sequence"]
    assert first(send(cluster.gateway, "keyed", replace, "four")) == first(replaced)
    assert first(send(cluster.gateway, "keyed", wish, "two")) == first(anew)
    assert pending(cluster.gateway, "keyed") == 1


def test_of_a_list_and_a_stream_each_message_is_sent_once(cluster: Cluster) -> None:
    wishes: list[Json] = [
        {"body": "a", "delay": "1h"},
        {"body": "b"},
        {"body": "c", "delay": "1h", "key": "c"},
        {"body": "d", "delay": "2h"},
    ]
    sent, again = (json.loads(send(cluster.gateway, "some", wishes, "list").body) for _ in range(2))
    assert [each.get("status") for each in sent] == [None, 400, None, None]
    assert [each.get("id", each.get("code")) for each in again] == [each.get("id", each.get("code")) for each in sent]
    assert pending(cluster.gateway, "some") == 3
    assert send(cluster.gateway, "some", wishes[:3], "list").status == 422
    lines = b"".join(json.dumps(wish).encode() + b"\n" for wish in wishes * 300)

    def stream(text: bytes) -> list[Json]:
        path = "/v1/subjects/stream/messages"
        return cluster.gateway.ask("POST", path, text, {**LINES, "idempotency-key": "stream"}).lines

    half, whole = stream(lines[: len(lines) // 2]), stream(lines)
    assert len(whole) == 1_200
    told = [(each.get("id"), each.get("code")) for each in whole]
    assert told[:500] == [(each.get("id"), each.get("code")) for each in half[:500]]
    assert pending(cluster.gateway, "stream") == 601, "and one has the key"


def test_of_many_that_come_together_one_is_sent(cluster: Cluster) -> None:
    wish: Json = {"body": "x", "delay": "1h"}

    def one(number: int) -> Answer:
        return send(cluster.gateway if number % 2 else cluster.other, "race", wish, f"race-{number // 8}")

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(64)))
    for number, answer in enumerate(answers):
        if answer.status != 201:
            assert (answer.status, answer.code, answer.headers["retry-after"]) == (409, "under_way", "1")
    sequences = [{each.json["sequence"] for each in answers[at : at + 8] if each.status == 201} for at in range(0, 64, 8)]
    assert all(len(each) == 1 for each in sequences) and pending(cluster.gateway, "race") == 8


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_header_that_is_no_name_is_refused(cluster: Cluster, key: str) -> None:
    refused = send(cluster.gateway, "none", {"body": "a", "delay": "1h"}, key)
    assert (refused.status, refused.code) == (400, "bad_argument")
    with delayd.Producer(cluster.meta) as producer, pytest.raises(delayd.BadSubject):
        producer.send("%once", b"", deliver_at_ms=int(time.time() * 1000) + 1_000)


assert signal and threading
