"""Addresses: one reader for clients, servers and the command line, and one default for whoever gives none."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import delayd
from delayd import AsyncConsumer, AsyncProducer, Consumer, Producer
from delayd.address import Endpoint, read_address
from delayd.client.limits import need_address
from delayd.config import parse_address
from delayd.errors import BadArgument, BadSetting

GOOD = {
    "127.0.0.1:7400": ("127.0.0.1", 7400),
    "meta.example:1": ("meta.example", 1),
    "[::1]:65535": ("::1", 65_535),
    "[fe80::1%eth0]:7": ("fe80::1%eth0", 7),
}
BAD = [
    "",
    ":",
    "here",
    "host:",
    ":7400",
    "host:0",
    "host:65536",
    "host:-1",
    "host:7400/",
    "host:７",
    "::1:7400",
    "a b:1",
]
BAD += ["a b:1", "host:" + "9" * 5_000, "[::1]", "[::1:7400", "h\0:1"]
URLS = ["http://127.0.0.1:7400", "https://meta.example", "tcp://h:1", "http://", "redis://h:1/0"]


@pytest.mark.parametrize("text", GOOD)
def test_an_address_is_read_alike_by_clients_and_settings(text: str) -> None:
    assert need_address(text) == parse_address(text) == Endpoint(*GOOD[text])


@pytest.mark.parametrize("text", GOOD)
def test_an_endpoint_is_written_as_it_is_read(text: str) -> None:
    assert str(Endpoint(*GOOD[text])) == text


def test_one_file_opens_connections_and_ports() -> None:
    opens = re.compile(r"\bcreate_(connection|server)\(|\bopen_connection\(|\bstart_server\(|\.is_inside\b")
    root = Path(delayd.__file__).parents[1]
    found = {
        str(path.relative_to(root))
        for house in ("delayd", "realtime", "meta", "cli", "spark")
        for path in (root / house).rglob("*.py")
        if opens.search(path.read_text())
    }
    # Meta forgets the endpoints of a home that has ended, and a server's log tells of none that is within a program.
    # An endpoint itself says what is shown to it, and who may reach it.
    places = {"delayd/net/endpoint.py", "delayd/net/server.py", "meta/registry.py"}
    assert found == places | {"delayd/address.py"}


@pytest.mark.parametrize("text", [*BAD, *URLS])
def test_what_is_no_address_is_refused_before_anything_is_asked(text: str) -> None:
    assert isinstance(read_address(text), str)
    for make in makers(text):
        with pytest.raises(BadArgument, match=r"host:port|URL"):
            make()
    with pytest.raises(BadSetting, match=r"^meta "):
        parse_address(text)


def makers(text: str) -> list[Callable[[], object]]:
    return [
        lambda: Producer(text),
        lambda: Consumer(text, "a", "g"),
        lambda: AsyncProducer(text),
        lambda: AsyncConsumer(text, "a", "g"),
    ]
