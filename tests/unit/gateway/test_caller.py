"""A gateway POSTs to public addresses only, however they are named (docs/push.md, Which addresses)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from delayd.gateway.caller import Caller, Outcome, private_because
from tests.receivers import Receiver, receiver, status

PUBLIC = "203.0.113.1"  # Nobody has it: it is for documents, and counts as public in one test alone.


@pytest.fixture
def web() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


class Names(AbstractResolver):
    """A name server: each look-up has the next answer, the last one for ever."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = [*answers]
        self.asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        answer = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=0,
            )
            for address in answer
        ]

    async def close(self) -> None:
        """Hold nothing."""


def post(url: str, *, times: int = 1, deadline_s: float = 10.0, **terms: Any) -> list[Outcome]:
    """POST some times from one caller."""

    async def posted() -> list[Outcome]:
        caller = Caller(**{"allow_private": False, **terms})
        try:
            return [await caller.post(url, {}, b"{}", deadline_s) for _ in range(times)]
        finally:
            await caller.close()

    return asyncio.run(posted())


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.9.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "0.1.2.3"),
        *("100.64.0.1", "192.0.0.8", "192.88.99.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "::a00:1"),
        *("2002:7f00:1::", "2002:a00:1::1", "64:ff9b::7f00:1", "64:ff9b::10.0.0.1", "64:ff9b:1::1", "2001:0:1::1"),
    ],
)
def test_an_address_that_is_not_public_is_known_in_each_form(address: str) -> None:
    assert private_because(address) is not None


@pytest.mark.parametrize(
    "address",
    [
        *("8.8.8.8", "93.184.216.34", "::ffff:8.8.8.8", "2606:4700::1111", "2002:808:808::1", "64:ff9b::808:808"),
        *("172.32.0.1", "100.128.0.1", "::8.8.8.8"),
    ],
)
def test_a_public_address_is_public(address: str) -> None:
    assert private_because(address) is None


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["169.254.169.254"], ["::ffff:127.0.0.1"], ["127.0.0.1", "10.0.0.1"]]
)
def test_a_name_that_leads_to_a_private_address_is_not_asked(web: Receiver, addresses: list[str]) -> None:
    port = web.url.rpartition(":")[2]
    (outcome,) = post(f"http://hook.example:{port}/", resolver=Names(addresses))
    assert (outcome.status, outcome.is_done) == (0, False)
    assert "gateways POST to public addresses only" in outcome.what
    assert web.posts == []


def test_a_name_that_changes_its_address_after_a_look_up_is_checked_again(
    web: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = web.url.rpartition(":")[2]
    names = Names([PUBLIC], ["127.0.0.1"])
    monkeypatch.setattr(
        "delayd.gateway.caller.private_because", lambda address: None if address == PUBLIC else private_because(address)
    )
    first, second = post(f"http://hook.example:{port}/", times=2, deadline_s=0.3, resolver=names)
    assert (first.status, second.status, names.asked) == (0, 0, 2)
    assert "public addresses only" not in first.what and "public addresses only" in second.what
    assert web.posts == []


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "127.0.0.1.", "LOCALHOST"])
def test_no_odd_way_to_write_an_address_comes_around(web: Receiver, host: str) -> None:
    port = web.url.rpartition(":")[2]
    (outcome,) = post(f"http://{host}:{port}/")
    assert outcome.status == 0
    assert web.posts == []


def test_a_redirect_is_an_answer_and_leads_nowhere(web: Receiver) -> None:
    with receiver() as other:
        web.answers = [status(307, location=other.url)]
        (outcome,) = post(web.url, allow_private=True)
        assert outcome.status == 307 and "redirects are not followed" in outcome.what
        assert other.posts == []


@pytest.mark.parametrize(
    ("text", "wait_s"),
    [
        *(("120", 120.0), (" 5 ", 5.0), ("-1", None), ("soon", None), ("9" * 40, 86_400.0), ("1e3", None)),
        *(("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400.0)),
    ],
)
def test_retry_after_is_seconds_or_an_instant(web: Receiver, text: str, wait_s: float | None) -> None:
    web.answers = [status(503, retry_after=text)]
    (outcome,) = post(web.url, allow_private=True)
    assert outcome.retry_after_s == wait_s


def test_a_connection_is_kept_for_the_next_post_and_its_end_is_no_failure(web: Receiver) -> None:
    outcomes = post(web.url, times=3, allow_private=True)
    assert [outcome.status for outcome in outcomes] == [204] * 3
    assert len(web.connections) == 1


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (outcome,) = post(f"http://127.0.0.1:{port}/", allow_private=True)
    assert outcome.status == 0 and "refused" in outcome.what.lower()
