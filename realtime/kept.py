"""Kept: the keys that a realtime server has in LMDB, and their values as msgpack (docs/formats/checkpoint.md).

A checkpoint writes them in one transaction. Everything newer is in the two logs, behind the offsets that the checkpoint
names.
"""

import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgpack

from delayd.errors import DamagedData, DamagedValue, key_text
from delayd.log.consume import ConsumeTail
from delayd.log.pull import GroupDecision, decode_rows, encode_rows
from delayd.log.tail import CHECKPOINT_KEY, COPY_PREFIX, GROUP_PREFIX, SUBJECT_PREFIX
from delayd.machine.state import State

from .group_window import GIVEN_BACK, HELD, Became, Offer, Stage, StateRun
from .groups import Group, GroupCopy, LostGroup
from .handoff import KeptOffers, Origin, Origins
from .subject_index import Index, Subject
from .terms import OPEN, decode_filter, encode_filter

# `<u64 log_id>` {epoch, instance, session, w, decided_offset, highest_sequence} of a delay server.
ORIGIN_PREFIX = b"origin/"
# `<u32 id>` {subject, group}: what a group is called, in case the value with its progress does not check.
NAME_PREFIX = b"name/"
# [[epoch, pull_first]…], the newest 1,000, rising: the lives that gave out messages, and the first pull sequence of
# each (docs/formats/pull.md).
LIVES_KEY = b"lives"
LIVES_MAX = 1_000  # Acknowledgements of this many newest lives are recognised.
UNREAD_KEY = b"unread_from"  # The end of the message log when a start could not read the pull log, until one can.
# {lost_epoch, lost_ms, open}: number of the latest life, and when it began, that followed an end which may have taken
# what consumers had before its fsync; and whether this life may end so (1) or has stopped cleanly (0).
OFFERS_KEY = b"offers"
COPIED = (CHECKPOINT_KEY, LIVES_KEY, OFFERS_KEY, ORIGIN_PREFIX, SUBJECT_PREFIX, UNREAD_KEY)

_U64 = struct.Struct(">Q")
_U32 = struct.Struct(">I")

Pair = tuple[bytes, bytes]

log = logging.getLogger(__name__)


class Life(NamedTuple):
    """One life of the server that gave out messages: its epoch, and the first pull sequence that it could use."""

    epoch: int
    pull_first: int


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
    next_group: int = 0  # The id of the next new group; 0 where an earlier version wrote the checkpoint.
    kept_from: int = 0  # Retention has removed nothing of the message log from this offset on.


def encode_marks(marks: Marks, incarnation: int) -> Pair:
    """The checkpoint's own row."""
    kept = {name: getattr(marks, name) for name in Marks.__slots__}
    return CHECKPOINT_KEY, _pack({**kept, "incarnation": incarnation})


def encode_lives(lives: Sequence[Life]) -> Pair:
    """The newest lives."""
    return LIVES_KEY, _pack(lives[-LIVES_MAX:])


def encode_unread(offset: int) -> Pair:
    """Where the message log ended when the pull log could not be read."""
    return UNREAD_KEY, _pack(offset)


def encode_offers(offers: KeptOffers) -> Pair:
    """What may have been lost before this life, and whether this life is open."""
    return OFFERS_KEY, _pack({"lost_epoch": offers.lost_epoch, "lost_ms": offers.lost_ms, "open": int(offers.open)})


def encode_origin(origin: Origin) -> Pair:
    """A delay server's state as it was heard; its window is in the message log."""
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


def encode_name(group: Group) -> Pair:
    """A group's names."""
    return NAME_PREFIX + _U32.pack(group.group_id), _pack({"subject": group.subject.name, "group": group.name})


def group_keys(group_id: int) -> list[bytes]:
    """All keys of a group."""
    return [GROUP_PREFIX + _U32.pack(group_id), NAME_PREFIX + _U32.pack(group_id)]


def copied(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """The pairs as they are stored: small values that can't be rebuilt are stored twice (rule L9)."""
    for key, value in pairs:
        yield key, value
        if key.startswith(COPIED):
            yield COPY_PREFIX + key, value


def encode_group_copy(copy: GroupCopy) -> Pair:
    """A group as a checkpoint copied it. It takes some microseconds and a fraction of one for each run, so this does
    not run on the loop.
    """
    group, window = copy.group, copy.window
    given_back: list[list[int]] = []
    ranges: dict[int, list[list[int]]] = {became: [] for became in GIVEN_BACK}
    for run in window.handles:
        if run.state == HELD:
            continue
        for runs in (ranges[run.state], given_back):
            if runs and runs[-1][1] == run.first:
                runs[-1][1] = run.end
            else:
                runs.append([run.first, run.end])
    # The next start offers what pauses, and what can't be read: its file may have been restored by then.
    others = [run for state in (Stage.PAUSED, Stage.UNREADABLE) for run in window.others.of(state)]
    kept = {
        "subject": group.subject.name,
        "group": group.name,
        "next": window.next,
        "pulls": [
            [run.first, run.end, run.consume_first, run.attempt, run.incarnation, run.lease_ms] for run in window.held()
        ],
        "redeliver": [*window.came_back(), *[(run.first, run.messages, run.attempt) for run in others]],
        "known_from": window.known_from,
        "given_back": given_back,
        "lapsed": ranges[Became.LAPSED],
        "decided": [ranges[Became.RETRIED], ranges[Became.REJECTED]],
        "leaving": [[*decision[:-1], encode_rows(decision.rows)] for decision in window.leaving.values()],
        "held_back": copy.held_back,
        "ephemeral": copy.ephemeral,
        "filter": b"" if copy.filter is OPEN else encode_filter(copy.filter),
        "ordered": copy.ordered,
    }
    # Few groups have these.
    if copy.in_flight_max:
        kept["in_flight_max"] = copy.in_flight_max
    if copy.begins_at_ms:
        kept["begins_at_ms"] = copy.begins_at_ms
    return GROUP_PREFIX + _U32.pack(group.group_id), _pack(kept)


class Kept:
    """Reads the rows of the last checkpoint, at start."""

    def __init__(self, state: State, path: str) -> None:
        self._state = state
        self._path = path

    def marks(self) -> Marks:
        """Where the replay begins; zeros in a new directory."""
        found = [value for key, value in self._scan(CHECKPOINT_KEY) if key == CHECKPOINT_KEY]
        if not found:
            return Marks()
        (value,) = found
        row = self._row(CHECKPOINT_KEY, value)
        row.setdefault("next_group", 0)
        return Marks(**{name: _int(row, name) for name in Marks.__slots__})

    def lives(self) -> list[Life]:
        """The lives up to the checkpoint. If they are lost, handles of earlier lives that nobody holds are stale."""
        lost: list[DamagedValue] = []
        found = [value for key, value in self._scan(LIVES_KEY, lost) if key == LIVES_KEY]
        for damage in lost:
            log.error("lives_unknown path=%s then=repeated_acknowledgements_are_stale", damage.path)
        if not found:
            return []
        rows = cast(list[list[int]], msgpack.unpackb(found[0]))
        return [Life(*row) for row in rows]

    def unread_from(self) -> int | None:
        """Where the message log ended when a start could not read the pull log; None: the last start has read it."""
        found = [value for key, value in self._scan(UNREAD_KEY) if key == UNREAD_KEY]
        return cast(int, msgpack.unpackb(found[0])) if found else None

    def offers(self) -> KeptOffers:
        """What the life before has kept. If that is lost, it may have lost what it had offered."""
        lost: list[DamagedValue] = []
        found = [value for key, value in self._scan(OFFERS_KEY, lost) if key == OFFERS_KEY]
        if not found:
            return KeptOffers(open=bool(lost))
        row = self._row(OFFERS_KEY, found[0])
        return KeptOffers(_int(row, "lost_epoch"), _int(row, "lost_ms"), bool(_int(row, "open")))

    def origins(self, origins: Origins) -> None:
        """Load the delay servers that were heard."""
        for key, value in self._scan(ORIGIN_PREFIX):
            row = self._row(key, value)
            origin = origins.origin(_U64.unpack(key[len(ORIGIN_PREFIX) :])[0])
            origin.epoch, origin.instance = _int(row, "epoch"), _int(row, "instance")
            origin.session = _int(row, "session")
            w_epoch, w_id = cast(list[int], row["w"])
            origin.w = (w_epoch, w_id)
            origin.decided_offset, origin.highest_sequence = _int(row, "decided_offset"), _int(row, "highest_sequence")
            origin.dirty = False

    def subjects(self, index: Index) -> list[DamagedValue]:
        """Load the subjects that have had messages; return the damage of those with no copy that checks."""
        lost: list[DamagedValue] = []
        for key, value in self._scan(SUBJECT_PREFIX, lost):
            row = self._row(key, value)
            subject = index.subject(key[len(SUBJECT_PREFIX) :].decode())
            tail = (_int(row, "segment_base"), _int(row, "segment_count"), _int(row, "segment_crc32c"))
            subject.tail = ConsumeTail(*tail, _int(row, "first"), bool(_int(row, "valid")))
            subject.end = _int(row, "end")
            index.number(subject, _int(row, "id"))
        return lost

    def groups(self, index: Index) -> tuple[dict[int, Group], list[LostGroup]]:
        """Load the groups, by id, and those whose progress does not check."""
        groups: dict[int, Group] = {}
        damaged: list[DamagedValue] = []
        found = self._state.scan(GROUP_PREFIX, damaged)
        for key, value in found:
            row = self._row(key, value)
            subject, name = cast(str, row["subject"]), cast(str, row["group"])
            group_id = _U32.unpack(key[len(GROUP_PREFIX) :])[0]
            facts = (_int(row, "next"), _int(row, "known_from"))
            group = groups[group_id] = Group(group_id, index.subject(subject), name, *facts)
            window = group.window
            if row.get("ordered") is True:
                group.keep_order()
            for start, end, consume_first, attempt, *of in cast(list[list[int]], row["pulls"]):
                window.hold(StateRun(start, end - start, HELD, attempt, consume_first, *of))
            for offered in cast(list[list[int]], row["redeliver"]):
                window.offer(Offer(*offered))
            # An earlier version did not note which word gave messages back to their delay server.
            decided = cast(list[list[tuple[int, int]]], row.get("decided", [[], []]))
            own = (cast(list[tuple[int, int]], row["given_back"]), cast(list[tuple[int, int]], row["lapsed"]), *decided)
            for became, ranges in zip(GIVEN_BACK, own, strict=True):
                for first, end in ranges:
                    window.remember(first, end, became)
            for *names, rows in cast(list[list[Any]], row.get("leaving", [])):
                decision = GroupDecision._make([*names, decode_rows(rows)])
                window.leaving[decision.key] = decision
            group.held_back = row.get("held_back") is True
            group.ephemeral = row.get("ephemeral") is True
            if wanted := row.get("filter"):
                group.filter = decode_filter(cast(bytes, wanted))
            group.in_flight_max = cast(int, row.get("in_flight_max", 0))
            group.begins_at_ms = cast(int, row.get("begins_at_ms", 0))
            group.dirty = False
        lost = [LostGroup(_U32.unpack(key)[0], self.names_of(_U32.unpack(key)[0]), each) for key, each in _ids(damaged)]
        return groups, lost

    def names_of(self, group_id: int) -> tuple[str, str] | None:
        """Subject and name of a group whose progress is lost; None when that can't be read either."""
        key = NAME_PREFIX + _U32.pack(group_id)
        try:
            value = self._state.get(key)
        except DamagedValue:
            return None
        row = None if value is None else self._row(key, value)
        return None if row is None else (cast(str, row["subject"]), cast(str, row["group"]))

    def _scan(self, prefix: bytes, lost: list[DamagedValue] | None = None) -> list[Pair]:
        """Read the pairs with a prefix; a value that does not check is taken from its copy.

        If the copy does not check either, the damage is raised, or added to ``lost``.
        """
        damaged: list[DamagedValue] = []
        found = self._state.scan(prefix, damaged)
        for damage in damaged:
            value = self._copy_of(damage, lost)
            if value is None:
                continue
            log.error("value_damaged key=%s path=%s then=its_copy_is_used", key_text(damage.key), damage.path)
            found.append((damage.key, value))
        return found

    def _copy_of(self, damage: DamagedValue, lost: list[DamagedValue] | None) -> bytes | None:
        try:
            value = self._state.get(COPY_PREFIX + damage.key)
        except DamagedValue:
            value = None
        if value is None and lost is None:
            raise damage
        if value is None and lost is not None:
            lost.append(damage)
        return value

    def _row(self, key: bytes, value: bytes) -> dict[str, object]:
        row: object = msgpack.unpackb(value)
        if not isinstance(row, dict):
            raise DamagedData(self._path, 0, f"the value of {key!r} is no map")
        return row


def subject_of_key(key: bytes) -> str:
    """The subject's name in the key of its value."""
    return key[len(SUBJECT_PREFIX) :].decode()


def _ids(damaged: Iterable[DamagedValue]) -> Iterator[tuple[bytes, DamagedValue]]:
    return ((damage.key[len(GROUP_PREFIX) :], damage) for damage in damaged)


def _pack(kept: object) -> bytes:
    return cast(bytes, msgpack.packb(kept))


def _int(row: dict[str, object], name: str) -> int:
    value = row.get(name)
    if not isinstance(value, int):
        raise DamagedData("state", 0, f"{name} is {value!r}")
    return value
