"""``delayd get`` and ``delayd cancel`` against real servers, by the receipts that ``delayd send`` prints."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import delayd
from tests.end_to_end.up_process import Up, up
from tests.unit.cli.runner import Ran, run
from tests.waiting import wait_until

YEAR = datetime(2027, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("messages"), "--port", "0") as servers:
        yield servers


def said(running: Up, *arguments: str, stdin: bytes = b"", **environment: str) -> Ran:
    return run(*arguments, "--meta", running.meta, stdin=stdin, environment=environment)


def sent(running: Up, subject: str, when: str) -> str:
    """The receipt of a message that is sent now."""
    ran = said(running, "send", subject, "b", "--in", when, "--format", "json")
    assert ran.code == 0, ran.err
    token: str = json.loads(ran.out)["receipt"]
    return token


def states(ran: Ran) -> list[str]:
    return [row["state"] for row in json.loads(ran.out)]


def test_a_message_is_cancelled_by_the_word_that_send_prints(running: Up) -> None:
    text = said(running, "send", "a", "b", "--in", "1h").out
    token = text.splitlines()[1].removeprefix("receipt ")
    assert len(token) == 48
    assert states(said(running, "get", "a", "--receipt", token, "--format", "json")) == ["pending"]
    dry = said(running, "cancel", "a", "--receipt", token, "--dry-run", "--format", "json")
    assert (dry.code, states(dry)) == (0, ["pending"])
    for _ in range(2):
        ran = said(running, "cancel", "a", "--receipt", token, "--format", "json")
        assert (ran.code, states(ran), ran.err) == (0, ["cancelled"], "")
    with delayd.Producer(running.meta) as producer:
        info = producer.get("a", receipt=delayd.Receipt.of_token(token))
        assert info.state is delayd.MessageState.CANCELLED


def test_what_is_not_cancelled_is_counted_and_the_exit_code_says_so(running: Up) -> None:
    gone, waits = sent(running, "b", "0s"), sent(running, "b", "1h")
    get = ("get", "b", "--receipt", gone, "--format", "json")
    wait_until(lambda: states(said(running, *get)) == ["dispatched"], lambda: said(running, *get).out)
    (row,) = json.loads(said(running, *get).out)
    assert row["attempt"] == 1 and row["target_log_id"] and row["decided_at_ms"] >= row["deliver_at_ms"]
    unknown = delayd.Receipt.of_token(waits)._replace(sequence=10**9).token
    given = "\n".join([gone, "", waits, unknown]).encode()
    ran = said(running, "cancel", "b", "--receipts", "-", "--format", "csv", stdin=given)
    assert ran.code == 2
    rows = list(csv.DictReader(io.StringIO(ran.out)))
    assert [row["state"] for row in rows] == ["dispatched", "cancelled", "unknown"]
    assert ran.err == (
        "delayd: 1 of 3 messages are cancelled; 1 were dispatched before, or have ended in another way, "
        "1 are unknown there\n"
    )
    assert said(running, "get", "b", "--receipt", unknown).code == 2


def test_many_messages_are_not_cancelled_without_a_question(running: Up, tmp_path: Path) -> None:
    with delayd.Producer(running.meta) as producer:
        receipt = producer.send_batch("d", [b"x"] * 1_001, delay=timedelta(days=1))
        columns = zip(
            receipt.log_ids.tolist(),
            receipt.sequences.tolist(),
            receipt.deliver_at_ms.tolist(),
            receipt.accepted_at_ms.tolist(),
            strict=True,
        )
        tokens = [
            delayd.Receipt(delayd.LogId(log_id), sequence, due_ms, accepted_ms, False, False).token
            for log_id, sequence, due_ms, accepted_ms in columns
        ]
        listed = tmp_path / "receipts"
        listed.write_text("\n".join(tokens))
        refused = said(running, "cancel", "d", "--receipts", str(listed))
        assert (refused.code, refused.out) == (2, "")
        assert "1,001 messages of d are never delivered then" in refused.err and "--yes" in refused.err
        assert (producer.get_batch("d", receipt=receipt)["state"] == delayd.MessageState.PENDING).all()
        done = said(running, "cancel", "d", "--receipts", str(listed), "--yes", "--format", "json")
        assert done.code == 0 and set(states(done)) == {"cancelled"}


@pytest.mark.parametrize("wrong", ["", "abc", "a" * 48, "é" * 48])
def test_a_word_that_is_no_receipt_is_refused_by_name(running: Up, wrong: str) -> None:
    ran = said(running, "cancel", "a", "--receipt", wrong)
    assert (ran.code, ran.out) == (2, "")
    assert "is no receipt; it was mistyped or cut" in ran.err


def test_one_wrong_letter_is_noticed(running: Up) -> None:
    token = sent(running, "e", "1h")
    for place in range(len(token)):
        other = token[:place] + ("a" if token[place] != "a" else "b") + token[place + 1 :]
        with pytest.raises(delayd.BadArgument):
            delayd.Receipt.of_token(other)
    receipt = delayd.Receipt.of_token(token.upper() + "\n")
    assert receipt.token == token


def test_a_command_needs_messages(running: Up) -> None:
    ran = said(running, "get", "a")
    assert ran.code == 2 and "--receipt RECEIPT, --receipts FILE, --key KEY or --keys FILE" in ran.err


def test_all_messages_of_a_window_are_counted_and_cancelled(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        far = producer.send_batch("w", [b"x"] * 500, delay=timedelta(days=40))
        near = producer.send_batch("w", [b"x"] * 700, delay=timedelta(hours=2))
        other = producer.send("x", b"x", delay=timedelta(hours=2))
        assert producer.cancel_where("w").found == 1_200
        window = ("--where", "--from", "+1h", "--to", "+3h")
        ran = said(running, "cancel", "w", *window, "--dry-run")
        assert (ran.code, ran.out, ran.err) == (0, "700 messages of w are pending there\n", "")
        ran = said(running, "cancel", "w", *window)
        assert (ran.code, ran.out, ran.err) == (0, "cancelled 700 messages of w\n", "")
        assert (producer.get_batch("w", receipt=near)["state"] == delayd.MessageState.CANCELLED).all()
        assert (producer.get_batch("w", receipt=far)["state"] == delayd.MessageState.PENDING).all()
        seen: list[delayd.Walked] = []
        walked = producer.cancel_where("w", dry_run=False, progress=seen.append)
        assert (walked.found, walked.done, walked.in_flight, walked.ended, walked.unread) == (500, 500, 0, 0, 0)
        assert seen[-1] == walked
        assert producer.cancel_where("w") == delayd.Walked()
        assert producer.get("x", receipt=other).state is delayd.MessageState.PENDING
        with pytest.raises(delayd.BadArgument):
            producer.cancel_where("w", due_from=YEAR, due_before=YEAR)
    assert said(running, "cancel", "w", "--where", "--receipt", other.token).code == 2
    assert said(running, "cancel", "w", "--from", "now", "--receipt", other.token).code == 2


def test_more_than_a_thousand_of_a_window_are_not_cancelled_without_a_question(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        producer.send_batch("v", [b"x"] * 1_001, delay=timedelta(days=1))
    refused = said(running, "cancel", "v", "--where")
    assert (refused.code, refused.out) == (2, "") and "--yes" in refused.err
    done = said(running, "cancel", "v", "--where", "--yes")
    assert (done.code, done.out) == (0, "cancelled 1,001 messages of v\n")
    assert said(running, "cancel", "v", "--where").out == "0 messages of v are pending there\n"
