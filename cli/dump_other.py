"""What a file holds that has no groups, as rows of a listing: a checkpoint, a consume log, the file of an LMDB state.

Invariant: as of logs of groups, only what checks is listed, and damage is raised behind it.
"""

import os
import re
from collections.abc import Iterator
from enum import Enum

import msgpack
import numpy as np

from delayd.disk import Disk, open_named
from delayd.errors import BadArgument, DamagedData, key_text
from delayd.holder import LOCK, is_held
from delayd.hours import hour_name
from delayd.location import ROW_BITS, ROW_MASK
from delayd.log.checkpoint import MAGIC as CHECKPOINT_MAGIC
from delayd.log.checkpoint import read_checkpoint_file
from delayd.log.consume import PAGE_ENTRIES, ConsumePlace, check_pages, entries_in
from delayd.log.schedule import DEAD, REMOVED, SEALED, decode_hours
from delayd.log.segment import FILE_HEADER_BYTES, FILE_MAGIC, FileKind, open_segment
from delayd.reading.directory import KIND_POSITION
from delayd.state import check_stored, read_state_file
from delayd.state_file import LMDB_MAGIC

from .hour_schedule import in_chunks
from .table import Cell, Column, Kind

CONSUME_COLUMNS = (
    Column("consume_sequence", Kind.NAME),
    Column("batch_offset", Kind.NAME),
    Column("row", Kind.NAME),
)
CHECKPOINT_COLUMNS = (Column("name"), Column("value"))
STATE_COLUMNS = (Column("key"), Column("size_bytes", Kind.SIZE), Column("value"))


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
