"""Word: what a delay server's checkpoint file says about its books (docs/formats/checkpoint.md). A *word* is such a
statement.

Invariant: the checkpoint file may hold anything, so each field's type is checked before it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from delayd.disk import Disk
from delayd.errors import DamagedData
from delayd.log.checkpoint import Payload, Value, read_checkpoint
from delayd.log.schedule import DEAD, REMOVED, SEALED, Skipped, decode_hours
from delayd.reading.directory import Directory


@dataclass(frozen=True, slots=True)
class FiledHour:
    """An hour in the checkpoint's table: how much of its schedule log is valid."""

    length: int
    rows: int
    sealed: bool
    removed: bool = False  # Retention removes its files, or has removed them.
    dead: bool = False  # Some of its rows are DEAD.
    last_crc32c: int = 0  # The checksum of its last group.


class LinkWord(NamedTuple):
    """What a delay server says of one target: up to when all its due rows have an outcome, and why not later."""

    log_id: int
    settled_ms: int
    waits: str


@dataclass(frozen=True, slots=True)
class Word:
    """The part of a checkpoint that only the audit reads (rules S5, S7); zeros while nothing was published."""

    next_sequence: int = 1
    replay_crc32c: int = 0
    skipped: tuple[Skipped, ...] = ()
    dropped: Mapping[int, int] = field(default_factory=dict)  # By hour: filed rows that operators gave up.
    keep_from: int = 0  # Where the message log may begin.
    # How much of the files beside damaged schedule logs is valid, by hour.
    beside: Mapping[int, FiledHour] = field(default_factory=dict)
    seals: int = 0  # How many seals were durable; ``seals_sha256`` is the digest of the last one.
    seals_sha256: bytes = b""
    settled_ms: int = 0  # All rows that fell due before this have an outcome, except rows that a target holds up.
    waits: str = ""
    links: tuple[LinkWord, ...] = ()
    epoch: int = 0


def filed_hours(table: bytes) -> dict[int, FiledHour]:
    """Read an hour table, by hour."""
    return {
        hour: FiledHour(length, rows, bool(flags & SEALED), bool(flags & REMOVED), bool(flags & DEAD), last_crc32c)
        for hour, last_crc32c, length, rows, flags in decode_hours(table).tolist()
    }


def sealed_by_checkpoint(disk: Disk, directory: Directory) -> frozenset[int]:
    """The hours that the published checkpoint calls sealed. Raises DamagedData when it can't be read."""
    table = (read_checkpoint(disk, directory.path, directory.log_id) or {}).get("hours", b"")
    if not isinstance(table, bytes):
        raise DamagedData(f"{directory.path}/checkpoint", 0, "hours has another type")
    rows = decode_hours(table)
    return frozenset(rows["hour"][rows["flags"] & SEALED > 0].tolist())


def read_word(directory: Directory, published: Payload) -> Word:
    """Read the fields of a published checkpoint that the audit needs; DamagedData when one has a wrong type."""
    try:
        count, digest = (0, b"") if published["seals"] is None else _pair(published["seals"])
        links = [_triple(link) for link in _list(published["links"])]
        return Word(
            next_sequence=_int(published["next_sequence"]),
            replay_crc32c=_int(published["replay_crc32c"]),
            skipped=tuple((_int(first), _int(rows)) for first, rows in map(_pair, _list(published["skipped"]))),
            dropped={_int(hour): _int(rows) for hour, rows in map(_pair, _list(published["dropped"]))},
            keep_from=_int(published["keep_from"]),
            beside=filed_hours(_bytes(published["beside"])),
            seals=_int(count),
            seals_sha256=_bytes(digest),
            settled_ms=_int(published["settled_ms"]),
            waits=str(published["waits"]),
            links=tuple(LinkWord(_int(log_id), _int(settled_ms), str(waits)) for log_id, settled_ms, waits in links),
            epoch=_int(published["epoch"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedData(
            f"{directory.path}/checkpoint", 0, f"it lacks a field, or one has another type: {error!r}"
        ) from error


def _int(value: Value) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no number")
    return value


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{value!r} is no bytes")
    return value


def _list(value: Value) -> list[Value]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def _pair(value: Value) -> tuple[Value, Value]:
    first, second = _list(value)
    return first, second


def _triple(value: Value) -> tuple[Value, Value, Value]:
    first, second, third = _list(value)
    return first, second, third
