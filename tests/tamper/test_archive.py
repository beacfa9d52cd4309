"""Each lie about an archive is found and rightly named, and an honest archive has no finding."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.sql_audit import audit_archive_by_sql
from tests.tamper.archived import Forger, archive_with_items, honest_archive, sealed
from tests.tamper.lies.archive import ArchiveLie, Tell, archive_lies, first, untold_of_archives
from tests.tamper.three_ways import archive_sql_differences
from tests.unit.cli.runner import run

LIES = archive_lies()
UNTOLD = untold_of_archives()
SQL_EVERY = 15  # Each takes three seconds; `python -m tests.tamper.three_ways` compares all of them.


@pytest.fixture
def forger(tmp_path: Path) -> Forger:
    return Forger(honest_archive(), tmp_path / "archive")


def said(folder: Path) -> dict[str, Any]:
    """What an audit of an archive says, with all findings."""
    ran = run("audit", "--data", str(folder), "--format", "json", "--findings", "1000000")
    found: dict[str, Any] = json.loads(ran.out)
    assert ran.code == (0 if found["balanced"] else 3)
    return found


def names(found: dict[str, Any]) -> set[str]:
    """The names of what is wrong."""
    kinds = {finding["finding"] for finding in found["findings"]} - {"LATE"}
    return kinds | ({"BROKEN"} if found["broken_seals"] else set())


def test_an_honest_archive_has_no_finding_and_verified_seals() -> None:
    found = said(honest_archive())
    assert found["balanced"] and names(found) == set()
    assert found["seals"] == {"verified": 5, "deleted": 5, "unread": 0, "BROKEN": 0}


def test_the_forger_makes_the_seals_that_servers_made(forger: Forger) -> None:
    for name in forger.files("schedule"):
        seal = forger.note(name)["seal"]
        assert {**seal, **sealed(forger.rows(name))} == seal
        forger.chain(forger.note(name)["origin"])
        assert forger.note(name)["seal"] == seal


def test_there_are_more_than_eighty_of_them() -> None:
    assert len({lie.name for lie in LIES}) == len(LIES) >= 80


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name.replace(" ", "_"))
def test_a_lie_about_an_archive_is_found_and_rightly_named(lie: ArchiveLie, forger: Forger) -> None:
    lie.tell(forger)
    assert names(said(forger.folder)) == lie.names


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"body": b"another"}, {"BROKEN"}),
        ({"body": None}, {"BROKEN"}),
        ({"headers": [("k", b"v")]}, {"BROKEN"}),
        # Of a body that was left out of the schedule log nothing is left to check.
        ({"body": None, "headers": None, "headers_hash": None, "left_out": True}, set()),
        ({"key": "another", "tags": ["another"]}, set()),  # No digest covers them, as the page says.
    ],
)
def test_a_lie_about_what_an_archived_message_said_is_found_if_a_digest_covers_it(
    cells: dict[str, object], expected: set[str], tmp_path: Path
) -> None:
    forger = Forger(archive_with_items(), tmp_path / "archive")
    assert names(said(forger.folder)) == set()
    forger.edit(forger.files("schedule")[1], first(**cells))
    assert names(said(forger.folder)) == expected


@pytest.mark.parametrize("lie", LIES[::SQL_EVERY], ids=lambda lie: lie.name.replace(" ", "_"))
def test_sql_says_of_a_lie_about_an_archive_what_numpy_says(lie: ArchiveLie, forger: Forger, tmp_path: Path) -> None:
    lie.tell(forger)
    assert archive_sql_differences(forger.folder, tmp_path / "books") == []


def test_sql_alone_verifies_the_seals_of_an_honest_archive(tmp_path: Path) -> None:
    assert archive_sql_differences(honest_archive(), tmp_path / "books") == []
    report, seals = audit_archive_by_sql(honest_archive(), tmp_path / "again")
    assert Counter(seals.values()) == {"verified": 5, "deleted": 5}
    assert not {kind for *_, kind in report.findings} - {"LATE"}


@pytest.mark.parametrize(("name", "tell"), UNTOLD, ids=[name.replace(" ", "_") for name, _ in UNTOLD])
def test_what_the_page_of_archives_calls_undetectable_is_found_by_nobody(name: str, tell: Tell, forger: Forger) -> None:
    tell(forger)
    assert names(said(forger.folder)) == set(), name
