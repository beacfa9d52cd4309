"""The reference reader, which knows only the format pages, says what delayd's own audit and verification say."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from delayd import Consumer, Producer
from delayd.errors import DataError
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.outcome import Outcome, Reason
from delayd.reading.books import audit_directory
from delayd.reading.verify import verify_directory
from examples.reference_reader import verify
from tests.books import DELAY_ID, HOUR, HOUR_MS, START_MS, Books
from tests.end_to_end.up_process import up

READER = Path(__file__).parents[2] / "examples" / "reference_reader.py"
LINES_MAX = 560
NOW_MS = START_MS + 10 * HOUR_MS


def test_it_is_short_and_uses_nothing_of_delayd() -> None:
    text = READER.read_text()
    assert len(text.splitlines()) <= LINES_MAX
    assert not [line for line in text.splitlines() if line.startswith(("import ", "from ")) and "delayd" in line]


def honest(folder: Path) -> Books:
    """Two hours and some rows that no checkpoint has filed: the first hour is sealed."""
    books = Books(str(folder))
    for hour in range(2):
        due = [START_MS + hour * HOUR_MS + 7 * row for row in range(20)]
        rows = books.send(due, subjects=("orders", "mail", "orders.eu"))
        books.checkpoint()
        for some in (rows[:10], rows[10:19]):
            books.hand_over(some, claimed_ms=START_MS + hour * HOUR_MS + 500)
    books.decide([20], Outcome.IN_DOUBT)
    books.seal()
    books.send([NOW_MS + HOUR_MS, START_MS], at_ms=START_MS + 2 * HOUR_MS)
    books.hello(books.batch_id, START_MS + 3 * HOUR_MS)
    books.see_all(START_MS + 3 * HOUR_MS)
    return books


def agree(data: Path) -> tuple[dict[str, int], list[str]]:
    """Read it in both ways: both find something, or neither does."""
    figures, wrong = verify(data)
    try:
        report = audit_directory(str(data), now_ms=NOW_MS, findings_limit=None)
        # Whether a message without an outcome should have one by now is not in the formats.
        beyond_time = [
            finding
            for finding in report.findings
            if finding.kind.name != "LATE"
            and not (finding.kind.name == "LOST" and "without an outcome" in finding.detail)
        ]
        found = bool(beyond_time or report.broken_seals)
    except DataError:
        found = True
    found |= not verify_directory(str(data)).sound
    assert bool(wrong) == found, wrong
    return figures, wrong


def test_an_honest_directory_has_nothing_wrong_and_the_same_figures(tmp_path: Path) -> None:
    honest(tmp_path).close()
    figures, wrong = agree(tmp_path)
    assert wrong == []
    total = audit_directory(str(tmp_path), now_ms=NOW_MS).total
    assert figures == {
        "scheduled": total.scheduled,
        "dispatched": total.dispatched,
        "in_doubt": total.in_doubt,
        "without outcome": total.pending + total.undecided + total.waiting + total.missing,
    }


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


def last_segment(folder: str) -> Path:
    return max(Path(folder).glob("*.log"))


def give_one_more(books: Books) -> None:
    """The checkpoint says that one sequence more was given than messages are filed."""
    crc, appended_at_ms, next_sequence = books.below
    books.below = crc, appended_at_ms, next_sequence + 1
    books.publish()


def note_other_seals(books: Books) -> None:
    """The checkpoint notes another last seal than the seal log has."""
    books.seals[-1] = books.seals[-1]._replace(number=7)
    books.publish()


@pytest.mark.parametrize(
    ("named", "harm"),
    [
        ("DAMAGE", lambda books: flip(last_segment(f"{books.delay}/message"), 90)),
        ("DAMAGE", lambda books: flip(last_segment(f"{books.realtime}/message"), FILE_HEADER_BYTES + 200)),
        ("DAMAGE", lambda books: flip(books.path_of("schedule"), FILE_HEADER_BYTES + 300)),
        ("DAMAGE", lambda books: flip(books.path_of("dispatch"), 20)),
        ("BROKEN", lambda books: flip(last_segment(f"{books.delay}/seal"), 200)),
        ("DAMAGE", lambda books: books.path_of("schedule").unlink()),
        ("DAMAGE", lambda books: shutil.copy(books.path_of("schedule", HOUR + 1), books.path_of("schedule"))),
        ("BROKEN", lambda books: books.path_of("dispatch").unlink()),
        ("BROKEN", lambda books: books.write_seals([])),
        ("BROKEN", lambda books: books.write_seals([books.seals[0]._replace(number=1)])),
        ("CONSERVATION", lambda books: give_one_more(books)),
        ("CONSERVATION", lambda books: note_other_seals(books)),
        ("DUPLICATE", lambda books: books.hand_over([21, 22], record=False)),
        ("DUPLICATE", lambda books: books.decide([21], Outcome.CANCELLED)),
        ("ORPHAN", lambda books: books.store([books.rows[1]], "orders", HOUR + 1, START_MS + HOUR_MS, NOW_MS)),
        ("LOST", lambda books: books.record([(HOUR + 1, books.part([40], START_MS + HOUR_MS + 999, 1 << 20))])),
        ("EARLY", lambda books: books.hand_over([40], claimed_ms=START_MS)),
        ("MISMATCH", lambda books: books.hand_over([40], due_ms=START_MS)),
        ("MISMATCH", lambda books: (books.decide([40], Outcome.EXPIRED), books.hand_over([40], record=False))),
        ("MISMATCH", lambda books: books.decide([40], Outcome.CANCELLED, Reason.CANCELLED, logged=0)),
        ("MISMATCH", lambda books: books.decide([40], Outcome.CANCELLED, Reason.MOVED, logged=Reason.KEPT)),
        ("ORPHAN", lambda books: (books.hand_over([40], record=False), books.hello(books.batch_id, NOW_MS))),
    ],
)
def test_damage_and_lies_are_found_by_both(tmp_path: Path, named: str, harm: Callable[[Books], object]) -> None:
    books = honest(tmp_path)
    harm(books)
    books.close()
    _, wrong = agree(tmp_path)
    assert any(line.startswith(named) for line in wrong), wrong


def test_a_torn_tail_is_no_damage(tmp_path: Path) -> None:
    books = honest(tmp_path)
    books.close()
    with last_segment(f"{books.realtime}/message").open("ab") as file:
        file.write(b"GRUP and not a whole one")
    assert agree(tmp_path)[1] == []


def test_what_real_servers_leave_is_sound_and_whole(tmp_path: Path) -> None:
    with up(tmp_path, "--port", "0") as running:
        with Producer(running.meta) as producer, Consumer(running.meta, "orders", "g") as consumer:
            for number in range(300):
                headers = {"n": str(number)} if number % 3 else None
                subject, tags = f"orders{'.eu' * (number % 2)}", ["eu", "urgent"][number % 3 :]
                line, ttl = ("a line", timedelta(days=1)) if number % 5 else (None, None)
                producer.send(
                    subject, b"x" * number, delay=timedelta(0), headers=headers, tags=tags, ordering_key=line, ttl=ttl
                )
            producer.send_batch("orders", [b"far"] * 100, delay=timedelta(days=3), tags=["far"])
            day = timedelta(days=1)
            for on_conflict in ("reject", "keep", "replace"):
                keys = [f"key-{number % 40}" for number in range(60)]
                producer.send_batch("keyed", [b"k"] * 60, delay=day, keys=keys, on_conflict=on_conflict)
            producer.cancel_batch("keyed", keys=[f"key-{number}" for number in range(10)])
            producer.reschedule_batch("keyed", keys=[f"key-{number}" for number in range(10, 20)], delay=2 * day)
            producer.flush()
            got = 0
            while got < 150:
                for message in consumer.pull(wait=timedelta(seconds=20)):
                    message.ack()
                    got += 1
        assert running.end() == 0
    done = subprocess.run([sys.executable, str(READER), str(running.data)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "0 things are wrong"), done.stdout + done.stderr
    figures, _ = verify(running.data)
    report = audit_directory(str(running.data), now_ms=0)
    assert report.balanced and report.total.scheduled == figures["scheduled"] == 590
    assert report.total.dispatched == figures["dispatched"]
    assert DELAY_ID not in {hour.log_id for hour in report.hours}
