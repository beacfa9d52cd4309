"""Due messages are POSTed to URLs, signed, and acknowledged by a 2xx (docs/push.md)."""

from __future__ import annotations

import base64
import json
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

import delayd
from delayd.secret import SECRET_FILE
from tests.certificates import Authority
from tests.end_to_end.gateways import Gateway, Json, gateway_of
from tests.end_to_end.processes import ServerProcess
from tests.receivers import HANG_S, Answer, Post, Receiver, hang, receiver, status
from tests.waiting import wait_until

NOW = timedelta(0)
CLI_LIMIT_S = 60.0


class Cluster(NamedTuple):
    meta: str
    gateway: Gateway
    folder: Path

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command of `delayd push`; what it prints."""
        asked = ["push", *words, "--meta", self.meta, "--data", str(self.folder)]
        done = subprocess.run(
            [sys.executable, "-m", "delayd", *asked], capture_output=True, text=True, timeout=CLI_LIMIT_S
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def create(self, subject: str, url: str, **terms: object) -> str:
        """Create a target of the subject's name; its key."""
        made = self.gateway.ask("POST", "/v1/push", {"name": subject, "subject": subject, "url": url, **terms})
        assert made.status == 201, made
        return str(made.json["key"])

    def send(self, subject: str, *bodies: bytes, headers: dict[str, str] | None = None) -> list[delayd.Receipt]:
        with delayd.Producer(self.meta) as producer:
            return [producer.send(subject, body, delay=NOW, headers=headers) for body in bodies]

    def view(self, name: str) -> Json:
        found = self.gateway.ask("GET", f"/v1/push/{name}")
        assert found.status == 200, found
        return found.json

    def dead(self, subject: str) -> list[tuple[str, str]]:
        """Reason and error of the dead letters of the target of a subject."""
        with delayd.Admin(self.meta) as admin:
            if not any(each.group == f"push/{subject}" for each in admin.groups(subject)):
                return []  # No gateway has pulled for it yet.
            pages = admin.dead_letters(subject, f"push/{subject}")
            return [(letter.reason, letter.error) for page in pages for letter in page]

    def waiting(self, subject: str) -> int:
        """Messages of the subject that the group of its target has not acknowledged."""
        with delayd.Admin(self.meta) as admin:
            (group,) = [each for each in admin.groups(subject) if each.group == f"push/{subject}"]
        return group.waiting + group.info.outstanding + group.info.redelivering + group.info.leaving


def secret_of(folder: Path) -> tuple[str, str]:
    return "--secret-file", str(folder / SECRET_FILE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("push")
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", folder))
        for role in ("realtime", "delay"):
            stack.enter_context(ServerProcess(role, folder, {"meta": meta.address}))
        gateway = stack.enter_context(gateway_of(meta.address, folder, "--allow-private", *secret_of(folder)))
        yield Cluster(meta.address, gateway, folder)
        assert gateway.stop() == 0
        assert " ERROR " not in gateway.log, gateway.log


@pytest.fixture
def web() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


def test_a_due_message_is_posted_signed_and_acknowledged(cluster: Cluster, web: Receiver) -> None:
    told = cluster.run("create", "first.paid", f"{web.url}/hook?a=1")
    key = told.split()[-1]
    assert key.startswith("whsec_")
    with delayd.Producer(cluster.meta) as producer:
        receipt = producer.send(
            "first.paid",
            b'{"order": 42}',
            delay=timedelta(milliseconds=300),
            key="order 42",
            headers={"content-type": "application/vnd.order+json", "x-team": "billing", "traceparent": "00-1-2-01"},
        )
    (post,) = web.wait(1)
    assert post.at * 1_000 >= receipt.deliver_at_ms
    assert (post.path, post.body) == ("/hook?a=1", b'{"order": 42}')
    assert Webhook(key).verify(post.body, dict(post.headers)) == {"order": 42}
    assert post.id == f"msg_{receipt.log_id:016x}_{receipt.sequence}"
    for name, value in {
        "content-type": "application/vnd.order+json",
        "delayd-subject": "first.paid",
        "delayd-attempt": "1",
        "delayd-key": "order%2042",
        "delayd-header-x-team": "billing",
        "traceparent": "00-1-2-01",
    }.items():
        assert post.headers[name] == value
    wait_until(lambda: cluster.waiting("first.paid") == 0, "the message is acknowledged")
    assert len(web.posts) == 1


def test_each_forgery_is_refused_by_the_verifier_of_standard_webhooks(cluster: Cluster, web: Receiver) -> None:
    key, stranger = cluster.create("forged", web.url), Webhook(f"whsec_{'A' * 40}")
    cluster.send("forged", b'{"a": 1}')
    (post,) = web.wait(1)
    headers, own = dict(post.headers), Webhook(key)
    own.verify(post.body, headers)
    version, _, signature = headers["webhook-signature"].partition(",")
    forged: list[tuple[bytes, Json]] = [
        (b'{"a": 2}', {}),
        (post.body, {"webhook-id": f"{post.id}1"}),
        (post.body, {"webhook-timestamp": str(int(headers["webhook-timestamp"]) + 1)}),
        (post.body, {"webhook-timestamp": str(int(headers["webhook-timestamp"]) - 3_600)}),
        (post.body, {"webhook-signature": f"{version},{signature[::-1].replace('=', '')}="}),
        (post.body, {"webhook-signature": f"v0,{signature}"}),
        (post.body, {"webhook-signature": stranger.sign(post.id, _utc(headers), post.body.decode())}),
    ]
    for body, changed in forged:
        with pytest.raises(WebhookVerificationError):
            own.verify(body, {**headers, **{name: str(value) for name, value in changed.items()}})
    with pytest.raises(WebhookVerificationError):
        stranger.verify(post.body, headers)


def test_while_a_key_changes_both_sign_and_then_the_new_one_alone(cluster: Cluster, web: Receiver) -> None:
    old = cluster.create("turned", web.url)
    new = cluster.run("rotate-secret", "turned", "--keep", "1h").split()[-1]
    assert new != old and new.startswith("whsec_")
    _until_served(cluster, "turned", version=2)
    cluster.send("turned", b"{}")
    (both,) = web.wait(1)
    for key in (old, new):
        Webhook(key).verify(both.body, dict(both.headers))
    newest = cluster.gateway.ask("POST", "/v1/push/turned/key", {"keep": "1ms"}).json["key"]
    _until_served(cluster, "turned", version=3)
    cluster.send("turned", b"{}")
    _, alone = web.wait(2)
    Webhook(str(newest)).verify(alone.body, dict(alone.headers))
    for key in (old, new):
        with pytest.raises(WebhookVerificationError):
            Webhook(key).verify(alone.body, dict(alone.headers))


def test_a_receiver_checks_an_asymmetric_signature_with_the_public_half(cluster: Cluster, web: Receiver) -> None:
    key = cluster.create("halves", web.url, asymmetric=True)
    assert key.startswith("whpk_")
    cluster.send("halves", b"\x00\xff")
    (post,) = web.wait(1)
    version, _, signature = post.headers["webhook-signature"].partition(",")
    assert version == "v1a"
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(key.removeprefix("whpk_")))
    content = f"{post.id}.{post.headers['webhook-timestamp']}.".encode() + post.body
    public.verify(base64.b64decode(signature), content)
    with pytest.raises(InvalidSignature):
        public.verify(base64.b64decode(signature), content + b".")


def test_what_fails_comes_again_with_its_id_and_is_at_last_a_dead_letter(cluster: Cluster, web: Receiver) -> None:
    key = cluster.create("flaky", web.url, backoff_first="100ms", backoff_most="200ms", attempts=3)
    web.answers = [status(500, b"no"), status(302, location="http://127.0.0.1:1/"), status(200, b"yes")]
    cluster.send("flaky", b"{}")
    posts = web.wait(3)
    assert len({post.id for post in posts}) == 1
    assert [post.headers["delayd-attempt"] for post in posts] == ["1", "2", "3"]
    for post in posts:
        Webhook(key).verify(post.body, dict(post.headers))
    wait_until(lambda: cluster.waiting("flaky") == 0, "the third answer acknowledges it")
    assert cluster.dead("flaky") == []
    web.usual = status(422, b"x" * 5_000)
    cluster.send("flaky", b"{}")
    wait_until(lambda: cluster.dead("flaky"), "a dead letter")
    ((reason, error),) = cluster.dead("flaky")
    assert reason == "answered 422, in attempt 3 of 3"
    assert error == "x" * 4_096
    assert len(web.posts) == 6


def test_retry_after_is_honoured(cluster: Cluster, web: Receiver) -> None:
    cluster.create("patient", web.url, backoff_first="1ms", backoff_most="1ms")
    web.answers = [status(503, retry_after="2")]
    cluster.send("patient", b"{}")
    first, second = web.wait(2)
    assert second.at - first.at >= 1.9


def test_410_pauses_a_target_until_it_is_resumed(cluster: Cluster, web: Receiver) -> None:
    cluster.create("gone", web.url)
    web.answers = [status(410)]
    cluster.send("gone", b"1")
    web.wait(1)
    wait_until(lambda: cluster.view("gone")["paused"], "it is paused")
    assert str(cluster.view("gone")["note"]).startswith("answered 410 at 20")
    cluster.send("gone", b"2")
    wait_until(lambda: cluster.waiting("gone") == 2, "both wait")
    assert len(web.posts) == 1
    cluster.run("resume", "gone")
    assert {post.body for post in web.wait(3)[1:]} == {b"1", b"2"}
    assert cluster.view("gone")["note"] == ""


def test_a_target_that_hangs_is_cut_at_its_deadline_or_that_of_a_message(cluster: Cluster, web: Receiver) -> None:
    ended = threading.Event()
    cluster.create("hangs", web.url, timeout="30s", attempts=1)
    web.usual = hang(ended)
    began = time.monotonic()
    cluster.send("hangs", b"{}", headers={"delayd-timeout": "300ms"})
    wait_until(lambda: cluster.dead("hangs"), "a dead letter")
    assert time.monotonic() - began < 25
    assert cluster.dead("hangs") == [("no answer in 0.3 s, in attempt 1 of 1", "")]
    ended.set()


def test_of_an_endless_answer_4_kib_are_read(cluster: Cluster, web: Receiver) -> None:
    sent = 0

    def endless(number: int) -> Answer:
        def answer(post: Post, handler: BaseHTTPRequestHandler) -> None:
            nonlocal sent
            handler.send_response(number)
            handler.send_header("content-length", str(1 << 30))
            handler.end_headers()
            for _ in range(1 << 14):
                handler.wfile.write(b"a" * (1 << 16))
                sent += 1 << 16

        return answer

    cluster.create("floods", web.url, attempts=1)
    web.answers = [endless(500), endless(200)]
    cluster.send("floods", b"1")
    wait_until(lambda: cluster.dead("floods"), "a dead letter")
    cluster.send("floods", b"2")
    wait_until(lambda: cluster.waiting("floods") == 0, "200 acknowledges")
    assert sent < 64 << 20
    assert cluster.dead("floods") == [("answered 500, in attempt 1 of 1", "a" * 4_096)]


def test_messages_are_posted_in_batches(cluster: Cluster, web: Receiver) -> None:
    key = cluster.create("many", web.url, batch=10, paused=True)
    receipts = cluster.send("many", *(b"%d" % number for number in range(25)))
    cluster.run("resume", "many")
    wait_until(lambda: sum(len(json.loads(post.body)) for post in web.posts) >= 25, "all came")
    rows = [row for post in web.posts for row in Webhook(key).verify(post.body, dict(post.headers))]
    assert sorted(int(row["body"]) for row in rows) == [*range(25)]
    assert {row["id"] for row in rows} == {f"msg_{each.log_id:016x}_{each.sequence}" for each in receipts}
    assert len(web.posts) <= 5 and len({post.id for post in web.posts}) == len(web.posts)
    wait_until(lambda: cluster.waiting("many") == 0, "all are acknowledged")


def test_a_pattern_pushes_each_subject(cluster: Cluster, web: Receiver) -> None:
    made = cluster.gateway.ask("POST", "/v1/push", {"name": "all", "subject": "zone.>", "url": web.url})
    assert made.status == 201 and made.headers["location"] == "push/all"
    cluster.send("zone.eu", b"1")
    cluster.send("zone.us.west", b"2")
    assert {post.headers["delayd-subject"] for post in web.wait(2)} == {"zone.eu", "zone.us.west"}


def test_a_rate_spreads_posts_evenly(cluster: Cluster, web: Receiver) -> None:
    cluster.create("paced", web.url, rate="20/s")
    cluster.send("paced", *[b"{}"] * 20)
    posts = web.wait(20)
    assert posts[-1].at - posts[0].at > 0.7
    assert cluster.dead("paced") == []


def test_concurrency_bounds_posts_under_way(cluster: Cluster, web: Receiver) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def slow(post: Post, handler: BaseHTTPRequestHandler) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        with lock:
            now -= 1
        status(204)(post, handler)

    cluster.create("few", web.url, concurrency=2)
    web.usual = slow
    cluster.send("few", *[b"{}"] * 12)
    web.wait(12)
    assert most == 2


def test_a_flow_key_over_its_limit_holds_up_no_other_and_loses_no_attempt(cluster: Cluster, web: Receiver) -> None:
    cluster.create("flows", web.url, flow_rate="5/s", attempts=1)
    cluster.send("flows", *[b"slow"] * 30, headers={"delayd-flow": "a"})
    cluster.send("flows", b"quick", headers={"delayd-flow": "b"})
    cluster.send("flows", b"free")
    posts = web.wait(32)
    at = {body: [post.at for post in posts if post.body == body] for body in (b"slow", b"quick", b"free")}
    assert at[b"slow"][-1] - at[b"slow"][0] > 5
    for other in (b"quick", b"free"):
        assert at[other][0] - posts[0].at < (at[b"slow"][-1] - at[b"slow"][0]) / 2
    here = cluster.view("flows")["here"]
    assert isinstance(here, dict) and here["put_off"] > 0
    # What was put off has spent no attempt of its target: of one attempt there would be none left.
    assert {post.headers["delayd-attempt"] for post in posts} == {"1"}
    wait_until(lambda: cluster.waiting("flows") == 0, "all are acknowledged")
    assert cluster.dead("flows") == []


def test_messages_of_a_flow_key_are_posted_so_many_at_a_time(cluster: Cluster, web: Receiver) -> None:
    lock, now, most = threading.Lock(), {"a": 0, "b": 0}, {"a": 0, "b": 0}

    def slow(post: Post, handler: BaseHTTPRequestHandler) -> None:
        key = post.body.decode()
        with lock:
            now[key] += 1
            most[key] = max(most[key], now[key])
        time.sleep(0.2)
        with lock:
            now[key] -= 1
        status(204)(post, handler)

    cluster.create("lanes", web.url, flow_concurrency=1, attempts=1)
    web.usual = slow
    path = "/v1/subjects/lanes/messages"
    for key, count in (("a", 40), ("b", 5)):
        wishes: list[Json] = [{"body": key, "delay_ms": 0, "flow": key, "timeout": "10s"}] * count
        assert cluster.gateway.ask("POST", path, wishes).status == 200
    web.wait(45, within_s=60)
    assert most == {"a": 1, "b": 1}
    assert {post.headers["delayd-attempt"] for post in web.posts} == {"1"}
    wait_until(lambda: cluster.waiting("lanes") == 0, "all are acknowledged")
    assert cluster.dead("lanes") == []


def test_a_failing_target_is_left_alone_and_then_tried_with_one(cluster: Cluster, web: Receiver) -> None:
    cluster.create("ill", web.url, backoff_first="1ms", backoff_most="1ms", attempts=100)
    web.usual = status(500)
    cluster.send("ill", *[b"{}"] * 5)
    wait_until(
        lambda: "push_rests target=ill seconds=2" in cluster.gateway.log, "it was tried and is left alone longer"
    )
    # Five failed at once, and one or two tries since: nothing like what a back-off of 1 ms would have asked.
    assert len(web.posts) < 30
    web.usual = status(204)
    wait_until(lambda: cluster.waiting("ill") == 0, "all are acknowledged")
    assert "push_goes_on target=ill" in cluster.gateway.log


def test_a_gateway_killed_in_a_post_gives_its_message_to_another(
    cluster: Cluster, web: Receiver, tmp_path: Path
) -> None:
    cluster.create("killed", web.url, timeout="100ms", paused=True)
    hung = threading.Event()
    web.answers = [hang(hung)]
    with gateway_of(cluster.meta, tmp_path, "--allow-private", *secret_of(cluster.folder)) as other:
        cluster.gateway.process.send_signal(signal.SIGSTOP)  # So that the one to be killed has it.
        try:
            changed = other.ask("PATCH", "/v1/push/killed", {"paused": False, "timeout": "3s"})
            assert changed.status == 200
            (receipt,) = cluster.send("killed", b"{}")
            web.wait(1)
            other.stop(signal.SIGKILL)
        finally:
            cluster.gateway.process.send_signal(signal.SIGCONT)
        hung.set()
        # The lease is that of the deadline and 10 s.
        first, second = web.wait(2, within_s=90)
    assert first.id == second.id == f"msg_{receipt.log_id:016x}_{receipt.sequence}"
    assert (first.headers["delayd-attempt"], second.headers["delayd-attempt"]) == ("1", "2")


def test_a_gateway_that_stops_gives_back_at_once(cluster: Cluster, web: Receiver, tmp_path: Path) -> None:
    hung = threading.Event()
    web.answers = [hang(hung)]
    cluster.create("stopped", web.url, timeout="10m", paused=True)
    with gateway_of(cluster.meta, tmp_path, "--allow-private", *secret_of(cluster.folder)) as other:
        cluster.gateway.process.send_signal(signal.SIGSTOP)
        try:
            assert other.ask("PATCH", "/v1/push/stopped", {"paused": False}).status == 200
            cluster.send("stopped", b"{}")
            web.wait(1)
            assert other.stop() == 0
        finally:
            cluster.gateway.process.send_signal(signal.SIGCONT)
    first, second = web.wait(2)
    assert first.id == second.id
    hung.set()


def test_gateways_share_the_messages_and_each_is_posted_once(cluster: Cluster, web: Receiver, tmp_path: Path) -> None:
    def slow(post: Post, handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.05)
        status(204)(post, handler)

    cluster.create("shared", web.url, paused=True)
    with gateway_of(cluster.meta, tmp_path, "--allow-private", *secret_of(cluster.folder)) as other:
        cluster.run("resume", "shared")
        _until_served(cluster, "shared", version=2)
        _until_served(cluster._replace(gateway=other), "shared", version=2)
        web.usual = slow
        cluster.send("shared", *(b"%d" % number for number in range(300)))
        web.wait(300)
        wait_until(lambda: cluster.waiting("shared") == 0, "all are acknowledged")
        assert len({post.body for post in web.posts}) == len(web.posts) == 300
        views = [each.ask("GET", "/v1/push/shared").json["here"] for each in (cluster.gateway, other)]
    delivered = [view["delivered"] for view in views if isinstance(view, dict)]
    assert sum(delivered) == 300 and all(delivered)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[2002:7f00:1::]", "[64:ff9b::7f00:1]"],
)
def test_private_addresses_are_refused_unless_they_are_allowed(strict: Cluster, web: Receiver, host: str) -> None:
    port = web.url.rpartition(":")[2]
    name = f"p.{''.join(filter(str.isalnum, host))}"
    strict.create(name, f"http://{host}:{port}/", attempts=1)
    tried = strict.gateway.ask("POST", f"/v1/push/{name}/test").json
    assert (tried["taken"], tried["status"]) == (False, 0)
    assert "gateways POST to public addresses only" in str(tried["what"])
    strict.send(name, b"{}")
    wait_until(lambda: strict.dead(name), "a dead letter")
    ((reason, _),) = strict.dead(name)
    assert "gateways POST to public addresses only, in attempt 1 of 1" in reason
    assert web.posts == []


@pytest.fixture(scope="module")
def strict(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of its own, whose gateway allows no private addresses."""
    folder = tmp_path_factory.mktemp("strict")
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", folder))
        for role in ("realtime", "delay"):
            stack.enter_context(ServerProcess(role, folder, {"meta": meta.address}))
        gateway = stack.enter_context(gateway_of(meta.address, folder, *secret_of(folder)))
        yield Cluster(meta.address, gateway, folder)


def test_targets_are_listed_changed_tried_and_deleted(cluster: Cluster, web: Receiver) -> None:
    key = cluster.run(
        *("create", "orders.late", web.url, "--name", "late", "--header", "authorization: Bearer abc"),
        *("--rate", "10/s", "--timeout", "3s", "--batch", "2"),
    ).split()[-1]
    listed = json.loads(cluster.run("list", "--format", "json"))
    assert [(each["subject"], each["state"]) for each in listed if each["name"] == "late"] == [
        ("orders.late", "served")
    ]
    (shown,) = json.loads(cluster.run("show", "late", "--format", "json"))
    assert (shown["headers"], shown["rate"], shown["timeout_ms"], shown["batch"]) == ("authorization", "10/s", 3_000, 2)
    assert key not in json.dumps(shown) and "Bearer" not in json.dumps(shown)
    answer = cluster.gateway.ask("GET", "/v1/push/late")
    assert key.encode() not in answer.body and b"Bearer" not in answer.body
    assert "late: answered 204" in cluster.run("test", "late", "--allow-private")
    (post,) = web.posts
    assert Webhook(key).verify(post.body, dict(post.headers))["type"] == "delayd.test"
    assert post.headers["authorization"] == "Bearer abc"
    assert "public addresses only" in cluster.run("test", "late", code=2)
    cluster.run("edit", "late", "--timeout", "9s", "--url", f"{web.url}/other")
    assert (cluster.view("late")["timeout_ms"], cluster.view("late")["rate"]) == (9_000, "10/s")
    cluster.run("pause", "late", "--note", "they move house")
    assert (cluster.view("late")["paused"], cluster.view("late")["note"]) == (True, "they move house")
    assert "delayd groups delete orders.late push/late" in cluster.run("delete", "late")
    assert cluster.gateway.ask("GET", "/v1/push/late").code == "unknown"
    assert "there is no push target late" in cluster.run("show", "late", code=2)


@pytest.mark.parametrize(
    ("wish", "what"),
    [
        ({"url": "ftp://example.com"}, "no URL of a web server"),
        ({"url": "https://a:b@example.com/"}, "give them as a header"),
        ({"url": "https://example.com/#a"}, "never sent"),
        ({"url": "https://[::1/"}, "no URL"),
        ({"name": "a/b"}, "no name of a push target"),
        ({"subject": "a b"}, "subject"),
        ({"subject": "%retry/0011223344556677/1"}, "servers keep for themselves"),
        ({"rate": "10"}, "no rate"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": 2, "flow_rate": "1/s"}, "not both"),
        ({"timeout": "31m"}, "timeout_ms"),
        ({"headers": {"webhook-id": "a"}}, "delayd's own"),
        ({"headers": {"a": "b\r\nc: d"}}, "control character"),
        ({"key": "whsec_short"}, "key"),
        ({"content_type": "text"}, "media type"),
        ({"stray": 1}, "unknown field"),
    ],
)
def test_a_target_that_cannot_be_served_is_refused_by_name(cluster: Cluster, wish: Json, what: str) -> None:
    good: Json = {"name": "wrong", "subject": "wrong", "url": "https://example.com/"}
    refused = cluster.gateway.ask("POST", "/v1/push", {**good, **wish})
    assert refused.status == 400, refused
    assert what in str(refused.json["detail"])
    assert "short" not in str(refused.json["detail"])


def test_a_name_is_taken_once_and_a_gateway_without_the_secret_says_so(
    cluster: Cluster, web: Receiver, tmp_path: Path
) -> None:
    cluster.create("once", web.url)
    again = cluster.gateway.ask("POST", "/v1/push", {"name": "once", "subject": "once", "url": web.url})
    assert again.status == 400 and "already" in str(again.json["detail"])
    with gateway_of(cluster.meta, tmp_path) as plain:
        assert plain.ask("GET", "/v1/push").code == "not_trusted"
        assert plain.ask("GET", "/healthz").status == 200


def test_a_post_under_way_ends_though_its_target_is_changed(cluster: Cluster, web: Receiver) -> None:
    cluster.create("changed", web.url)
    goes_on = threading.Event()

    def late(post: Post, handler: BaseHTTPRequestHandler) -> None:
        goes_on.wait(HANG_S)
        status(204)(post, handler)

    web.answers = [late]
    cluster.send("changed", b"{}")
    web.wait(1)
    cluster.run("edit", "changed", "--attempts", "3")
    _until_served(cluster, "changed", version=2)
    time.sleep(3)  # Longer than a stop would let it go on.
    goes_on.set()
    wait_until(lambda: cluster.waiting("changed") == 0, "it is acknowledged")
    assert len(web.posts) == 1


def test_targets_outlive_meta_and_are_served_while_it_is_away(cluster: Cluster, web: Receiver, tmp_path: Path) -> None:
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", tmp_path))
        for role in ("realtime", "delay"):
            stack.enter_context(ServerProcess(role, tmp_path, {"meta": meta.address}))
        gateway = stack.enter_context(gateway_of(meta.address, tmp_path, "--allow-private", *secret_of(tmp_path)))
        own = Cluster(meta.address, gateway, tmp_path)
        own.create("kept", web.url)
        own.send("kept", b"1")
        web.wait(1)
        meta.kill()
        meta.start()
        assert own.view("kept")["url"] == web.url
        own.send("kept", b"2")
        web.wait(2)


def test_push_goes_on_when_clients_need_tokens(web: Receiver, tmp_path: Path) -> None:
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", tmp_path))
        for role in ("realtime", "delay"):
            stack.enter_context(ServerProcess(role, tmp_path, {"meta": meta.address}))
        gateway = stack.enter_context(gateway_of(meta.address, tmp_path, "--allow-private", *secret_of(tmp_path)))
        own = Cluster(meta.address, gateway, tmp_path)
        own.create("guarded", web.url)
        words = ["token", "create", "sender", "--allow", "send:>", "--meta", own.meta, "--data", str(tmp_path)]
        made = subprocess.run([sys.executable, "-m", "delayd", *words], capture_output=True, text=True, check=True)
        token = next(word for word in made.stdout.split() if word.startswith("dlyd_"))
        with delayd.Producer(own.meta, token=token) as producer:
            producer.send("guarded", b"{}", delay=NOW)
        web.wait(1)
        # It hears of the first token within seconds, and asks its callers for one from then on.
        wait_until(lambda: gateway.ask("GET", "/v1/push/guarded").status == 401)
        sender = {"authorization": f"Bearer {token}"}
        wait_until(lambda: gateway.ask("GET", "/v1/push/guarded", headers=sender).status == 403)


def test_tls_is_for_the_name_of_the_url_and_an_unknown_certificate_is_refused(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    files = authority.sign("hook", "localhost")
    asked: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    context.sni_callback = lambda line, name, context: asked.append(name)
    monkeypatch.setenv("SSL_CERT_FILE", authority.ca)
    with ExitStack() as stack:
        web = stack.enter_context(receiver(tls=context))
        port = web.url.rpartition(":")[2]
        knows = stack.enter_context(gateway_of(cluster.meta, tmp_path, "--allow-private", *secret_of(cluster.folder)))
        cluster.create("secure", f"https://localhost:{port}/", paused=True)
        cluster.create("misnamed", f"https://127.0.0.1:{port}/", paused=True)
        assert knows.ask("POST", "/v1/push/secure/test").json["status"] == 204
        assert asked == ["localhost"] and web.posts[0].headers["host"] == f"localhost:{port}"
        for gateway, name in ((knows, "misnamed"), (cluster.gateway, "secure")):
            refused = gateway.ask("POST", f"/v1/push/{name}/test").json
            assert (refused["status"], refused["taken"]) == (0, False)
            assert "certificate" in str(refused["what"]).lower()
        assert "certificate" in cluster.run("test", "misnamed", "--allow-private", code=2).lower()
        assert len(web.posts) == 1


def _utc(headers: dict[str, str]) -> datetime:
    return datetime.fromtimestamp(int(headers["webhook-timestamp"]), UTC)


def _until_served(cluster: Cluster, name: str, version: int) -> None:
    line = f"push_served target={name} subject={name} version={version}"
    wait_until(lambda: line in cluster.gateway.log, f"the gateway serves version {version} of {name}")
