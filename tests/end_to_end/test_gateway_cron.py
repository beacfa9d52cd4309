"""Recurring schedules by HTTP: made, changed by their version, paused, run and deleted; and what fires is pulled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from delayd import Producer
from tests.end_to_end.gateways import Gateway, Json, gateway_of
from tests.end_to_end.processes import ServerProcess

DAILY: Json = {"subject": "reports", "body": "{}", "cron": "0 9 * * MON-FRI", "timezone": "Europe/Berlin"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, str]]:
    folder: Path = tmp_path_factory.mktemp("cron")
    with (
        ServerProcess("meta", folder) as meta,
        ServerProcess("realtime", folder, {"meta": meta.address}),
        ServerProcess("delay", folder, {"meta": meta.address}),
        gateway_of(meta.address, folder) as gateway,
    ):
        yield gateway, meta.address


def test_a_schedule_is_made_once_and_changed_by_its_version(served: tuple[Gateway, str]) -> None:
    gateway, _ = served
    made = gateway.ask("PUT", "/v1/cron/report", DAILY, {"if-none-match": "*"})
    assert (made.status, made.headers["etag"], made.json["state"]) == (200, '"1"', "active"), made
    again = gateway.ask("PUT", "/v1/cron/report", DAILY)
    assert (again.status, again.headers["etag"]) == (200, '"1"')
    later = {**DAILY, "cron": "30 8 * * MON-FRI", "jitter": "90s", "skip_dates": ["2027-01-01"], "tags": ["t"]}
    taken = gateway.ask("PUT", "/v1/cron/report", later, {"if-none-match": "*"})
    assert (taken.status, taken.code, taken.headers["etag"]) == (412, "precondition_failed", '"1"')
    assert str(taken.json["detail"]).startswith('the schedule has the ETag "1" now')
    unsaid = gateway.ask("PUT", "/v1/cron/report", later)
    assert (unsaid.status, unsaid.code, unsaid.headers["etag"]) == (409, "recurring_conflict", '"1"')
    assert "send If-Match with its ETag" in str(unsaid.json["detail"])
    changed = gateway.ask("PUT", "/v1/cron/report", later, {"if-match": '"1"'})
    assert (changed.status, changed.headers["etag"]) == (200, '"2"')
    lost = gateway.ask("PUT", "/v1/cron/report", DAILY, {"if-match": '"1"'})
    assert (lost.status, lost.headers["etag"]) == (412, '"2"')
    found = gateway.ask("GET", "/v1/cron/report")
    assert found.headers["etag"] == '"2"'
    told = {name: found.json[name] for name in ("cron", "jitter", "skip_dates", "tags", "body")}
    assert told == {
        "cron": "30 8 * * MON-FRI",
        "jitter": "90s",
        "skip_dates": ["2027-01-01"],
        "tags": ["t"],
        "body": "{}",
    }


def test_a_schedule_is_as_a_producer_makes_it(served: tuple[Gateway, str]) -> None:
    gateway, meta = served
    name = "of/all"
    wish: Json = {
        "subject": "reports",
        "body_base64": "/w==",
        "every": "1h30m",
        "anchor": "2027-01-01T00:00:00+01:00",
        "until": "2030-01-01T00:00:00Z",
        "max_occurrences": 7,
        "misfire": "all",
        "catchup": "3d",
        "catchup_max": 9,
        "overlap": "skip",
        "ttl": "2h",
        "headers": {"a": "b"},
        "ordering_key": "o",
    }
    made = gateway.ask("PUT", f"/v1/cron/{quote(name, safe='')}", wish)
    assert made.status == 200, made
    with Producer(meta) as producer:
        info = producer.get_recurring(name)
        assert info is not None and info.body == b"\xff" and info.ordered
        assert (info.policy.misfire, info.policy.catchup_max, info.policy.overlap) == ("all", 9, "skip")
        same = gateway.ask("GET", f"/v1/cron/{quote(name, safe='')}").json
        assert (same["every"], same["catchup"], same["overlap"], same["ttl"], same["next"]) == (
            "90m",
            "3d",
            "skip",
            "2h",
            info.next.strftime("%Y-%m-%dT%H:%M:%S.000Z") if info.next else None,
        )
    listed = gateway.ask("GET", "/v1/cron?prefix=of").json["schedules"]
    assert isinstance(listed, list) and [each["name"] for each in listed] == [name]


def test_a_schedule_is_paused_run_and_deleted(served: tuple[Gateway, str]) -> None:
    gateway, _ = served
    gateway.ask("PUT", "/v1/cron/poll", {**DAILY, "subject": "polls"})
    paused = gateway.ask("POST", "/v1/cron/poll/pause", {"note": "ticket 42"}, {"if-match": '"1"'})
    assert (paused.json["state"], paused.json["note"], paused.headers["etag"]) == ("paused", "ticket 42", '"2"')
    assert gateway.ask("POST", "/v1/cron/poll/resume", None, {"if-match": '"1"'}).status == 412
    assert gateway.ask("POST", "/v1/cron/poll/run").status == 200
    (message,) = gateway.pull("polls")
    assert message["body"] == "{}"
    assert gateway.ask("POST", "/v1/cron/poll/resume", None, {"if-match": '"2"'}).json["state"] == "active"
    kept = gateway.ask("DELETE", "/v1/cron/poll", None, {"if-match": '"2"'})
    assert (kept.status, kept.code, kept.headers["etag"]) == (412, "precondition_failed", '"3"')
    assert gateway.ask("DELETE", "/v1/cron/poll", None, {"if-match": '"3"'}).json == {"name": "poll"}
    assert gateway.ask("DELETE", "/v1/cron/poll", None, {"if-match": '"3"'}).status == 200
    assert gateway.ask("DELETE", "/v1/cron/poll").status == 200, "a lost answer may be asked for again"
    assert gateway.ask("DELETE", "/v1/cron/never").code == "no_recurring"
    for method, path in (("GET", ""), ("POST", "/pause"), ("POST", "/run"), ("GET", "/next")):
        gone = gateway.ask(method, f"/v1/cron/poll{path}")
        assert (gone.status, gone.code) == (404, "no_recurring"), path


def test_the_next_occurrences_are_told_also_of_a_line_that_nobody_keeps(served: tuple[Gateway, str]) -> None:
    gateway, _ = served
    wish = {"cron": "30 2 * * *", "timezone": "Europe/Berlin", "after": "2027-03-27T00:00:00Z", "count": 3}
    answer = gateway.ask("POST", "/v1/recurrence/next", wish).json["occurrences"]
    assert isinstance(answer, list)
    assert [each["occurrence"] for each in answer] == [
        "2027-03-27T01:30:00.000Z",
        "2027-03-28T01:00:00.000Z",
        "2027-03-29T00:30:00.000Z",
    ]
    assert answer[1]["local"] == "2027-03-28T03:00:00+02:00"
    gateway.ask("PUT", "/v1/cron/soon", DAILY)
    coming = gateway.ask("GET", "/v1/cron/soon/next?count=2&after=2027-03-26T00:00:00Z").json["occurrences"]
    assert isinstance(coming, list)
    assert [each["local"] for each in coming] == ["2027-03-26T09:00:00+01:00", "2027-03-29T09:00:00+02:00"]


@pytest.mark.parametrize(
    ("change", "headers"),
    [
        ({"cron": "0 25 * * *"}, {}),
        ({"every": "1h"}, {}),
        ({"timezone": "Europe/Nowhere"}, {}),
        ({"skip_dates": ["2027-13-01"]}, {}),
        ({"jitter": "1y"}, {}),
        ({"body_base64": "eA=="}, {}),
        ({"croon": "x"}, {}),
        ({}, {"if-match": "3"}),
        ({}, {"if-none-match": '"3"'}),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_made(
    served: tuple[Gateway, str], change: Json, headers: dict[str, str]
) -> None:
    gateway, _ = served
    refused = gateway.ask("PUT", "/v1/cron/wrong", {**DAILY, **change}, headers)
    assert refused.status == 400, refused
    assert gateway.ask("GET", "/v1/cron/wrong").status == 404
