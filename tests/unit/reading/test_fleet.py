"""Directories of several machines and archives are audited as one: each server once, and each of its hours once."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from delayd.hours import hour_name
from delayd.reading.archive.archiver import archive_directory
from delayd.reading.archive.store import FolderStore
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.files.directory import Role
from delayd.reading.fleet import plan_fleet
from delayd.reading.seals import SealState
from delayd.secret import open_secret
from tests.books import DELAY_ID, HOUR, HOUR_MS, REALTIME_ID, START_MS, Books
from tests.simulation.audit import BOOKS
from tests.tamper.drained import drained
from tests.tamper.honest import DELAY as DELAY_FOLDER
from tests.unit.cli.runner import run

from .archived import HOURS, MESSAGE_KEY, NOW_MS, SCHEDULE_KEY, audited_fleet, rewrite, write_books

OTHER_DELAY, OTHER_REALTIME = 0xDE1B, 0x4EA2
DELAY, REALTIME = f"delay server {DELAY_ID:016x}", f"realtime server {REALTIME_ID:016x}"


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Three sealed hours; the delay server is on machine a, the realtime server on machine b."""
    books = write_books(tmp_path / "data")
    books.close()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "data" / "delay").rename(tmp_path / "a" / "delay")
    (tmp_path / "data" / "realtime").rename(tmp_path / "b" / "realtime")
    yield books


@pytest.fixture
def a(books: Books, tmp_path: Path) -> str:
    del books
    return str(tmp_path / "a")


@pytest.fixture
def b(books: Books, tmp_path: Path) -> str:
    del books
    return str(tmp_path / "b")


@pytest.fixture
def store(a: str, b: str, tmp_path: Path) -> FolderStore:
    """An archive of all hours."""
    together(tmp_path, a, b)
    store = FolderStore(str(tmp_path / "archive"))
    archive_directory(str(tmp_path / "together"), store)
    return store


def together(tmp_path: Path, *machines: str) -> str:
    """One directory with copies of all servers of some machines."""
    for number, machine in enumerate(machines):
        for server in Path(machine).iterdir():
            shutil.copytree(server, tmp_path / "together" / f"{server.name}-{number}")
    return str(tmp_path / "together")


def said(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of an audit."""
    ran = run("audit", *words, "--format", "json")
    return ran.code, json.loads(ran.out or "{}")


def test_a_delay_server_and_its_realtime_server_on_two_machines_are_one_audit(a: str, b: str, tmp_path: Path) -> None:
    report = audited_fleet(a, b)
    expected = audit_directory(together(tmp_path, a, b), now_ms=NOW_MS, findings_limit=None)
    assert report.hours == expected.hours and report.total == expected.total
    assert report.total.dispatched and not report.total.unproven and not report.missing and not report.doubled
    assert report.balanced and report.seals == expected.seals
    code, told = said(a, b)
    assert (code, told["places"], told["data"], told["missing"]) == (0, [a, b], f"{a} {b}", [])


def test_the_missing_directory_of_a_realtime_server_is_named_with_what_nobody_can_judge(a: str, b: str) -> None:
    code, told = said(a)
    (missing,) = told["missing"]
    hours = hour_name(HOUR), hour_name(HOUR + HOURS - 1)
    rows = told["total"]["dispatched"]
    assert (missing["role"], missing["log_id"], missing["rows"]) == ("realtime", f"{REALTIME_ID:016x}", rows)
    assert (missing["first_hour"], missing["last_hour"]) == hours
    assert code == 0 and rows == 30
    shown = run("audit", a).out
    expected = f"nothing but dispatch logs shows that 30 messages (due in {hours[0]} to {hours[1]}) arrived there"
    assert f"the directory of {REALTIME} is not here, so {expected}" in shown
    assert REALTIME not in run("audit", a, b).out


def test_the_missing_directory_of_a_delay_server_is_named_with_what_its_targets_hold(
    a: str, b: str, tmp_path: Path
) -> None:
    other = Books(str(tmp_path / "other"), delay_id=OTHER_DELAY)
    other.send([NOW_MS + HOUR_MS])
    other.see_all(NOW_MS)
    other.close()
    code, told = said(str(tmp_path / "other" / "delay"), b)
    (missing,) = told["missing"]
    assert (missing["role"], missing["log_id"], missing["rows"]) == ("delay", f"{DELAY_ID:016x}", 30)
    assert code == 0 and "nothing shows that it was given 30 messages" in missing["detail"]
    assert not said(a, str(tmp_path / "other" / "delay"), b)[1]["missing"]


def test_two_delay_servers_that_hand_over_to_each_others_machines_balance(a: str, b: str, tmp_path: Path) -> None:
    other = Books(str(tmp_path / "other"), delay_id=OTHER_DELAY, realtime_id=OTHER_REALTIME)
    other.hand_over(other.send([START_MS, START_MS + HOUR_MS]))
    other.checkpoint()
    other.see_all(NOW_MS)
    other.close()
    shutil.move(str(tmp_path / "other" / "realtime"), f"{a}/realtime-other")
    shutil.move(str(tmp_path / "other" / "delay"), f"{b}/delay-other")
    for places in ((a, b), (b, a)):
        code, told = said(*places)
        assert (code, told["total"]["scheduled"], told["total"]["unproven"]) == (0, 50, 0)
        assert [hour["delay_log_id"] for hour in told["hours"]].count(f"{OTHER_DELAY:016x}") == 2


def test_a_copy_is_named_with_both_paths_and_counts_nothing_twice(a: str, b: str, tmp_path: Path) -> None:
    shutil.copytree(a, tmp_path / "copy")
    once, twice = audited_fleet(a, b), audited_fleet(a, b, str(tmp_path / "copy"), b)
    assert replace(twice, places=once.places, doubled=(), lives=once.lives) == once
    copied, again = twice.doubled
    assert copied.startswith(f"{tmp_path}/copy/delay is left out: {a}/delay is of {DELAY}, too")
    assert again == f"{b}/realtime was given twice, and counts once"
    ran = run("audit", a, b, str(tmp_path / "copy"))
    assert ran.code == 0
    assert f"{tmp_path}/copy/delay is left out: {a}/delay is of {DELAY}, too, and a server counts once" in ran.out


def test_of_a_server_and_its_older_copy_the_longer_log_is_taken(a: str, b: str, tmp_path: Path) -> None:
    older = tmp_path / "older"
    now = Books(str(tmp_path / "grown"))
    now.hand_over(now.send([START_MS]))
    now.checkpoint()
    now.see_all(NOW_MS)
    shutil.copytree(now.root, older)
    now.hand_over(now.send([START_MS + 1]))
    now.checkpoint()
    now.see_all(NOW_MS)
    now.close()
    for places in ((now.root, str(older)), (str(older), now.root)):
        report = audited_fleet(*places)
        assert report.total.scheduled == 2 and report.balanced
        assert [line.partition(" ")[0] for line in report.doubled] == [f"{older}/delay", f"{older}/realtime"]


@pytest.mark.parametrize("places", [("a", "gone"), ("a", "empty"), ("empty",)])
def test_a_place_without_servers_is_named_and_exits_with_2(a: str, tmp_path: Path, places: tuple[str, ...]) -> None:
    (tmp_path / "empty").mkdir()
    ran = run("audit", *(str(tmp_path / place) for place in places))
    assert (ran.code, ran.out) == (2, "") and str(tmp_path / places[-1]) in ran.err and a not in ran.err


def test_data_and_places_are_not_given_together(a: str, b: str) -> None:
    ran = run("audit", "--data", a, b)
    assert ran.code == 2 and "--data names the only place" in ran.err
    # A variable of the environment only stands for what nobody has named.
    assert run("audit", a, b, environment={"DELAYD_DATA": f"{a}/delay"}).code == 0


def test_a_half_copied_directory_is_named_with_all_that_is_damaged_there(a: str, b: str) -> None:
    whole = Path(b, "realtime", "message")
    for segment in whole.iterdir():
        segment.unlink()
    ran = run("audit", a, b)
    assert ran.code == 3 and f"{b}/realtime/message" in ran.err
    schedule = next(Path(a, "delay", "schedule").rglob("*.log"))
    schedule.unlink()
    ran = run("audit", b, a)
    assert ran.code == 3 and f"{b}/realtime/message" in ran.err and str(schedule) in ran.err


def _of_newer_version(folder: str) -> Path:
    """The first file of a message log; afterwards its header names another format version, and checks."""
    path = next(Path(folder, "message").glob("*.log"))
    data = bytearray(path.read_bytes())
    data[8:10] = (99).to_bytes(2, "little")
    data[60:64] = crc32c(bytes(data[:60])).to_bytes(4, "little")
    path.write_bytes(data)
    return path


def test_a_machine_of_a_newer_version_is_named_and_the_others_are_audited(a: str, b: str, store: FolderStore) -> None:
    path = _of_newer_version(f"{b}/realtime")
    code, told = said(a, b)
    assert (code, told["places"], told["total"]["dispatched"], told["total"]["unproven"]) == (2, [a], 30, 30)
    (sentence,) = told["refused"]
    assert sentence.startswith(f"{b} is left out: {path} has format version 99 and this delayd reads up to 1")
    assert [each["log_id"] for each in told["missing"]] == [f"{REALTIME_ID:016x}"], "what it would say is missed"
    assert sentence in run("audit", a, b).out
    # Without a schedule there is nothing to audit.
    assert run("audit", b).code == run("audit", b, f"{a}/../nothing").code == 2
    _of_newer_version(f"{a}/delay")
    code, told = said(a, store.uri, b)
    assert (code, told["places"], len(told["refused"]), told["total"]["scheduled"]) == (2, [store.uri], 2, 48)
    ran = run("audit", a, b)
    assert ran.code == 2 and "format version 99" in ran.err and not ran.out


def test_an_archive_of_a_newer_version_is_named_and_the_directories_are_audited(
    a: str, b: str, store: FolderStore
) -> None:
    note = Path(store.uri) / SCHEDULE_KEY.note
    note.write_text(note.read_text().replace('"version": 1', '"version": 99'))
    code, told = said(store.uri, a, b)
    assert (code, told["places"], told["total"]["scheduled"], told["balanced"]) == (2, [a, b], 48, True)
    assert [sentence.startswith(f"{store.uri} is left out: {note}") for sentence in told["refused"]] == [True]


def test_hours_that_retention_removed_are_audited_from_the_archive(
    books: Books, store: FolderStore, a: str, b: str
) -> None:
    removed = remove_first(books, a)
    assert removed.total.scheduled == 32 and removed.deleted_rows == 10
    report = audited_fleet(a, b, store.uri)
    assert (report.total.scheduled, report.total.unproven, report.deleted_rows) == (48, 0, 0)
    assert report.balanced and {seal.state for seal in report.seals} == {SealState.VERIFIED}
    assert report.hours == audited_fleet(store.uri).hours
    assert run("audit", a, b, store.uri).code == 0


def remove_first(books: Books, a: str) -> AuditReport:
    """Retention removes the first hour of the delay server; the audit of what is left."""
    books.delay, books.realtime = f"{a}/delay", f"{a}/../b/realtime"
    for log in ("schedule", "dispatch"):
        books.path_of(log).unlink()
    books.removed.add(HOUR)
    books.publish()
    return audited_fleet(a, f"{a}/../b")


def test_an_hour_in_a_directory_and_in_two_archives_counts_once(
    store: FolderStore, a: str, b: str, tmp_path: Path
) -> None:
    shutil.copytree(store.uri, tmp_path / "again")
    report = audited_fleet(a, b, store.uri, str(tmp_path / "again"))
    alone = audited_fleet(a, b)
    assert report.hours == alone.hours and report.findings == alone.findings and report.seals == alone.seals
    assert report.balanced and report.doubled == (
        f"6 files of {tmp_path}/again are left out: {store.uri} has them, too, and an hour counts once",
    )


def test_an_archive_proves_what_only_the_dispatch_log_says(store: FolderStore, a: str) -> None:
    assert audited_fleet(a).total.unproven == 30
    report = audited_fleet(a, store.uri)
    assert (report.total.unproven, report.total.dispatched, report.missing) == (0, 30, ())
    assert report.balanced


def test_what_the_archive_lacks_of_a_realtime_server_is_read_from_its_directory(store: FolderStore, b: str) -> None:
    for table in ("message", "notes/message"):
        shutil.rmtree(Path(store.uri) / table)
    assert audited_fleet(store.uri).total.unproven == 30
    report = audited_fleet(store.uri, b)
    assert (report.total.scheduled, report.total.unproven, report.missing) == (48, 0, ()) and report.balanced


def test_an_archive_that_says_other_things_than_the_directory_is_named_with_both(
    store: FolderStore, a: str, b: str
) -> None:
    rewrite(store, MESSAGE_KEY, lambda table: table.slice(1))
    code, told = said(a, b, store.uri)
    (fault,) = told["conservation"]
    assert code == 3 and told["total"]["scheduled"] == 48
    assert fault == f"{store.uri}/{SCHEDULE_KEY.file} and {a}/delay differ: dispatched 9 and 10, missing 1 and 0, " + (
        "lost 1 and 0"
    )


def test_an_archive_with_other_seals_than_the_directory_is_broken(
    store: FolderStore, a: str, b: str, tmp_path: Path
) -> None:
    other = Books(str(tmp_path / "other"))
    other.hand_over(other.send([START_MS]))
    other.checkpoint()
    other.seal()
    other.see_all(NOW_MS)
    other.close()
    code, told = said(other.root, store.uri)
    assert code == 3
    (broken,) = told["broken_seals"]
    assert broken["hour"] == hour_name(HOUR) and f"{other.root}/delay has another seal 0" in broken["differs"]
    for number in (1, 2):
        expected = f"{other.root}/delay has no seal {number}, so it is an older copy"
        assert any(fault.endswith(expected) for fault in told["conservation"])


def test_the_gap_of_an_archive_is_none_where_the_directory_has_the_hour(store: FolderStore, a: str, b: str) -> None:
    for name in (SCHEDULE_KEY.file, SCHEDULE_KEY.note, MESSAGE_KEY.file, MESSAGE_KEY.note):
        (Path(store.uri) / name).unlink()
    assert not audited_fleet(store.uri).balanced
    assert audited_fleet(a, b, store.uri).balanced


def test_two_archives_that_differ_are_named_with_both(store: FolderStore, tmp_path: Path) -> None:
    other = FolderStore(str(tmp_path / "again"))
    shutil.copytree(store.uri, other.uri)
    rewrite(other, MESSAGE_KEY, lambda table: table.slice(1))
    code, told = said(store.uri, other.uri)
    (fault,) = told["conservation"]
    assert code == 3 and fault == (
        f"{store.uri}/{MESSAGE_KEY.note} and {other.uri}/{MESSAGE_KEY.note} are of the same hour, and differ"
    )
    assert told["total"]["scheduled"] == 48 and told["total"]["lost"] == 0


def test_a_damaged_file_of_an_archive_leaves_the_hour_to_the_directory(store: FolderStore, a: str, b: str) -> None:
    (Path(store.uri) / SCHEDULE_KEY.file).write_bytes(b"")
    code, told = said(a, b, store.uri)
    (fault,) = told["conservation"]
    assert code == 3 and f"{store.uri}/{SCHEDULE_KEY.file}" in fault
    assert (told["total"]["scheduled"], told["total"]["unproven"], told["total"]["lost"]) == (48, 0, 0)


def test_an_hour_that_a_moved_route_splits_over_two_machines_is_whole_with_both(tmp_path: Path) -> None:
    books = Books(str(tmp_path / "a"))
    first, second, third = books.send([START_MS, START_MS + 1, START_MS + 2])
    books.hand_over([first])
    books.checkpoint()
    books.see_all(NOW_MS)
    # From here on another realtime server has the subject.
    there = Books(str(tmp_path / "b"), realtime_id=OTHER_REALTIME)
    books.target, books.realtime_id, books.realtime, books.stored = there.target, OTHER_REALTIME, there.realtime, 0
    books.hand_over([second, third])
    books.checkpoint()
    books.see_all(NOW_MS)
    books.close()
    shutil.rmtree(tmp_path / "b" / "delay")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    both, alone = audited_fleet(a, b), audited_fleet(a)
    assert both.balanced and (both.total.dispatched, both.total.unproven, both.missing) == (3, 0, ())
    assert (alone.total.unproven, alone.missing[0].log_id, alone.missing[0].rows) == (2, OTHER_REALTIME, 2)


def test_the_delay_server_that_messages_moved_to_is_named_when_it_is_missing() -> None:
    pair = drained()
    both = plan_fleet(pair.disk, (BOOKS,), now_ms=pair.now_ms).audit()
    alone = plan_fleet(pair.disk, (DELAY_FOLDER,), now_ms=pair.now_ms).audit()
    assert [each for each in both.missing if each.role == Role.DELAY] == []
    (missing,) = (each for each in alone.missing if each.role == Role.DELAY)
    assert (missing.log_id, missing.rows) == (pair.taker, 9)
    assert "nothing shows what became of 9 messages" in missing.sentence


def test_a_proved_hour_is_read_once(books: Books, a: str, b: str, tmp_path: Path) -> None:
    file = str(tmp_path / "proved.json")
    code, first = said(a, b, "--proved", file)
    assert (code, first["total"]["scheduled"], first["proved_before"]) == (0, 48, 0)
    # Nobody reads the files of these hours any more: one that was changed is found without --proved only.
    books.delay = f"{a}/delay"
    schedule = books.path_of("schedule")
    data = bytearray(schedule.read_bytes())
    data[-8] ^= 1
    schedule.write_bytes(data)
    code, again = said(a, b, "--proved", file)
    assert (code, again["total"]["scheduled"], again["proved_before"]) == (0, 0, 3)
    assert (
        "3 sealed hours were proved by an earlier audit, and are left out" in run("audit", a, b, "--proved", file).out
    )
    assert run("audit", a, b).code == 3


def test_an_hour_of_an_archive_is_proved_once_too(store: FolderStore, a: str, tmp_path: Path) -> None:
    file = str(tmp_path / "proved.json")
    # Without the realtime server nothing shows what arrived, so nothing is proved.
    assert said(a, "--proved", file)[1]["total"]["unproven"] == 30
    assert said(a, "--proved", file)[1]["proved_before"] == 0
    assert said(store.uri, "--proved", file)[1]["proved_before"] == 0
    for places in ((store.uri,), (a,), (a, store.uri)):
        code, told = said(*places, "--proved", file)
        assert (code, told["proved_before"], told["total"]["scheduled"]) == (0, 3, 0)


def test_an_hour_with_findings_or_another_seal_is_not_taken_for_proved(
    store: FolderStore, a: str, b: str, tmp_path: Path
) -> None:
    file = tmp_path / "proved.json"
    rewrite(store, MESSAGE_KEY, lambda table: table.slice(1))
    assert said(store.uri, "--proved", str(file))[0] == 3
    code, told = said(store.uri, "--proved", str(file))
    assert (code, told["proved_before"], told["total"]["lost"]) == (3, 2, 1)
    kept = json.loads(file.read_text())
    kept["proved"][0][2] = "00" * 32
    file.write_text(json.dumps(kept))
    assert said(a, b, "--proved", str(file))[1]["proved_before"] == 1


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 2, "proved": []}', '{"version": 1, "proved": [[1, 2]]}'])
def test_a_file_that_is_none_of_proved_hours_is_refused_and_kept(a: str, b: str, tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(text)
    ran = run("audit", a, b, "--proved", str(file))
    assert (ran.code, ran.out) == (2, "") and str(file) in ran.err and file.read_text() == text


def test_findings_of_two_machines_are_accepted_beside_their_delay_server(a: str, b: str, tmp_path: Path) -> None:
    books = Books(str(tmp_path / "loss"), delay_id=OTHER_DELAY, realtime_id=OTHER_REALTIME)
    books.send([START_MS, START_MS + 1])
    books.checkpoint()
    books.hand_over([1])
    books.see_all(NOW_MS)
    books.close()
    shutil.move(books.realtime, f"{a}/realtime-other")
    shutil.move(books.delay, f"{b}/delay-other")
    open_secret(a, "")
    assert run("audit", a, b).code == 3
    words = ("--accept", hour_name(HOUR), "--by", "ann", "--reason", "the disk was lost", "--yes")
    assert run("audit", a, b, *words).code == 0
    assert [path.name for path in Path(b, "delay-other", "acceptances").iterdir()]
    ran = run("audit", a, b)
    assert ran.code == 0 and "all of this is accepted" in ran.out
