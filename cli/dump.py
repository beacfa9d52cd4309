"""What a log file holds, as rows of a listing: groups, batches, or messages with what each kind of batch knows.

Invariant: only what checks and is durable is listed; an unfinished end is told as a sentence, damage is raised.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np

from delayd.batch import Batch, BatchKind, ColumnId
from delayd.disk import Disk
from delayd.hours import hour_name
from delayd.log.control import Record, decode_records
from delayd.log.dispatch import Outcome, Reason, decode_outcomes, reason_name
from delayd.log.ended import decode_ended
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.pull import decode_entries
from delayd.log.seal import decode_seals
from delayd.log.segment import UnfinishedFile
from delayd.log.segment_index import index_records
from delayd.log.tally import TALLY, decode_tallies
from delayd.reading.directory import need_log_file, open_any
from delayd.reading.groups import TornTail, read_groups

from .listing import printable
from .table import Cell, Column, Kind

GROUP_COLUMNS = (
    Column("offset", Kind.NAME),
    Column("kind"),
    Column("batches", Kind.NUMBER),
    Column("rows", Kind.NUMBER),
    Column("size_bytes", Kind.SIZE),
    Column("base_sequence", Kind.NAME),
    Column("appended_at_ms", Kind.INSTANT),
    Column("epoch", Kind.NAME),
    Column("durable_offset", Kind.NAME),
)
BATCH_COLUMNS = (
    Column("offset", Kind.NAME),
    Column("kind"),
    Column("rows", Kind.NUMBER),
    Column("size_bytes", Kind.SIZE),
    Column("columns"),
    Column("facts"),
)
MESSAGE_COLUMNS = (
    Column("offset", Kind.NAME),
    Column("row", Kind.NAME, spare=True),
    Column("kind", spare=True),
    Column("sequence", Kind.NAME),
    Column("subject"),
    Column("deliver_at_ms", Kind.INSTANT),
    Column("content"),
)


def group_rows(disk: Disk, path: str, torn: list[str]) -> Iterator[tuple[Cell, ...]]:
    """One row a group."""
    for group in _groups(disk, path, torn):
        header = group.header
        yield (
            header.offset,
            GroupKind(header.kind).name.lower(),
            header.batch_count,
            header.row_count,
            header.total_bytes,
            header.base_sequence,
            header.appended_at_ms,
            header.epoch,
            header.durable_offset,
        )


def batch_rows(disk: Disk, path: str, torn: list[str]) -> Iterator[tuple[Cell, ...]]:
    """One row a batch."""
    for group in _groups(disk, path, torn):
        for offset, batch in group.batches():
            columns = " ".join(ColumnId(column).name.lower() for column in sorted(batch.offsets))
            part = batch.part
            facts = "" if part is None else " ".join(_fact(name, value) for name, value in part._asdict().items())
            yield offset, batch.kind.name.lower(), batch.count, batch.total_bytes, columns, facts


def message_rows(disk: Disk, path: str, torn: list[str]) -> Iterator[tuple[Cell, ...]]:
    """One row a message, an outcome, a pull entry or a control record."""
    for group in _groups(disk, path, torn):
        sequence = group.header.base_sequence
        for offset, batch in group.batches():
            kind = batch.kind.name.lower()
            for row, cells in enumerate(_rows(batch, sequence)):
                yield (offset, row, kind, *cells)
            if batch.kind is BatchKind.PRODUCER:
                sequence += batch.count


def _groups(disk: Disk, path: str, torn: list[str]) -> Iterator[CommitGroup]:
    need_log_file(disk, path)
    try:
        segment = open_any(disk, path)
    except UnfinishedFile:
        torn.append(f"{path} is empty, for its creation did not finish; the server removes it at its next start")
        return
    with closing(segment):
        tails: list[TornTail] = []
        start, crc = segment.header.base_offset, segment.header.previous_crc32c
        yield from read_groups(segment, start, sys.maxsize, tails, previous_crc32c=crc)
        torn.extend(tail.sentence for tail in tails)


def _rows(batch: Batch, base_sequence: int) -> Iterator[tuple[Cell, ...]]:
    match batch.kind:
        case BatchKind.CONTROL:
            for record in decode_records(batch):
                if record.get("type") == "ended":
                    yield from _ended(record)
                    continue
                facts = " ".join(_fact(name, value) for name, value in record.items() if name != "subject")
                yield None, _subject(record), None, facts
        case BatchKind.PULL:
            for entry in decode_entries(batch):
                facts = " ".join(_fact(name, value) for name, value in entry._asdict().items() if name != "op")
                yield None, None, None, f"{entry.op.name.lower()} {facts}"
        case BatchKind.OUTCOME:
            yield from _outcomes(batch)
        case BatchKind.SEAL:
            for seal in decode_seals(batch):
                facts = " ".join(_fact(name, value) for name, value in seal.facts._asdict().items())
                yield None, None, None, f"number={seal.number} {facts} previous_sha256={seal.previous_sha256.hex()}"
        case BatchKind.TALLY:
            for entry in decode_tallies(batch):
                facts = " ".join(_fact(name, int(entry[name])) for name in TALLY.names or () if name != "zero")
                yield None, None, None, facts
        case BatchKind.INDEX:
            for indexed in index_records(batch):
                facts = " ".join(_fact(name, value) for name, value in indexed._asdict().items())
                yield None, None, None, facts
        case _:
            yield from _messages(batch, base_sequence)


def _outcomes(batch: Batch) -> Iterator[tuple[Cell, ...]]:
    outcomes = decode_outcomes([batch])
    due_ms = outcomes.deliver_at_ms.tolist()
    others = outcomes.others(np.arange(len(due_ms))).tolist()
    columns = outcomes.sequences.tolist(), due_ms, outcomes.part_of.tolist(), others
    for sequence, due, part_of, named in zip(*columns, strict=True):
        part = outcomes.parts[part_of]
        content = Outcome(int(part["outcome"])).name.lower()
        if part["reason"]:
            content += f" reason={reason_name(int(part['reason']))} decided_at_ms={part['claimed_at_ms']}"
            if part["reason"] == Reason.DRAINED:
                content += f" taker={int(part['target_log_id']):016x}"
            if named:
                content += f" other={named} other_at_ms={part['target_appended_at_ms']}"
        if part["outcome"] == Outcome.DISPATCHED:
            content += (
                f" claimed_at_ms={part['claimed_at_ms']} appended_at_ms={part['target_appended_at_ms']}"
                f" target={int(part['target_log_id']):016x} offset={part['target_offset']}"
            )
        yield sequence, None, due, content


def _ended(record: Record) -> Iterator[tuple[Cell, ...]]:
    """One row for each row that a decision has ended."""
    rows = record.get("rows")
    for row in decode_ended(rows if isinstance(rows, bytes) else b"?"):
        content = f"type=ended reason={reason_name(int(row['reason']))} hour={hour_name(int(row['hour']))}"
        if row["reason"] == Reason.DRAINED:
            content += f" taker={int(row['other']):016x} batch={row['other_at_ms']} place={row['place']}"
        elif row["other"]:
            content += f" other={row['other']} other_at_ms={row['other_at_ms']}"
        yield int(row["sequence"]), None, int(row["deliver_at_ms"]), content


def _messages(batch: Batch, base_sequence: int) -> Iterator[tuple[Cell, ...]]:
    subjects = [name.decode("ascii", "backslashreplace") for name in batch.subjects()]
    sequences: Sequence[int] = range(base_sequence, base_sequence + batch.count)
    if ColumnId.SEQUENCE in batch:
        sequences = batch.uint64s(ColumnId.SEQUENCE).tolist()
    numbers = batch.uint32s(ColumnId.SUBJECT) if ColumnId.SUBJECT in batch else np.zeros(batch.count, np.uint32)
    due_ms = batch.int64s(ColumnId.DELIVER_AT_MS).tolist()
    starts, ends = batch.region(ColumnId.BODY_END)
    body_bytes = batch.body_bytes().tolist()
    for row in range(batch.count):
        body = bytes(batch.heap[int(starts[row]) : int(ends[row])])
        content = printable(body) if len(body) == body_bytes[row] else f"(left out, {body_bytes[row]} bytes)"
        yield sequences[row], subjects[int(numbers[row])], due_ms[row], content


def _subject(record: Record) -> str | None:
    """The subject that a control record is about; the delay server has it as bytes, the realtime server as text."""
    subject = record.get("subject")
    if isinstance(subject, bytes):
        return subject.decode("ascii", "backslashreplace")
    return subject if isinstance(subject, str) else None


def _fact(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("log_id"):
        return f"{name}={value:016x}"
    if isinstance(value, bytes):
        return f"{name}={value.hex()}"
    return f"{name}={hour_name(value) if isinstance(value, int) and name == 'hour' else value}"
