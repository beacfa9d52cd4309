"""A request with an Idempotency-Key is done once, whatever is killed, and answered as the first time (docs/once.md)."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest

import delayd
from delayd.client.asking.once import SentOnce
from delayd.client.producer import once_of
from delayd.machine.operating import WaitKind
from delayd.reading.books import audit_directory
from tests.end_to_end.cluster import META, cluster
from tests.end_to_end.gateways import LINES, Answer, Gateway, Json, gateway_of, serving
from tests.end_to_end.older_copies import copy_of, restore
from tests.end_to_end.processes import ServerProcess
from tests.waiting import wait_until

ALL_BYTES = 1 << 46  # A reserve that no disk has free.


class Front(NamedTuple):
    meta: str
    gateway: Gateway
    other: Gateway


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("once")
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", folder))
        for role in ("realtime", "delay"):
            stack.enter_context(ServerProcess(role, folder, {"meta": meta.address}))
        one, other = (stack.enter_context(gateway_of(meta.address, folder)) for _ in range(2))
        yield Front(meta.address, one, other)
        for gateway in (one, other):
            assert gateway.stop() == 0
            assert " ERROR " not in gateway.log, gateway.log


def send(gateway: Gateway, subject: str, wish: Json | list[Json] | bytes, key: str, query: str = "") -> Answer:
    return gateway.ask("POST", f"/v1/subjects/{subject}/messages{query}", wish, {"idempotency-key": key})


def pending(gateway: Gateway, subject: str) -> int:
    total = _total(gateway, subject)
    assert isinstance(total, int)
    return total


def _total(gateway: Gateway, subject: str) -> object:
    return gateway.ask("GET", f"/v1/subjects/{subject}/messages").lines[-1].get("pending")


def first(answer: Answer) -> Json:
    """An answer without the word that the message was known."""
    assert answer.status == 201, answer
    return {name: value for name, value in answer.json.items() if name not in ("duplicate", "replaced")}


def test_a_request_that_comes_again_is_answered_as_the_first_time(front: Front) -> None:
    wish: Json = {"body": "a", "delay": "1h", "headers": {"h": "v"}}
    sent = send(front.gateway, "again", wish, "order-1")
    assert sent.status == 201 and "duplicate" not in sent.json
    for gateway in (front.gateway, front.other):
        again = send(gateway, "again", wish, "order-1")
        assert again.json["duplicate"] is True and first(again) == first(sent)
    assert pending(front.gateway, "again") == 1
    other = send(front.gateway, "again", wish, "order-2")
    assert other.json["sequence"] != sent.json["sequence"] and pending(front.gateway, "again") == 2
    assert front.gateway.ask("DELETE", f"/v1/subjects/again/messages/{sent.json['id']}").status == 200
    assert first(send(front.other, "again", wish, "order-1")) == first(sent), "also when it is cancelled"
    raw = send(front.gateway, "again", b"\xff", "order-3", "?delay=1h")
    assert first(send(front.gateway, "again", b"\xff", "order-3", "?delay=1h")) == first(raw)


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
def test_another_request_with_the_same_name_is_refused(front: Front, subject: str, wish: Json) -> None:
    assert send(front.gateway, "same", {"body": "a", "delay": "1h"}, "same").status == 201
    refused = send(front.other, subject, wish, "same")
    assert (refused.status, refused.code) == (422, "other_request")
    assert pending(front.gateway, "same") == 1 and pending(front.gateway, "different") == 0


def test_a_message_that_was_due_at_once_keeps_its_answer(front: Front) -> None:
    wish: Json = {"body": "now", "delay_ms": 0}
    sent = send(front.gateway, "now", wish, "now")
    (message,) = front.gateway.pull("now")
    assert message["body"] == "now"
    front.gateway.say("ack", message["lease"])
    again = send(front.other, "now", wish, "now")
    assert first(again) == first(sent)
    state = front.gateway.ask("GET", f"/v1/subjects/now/messages/{again.json['id']}").json["state"]
    assert state in ("dispatched", "in_flight")
    assert front.gateway.pull("now", wait_ms=200) == []


def test_messages_with_keys_are_sent_once_and_refusals_are_not_kept(front: Front) -> None:
    wish: Json = {"body": "a", "delay": "1h", "key": "k"}
    sent = send(front.gateway, "keyed", wish, "one")
    assert first(send(front.other, "keyed", wish, "one")) == first(sent)
    taken = send(front.gateway, "keyed", wish, "two")
    assert (taken.status, taken.code) == (409, "key_pending")
    keep = send(front.gateway, "keyed", {**wish, "on_conflict": "keep"}, "three")
    assert keep.json["kept"] is True and keep.json["sequence"] == sent.json["sequence"]
    assert front.gateway.ask("DELETE", "/v1/subjects/keyed/messages?key=k").status == 200
    again = send(front.gateway, "keyed", {**wish, "on_conflict": "keep"}, "three")
    assert first(again) == first(keep), "it stood for this message, which is not sent after all"
    assert pending(front.gateway, "keyed") == 0
    anew = send(front.gateway, "keyed", wish, "two")
    assert anew.status == 201, "a message that was refused may be sent"
    replace: Json = {**wish, "on_conflict": "replace", "body": "b"}
    replaced = send(front.gateway, "keyed", replace, "four")
    assert replaced.json["replaced"] == anew.json["sequence"]
    assert first(send(front.gateway, "keyed", replace, "four")) == first(replaced)
    assert first(send(front.gateway, "keyed", wish, "two")) == first(anew)
    assert pending(front.gateway, "keyed") == 1


def test_of_a_list_and_a_stream_each_message_is_sent_once(front: Front) -> None:
    wishes: list[Json] = [
        {"body": "a", "delay": "1h"},
        {"body": "b"},
        {"body": "c", "delay": "1h", "key": "c"},
        {"body": "d", "delay": "2h"},
    ]
    sent, again = (json.loads(send(front.gateway, "some", wishes, "list").body) for _ in range(2))
    assert [each.get("status") for each in sent] == [None, 400, None, None]
    assert [each.get("id", each.get("code")) for each in again] == [each.get("id", each.get("code")) for each in sent]
    assert pending(front.gateway, "some") == 3
    assert send(front.gateway, "some", wishes[:3], "list").status == 422
    lines = b"".join(json.dumps(wish).encode() + b"\n" for wish in wishes * 300)

    def stream(text: bytes) -> list[Json]:
        path = "/v1/subjects/stream/messages"
        return front.gateway.ask("POST", path, text, {**LINES, "idempotency-key": "stream"}).lines

    half, whole = stream(lines[: len(lines) // 2]), stream(lines)
    assert len(whole) == 1_200
    told = [(each.get("id"), each.get("code")) for each in whole]
    assert told[:500] == [(each.get("id"), each.get("code")) for each in half[:500]]
    assert pending(front.gateway, "stream") == 601, "and one has the key"


def test_a_line_of_a_stream_is_held_against_the_one_with_its_number(front: Front) -> None:
    def stream(*lines: str) -> list[object]:
        path, text = "/v1/subjects/lines/messages", "\n".join(lines).encode()
        answer = front.gateway.ask("POST", path, text, {**LINES, "idempotency-key": "lines"})
        return [each.get("id", each.get("code")) for each in answer.lines]

    plain, keyed = '{"body": "a", "delay": "1h"}', '{"body": "b", "delay": "1h", "key": "k"}'
    first = stream("{", plain, keyed)
    assert first[0] == "bad_argument" and pending(front.gateway, "lines") == 2
    again = stream(plain, plain, keyed)
    assert again[1:] == first[1:] and again[0] not in first, "a line that could not be read is counted"
    other = '{"body": "b", "delay": "1h"}'
    assert stream(plain, keyed, other) == [again[0], "other_request", "other_request"]
    assert pending(front.gateway, "lines") == 3


def test_how_a_request_is_written_does_not_matter(front: Front) -> None:
    texts = (
        b'{"body": "a", "delay": "1h", "headers": {"a": "1", "b": "2"}}',
        b'{"headers": {"b": "2", "a": "1"}, "on_conflict": "reject",\n "delay": "1h", "key": null, "body": "\\u0061"}',
    )
    kind = {"content-type": "application/json", "idempotency-key": "written"}
    sent, again = (front.gateway.ask("POST", "/v1/subjects/written/messages", text, kind) for text in texts)
    assert first(sent) == first(again) and again.json["duplicate"] is True


def test_a_schedule_runs_once_under_a_name(front: Front) -> None:
    path = "/v1/cron/nightly"
    assert front.gateway.ask("PUT", path, {"every": "1d", "subject": "nightly", "body": "x"}).status == 200
    for gateway, name in ((front.gateway, "a"), (front.other, "a"), (front.other, "b"), (front.gateway, "a")):
        assert gateway.ask("POST", f"{path}/run", headers={"idempotency-key": name}).status == 200
    came: list[Json] = []

    def have_come() -> bool:
        came.extend(front.gateway.pull("nightly", max_messages=10))
        return len(came) > 1

    wait_until(have_come, "two messages")
    assert len(came) == 2 and front.gateway.pull("nightly", wait_ms=200) == []
    assert front.gateway.ask("POST", f"{path}/run", headers={"idempotency-key": ""}).status == 400


def test_messages_with_one_key_are_decided_in_their_order(front: Front) -> None:
    wishes: list[Json] = [
        {"body": str(number), "delay": "1h", "key": "k", "on_conflict": "replace"} for number in range(30)
    ]
    answers = json.loads(send(front.gateway, "order", wishes, "order").body)
    assert [each.get("replaced") for each in answers[1:]] == [each["sequence"] for each in answers[:-1]]


def test_of_many_that_come_together_one_is_sent(front: Front) -> None:
    wish: Json = {"body": "x", "delay": "1h"}

    def one(number: int) -> Answer:
        return send(front.gateway if number % 2 else front.other, "race", wish, f"race-{number // 8}")

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(64)))
    for answer in answers:
        if answer.status != 201:
            assert (answer.status, answer.code, answer.headers["retry-after"]) == (409, "under_way", "1")
    sequences = [
        {each.json["sequence"] for each in answers[at : at + 8] if each.status == 201} for at in range(0, 64, 8)
    ]
    assert all(len(each) == 1 for each in sequences) and pending(front.gateway, "race") == 8


def test_what_was_done_is_told_also_while_nothing_new_is_taken(tmp_path: Path) -> None:
    """A full quota, a delay that ends behind the message's expiry by now, a full disk."""
    with ExitStack() as stack:
        servers = stack.enter_context(cluster(tmp_path / "data"))
        gateway = stack.enter_context(gateway_of(servers.meta.address, tmp_path, "--data", str(servers.data)))
        soon = datetime.now(UTC) + timedelta(hours=1, seconds=2)
        wishes: dict[str, Json | list[Json]] = {
            "one": {"body": "a", "delay": "1h"},
            "keyed": {"body": "a", "delay": "1h", "key": "k"},
            "spread": {"body": "a", "delay": "1h", "spread_ms": 60_000},
            "late": {"body": "a", "delay": "1h", "expires_at": soon.isoformat()},
            "late with a key": {"body": "a", "delay": "1h", "key": "l", "expires_at": soon.isoformat()},
            "list": [{"body": str(number), "delay": "1h"} for number in range(3)],
        }
        told = {name: _all(send(gateway, "full", wish, name)) for name, wish in wishes.items()}
        assert all("id" in each for found in told.values() for each in found), told
        quota: Json = {"pending": 1}
        assert gateway.ask("PUT", "/v1/subjects/full/quota", quota).status == 200
        time.sleep(max(0.0, (soon - datetime.now(UTC)).total_seconds() - 3_600))

        def is_told(name: str, code: str) -> None:
            wish = wishes[name]
            assert _all(send(gateway, "full", wish, name)) == told[name], name
            assert _all(send(gateway, "full", wish, f"new {name}"))[0]["code"] in (code, "bad_expiry"), name
            if isinstance(wish, dict):
                assert send(gateway, "full", {**wish, "body": "b"}, name).code == "other_request"

        for name in wishes:
            is_told(name, "quota_reached")
        sent = _sent_natively(servers.meta.address, b"named")
        servers.delay.settings |= {"free_bytes_far": ALL_BYTES, "free_bytes_all": ALL_BYTES}
        assert servers.delay.terminate() == 0
        servers.delay.start()
        # The time limit of a send is waited for, because the disk may get free.
        assert _sent_natively(servers.meta.address, b"named") == sent._replace(duplicate=True)
        with pytest.raises(delayd.DiskReserve):
            _sent_natively(servers.meta.address, b"new")


def _sent_natively(meta: str, key: bytes) -> delayd.Receipt:
    """What a gateway does for a message without a key, with a short time limit."""

    async def sent() -> SentOnce:
        async with delayd.AsyncProducer(meta, timeout_ms=2_000) as producer:
            sends = once_of(producer, meta)
            row, window_ms = sends.checked.send_nowait("native", b"a", delay=timedelta(hours=1))
            return await sends.send(key, bytes(32), row, window_ms)

    told = asyncio.run(sent())
    assert told.receipt is not None
    return told.receipt


def _all(answer: Answer) -> list[Json]:
    """The answers about each message, without the word that it was known."""
    found = json.loads(answer.body)
    rows: list[Json] = found if isinstance(found, list) else [found]
    return [{name: value for name, value in row.items() if name != "duplicate"} for row in rows]


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_header_that_is_no_name_is_refused(front: Front, key: str) -> None:
    refused = send(front.gateway, "none", {"body": "a", "delay": "1h"}, key)
    assert (refused.status, refused.code) == (400, "bad_argument")
    with delayd.Producer(front.meta) as producer, pytest.raises(delayd.BadSubject):
        producer.send("%once", b"", deliver_at_ms=int(time.time() * 1000) + 1_000)


def test_the_name_of_a_request_is_free_again_a_day_later(tmp_path: Path) -> None:
    wish: Json = {"body": "a", "delay": "60h"}
    with serving(tmp_path, "dev", "--stand") as dev:
        sent = send(dev, "day", wish, "day")
        dev.ask("POST", "/v1/clock/advance", {"by": "23h59m"})
        assert first(send(dev, "day", wish, "day")) == first(sent)
        assert send(dev, "day", {**wish, "delay": "1h"}, "day").status == 422
        dev.ask("POST", "/v1/clock/advance", {"by": "2m"})
        anew = wait_until(lambda: _new(send(dev, "day", wish, "day"), sent), "the record has ended")
        assert anew is not None
        assert first(send(dev, "day", wish, "day")) == first(anew)
        dev.ask("POST", "/v1/clock/advance", {"by": "60h"})
        assert [each["body"] for each in dev.pull("day", max_messages=10)] == ["a", "a"]


def _new(answer: Answer, sent: Answer) -> Answer | None:
    return None if answer.status == 201 and first(answer) == first(sent) else answer


KINDS: dict[str, Json | list[Json]] = {
    "one": {"body": "x", "delay": "1h"},
    "keyed": {"body": "x", "delay": "1h", "key": "k", "on_conflict": "replace"},
    "list": [{"body": str(number), "delay": "1h"} for number in range(40)],
}


@pytest.mark.parametrize("victim", ["gateway", "delay"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_whose_answer_was_lost_is_done_once(tmp_path: Path, kind: str, victim: str) -> None:
    chance = random.Random(f"{kind} {victim}")
    wish, rounds, cut = KINDS[kind], 6 if victim == "gateway" else 3, 0
    count = len(wish) if isinstance(wish, list) else 1
    with cluster(tmp_path) as servers, ExitStack() as stack:
        address = servers.meta.address
        gateway = stack.enter_context(gateway_of(address, tmp_path))
        send(gateway, "warm", {"body": "", "delay": "1h"}, "warm")
        for number in range(rounds):
            subject = f"lost.{number}"
            with ThreadPoolExecutor(1) as pool:
                stands = victim == "gateway" and number % 2 == 0
                if stands:
                    # No answer can come, so the gateway is killed before it has one.
                    servers.delay.signal(signal.SIGSTOP)
                sending = pool.submit(send, gateway, subject, wish, subject)
                time.sleep(0.1 if stands else chance.random() * 0.012)
                if victim == "gateway":
                    gateway.stop(signal.SIGKILL)
                    servers.delay.signal(signal.SIGCONT)
                else:
                    servers.delay.kill()
                    servers.delay.start()
                cut += sending.exception() is not None
            if victim == "gateway":
                gateway = stack.enter_context(gateway_of(address, tmp_path))
            answers = [send(gateway, subject, wish, subject) for _ in range(2)]
            assert _ids(answers[0]) == _ids(answers[1])
            if sending.exception() is None and sending.result().status in (200, 201):
                assert _ids(sending.result()) == _ids(answers[0])
            assert pending(gateway, subject) == count
        assert cut >= rounds // 2 or victim == "delay", "requests were cut"
        servers.delay.terminate()
        assert audit_directory(str(tmp_path), now_ms=time.time_ns() // 1_000_000).balanced


def _ids(answer: Answer) -> list[object]:
    found = json.loads(answer.body)
    return [each["id"] for each in (found if isinstance(found, list) else [found])]


def test_a_restored_delay_server_has_record_and_message_or_neither(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    wish: Json = {"body": "x", "delay": "2h"}
    with cluster(data) as servers, gateway_of(servers.meta.address, tmp_path) as gateway:
        before = send(gateway, "restored", wish, "before")
        # A copy that has handed nothing over yet would have no realtime server to ask.
        due: Json = {"body": "", "delay_ms": 0}
        assert send(gateway, "heard", due, "first").status == 201 and gateway.pull("heard")
        assert servers.delay.terminate() == 0
        copy_of(data, "delay", backup)
        servers.delay.start()
        after = send(gateway, "restored", wish, "after")
        assert pending(gateway, "restored") == 2
        # The realtime server knows a copy by what it has heard of the life that the copy does not know.
        assert send(gateway, "heard", due, "heard").status == 201 and gateway.pull("heard")
        restore(servers, backup, "delay")
        assert "accepted" in servers.operator.follow(WaitKind.TARGET_REFUSES, 0)
        wait_until(lambda: _total(gateway, "restored") == 1, "the copy serves, and does not have the second one")
        assert first(send(gateway, "restored", wish, "before")) == first(before)
        again = send(gateway, "restored", wish, "after")
        assert again.status == 201 and "duplicate" not in again.json and again.json["id"] != after.json["id"]
        assert first(send(gateway, "restored", wish, "after")) == first(again)
        assert pending(gateway, "restored") == 2


def test_with_several_delay_servers_a_name_has_one_owner(tmp_path: Path) -> None:
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", tmp_path, META))
        for name in ("a", "b", "c"):
            stack.enter_context(ServerProcess("delay", tmp_path / name, {"meta": meta.address}))
        gateways = [stack.enter_context(gateway_of(meta.address, tmp_path)) for _ in range(2)]
        logs = set[object]()
        for number in range(30):
            wish: Json = {"body": "x", "delay": "1h", **({"key": f"k{number}"} if number % 2 else {})}
            sent = send(gateways[0], "several", wish, f"n{number}")
            logs.add(sent.json["log_id"])
            assert first(send(gateways[1], "several", wish, f"n{number}")) == first(sent)
            assert send(gateways[1], "several", {**wish, "key": f"other{number}"}, f"n{number}").status == 422
        assert len(logs) == 3 and pending(gateways[0], "several") == 30
