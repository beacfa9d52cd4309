"""Readers of files that grow, are cut or go away beneath them."""

import threading
from pathlib import Path

import pytest

from delayd.errors import DamagedData
from delayd.log.log import LogPlace
from delayd.log.segment import FileKind
from delayd.reading.books import audit_directory
from delayd.reading.files.stored_groups import LogMoved, TornTail, log_size, read_log
from delayd.testing.disk import Faults, MemoryDisk
from tests.books import DELAY_ID, START_MS, Books


def place_of(books: Books) -> LogPlace:
    return LogPlace(f"{books.delay}/message", FileKind.MESSAGE, DELAY_ID)


def sequences(books: Books, stop: int | None = None, torn: list[TornTail] | None = None) -> list[int]:
    place = place_of(books)
    until = log_size(books.disk, place) if stop is None else stop
    groups = read_log(books.disk, place, 0, until, [] if torn is None else torn)
    return [group.header.base_sequence for group in groups]


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
