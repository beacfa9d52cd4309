"""Tokens between processes: made, shown, rotated and revoked, while servers, clients and commands run."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgpack
import pytest

import delayd
from delayd.errors import BadToken, DelaydError, KeyPending, NotAllowed
from tests.certificates import DAY, Authority
from tests.end_to_end.gateways import Gateway, gateway_of
from tests.end_to_end.guarded_cluster import Cluster
from tests.end_to_end.up_process import up
from tests.waiting import DEADLINE_S, wait_until

SOON = timedelta(milliseconds=10)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("tokens")
    authority = Authority(folder)
    own = authority.server()
    files = ("--tls-cert", own.cert, "--tls-key", own.key, "--tls-ca", own.ca)
    (folder / "settings.toml").write_text('admin_host = "0.0.0.0"\n')
    measured = ("--admin-port", "0", "--config", str(folder / "settings.toml"))
    with up(folder, "--port", "0", "--require-token", *files, *measured) as running:
        running.until_ready()
        yield Cluster(running, authority)


def test_nothing_is_served_without_a_token_also_while_there_is_none(cluster: Cluster) -> None:
    with delayd.Producer(cluster.address) as producer, pytest.raises(NotAllowed, match="DELAYD_TOKEN"):
        producer.send("orders.eu", b"x", delay=SOON)
    for words in (["status"], ["servers"], ["send", "hello", "x", "--in", "1s"]):
        refused = cluster.command(*words)
        assert refused.returncode and "asks for a token" in refused.stderr, words


def test_clients_do_what_their_token_allows_and_nothing_else(cluster: Cluster) -> None:
    text = cluster.token("shop", "send:orders.>", "cancel:orders.>", "inspect:orders.>", "consume:orders.eu")
    with (
        delayd.Producer(cluster.address, token=text) as producer,
        delayd.Consumer(cluster.address, "orders.eu", "billing", token=text) as consumer,
    ):
        producer.send("orders.eu", b"mine", delay=SOON)
        [message] = wait_until(lambda: consumer.pull(10, timedelta(seconds=1)), "the message came")
        message.ack()
        receipt = producer.send("orders.us", b"far", delay=DAY, key="far")
        with pytest.raises(KeyPending):
            producer.send("orders.us", b"far", delay=DAY, key="far")
        assert producer.get("orders.us", key="far").deliver_at_ms == receipt.deliver_at_ms
        [page] = producer.pending("orders.us")
        assert len(page) == 1
        assert producer.cancel("orders.us", receipt=receipt)
        producer.send("orders.us", b"far", delay=DAY, key="far")
        assert producer.cancel("orders.us", key="far")
        for refused in (
            lambda: producer.send("mail", b"x", delay=SOON),
            lambda: producer.cancel("mail", key="far"),
            lambda: producer.get("mail", key="far"),
            lambda: producer.cancel("mail", receipt=receipt),
            lambda: next(iter(producer.pending("mail"))),
        ):
            with pytest.raises(NotAllowed, match="the token shop does not allow"):
                refused()
        # One batch that is refused by name harms no other of the same producer.
        producer.send("orders.eu", b"again", delay=SOON)
    with (
        delayd.Consumer(cluster.address, "orders.us", "billing", token=text) as consumer,
        pytest.raises(NotAllowed, match=r"consume for orders\.us"),
    ):
        consumer.pull(1, timedelta(seconds=1))
    with (
        delayd.Consumer(cluster.address, "orders.>", "billing", token=text) as consumer,
        pytest.raises(NotAllowed, match=r"consume for orders\.>"),
    ):
        consumer.pull(1, timedelta(seconds=1))


def test_a_pattern_is_consumed_with_a_right_for_it(cluster: Cluster) -> None:
    text = cluster.token("all", "send:news.>", "consume:news.>")
    with (
        delayd.Producer(cluster.address, token=text) as producer,
        delayd.Consumer(cluster.address, "news.*", "readers", start="earliest", token=text) as consumer,
    ):
        for name in ("news.eu", "news.us"):
            producer.send(name, name.encode(), delay=SOON)
        got: list[bytes] = []
        while len(got) < 2:
            for message in consumer.pull(10, timedelta(seconds=1)):
                got.append(message.body)
                message.ack()
        assert sorted(got) == [b"news.eu", b"news.us"]


def test_an_operator_may_have_a_token_in_place_of_the_secret(cluster: Cluster) -> None:
    text = cluster.token("ops", "administer:>", "inspect:>")
    listed = cluster.command("token", "list", "--format", "json", "--data", "/nowhere", token=text)
    assert listed.returncode == 0, listed.stderr
    found = {row["name"]: row for row in json.loads(listed.stdout)}
    assert "ops" in found and "digest" not in found["ops"] and text not in listed.stdout
    made = cluster.command("subjects", "set", "orders.eu", "--per-second", "9", "--data", "/nowhere", token=text)
    assert made.returncode == 0, made.stderr
    cluster.running.until(
        lambda: "administered request=SET_QUOTA by='ops'" in cluster.running.errors, "the act is logged with the name"
    )
    narrow = cluster.token("narrow", "administer:orders.>")
    refused = cluster.command("token", "revoke", "ops", "--yes", "--data", "/nowhere", token=narrow)
    assert refused.returncode and "does not allow TOKENS" in refused.stderr


def test_a_rotated_token_has_two_texts_for_a_while_and_a_revoked_one_none(cluster: Cluster) -> None:
    old = cluster.token("turn", "send:turn")
    with delayd.Producer(cluster.address, token=old, timeout_ms=20_000) as producer:
        producer.send("turn", b"1", delay=SOON)
        new = cluster.operator("token", "rotate", "turn", "--keep", "1h")
        assert new != old
        with delayd.Producer(cluster.address, token=new, timeout_ms=20_000) as other:

            def taken() -> bool:
                try:
                    other.send("turn", b"2", delay=SOON)
                except BadToken:
                    return False
                return True

            wait_until(taken, "the new text is taken")
            producer.send("turn", b"3", delay=SOON)  # The old one still is.
            cluster.operator("token", "revoke", "turn", "--yes")

            def refused(client: delayd.Producer) -> bool:
                try:
                    client.send("turn", b"4", delay=SOON)
                except BadToken:
                    return True
                except DelaydError:
                    return False  # Its connection has just been ended.
                return False

            for client in (producer, other):
                wait_until(lambda client=client: refused(client), "it is refused")  # type: ignore[misc]


def test_tokens_outlive_kills_of_all_servers(cluster: Cluster) -> None:
    text = cluster.token("stays", "send:stays")
    for role in ("delay", "realtime", "meta"):
        count = len(cluster.running.ready(role))
        cluster.running.kill(role)
        cluster.running.until(
            lambda role=role, count=count: len(cluster.running.ready(role)) > count,  # type: ignore[misc]
            "it serves again",
        )
    with delayd.Producer(cluster.address, token=text) as producer:
        producer.send("stays", b"x", delay=SOON)
        with pytest.raises(NotAllowed):
            producer.send("goes", b"x", delay=SOON)
    with delayd.Producer(cluster.address) as producer, pytest.raises(NotAllowed, match="asks for a token"):
        producer.send("stays", b"x", delay=SOON)


def test_a_token_is_not_sent_where_others_could_read_it(cluster: Cluster) -> None:
    text = cluster.token("secretive", "send:>")
    with (
        delayd.Producer("delayd://meta.example:7400", token=text, timeout_ms=2_000) as producer,
        pytest.raises(DelaydError, match="could read the token"),
    ):
        producer.send("x", b"x", delay=SOON)
    assert text not in cluster.running.errors


def test_a_gateway_asks_its_callers_for_the_same_tokens(cluster: Cluster, tmp_path: Path) -> None:
    text = cluster.token("web", "send:orders.>", "consume:orders.eu")
    with gateway_of(cluster.address, tmp_path, "--data", str(cluster.running.data)) as gateway:
        path = "/v1/subjects/orders.eu/messages"
        mine = f"Bearer {text}"

        def status(method: str, path: str, body: bytes = b"", shown: str = "") -> int:
            return gateway.ask(method, path, body, {"Authorization": shown} if shown else {}).status

        assert status("POST", f"{path}?delay=10ms", b"x") == 401
        assert status("POST", f"{path}?delay=10ms", b"x", shown="Bearer dlyd_none") == 401
        assert status("POST", f"{path}?delay=10ms", b"x", shown=f"Basic {text}") == 401
        assert status("POST", f"{path}?delay=10ms", b"x", shown=mine) == 201
        assert status("POST", "/v1/subjects/mail/messages?delay=10ms", b"x", shown=mine) == 403
        assert status("GET", path, shown=mine) == 403  # It may not inspect.
        assert status("POST", "/v1/subjects/orders.eu/groups/g/pull", b"{}", shown=mine) == 200
        assert status("POST", "/v1/subjects/orders.us/groups/g/pull", b"{}", shown=mine) == 403
        other = f"Bearer {cluster.token('web.2', 'send:orders.>')}"
        wait_until(lambda: status("POST", f"{path}?delay=1h", b"x", shown=other) == 201, "the gateway knows it")
        named = [
            gateway.ask("POST", f"{path}?delay=1h", b"x", {"Authorization": each, "Idempotency-Key": "n"})
            for each in (mine, other, mine)
        ]
        sequences = [answer.json["sequence"] for answer in named]
        assert sequences[0] == sequences[2] != sequences[1], "a name belongs to the token"
        assert status("GET", "/metrics", shown=mine) == 403
        assert status("GET", "/v1/push", shown=mine) == 403
        assert status("GET", "/healthz") == status("GET", "/readyz") == 200
        # A schedule needs what the servers ask of it: its name is one in the whole cluster.
        plan = b'{"subject": "orders.eu", "body": "", "every": "1h"}'
        assert status("POST", "/v1/recurrence/next", b'{"every": "1h"}', shown=mine) == 200
        assert status("PUT", "/v1/cron/mine", plan, shown=mine) == 403
        planner = f"Bearer {cluster.token('planner', 'send:>')}"
        wait_until(lambda: status("PUT", "/v1/cron/mine", plan, shown=planner) == 200, "it may send to all subjects")
        assert [status("POST", f"/v1/cron/mine/{word}", shown=planner) for word in ("pause", "resume")] == [200, 200]
        assert [status(method, "/v1/cron/mine", shown=planner) for method in ("GET", "DELETE")] == [403, 403]
        keeper = f"Bearer {cluster.token('keeper', 'inspect:%cron', 'cancel:%cron')}"
        wait_until(lambda: status("GET", "/v1/cron/mine/next", shown=keeper) == 200, "it may see schedules")
        assert status("GET", "/v1/cron", shown=keeper) == 200 and status("PUT", "/v1/cron/x", plan, shown=keeper) == 403
        assert status("DELETE", "/v1/cron/mine", shown=keeper) == 200
        for word in ("trace", "forecast"):
            assert status("GET", f"/v1/subjects/orders.eu/{word}", shown=mine) == 403
        cluster.operator("token", "revoke", "web", "--yes")
        wait_until(
            lambda: status("POST", f"{path}?delay=10ms", b"x", shown=mine) == 401, "the revoked token is refused"
        )


class Open:
    """A request at a gateway that is under way."""

    def __init__(self, gateway: Gateway, token: str, head: str, body: bytes) -> None:
        self.line = socket.create_connection(("127.0.0.1", gateway.port), DEADLINE_S)
        shown = f"{head}\r\nhost: 127.0.0.1\r\nauthorization: Bearer {token}\r\n\r\n".encode()
        self.line.sendall(shown + body)
        self._heard = b""

    def until(self, text: bytes) -> bytes:
        """What comes up to a text."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self._heard:
            assert time.monotonic() < deadline, f"only {self._heard!r} came"
            some = self.line.recv(65_536)
            assert some, f"the connection ended after {self._heard!r}"
            self._heard += some
        heard, found, self._heard = self._heard.partition(text)
        return heard + found


def test_what_is_under_way_at_a_gateway_ends_with_its_token(cluster: Cluster, tmp_path: Path) -> None:
    rights = ("send:ends", "consume:ends", "consume:quiet")
    text, other = cluster.token("ends", *rights), cluster.token("stays.on", *rights)
    with gateway_of(cluster.address, tmp_path, "--data", str(cluster.running.data)) as gateway:

        def send(shown: str, body: bytes, delay: str = "10ms") -> int:
            path = f"/v1/subjects/ends/messages?delay={delay}"
            return gateway.ask("POST", path, body, {"Authorization": f"Bearer {shown}"}).status

        def is_used(name: str) -> bool:
            listed = json.loads(cluster.operator("token", "list", "--format", "json"))
            return any(each["name"] == name and each["used_ms"] for each in listed)

        def chunk(row: bytes) -> bytes:
            return b"%x\r\n%b\r\n" % (len(row), row)

        def post(kind: str, path: str, body: bytes) -> Open:
            return Open(gateway, text, f"POST /v1/subjects/{path} HTTP/1.1\r\n{kind}", body)

        messages = "content-type: application/%s\r\ntransfer-encoding: chunked"
        row = {"body": "kept", "delay": "1h"}
        [events, lines, maps, *_] = under_way = [
            Open(gateway, text, "GET /v1/subjects/ends/groups/ends/events HTTP/1.1", b""),
            post(messages % "x-ndjson", "ends/messages", chunk(json.dumps(row).encode() + b"\n")),
            post(messages % "msgpack", "ends/messages", chunk(msgpack.packb({**row, "body": b"kept"}))),
            post("content-length: 17", "quiet/groups/waits/pull", b'{"wait_ms":30000}'),
            post("content-type: text/plain\r\ncontent-length: 9", "ends/messages?delay=1h", b"part of"),
        ]
        try:
            events.until(b": follows")
            lines.until(b'"sequence"')
            maps.until(b"sequence")
            new = cluster.operator("token", "rotate", "ends", "--keep", "1h")
            wait_until(lambda: send(new, b"first") == 201, "the gateway knows the new text")
            lines.line.sendall(chunk(json.dumps(row).encode() + b"\n"))
            lines.until(b'"sequence"')
            events.until(b'"body":"first"')  # The text before is valid still, so all go on.
            cluster.operator("token", "revoke", "ends", "--yes")
            for each in under_way:
                heard = each.until(b"was revoked")
                assert b"bad_token" in heard and (b"401" in heard or b"\xcd\x01\x91" in heard), heard
            assert send(other, b"second") == 201
            path, shown = "/v1/subjects/ends/groups/ends/pull", {"Authorization": f"Bearer {other}"}
            wait_until(lambda: is_used("stays.on"), "a use at the gateway counts", every_s=1.0)
            pulled = json.loads(gateway.ask("POST", path, {"wait_ms": 10_000}, shown).body)["messages"]
            assert [(each["body"], each["attempt"]) for each in pulled] == [("second", 1)]
        finally:
            for each in under_way:
                each.line.close()


def test_a_gateway_without_the_secret_keeps_names_when_its_token_allows_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/v1/subjects/orders.eu/messages?delay=1h"
    rights = ["send:orders.>", "inspect:%once", "send:%once"]
    statuses = []
    for count in (1, 2, 3):
        monkeypatch.setenv("DELAYD_TOKEN", cluster.token(f"front.{count}", *rights[:count]))
        with gateway_of(cluster.address, tmp_path) as gateway:
            assert gateway.ask("POST", path, b"x").status == 201
            again = [gateway.ask("POST", path, b"x", {"Idempotency-Key": "n"}) for _ in range(2)]
            statuses.append([answer.status for answer in again])
    # Whoever may send to some subjects can't take names from those who use them.
    assert statuses == [[403, 403], [403, 403], [201, 201]]
    assert again[0].json["id"] == again[1].json["id"]


def test_admin_ports_that_others_reach_ask_for_a_token_over_tls(cluster: Cluster) -> None:
    errors = cluster.running.errors
    # Servers that an earlier test has killed have others now.
    last = dict(re.findall(r"admin_listening role=(\w+) host=0\.0\.0\.0 port=(\d+)", errors))
    ports = [int(port) for port in last.values()]
    assert len(ports) == 3
    text = cluster.token("prometheus", "inspect:>")
    shown: set[bytes] = set()

    def asked(port: int, path: str, token: str = "") -> tuple[int, str]:
        context = ssl.create_default_context(cafile=cluster.authority.ca)
        line = http.client.HTTPSConnection("127.0.0.1", port, timeout=DEADLINE_S, context=context)
        line.request("GET", path, headers={"authorization": f"Bearer {token}"} if token else {})
        assert isinstance(line.sock, ssl.SSLSocket)
        shown.add(line.sock.getpeercert(binary_form=True) or b"")
        answer = line.getresponse()
        page = answer.read().decode()
        line.close()
        return answer.status, page

    def until(port: int, status: int, why: str) -> None:
        wait_until(lambda: asked(port, "/metrics", text)[0] == status, why)

    def in_clear(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as line:
            line.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return b"".join(iter(lambda: line.recv(65_536), b""))

    def is_renewed(port: int) -> bool:
        shown.clear()
        return asked(port, "/healthz")[0] == 200 and old not in shown

    for port in ports:
        assert asked(port, "/healthz") == (200, "ok\n") and asked(port, "/readyz") == (200, "ready\n")
        assert asked(port, "/metrics")[0] == asked(port, "/metrics", "dlyd_" + "a" * 58)[0] == 401
        until(port, 200, "the server knows the token")
        assert "delayd_start_time_seconds" in asked(port, "/metrics", text)[1]
        said = in_clear(port)
        assert said.startswith(b"HTTP/1.1 400 ") and said.endswith(b"this port speaks HTTPS only\n")
    [old] = shown
    cluster.authority.server()
    for port in ports:
        wait_until(partial(is_renewed, port), "it shows the new certificate")
    cluster.operator("token", "revoke", "prometheus", "--yes")
    for port in ports:
        until(port, 401, "it was revoked")
