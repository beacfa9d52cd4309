"""``delayd cron`` on the command line, against real servers: what it makes, changes and shows is what they do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from tests.end_to_end.up_process import Up, up
from tests.unit.cli.runner import Ran, run
from tests.waiting import wait_until

WEEKDAYS = ("--cron", "0 9 * * MON-FRI", "--timezone", "Europe/Berlin")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("cron"), "--port", "0") as servers:
        yield servers


def said(running: Up, *arguments: str, stdin: bytes = b"") -> Ran:
    return run("cron", *arguments, "--meta", running.meta, stdin=stdin)


def shown(running: Up, *arguments: str) -> dict[str, object]:
    """What a command that worked says, as JSON."""
    ran = said(running, *arguments, "--format", "json")
    assert ran.code == 0, ran.err
    found: dict[str, object] = json.loads(ran.out)
    return found


def test_a_schedule_is_made_shown_listed_changed_and_deleted(running: Up) -> None:
    added = said(running, "add", "report", "reports", "{}", *WEEKDAYS)
    assert added.code == 0, added.err
    assert added.out.startswith("report is kept in version 1: 0 9 * * MON-FRI Europe/Berlin; next 20")
    again = said(running, "add", "report", "reports", "{}", *WEEKDAYS)
    assert (again.code, again.out) == (0, added.out), "the same one once more changes nothing"
    text = said(running, "show", "report").out
    assert "name     report, active, version 1 of 20" in text
    assert "when     0 9 * * MON-FRI Europe/Berlin: At 09:00 on Monday through Friday\n" in text
    assert "sends    {} to reports\n" in text and "09:00:00 +0" in text
    (row,) = [row for row in json.loads(said(running, "list", "--format", "json").out) if row["name"] == "report"]
    assert (row["state"], row["sent"], row["skipped"], row["version"]) == ("active", 0, 0, 1)
    assert row["next_ms"] == shown(running, "show", "report")["next_ms"]
    assert "report" in said(running, "list", "--prefix", "rep").out
    assert json.loads(said(running, "list", "--prefix", "other", "--format", "json").out) == []
    unanswered = said(running, "delete", "report")
    assert unanswered.code == 2 and "nothing was done" in unanswered.err
    other = said(running, "delete", "report", "--yes", "--if-version", "7")
    assert other.code == 2 and "is in version 1, not 7" in other.err, "it is another version that is to end"
    deleted = said(running, "delete", "report", "--yes")
    assert (deleted.code, deleted.out) == (0, "report is deleted\n")
    assert "sends nothing any more" in deleted.err
    for command in ("show", "delete", "edit", "next", "pause", "resume", "run"):
        more = ("--subject", "a") if command == "edit" else ()
        gone = said(running, command, "report", *more)
        assert (gone.code, gone.out) == (2, ""), command
        assert "report" in gone.err and "Traceback" not in gone.err


def test_a_name_that_is_taken_is_refused_and_nothing_changes(running: Up) -> None:
    assert said(running, "add", "taken", "reports", "one", "--every", "1h").code == 0
    other = said(running, "add", "taken", "reports", "two", "--every", "1h")
    assert (other.code, other.out) == (2, "")
    assert "version 1: `delayd cron edit` changes it, or choose another name" in other.err
    assert shown(running, "show", "taken")["body"] == "one"


def test_an_edit_changes_what_is_given_and_nothing_else(running: Up, tmp_path: Path) -> None:
    holidays = tmp_path / "holidays.txt"
    holidays.write_text("2027-12-25  # Christmas\n\n2027-12-26\n")
    options = ("--header", "trace=a1", "--tag", "eu", "--ttl", "1h", "--skip-dates", str(holidays))
    policy = ("--misfire", "all", "--catchup", "3d", "--catchup-max", "7", "--jitter", "5m", "--max-occurrences", "9")
    before = shown(running, "add", "bill", "bills", "--file", str(holidays), *WEEKDAYS, *options, *policy)
    assert (before["headers"], before["tags"], before["ttl_ms"]) == ({"trace": "a1"}, ["eu"], 3_600_000)
    assert (before["body"], before["skip_dates"]) == (holidays.read_text(), ["2027-12-25", "2027-12-26"])
    refused = said(running, "edit", "bill", "--every", "90s", "--fold", "first")
    assert refused.code == 2 and "fold= is for a cron line" in refused.err
    edits: list[tuple[tuple[str, ...], dict[str, object]]] = [
        (("--cron", "30 8 * * *"), {"cron": "30 8 * * *"}),
        (("--body", "new", "--subject", "other"), {"body": "new", "subject": "other"}),
        (("--unset", "jitter", "--unset", "skip-dates"), {"jitter_ms": 0, "skip_dates": []}),
        (("--unset", "headers", "--tag", "us"), {"headers": {}, "tags": ["us"]}),
        (("--misfire", "skip", "--unset", "catchup"), {"misfire": "skip", "catchup_ms": None}),
        (("--gap", "skip", "--overlap", "skip"), {"gap": "skip", "overlap": "skip"}),
        (
            ("--every", "90s", "--anchor", "2027-01-01T00:00:00Z"),
            {"cron": None, "gap": None, "every_ms": 90_000, "anchor_ms": 1_798_761_600_000},
        ),
        (
            ("--cron", "@daily", "--unset", "overlap"),
            {"cron": "@daily", "every_ms": None, "anchor_ms": None, "overlap": "all"},
        ),
        (("--until", "2099-01-01T00:00:00Z"), {"until_ms": 4_070_908_800_000}),
    ]
    moving = ("version", "changed_ms", "decided_ms", "next_ms")
    for arguments, changes in edits:
        after = shown(running, "edit", "bill", *arguments)
        assert after["version"] == int(str(before["version"])) + 1
        kept = {name: value for name, value in before.items() if name not in (*moving, *changes)}
        assert {name: value for name, value in after.items() if name not in (*moving, *changes)} == kept, arguments
        assert {name: after[name] for name in changes} == changes
        before = after
    stale = said(running, "edit", "bill", "--body", "x", "--if-version", "1")
    assert stale.code == 2 and f"version {before['version']}" in stale.err
    assert shown(running, "show", "bill")["body"] == "new"


def test_an_ordering_key_is_given_again_or_given_up(running: Up) -> None:
    assert shown(running, "add", "row", "rows", "b", "--every", "1h", "--ordering-key", "k")["ordered"] is True
    refused = said(running, "edit", "row", "--body", "c")
    assert refused.code == 2 and "give --ordering-key KEY again, or --unset ordering-key" in refused.err
    assert shown(running, "edit", "row", "--body", "c", "--ordering-key", "k")["ordered"] is True
    assert shown(running, "edit", "row", "--unset", "ordering-key")["ordered"] is False


def test_a_pause_has_a_note_and_what_runs_now_comes_in_spite_of_it(running: Up) -> None:
    assert said(running, "add", "poll", "polls", "body", "--every", "1d").code == 0
    paused = said(running, "pause", "poll", "--note", "ticket 42")
    assert (paused.code, paused.out.startswith("poll is paused in version 2")) == (0, True)
    assert "note     ticket 42\n" in said(running, "show", "poll").out
    assert "paused" in said(running, "list").out and "ticket 42" in said(running, "list").out
    assert "poll is paused, so none of these is sent" in said(running, "next", "poll").err
    stale = said(running, "resume", "poll", "--if-version", "1")
    assert stale.code == 2 and "version 2" in stale.err
    with delayd.Consumer(running.meta, "polls", group="g") as consumer:
        ran = said(running, "run", "poll")
        assert (ran.code, ran.out.startswith("poll has sent one message now")) == (0, True)
        (message,) = consumer.pull(wait=timedelta(seconds=30))
        assert (message.body, message.schedule) == (b"body", "poll")
        message.ack()
    resumed = said(running, "resume", "poll")
    assert resumed.code == 0 and resumed.out.startswith("poll goes on in version 3") and "next 20" in resumed.out


def test_what_recurs_each_second_comes_and_is_counted(running: Up) -> None:
    with delayd.Consumer(running.meta, "ticks", group="g") as consumer:
        assert said(running, "add", "tick", "ticks", "t", "--every", "1s", "--max-occurrences", "3").code == 0
        taken: list[delayd.Message] = []

        def came() -> bool:
            taken.extend(consumer.pull(wait=timedelta(seconds=0.2)))
            return len(taken) == 3

        wait_until(came, "three occurrences come")
    wait_until(lambda: shown(running, "show", "tick")["state"] == "ended", "it ends")
    assert shown(running, "show", "tick")["sent"] == 3
    assert json.loads(said(running, "next", "tick", "--format", "json").out) == []


def test_next_of_a_kept_schedule_has_its_jitter(running: Up) -> None:
    assert said(running, "add", "later", "reports", "b", *WEEKDAYS, "--jitter", "10m").code == 0
    rows = json.loads(said(running, "next", "later", "-n", "20", "--format", "json").out)
    late = [row["due_ms"] - row["occurrence_ms"] for row in rows]
    assert len({*late}) > 5 and min(late) >= 0 and max(late) <= 600_000
    assert rows[0]["occurrence_ms"] == shown(running, "show", "later")["next_ms"]
