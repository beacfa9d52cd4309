"""The books of a torture: what the files say, compared with each other and with the ledger.

Invariant: the realtime message log is read here message by message, bodies too, beside the audit, which reads columns.
"""

from collections.abc import Iterator
from pathlib import Path

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind, ColumnId
from delayd.log.log import LogPlace
from delayd.log.segment import FileKind
from delayd.machine.disk import RealDisk
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.files.directory import Role, find_directories
from delayd.reading.files.stored_groups import TornTail, log_size, read_log, segment_bases
from delayd.reading.verify import verify_directory

from .torture_key_books import check_keys, read_key_books
from .torture_keys import KeyLedger
from .torture_ledger import Delivered, Fate, Ledger, Name

FINDINGS_MAX = 20


def check_books(data: Path, ledger: Ledger, keys: KeyLedger, now_ms: int, *, stopped: bool) -> AuditReport:
    """Audit the directory and compare the realtime log with the ledger; faults go into the ledger.

    With ``stopped`` nothing is under way any more: each figure must be exactly what the ledger says.
    """
    # Messages that are delivered from here on may lie behind the part of the log that is read.
    delivered = [(group, number) for group, copies in ledger.copies.items() for number in list(copies)]
    report = audit_directory(str(data), now_ms=now_ms, findings_limit=FINDINGS_MAX)
    total = report.total
    if not report.balanced or total.dead or total.in_doubt or total.missing or total.unproven:
        ledger.broken(f"the audit does not balance: {total}")
        for finding in report.findings:
            ledger.broken(f"audit: {finding}")
    for file in verify_directory(str(data)).damaged:
        ledger.broken(f"damaged: {file.sentence}")
    found = check_realtime(data, ledger)
    for group, number in delivered:
        if number not in found:
            ledger.broken(f"delivered to {group} and not in the realtime log: {ledger.tell(number)}")
    books = read_key_books(data, keys.subject)
    check_keys(books, keys, ledger, found, stopped=stopped)
    if stopped:
        # Each row of a message with a key is counted above.
        scheduled, cancelled = total.scheduled - len(books.rows), total.cancelled - books.cancelled
        others = [sent for sent in ledger.sent if sent.subject != keys.subject]
        kept = sum(sent.fate == Fate.KEPT for sent in others)
        unknown = sum(sent.fate in (Fate.UNKNOWN, Fate.ASKED) for sent in others)
        answered = sum(sent.cancelled for sent in others)
        if not kept <= scheduled <= kept + unknown:
            ledger.broken(f"{scheduled} messages are scheduled, {kept} have a receipt, {unknown} are unknown")
        if cancelled != answered:
            ledger.broken(f"{cancelled} are cancelled by the audit, {answered} were answered so")
        if total.dispatched != len(found):
            ledger.broken(f"{total.dispatched} are dispatched by the audit, {len(found)} are in the realtime log")
    return report


def check_realtime(data: Path, ledger: Ledger) -> dict[int, Name]:
    """Each message at most once in the realtime log, never early, and as it was sent; returns those that are there."""
    found: dict[int, Name] = {}
    names: set[Name] = set()
    for delivered, claimed_at_ms in realtime_messages(data):
        number = ledger.check(delivered, "in the realtime log")
        if number is None:
            continue
        if number in found or delivered.name in names:
            ledger.broken(f"twice in the realtime log: {ledger.tell(number)}, also as {found.get(number)}")
        if claimed_at_ms < delivered.deliver_at_ms:
            ledger.broken(f"claimed {delivered.deliver_at_ms - claimed_at_ms} ms early: {ledger.tell(number)}")
        found[number] = delivered.name
        names.add(delivered.name)
    return found


def realtime_messages(data: Path) -> Iterator[tuple[Delivered, int]]:
    """All messages that realtime servers hold, with the clock reading at which each was claimed."""
    disk = RealDisk()
    torn: list[TornTail] = []
    for directory in find_directories(disk, str(data)):
        if directory.role == Role.REALTIME:
            place = LogPlace(directory.message_folder, FileKind.REALTIME, directory.log_id)
            for group in read_log(disk, place, segment_bases(disk, place)[0], log_size(disk, place), torn):
                for _, batch in group.batches():
                    if batch.kind == BatchKind.DISPATCH:
                        yield from _rows(batch)


def _rows(batch: Batch) -> Iterator[tuple[Delivered, int]]:
    batch.verify()
    part = batch.dispatch
    starts, ends = batch.region(ColumnId.BODY_END)
    heap = bytes(batch.heap)
    # A batch of the handoff has one subject, so its consumers pull whole batches.
    (subject,) = batch.subjects()
    columns = (starts, ends, batch.uint64s(ColumnId.SEQUENCE), batch.int64s(ColumnId.DELIVER_AT_MS))
    for start, end, sequence, deliver_at_ms in zip(*(column.tolist() for column in columns), strict=True):
        name = (part.origin_log_id, sequence)
        yield Delivered(heap[start:end], subject.decode(), name, deliver_at_ms), part.claimed_at_ms
