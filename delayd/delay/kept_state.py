"""The state as a start finds it, and from where a value is rebuilt that does not check (rule L9).

| value | is rebuilt from | else |
|---|---|---|
| ``checkpoint`` | the checkpoint file, with its hour table | the start is refused by name |
| ``hour/`` | the checkpoint file if it says the same replay offset, else the hour's own file | the start is refused |
| ``beside/`` | the file itself | the start is refused |
| ``outcomes/`` | the checkpoint file, else what the dispatch log itself proves | |
| ``given_up/`` | its key; what it began is done once more, and all rows of the hour are in doubt | |
| ``salvage/`` | its key | |
| ``ended`` | control records of the message log, as far as it is kept | |
| ``keys`` | nothing; the index of keys is made again from the schedule logs | |
| ``seal`` | the seal log, from its beginning | |
| ``target/`` | control records of the message log | the subject waits for an operator |
| ``producer/`` | nothing: its batches are refused | an operator, or the producer's end |
| ``end/`` | all dispatch logs that are kept | |
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import cast

import msgpack
import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId
from delayd.delay.filing.hour_table import (
    BESIDE_PREFIX,
    GIVEN_UP_PREFIX,
    OUTCOME_PREFIX,
    PREFIX,
    SALVAGE_PREFIX,
    FiledHours,
    GivenUp,
    HourFile,
    HourTable,
    OutcomeEnd,
    hour_of_key,
    hour_puts,
    load_hours,
    load_outcome_ends,
)
from delayd.delay.intake import Mark
from delayd.delay.producers import PREFIX as PRODUCER_PREFIX
from delayd.delay.state_values import DROPPED_KEY, ENDED_KEY, TARGET_PREFIX, decode_dropped
from delayd.errors import DamagedData, DamagedValue, key_text
from delayd.log.checkpoint import Payload, read_checkpoint
from delayd.log.hour import (
    END_ROW,
    NO_ENDED,
    EndedRows,
    Skipped,
    decode_ended,
    decode_hours,
    hour_flags,
    open_schedule_log,
    schedule_beside_path,
    schedule_path,
)
from delayd.log.key_run import STATE_KEY as KEYS_KEY
from delayd.log.key_run import KnownRuns
from delayd.machine.disk import Disk
from delayd.machine.state import State

log = logging.getLogger(__name__)

# {replay_offset, replay_crc32c, next_sequence, appended_at_ms, reach_ms, skipped}: how far the message log is filed.
CHECKPOINT_KEY = b"checkpoint"

Pairs = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class KeptState:
    """The values that the last checkpoint stored."""

    replay_offset: int = 0
    replay_crc32c: int = 0
    next_sequence: int = 1
    appended_at_ms: int = 0
    reach_ms: int = 0
    skipped: list[Skipped] = field(default_factory=list)  # Sequences that an operator's decision left unused.
    dropped: dict[int, int] = field(default_factory=dict)  # By hour: filed rows that operators gave up.
    hours: HourTable = field(default_factory=HourTable)
    beside: HourTable = field(default_factory=HourTable)
    ends: dict[int, OutcomeEnd] = field(default_factory=dict)
    given_up: dict[int, GivenUp] = field(default_factory=dict)  # Operators' words on dispatch logs, by hour.
    salvage: set[int] = field(default_factory=set)  # Hours whose schedule logs operators gave up, not done yet.
    # Rows that decisions have ended, and whose outcomes were not durable; None: their value does not check.
    ended: EndedRows | None = field(default_factory=lambda: NO_ENDED)
    keys: KnownRuns | None = None  # None: there is no index of keys, or its value does not check.
    keys_lost: bool = False
    producers: Pairs = field(default_factory=list)
    producers_lost: dict[int, DamagedValue] = field(default_factory=dict)
    targets: dict[bytes, int] = field(default_factory=dict)
    targets_lost: dict[bytes, DamagedValue] = field(default_factory=dict)
    flags_unknown: bool = False  # Whether an hour may have a seal though its row does not say so.

    @property
    def replay(self) -> Mark:
        """Up to where the rows of the message log are filed."""
        return Mark(self.replay_offset, self.replay_crc32c)

    @property
    def files(self) -> FiledHours:
        """The files that have rows of hours."""
        return FiledHours(self.hours, self.beside)


def read_kept(disk: Disk, state: State, folder: str, log_id: int) -> KeptState:
    """Read the state of a delay server. Values that are rebuilt are logged, and written back with the next commit of
    their row.

    Raises:
        DamagedValue: a value does not check, and no other place holds what it said.
    """
    kept, damaged = KeptState(), list[DamagedValue]()
    published = _published(disk, folder, log_id)
    hours = load_hours(state.scan(PREFIX, damaged))
    if _read_checkpoint(state, kept, hours, published):
        for error in damaged:
            hour = _hour(error)
            hours.set(hour, _hour_file(disk, folder, log_id, hour, kept, published, error))
            kept.flags_unknown = True
        kept.hours = hours
    try:
        value = state.get(DROPPED_KEY)
        kept.dropped = {} if value is None else decode_dropped(msgpack.unpackb(value))
    except DamagedValue as unchecked:
        kept.dropped = decode_dropped((published or {}).get("dropped", []))
        _told(unchecked, "the checkpoint file")
    try:
        value = state.get(ENDED_KEY)
        kept.ended = NO_ENDED if value is None else decode_ended(value)
    except DamagedValue as unchecked:
        kept.ended = None
        _told(unchecked, "the message log")
    try:
        value = state.get(KEYS_KEY)
        kept.keys = None if value is None else KnownRuns.decode(value)
    except DamagedValue as unchecked:
        kept.keys_lost = True
        _told(unchecked, "the schedule logs")
    damaged = []
    kept.beside = load_hours(state.scan(BESIDE_PREFIX, damaged))
    for error in damaged:
        hour = _hour(error)
        path = schedule_beside_path(folder, hour)
        kept.beside.set(hour, _measured(disk, path, log_id, hour, kept.replay_offset, error))
    damaged = []
    kept.ends = load_outcome_ends(state.scan(OUTCOME_PREFIX, damaged))
    for error in damaged:
        hour = _hour(error)
        kept.ends[hour] = OutcomeEnd(_published_ends(published).get(hour, 0))
        _told(error, "the checkpoint file")
    given_up, damage_by_key = _scan(state, GIVEN_UP_PREFIX)
    kept.given_up = {int.from_bytes(key): GivenUp.decode(value) for key, value in given_up.items()}
    for key, error in damage_by_key.items():
        kept.given_up[int.from_bytes(key)] = GivenUp(0, False)
        _told(error, "its key")
    salvage, damage_by_key = _scan(state, SALVAGE_PREFIX)
    kept.salvage = {int.from_bytes(key) for key in (*salvage, *damage_by_key)}
    damaged = []
    kept.producers = state.scan(PRODUCER_PREFIX, damaged)
    kept.producers_lost = {int.from_bytes(error.key[len(PRODUCER_PREFIX) :]): error for error in damaged}
    targets, kept.targets_lost = _scan(state, TARGET_PREFIX)
    kept.targets = {subject: msgpack.unpackb(value) for subject, value in targets.items()}
    return kept


def _scan(state: State, prefix: bytes) -> tuple[dict[bytes, bytes], dict[bytes, DamagedValue]]:
    """The values below a prefix, and what does not check of them, by the rest of their keys."""
    damaged: list[DamagedValue] = []
    values = {key[len(prefix) :]: value for key, value in state.scan(prefix, damaged)}
    return values, {error.key[len(prefix) :]: error for error in damaged}


def heal_hours(state: State, kept: KeptState) -> None:
    """Write the replay offset and the hour table back in one transaction, when one of them was rebuilt."""
    if kept.flags_unknown:
        names = ("replay_offset", "replay_crc32c", "next_sequence", "appended_at_ms", "reach_ms", "skipped")
        row = msgpack.packb({name: getattr(kept, name) for name in names})
        removes = [key for key, _ in state.scan(PREFIX, []) if (hour_of_key(key) or 0) not in kept.hours]
        state.commit([*hour_puts(kept.hours.rows), (CHECKPOINT_KEY, row)], removes)


def _read_checkpoint(state: State, kept: KeptState, hours: HourTable, published: Payload | None) -> bool:
    """Read the replay offset; False when the file's hour table is taken too, because the state's own can't be
    trusted.
    """
    damage: DamagedValue | None = None
    row: Payload | None = None
    try:
        value = state.get(CHECKPOINT_KEY)
        row = None if value is None else cast(Payload, msgpack.unpackb(value))
    except DamagedValue as error:
        damage = error
        if published is None:
            raise
    if row is None and damage is None and (published is None or not len(hours)):
        # No checkpoint was counted yet.
        return True
    of_state = row is not None
    if row is None:
        assert published is not None, "or it was raised"
        row = published
        # The state may count one checkpoint more than the file does: then the rows of that checkpoint are filed again
        # (rule P4).
        kept.hours = _of_file(hours, published)
        kept.flags_unknown = True
        if damage is not None:
            _told(damage, "the checkpoint file")
    numbers = (row[name] for name in ("replay_offset", "replay_crc32c", "next_sequence", "appended_at_ms"))
    kept.replay_offset, kept.replay_crc32c, kept.next_sequence, kept.appended_at_ms = (cast(int, n) for n in numbers)
    kept.reach_ms = cast(int, row.get("reach_ms", 0))
    kept.skipped = [(first, count) for first, count in cast("list[Skipped]", row.get("skipped", []))]
    return of_state


def _of_file(hours: HourTable, published: Payload) -> HourTable:
    """The hour table of the checkpoint file; an hour that the state counts alike keeps the state's flags."""
    table = HourTable(decode_hours(cast(bytes, published["hours"])).copy())
    for hour in table.rows["hour"].tolist():
        newer, file = hours.get(hour), table.get(hour)
        if newer._replace(flags=0) == file._replace(flags=0):
            table.set(hour, newer)
    return table


def _hour_file(
    disk: Disk, folder: str, log_id: int, hour: int, kept: KeptState, published: Payload | None, error: DamagedValue
) -> HourFile:
    if published is not None and published["replay_offset"] == kept.replay_offset:
        table = HourTable(decode_hours(cast(bytes, published["hours"])))
        if hour in table:
            _told(error, "the checkpoint file")
            return table.get(hour)
    return _measured(disk, schedule_path(folder, hour), log_id, hour, kept.replay_offset, error)


def _measured(disk: Disk, path: str, log_id: int, hour: int, replay_offset: int, error: DamagedValue) -> HourFile:
    """Measure how much of an hour's file a checkpoint with this replay offset counts: each batch names its range (rule
    P3).
    """
    file = HourFile()
    try:
        segment = open_schedule_log(disk, path, log_id, hour)
    except DamagedData:
        raise error from None
    try:
        for group in segment.scan(0, 0):
            batches: list[Batch] = [batch for _, batch in group.batches()]
            if any(batch.schedule.source_end > replay_offset for batch in batches):
                break
            flags = file.flags
            for batch in batches:
                if ColumnId.TAG_BLOOM in batch.offsets:
                    flags |= hour_flags(batch.uint64s(ColumnId.TAG_BLOOM))
            file = HourFile(group.end, file.rows + group.header.row_count, group.header.header_crc32c, flags)
    finally:
        segment.close()
    _told(error, path)
    return file


def _published(disk: Disk, folder: str, log_id: int) -> Payload | None:
    try:
        return read_checkpoint(disk, folder, log_id)
    except DamagedData as error:
        log.warning("checkpoint_file_rebuilt reason=%r", str(error))
        return None


def _published_ends(published: Payload | None) -> dict[int, int]:
    if published is None:
        return {}
    rows = np.frombuffer(cast(bytes, published["outcomes"]), END_ROW)
    return {int(row["hour"]): int(row["length"]) for row in rows}


def _hour(error: DamagedValue) -> int:
    hour = hour_of_key(error.key)
    if hour is None:
        raise error
    return hour


def _told(error: DamagedValue, source: str) -> None:
    log.warning("value_rebuilt key=%s source=%s", key_text(error.key), source)
