"""Tests of programs in any language move the clock of servers in memory over HTTP (docs/gateway.md)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.end_to_end.gateways import Gateway, Json, serving

BEGAN = "2027-01-01T00:00:00.000Z"
ADVANCE = "/v1/clock/advance"
DAY_MS = 86_400_000


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Gateway]:
    with serving(tmp_path, "dev", "--stand", "--start", BEGAN) as gateway:
        yield gateway
        assert gateway.stop() == 0
        assert " ERROR " not in gateway.log, gateway.log


def moved(dev: Gateway, how: Json) -> object:
    answer = dev.ask("POST", ADVANCE, how)
    assert answer.status == 200, answer
    return answer.json["now"]


def test_a_year_passes_in_a_moment_and_a_pull_that_waits_gets_what_was_due(dev: Gateway) -> None:
    assert dev.ask("GET", "/v1/clock").json == {"now": BEGAN, "now_ms": 1_798_761_600_000}
    ids = [
        dev.ask("POST", f"/v1/subjects/year/messages?delay={days}d", b"%d" % days).json["id"]
        for days in (400, 365, 30, 31)
    ]
    assert dev.ask("DELETE", f"/v1/subjects/year/messages/{ids[3]}").status == 200
    assert dev.pull("year", wait_ms=0) == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(dev.pull, "year", wait_ms=30_000)
        assert moved(dev, {"by": "30d"}) == "2027-01-31T00:00:00.000Z"
        (first,) = waiting.result()
    assert (first["body"], first["deliver_at"]) == ("30", "2027-01-31T00:00:00.000Z")
    assert dev.say("ack", first["lease"]) == [{"lease": first["lease"]}]
    assert moved(dev, {"to": "2028-01-01T01:00:00+01:00"}) == "2028-01-01T00:00:00.000Z"
    assert [each["body"] for each in dev.pull("year", max_messages=9)] == ["365"]
    assert dev.ask("GET", f"/v1/subjects/year/messages/{ids[0]}").json["state"] == "pending"


def test_a_lease_ends_when_the_clock_passes_it_and_a_nack_comes_again_at_its_instant(dev: Gateway) -> None:
    dev.ask("POST", "/v1/subjects/lease/messages?delay=1s", b"a")
    moved(dev, {"by": "1s"})
    (first,) = dev.pull("lease", lease_ms=3_600_000)
    moved(dev, {"by": "30m"})
    assert dev.pull("lease", wait_ms=0) == []
    moved(dev, {"by": "1h"})
    (second,) = dev.pull("lease")
    assert second["attempt"] == 2
    (stale,) = dev.say("ack", first["lease"])
    assert stale["code"] == "stale_handle"
    dev.say("nack", second["lease"], delay_ms=DAY_MS)
    moved(dev, {"by": "23h"})
    assert dev.pull("lease", wait_ms=0) == []
    moved(dev, {"by": "1h"})
    (third,) = dev.pull("lease")
    assert third["attempt"] == 3


def test_a_clock_that_cannot_go_there_stays(dev: Gateway) -> None:
    wrong: list[tuple[Json, str]] = [
        ({}, "give by, such as 2d, or to"),
        ({"by": "1d", "to": BEGAN}, "give by, such as 2d, or to"),
        ({"by": "tomorrow"}, "is no duration"),
        ({"by_ms": 5}, "unknown field"),
        ({"to": "2027-01-01T00:00:00"}, "with a timezone component - at `$.to`"),
        ({"to": "2026-12-31T23:59:59Z"}, "never goes back"),
        ({"to": "9999-01-01T00:00:00Z"}, "9996"),
        ({"by": "99999999999999d"}, "too long"),
        ({"by": "9999999d"}, "9996"),
    ]
    for how, says in wrong:
        answer = dev.ask("POST", ADVANCE, how)
        assert answer.status == 400, answer
        assert says in str(answer.json["detail"])
        assert dev.ask("GET", "/v1/clock").json["now"] == BEGAN
    assert dev.ask("GET", ADVANCE).status == 405


def test_without_stand_the_clock_ticks(tmp_path: Path) -> None:
    with serving(tmp_path, "dev") as gateway:
        gateway.ask("POST", "/v1/subjects/tick/messages?delay=300ms", b"a")
        (message,) = gateway.pull("tick")
        assert message["body"] == "a"
        assert gateway.stop(signal.SIGINT) == 0
