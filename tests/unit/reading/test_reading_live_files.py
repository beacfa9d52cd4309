"""Readers of files that grow, are cut or go away beneath them."""

import shutil
import threading
from pathlib import Path

import pytest

from delayd.errors import BadArgument, DamagedData
from delayd.log.log import LogPlace
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.machine.disk import RealDisk
from delayd.reading.books import audit_directory
from delayd.reading.files.directory import Role, find_directories, take_snapshot
from delayd.reading.files.groups import LogMoved, TornTail, log_size, read_log
from delayd.reading.files.origins import read_body, read_hour, read_tail
from delayd.testing.disk import Faults, MemoryDisk
from tests.books import DELAY_ID, HOUR, HOUR_MS, REALTIME_ID, START_MS, Books

DISK = RealDisk()


def place_of(books: Books) -> LogPlace:
    return LogPlace(f"{books.delay}/message", FileKind.MESSAGE, DELAY_ID)


def sequences(books: Books, stop: int | None = None, torn: list[TornTail] | None = None) -> list[int]:
    place = place_of(books)
    until = log_size(books.disk, place) if stop is None else stop
    groups = read_log(books.disk, place, 0, until, [] if torn is None else torn)
    return [group.header.base_sequence for group in groups]


def test_directories_are_known_by_their_names_and_file_headers(tmp_path: Path) -> None:
    Books(str(tmp_path)).close()
    (tmp_path / "meta").mkdir()
    found = find_directories(DISK, f"{tmp_path}/")
    assert [(directory.role, directory.log_id) for directory in found] == [
        (Role.DELAY, DELAY_ID),
        (Role.REALTIME, REALTIME_ID),
    ]
    assert find_directories(DISK, found[0].path) == found[:1]


def test_schedule_logs_without_a_message_log_are_damage(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.send([START_MS])
    books.checkpoint()
    books.close()
    shutil.rmtree(f"{books.delay}/message")
    with pytest.raises(DamagedData, match="the message log is gone"):
        find_directories(DISK, books.root)


def test_an_audit_of_realtime_logs_alone_is_refused(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.close()
    with pytest.raises(BadArgument, match="no delay server's directory"):
        audit_directory(books.realtime, now_ms=START_MS)


def test_rule_L2_a_group_that_nobody_called_durable_is_handed_out_after_a_sync_by_the_reader() -> None:
    books = Books("/data", MemoryDisk())
    books.send([START_MS])
    books.messages.append([], START_MS)
    disk = books.disk
    assert isinstance(disk, MemoryDisk)
    before = disk.syncs
    assert sequences(books) == [1] and disk.syncs == before + 1


def test_rule_L2_nothing_is_handed_out_when_that_sync_fails() -> None:
    books = Books("/data", MemoryDisk())
    books.send([START_MS])
    disk = books.disk
    assert isinstance(disk, MemoryDisk)
    disk.faults = Faults(fail_sync_at=disk.syncs + 1)
    with pytest.raises(Exception, match=r"sync of .* failed"):
        sequences(books)


def test_groups_behind_the_stop_are_left_out(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.send([START_MS])
    stop = books.messages.end
    books.send([START_MS])
    assert sequences(books, stop) == [1] and sequences(books, stop + 8) == [1] and sequences(books) == [1, 2]


def test_a_tail_that_is_cut_short_is_reported_and_the_groups_before_it_read(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.send([START_MS])
    books.send([START_MS])
    (path,) = Path(f"{books.delay}/message").iterdir()
    path.write_bytes(path.read_bytes()[:-16])
    torn: list[TornTail] = []
    assert sequences(books, torn=torn) == [1]
    assert [(tail.path, tail.reason) for tail in torn] == [(str(path), "the batches are cut short")]
    assert audit_directory(books.root, now_ms=START_MS).torn == (torn[0],)


def test_damage_below_a_durable_offset_is_an_error_with_path_and_position(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    for _ in range(3):
        books.send([START_MS])
    (path,) = Path(f"{books.delay}/message").iterdir()
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData) as error:
        audit_directory(books.root, now_ms=START_MS)
    assert error.value.path == str(path) and error.value.position <= 300


def test_every_group_before_damage_is_handed_out(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    ends = []
    for _ in range(4):
        books.send([START_MS])
        ends.append(books.messages.end)
    (path,) = Path(f"{books.delay}/message").iterdir()
    data = bytearray(path.read_bytes())
    data[FILE_HEADER_BYTES + ends[1] + 100] ^= 1
    path.write_bytes(data)
    seen: list[int] = []
    with pytest.raises(DamagedData):
        for group in read_log(DISK, place_of(books), 0, ends[-1], []):
            seen.append(group.end)
    assert seen == ends[:2]


def test_rule_P3_segments_that_are_gone_mean_a_new_start_and_in_the_end_damage(tmp_path: Path) -> None:
    books = Books(str(tmp_path), segment_bytes=500)
    for _ in range(10):
        books.send([START_MS])
    books.messages.remove(books.messages.detach_below(1_000))
    with pytest.raises(LogMoved):
        sequences(books)
    with pytest.raises(DamagedData, match="no newer checkpoint says why"):
        audit_directory(books.root, now_ms=START_MS)
    books.close()


def test_bodies_are_read_from_either_log(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.send([START_MS, START_MS + HOUR_MS, START_MS + 1])
    books.checkpoint()
    books.send([START_MS + 2, START_MS + 3])
    snapshot = take_snapshot(DISK, find_directories(DISK, books.delay)[0])
    rows = read_hour(DISK, snapshot, read_tail(DISK, snapshot).unfiled, HOUR)
    assert rows.sequence.tolist() == [1, 3, 4, 5] and rows.body_bytes.tolist() == [6] * 4
    bodies = [read_body(DISK, snapshot, HOUR, int(location)) for location in rows.location]
    assert bodies == [b"body 1", b"body 3", b"body 4", b"body 5"]


def test_batches_of_one_and_of_many_give_their_rows_in_order(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.send([START_MS + 1])
    books.send([START_MS + 2, START_MS + 3], subjects=("orders", "bills"))
    books.send([START_MS + 4], subjects=("bills", "orders"))
    snapshot = take_snapshot(DISK, find_directories(DISK, books.delay)[0])
    rows = read_tail(DISK, snapshot).unfiled.rows
    assert rows.sequence.tolist() == [1, 2, 3, 4]
    assert (rows.deliver_at_ms - START_MS).tolist() == [1, 2, 3, 4]
    assert [rows.subjects[subject] for subject in rows.subject] == ["orders", "orders", "bills", "bills"]
    assert set(rows.appended_at_ms.tolist()) == {START_MS - 1000} and rows.body_bytes.tolist() == [6] * 4
    assert read_body(DISK, snapshot, HOUR, int(rows.location[3])) == b"body 4"


def test_rule_P3_audits_beside_a_server_at_work_find_nothing(tmp_path: Path) -> None:
    books = Books(str(tmp_path), segment_bytes=20_000)
    books.send([START_MS])
    books.hand_over([1])
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            # It pauses as syncs of a disk make it pause; without that the logs grow faster than an audit reads them.
            while not stop.wait(0.005):
                rows = books.send([START_MS + row for row in range(20)], subjects=("orders", "bills"))
                books.hand_over(rows[:10])
                books.hand_over(rows[10:])
                if len(books.rows) % 60 == 1:
                    books.checkpoint()
        except BaseException as error:
            failures.append(error)
            raise

    server = threading.Thread(target=work)
    server.start()
    try:
        seen: list[int] = []
        for _ in range(25):
            report = audit_directory(books.root, now_ms=START_MS + 50)
            assert report.balanced and not report.findings, report.findings[:3]
            seen.append(report.total.dispatched)
    finally:
        stop.set()
        server.join()
    assert not failures and seen == sorted(seen) and seen[-1] > seen[0]
    books.close()
