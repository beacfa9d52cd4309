"""Seals, verified from the files: what was changed since, with every checksum made to fit, is named (rule S4)."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import NewPart, decode_outcomes, encode_outcomes, missing_parts
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, open_segment
from delayd.reading.books import audit_directory
from delayd.reading.files.directory import find_directories
from delayd.reading.files.origins import read_outcomes
from delayd.reading.seals import SealReport, SealState, verify_seals
from tests.books import DELAY_ID, HOUR, HOUR_MS, START_MS, Books
from tests.unit.cli.runner import run


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Three sealed hours; the first two have rows of two subjects, in several batches."""
    books = Books(str(tmp_path))
    for hour in range(3):
        for part in range(2):
            begin = START_MS + hour * HOUR_MS
            sent = books.send([begin + 1_000 * (2 * row + part) for row in range(5)], subjects=("orders", "bills"))
            books.hand_over(sent[0::2], delay_ms=5)
            books.hand_over(sent[1::2], delay_ms=5)
            books.checkpoint()
        books.seal(HOUR + hour)
    books.see_realtime(START_MS + 4 * HOUR_MS)
    yield books
    books.close()


def states(books: Books) -> list[SealState]:
    return [report.state for report in verify_seals(books.root).seals]


def broken(books: Books) -> list[SealReport]:
    """What is broken, which the audit must name too."""
    found = list(verify_seals(books.root).broken)
    report = audit_directory(books.root, now_ms=START_MS + 4 * HOUR_MS)
    assert list(report.broken_seals) == found
    assert report.balanced == (report.total.balanced and not found and not report.faults)
    return found


def rewrite_outcomes(books: Books, change: Callable[[NewPart], NewPart | None], hour: int = HOUR) -> None:
    """Write an hour's dispatch log anew, part by part, with checksums that fit."""
    (directory,) = [each for each in find_directories(books.disk, books.root) if each.log_id == DELAY_ID]
    found = read_outcomes(books.disk, directory, hour)
    parts = [changed for part in missing_parts(found, decode_outcomes([])) if (changed := change(part)) is not None]
    path = str(books.path_of("dispatch", hour))
    segment = open_segment(books.disk, path, FileKind.DISPATCH, DELAY_ID, write=True)
    segment.file.truncate(FILE_HEADER_BYTES)
    segment.append([NewGroup(GroupKind.DATA, [encode_outcomes(hour, parts)], 1, START_MS)])
    segment.flush()
    segment.close()


def test_rule_S4_a_seal_that_was_edited_is_broken_and_so_is_the_chain_behind_it(books: Books) -> None:
    first, second, third = books.seals
    books.write_seals([first, second._replace(facts=second.facts._replace(rows=9, dispatched=9)), third])
    reports = broken(books)
    assert [report.hour for report in reports] == [HOUR + 1, HOUR + 2]
    assert "rows 10 instead of 9" in reports[0].differs
    assert reports[1].differs == "the seal before it is not the one that it follows"


def test_rule_S4_seals_of_another_log_in_another_order_or_of_one_hour_are_broken(books: Books) -> None:
    first, second, third = books.seals
    foreign = third._replace(log_id=7)
    books.write_seals(
        [first, second, foreign, third._replace(number=3, facts=first.facts, previous_sha256=foreign.sha256)]
    )
    found = [report.differs for report in broken(books)]
    assert found == ["it is of the log 0000000000000007", "the hour has seal 0 already"]
    books.write_seals([first, third])
    assert "it is number 2, and 1 seals are before it" in broken(books)[0].differs


def test_a_deleted_hour_is_told_from_one_whose_files_are_gone(books: Books) -> None:
    for log in ("schedule", "dispatch"):
        books.path_of(log).unlink()
    (report,) = verify_seals(books.root).broken
    assert report.hour == HOUR and "retention did not remove it" in report.differs
    books.removed.add(HOUR)
    books.publish()
    assert states(books) == [SealState.DELETED, SealState.VERIFIED, SealState.VERIFIED]
    del books.hours[HOUR]
    books.publish()
    assert states(books) == [SealState.DELETED, SealState.VERIFIED, SealState.VERIFIED]
    assert not broken(books)


def test_rule_P3_a_seal_that_is_newer_than_the_table_is_not_judged_before_the_hour_is_closed(books: Books) -> None:
    books.sealed.remove(HOUR + 2)
    crc, _, next_sequence = books.below
    books.below = crc, (HOUR + 2) * HOUR_MS, next_sequence
    books.publish()
    assert states(books) == [SealState.VERIFIED, SealState.VERIFIED, SealState.UNREAD]
    books.tick(START_MS + 3 * HOUR_MS)
    books.checkpoint()
    assert states(books) == [SealState.VERIFIED] * 3


# On the command line.


def test_the_command_lists_seals_and_exits_with_0_or_3(books: Books) -> None:
    ran = run("seals", "--data", books.root)
    assert ran.code == 0 and "seals: 3 verified" in ran.out and books.seals[-1].sha256.hex() in ran.out
    rows = json.loads(run("seals", "--data", books.root, "--format", "json", "--from", "2026-11-20T17:00Z").out)
    assert [(row["number"], row["state"], row["rows"]) for row in rows] == [(1, "verified", 10), (2, "verified", 10)]
    rewrite_outcomes(books, lambda part: part._replace(attempt=2))
    ran = run("seals", "--data", books.root)
    assert ran.code == 3 and "the outcome side has other rows" in ran.out and "1 BROKEN" in ran.out
    ran = run("seals", "--data", books.root, "--format", "csv", "--from", "2026-11-20T17:00Z")
    assert ran.code == 0 and ran.out.count("verified") == 2
