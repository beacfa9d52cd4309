"""Findings that an operator accepts: audits are quiet about exactly these, and still say them."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from crc32c import crc32c
from freezegun import freeze_time

from delayd.secret import SECRET_FILE, open_secret
from tests.books import HOUR_MS, START_MS, Books

from .runner import Ran, run

_NOW = datetime.fromtimestamp(START_MS / 1000 + 7_200, UTC)
_HOUR = "2026112016"
_REASON = "disk 3 was lost, #4711"
_ACCEPT = ("--accept", _HOUR, "--by", "ann", "--reason", _REASON)
_SAID = f"hour {_HOUR}: accepted by ann at 2026-11-20T18:00:00.000Z: {_REASON}\n"
_LOUD = "the books do NOT balance: lost 1, duplicate 0, early 0, orphan 0, mismatch 0, conservation 0\n"
_QUIET = _LOUD.replace("0\n", "0; all of this is accepted\n")


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Two hours of two messages; the second message of the first hour is lost."""
    open_secret(str(tmp_path), "")
    books = Books(str(tmp_path))
    books.send([START_MS, START_MS + 1000, START_MS + HOUR_MS, START_MS + HOUR_MS])
    books.checkpoint()
    books.hand_over([1, 3, 4])
    books.see_all(START_MS + 2 * HOUR_MS)
    yield books
    books.close()


def _audit(books: Books, *options: str, at: datetime = _NOW, stdin: bytes = b"") -> Ran:
    with freeze_time(at):
        return run("audit", "--data", books.root, *options, stdin=stdin)


def _accepted(books: Books) -> Path:
    """Accept the findings of the first hour; the file of that."""
    assert _audit(books, *_ACCEPT, "--yes").code == 0
    (path,) = (Path(books.delay) / "acceptances").iterdir()
    return path


def _tell(path: Path, change: Callable[[str], str], *, to: Path | None = None) -> None:
    """Change the line that is signed, and make the checksum fit it again."""
    line, signature, _ = path.read_text().splitlines()
    changed = change(line)
    assert changed != line or to is not None
    text = f"{changed}\n{signature}\n"
    path.unlink()
    (to or path).write_text(f"{text}{crc32c(text.encode()):08x}\n")


def _states(books: Books, *options: str) -> list[str]:
    found = json.loads(_audit(books, "--format", "json", *options).out)
    return [each["state"] for each in found["acceptances"]]


def test_accepted_findings_are_told_and_end_with_0(books: Books) -> None:
    before = _audit(books)
    assert (before.code, before.out.endswith(_LOUD)) == (3, True)
    accepting = _audit(books, *_ACCEPT, "--yes")
    assert (accepting.code, accepting.out.endswith(f"{_HOUR}.1.note\n")) == (0, True)
    assert "LOST" in accepting.out and "\naccepted by ann at 2026-11-20T18:00:00.000Z: disk 3" in accepting.out
    after = _audit(books)
    assert (after.code, after.out) == (0, before.out.removesuffix(_LOUD) + _SAID + _QUIET)


def test_an_acceptance_lasts_while_time_passes_and_only_as_long_as_nothing_is_added(books: Books) -> None:
    _accepted(books)
    # How long the message has been lost for is in its sentence, and in no digest; nor are late messages.
    later = datetime.fromtimestamp(START_MS / 1000 + 90_000, UTC)
    assert _audit(books, "--late-limit", "0ms", at=later).code == 0
    books.hand_over([1])
    ran = _audit(books)
    assert ran.code == 3
    assert f"hour {_HOUR}: its findings are NOT those that were accepted by ann at 2026-11-20T18:00:00.000Z" in ran.out
    assert "accepted\n" not in ran.out and _states(books) == ["differs"]
    assert _audit(books, *_ACCEPT[:2], "--by", "bob", "--reason", "twice, too", "--yes").code == 0
    ran = _audit(books)
    assert ran.code == 0 and f"hour {_HOUR}: accepted by bob" in ran.out and "ann" not in ran.out


def _without_signature(path: Path) -> None:
    text = path.read_text().splitlines()[0] + "\n\n"
    path.write_text(f"{text}{crc32c(text.encode()):08x}\n")


@pytest.mark.parametrize(
    "tell",
    [
        lambda path: _tell(path, lambda line: line.replace('"ann"', '"bob"')),
        lambda path: _tell(path, lambda line: line.replace("disk 3", "disk 4")),
        lambda path: _tell(path, lambda line: line.replace('"at_ms": 1', '"at_ms": 2')),
        _without_signature,
    ],
    ids=["by", "reason", "at", "signature"],
)
def test_an_acceptance_that_was_changed_is_named_and_counts_for_nothing(
    books: Books, tell: Callable[[Path], None]
) -> None:
    path = _accepted(books)
    tell(path)
    ran = _audit(books)
    assert ran.code == 3
    assert f"hour {_HOUR}: {path} is not signed with this cluster's secret, and counts for nothing\n" in ran.out
    assert "accepted by" not in ran.out and ran.out.endswith(_LOUD)
    (told,) = json.loads(_audit(books, "--format", "json").out)["acceptances"]
    assert (told["state"], told["by"], told["reason"]) == ("not_signed", None, None)


def test_an_acceptance_of_other_findings_or_of_another_hour_does_not_fit_when_it_is_made_to(books: Books) -> None:
    path = _accepted(books)
    accepted = path.read_text()
    books.hand_over([1])
    books.hand_over([3])
    _audit(books, *_ACCEPT, "--yes")
    _audit(books, "--accept", "2026112017", *_ACCEPT[2:], "--yes")
    digests = [
        json.loads(each.read_text().splitlines()[0])["findings_sha256"] for each in sorted(path.parent.iterdir())
    ]
    for each in path.parent.iterdir():
        each.unlink()
    old, same_hour, next_hour = digests
    path.write_text(accepted)
    _tell(path, lambda line: line.replace(old, same_hour))
    assert _audit(books, "--to", "2026-11-20T17:00Z").code == 3
    assert _states(books, "--to", "2026-11-20T17:00Z") == ["not_signed"]
    path.write_text(accepted)
    moved = path.with_name("2026112017.1.note")
    _tell(path, lambda line: line.replace(_HOUR, "2026112017").replace(old, next_hour), to=moved)
    assert _audit(books, "--from", "2026-11-20T17:00Z").code == 3
    assert _states(books, "--from", "2026-11-20T17:00Z") == ["not_signed"]
    # The file of one hour under the name of another one.
    moved.write_text(accepted)
    assert _states(books, "--from", "2026-11-20T17:00Z") == ["unreadable"]


@pytest.mark.parametrize("data", [b"", b"half of a no", b"{}\n\n00000000\n", b"\xff\n" * 3, b"[" * 60_000])
def test_a_file_that_is_damaged_is_named_by_audit_and_verify_and_counts_for_nothing(books: Books, data: bytes) -> None:
    path = _accepted(books)
    assert run("log", "verify", "--data", books.root).code == 0
    path.write_bytes(data)
    ran = _audit(books)
    assert ran.code == 3 and f"hour {_HOUR}: {path} is damaged at byte 0" in ran.out
    assert _states(books) == ["unreadable"]
    verified = run("log", "verify", "--data", books.root)
    assert verified.code == 3 and str(path) in verified.out


def test_the_secret_of_another_cluster_makes_nobody_an_operator(books: Books, tmp_path: Path) -> None:
    _accepted(books)
    (tmp_path / "other").mkdir()
    open_secret(str(tmp_path / "other"), "")
    other = ("--secret-file", str(tmp_path / "other" / SECRET_FILE))
    assert (_audit(books, *other).code, _states(books, *other)) == (3, ["not_signed"])
    assert _audit(books, *_ACCEPT, "--yes", *other).code == 0
    assert (_audit(books).code, sorted(_states(books))) == (0, ["accepted", "not_signed"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--accept", "2026112017", "--by", "ann", "--reason", "why", "--yes"), "nothing unbalances the books of hour"),
        (("--accept", "1999010100", "--by", "ann", "--reason", "why", "--yes"), "nothing unbalances the books of hour"),
        (("--accept", "today", "--by", "ann", "--reason", "why"), "write ten digits YYYYMMDDHH in UTC"),
        (("--accept", _HOUR, "--by", "ann"), "give --by NAME and --reason TEXT, too"),
        (("--accept", _HOUR, "--reason", "why"), "give --by NAME and --reason TEXT, too"),
        (("--accept", _HOUR, "--by", " ", "--reason", "why"), "the name must be one line"),
        (("--accept", _HOUR, "--by", "ann", "--reason", "a\nb"), "the reason must be one line"),
        (("--accept", _HOUR, "--by", "ann", "--reason", "x" * 2_001), "the reason must be one line"),
        ((*_ACCEPT, "--from", "-2h"), "leave --from and --to out"),
        (("--by", "ann"), "belong to --accept HOUR"),
        (("--yes",), "belong to --accept HOUR"),
    ],
)
def test_what_can_not_be_accepted_is_refused_by_name(books: Books, options: tuple[str, ...], said: str) -> None:
    ran = _audit(books, *options)
    assert (ran.code, said in ran.err) == (2, True), ran.err
    assert not (Path(books.delay) / "acceptances").exists()


def _break_seal(books: Books) -> str:
    """The seal says more bytes of bodies than the rows have, and nothing else speaks of these."""
    books.checkpoint()  # The hour is over by this one.
    seal = books.seal(START_MS // HOUR_MS + 1)
    books.seals = [seal._replace(facts=seal.facts._replace(body_bytes=7))]
    books.write_seals(books.seals)
    books.publish(START_MS + 2 * HOUR_MS)
    return "the seal of 2026112017 is BROKEN"


def _leave_out_sequences(books: Books) -> str:
    books.below = (*books.below[:2], books.below[2] + 5)
    books.publish(START_MS + 2 * HOUR_MS)
    return "5 messages were accepted and are filed nowhere"


@pytest.mark.parametrize("spoil", [_break_seal, _leave_out_sequences])
def test_nobody_accepts_a_broken_seal_or_totals_that_do_not_add_up(books: Books, spoil: Callable[[Books], str]) -> None:
    said = spoil(books)
    ran = _audit(books, *_ACCEPT, "--yes")
    # The command has read the seals of the accepted hour only.
    assert (ran.code, "audits go on to exit with 3" in ran.out) == (0, spoil is _leave_out_sequences)
    ran = _audit(books)
    assert ran.code == 3 and said in ran.out and _SAID in ran.out and "all of this is accepted" not in ran.out
    found = json.loads(_audit(books, "--format", "json").out)
    assert bool(found["conservation"]) != bool(found["broken_seals"])


def test_two_commands_at_once_keep_both_words(books: Books) -> None:
    books.close()
    command = (sys.executable, "-m", "delayd", "audit", "--data", books.root, "--accept", _HOUR, "--yes")
    started = [
        subprocess.Popen([*command, "--by", by, "--reason", "why"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for by in ("ann", "bob")
    ]
    told = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    files = sorted((Path(books.delay) / "acceptances").iterdir())
    assert [path.name for path in files] == [f"{_HOUR}.1.note", f"{_HOUR}.2.note"]
    assert {json.loads(path.read_text().splitlines()[0])["by"] for path in files} == {"ann", "bob"}
    assert subprocess.run(command[:6], check=False, capture_output=True).returncode == 0
