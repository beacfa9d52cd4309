"""Each lie is found and rightly named, and an honest directory has no finding (rules S5, S6, S7)."""

from pathlib import Path

import pytest

from delayd.errors import BadArgument, DamagedData
from delayd.reading.books import audit_directory
from tests.simulation.audit import BOOKS
from tests.tamper.honest import honest
from tests.tamper.liar import Liar
from tests.tamper.lies import Lie, all_lies, undetectable
from tests.tamper.lies.lie import Tell
from tests.tamper.three_ways import sql_differences
from tests.tamper.verdict import verdict

LIES = all_lies()
UNTOLD = undetectable()
CUTS = (0, 8, 63, 64)  # Bytes that are left of a file.
DIGESTS_EVERY = 4
SQL_EVERY = 8  # `python -m tests.tamper.three_ways` compares all of them.
IN_SQL = [
    lie for number, lie in enumerate(LIES) if number % SQL_EVERY == 0 or "is called" in lie.name or "twice" in lie.name
]


def test_an_honest_directory_has_no_finding() -> None:
    disk, now_ms = honest()
    assert verdict(Liar(disk).disk, now_ms) == set()


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name.replace(" ", "_"))
def test_rule_S5_a_lie_is_found_and_rightly_named(lie: Lie) -> None:
    disk, now_ms = honest()
    liar = Liar(disk)
    lie.tell(liar)
    found = verdict(liar.disk, now_ms)
    assert found & lie.names, f"{sorted(found)} instead of one of {sorted(lie.names)}"


def test_rule_L9_a_file_that_is_cut_anywhere_near_its_header_ends_no_reader() -> None:
    disk, now_ms = honest()
    liar = Liar(disk)
    known: set[tuple[str, str]] = set()
    for number, path in enumerate(liar.paths()):
        whole = liar.read_file(path)
        server, kind = path.split("/")[2:4]
        # One file of each kind is cut at each size, each other one at one of them.
        is_first = len(known) < len(known := known | {(server.partition("-")[0], kind)})
        for size in CUTS if is_first else (CUTS[number % len(CUTS)],):
            liar.write_file(path, whole[:size])
            verdict(liar.disk, now_ms)
        liar.write_file(path, whole)
    assert verdict(liar.disk, now_ms) == set()


def test_there_are_more_than_two_hundred_of_them() -> None:
    assert len({lie.name for lie in LIES}) == len(LIES) >= 230


@pytest.mark.parametrize(("name", "tell"), UNTOLD, ids=[name.replace(" ", "_") for name, _ in UNTOLD])
def test_what_the_page_calls_undetectable_is_found_by_nobody(name: str, tell: Tell) -> None:
    disk, now_ms = honest()
    liar = Liar(disk)
    tell(liar)
    assert verdict(liar.disk, now_ms) == set(), name


@pytest.mark.parametrize("lie", LIES[::DIGESTS_EVERY], ids=lambda lie: lie.name.replace(" ", "_"))
def test_the_findings_of_an_hour_have_one_digest_in_each_audit_that_finds_them(lie: Lie) -> None:
    disk, now_ms = honest()
    liar = Liar(disk)
    lie.tell(liar)
    try:
        report = audit_directory(BOOKS, now_ms=now_ms, disk=liar.disk)
    except (DamagedData, BadArgument):
        return  # Nobody can accept anything of it.
    for (log_id, hour), digest in report.findings_sha256.items():
        alone = audit_directory(BOOKS, now_ms=now_ms + 7_000, disk=liar.disk, hours=[hour])
        assert alone.findings_sha256[log_id, hour] == digest


@pytest.mark.parametrize("lie", IN_SQL, ids=lambda lie: lie.name.replace(" ", "_"))
def test_sql_says_of_a_lie_what_numpy_says(lie: Lie, tmp_path: Path) -> None:
    disk, now_ms = honest()
    liar = Liar(disk)
    lie.tell(liar)
    assert sql_differences(liar.disk, now_ms, tmp_path / "export") == []
