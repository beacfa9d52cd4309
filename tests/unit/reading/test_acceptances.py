"""The digest of an hour's findings, as its page gives it; and what acceptances of them are worth."""

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from delayd.machine.disk import RealDisk
from delayd.reading.files.directory import Directory, Role
from delayd.reading.findings import (
    FINDING,
    AcceptanceState,
    Cause,
    FindingKind,
    Findings,
    join_findings,
    judge,
    read_acceptances,
    write_acceptance,
)
from delayd.secret import Secret
from tests.books import DELAY_ID, HOUR

Row = tuple[int, int, int, int, int, int, int]
"""Kind, cause, subject, sequence, due instant, value, other."""
LOST: Row = (FindingKind.LOST, Cause.NOT_AT_TARGET, 1, 7, 1_000, 5, 0)
NO_OUTCOME: Row = (FindingKind.LOST, Cause.NO_OUTCOME, 0, 8, 2_000, 60_000, 0)
ORPHAN: Row = (FindingKind.ORPHAN, Cause.TARGET_UNSCHEDULED, 0, 9, 3_000, 1 << 63, 4)
LATE: Row = (FindingKind.LATE, Cause.LATE, 0, 7, 1_000, 1_500, 0)


def findings(rows: Sequence[Row], subjects: Sequence[str] = ("orders", "bills"), log_id: int = DELAY_ID) -> Findings:
    table = np.zeros(len(rows), FINDING)
    for number, (kind, cause, subject, sequence, due_ms, value, other) in enumerate(rows):
        table[number] = (kind, cause, 0, subject, sequence, due_ms, value, other)
    return Findings(log_id, HOUR, table, tuple(subjects))


def test_the_digest_is_the_one_of_the_page() -> None:
    said = struct.pack("<QII", DELAY_ID, HOUR, 3)
    said += struct.pack("<BBHIQqQQ", FindingKind.LOST, Cause.NOT_AT_TARGET, 0, 0, 7, 1_000, 5, 0)
    said += struct.pack("<BBHIQqQQ", FindingKind.LOST, Cause.NO_OUTCOME, 0, 1, 8, 2_000, 0, 0)
    said += struct.pack("<BBHIQqQQ", FindingKind.ORPHAN, Cause.TARGET_UNSCHEDULED, 0, 1, 9, 3_000, 1 << 63, 4)
    said += b"\x05\0\0\0bills" + b"\x06\0\0\0orders"
    assert findings([LOST, LATE, NO_OUTCOME, ORPHAN]).sha256 == hashlib.sha256(said).hexdigest()


def test_what_depends_on_the_audit_and_not_on_the_findings_is_not_in_the_digest() -> None:
    expected = findings([LOST, NO_OUTCOME, ORPHAN]).sha256
    assert findings([ORPHAN, LATE, LOST, NO_OUTCOME]).sha256 == expected
    waited = (*NO_OUTCOME[:5], 99_999, 0)
    assert findings([LOST, waited, ORPHAN]).sha256 == expected
    # Another audit numbers its subjects otherwise, and one in parts knows a subject by several numbers.
    other = {0: 3, 1: 0}
    renumbered = [(*row[:2], other[row[2]], *row[3:]) for row in (LOST, NO_OUTCOME, ORPHAN)]
    assert findings(renumbered, ("bills", "unused", "", "orders")).sha256 == expected
    assert join_findings([findings([LOST, NO_OUTCOME]), findings([ORPHAN])]).sha256 == expected


@pytest.mark.parametrize("field", range(7))
def test_each_field_of_a_finding_is_in_the_digest(field: int) -> None:
    row = list(LOST)
    row[field] = {0: FindingKind.ORPHAN, 1: Cause.OTHER_TARGET, 2: 0}.get(field, row[field] + 1)
    kind, reason, subject, sequence, due_ms, value, other = row
    changed = findings([(kind, reason, subject, sequence, due_ms, value, other)])
    assert changed.sha256 != findings([LOST]).sha256


def test_a_file_is_the_one_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "formats" / "acceptance.md").read_text()
    example = page.split("```\n")[1]
    secret = Secret(bytes(range(32)), "")
    folder = tmp_path / "acceptances"
    folder.mkdir()
    (folder / "2026112016.1.note").write_text(example)
    (found,) = read_acceptances(RealDisk(), Directory(str(tmp_path), Role.DELAY, DELAY_ID))
    assert found.acceptance is not None
    digests = {(DELAY_ID, HOUR): found.acceptance.findings_sha256}
    assert [each.state for each in judge([found], digests, secret)] == [AcceptanceState.ACCEPTED]
    written = Path(write_acceptance(str(tmp_path), found.acceptance, secret))
    assert (written.name, written.read_text()) == ("2026112016.2.note", example)
