"""Programs that speak HTTP alone send, look at, move, cancel, pull and acknowledge messages (docs/gateway.md)."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
from prometheus_client.parser import text_string_to_metric_families

import delayd
from tests.end_to_end.gateways import JSON, LIMIT_S, LINES, Answer, Gateway, Json, gateway_of
from tests.end_to_end.processes import ServerProcess

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi.json"


class Cluster(NamedTuple):
    meta: str
    gateway: Gateway
    folder: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("gateway")
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", folder))
        for role in ("realtime", "delay"):
            stack.enter_context(ServerProcess(role, folder, {"meta": meta.address}))
        gateway = stack.enter_context(gateway_of(meta.address, folder))
        yield Cluster(meta.address, gateway, folder)
        assert gateway.stop() == 0
        assert " ERROR " not in gateway.log, gateway.log


def test_what_curl_sends_is_pulled_and_acknowledged(cluster: Cluster) -> None:
    sent = cluster.gateway.ask("POST", "/v1/subjects/curl.a/messages?delay=300ms&tags=x&tags=y&key=k", b"hello \xff")
    assert sent.status == 201
    began = time.monotonic()
    (message,) = cluster.gateway.pull("curl.a")
    assert time.monotonic() - began > 0.2
    assert base64.b64decode(str(message["body_base64"])) == b"hello \xff"
    assert (message["key"], message["tags"], message["attempt"]) == ("k", ["x", "y"], 1)
    assert (message["log_id"], message["sequence"]) == (sent.json["log_id"], sent.json["sequence"])
    assert cluster.gateway.say("ack", message["lease"]) == [{"lease": message["lease"]}]
    (again,) = cluster.gateway.say("ack", message["lease"])
    assert (again["status"], again["code"]) == (410, "stale_handle")
    assert cluster.gateway.pull("curl.a", wait_ms=0) == []


def test_a_message_is_followed_moved_and_cancelled_by_its_id_and_by_its_key(cluster: Cluster) -> None:
    ask, path = cluster.gateway.ask, "/v1/subjects/follow/messages"
    wish: Json = {
        "body": "é",
        "delay": "1h30m",
        "key": "order 1/2",
        "tags": ["vip"],
        "headers": {"h": "v"},
        "ttl_ms": 5_000,
    }
    sent = ask("POST", path, wish)
    assert sent.status == 201 and sent.headers["location"] == f"messages/{sent.json['id']}"
    with delayd.Producer(cluster.meta) as producer:
        receipt = delayd.Receipt.of_token(str(sent.json["id"]))
        assert producer.get("follow", receipt=receipt).state is delayd.MessageState.PENDING
    met = ask("POST", path, wish)
    assert (met.status, met.code) == (409, "key_pending")
    assert ask("POST", path, {**wish, "on_conflict": "keep"}).json["kept"] is True
    for name in (f"{path}/{sent.json['id']}", f"{path}?key=order%201/2"):
        assert ask("GET", name).json["state"] == "pending"
    moved = ask("PATCH", f"{path}?key=order%201/2", {"deliver_at": "2027-06-01T09:00:00+02:00"})
    assert moved.status == 200 and moved.json["deliver_at"] == "2027-06-01T07:00:00.000Z"
    listed, total = ask("GET", f"{path}?contents=true&tag=vip&due_from=2027-05-31T00:00:00Z").lines
    assert (listed["log_id"], listed["sequence"]) == (moved.json["log_id"], moved.json["sequence"])
    assert (listed["body"], listed["headers"], total["pending"]) == ("é", {"h": "v"}, 1)
    assert ask("GET", f"{path}/{listed['id']}").json["state"] == "pending"
    assert ask("DELETE", f"{path}/{sent.json['id']}").json == {"state": "cancelled"}, "an earlier receipt stands for it"
    assert ask("GET", f"{path}/{moved.json['id']}").json["state"] == "cancelled"
    unknown = ask("DELETE", f"{path}?key=nobody")
    assert (unknown.status, unknown.code) == (404, "unknown")
    due = ask("POST", path, {"body": "now", "delay_ms": 0})
    (message,) = cluster.gateway.pull("follow")
    cluster.gateway.say("ack", message["lease"])
    deadline = time.monotonic() + LIMIT_S
    while (late := ask("DELETE", f"{path}/{due.json['id']}")).code == "in_flight":
        assert late.status == 409 and late.headers["retry-after"] and time.monotonic() < deadline
    assert (late.status, late.code) == (409, "already_dispatched")


def test_the_life_of_a_message_is_traced_to_its_groups(cluster: Cluster) -> None:
    ask, path = cluster.gateway.ask, "/v1/subjects/life/messages"
    sent = ask("POST", path, {"body": "x", "delay": "1h", "key": "k"}).json
    taken = {"what": "accepted", "log_id": sent["log_id"], "sequence": sent["sequence"]}
    due_then = {"what": "due", "at": sent["deliver_at"], "at_ms": sent["deliver_at_ms"]}
    life = ask("GET", f"{path}/{sent['id']}/trace").json
    assert (life["state"], life["deliver_at_ms"], life["id"]) == ("pending", sent["deliver_at_ms"], sent["id"])
    assert _at(life, "accepted")["at_ms"] == sent["accepted_at_ms"]
    by_key = ask("GET", "/v1/subjects/life/trace?key=k").json
    assert by_key["steps"] == [taken, due_then], "a list tells no exact instant of acceptance"
    assert ask("PATCH", f"{path}?key=k", {"delay_ms": 0}).status == 200
    (held,) = cluster.gateway.pull("life", "again")
    (lost,) = cluster.gateway.pull("life", "dead")
    (done,) = cluster.gateway.pull("life", "done")
    cluster.gateway.say("nack", held["lease"], delay_ms=3_600_000)
    cluster.gateway.say("reject", lost["lease"], reason="wrong")
    cluster.gateway.say("ack", done["lease"])
    due = int(str(held["deliver_at_ms"]))
    deadline = time.monotonic() + LIMIT_S
    while True:  # What a group gave back is on its way to the delay server for a moment.
        life = ask("GET", f"{path}/{sent['id']}/trace").json
        groups = {group["group"]: group for group in _rows(life.get("groups", []))}
        states = {str(name): group.get("state") for name, group in groups.items()}
        if states == {"again": "pending", "dead": "dead", "done": "dispatched"}:
            break
        assert time.monotonic() < deadline, life
        time.sleep(0.05)
    assert life["state"] == "dispatched" and int(str(groups["again"]["deliver_at_ms"])) > due + 3_000_000
    appended = _at(life, "appended")
    assert appended["late_ms"] == int(str(appended["at_ms"])) - due and len(str(appended["log_id"])) == 16
    assert [step["what"] for step in _rows(life["steps"])] == ["accepted", "due", "dispatched", "appended"]
    missing = ask("GET", "/v1/subjects/life/trace?key=nobody")
    assert (missing.status, missing.code) == (404, "unknown")


def _rows(found: object) -> list[Json]:
    assert isinstance(found, list)
    return found


def _at(life: Json, what: str) -> Json:
    (step,) = [step for step in _rows(life["steps"]) if step["what"] == what]
    return step


def test_a_forecast_counts_what_is_pending_by_its_periods(cluster: Cluster) -> None:
    ask, path = cluster.gateway.ask, "/v1/subjects/ahead/forecast"
    instants = ["2027-01-31T23:59:59.999Z", "2027-02-01T00:00:00Z", "2027-02-01T09:30:00.100Z"]
    rows: list[Json] = [{"body": "123", "deliver_at": instant} for instant in (*instants, instants[-1])]
    assert ask("POST", "/v1/subjects/ahead/messages", [*rows, {"body": "t", "delay_ms": 0}]).status == 200
    (due,) = cluster.gateway.pull("ahead")
    cluster.gateway.say("ack", due["lease"])

    def told(query: str) -> list[tuple[object, ...]]:
        found = ask("GET", path + query)
        assert found.status == 200, found
        names = ("period", "messages", "bytes", "fullest_second", "fullest_second_messages")
        return [tuple(period[name] for name in names) for period in _rows(found.json["periods"])]

    last = ("2027-02-01T09:30:00.000Z", 2)
    assert told("") == [("2027-01-31", 1, 3, "2027-01-31T23:59:59.000Z", 1), ("2027-02-01", 3, 9, *last)]
    assert [row[:3] for row in told("?by=hour")] == [
        ("2027-01-31T23:00Z", 1, 3),
        ("2027-02-01T00:00Z", 1, 3),
        ("2027-02-01T09:00Z", 2, 6),
    ]
    assert [row[:2] for row in told("?by=month")] == [("2027-01", 1), ("2027-02", 3)]
    assert told("?due_from=2027-02-01T00:00:01Z") == [("2027-02-01", 2, 6, *last)]
    total = ask("GET", path).json
    assert (total["pending"], total["unread"]) == (4, 0)
    assert ask("GET", f"{path}?by=week").status == 400
    assert ask("GET", "/v1/subjects/ahead.none/forecast").json["periods"] == []


def test_a_forecast_of_all_subjects_is_made_of_what_servers_count(cluster: Cluster) -> None:
    ask, due = cluster.gateway.ask, "2027-07-01T09:30:00Z"
    rows: list[Json] = [{"body": "", "deliver_at": due.replace("-01T", f"-0{day}T")} for day in (1, 2, 2)]
    for subject in ("all.a", "all.b"):
        assert ask("POST", f"/v1/subjects/{subject}/messages", rows).status == 200

    def until_told(by: str, wanted: dict[object, int]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:  # What servers count is a moment behind.
            found = ask("GET", f"/v1/forecast?by={by}").json
            counted = {period["period"]: period["messages"] for period in _rows(found["periods"])}
            assert sum(int(str(count)) for count in counted.values()) == found["pending"] and found["missing"] == []
            assert list(counted) == sorted(map(str, counted))
            if {name: count for name, count in counted.items() if str(name).startswith("2027-07")} == wanted:
                return
            assert time.monotonic() < deadline, counted
            time.sleep(0.05)

    until_told("hour", {"2027-07-01T09:00Z": 2, "2027-07-02T09:00Z": 4})
    until_told("day", {"2027-07-01": 2, "2027-07-02": 4})
    for line in ask("GET", "/v1/subjects/all.a/messages").lines[:-1]:
        assert ask("DELETE", f"/v1/subjects/all.a/messages/{line['id']}").status == 200
    until_told("month", {"2027-07": 3})
    assert ask("GET", "/v1/forecast?by=year").status == 400


def test_of_a_list_each_message_is_kept_or_refused_by_itself(cluster: Cluster) -> None:
    wishes: list[Json] = [
        {"body": "a", "delay": "1h"},
        {"body": "b"},
        {"body": "c", "delay": "900d"},
        {"body": "d", "delay": "2h"},
    ]
    answer = cluster.gateway.ask("POST", "/v1/subjects/some/messages", wishes)
    first, no_time, too_far, last = json.loads(answer.body)
    assert answer.status == 200
    assert last["sequence"] > first["sequence"]
    assert (no_time["status"], too_far["code"]) == (400, "past_horizon")
    assert cluster.gateway.ask("GET", "/v1/subjects/some/messages").lines[-1]["pending"] == 2


def test_messages_of_one_key_are_decided_in_the_order_of_their_lines(cluster: Cluster) -> None:
    keys, rounds = 40, 60
    due_ms = round(time.time() * 1_000) + 3_600_000
    forms: list[Json] = [
        {"deliver_at_ms": due_ms},
        {"delay": "2h", "tags": ["a"], "ttl_ms": 1_000},
        {"deliver_at_ms": due_ms, "spread_ms": 1_000},
        {"deliver_at": "2027-06-01T09:00:00+02:00", "ordering_key": "o"},
    ]
    # Each key has its lines in every form, and in all pieces of the stream.
    rows: list[Json] = [
        {"body": str(turn), "key": f"k{key}", "on_conflict": "replace", **forms[(turn + key) % len(forms)]}
        for turn in range(rounds)
        for key in range(keys)
    ]
    rows += [{"body": "late", "key": f"k{key}", "on_conflict": "keep", "delay": "1h"} for key in range(keys)]
    rows += [{"body": "last", "key": f"n{key}", "delay": "1h"} for key in range(keys) for _ in range(2)]
    body = b"\n".join([json.dumps(row).encode() for row in rows])
    answers = cluster.gateway.ask("POST", "/v1/subjects/turns/messages", body, LINES).lines
    assert [answer.get("code") for answer in answers] == [None] * (rounds + 1) * keys + [None, "key_pending"] * keys
    for place in range(keys, rounds * keys):
        assert answers[place]["replaced"] == answers[place - keys]["sequence"], "each takes the place of the one before"
    kept = [answer["sequence"] for answer in answers[rounds * keys : (rounds + 1) * keys]]
    assert kept == [answer["sequence"] for answer in answers[(rounds - 1) * keys : rounds * keys]]
    lines = cluster.gateway.ask("GET", "/v1/subjects/turns/messages?contents=true").lines
    wanted = {f"k{key}": str(rounds - 1) for key in range(keys)} | {f"n{key}": "last" for key in range(keys)}
    assert {line["key"]: line["body"] for line in lines[:-1]} == wanted


@pytest.mark.parametrize("media_type", ["application/msgpack", "application/x-msgpack", "application/vnd.msgpack"])
def test_a_stream_of_msgpack_is_answered_in_msgpack(cluster: Cluster, media_type: str) -> None:
    subject = media_type.replace("/", ".")
    rows: list[dict[str, object]] = [{"body": b"\xff%d" % number, "delay": "1h"} for number in range(1_200)]
    rows[7], rows[9], rows[11] = (
        {"body": "text", "delay": "1h"},
        {"body": b"k", "delay": "1h", "key": "k"},
        {"body": b""},
    )
    rows[13] = rows[9]
    headers = {"content-type": media_type, "idempotency-key": media_type}
    body = b"".join([msgpack.packb(row) for row in rows]) + b"\xc1"
    for _ in range(2):
        answer = cluster.gateway.ask("POST", f"/v1/subjects/{subject}/messages", body, headers)
        assert (answer.status, answer.headers["content-type"]) == (200, "application/msgpack")
        unpacker = msgpack.Unpacker()
        unpacker.feed(answer.body)
        told = list(unpacker)
        refused = {place: row["code"] for place, row in enumerate(told) if "code" in row}
        wrong = {7: "bad_argument", 11: "bad_argument", 13: "key_pending", len(rows): "bad_argument"}
        assert refused == wrong and told[7]["status"] == 400
        lines = cluster.gateway.ask("GET", f"/v1/subjects/{subject}/messages?contents=true").lines
        listed = {row["id"][:26]: row for row in map(dict[str, Any], lines[:-1])}
        assert len(listed) == len(rows) - 3 and len(told) == len(rows) + 1
        for row, given in zip(rows, told, strict=False):
            if "code" not in given:
                assert base64.b64decode(_body64(listed[given["id"][:26]])) == row["body"]


def _body64(line: Mapping[str, Any]) -> str:
    return str(line["body_base64"]) if "body_base64" in line else base64.b64encode(line["body"].encode()).decode()


def test_a_stream_is_answered_in_its_order_while_it_is_still_sent(cluster: Cluster) -> None:
    rows = 20_000
    with socket.create_connection(("127.0.0.1", cluster.gateway.port), LIMIT_S) as line:
        line.sendall(
            b"POST /v1/subjects/stream/messages HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
            b"content-type: application/x-ndjson\r\n\r\n"
        )

        def chunk(text: bytes) -> None:
            line.sendall(b"%x\r\n%s\r\n" % (len(text), text))

        chunk(b'{"body":"first","delay":"1h"}\n')
        heard = b""
        while b'"sequence"' not in heard:
            heard += line.recv(65_536)
            assert heard, "the stream is open, and the first answer is there"
        with ThreadPoolExecutor(1) as pool:

            def rest() -> None:
                for first in range(0, rows, 1_000):
                    chunk(b"".join(b'{"body":"%d","delay":"1h"}\n' % number for number in range(first, first + 1_000)))
                chunk(b'\n{"nobody":1}\n\n{"body":"last","delay":"1h"}')
                line.sendall(b"0\r\n\r\n")

            done = pool.submit(rest)
            while not heard.endswith(b"0\r\n\r\n"):
                heard += line.recv(1 << 20)
            done.result()
    lines = heard.partition(b"\r\n\r\n")[2].replace(b"\r", b"").split(b"\n")
    answers = [json.loads(each) for each in lines if each.startswith(b"{")]
    assert len(answers) == rows + 3
    assert answers[-2]["code"] == "bad_argument"
    sequences = [each["sequence"] for each in answers if "sequence" in each]
    assert sequences == sorted(sequences) and len(set(sequences)) == rows + 2
    assert cluster.gateway.ask("GET", "/v1/subjects/stream/messages").lines[-1]["pending"] == rows + 2


def test_a_message_that_was_changed_since_it_was_seen_is_left_alone(cluster: Cluster) -> None:
    gateway, path = cluster.gateway, "/v1/subjects/seen/messages"
    sent = gateway.ask("POST", f"{path}?delay=1h&key=k", b"one").json
    seen = gateway.ask("GET", f"{path}?key=k").headers["etag"]
    assert gateway.ask("GET", f"{path}/{sent['id']}").headers["etag"] == seen
    moved = gateway.ask("PATCH", f"{path}?key=k", {"delay": "2h"}, {"if-match": seen})
    assert moved.status == 200 and moved.headers["etag"] != seen, moved
    bodies: dict[str, Json | None] = {"PATCH": {"delay": "3h"}, "DELETE": None}
    for method, body in bodies.items():
        for name in ("?key=k", f"/{sent['id']}"):
            late = gateway.ask(method, f"{path}{name}", body, {"if-match": seen})
            assert (late.status, late.code) == (412, "precondition_failed"), late
            assert late.headers["etag"] == moved.headers["etag"]
    # The delay server decides: one is served of those who have seen the same and ask at one moment.
    seen = moved.headers["etag"]
    with ThreadPoolExecutor(12) as pool:
        racing = [
            pool.submit(gateway.ask, "PATCH", f"{path}?key=k", {"delay": f"{3 + hours}h"}, {"if-match": seen})
            for hours in range(12)
        ]
        answers = sorted([each.result() for each in racing], key=lambda answer: answer.status)
    moved, *others = answers
    assert moved.status == 200
    for answer in others:  # Whoever looks while it is being moved is to ask again.
        assert (answer.status, answer.headers.get("etag")) == (412, moved.headers["etag"]) or answer.code == "in_flight"
    gateway.ask("POST", f"{path}?delay=1h&key=k&on_conflict=replace", b"two")
    assert gateway.ask("DELETE", f"{path}?key=k", None, {"if-match": moved.headers["etag"]}).status == 412
    newest = gateway.ask("GET", f"{path}?key=k").headers["etag"]
    assert gateway.ask("DELETE", f"{path}?key=k", None, {"if-match": newest}).status == 200
    assert "etag" not in gateway.ask("GET", f"{path}?key=k").headers
    ended = gateway.ask("DELETE", f"{path}?key=k", None, {"if-match": newest})
    assert (ended.status, ended.code) == (409, "cancelled")
    assert gateway.ask("DELETE", f"{path}?key=none", None, {"if-match": newest}).status == 404
    assert gateway.ask("DELETE", f"{path}?key=k", None, {"if-match": "x"}).code == "bad_argument"


def test_lines_of_all_forms_are_each_kept_or_refused_by_itself(cluster: Cluster) -> None:
    def lines(number: int) -> list[Json]:
        return [
            {"body": f"{number} a", "delay": "1h", "headers": {"n": str(number)}},
            {"body_base64": "/w==", "delay_ms": 3_600_000},
            {"body": f"{number} c", "deliver_at": "2027-06-01T12:00:00.250+02:00"},
            {
                "body": f"{number} d",
                "deliver_at_ms": 1_811_000_000_007,
                "key": f"k{number % 50}",
                "on_conflict": "keep",
            },
            {"body": f"{number} e", "deliver_at_ms": 1_811_000_000_007},
            {"body": f"{number} f"},
        ]

    sent = [line for number in range(100) for line in lines(number)]
    sent[600 - 6]["delay"] = "900d"  # In one piece with others of its form.
    body = b"".join(json.dumps(line).encode() + b"\n" for line in sent)
    answers = cluster.gateway.ask("POST", "/v1/subjects/forms/messages", body, LINES).lines
    assert len(answers) == 600
    assert all(each["code"] == "bad_argument" for each in answers[5::6])
    assert answers[594]["code"] == "past_horizon" and all("id" in each for each in answers[:594:6])
    assert {each["deliver_at"] for each in answers[2::6]} == {"2027-06-01T10:00:00.250Z"}
    assert {each["deliver_at_ms"] for each in answers[4::6]} == {1_811_000_000_007}
    assert [each.get("kept", False) for each in answers[3::6]] == [False] * 50 + [True] * 50
    pending = cluster.gateway.ask("GET", "/v1/subjects/forms/messages?contents=true").lines[:-1]
    kept = {each["sequence"]: each for each in pending}
    assert kept.keys() == {each["sequence"] for each in answers if "id" in each}
    for line, answer in zip(sent, answers, strict=True):
        if "id" in answer and not answer.get("kept"):
            told = kept[answer["sequence"]]
            assert {name: told.get(name) for name in ("body", "body_base64", "headers")} == {
                name: line.get(name) for name in ("body", "body_base64", "headers")
            }
            assert told["deliver_at_ms"] == answer["deliver_at_ms"]


def test_what_is_given_back_rejected_or_left_comes_again_or_not(cluster: Cluster) -> None:
    gateway = cluster.gateway
    for body in (b"back", b"dead", b"left", b"held"):
        gateway.ask("POST", f"/v1/subjects/words.{body.decode()}/messages?delay_ms=0", body)
    (back,) = gateway.pull("words.back")
    assert "code" not in gateway.say("nack", back["lease"], delay_ms=50, error="no")[0]
    (again,) = gateway.pull("words.back")
    assert again["attempt"] == 2
    gateway.say("ack", again["lease"])
    (dead,) = gateway.pull("words.dead")
    assert gateway.say("reject", dead["lease"], reason="bad_order") == [{"lease": dead["lease"]}]
    with delayd.Admin(cluster.meta) as admin:
        deadline = time.monotonic() + LIMIT_S
        while not (letters := [each for page in admin.dead_letters("words.dead", "g") for each in page]):
            assert time.monotonic() < deadline
    assert [(letter.reason, letter.body) for letter in letters] == [("bad_order", b"dead")]
    (left,) = gateway.pull("words.left", lease_ms=500)
    (later,) = gateway.pull("words.left")
    assert later["attempt"] == 2 and gateway.say("ack", left["lease"])[0]["code"] == "stale_handle"
    gateway.say("ack", later["lease"])
    (held,) = gateway.pull("words.held", lease_ms=700)
    assert gateway.say("extend", held["lease"], lease_ms=20_000) == [{"lease": held["lease"]}]
    time.sleep(1.5)
    assert gateway.say("ack", held["lease"]) == [{"lease": held["lease"]}]


def test_who_hangs_up_before_the_answer_holds_no_message(cluster: Cluster) -> None:
    body = b'{"wait_ms": 20000, "lease_ms": 600000}'
    with socket.create_connection(("127.0.0.1", cluster.gateway.port), LIMIT_S) as line:
        line.sendall(
            b"POST /v1/subjects/gone/groups/g/pull HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        time.sleep(0.5)
    time.sleep(0.2)
    cluster.gateway.ask("POST", "/v1/subjects/gone/messages?delay_ms=0", b"x")
    (message,) = cluster.gateway.pull("gone")
    cluster.gateway.say("ack", message["lease"])


def test_pulls_that_nobody_waits_for_cost_a_message_no_attempt(cluster: Cluster) -> None:
    body = b'{"wait_ms": 20000, "lease_ms": 600000}'
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", cluster.gateway.port), LIMIT_S) as line:
            line.sendall(
                b"POST /v1/subjects/left/groups/g/pull HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            time.sleep(0.02)
    time.sleep(0.5)
    cluster.gateway.ask("POST", "/v1/subjects/left/messages?delay_ms=0", b"x")
    time.sleep(0.5)
    (message,) = cluster.gateway.pull("left", lease_ms=600_000)
    assert message["attempt"] == 1
    cluster.gateway.say("ack", message["lease"])


def test_callers_who_wait_share_what_comes_in_the_order_in_which_they_asked(cluster: Cluster) -> None:
    with ThreadPoolExecutor(3) as pool:
        waiting = []
        for _ in range(3):
            waiting.append(pool.submit(cluster.gateway.pull, "shared", max_messages=2, wait_ms=20_000))
            time.sleep(0.2)
        due_ms = round(time.time() * 1_000) + 500
        cluster.gateway.ask(
            *("POST", "/v1/subjects/shared/messages"),
            [{"body": str(number), "deliver_at_ms": due_ms} for number in range(5)],
        )
        pulled = [each.result(LIMIT_S) for each in waiting]
    assert [[message["body"] for message in each] for each in pulled] == [["0", "1"], ["2", "3"], ["4"]]
    leases = [message["lease"] for each in pulled for message in each]
    assert cluster.gateway.say("ack", *leases) == [{"lease": lease} for lease in leases]
    assert cluster.gateway.pull("shared", wait_ms=0) == []


def test_who_waits_for_less_time_than_others_is_answered_in_time(cluster: Cluster) -> None:
    with ThreadPoolExecutor(1) as pool:
        longer = pool.submit(cluster.gateway.pull, "patience", wait_ms=25_000)
        time.sleep(0.3)
        began = time.monotonic()
        assert cluster.gateway.pull("patience", wait_ms=0) == []
        assert cluster.gateway.pull("patience", wait_ms=300) == []
        assert time.monotonic() - began < 12 and not longer.done()
        cluster.gateway.ask("POST", "/v1/subjects/patience/messages?delay_ms=0", b"x")
        (message,) = longer.result(LIMIT_S)
    cluster.gateway.say("ack", message["lease"])


def test_what_was_asked_for_by_who_hung_up_goes_to_the_others_as_a_first_attempt(cluster: Cluster) -> None:
    body = b'{"max_messages": 5, "wait_ms": 20000}'
    with ThreadPoolExecutor(1) as pool:
        with socket.create_connection(("127.0.0.1", cluster.gateway.port), LIMIT_S) as line:
            line.sendall(
                b"POST /v1/subjects/heirs/groups/g/pull HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            time.sleep(0.3)
            heir = pool.submit(cluster.gateway.pull, "heirs", max_messages=2, wait_ms=20_000)
            time.sleep(0.3)
        time.sleep(0.2)
        due_ms = round(time.time() * 1_000) + 200
        messages = [{"body": str(number), "deliver_at_ms": due_ms} for number in range(5)]
        cluster.gateway.ask("POST", "/v1/subjects/heirs/messages", messages)
        pulled = heir.result(LIMIT_S)
    assert [(message["body"], message["attempt"]) for message in pulled] == [("0", 1), ("1", 1)]
    rest: list[Json] = []
    while len(rest) < 3:
        rest += cluster.gateway.pull("heirs", max_messages=5)
    assert [(message["body"], message["attempt"]) for message in rest] == [("2", 1), ("3", 1), ("4", 1)]
    leases = [message["lease"] for message in pulled + rest]
    assert cluster.gateway.say("ack", *leases) == [{"lease": lease} for lease in leases]


def test_words_about_messages_of_several_groups_are_heard_each_by_itself(cluster: Cluster, operated: Gateway) -> None:
    leases: list[object] = []
    for group in ("stays", "ends"):
        cluster.gateway.ask("POST", f"/v1/subjects/{group}/messages?delay_ms=0", b"x")
        (message,) = cluster.gateway.pull(group)
        leases.append(message["lease"])
    assert operated.ask("DELETE", "/v1/subjects/ends/groups/g").status == 200
    kept, stale, unknown = cluster.gateway.say("ack", *leases, "x" * 20)
    assert kept == {"lease": leases[0]}
    assert (stale["status"], stale["code"]) == (410, "stale_handle") == (unknown["status"], unknown["code"])


def test_a_slash_in_a_name_is_none_of_the_path(cluster: Cluster) -> None:
    cluster.gateway.ask("POST", "/v1/subjects/a%2Fmessages%2Fb/messages?delay_ms=0", b"x")
    (message,) = cluster.gateway.pull("a/messages/b", "x%2Fgroups%2Fy")
    assert message["subject"] == "a/messages/b"
    cluster.gateway.say("ack", message["lease"])
    with delayd.Admin(cluster.meta) as admin:
        found = [group.group for group in admin.groups("a/messages/b")]
    assert found == ["x/groups/y"]


def test_what_is_wrong_in_a_message_is_told_in_words(cluster: Cluster) -> None:
    path = "/v1/subjects/words/messages"

    def detail(answer: Answer) -> str:
        assert (answer.status, answer.code) == (400, "bad_argument")
        return str(answer.json["detail"])

    def asked(query: str) -> str:
        return detail(cluster.gateway.ask("POST", f"{path}?{query}", b"x"))

    no_duration = "delay is no duration; write one such as 250ms, 30s, 30m, 1h30m, 2d or 1w"
    assert asked("delay=5") == f"the query of this request: {no_duration}"
    assert asked("delay=5s&on_conflict=maybe").endswith(
        "on_conflict is 'maybe', and may be one of keep, reject, replace"
    )
    assert asked("deliver_at=2027-01-01T09:00:00+01:00").endswith(", and in a query + as %2B")
    assert asked("deliver_at=tomorrow").endswith("such as 2027-01-31T09:00:00Z or 2027-01-31T10:00:00+01:00")
    right: Json = {"body": "a", "delay": "1h"}
    assert (
        detail(cluster.gateway.ask("POST", path, [right, {**right, "delay": "1x"}])) == f"message 2 of 2: {no_duration}"
    )
    line = json.dumps({**right, "delay": "1x"}).encode()
    (told,) = cluster.gateway.ask("POST", path, line, LINES).lines
    assert told["detail"] == f"a message of this stream: {no_duration}"
    assert cluster.gateway.ask("POST", f"{path}?deliver_at=2027-11-30T09:00:00%2B01:00", b"x").status == 201


def test_a_wrong_method_is_told_the_right_ones(cluster: Cluster) -> None:
    answer = cluster.gateway.ask("PUT", "/v1/subjects/a/messages", b"x")
    assert set(answer.headers["allow"].split(", ")) == {"POST", "GET", "HEAD", "DELETE", "PATCH"}


def test_a_pull_that_waits_is_answered_when_the_gateway_stops(cluster: Cluster, tmp_path: Path) -> None:
    with gateway_of(cluster.meta, tmp_path) as other, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.pull, "nothing", wait_ms=20_000)
        time.sleep(0.5)
        assert other.stop() == 0
        assert waiting.result() == [] and " ERROR " not in other.log


def test_a_stream_is_answered_up_to_its_last_line_when_the_gateway_stops(cluster: Cluster, tmp_path: Path) -> None:
    text = b'{"body":"x","delay":"1h"}\n'
    with (
        gateway_of(cluster.meta, tmp_path) as other,
        socket.create_connection(("127.0.0.1", other.port), LIMIT_S) as line,
    ):
        line.sendall(
            b"POST /v1/subjects/halted/messages HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
            b"content-type: application/x-ndjson\r\n\r\n%x\r\n%s\r\n" % (len(text), text)
        )
        time.sleep(0.5)
        assert other.stop() == 0 and " ERROR " not in other.log
        heard = b""
        while got := line.recv(65_536):
            heard += got
    kept, last = [json.loads(each) for each in heard.splitlines() if each.startswith(b"{")]
    assert "sequence" in kept and (last["status"], last["code"]) == (503, "server_unavailable")
    assert heard.endswith(b"\r\n0\r\n\r\n"), "it ends as an answer, not as a cut line"


def test_a_list_ends_with_a_problem_when_its_server_is_gone(tmp_path: Path) -> None:
    rows = 40_000
    with (
        ServerProcess("meta", tmp_path) as meta,
        ServerProcess("delay", tmp_path, {"meta": meta.address}) as delay,
        gateway_of(meta.address, tmp_path) as gateway,
    ):
        gateway.ask("POST", "/v1/subjects/s/messages", [{"body": "x" * 1_000, "delay": "1h"}] * rows)
        with socket.create_connection(("127.0.0.1", gateway.port), LIMIT_S) as line:
            line.sendall(
                b"GET /v1/subjects/s/messages?contents=true HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
            )
            heard = line.recv(1_000)
            delay.kill()
            while got := line.recv(1 << 20):
                heard += got
        last = [json.loads(each) for each in heard.splitlines() if each.startswith(b"{")][-1]
        assert heard.startswith(b"HTTP/1.1 200") and last["status"] == 503, last
        assert " ERROR " not in gateway.log


def test_connections_without_a_request_end(cluster: Cluster) -> None:
    program = (
        "import sys; from delayd.gateway import connection, program; connection.IDLE_S = 1.0\n"
        "program.run(sys.argv[1], '127.0.0.1', 0, (), insecure=False)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, cluster.meta], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[2].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), LIMIT_S) as line:
            assert line.recv(1) == b""
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)


def test_a_long_list_holds_nobody_else_up(cluster: Cluster) -> None:
    rows = 200_000
    body = b"[" + b",".join([b'{"body":"","delay":"1h"}'] * rows) + b"]"
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(cluster.gateway.ask, "POST", "/v1/subjects/long/messages", body, JSON)
        waits, began = [], time.monotonic()
        while not sending.done():
            asked_at = time.monotonic()
            assert cluster.gateway.ask("GET", "/healthz").status == 200
            waits.append(time.monotonic() - asked_at)
        assert max(waits) < 0.2 * (time.monotonic() - began), "each waits for a piece of the list, at most"
        assert len(json.loads(sending.result().body)) == rows


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_gateway_held_comes_again_when_it_ends(cluster: Cluster, tmp_path: Path, number: signal.Signals) -> None:
    subject = f"ends.{number.name}"
    cluster.gateway.ask("POST", f"/v1/subjects/{subject}/messages?delay_ms=0", b"x")
    with gateway_of(cluster.meta, tmp_path) as other:
        lease_ms = 600_000 if number is signal.SIGTERM else 3_000
        (held,) = other.pull(subject, lease_ms=lease_ms)
        assert cluster.gateway.say("ack", held["lease"])[0]["code"] == "stale_handle", "it is the other gateway's"
        code = other.stop(number)
        assert code == (0 if number is signal.SIGTERM else -number)
    (again,) = cluster.gateway.pull(subject)
    cluster.gateway.say("ack", again["lease"])


HOSTILE: dict[str, tuple[str, str, bytes, Mapping[str, str]]] = {
    "no JSON": ("POST", "/v1/subjects/bad/messages", b"{", JSON),
    "deep JSON": ("POST", "/v1/subjects/bad/messages", b'{"headers":' * 100_000, JSON),
    "deep lists": ("POST", "/v1/subjects/bad/messages", b"[" * 100_000, JSON),
    "invalid UTF-8": ("POST", "/v1/subjects/bad/messages", b'{"body":"\xff","delay":"1h"}', JSON),
    "a lone surrogate": ("POST", "/v1/subjects/bad/messages", b'{"body":"\\ud800","delay":"1h"}', JSON),
    "beyond 64 bit": ("POST", "/v1/subjects/bad/messages", b'{"body":"x","deliver_at_ms":99999999999999999999}', JSON),
    "beyond a double": ("POST", "/v1/subjects/bad/messages", b'{"body":"x","delay_ms":1e999}', JSON),
    "a long delay": ("POST", "/v1/subjects/bad/messages?delay=" + "9" * 400 + "w", b"x", {}),
    "many ms": ("POST", "/v1/subjects/bad/messages?delay_ms=999999999999999999", b"x", {}),
    "no zone": ("POST", "/v1/subjects/bad/messages", b'{"body":"x","deliver_at":"2027-01-01T00:00:00"}', JSON),
    "a strange zone": (
        "POST",
        "/v1/subjects/bad/messages",
        b'{"body":"x","deliver_at":"2027-01-01T00:00:00+99:99"}',
        JSON,
    ),
    "two instants": ("POST", "/v1/subjects/bad/messages?delay=1s&delay_ms=5", b"x", {}),
    "an unknown option": ("POST", "/v1/subjects/bad/messages?delay=1s&dealy=2s", b"x", {}),
    "no base64": ("POST", "/v1/subjects/bad/messages", b'{"body_base64":"$","delay":"1h"}', JSON),
    "two bodies": ("POST", "/v1/subjects/bad/messages", b'{"body":"","body_base64":"","delay":"1h"}', JSON),
    "a bad subject": ("POST", "/v1/subjects/%00%20/messages?delay=1s", b"x", {}),
    "the servers' subject": ("POST", "/v1/subjects/%25retry%2F1%2F2/messages?delay=1s", b"x", {}),
    "a path trick": ("GET", "/v1/subjects/../../etc/passwd", b"", {}),
    "a step in the path": ("POST", "/v1/subjects/other/../bad/messages?delay=1h", b"x", {}),
    "a step as subject": ("POST", "/v1/subjects/../messages?delay=1h", b"x", {}),
    "a wrong id": ("GET", "/v1/subjects/bad/messages/zzzz", b"", {}),
    "no name": ("DELETE", "/v1/subjects/bad/messages", b"", {}),
    "a wrong bound": ("GET", "/v1/subjects/bad/messages?due_from=tomorrow", b"", {}),
    "too many": ("POST", "/v1/subjects/bad/groups/g/pull", b'{"max_messages":1001}', {}),
    "a long wait": ("POST", "/v1/subjects/bad/groups/g/pull", b'{"wait_ms":30001}', {}),
    "an empty group": ("POST", "/v1/subjects/bad/groups/%20%0a/pull", b"{}", {}),
    "no leases": ("POST", "/v1/leases/ack", b'{"leases":[]}', {}),
    "leases of numbers": ("POST", "/v1/leases/ack", b'{"leases":[1]}', {}),
    "no reason": ("POST", "/v1/leases/reject", b'{"leases":["x"]}', {}),
    "a foreign page": ("POST", "/v1/subjects/bad/messages?delay=1s", b"x", {"origin": "http://evil.example"}),
    "no page": ("POST", "/v1/subjects/bad/messages?delay=1s", b"x", {"origin": "null"}),
    "a foreign name": ("GET", "/healthz", b"", {"host": "evil.example"}),
    "a key that is no UTF-8": ("POST", "/v1/subjects/bad/messages?delay=1h&key=%ff", b"x", {}),
    "a group that is no UTF-8": ("POST", "/v1/subjects/bad/groups/%ff/pull", b"", {}),
    "an option twice": ("POST", "/v1/subjects/bad/messages?delay=1h&delay=2h", b"x", {}),
    "a key twice": ("GET", "/v1/subjects/bad/messages?key=a&key=b", b"", {}),
    "a body in the query": ("POST", "/v1/subjects/bad/messages?delay=1h&body=y", b"x", {}),
    "JSON and a query": ("POST", "/v1/subjects/bad/messages?delay=1s", b'{"body":"x","delay":"1h"}', JSON),
    "lines and a query": ("POST", "/v1/subjects/bad/messages?delay=1s", b"", LINES),
    "a pull with a query": ("POST", "/v1/subjects/bad/groups/g/pull?max_messages=9", b"", {}),
    "a key and more": ("DELETE", "/v1/subjects/bad/messages?key=a&tag=b", b"", {}),
    "before the first year": ("GET", "/v1/subjects/bad/messages?due_from=0001-01-01T00:00:00%2B10:00", b"", {}),
    "a body in gzip": ("POST", "/v1/subjects/bad/messages?delay=1h", b"\x1f\x8b", {"content-encoding": "gzip"}),
    "lines in gzip": ("POST", "/v1/subjects/bad/messages", b"\x1f\x8b", {**LINES, "content-encoding": "gzip"}),
    "a slash at the end": ("POST", "/v1/subjects/bad/messages/?delay=1h", b"x", {}),
    "no method": ("PUT", "/v1/subjects/bad/messages", b"x", {}),
    "too large": ("POST", "/v1/subjects/bad/messages?delay=1s", bytes((4 << 20) + 1), {}),
}


@pytest.mark.parametrize("step", [".", "..", "%2E", "%2e%2E", ".%2e"])
def test_what_clients_read_as_a_step_in_a_path_is_no_name_there(cluster: Cluster, step: str) -> None:
    message = "messages?delay=1h"
    for path in (f"subjects/{step}/{message}", f"subjects/a/{step}/b/{message}", f"subjects/a/groups/{step}/pull"):
        answer = cluster.gateway.ask("POST", f"/v1/{path}", b"{}")
        assert (answer.status, answer.code) == (400, "bad_argument") and "%2F" in str(answer.json["detail"])
    for path in (
        f"subjects/a%2F{step}%2Fb/{message}",
        f"subjects/a{step}/{message}",
        f"subjects/a/{message}&key={step}",
    ):
        answer = cluster.gateway.ask("POST", f"/v1/{path}", b"x")
        assert answer.status == 201, answer
        cluster.gateway.ask("DELETE", f"/v1/{path.partition('?')[0]}/{answer.json['id']}")


@pytest.mark.parametrize("name", HOSTILE)
def test_bad_input_is_refused_by_name_and_nothing_is_sent(cluster: Cluster, name: str) -> None:
    method, path, body, headers = HOSTILE[name]
    answer = cluster.gateway.ask(method, path, body, headers)
    assert 400 <= answer.status < 500 and answer.code and answer.json["detail"], answer
    assert cluster.gateway.ask("GET", "/v1/subjects/bad/messages").lines == [
        {"pending": 0, "in_flight": 0, "unread": 0}
    ]


def test_a_body_that_is_declared_too_long_is_refused_before_it_is_read(cluster: Cluster) -> None:
    with socket.create_connection(("127.0.0.1", cluster.gateway.port), LIMIT_S) as line:
        line.sendall(
            b"POST /v1/subjects/bad/messages?delay=1s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"
            % (4 << 30)
        )
        assert line.recv(100).startswith(b"HTTP/1.1 413 ")


def test_who_hangs_up_in_a_request_is_no_fault_of_the_gateway_and_whole_lines_are_sent(cluster: Cluster) -> None:
    head = (
        b"POST /v1/subjects/cut/messages HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 900\r\ncontent-type: %s\r\n\r\n"
    )
    for kind in (b"application/json", b"application/x-ndjson"):
        with socket.create_connection(("127.0.0.1", cluster.gateway.port), LIMIT_S) as line:
            line.sendall(head % kind + b'{"body":"a","delay":"1h"}\n{"body":"b"')
            time.sleep(0.3)
    deadline = time.monotonic() + LIMIT_S
    while cluster.gateway.ask("GET", "/v1/subjects/cut/messages").lines[-1]["pending"] != 1:
        assert time.monotonic() < deadline


def test_the_trace_of_a_request_goes_with_its_messages_and_with_no_other(cluster: Cluster) -> None:
    traces = [f"00-{number:032x}-b7ad6b7169203331-01" for number in (1, 2, 3)]
    lines = b'{"body":"2","delay_ms":0}\n{"body":"own","delay_ms":0,"headers":{"traceparent":"mine"}}'
    path = "/v1/subjects/traced/messages"
    ask = cluster.gateway.ask
    assert ask("POST", f"{path}?delay_ms=0", b"1", {"traceparent": traces[0]}).status == 201
    assert ask("POST", path, lines, {**LINES, "traceparent": traces[1]}).status == 200
    assert ask("POST", path, {"body": "3", "delay_ms": 0}, {"traceparent": traces[2]}).status == 201
    assert ask("POST", f"{path}?delay_ms=0", b"none").status == 201
    assert ask("POST", f"{path}?delay_ms=0", b"bad", {"traceparent": "yes"}).status == 201
    found: dict[str, object] = {}
    deadline = time.monotonic() + LIMIT_S
    while len(found) < 6:
        assert time.monotonic() < deadline
        wish: Json = {"max_messages": 10, "wait_ms": 1_000}
        pulled: Any = ask("POST", "/v1/subjects/traced/groups/g/pull", wish).json["messages"]
        found |= {each["body"]: each.get("headers", {}).get("traceparent") for each in pulled}
    own = {"1": traces[0], "2": traces[1], "own": "mine", "3": traces[2]}
    assert found == {**own, "none": None, "bad": None}


def test_metrics_name_each_server_and_group_and_say_who_is_away(tmp_path: Path) -> None:
    def figures(gateway: Gateway) -> dict[tuple[str, str], float]:
        text = gateway.ask("GET", "/metrics").body.decode()
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        return {(each.name, each.labels.get("role") or each.labels.get("group", "")): each.value for each in samples}

    with (
        ServerProcess("meta", tmp_path) as meta,
        ServerProcess("realtime", tmp_path, {"meta": meta.address}) as realtime,
        ServerProcess("delay", tmp_path, {"meta": meta.address}),
        gateway_of(meta.address, tmp_path) as gateway,
    ):
        for _ in range(3):
            gateway.ask("POST", "/v1/subjects/m/messages?delay_ms=0", b"x")
        assert len(gateway.pull("m", "billing")) == 1
        found = figures(gateway)
        assert [found["delayd_up", role] for role in ("meta", "delay", "realtime")] == [1, 1, 1]
        assert found["delayd_accepted_messages_total", "delay"] == 3
        assert found["delayd_group_outstanding_messages", "billing"] == 1
        assert found["delayd_gateway_leases", ""] == 1
        realtime.kill()
        assert figures(gateway)["delayd_up", "realtime"] == 0
        meta.kill()
        assert figures(gateway)["delayd_up", "meta"] == 0


def test_servers_that_are_not_there_are_a_503(tmp_path: Path) -> None:
    with gateway_of("127.0.0.1:1", tmp_path) as gateway:
        answer = gateway.ask("POST", "/v1/subjects/m/messages?delay=1s", b"x")
        assert (answer.status, answer.code) == (503, "server_unavailable")
        answer = gateway.ask("GET", "/v1/subjects/m/messages")
        assert (answer.status, answer.code) == (503, "server_unavailable"), "a list, too"


def test_other_machines_are_let_in_only_by_so_many_words(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "delayd", "gateway", "--meta", cluster.meta, "--port", "0", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2 and "--insecure" in done.stderr and not done.stdout
    with gateway_of(cluster.meta, cluster.folder, "--host", "0.0.0.0", "--insecure", "--name", "gw.example") as gateway:
        assert gateway.ask("GET", "/healthz", headers={"host": "GW.example:80"}).status == 200


def test_without_its_packages_the_command_says_what_to_install(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError('gone', name='starlette')")
    command = [sys.executable, "-m", "delayd", "gateway", "--meta", cluster.meta]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr == "delayd: a gateway needs starlette: pip install 'delayd[gateway]'\n"


@pytest.fixture(scope="module")
def operated(cluster: Cluster) -> Iterator[Gateway]:
    secret = next(cluster.folder.rglob("cluster.secret"))
    with gateway_of(cluster.meta, cluster.folder, "--secret-file", str(secret)) as gateway:
        yield gateway
        assert gateway.stop() == 0 and " ERROR " not in gateway.log, gateway.log


def rows(answer: Answer, name: str) -> list[Json]:
    found = answer.json[name]
    assert isinstance(found, list), answer
    return found


def test_subjects_and_groups_are_listed_and_a_group_is_paused_rewound_and_deleted(operated: Gateway) -> None:
    ask, group = operated.ask, "/v1/subjects/listed.a/groups/g"
    for _ in range(3):
        ask("POST", "/v1/subjects/listed.a/messages?delay_ms=0", b"x")
    held = operated.pull("listed.a", max_messages=1)
    deadline = time.monotonic() + LIMIT_S
    while rows(ask("GET", group), "groups")[0]["end"] != 3:
        assert time.monotonic() < deadline
    assert [each["subject"] for each in rows(ask("GET", "/v1/subjects?prefix=listed."), "subjects")] == ["listed.a"]
    (found,) = rows(ask("GET", "/v1/subjects/listed.a/groups"), "groups")
    assert (found["group"], found["waiting"], found["outstanding"], found["paused"]) == ("g", 2, 1, False)
    assert ask("POST", f"{group}/pause").json == {"paused": True}
    assert operated.pull("listed.a", wait_ms=0) == []
    assert ask("POST", f"{group}/resume").json == {"paused": False}
    operated.say("ack", *(each["lease"] for each in [*held, *operated.pull("listed.a", max_messages=2)]))
    told = ask("POST", f"{group}/rewind", {"to": "earliest"}).json
    assert told["dry_run"] is True and operated.pull("listed.a", wait_ms=0) == []
    assert ask("POST", f"{group}/rewind", {"to": "earliest", "dry_run": False}).json["next"] == told["next"]
    (again,) = operated.pull("listed.a")
    assert again["sequence"] == held[0]["sequence"]
    assert ask("DELETE", group).json == {"ended": 0}
    assert (ask("GET", group).status, ask("POST", f"{group}/pause").code) == (404, "unknown")


def test_dead_letters_are_listed_sent_again_and_ended(operated: Gateway) -> None:
    ask, dead = operated.ask, "/v1/subjects/dead.a/groups/g/dead"
    for body in (b"one", b"two"):
        ask("POST", "/v1/subjects/dead.a/messages?delay_ms=0&tags=t", body)
    for _ in range(2):
        operated.say("reject", operated.pull("dead.a")[0]["lease"], reason="no_address", error="who?")
    deadline = time.monotonic() + LIMIT_S
    while len(lines := ask("GET", dead).lines) < 3:
        assert time.monotonic() < deadline
    *letters, total = lines
    assert {(each["body"], each["reason"], each["error"]) for each in letters} == {
        ("one", "no_address", "who?"),
        ("two", "no_address", "who?"),
    }
    assert (letters[0]["tags"], total) == (["t"], {"dead": 2, "unread": 0})
    assert ask("GET", f"{dead}?before=2020-01-01T00:00:00Z").lines == [{"dead": 0, "unread": 0}]
    assert ask("POST", f"{dead}/redrive").json["found"] == 2
    assert len(ask("GET", dead).lines) == 3, "it was only counted"
    assert ask("POST", f"{dead}/redrive", {"dry_run": False}).json["done"] == 2
    operated.say("reject", operated.pull("dead.a")[0]["lease"], reason="again")
    operated.say("ack", operated.pull("dead.a")[0]["lease"])
    while len(ask("GET", dead).lines) < 2:
        assert time.monotonic() < deadline
    assert ask("POST", f"{dead}/purge", {"dry_run": False}).json["done"] == 1
    assert ask("GET", dead).lines == [{"dead": 0, "unread": 0}]


def test_a_quota_is_set_and_holds(operated: Gateway) -> None:
    ask = operated.ask
    assert ask("PUT", "/v1/subjects/few/quota", {"pending": 1}).status == 200
    (quota,) = rows(ask("GET", "/v1/quotas?prefix=few"), "quotas")
    assert (quota["subject"], quota["pending"], quota["per_second"]) == ("few", 1, None)
    hour = "/v1/subjects/few/messages?delay=1h"
    untold = ask("POST", "/v1/subjects/few/messages", b"x")
    assert "delay_ms" in str(untold.json["detail"]), "each word that says it is named"
    kept, refused, named = (ask("POST", hour, b"x", headers) for headers in ({}, {}, {"idempotency-key": "few"}))
    assert (kept.status, refused.status, named.status, refused.code) == (201, 429, 429, "quota_reached")
    due_ms, next_ms = (int(str(value)) for value in (kept.json["deliver_at_ms"], refused.json["next_free_ms"]))
    assert abs(next_ms - due_ms) <= 1_000, "then the pending one is due"
    assert "retry-after" not in refused.headers, "it may be cancelled or moved before"
    for answer in (refused, named):
        assert str(answer.json["detail"]).startswith("the quota of few (pending 1) takes no more; the next pending"), (
            answer
        )
    assert ask("PUT", "/v1/subjects/few/quota", {"per_second": 1}).status == 200
    later = ask("POST", f"/v1/subjects/few/messages?deliver_at_ms={due_ms}", b"x")
    assert later.status == 429 and "retry-after" not in later.headers, "that second stays full"
    over = next(
        answer
        for answer in (ask("POST", "/v1/subjects/few/messages?delay=0s", b"x") for _ in range(1_000))
        if answer.status != 201
    )
    assert (over.status, over.headers["retry-after"]) == (429, "1")
    ask("PUT", "/v1/subjects/few/quota", {})
    assert ask("POST", hour, b"x").status == 201


def test_what_only_an_operator_may_decide_needs_the_secret(cluster: Cluster) -> None:
    ask = cluster.gateway.ask
    group = "/v1/subjects/curl.a/groups/g"
    asked: tuple[tuple[str, str, Json | None], ...] = (
        ("POST", f"{group}/pause", None),
        ("POST", f"{group}/resume", None),
        ("POST", f"{group}/rewind", {"to": "latest", "dry_run": False}),
        ("DELETE", group, None),
        ("PUT", "/v1/subjects/curl.a/quota", {"pending": 0}),
    )
    for method, path, body in asked:
        answer = ask(method, path, body)
        assert (answer.status, answer.code) == (403, "not_trusted"), path


def test_a_group_is_followed_by_events_and_what_is_not_acknowledged_comes_again(cluster: Cluster) -> None:
    def events(count: int) -> list[Json]:
        found: list[Json] = []
        with socket.create_connection(("127.0.0.1", cluster.gateway.port), LIMIT_S) as line:
            line.sendall(
                b"GET /v1/subjects/sse/groups/g/events?lease_ms=1000&max_held=2 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
            )
            heard = line.makefile("rb")
            while len(found) < count:
                word = heard.readline()
                assert word, "the stream goes on"
                if word.startswith(b"content-type:"):
                    assert word == b"content-type: text/event-stream; charset=utf-8\r\n"
                if word.startswith(b"data: "):
                    found.append(json.loads(word.removeprefix(b"data: ")))
                    if len(found) == 2:
                        assert cluster.gateway.say("ack", found[0]["lease"]) == [{"lease": found[0]["lease"]}]
        return found

    for number in range(3):
        cluster.gateway.ask("POST", "/v1/subjects/sse/messages?delay_ms=0", b"%d" % number)
    first, second, third = events(3)
    assert [each["body"] for each in (first, second, third)] == ["0", "1", "2"]
    again = {str(each["body"]): each["attempt"] for each in events(2)}
    assert again == {"1": 2, "2": 2}, "the first one was acknowledged"


def test_the_document_of_a_gateway_is_the_one_that_is_checked_in(cluster: Cluster) -> None:
    assert cluster.gateway.ask("GET", "/v1/openapi.json").json == json.loads(DOCUMENT.read_text())
