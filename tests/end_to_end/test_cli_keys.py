"""Keys, tags and other instants on the command line, against real servers and against their files."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from tests.end_to_end.up_process import Up, up
from tests.unit.cli.runner import Ran, run
from tests.waiting import DEADLINE_S, wait_until

DAY = timedelta(days=1)
DAY_MS = 86_400_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("keys"), "--port", "0") as servers:
        yield servers


def said(running: Up, *arguments: str, stdin: bytes = b"", **environment: str) -> Ran:
    return run(*arguments, "--meta", running.meta, stdin=stdin, environment=environment)


def rows_of(ran: Ran) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(ran.out)
    return rows


def sent(running: Up, subject: str, key: str, *more: str) -> dict[str, object]:
    """The receipt of a message that is sent now with a key, as JSON."""
    ran = said(running, "send", subject, "b", "--in", "1d", "--key", key, "--format", "json", *more)
    assert ran.code == 0, ran.err
    receipt: dict[str, object] = json.loads(ran.out)
    return receipt


def test_a_send_tells_what_its_key_met(running: Up) -> None:
    first = sent(running, "a", "k")
    assert (first["kept"], first["replaced"]) == (False, None)
    refused = said(running, "send", "a", "b", "--in", "1h", "--key", "k")
    assert (refused.code, refused.out) == (2, "")
    assert f"message {first['sequence']}, due at" in refused.err and "is pending with this key" in refused.err
    kept = said(running, "send", "a", "b", "--in", "1h", "--key", "k", "--on-conflict", "keep")
    assert kept.code == 0 and kept.out.startswith(f"not sent: sequence {first['sequence']} of log {first['log_id']}")
    assert sent(running, "a", "k", "--on-conflict", "keep")["kept"] is True
    replaced = said(running, "send", "a", "b", "--in", "1h", "--key", "k", "--on-conflict", "replace")
    assert replaced.code == 0 and f"; it replaced sequence {first['sequence']}\n" in replaced.out


@pytest.mark.parametrize(
    "expiry", [("--ttl", "1h"), ("--expires-at", "2026-01-01T01:00:00Z"), ("--lines", "--ttl", "1h")], ids=str
)
def test_a_message_that_expired_before_it_was_sent_is_never_delivered(running: Up, expiry: tuple[str, ...]) -> None:
    subject = f"late{len(expiry)}{expiry[0]}"
    body, stdin = ((), b"one\n") if "--lines" in expiry else (("one",), b"")
    ran = said(running, "send", subject, *body, "--at", "2026-01-01T00:00:00Z", *expiry, stdin=stdin)
    assert ran.code == 0, ran.err
    with delayd.Producer(running.meta) as producer, delayd.Consumer(running.meta, subject, "g") as consumer:
        producer.send(subject, b"two", delay=timedelta(0))
        assert consumer.pull(wait=timedelta(seconds=DEADLINE_S)).bodies == [b"two"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--key", ""), "key"),
        (("--key", "k" * 201), "key"),
        (("--on-conflict", "keep"), "--on-conflict goes with --key"),
        (("--tag", ""), "tag"),
        (("--key", "k", "--lines"), "--key names one message"),
    ],
)
def test_a_label_that_is_wrong_is_refused(running: Up, arguments: tuple[str, ...], sentence: str) -> None:
    body = () if "--lines" in arguments else ("b",)
    ran = said(running, "send", "a", *body, "--in", "1h", *arguments)
    assert (ran.code, ran.out) == (2, "") and sentence in ran.err


def test_messages_are_shown_and_cancelled_by_their_keys(running: Up) -> None:
    for key in ("one", "two", "zwei wörter"):
        sent(running, "b", key)
    keys = ("--key", "one", "--key", "zwei wörter", "--key", "never")
    shown = said(running, "get", "b", *keys, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(shown.out)))
    assert shown.code == 2
    assert [(row["key"], row["state"]) for row in rows] == [
        ("one", "pending"),
        ("zwei wörter", "pending"),
        ("never", "unknown"),
    ]
    dry = said(running, "cancel", "b", "--keys", "-", "--dry-run", "--format", "json", stdin=b"one\ntwo\n\n")
    assert dry.code == 0 and [row["state"] for row in rows_of(dry)] == ["pending"] * 2
    done = said(running, "cancel", "b", *keys, "--format", "json")
    assert done.code == 2 and [row["state"] for row in rows_of(done)] == ["cancelled", "cancelled", "unknown"]
    assert done.err == "delayd: 2 of 3 messages are cancelled; 1 are unknown there\n"
    (two,) = rows_of(said(running, "get", "b", "--key", "two", "--format", "json"))
    assert two["state"] == "pending"


def test_a_message_moves_by_its_receipt_and_by_its_key(running: Up) -> None:
    receipt = sent(running, "c", "k")
    old = str(receipt["receipt"])
    moved = said(running, "reschedule", "c", "--receipt", old, "--in", "2d", "--format", "json")
    (row,) = rows_of(moved)
    assert moved.code == 0 and row["answer"] == "moved" and row["sequence"] != receipt["sequence"]
    later = int(str(row["deliver_at_ms"]))
    assert later > int(str(receipt["deliver_at_ms"])) + DAY_MS // 2
    again = said(running, "reschedule", "c", "--key", "k", "--at", "2027-05-05T00:00Z", "--format", "csv")
    (told,) = csv.DictReader(io.StringIO(again.out))
    assert (told["key"], told["answer"], told["deliver_at_ms"]) == ("k", "moved", "1809475200000")
    for token in (old, str(row["receipt"]), told["receipt"]):
        (now,) = rows_of(said(running, "get", "c", "--receipt", token, "--format", "json"))
        assert (now["state"], now["deliver_at_ms"]) == ("pending", 1_809_475_200_000)
    assert said(running, "cancel", "c", "--receipt", old).code == 0
    refused = said(running, "reschedule", "c", "--key", "k", "--key", "none", "--in", "1h")
    assert refused.code == 2 and "0 of 2 messages are moved; 1 are unknown there, 1 are cancelled" in refused.err


def test_a_message_that_has_left_is_not_moved(running: Up) -> None:
    token = json.loads(said(running, "send", "d", "b", "--in", "0s", "--format", "json").out)["receipt"]
    get = ("get", "d", "--receipt", token, "--format", "json")
    wait_until(lambda: rows_of(said(running, *get))[0]["state"] == "dispatched", lambda: said(running, *get).out)
    ran = said(running, "reschedule", "d", "--receipt", token, "--in", "1h", "--format", "json")
    assert ran.code == 2 and "were dispatched before" in ran.err
    assert rows_of(ran)[0]["answer"] == "already dispatched"


def test_a_night_moves_by_two_hours(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        night = producer.send_batch("night", [b"x"] * 1_200, delay=DAY)
        later = producer.send("night", b"x", delay=3 * DAY)
        window = ("reschedule", "night", "--where", "--from", "+1h", "--to", "+2d")
        dry = said(running, *window, "--shift", "2h", "--dry-run")
        assert (dry.code, dry.out) == (0, "1,200 messages of night are pending there\n")
        refused = said(running, *window, "--shift", "2h")
        assert (refused.code, refused.out) == (2, "")
        assert "1,200 messages of night are due 2 h 00 min later then." in refused.err
        assert (producer.get_batch("night", receipt=night)["deliver_at_ms"] == night.deliver_at_ms).all()
        done = said(running, *window, "--shift", "2h", "--yes")
        assert (done.code, done.out) == (0, "moved 1,200 messages of night\n")
        now = producer.get_batch("night", receipt=night)
        assert (now["deliver_at_ms"] == night.deliver_at_ms + 7_200_000).all()
        assert said(running, *window, "--shift", "-30m", "--yes").code == 0
        now = producer.get_batch("night", receipt=night)
        assert (now["deliver_at_ms"] == night.deliver_at_ms + 5_400_000).all()
        assert producer.get("night", receipt=later).deliver_at_ms == later.deliver_at_ms


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("cancel", "a", "--key", "k", "--receipt", "x"), "by one of them"),
        (("get", "a", "--key", "k", "--key", "k"), "given twice"),
        (("cancel", "a", "--where", "--key", "k"), "--where takes no receipts and no keys"),
        (("cancel", "a", "--key", "k", "--from", "now"), "--from, --to and --tag go with --where"),
        (("reschedule", "a", "--key", "k"), "--in DURATION or --at INSTANT"),
        (("reschedule", "a", "--key", "k", "--in", "1h", "--at", "now"), "--in DURATION or --at INSTANT"),
        (("reschedule", "a", "--key", "k", "--in", "1h", "--shift", "1h"), "--shift and --resume go with --where"),
        (("reschedule", "a", "--where"), "--shift DURATION"),
        (("reschedule", "a", "--where", "--shift", "1h", "--resume", "x"), "resume is what an earlier walk told"),
        (("reschedule", "a", "--where", "--shift", "2x"), "is no duration"),
        (("reschedule", "a", "--key", "k", "--in", "1000w"), ""),
        (("get", "a", "--key", "k" * 201), "key"),
    ],
)
def test_options_that_do_not_fit_are_refused(running: Up, arguments: tuple[str, ...], sentence: str) -> None:
    ran = said(running, *arguments)
    assert (ran.code, ran.out) == (2, "") and sentence in ran.err, ran.err


def test_a_reader_that_goes_away_is_no_error(running: Up) -> None:
    words = ("get", "p", "--keys", "-", "--meta", running.meta)
    keys = "".join(f"key {number}\n" for number in range(8_000)).encode()  # Their listing fills a pipe.
    command = [sys.executable, "-m", "delayd", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as getting:
        assert getting.stdin is not None and getting.stdout is not None and getting.stderr is not None
        getting.stdin.write(keys)
        getting.stdin.close()
        assert getting.stdout.readline()
        getting.stdout.close()
        assert (getting.stderr.read(), getting.wait(DEADLINE_S)) == (b"", 141)


def test_files_say_what_became_of_messages_and_decide_nothing(running: Up) -> None:
    kept, gone = sent(running, "f", "kept"), sent(running, "f", "gone")
    sent(running, "f", "moves")
    assert said(running, "cancel", "f", "--key", "gone").code == 0
    assert said(running, "reschedule", "f", "--key", "moves", "--at", "2027-05-05T00:00Z").code == 0
    data = str(running.data)

    def read() -> list[tuple[object, object]]:
        keys = ("--key", "kept", "--key", "gone", "--key", "moves", "--key", "never")
        ran = run("get", "f", *keys, "--data", data, "--format", "json")
        assert ran.code == 2
        return [(row["key"], row["state"]) for row in rows_of(ran)]

    told = [("kept", "pending"), ("gone", "cancelled"), ("moves", "pending"), ("never", "unknown")]
    wait_until(lambda: read() == told, lambda: str(read()))  # The outcomes are on disk a moment after the answers.
    by_receipt = ("--receipt", str(gone["receipt"]), "--receipt", str(kept["receipt"]))
    rows = rows_of(run("get", "f", *by_receipt, "--data", data, "--format", "json"))
    assert [(row["sequence"], row["state"]) for row in rows] == [
        (gone["sequence"], "cancelled"),
        (kept["sequence"], "pending"),
    ]
    (moved,) = rows_of(run("get", "f", "--key", "moves", "--data", data, "--format", "json"))
    assert moved["deliver_at_ms"] == 1_809_475_200_000
    for command in (("cancel", "f", "--key", "kept"), ("reschedule", "f", "--key", "kept", "--in", "1h")):
        ran = run(*command, "--data", data)
        assert ran.code == 2 and "only running servers can decide" in ran.err


def test_a_tagged_message_is_found(running: Up, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("1\n2\n")
    tags = ("--tag", "eu", "--tag", "b")
    assert said(running, "send", "g", "--file", str(lines), "--lines", "--in", "1d", *tags).code == 0
    assert said(running, "send", "g", "x", "--in", "1d", "--tag", "us").code == 0
    only = ("cancel", "g", "--where", "--tag", "eu")
    assert said(running, *only, "--dry-run").out == "2 messages of g are pending there\n"
    assert said(running, "reschedule", "g", "--where", "--tag", "eu", "--shift", "1h").code == 0

    def found() -> list[dict[str, object]]:
        return rows_of(run("schedule", "find", "g", "--tag", "eu", "--data", str(running.data), "--format", "json"))

    wait_until(lambda: len(found()) == 2, lambda: str(found()))  # The files tell of the move a moment later.
    assert said(running, *only).out == "cancelled 2 messages of g\n"
    assert said(running, "cancel", "g", "--where").out == "cancelled 1 message of g\n"
