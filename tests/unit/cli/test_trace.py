"""`delayd trace`: by sequence and by key, through moves and replacements."""

import json
import shutil
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

import delayd
from delayd.log.checkpoint import CheckpointFile, read_checkpoint
from delayd.outcome import Outcome, Reason
from tests.books import DELAY_ID, HOUR_MS, REALTIME_ID, START_MS, Books
from tests.waiting import wait_until

from .runner import run


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Sequences 1 and 2 have one key, 3 another one; 2 took the place of 1, and 4 has no key."""
    books = Books(str(tmp_path))
    books.send([START_MS], keys=["order-42"])
    books.checkpoint()
    books.send([START_MS + HOUR_MS, START_MS + 5, START_MS + 6], keys=["order-42", "17", ""])
    yield books
    books.close()


def _steps(books: Books, *arguments: str) -> list[tuple[str, str]]:
    ran = run("trace", *arguments, "--data", books.root, "--format", "json")
    assert ran.code == 0, ran.err
    return [(row["step"], row["detail"]) for row in json.loads(ran.out)]


def test_a_key_follows_the_newest_message_and_says_how_many_had_it_before(books: Books) -> None:
    books.decide([1], Outcome.CANCELLED, Reason.REPLACED, other=2)
    ran = run("trace", "orders", "order-42", "--data", books.root, "--format", "json")
    assert (ran.code, "1 earlier message had this key" in ran.err) == (0, True)
    assert [row["step"] for row in json.loads(ran.out)] == ["accepted", "next"]
    assert "earlier" not in run("trace", "orders", "17", "--key", "--data", books.root).err


@pytest.mark.parametrize(("reason", "step"), [(Reason.MOVED, "moved"), (Reason.REPLACED, "replaced")])
def test_a_message_that_another_one_took_the_place_of_is_followed(books: Books, reason: Reason, step: str) -> None:
    books.decide([1], Outcome.CANCELLED, reason, other=2)
    steps = _steps(books, "orders", "1")
    assert [name for name, _ in steps] == ["accepted", "filed", step, "accepted", "next"]
    assert "to sequence 2" in steps[2][1] and "2026-11-20T17:00:00.000Z" in steps[4][1]


def test_a_rejected_message_never_took_the_key(books: Books) -> None:
    books.decide([2], Outcome.CANCELLED, Reason.REJECTED, other=1)
    assert [name for name, _ in _steps(books, "orders", "order-42")] == ["accepted", "filed", "next"]
    steps = _steps(books, "orders", "2")
    assert steps[1][0] == "rejected" and "because of sequence 1" in steps[1][1]


@pytest.mark.parametrize("what", ["stood still", "clock in doubt"])
@pytest.mark.parametrize("server", ["delay", "realtime"])
def test_a_gap_is_told_where_it_kept_the_message_from_being_handed_over(books: Books, server: str, what: str) -> None:
    due_ms = START_MS + 5
    books.checkpoint()
    books.hand_over([3], claimed_ms=due_ms + 5_000)
    folder, log_id = (books.delay, DELAY_ID) if server == "delay" else (books.realtime, REALTIME_ID)
    payload = read_checkpoint(books.disk, folder) or {"indexed_offset": books.target.durable}
    file = CheckpointFile(books.disk, folder, log_id)
    file.publish({**payload, "gaps": [[what, due_ms - 1, due_ms + HOUR_MS], [what, 1, due_ms]]}, START_MS)
    file.close()
    steps = [name for name, _ in _steps(books, "orders", "3")]
    # A realtime server takes messages also while it doubts its clock.
    told = steps.count(what)
    assert told == (0 if (server, what) == ("realtime", "clock in doubt") else 1), steps


TOKEN = delayd.Receipt(delayd.LogId(7), 42, START_MS, START_MS, False, False).token


@pytest.mark.parametrize("broken", [TOKEN[:-1], TOKEN[1:], f"{TOKEN}x", f"0{TOKEN[1:]}", f"{TOKEN[:20]}{TOKEN[21:]}"])
def test_a_broken_receipt_is_named_and_no_key(books: Books, broken: str) -> None:
    ran = run("trace", "orders", broken, "--data", books.root)
    assert ran.code == 2 and f"{broken} looks like a receipt that was mistyped or cut" in ran.err, ran
    as_key = run("trace", "orders", broken, "--key", "--data", books.root)
    assert as_key.code == 2 and "no message of that subject and key" in as_key.err, as_key


@pytest.mark.parametrize("again", ["now", "later"])
def test_each_group_that_has_not_acknowledged_is_waited_for(tmp_path: Path, again: str) -> None:
    with delayd.open(tmp_path) as home, home.producer() as producer:
        receipt = producer.send("s", b"1", delay=timedelta(0))
        for group in ("done", "again", "held"):
            with home.consumer("s", group, prefetch=False) as consumer:
                (message,) = consumer.pull(1, wait=timedelta(seconds=20))
                if group == "done":
                    message.ack()
                elif group == "again":
                    message.nack(timedelta(0) if again == "now" else timedelta(hours=1))
                    state = delayd.MessageState.DISPATCHED if again == "now" else delayd.MessageState.PENDING
                    wait_until(partial(_is, producer, receipt, state))
    told = json.loads(run("trace", "s", receipt.token, "--data", str(tmp_path), "--format", "json").out)[-1]
    assert told["step"] == "next"
    waits = told["detail"].partition("waits for ")[2]
    own = "a consumer of group again that pulls it again; and " if again == "now" else ""
    assert waits.startswith(f"{own}a consumer of group held that acknowledges it"), waits
    assert "group done" not in waits and ("its instant" in waits) == (again == "later"), waits


@pytest.mark.parametrize("word", ["deleted", "moved behind it", "moved back to it", "made again"])
def test_a_group_that_was_deleted_or_moved_behind_the_message_is_not_waited_for(tmp_path: Path, word: str) -> None:
    with delayd.open(tmp_path) as home, home.producer() as producer, home.admin() as admin:
        receipt = producer.send("s", b"1", delay=timedelta(0))
        with home.consumer("s", "g", prefetch=False) as consumer:
            (message,) = consumer.pull(1, wait=timedelta(seconds=20))
            if word == "moved back to it":
                message.ack()
        if word in ("deleted", "made again"):
            admin.delete_group("s", "g")
        else:
            admin.rewind("s", "g", "earliest" if word == "moved back to it" else "latest", dry_run=False)
        if word == "made again":
            with home.consumer("s", "g", prefetch=False) as consumer:
                assert len(consumer.pull(1, wait=timedelta(seconds=20)))
    found = json.loads(run("trace", "s", receipt.token, "--data", str(tmp_path), "--format", "json").out)
    waits = [step["detail"].partition("waits for ")[2] for step in found if step["step"] == "next"]
    expected = {
        "moved back to it": ["a consumer of group g that pulls it again"],
        "made again": ["a consumer of group g that acknowledges it"],
    }
    assert waits == expected.get(word, []), found


def test_a_damaged_checkpoint_of_the_realtime_server_hides_no_step(tmp_path: Path) -> None:
    with delayd.open(tmp_path) as home, home.producer() as producer:
        receipt = producer.send("s", b"1", delay=timedelta(0))
        with home.consumer("s", "g") as consumer:
            consumer.pull(1, wait=timedelta(seconds=20)).ack()
    shutil.copy(tmp_path / "delay" / "checkpoint", tmp_path / "realtime" / "checkpoint")
    ran = run("trace", "s", receipt.token, "--data", str(tmp_path), "--format", "json")
    assert (ran.code, json.loads(ran.out)[-1]["step"]) == (0, "acknowledged"), ran
    assert "not seen: whether the realtime server" in ran.err and "stood still: " in ran.err


def _is(producer: delayd.Producer, receipt: delayd.Receipt, state: delayd.MessageState) -> bool:
    return producer.get("s", receipt=receipt, group="again").state is state
