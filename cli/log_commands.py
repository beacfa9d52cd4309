"""``delayd log``: whether log files check, and what is in one, of a running server too.

Invariant: only what checks and is durable is listed; an unfinished end is told as a sentence, damage is raised.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from enum import Enum

import click
import msgpack
import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind, ColumnId
from delayd.batch.sequences import ROW_BITS, ROW_MASK
from delayd.config import DATA_DEFAULT
from delayd.errors import BadArgument, DamagedData, key_text
from delayd.hours import hour_name
from delayd.log.checkpoint import MAGIC as CHECKPOINT_MAGIC
from delayd.log.checkpoint import read_checkpoint_file
from delayd.log.consume import PAGE_ENTRIES, ConsumePlace, check_pages, entries_in
from delayd.log.control import Record, decode_records
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.hour import DEAD, REMOVED, SEALED, decode_ended, decode_hours, decode_outcomes, decode_seals
from delayd.log.pull import decode_entries
from delayd.log.segment import FILE_HEADER_BYTES, FILE_MAGIC, FileKind, UnfinishedFile, open_segment
from delayd.machine.disk import Disk, RealDisk, open_named
from delayd.machine.identity import LOCK, is_held
from delayd.machine.operating import counted
from delayd.machine.state import LMDB_MAGIC, check_stored, read_state_file
from delayd.outcome import Outcome, Reason, reason_name
from delayd.reading.files.directory import KIND_POSITION, need_log_file, open_any
from delayd.reading.files.stored_groups import TornTail, read_groups
from delayd.reading.verify import FileReport, FileState, VerifyReport, verify_directory, verify_files

from .hour_commands import in_chunks
from .listing import Cell, columns, printable, progress, show, size_text
from .main import NOT_BALANCED, OK
from .shared_options import DATA_VARIABLE, CommandGroup, DataFolder, Shown, format_option, shown_options

GROUP_COLUMNS = columns(
    "offset:name kind batches:number rows:number size_bytes:size base_sequence:name appended_at_ms:instant "
    "epoch:name durable_offset:name"
)
BATCH_COLUMNS = columns("offset:name kind rows:number size_bytes:size columns facts")
MESSAGE_COLUMNS = columns("offset:name row:name,spare kind:spare sequence:name subject deliver_at_ms:instant content")


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
            facts = "" if part is None else _facts(part._asdict())
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
                facts = _facts(record, "subject")
                yield None, _subject(record), None, facts
        case BatchKind.PULL:
            for entry in decode_entries(batch):
                facts = _facts(entry._asdict(), "op")
                yield None, None, None, f"{entry.op.name.lower()} {facts}"
        case BatchKind.OUTCOME:
            yield from _outcomes(batch)
        case BatchKind.SEAL:
            for seal in decode_seals(batch):
                facts = _facts(seal.facts._asdict())
                yield None, None, None, f"number={seal.number} {facts} previous_sha256={seal.previous_sha256.hex()}"
        case _:
            yield from _messages(batch, base_sequence)


def _outcomes(batch: Batch) -> Iterator[tuple[Cell, ...]]:
    outcomes = decode_outcomes([batch])
    due_ms = outcomes.deliver_at_ms.tolist()
    others = outcomes.others(np.arange(len(due_ms))).tolist()
    columns = outcomes.sequences.tolist(), due_ms, outcomes.part_of.tolist(), others
    for sequence, due, part_of, named in zip(*columns, strict=True):
        part = outcomes.parts[part_of]
        content = Outcome(int(part["outcome"])).word
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


def _facts(facts: Mapping[str, object], without: str = "") -> str:
    return " ".join(_fact(name, value) for name, value in facts.items() if name != without)


def _fact(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("log_id"):
        return f"{name}={value:016x}"
    if isinstance(value, bytes):
        return f"{name}={value.hex()}"
    return f"{name}={hour_name(value) if isinstance(value, int) and name == 'hour' else value}"


CONSUME_COLUMNS = columns("consume_sequence:name batch_offset:name row:name")
CHECKPOINT_COLUMNS = columns("name value")
STATE_COLUMNS = columns("key size_bytes:size value")


class FileForm(Enum):
    """How a file is written."""

    GROUPS = "groups"  # Also whatever is no file of delayd: who reads groups says so.
    CONSUME = "consume"
    CHECKPOINT = "checkpoint"
    STATE = "state"


LMDB_MAGIC_AT = 16  # Behind the header of the first page.

_HOUR_KEYS = (b"hour", b"beside", b"outcomes")  # Their values are bytes of a fixed layout.
_NAMES_A_LOG = re.compile(r"log_id$|cluster_id|target/|route/|look/")
_FLAGS = {SEALED: "sealed", DEAD: "dead", REMOVED: "removed"}


def file_kind(disk: Disk, path: str) -> FileForm:
    """Which form a file has, by its first bytes: a copy may have any name."""
    file = open_named(disk, path)
    try:
        head = file.pread(FILE_HEADER_BYTES, 0)
    finally:
        file.close()
    if head.startswith(CHECKPOINT_MAGIC):
        return FileForm.CHECKPOINT
    if head[LMDB_MAGIC_AT : LMDB_MAGIC_AT + 4] == LMDB_MAGIC.to_bytes(4, "little"):
        return FileForm.STATE
    kind = int.from_bytes(head[KIND_POSITION : KIND_POSITION + 2], "little")
    is_consume = head.startswith(FILE_MAGIC) and kind == FileKind.CONSUME
    return FileForm.CONSUME if is_consume else FileForm.GROUPS


def consume_rows(disk: Disk, path: str) -> Iterator[tuple[Cell, ...]]:
    """One row an entry; those before the first one of a log that was rebuilt are left out."""
    segment = open_segment(disk, path, FileKind.CONSUME, None, write=False)
    try:
        base = segment.header.base_offset
        place = ConsumePlace(os.path.dirname(path), segment.header.log_id, segment.header.number)
        count, _ = check_pages(place, segment, base)
        entries = entries_in(segment)[:count]
    finally:
        segment.close()
    # A page of zeros alone stands for what retention had removed; entry 0 at offset 0 can't be, for a header is there.
    for chunk in in_chunks(np.flatnonzero(entries), PAGE_ENTRIES):
        for at in chunk:
            entry = int(entries[at])
            yield base + at, entry >> ROW_BITS, entry & ROW_MASK


def checkpoint_rows(disk: Disk, path: str) -> Iterator[tuple[Cell, ...]]:
    """One row a value of the newest checkpoint; the hours of a delay server one by one."""
    payload = read_checkpoint_file(disk, path)
    if payload is None:
        return
    for name, value in sorted(payload.items()):
        if name == "hours" and isinstance(value, bytes):
            for row in decode_hours(value):
                flags = " ".join(text for flag, text in _FLAGS.items() if row["flags"] & flag)
                facts = f"length={row['length']} rows={row['rows']} last_crc32c={row['last_crc32c']:08x}"
                yield f"hour {hour_name(int(row['hour']))}", f"{facts} {flags}".rstrip()
        else:
            yield name, _value_text(name, value)


def state_rows(_disk: Disk, path: str) -> Iterator[tuple[Cell, ...]]:
    """One row a key of a stopped server's state, in LMDB's order.

    Raises:
        BadArgument: its server runs, and changes the file while it is read (rule L6).
        DamagedData: the file, or a value, does not check.
    """
    lock = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(path))), LOCK)
    if os.path.exists(lock) and is_held(os.stat(lock)):
        raise BadArgument(f"{path} is in use by its server; stop it first, or ask it: `delayd status`")
    damaged: DamagedData | None = None
    for pair in read_state_file(path):
        try:
            value = check_stored(path, pair.key, pair.stored, pair.position)
        except DamagedData as error:
            damaged = damaged or error
            continue
        key = _named(pair.key)
        yield key, len(value), _stored_text(key, value)
    if damaged is not None:
        raise damaged


def _named(key: bytes) -> str:
    prefix, _, rest = key.partition(b"/")
    if prefix in _HOUR_KEYS and len(rest) == 4:
        return f"{prefix.decode()}/{hour_name(int.from_bytes(rest, 'big'))}"
    return key_text(key)


def _stored_text(key: str, value: bytes) -> str:
    if key.partition("/")[0].encode() in _HOUR_KEYS:
        return value.hex()
    try:
        return _value_text(key, msgpack.unpackb(value, strict_map_key=False))
    except ValueError:
        return value.hex()


def _value_text(name: str, value: object) -> str:
    """A value on one line; bytes as hexadecimal digits, ids as listings show them."""
    if isinstance(value, dict):
        return " ".join(f"{key}={_value_text(str(key), each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return f"[{' '.join(_value_text('', each) for each in value)}]"
    if isinstance(value, bytes):
        return value.hex() or "-"
    if isinstance(value, int) and _NAMES_A_LOG.match(name):
        return f"{value:016x}"
    return str(value)


COLUMNS = columns("path kind state groups:number,spare batches:number,spare rows:number size_bytes:size detail")
_OTHERS = {
    FileForm.CONSUME: (CONSUME_COLUMNS, consume_rows),
    FileForm.CHECKPOINT: (CHECKPOINT_COLUMNS, checkpoint_rows),
    FileForm.STATE: (STATE_COLUMNS, state_rows),
}
_LEVELS = {
    "groups": (GROUP_COLUMNS, group_rows),
    "batches": (BATCH_COLUMNS, batch_rows),
    "messages": (MESSAGE_COLUMNS, message_rows),
}


@click.group(no_args_is_help=True, cls=CommandGroup)
def log() -> None:
    """Verify or dump log files.

    $ delayd log verify --data /var/lib/delayd
    """


@log.command("verify")
@click.argument("paths", nargs=-1, type=click.Path(exists=True, dir_okay=False), metavar="[FILE]...")
@click.option(
    "--data",
    type=DataFolder(),
    metavar="DIR",
    help=f"Check every file of a data directory.  [default without FILE: {DATA_VARIABLE} or {DATA_DEFAULT}]",
)
@click.option("--all", "everything", is_flag=True, help="List files that check, too.")
@format_option
def verify_logs(paths: Sequence[str], data: str | None, everything: bool, form: str) -> int:
    """Check every checksum, length and chain of log files; nothing is changed.

    A FILE is a .log file or a checkpoint. Each FILE is checked on its own; only --data also checks that the files of a
    log follow one another.

    The command lists files that do not check. `damaged` is an error with path and position. `torn` is an unfinished
    end: an append is under way, or a crash cut one short. The server cuts a torn end off at its next start.

    Exit codes: 0 no file is damaged, 3 one is.

    $ delayd log verify --data /var/lib/delayd --all
    $ delayd log verify delayd-data/delay/message/00000000000000000000.log
    """
    reports: list[VerifyReport] = []
    if paths:
        with progress("files", len(paths)) as advance:
            reports.append(verify_files(paths, progress=lambda done, total: advance(1, total)))
    if data is not None or not paths:
        # Read here and not by the option: FILE alone means this file alone, whatever the environment says.
        folder = data or DataFolder().convert(os.environ.get(DATA_VARIABLE) or DATA_DEFAULT, None, None)
        with progress("files", None) as advance:
            reports.append(verify_directory(folder, progress=lambda done, total: advance(1, total)))
    files = [file for report in reports for file in report.files]
    listed = [_row(file) for file in files if everything or file.state in (FileState.TORN, FileState.DAMAGED)]
    if listed or form != "table":
        show(COLUMNS, listed, form)
    states = [file.state for file in files]
    damaged = states.count(FileState.DAMAGED)
    if form == "table":
        size_bytes = sum(file.size_bytes for file in files)
        verdict = f"{damaged} damaged" if damaged else "none is damaged"
        torn = f"{states.count(FileState.TORN)} with an unfinished end"
        count = counted(len(files), "file|files")
        click.echo(f"{count}, {size_text(size_bytes)}: {verdict}, {torn}")
    return NOT_BALANCED if damaged else OK


@log.command("dump")
@click.argument("path", type=click.Path(exists=True, dir_okay=False), metavar="FILE")
@click.option(
    "--level", type=click.Choice(list(_LEVELS)), help="One line a group, a batch or a message.  [default: groups]"
)
@shown_options
def dump(path: str, level: str | None, shown: Shown) -> None:
    """List what a file holds, up to where its checksums hold and its bytes are known to be on disk.

    FILE is a .log file below message, schedule, dispatch, pull, seal or consume in a server's directory, a checkpoint,
    or the state of a stopped server (state.lmdb/data.mdb). It may be a copy under any name.

    Exit codes: 2 FILE is not a file of this kind, 3 FILE is damaged; what stands before the damage is listed.

    $ delayd log dump delayd-data/delay/message/00000000000000000000.log --level messages
    $ delayd log dump delayd-data/delay/dispatch/20261121/2026112116.log --level messages --limit 0 --format csv
    """
    disk = RealDisk()
    other = _OTHERS.get(file_kind(disk, path))
    if other is not None:
        if level is not None:
            raise click.UsageError(f"--level is for logs of groups, and {path} has none; leave it out")
        others, read_other = other
        shown.show(others, read_other(disk, path))
        return
    columns, read = _LEVELS[level or "groups"]
    torn: list[str] = []
    shown.show(columns, read(disk, path, torn))
    for sentence in torn:
        sys.stdout.flush()
        click.echo(f"delayd: {sentence}", err=True)


def _row(file: FileReport) -> tuple[Cell, ...]:
    counts = (file.groups, file.batches, file.rows, file.size_bytes)
    return (file.path, file.kind, file.state.value, *counts, file.sentence)
