"""Messages that a realtime server's retention has removed: what an audit still proves of them (rules S5, S6)."""

from pathlib import Path

import pytest

from delayd.machine.disk import RealDisk
from delayd.reading.archive.archiver import archive_directory
from delayd.reading.archive.notes import MESSAGE, key_of_note
from delayd.reading.archive.store import FolderStore
from delayd.reading.books import AuditReport
from delayd.reading.fleet import audit_fleet
from delayd.reading.proved import proved_hours
from delayd.reading.verify import verify_directory
from tests.simulation.audit import BOOKS, copy_tree
from tests.tamper.honest import honest
from tests.tamper.liar import Liar
from tests.unit.reading.archived import changed, rewrite

TARGET = f"{BOOKS}/realtime-0"


@pytest.fixture
def data(tmp_path: Path) -> str:
    """An honest directory, of which a realtime server's retention has removed all but the last segment."""
    books = Liar(honest()[0])
    bases = [int(name[:-4]) for name in books.disk.list_folder(f"{TARGET}/message")]
    for base in bases[:-1]:
        books.disk.remove(f"{TARGET}/message/{base:020}.log")
    books.publish(TARGET, keep_from=bases[-1])
    copy_tree(books.disk, BOOKS, RealDisk(), str(tmp_path / "data"))
    return str(tmp_path / "data")


@pytest.fixture
def archive(tmp_path: Path) -> FolderStore:
    """The archive of the same directory, filled before retention removed anything."""
    copy_tree(honest()[0], BOOKS, RealDisk(), str(tmp_path / "whole"))
    store = FolderStore(str(tmp_path / "archive"))
    archive_directory(str(tmp_path / "whole"), store)
    return store


def audited(*places: str) -> AuditReport:
    return audit_fleet(places, now_ms=honest()[1], findings_limit=None)


def test_without_an_archive_they_rest_on_the_dispatch_logs_word_and_the_way_out_is_told(data: str) -> None:
    report = audited(data)
    assert report.balanced and report.total.unproven > 0
    (said,) = [remark for remark in report.remarks if "dispatch log's word alone" in remark]
    assert said.startswith(f"{report.total.unproven:,} are dispatched by") and "an archive that has them" in said
    unproven = {(hour.log_id, hour.hour) for hour in report.hours if hour.unproven}
    assert unproven and not unproven & proved_hours(report).keys()
    assert verify_directory(data).sound


def test_rule_S5_an_archive_proves_them(data: str, archive: FolderStore) -> None:
    alone, report = audited(data), audited(data, archive.uri)
    sealed = {(seal.log_id, seal.hour) for seal in alone.seals}
    of_sealed = sum(hour.unproven for hour in alone.hours if (hour.log_id, hour.hour) in sealed)
    assert report.balanced and of_sealed > 0
    assert report.total.unproven == alone.total.unproven - of_sealed


@pytest.mark.parametrize("column", ["content_hash", "offset", "subject", "sequence"])
def test_rule_S5_an_archive_that_has_others_of_them_unbalances_the_books(
    data: str, archive: FolderStore, column: str
) -> None:
    unproven = {(hour.log_id, hour.hour) for hour in audited(data).hours if hour.unproven}
    keys = [key for name in archive.names("notes") if (key := key_of_note(name)) is not None]
    key = next(key for key in keys if key.table == MESSAGE and (key.origin, key.hour) in unproven)
    rewrite(archive, key, changed(column))
    report = audited(data, archive.uri)
    assert not report.balanced
    assert key.hour in {finding.hour for finding in (*report.findings, *report.faults)}


def test_folders_that_earlier_versions_wrote_beside_the_logs_are_left_alone(data: str) -> None:
    before = audited(data)
    for folder in ("tally", "index"):
        path = Path(data) / "realtime-0" / folder / f"{0:020}.log"
        path.parent.mkdir()
        path.write_bytes(b"of an earlier version")
    assert audited(data) == before and verify_directory(data).sound
