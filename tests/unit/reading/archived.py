"""The books of the archive's tests, and what all of them look at."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from delayd.outcome import Outcome, Reason
from delayd.reading.archive.archive_audit import audit_archive
from delayd.reading.archive.archiver import archive_directory
from delayd.reading.archive.notes import MESSAGE, SCHEDULE, ArchivedKey, file_sha256
from delayd.reading.archive.store import ArchiveStore, FolderStore
from delayd.reading.books import AuditReport
from delayd.reading.fleet import audit_fleet
from tests.books import DELAY_ID, HOUR, HOUR_MS, REALTIME_ID, START_MS, Books

HOURS = 3
NOW_MS = START_MS + (HOURS + 1) * HOUR_MS
FILES = 2 * HOURS
SCHEDULE_KEY = ArchivedKey(SCHEDULE, HOUR, DELAY_ID, DELAY_ID)
MESSAGE_KEY = ArchivedKey(MESSAGE, HOUR, REALTIME_ID, DELAY_ID)
OTHERS = {"subject": "bills", "outcome": "DEAD", "reason": "MOVED", "target": "0000000000000007"}


def write_books(path: Path, segment_bytes: int = 256 << 20) -> Books:
    """Hours with rows of two subjects and each kind of outcome, all of them sealed."""
    books = Books(str(path), segment_bytes=segment_bytes)
    for hour in range(HOURS):
        begin = START_MS + hour * HOUR_MS
        for part in range(2):
            due = [begin + 1_000 * (2 * row + part) for row in range(8)]
            sent = books.send(due, subjects=("orders", "bills"), keys=[f"key {row}" for row in range(8)])
            books.hand_over(sent[:5], delay_ms=5)
            books.decide(sent[5:6], Outcome.IN_DOUBT)
            books.decide(sent[6:7], Outcome.CANCELLED, reason=Reason.CANCELLED, claimed_at_ms=begin)
            books.decide(sent[7:], Outcome.CANCELLED, reason=Reason.MOVED, claimed_at_ms=begin, other=3)
            books.checkpoint()
        books.seal(HOUR + hour)
    books.see_realtime(NOW_MS)
    return books


def audited(store: ArchiveStore) -> AuditReport:
    return audit_archive(store, now_ms=NOW_MS, findings_limit=None)


def tree(store: FolderStore) -> dict[str, bytes]:
    """All files of an archive."""
    return {name: (Path(store.uri) / name).read_bytes() for name in store.names("")}


def rewrite(store: FolderStore, key: ArchivedKey, change: Callable[[pa.Table], pa.Table]) -> None:
    """Replace a file by another one, and make its note fit: what somebody does who knows the format."""
    path, note = Path(store.uri) / key.file, Path(store.uri) / key.note
    with pq.ParquetFile(path) as file:
        table = file.read()
    pq.write_table(change(table), path)
    said = json.loads(note.read_text())
    with pq.ParquetFile(path) as file:
        said["rows"] = file.metadata.num_rows
    said |= {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    note.write_bytes(json.dumps(said, indent=1).encode() + b"\n")


def changed(column: str) -> Callable[[pa.Table], pa.Table]:
    """Change one value of the first row."""

    def change(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        rows[0][column] = OTHERS[column] if column in OTHERS else (rows[0][column] or 7) - 1
        return pa.Table.from_pylist(rows, table.schema)

    return change


def write_machines(path: Path) -> None:
    """The books on two machines, a copy of the first one, and an archive that differs from them.

    The archive has lost a row, and one of its files.
    """
    books = write_books(path / "data")
    books.close()
    store = FolderStore(str(path / "archive"))
    archive_directory(books.root, store)
    rewrite(store, MESSAGE_KEY, lambda table: table.slice(1))
    (Path(store.uri) / MESSAGE_KEY._replace(hour=HOUR + 1).file).write_bytes(b"")
    for machine, server in (("a", "delay"), ("b", "realtime"), ("copy", "delay")):
        shutil.copytree(path / "data" / server, path / machine / server)


def audited_fleet(*places: str) -> AuditReport:
    return audit_fleet(places, now_ms=NOW_MS, findings_limit=None)
