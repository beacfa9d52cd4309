"""An archive has each sealed hour once, its audit says what that of the directory says, and it names a changed file."""

import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from delayd.errors import BadArgument, BadSetting, DiskFull, NewerFormat, ServerUnavailable
from delayd.hours import hour_name
from delayd.reading.archive.archive_audit import audit_archive
from delayd.reading.archive.archiver import ArchiveReport, archive_directory
from delayd.reading.archive.notes import ArchivedKey
from delayd.reading.archive.store import ArchiveStore, FolderStore, open_store
from delayd.reading.books import audit_directory
from delayd.reading.seals import SealState
from tests.books import DELAY_ID, HOUR, HOUR_MS, REALTIME_ID, START_MS, Books
from tests.unit.cli.runner import run

from .archived import FILES, HOURS, MESSAGE_KEY, NOW_MS, SCHEDULE_KEY, audited, changed, rewrite, tree, write_books

T = TypeVar("T")


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Three sealed hours."""
    books = write_books(tmp_path / "data")
    yield books
    books.close()


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(str(tmp_path / "archive"))


def test_an_audit_of_the_archive_says_what_that_of_the_directory_says(books: Books, store: FolderStore) -> None:
    report = archive_directory(books.root, store)
    assert (len(report.written), report.faults, report.not_sealed) == (FILES, (), 0)
    here, there = audit_directory(books.root, now_ms=NOW_MS, findings_limit=None), audited(store)
    assert there.hours == here.hours and there.findings == here.findings and there.seals == here.seals
    assert {seal.state for seal in there.seals} == {SealState.VERIFIED}
    assert there.balanced == here.balanced and not there.faults


def test_what_unbalances_the_books_unbalances_those_of_the_archive(books: Books, store: FolderStore) -> None:
    begin = START_MS + HOURS * HOUR_MS
    lost, early, doubled = books.send([begin, begin + 1, begin + 2], subjects=("orders",))
    books.hand_over([early], claimed_ms=begin - 50)
    books.hand_over([doubled])
    books.hand_over([doubled], record=False)
    books.record([(HOUR + HOURS, books.part([lost], begin, target_offset=88))])
    books.checkpoint()
    books.seal(HOUR + HOURS)
    books.see_realtime(NOW_MS + HOUR_MS)
    archive_directory(books.root, store)
    here, there = audit_directory(books.root, now_ms=NOW_MS + HOUR_MS, findings_limit=None), audited(store)
    assert here.total.lost and here.total.early and here.total.duplicate
    assert there.hours == here.hours and there.findings == here.findings


def test_a_second_run_writes_nothing_and_a_later_one_adds_what_was_sealed_since(
    books: Books, store: FolderStore
) -> None:
    archive_directory(books.root, store)
    before = tree(store)
    again = archive_directory(books.root, store)
    assert (again.written, again.archived_before, again.faults) == ((), FILES, ()) and tree(store) == before
    books.hand_over(books.send([START_MS + HOURS * HOUR_MS]))
    books.checkpoint()
    assert archive_directory(books.root, store).not_sealed == 1
    books.seal(HOUR + HOURS)
    later = archive_directory(books.root, store)
    assert [note.key.hour for note in later.written] == [HOUR + HOURS] * 2
    assert {name: data for name, data in tree(store).items() if name in before} == before


def test_each_file_says_what_it_is_and_its_note_has_the_seal(books: Books, store: FolderStore) -> None:
    archive_directory(books.root, store)
    name = hour_name(HOUR)
    folder = f"day={name[:4]}-{name[4:6]}-{name[6:8]}/hour={name}/server={DELAY_ID:016x}"
    assert SCHEDULE_KEY.file == f"schedule/{folder}/{DELAY_ID:016x}.parquet"
    said = json.loads((Path(store.uri) / SCHEDULE_KEY.note).read_text())
    seal = books.seals[0]
    assert (said["rows"], said["seal"]["sha256"]) == (seal.facts.rows, seal.sha256.hex())
    assert said["seal"]["previous_sha256"] == "00" * 32
    first = pq.read_table(f"{store.uri}/schedule").to_pylist()[0]
    assert (first["sequence"], first["subject"], first["deliver_at_ms"], first["outcome"]) == (
        *(1, "orders", START_MS, "DISPATCHED"),
    )
    assert first["target"] == f"{REALTIME_ID:016x}" and first["server"] == f"{DELAY_ID:016x}"
    moved = [row for row in pq.read_table(f"{store.uri}/schedule").to_pylist() if row["reason"] == "MOVED"]
    assert moved[0]["other_sequence"] == 3 and moved[0]["target"] is None


class Failing:
    """A store that fails at one of its calls, before or after it has done what was asked."""

    def __init__(self, store: ArchiveStore, fails_at: int, *, done: bool) -> None:
        self.uri = store.uri
        self.calls = 0
        self._store, self._fails_at, self._done = store, fails_at, done

    def names(self, folder: str) -> Iterator[str]:
        return self._store.names(folder)

    def create(self, name: str, file: Path) -> bool:
        return self._call(lambda: self._store.create(name, file))

    def fetch(self, name: str, folder: Path) -> Path:
        return self._call(lambda: self._store.fetch(name, folder))

    def scratch(self) -> AbstractContextManager[Path]:
        return self._store.scratch()

    def _call(self, ask: Callable[[], T]) -> T:
        self.calls += 1
        if self.calls == self._fails_at:
            if self._done:
                ask()
            raise ServerUnavailable("the store is away")
        return ask()


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_store_that_fails_anywhere_leaves_whole_files_and_the_next_run_completes_them(
    books: Books, tmp_path: Path, done: bool
) -> None:
    whole = FolderStore(str(tmp_path / "whole"))
    counted = Failing(whole, 0, done=done)
    archive_directory(books.root, counted)
    expected = tree(whole)
    for fails_at in range(1, counted.calls + 1):
        store = FolderStore(str(tmp_path / f"archive-{fails_at}"))
        with pytest.raises(ServerUnavailable):
            archive_directory(books.root, Failing(store, fails_at, done=done))
        left = tree(store)
        assert {name: expected[name] for name in left} == left
        if any(name.startswith("notes/schedule") for name in left):
            assert not audited(store).broken_seals and not audited(store).faults
        report = archive_directory(books.root, store)
        assert not report.faults and tree(store) == expected
        shutil.rmtree(store.uri)


def test_a_file_without_its_note_is_named_and_counts_when_it_is_the_same(books: Books, store: FolderStore) -> None:
    archive_directory(books.root, store)
    (Path(store.uri) / MESSAGE_KEY.note).unlink()
    (unnoted,) = audited(store).unnoted
    assert unnoted == f"{store.uri}/{MESSAGE_KEY.file}"
    report = archive_directory(books.root, store)
    assert [note.key for note in report.found] == [MESSAGE_KEY] and not report.written and not report.faults
    assert not audited(store).unnoted


def test_another_archive_of_the_same_hours_is_an_error_that_names_both(
    books: Books, store: FolderStore, tmp_path: Path
) -> None:
    other = Books(str(tmp_path / "other"))
    for hour in range(HOURS):
        other.hand_over(other.send([START_MS + hour * HOUR_MS]))
        other.checkpoint()
        other.seal(HOUR + hour)
    other.close()
    archive_directory(books.root, store)
    for key in (SCHEDULE_KEY, MESSAGE_KEY):
        (Path(store.uri) / key.note).unlink()
    before = tree(store)
    report = archive_directory(other.root, store)
    schedule, message = report.faults[0], [each for each in report.faults if MESSAGE_KEY.file in each]
    assert f"{store.uri}/{SCHEDULE_KEY.file} differs from {other.root}/delay/schedule/" in schedule
    assert "rows 16 instead of 1" in schedule
    assert not message, "a realtime server's rows are compared only for hours whose schedule is in the archive"
    assert tree(store) == before


def test_a_realtime_server_with_other_rows_than_the_archive_is_named(books: Books, store: FolderStore) -> None:
    archive_directory(books.root, store)
    changed = pa.array([9] * 10, pa.int64())
    rewrite(store, MESSAGE_KEY, lambda table: table.set_column(table.schema.get_field_index("epoch"), "epoch", changed))
    (Path(store.uri) / MESSAGE_KEY.note).unlink()
    (fault,) = archive_directory(books.root, store).faults
    assert f"{store.uri}/{MESSAGE_KEY.file} differs from {books.root}/realtime" in fault and "other rows" in fault


def test_a_realtime_server_whose_retention_went_on_finds_its_file_the_same(books: Books, store: FolderStore) -> None:
    archive_directory(books.root, store)
    before = tree(store)
    note = json.loads(before[MESSAGE_KEY.note])
    # The other archiver began to read at 0; this one sees a log that begins later only by the file that is there.
    (Path(store.uri) / MESSAGE_KEY.note).unlink()
    assert archive_directory(books.root, store).found[0].start_offset == note["start_offset"]
    assert tree(store) == before


def test_hours_that_retention_removed_keep_their_seals_in_the_archive(books: Books, store: FolderStore) -> None:
    for log in ("schedule", "dispatch"):
        books.path_of(log).unlink()
    books.removed.add(HOUR)
    books.publish()
    report = archive_directory(books.root, store)
    assert report.removed == (SCHEDULE_KEY,) and not report.faults
    assert SCHEDULE_KEY.file not in tree(store) and SCHEDULE_KEY.note in tree(store)
    there = audited(store)
    assert [seal.state for seal in there.seals] == [SealState.DELETED, SealState.VERIFIED, SealState.VERIFIED]
    assert there.deleted_rows == 10 and there.balanced
    assert archive_directory(books.root, store).archived_before == FILES


def test_a_deleted_hour_of_which_a_target_held_others_is_named(books: Books, store: FolderStore) -> None:
    test_hours_that_retention_removed_keep_their_seals_in_the_archive(books, store)
    rewrite(store, MESSAGE_KEY, lambda table: pa.concat_tables([table, *[table.slice(9)] * 3]))
    (fault,) = audited(store).faults
    assert "held 13 messages of it" in fault.detail


def test_an_hour_whose_rows_are_not_those_of_its_seal_is_not_archived(books: Books, store: FolderStore) -> None:
    first, second, third = books.seals
    books.write_seals([first, second, third._replace(facts=third.facts._replace(body_bytes=1))])
    report = archive_directory(books.root, store)
    assert len(report.written) == FILES - 2
    assert len(report.faults) == 1 and books.path_of("schedule", HOUR + 2).name in report.faults[0]
    assert "was not archived" in report.faults[0]


def test_a_damaged_hour_is_named_and_the_others_are_archived(books: Books, store: FolderStore) -> None:
    path = books.path_of("schedule", HOUR + 1)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    report = archive_directory(books.root, store)
    assert len(report.faults) == 1 and str(path) in report.faults[0]
    assert {note.key.hour for note in report.written} == {HOUR, HOUR + 2}
    (fault,) = audited(store).faults
    assert "the hour of seal 1 is missing, and later ones are there" in fault.detail
    assert run("archive", "--data", books.root, "--to", store.uri).code == 3


# What somebody did to the files: each is named by path.


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [remove, cut, flip, empty])
@pytest.mark.parametrize("key", [SCHEDULE_KEY, MESSAGE_KEY], ids=["schedule", "message"])
def test_a_file_that_is_gone_or_another_is_named_by_its_path(
    books: Books, store: FolderStore, key: ArchivedKey, harm: Callable[[Path], None]
) -> None:
    archive_directory(books.root, store)
    harm(Path(store.uri) / key.file)
    (fault,) = audited(store).faults
    assert f"{store.uri}/{key.file}: " in fault.detail and key.note in fault.detail
    ran = run("audit", "--data", store.uri)
    assert ran.code == 3 and key.file in ran.out


@pytest.mark.parametrize("harm", [cut, flip, empty])
@pytest.mark.parametrize("key", [SCHEDULE_KEY, MESSAGE_KEY], ids=["schedule", "message"])
def test_a_note_that_does_not_check_is_named_by_its_path(
    books: Books, store: FolderStore, key: ArchivedKey, harm: Callable[[Path], None]
) -> None:
    archive_directory(books.root, store)
    harm(Path(store.uri) / key.note)
    report = audited(store)
    named = [*(fault.detail for fault in report.faults), *(seal.differs for seal in report.broken_seals)]
    assert any(f"{store.uri}/{key.note}" in detail or key.file in detail for detail in named), named


def test_a_note_and_its_file_that_are_gone_leave_a_gap_in_the_chain(books: Books, store: FolderStore) -> None:
    archive_directory(books.root, store)
    for name in (SCHEDULE_KEY.file, SCHEDULE_KEY.note):
        (Path(store.uri) / name).unlink()
    details = [fault.detail for fault in audited(store).faults]
    assert any("the hour of seal 0 is missing" in detail for detail in details)
    assert any(f"{MESSAGE_KEY.note}: the archive has no schedule of this hour" in detail for detail in details)


@pytest.mark.parametrize("key", [SCHEDULE_KEY, MESSAGE_KEY], ids=["schedule", "message"])
def test_a_file_of_another_hour_or_server_is_named(books: Books, store: FolderStore, key: ArchivedKey) -> None:
    archive_directory(books.root, store)
    other = Path(store.uri) / key._replace(hour=HOUR + 1).file
    with pq.ParquetFile(other) as file:
        table = file.read()
    rewrite(store, key, lambda _: table)
    (fault,) = audited(store).faults
    assert f"{store.uri}/{key.file}: its delayd.hour is {hour_name(HOUR + 1)}" in fault.detail


def test_a_newer_version_is_refused_with_exit_2(books: Books, store: FolderStore) -> None:
    archive_directory(books.root, store)
    newer = {b"delayd.version": b"3"}
    rewrite(
        store, SCHEDULE_KEY, lambda table: table.replace_schema_metadata({**(table.schema.metadata or {}), **newer})
    )
    with pytest.raises(NewerFormat, match=SCHEDULE_KEY.file):
        audited(store)
    assert run("audit", "--data", store.uri).code == 2
    note = Path(store.uri) / SCHEDULE_KEY.note
    note.write_text(note.read_text().replace('"version": 1', '"version": 3'))
    with pytest.raises(NewerFormat, match=SCHEDULE_KEY.note):
        audited(store)


SEALED_COLUMNS = (
    *("sequence", "subject", "deliver_at_ms", "body_bytes", "content_hash", "outcome", "reason", "target"),
    *("claimed_at_ms", "target_appended_at_ms", "target_offset", "epoch", "batch_id", "attempt"),
    "outcome_content_hash",
)
HELD_COLUMNS = (
    *("sequence", "subject", "deliver_at_ms", "claimed_at_ms", "appended_at_ms", "offset", "epoch", "batch_id"),
    "content_hash",
)


@pytest.mark.parametrize("column", SEALED_COLUMNS)
def test_a_value_of_a_schedule_that_was_changed_with_its_note_breaks_the_seal(
    books: Books, store: FolderStore, column: str
) -> None:
    archive_directory(books.root, store)
    rewrite(store, SCHEDULE_KEY, changed(column))
    report = audited(store)
    assert not report.balanced
    assert [SCHEDULE_KEY.file in seal.differs for seal in report.broken_seals] == [True]


@pytest.mark.parametrize("column", HELD_COLUMNS)
def test_a_value_that_a_target_held_and_that_was_changed_with_its_note_is_a_finding(
    books: Books, store: FolderStore, column: str
) -> None:
    archive_directory(books.root, store)
    rewrite(store, MESSAGE_KEY, changed(column))
    report = audited(store)
    assert not report.total.balanced and not report.broken_seals


def test_a_row_that_is_left_out_of_an_archive_is_lost(books: Books, store: FolderStore) -> None:
    archive_directory(books.root, store)
    rewrite(store, MESSAGE_KEY, lambda table: table.slice(1))
    assert audited(store).total.lost == 1


def test_a_seal_that_was_changed_breaks_the_chain_behind_it(books: Books, store: FolderStore) -> None:
    archive_directory(books.root, store)
    note = Path(store.uri) / SCHEDULE_KEY.note
    said = json.loads(note.read_text())
    said["seal"]["dead"] = 1
    note.write_bytes(json.dumps(said, indent=1).encode() + b"\n")
    assert any(SCHEDULE_KEY.note in fault.detail for fault in audited(store).faults), "its digest does not fit any more"
    said["seal"]["sha256"] = books.seals[0]._replace(facts=books.seals[0].facts._replace(dead=1)).sha256.hex()
    note.write_bytes(json.dumps(said, indent=1).encode() + b"\n")
    first, second = audited(store).broken_seals
    assert "dead 0 instead of 1" in first.differs and second.differs.startswith("the seal before it is not the one")


# Bad input.


def test_folders_without_servers_and_without_an_archive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="holds no messages of delayd"):
        archive_directory(str(tmp_path), FolderStore(str(tmp_path / "archive")))
    assert not (tmp_path / "archive").exists()
    with pytest.raises(BadArgument, match="holds no archive"):
        audit_archive(FolderStore(str(tmp_path / "archive")), now_ms=NOW_MS)
    assert not (tmp_path / "archive").exists()
    for uri in ("ftp://host/books", "http://host/books"):
        with pytest.raises(BadArgument, match="no place of an archive"):
            open_store(uri)


def test_a_copy_without_the_delay_server_archives_what_its_realtime_server_held(
    books: Books, store: FolderStore, tmp_path: Path
) -> None:
    copy = tmp_path / "realtime"
    shutil.copytree(books.realtime, copy)
    assert archive_directory(str(copy), store) == ArchiveReport()
    archive_directory(books.delay, store)
    assert audited(store).total.unproven == 10 * HOURS
    assert len(archive_directory(str(copy), store).written) == HOURS
    here = audit_directory(books.root, now_ms=NOW_MS)
    assert audited(store).hours == here.hours and audited(store).total.unproven == 0


def test_a_realtime_server_that_held_nothing_of_an_hour_says_so(
    books: Books, store: FolderStore, tmp_path: Path
) -> None:
    other = Books(str(tmp_path / "other"))
    other.see_realtime(NOW_MS)
    other.close()
    archive_directory(books.delay, store)
    assert not archive_directory(other.realtime, store).written
    assert not [name for name in tree(store) if name.startswith("message")]
    # Its log is known to hold none of them, so all that were handed over to it are lost.
    assert audited(store).total.lost == 10 * HOURS


def test_a_full_disk_is_named_and_leaves_whole_files(
    books: Books, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("delayd.reading.archive.archiver.write_message", full)
        with pytest.raises(DiskFull, match=store.uri):
            archive_directory(books.root, store)
    assert {name.partition("/")[0] for name in tree(store)} == {"schedule", "notes"}
    assert archive_directory(books.root, store).archived_before == HOURS and audited(store).balanced


def test_hours_can_be_chosen_and_the_chain_is_followed_all_the_same(books: Books, store: FolderStore) -> None:
    archive_directory(books.root, store)
    report = audit_archive(store, now_ms=NOW_MS, hours=range(HOUR + 1, HOUR + 2))
    assert [summary.hour for summary in report.hours] == [HOUR + 1]
    assert [seal.state for seal in report.seals] == [SealState.UNREAD, SealState.VERIFIED, SealState.UNREAD]


def test_obstore_or_pyarrow_that_is_missing_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.reading.tables.find_spec", lambda name: None)
    with pytest.raises(BadSetting, match=r"an archive needs pyarrow: pip install 'delayd\[archive\]'"):
        open_store("books")


def test_the_commands_tell_what_they_did(books: Books, store: FolderStore) -> None:
    ran = run("archive", "--data", books.root, "--to", store.uri)
    assert ran.code == 0 and "6 files archived, 0 were before" in ran.out
    ran = run("archive", "--data", books.root, "--to", f"file://{store.uri}", "--format", "json")
    assert (ran.code, json.loads(ran.out), ran.err) == (0, [], "0 files archived, 6 were before\n")
    ran = run("audit", "--data", store.uri, "--format", "json")
    said: Mapping[str, object] = json.loads(ran.out)
    assert ran.code == 0 and said["balanced"] is True and said["unnoted"] == []
    ran = run("audit", "--data", f"file://{store.uri}", "--groups")
    assert ran.code == 2 and "need a data directory" in ran.err
