"""Proof: a later fact that says that the end of a message log was durable, though it looks like the torn end of a crash
(rule L5).

Only durable messages are given to anybody, get an outcome, or are filed. So when another file of the server's directory
names a message behind the last group that checks, no crash has torn that message off. A start and `delayd log verify`
ask the same functions here. They read files only, and only when an end does not check: then the message log above the
checkpoint is read once more.

Example: a realtime server's message log has good groups with the messages 0 to 6 of ``orders``, and bytes behind them
that do not check. Its pull log says that ``billing`` was given the messages 5 to 7. Number 7 was durable, so the bytes
are damage. Had the pull log named none above 6, they would be a torn tail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple, cast

import msgpack

from delayd.batch import BatchKind
from delayd.disk import Disk
from delayd.errors import BatchMalformed, DamagedValue, DataError
from delayd.log.control import GroupCreated, GroupMoved, decode_known
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.log import LogPlace, list_segments
from delayd.log.pull import PullOp, decode_entries
from delayd.log.segment import FileKind

# Keys of a realtime server's state (docs/formats/checkpoint.md, LMDB).
CHECKPOINT_KEY = b"checkpoint"
SUBJECT_PREFIX = b"subject/"
GROUP_PREFIX = b"group/"
COPY_PREFIX = b"copy/"  # A second copy of small values that can't be rebuilt from anything else.

Scan = Callable[[bytes, list[DamagedValue]], list[tuple[bytes, bytes]]]
"""`State.scan`, or the same from the file of a state that no server has open."""


class _Reader(NamedTuple):
    """A group of consumers, and the consume sequence behind the last message that it came to."""

    subject: str
    name: str
    next: int = 0


def pulled_behind(disk: Disk, scan: Scan, folder: str, log_id: int, end: int) -> str:
    """Why the message log of a realtime server was durable behind the offset ``end``, where its last good group ends:
    its pull log names a message there. "" if it names none.

    Raises:
        DamagedData, Shortage: the good groups can't be read.
    """
    marks = _row(_values(scan, CHECKPOINT_KEY, []).get(CHECKPOINT_KEY))
    lost: list[DamagedValue] = []
    stored = _values(scan, SUBJECT_PREFIX, lost)
    ends = {key[len(SUBJECT_PREFIX) :].decode(): _number(value, "end") for key, value in stored.items()}
    # Nobody knows how many messages these subjects had at the checkpoint, so nothing is proved by them.
    unknown = {each.key[len(SUBJECT_PREFIX) :].decode() for each in lost} - ends.keys()
    message_log = LogPlace(f"{folder}/message", FileKind.REALTIME, log_id)
    for group in _good_groups(disk, message_log, marks.get("indexed_offset", 0), end):
        if group.header.kind == GroupKind.DATA:
            for _, batch in group.batches():
                subject = batch.subjects()[0].decode()
                ends[subject] = ends.get(subject, 0) + batch.count
    readers = {
        int.from_bytes(key[len(GROUP_PREFIX) :]): _Reader(_text(value, "subject"), _text(value, "group"))
        for key, value in _values(scan, GROUP_PREFIX, []).items()
    }
    pull_log = LogPlace(f"{folder}/pull", FileKind.PULL, log_id)
    # A damaged pull log proves what stands before its damage.
    with suppress(DataError, BatchMalformed):
        for group in _good_groups(disk, pull_log, marks.get("pull_offset", 0), sys.maxsize):
            for reader in _follow(readers, group):
                if reader.subject not in unknown and (count := reader.next - ends.get(reader.subject, 0)) > 0:
                    what = f"{count} messages of {reader.subject} in it or behind it were pulled by {reader.name}"
                    return f"it was durable: {what}"
    return ""


def _follow(readers: dict[int, _Reader], group: CommitGroup) -> Iterator[_Reader]:
    """The groups of consumers that a group of the pull log moves on, each with where it comes to."""
    for _, batch in group.batches():
        if batch.kind is BatchKind.CONTROL:
            for record in decode_known(batch):
                if isinstance(record, GroupCreated):
                    readers[record.group_id] = _Reader(record.subject, record.group)
                elif isinstance(record, GroupMoved) and record.group_id in readers:
                    yield readers[record.group_id]._replace(next=record.next)
        else:
            for entry in decode_entries(batch):
                if entry.op is PullOp.PULL and entry.group_id in readers:
                    yield readers[entry.group_id]._replace(next=entry.consume_first + entry.covered)


def _good_groups(disk: Disk, place: LogPlace, start: int, end: int) -> Iterator[CommitGroup]:
    """The groups of a log in [start, end), up to the first one that does not check."""
    segments = list_segments(disk, place, write=False, lost_below=start)
    try:
        for segment, following in zip_longest(segments, segments[1:]):
            until = end if following is None else following.base_offset
            if until <= start:
                continue
            scan = segment.scan(max(start, segment.base_offset))
            while scan.offset < until and (group := next(scan, None)):
                yield group
    finally:
        for segment in segments:
            segment.close()


def _values(scan: Scan, prefix: bytes, lost: list[DamagedValue]) -> dict[bytes, bytes]:
    """The values below a prefix that check, or their copies; ``lost`` receives those that do not check."""
    copies = {key[len(COPY_PREFIX) :]: value for key, value in scan(COPY_PREFIX + prefix, [])}
    return copies | dict(scan(prefix, lost))


def _row(value: bytes | None) -> dict[str, int]:
    row: object = None if value is None else msgpack.unpackb(value)
    return cast("dict[str, int]", row) if isinstance(row, dict) else {}


def _number(value: bytes, name: str) -> int:
    return cast(int, msgpack.unpackb(value)[name])


def _text(value: bytes, name: str) -> str:
    return cast(str, msgpack.unpackb(value)[name])
