"""``delayd cron`` without any server: what a line means, and what is refused before anybody is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delayd.recurrence.zones import tzdata_version

from .runner import run

NOWHERE = "127.0.0.1:9"  # Nobody is asked there.
SPRING = ("--timezone", "Europe/Berlin", "--after", "2027-03-27T00:00:00Z")


def test_a_line_is_explained_and_shown_in_utc_and_as_clocks_have_it() -> None:
    ran = run("cron", "next", "--cron", "30 2 * * *", *SPRING, "-n", "3", "--meta", NOWHERE)
    assert ran.code == 0
    assert ran.err == f"delayd: 30 2 * * * Europe/Berlin: At 02:30 every day (zones of {tzdata_version()})\n"
    lines = ran.out.splitlines()
    assert lines[0].split() == ["occurrence", "local", "due"]
    assert [line.split("   ")[:2] for line in lines[2:]] == [
        ["2027-03-27T01:30:00.000Z", "Sat 2027-03-27 02:30:00 +0100"],
        ["2027-03-28T01:00:00.000Z", "Sun 2027-03-28 03:00:00 +0200"],
        ["2027-03-29T00:30:00.000Z", "Mon 2027-03-29 02:30:00 +0200"],
    ]


@pytest.mark.parametrize(
    ("options", "first_ms"),
    [
        (("--every", "90m", "--anchor", "2027-03-27T00:10:00Z"), 1_806_106_200_000),
        (("--cron", "@daily", "--max-occurrences", "1"), 1_806_188_400_000),
        (("--cron", "0 9 * * *", "--skip-date", "2027-03-27"), 1_806_217_200_000),
        (("--cron", "0 9 * * *", "--starts-at", "2027-04-01T00:00:00Z"), 1_806_562_800_000),
        (("--cron", "30 2 * * SUN", "--gap", "skip"), 1_806_798_600_000),
    ],
)
def test_options_say_when_it_fires(options: tuple[str, ...], first_ms: int) -> None:
    ran = run("cron", "next", *options, *SPRING, "-n", "1", "--format", "json", "--meta", NOWHERE)
    assert ran.code == 0, ran.err
    assert [row["occurrence_ms"] for row in json.loads(ran.out)] == [first_ms]


def test_dates_come_from_a_file_with_comments_or_from_stdin(tmp_path: Path) -> None:
    dates = tmp_path / "dates.txt"
    dates.write_text("2027-12-25  # Christmas\n\n# Boxing Day\n2027-12-26\n")
    options = ("--cron", "0 9 * * *", "-n", "5", "--format", "json", "--after", "2027-01-01T00:00:00Z")
    for source, stdin in ((str(dates), b""), ("-", dates.read_bytes())):
        ran = run("cron", "next", *options, "--only-dates", source, "--meta", NOWHERE, stdin=stdin)
        assert len(json.loads(ran.out)) == 2, ran.err
    dates.write_text("2027-12-25\n25.12.2028\n")
    refused = run("cron", "next", *options, "--only-dates", str(dates), "--meta", NOWHERE)
    assert refused.code == 2
    assert "line 2 of" in refused.err and "'25.12.2028'; write one such as 2027-12-25" in refused.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("next",), "name a schedule, or say --cron LINE or --every DURATION, and not both"),
        (("next", "report", "--cron", "@daily"), "and not both"),
        (("next", "--cron", "61 * * * *"), "has a bad minute, '61': write 0 to 59"),
        (("next", "--cron", "0 0 30 2 *"), "has a bad day of the month, '30'"),
        (("next", "--cron", "@daily", "--every", "1h"), "one of them only"),
        (("next", "--cron", "@daily", "--timezone", "Europe/Berln"), "did you mean 'Europe/Berlin'?"),
        (("next", "--cron", "@daily", "--skip-date", "25.12."), "'25.12.' is no date; write one such as 2027-12-25"),
        (("next", "--every", "5ms"), "must lie within"),
        (("add", "n", "s", "b", "--cron", "0 9 * *"), "has 4 fields and needs five"),
        (("add", "n", "s", "--cron", "@daily"), "give the body once: as BODY, or with --file FILE"),
        (("add", "n", "s", "b"), "say cron= or every="),
        (("edit", "n"), "nothing is to be changed"),
        (("edit", "n", "--body", "b", "--file", "-"), "give the body once: with --body or with --file"),
        (("edit", "n", "--jitter", "5m", "--unset", "jitter"), "--unset jitter contradicts the option that sets it"),
        (("edit", "n", "--header", "nothing"), "--header 'nothing' is no NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_told_before_anybody_is_asked(arguments: tuple[str, ...], sentence: str) -> None:
    ran = run("cron", *arguments, "--meta", NOWHERE)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err


def test_an_interval_is_told_as_it_is_given() -> None:
    ran = run("cron", "next", "--every", "1h30m5s", "--meta", NOWHERE)
    assert ran.err.startswith("delayd: every 1h30m5s: by elapsed time, whatever clocks do (")


def test_without_a_server_it_says_so(unused_port: int) -> None:
    ran = run("cron", "list", "--meta", f"127.0.0.1:{unused_port}", "--timeout", "1s")
    assert (ran.code, ran.out) == (4, "")
    assert f"127.0.0.1:{unused_port}" in ran.err
