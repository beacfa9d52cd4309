"""What groups have done with an hour is archived once all of them have ended with it, and never before."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from delayd.log.consume import ConsumeTail, append_entries, consume_place
from delayd.log.control import Record, encode_records
from delayd.log.group import GroupKind
from delayd.log.pull import PullEntry, PullOp, encode_entries
from delayd.log.segment import FileKind
from delayd.machine.disk import RealDisk
from delayd.reading.archive.archiver import archive_directory
from delayd.reading.archive.notes import CONSUMPTION, MESSAGE, ArchivedKey
from delayd.reading.archive.rows import read_groups
from delayd.reading.archive.store import FolderStore
from delayd.reading.books import audit_directory
from delayd.reading.consumption import GroupBooks, hour_runs, sum_groups
from delayd.reading.files.directory import Directory, Role
from delayd.reading.files.stored_groups import segment_bases
from delayd.reading.files.target_index import TargetIndexer
from delayd.reading.views.planning import plan_view
from delayd.reading.views.query import ViewQuery, types_of
from tests.books import DELAY_ID, HOUR, HOUR_MS, REALTIME_ID, START_MS, Books
from tests.tamper.honest import honest
from tests.tamper.in_spark import write_tree
from tests.unit.cli.runner import run

from .archived import FILES, HOURS, MESSAGE_KEY, NOW_MS, audited, rewrite, tree, write_books

PER_HOUR = 6  # Messages of `orders` in each hour; `bills` has four.
SEGMENT_BYTES = (4_096, 65_536)  # What a simulated server draws its setting from.
KEY = MESSAGE_KEY._replace(table=CONSUMPTION)


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    books = write_books(tmp_path / "data", segment_bytes=1)
    yield books
    books.close()


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(str(tmp_path / "archive"))


def pull(first: int, count: int, consume: int, attempt: int = 1, group: int = 1) -> PullEntry:
    return PullEntry(PullOp.PULL, attempt, group, 77, first, consume, count, START_MS, 1_000)


def end(op: PullOp, first: int, count: int, after_ms: int = 0, group: int = 1) -> PullEntry:
    return PullEntry(op, 0, group, 77, first, 0, count, START_MS + after_ms)


def say(books: Books, *entries: PullEntry) -> None:
    """More entries of the pull log."""
    log = books._own_log("pull", FileKind.PULL)
    books._append(log, GroupKind.DATA, encode_entries(entries), START_MS, 0, len(entries))
    log.close()


def two_hours_done(books: Books) -> None:
    """Group billing has acknowledged all of the first two hours, one of them after it was given again."""
    books.consume(
        "orders",
        "billing",
        [
            pull(0, 10, 0),  # The second hour begins in the midst of what was pulled.
            end(PullOp.ACK, 0, 7, 30),
            end(PullOp.NACK, 7, 1),
            end(PullOp.ACK, 8, 2, 50),
            pull(10, 1, 7, attempt=2),
            pull(11, 8, 10),
            end(PullOp.ACK, 10, 3, 70),
        ],
    )


def groups_of(store: FolderStore, hour: int = HOUR) -> list[GroupBooks] | None:
    key = KEY._replace(hour=hour)
    if not (Path(store.uri) / key.file).exists():
        return None
    return read_groups(key.file, key, Path(store.uri) / key.file)


def group(hour: int, **figures: int) -> GroupBooks:
    nothing = dict.fromkeys(("redelivered", "given_back", "sent_back", "lapsed", "outstanding", "gaps"), 0)
    return GroupBooks(REALTIME_ID, 1, "orders", "billing", **{**nothing, **figures})


def rows_of(*places: str) -> list[dict[str, object]]:
    query = ViewQuery("consumption", tuple(types_of("consumption")))
    return [row for part in plan_view(query, places, 2, NOW_MS) for batch in part.read() for row in batch.to_pylist()]


def test_an_hour_is_archived_when_its_groups_have_ended_with_it_and_the_others_wait(
    books: Books, store: FolderStore
) -> None:
    two_hours_done(books)
    report = archive_directory(books.root, store)
    assert (len(report.written), report.not_consumed, report.not_told, report.faults) == (FILES + 2, 1, 0, ())
    assert groups_of(store) == [
        group(HOUR, pulled=6, acknowledged=6, ack_ms_total=180, ack_ms_max=30),
    ]
    assert groups_of(store, HOUR + 1) == [
        group(HOUR, pulled=7, redelivered=1, acknowledged=6, given_back=1, ack_ms_total=340, ack_ms_max=70),
    ]
    assert groups_of(store, HOUR + 2) is None
    before = tree(store)
    say(books, end(PullOp.ACK, 13, 6, 90))
    later = archive_directory(books.root, store)
    assert [note.key for note in later.written] == [KEY._replace(hour=HOUR + 2)] and not later.not_consumed
    assert {name: data for name, data in tree(store).items() if name in before} == before
    again = archive_directory(books.root, store)
    assert (again.written, again.archived_before) == ((), FILES + HOURS)
    assert audited(store).balanced and not audited(store).unnoted


def test_what_is_archived_of_all_hours_adds_up_to_what_the_log_says(books: Books, store: FolderStore) -> None:
    two_hours_done(books)
    say(books, end(PullOp.ACK, 13, 6, 90))
    archive_directory(books.root, store)
    there = rows_of(store.uri)
    assert there == rows_of(books.root) == rows_of(books.root, store.uri) and len(there) == 1
    assert (there[0]["consumers"], there[0]["pulled"], there[0]["acknowledged"]) == ("billing", 19, 18)
    assert rows_of(store.uri, books.delay) == there
    shown = run("sql", "select pulled from consumption", store.uri, "--format", "json")
    assert json.loads(shown.out) == [{"pulled": 19}]


def test_a_group_that_has_not_come_to_an_hour_holds_it_up(books: Books, store: FolderStore) -> None:
    two_hours_done(books)
    books.consume("bills", "audit", [pull(19, 4, 0, group=2), end(PullOp.ACK, 19, 4, group=2)], group_id=2)
    report = archive_directory(books.root, store)
    # Both have ended with the first hour only.
    assert report.not_consumed == 2 and groups_of(store, HOUR + 1) is None
    found = groups_of(store)
    assert found is not None and [(each.subject, each.pulled) for each in found] == [("bills", 4), ("orders", 6)]
    ran = run("archive", "--data", books.root, "--to", store.uri)
    assert ran.code == 0 and "groups still work on 2 hours: their consumption is not archived yet" in ran.out


@pytest.mark.parametrize("group_id", [2, 3])
def test_a_group_that_was_never_given_anything_holds_up_all_hours_of_its_subject(
    books: Books, store: FolderStore, group_id: int
) -> None:
    two_hours_done(books)
    record: Record = {"type": "group", "group_id": group_id, "subject": "orders", "group": "late"}
    log = books._own_log("pull", FileKind.PULL)
    books._append(log, GroupKind.CONTROL, [encode_records([record])], START_MS)
    log.close()
    assert archive_directory(books.root, store).not_consumed == HOURS and groups_of(store) is None


def test_what_the_log_has_lost_is_not_archived_and_named(books: Books, store: FolderStore) -> None:
    two_hours_done(books)
    (Path(books.realtime) / "pull" / sorted(path.name for path in Path(books.realtime, "pull").iterdir())[0]).unlink()
    report = archive_directory(books.root, store)
    assert (report.not_told, report.not_consumed, report.faults) == (HOURS, 0, ()) and groups_of(store) is None
    # That is told once: nothing brings the beginning back, and so later runs need not read anything.
    assert f"{FILES + HOURS} were before" in run("archive", "--data", books.root, "--to", store.uri).out
    other = f"{store.uri}-other"
    told = run("archive", "--data", books.root, "--to", other).out
    assert "the consumption of 3 hours can't be told any more: the logs have lost their beginning" in told
    assert audited(store).balanced and not rows_of(store.uri)


def test_an_hour_that_no_group_was_given_anything_of_is_done(books: Books, store: FolderStore) -> None:
    two_hours_done(books)
    say(books, end(PullOp.ACK, 13, 6, 90))
    books.hand_over(books.send([START_MS + HOURS * HOUR_MS], subjects=("unread",)))
    books.checkpoint()
    books.seal(HOUR + HOURS)
    books.see_realtime(NOW_MS + HOUR_MS)
    report = archive_directory(books.root, store)
    assert (report.not_consumed, report.not_told) == (0, 0) and groups_of(store, HOUR + HOURS) is None
    assert archive_directory(books.root, store).archived_before == FILES + 2 + HOURS + 1
    assert audited(store).balanced


def test_a_damaged_pull_log_is_named_and_the_messages_are_archived(books: Books, store: FolderStore) -> None:
    two_hours_done(books)
    path = sorted(Path(books.realtime, "pull").iterdir())[0]
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    report = archive_directory(books.root, store)
    assert [str(path) in fault for fault in report.faults] == [True] and len(report.written) == FILES
    assert groups_of(store) is None and run("archive", "--data", books.root, "--to", store.uri).code == 3


@pytest.mark.parametrize("consume_log", [False, True])
def test_after_retention_only_hours_that_are_whole_are_archived(
    books: Books, store: FolderStore, consume_log: bool
) -> None:
    two_hours_done(books)
    say(books, end(PullOp.ACK, 13, 6, 90))
    disk, directory = RealDisk(), Directory(books.realtime, Role.REALTIME, REALTIME_ID)
    if consume_log:
        indexer = TargetIndexer(disk, [directory], [])
        indexer.scan(newer=False)
        _write_consume_logs(books, indexer)
    # What realtime servers held is archived before the groups have ended.
    for path in Path(books.realtime, "pull").iterdir():
        path.rename(path.with_suffix(".away"))
    archive_directory(books.root, store)
    for path in Path(books.realtime, "pull").iterdir():
        path.rename(path.with_suffix(".log"))
    log = books.target
    log.remove(log.detach_below(segment_bases(disk, log.place)[-6]))  # Some of the second hour is left.
    report = archive_directory(books.root, store)
    assert report.faults == () and groups_of(store) is None and groups_of(store, HOUR + 1) is None
    if consume_log:
        found = groups_of(store, HOUR + 2)
        assert found is not None and [(each.pulled, each.acknowledged, each.gaps) for each in found] == [(6, 6, 0)]
        assert report.not_told == 2
    else:
        assert report.not_told == HOURS and groups_of(store, HOUR + 2) is None


def _write_consume_logs(books: Books, indexer: TargetIndexer) -> None:
    index = indexer.index()
    for number in range(len(index.subjects)):
        own = index.batches[index.batches["subject"] == number]
        entries = [(int(each["offset"]) << 16) | row for each in own for row in range(int(each["count"]))]
        place = consume_place(books.realtime, REALTIME_ID, number + 1)
        append_entries(RealDisk(), place, ConsumeTail(), np.array(entries, np.uint64), START_MS, [])


def test_figures_that_do_not_add_up_and_files_that_are_gone_are_named(books: Books, store: FolderStore) -> None:
    two_hours_done(books)
    archive_directory(books.root, store)

    def change(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        rows[0]["acknowledged"] += 1
        return pa.Table.from_pylist(rows, table.schema)

    rewrite(store, KEY, change)
    (Path(store.uri) / KEY._replace(hour=HOUR + 1).file).unlink()
    first, second = sorted(fault.detail for fault in audited(store).faults)
    assert first == f"{store.uri}/{KEY.file}: group billing of orders was given 6 messages, and 7 became of them"
    assert f"{KEY._replace(hour=HOUR + 1).file}: the file is gone" in second
    assert run("audit", "--data", store.uri).code == 3


def test_of_servers_own_logs_each_message_was_ended_once_by_each_group(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = Random.choice

    def whole(random: Random, values: Sequence[object]) -> object:
        return 1 << 20 if tuple(values) == SEGMENT_BYTES else choice(random, values)

    monkeypatch.setattr(Random, "choice", whole)  # Segments of pull logs that are not removed.
    disk, _ = honest.__wrapped__()
    data = write_tree(disk, tmp_path / "own")
    report = archive_directory(data, store)
    keys = [note.key for note in report.written if note.key.table == CONSUMPTION]
    assert len(keys) > 9 and report.not_consumed and not report.not_told and not report.faults
    archived: list[GroupBooks] = []
    for key in keys:
        held = key._replace(table=MESSAGE)
        subjects = pq.read_table(Path(store.uri) / held.file).column("subject").to_pylist()
        found = read_groups(key.file, key, Path(store.uri) / key.file)
        for books in found:
            assert books.acknowledged + books.sent_back + books.gaps == subjects.count(books.subject) > 0
            assert not books.outstanding
        archived += found
    logged = {(books.log_id, books.subject): books for books in audit_directory(data, now_ms=NOW_MS).groups}
    for books in sum_groups(archived):
        log = logged[books.log_id, books.subject]
        assert books.redelivered and books.pulled <= log.pulled and books.acknowledged <= log.acknowledged


def test_sums_are_by_group() -> None:
    one, two = group(HOUR, pulled=2, acknowledged=2, ack_ms_max=7), group(HOUR, pulled=3, acknowledged=3, ack_ms_max=4)
    other = GroupBooks(9, 1, "orders", "billing", *(0 for _ in range(8)))
    expected: Sequence[GroupBooks] = [other, group(HOUR, pulled=5, acknowledged=5, ack_ms_max=7)]
    assert sum_groups([one, other, two]) == expected


def test_an_empty_server_has_no_runs(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.close()
    disk, directory = RealDisk(), Directory(books.realtime, Role.REALTIME, REALTIME_ID)
    indexer = TargetIndexer(disk, [directory], [])
    indexer.scan(newer=False)
    assert hour_runs(disk, directory, indexer.index()) == {}
    assert ArchivedKey(CONSUMPTION, HOUR, REALTIME_ID, DELAY_ID) == KEY
