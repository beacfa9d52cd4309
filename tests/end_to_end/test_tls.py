"""Servers, clients and commands over TLS, as processes."""

from __future__ import annotations

import http.client
import os
import re
import shlex
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from delayd.errors import ServerUnavailable
from tests.certificates import DAY, Authority
from tests.end_to_end.gateways import gateway_of
from tests.end_to_end.up_process import Up, up
from tests.waiting import DEADLINE_S, wait_until

SOON = timedelta(milliseconds=10)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def servers(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    own = authority.server()
    files = ("--tls-cert", own.cert, "--tls-key", own.key, "--tls-ca", own.ca)
    with up(tmp_path_factory.mktemp("servers"), "--port", "0", "--gateway", *files) as running:
        running.until_ready()
        yield running


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    line = [sys.executable, "-m", "delayd", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S * 2, env=environment, check=False)


def test_clients_send_and_consume_over_tls(servers: Up, authority: Authority) -> None:
    address = f"delayds://{servers.meta}?ca={authority.ca}"
    with delayd.Producer(address) as producer, delayd.Consumer(address, "orders", "billing") as consumer:
        producer.send("orders", b"over tls", delay=SOON)
        cancelled = producer.send("orders", b"never", delay=DAY)
        assert producer.cancel("orders", receipt=cancelled)
        [message] = wait_until(lambda: consumer.pull(10, timedelta(seconds=1)), "the message came")
        assert (message.body, message.subject) == (b"over tls", "orders")
        message.ack()
    with delayd.Admin(address, secret=servers.data / "cluster.secret") as admin:
        [group] = admin.groups("orders")
        assert group.waiting == 0
        admin.pause("orders", "billing")


def test_the_gateway_of_the_servers_asks_them_over_tls(servers: Up, authority: Authority) -> None:
    (gateway,) = servers.ready("gateway")
    url = f"https://{gateway.endpoint}/v1/subjects/s/messages?delay=1h"
    trusting = ssl.create_default_context(cafile=authority.ca)
    with urllib.request.urlopen(url, b"x", DEADLINE_S, context=trusting) as sent:
        assert sent.status == 201


def test_commands_take_the_files_from_the_environment(servers: Up, authority: Authority) -> None:
    variables = {"DELAYD_META": f"delayds://{servers.meta}", "DELAYD_TLS_CA": authority.ca}
    sent = command("send", "hello", "world", "--in", "10ms", **variables)
    assert sent.returncode == 0, sent.stderr
    got = command("consume", "hello", "--group", "one", "--max", "1", **variables)
    assert got.returncode == 0 and "world" in got.stdout
    (hint,) = re.findall(r"to try it: delayd (.+)", servers.errors)
    tried = command(*shlex.split(hint), DELAYD_TLS_CA="", DELAYD_META="")
    assert tried.returncode == 0, f"{hint}: {tried.stderr}"
    status = command("status", **variables)
    assert status.returncode == 0 and "all is well" in status.stdout
    trusted = command("clock", "--trust", "--data", str(servers.data), **variables)
    assert trusted.returncode == 0, trusted.stderr


def test_whoever_connects_in_another_way_is_told_what_to_change(servers: Up, authority: Authority) -> None:
    plain = command("servers", DELAYD_META=servers.meta)
    assert plain.returncode and "delayds://" in plain.stderr
    stranger = command("servers", DELAYD_META=f"delayds://{servers.meta}", DELAYD_TLS_CA="")
    assert stranger.returncode and "DELAYD_TLS_CA" in stranger.stderr
    wrong = f"delayds://{servers.meta}?ca={authority.ca}&name=meta.example"
    other = command("servers", DELAYD_META=wrong)
    assert other.returncode and "for another name than meta.example" in other.stderr
    with (
        delayd.Producer(servers.meta, timeout_ms=2_000) as producer,
        pytest.raises(ServerUnavailable, match="delayds://"),
    ):
        producer.send("orders", b"in the clear", delay=SOON)


def test_servers_take_a_new_certificate_without_a_restart(servers: Up, authority: Authority) -> None:
    authority.server()
    servers.until(lambda: servers.errors.count("tls_changed") >= 3, "each server has taken it")
    with delayd.Producer(f"delayds://{servers.meta}?ca={authority.ca}") as producer:
        producer.send("orders", b"renewed", delay=SOON)


def test_a_gateway_serves_https_and_takes_a_new_certificate_without_a_restart(
    servers: Up, authority: Authority, tmp_path: Path
) -> None:
    own = authority.server("gateway")
    options = ("--tls-cert", own.cert, "--tls-key", own.key)
    trusting = ssl.create_default_context(cafile=authority.ca)

    def shown(port: int) -> bytes:
        line = http.client.HTTPSConnection("127.0.0.1", port, timeout=DEADLINE_S, context=trusting)
        line.request("GET", "/readyz")
        assert isinstance(line.sock, ssl.SSLSocket)
        certificate = line.sock.getpeercert(binary_form=True)
        assert line.getresponse().status == 200 and certificate
        line.close()
        return certificate

    with gateway_of(f"delayds://{servers.meta}?ca={authority.ca}", tmp_path, *options) as gateway:
        first = shown(gateway.port)
        # What is longer than all buffers goes both ways, while neither side waits for the other.
        line = http.client.HTTPSConnection("127.0.0.1", gateway.port, timeout=DEADLINE_S, context=trusting)
        body = b'{"body":"%s","delay":"1h"}\n' % (b"x" * 1_000) * 8_000
        line.request("POST", "/v1/subjects/long/messages", body, {"content-type": "application/x-ndjson"})
        assert line.getresponse().read().count(b'"sequence"') == 8_000
        line.request("GET", "/v1/subjects/long/messages?contents=true")
        assert line.getresponse().read().count(b'"body"') == 8_000
        line.close()
        clear = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=DEADLINE_S)
        clear.request("POST", "/v1/subjects/clear/messages?delay=1h", b"x")
        answer = clear.getresponse()
        assert answer.status == 400 and "write https://" in answer.read().decode()
        clear.close()
        assert " ERROR " not in gateway.log
        Path(own.cert).write_text("no certificate")
        wait_until(lambda: "tls_unreadable" in gateway.log, "the broken one is refused")
        assert shown(gateway.port) == first
        authority.server("gateway")
        wait_until(lambda: shown(gateway.port) != first, "the new one is shown")
