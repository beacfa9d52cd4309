"""What a realtime server keeps in LMDB: keys, and values as msgpack (docs/formats/checkpoint.md).

A checkpoint writes them in one transaction; what is newer is in the two logs behind the offsets that it names.
"""

import struct
from dataclasses import dataclass
from typing import cast

import msgpack

from delayd.errors import DamagedData
from delayd.log.consume import ConsumeTail
from delayd.state import State

from .groups import Group, GroupCopy
from .handoff import Origin, Origins
from .held import Run
from .index import Index, Subject
from .offers import Offer

CHECKPOINT_KEY = b"checkpoint"
ORIGIN_PREFIX = b"origin/"
SUBJECT_PREFIX = b"subject/"
GROUP_PREFIX = b"group/"

_U64 = struct.Struct(">Q")
_U32 = struct.Struct(">I")

Pair = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Marks:
    """Up to where each log is contained in the checkpoint."""

    indexed_offset: int = 0
    indexed_crc32c: int = 0
    next_sequence: int = 0
    window_offset: int = 0
    pull_offset: int = 0
    pull_crc32c: int = 0
    next_pull: int = 0


def encode_marks(marks: Marks, incarnation: int) -> Pair:
    """The checkpoint's own row."""
    kept = {name: getattr(marks, name) for name in Marks.__slots__}
    return CHECKPOINT_KEY, _pack({**kept, "incarnation": incarnation})


def encode_origin(origin: Origin) -> Pair:
    """A delay server as it was heard; its window is in the message log."""
    kept = {
        "epoch": origin.epoch,
        "instance": origin.instance,
        "session": origin.session,
        "w": list(origin.w),
        "decided_offset": origin.decided_offset,
        "highest_sequence": origin.highest_sequence,
    }
    return ORIGIN_PREFIX + _U64.pack(origin.log_id), _pack(kept)


def encode_subject(subject: Subject, tail: ConsumeTail) -> Pair:
    """A subject, and how far its consume log is valid."""
    kept = {
        "id": subject.subject_id,
        "end": tail.end,
        "segment_base": tail.base,
        "segment_count": tail.count,
        "segment_crc32c": tail.crc32c,
        "first": tail.first,
        "valid": int(tail.valid),
    }
    return SUBJECT_PREFIX + subject.name.encode(), _pack(kept)


def encode_group(group: Group) -> Pair:
    """A group with all that it holds."""
    return encode_group_copy(group.copy())


def encode_group_copy(copy: GroupCopy) -> Pair:
    """A group as a checkpoint took it; some microseconds and a part of one for each run, so not on the loop."""
    group = copy.group
    kept = {
        "subject": group.subject.name,
        "group": group.name,
        "next": copy.next,
        "pulls": copy.held,
        "redeliver": [[offer.consume_first, offer.count, offer.attempt] for offer in copy.offers],
    }
    return GROUP_PREFIX + _U32.pack(group.group_id), _pack(kept)


class Kept:
    """Reads the rows of the last checkpoint, at start."""

    def __init__(self, state: State, path: str) -> None:
        self._state = state
        self._path = path

    def marks(self) -> Marks:
        """Where to begin; zeros in a new directory."""
        value = self._state.get(CHECKPOINT_KEY)
        if value is None:
            return Marks()
        row = self._row(CHECKPOINT_KEY, value)
        return Marks(**{name: _int(row, name) for name in Marks.__slots__})

    def origins(self, origins: Origins) -> None:
        """Bring the delay servers that were heard."""
        for key, value in self._state.scan(ORIGIN_PREFIX):
            row = self._row(key, value)
            origin = origins.origin(_U64.unpack(key[len(ORIGIN_PREFIX) :])[0])
            origin.epoch, origin.instance = _int(row, "epoch"), _int(row, "instance")
            origin.session = _int(row, "session")
            w_epoch, w_id = cast(list[int], row["w"])
            origin.w = (w_epoch, w_id)
            origin.decided_offset, origin.highest_sequence = _int(row, "decided_offset"), _int(row, "highest_sequence")
            origin.dirty = False

    def subjects(self, index: Index) -> None:
        """Bring the subjects that have had messages."""
        for key, value in self._state.scan(SUBJECT_PREFIX):
            row = self._row(key, value)
            subject = index.subject(key[len(SUBJECT_PREFIX) :].decode())
            tail = (_int(row, "segment_base"), _int(row, "segment_count"), _int(row, "segment_crc32c"))
            subject.tail = ConsumeTail(*tail, _int(row, "first"), bool(_int(row, "valid")))
            subject.end = _int(row, "end")
            index.number(subject, _int(row, "id"))

    def groups(self, index: Index) -> dict[int, Group]:
        """Bring the groups, by id."""
        groups: dict[int, Group] = {}
        for key, value in self._state.scan(GROUP_PREFIX):
            row = self._row(key, value)
            subject, name = cast(str, row["subject"]), cast(str, row["group"])
            group_id = _U32.unpack(key[len(GROUP_PREFIX) :])[0]
            group = groups[group_id] = Group(group_id, index.subject(subject), name, _int(row, "next"))
            for facts in cast(list[list[int]], row["pulls"]):
                group.held.add(Run(*facts))
            for offered in cast(list[list[int]], row["redeliver"]):
                group.redeliver.append(Offer(*offered))
            group.dirty = False
        return groups

    def _row(self, key: bytes, value: bytes) -> dict[str, object]:
        row: object = msgpack.unpackb(value)
        if not isinstance(row, dict):
            raise DamagedData(self._path, 0, f"the value of {key!r} is no map")
        return row


def _pack(kept: object) -> bytes:
    return cast(bytes, msgpack.packb(kept))


def _int(row: dict[str, object], name: str) -> int:
    value = row[name]
    assert isinstance(value, int), f"{name} is {value!r}"
    return value
