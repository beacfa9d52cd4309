"""Dispatch: what became of the messages of an hour: by its dispatch log, and by decisions of the message log.

A decision ends a row (cancelled, moved, replaced, never taken) and counts from the moment at which it is durable. Its
outcome may reach the dispatch log much later: 32 hours are written at a time, and a full disk or a stopped server
delays the rest. A server keeps its message log as long as an outcome of a decision in it is missing.

Invariant: outcomes are decoded from whole groups that check, up to a size that was taken before the schedule side was
read. Whoever tells what is pending asks `Decisions` too.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Batch, BatchKind, Int64s
from delayd.disk import Disk
from delayd.errors import DamagedData
from delayd.hours import hour_from_name
from delayd.log.control import Ended, decode_sound
from delayd.log.dispatch import NO_OUTCOMES, PART, Outcome, OutcomeRows, Reason, decode_outcomes, reason_name
from delayd.log.ended import NO_ENDED, EndedRows, decode_ended
from delayd.log.schedule import dispatch_path
from delayd.log.segment import FileKind, Segment, UnfinishedFile, open_segment
from delayd.reading.columns import Growing, named_of, rows_of_part
from delayd.reading.directory import Directory
from delayd.reading.groups import Group, LogMoved, TornTail, file_size, read_groups, whole_batch
from delayd.sequences import find

ROW_BYTES = 24  # A row of a batch has three columns of 8 bytes.
DECODE_ROWS = 16_384  # Outcomes decoded at a time: their arrays stay in the processor's cache.


def outcome_word(part: np.void) -> str:
    """What a part says of its rows, in a word: ``dispatched``, ``dead``, ``cancelled``, ``moved``, …"""
    reason = int(part["reason"])
    return reason_name(reason) if reason > Reason.CANCELLED else Outcome(int(part["outcome"])).name.lower()


def hours_on_disk(disk: Disk, directory: Directory) -> list[int]:
    """Hours that have a dispatch log; rising."""
    folder = f"{directory.path}/dispatch"
    names = [name for day in disk.list_folder(folder) for name in disk.list_folder(f"{folder}/{day}")]
    return sorted(hour_from_name(name[:-4]) for name in names if name.endswith(".log"))


def dispatch_sizes(disk: Disk, directory: Directory, hours: Iterable[int] | None = None) -> dict[int, int]:
    """Bytes of groups in dispatch logs at this moment, by hour; ``hours`` None: in all that are there."""
    hours = hours_on_disk(disk, directory) if hours is None else hours
    return {hour: file_size(disk, dispatch_path(directory.path, hour)) for hour in hours}


def read_outcomes(
    disk: Disk,
    directory: Directory,
    hour: int,
    stop: int | None = None,
    torn: list[TornTail] | None = None,
    durable: int = 0,
    part: range | None = None,
) -> OutcomeRows:
    """Read the outcomes of an hour, in the order in which they came to be known; none when there is no file.

    Args:
        disk: where the directory is.
        directory: of a delay server.
        hour: hours since the epoch.
        stop: groups that end behind this offset are left out; None reads everything that is there now.
        torn: receives the bytes behind the last group that checks.
        durable: an offset below which the checkpoint calls everything fsynced.
        part: read the outcomes of these sequences only; None for all.

    Raises:
        LogMoved: the file went away after ``stop`` was taken from it.
        DamagedData: a durable group does not check, or belongs to another hour.
    """
    segment = open_hour(disk, dispatch_path(directory.path, hour), FileKind.DISPATCH, directory.log_id, hour)
    if segment is None:
        if stop:
            raise LogMoved(f"the dispatch log of hour {hour} is gone")
        return NO_OUTCOMES
    try:
        until = segment.file.size() if stop is None else stop
        found = _Gathered(until)
        batches: list[Batch] = []
        rows = ends = 0
        for group in read_groups(segment, 0, until, [] if torn is None else torn, previous_crc32c=0, durable=durable):
            batches += [batch for _, batch in group.batches() if batch.kind == BatchKind.OUTCOME]
            rows += group.header.row_count
            ends = group.end if group.end <= durable else ends
            if rows >= DECODE_ROWS:
                # Batches are decoded now and then, because a batch keeps the bytes of its group in memory.
                found.add(_decode(segment, hour, batches, part))
                batches, rows = [], 0
        if ends < durable <= until:
            what = f"no group of it ends at {durable}, which was durable"
            raise DamagedData(segment.path, segment.position(ends), what)
        found.add(_decode(segment, hour, batches, part))
        return found.rows()
    finally:
        segment.close()


def take_outcomes(outcomes: OutcomeRows, rows: slice | Int64s) -> OutcomeRows:
    """Some of the outcomes; of many parts only those that they name."""
    parts, part_of = named_of(outcomes.parts, outcomes.part_of[rows])
    columns = outcomes.sequences[rows], outcomes.deliver_at_ms[rows]
    return OutcomeRows(*columns, parts, part_of, outcomes.content_hash[rows])


def open_hour(disk: Disk, path: str, kind: FileKind, log_id: int, hour: int) -> Segment | None:
    """Open an hour's file for reading; None when there is none or its creation did not finish."""
    try:
        segment = open_segment(disk, path, kind, log_id, write=False)
    except (FileNotFoundError, UnfinishedFile):
        return None
    if segment.header.number != hour:
        segment.close()
        raise DamagedData(path, 0, f"its header says that it belongs to hour {segment.header.number}")
    return segment


class Decisions(NamedTuple):
    """Ended rows by rising sequence, and for each the offset of the batch that says so."""

    rows: EndedRows
    offsets: NDArray[np.uint64]

    def find(self, sequences: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The place of each of these rows here; -1 for rows of which nothing is decided."""
        found = np.full(len(sequences), -1)
        which, at = find(self.rows["sequence"], sequences)
        found[which] = at
        return found

    def hours(self) -> set[int]:
        """The filing hours of the rows."""
        return set(np.unique(self.rows["hour"]).tolist())

    def of_hour(self, hour: int, part: range | None = None) -> EndedRows:
        """The decided rows of an hour; with a ``part`` of these sequences only."""
        own = self.rows.compress(self.rows["hour"] == hour)
        return own if part is None else own.take(rows_of_part(own["sequence"], part))

    def behind(self, hour: int, outcomes: OutcomeRows, part: range | None = None) -> OutcomeRows:
        """The outcomes of an hour, and behind them those that its dispatch log does not have yet; with a ``part`` of
        these sequences only.
        """
        own = self.of_hour(hour, part)
        own = own.compress(~np.isin(own["sequence"], outcomes.sequences))
        if not len(own):
            return outcomes
        found = _Gathered()
        found.add(outcomes)
        found.add(as_outcomes(own))
        return found.rows()


NO_DECISIONS = Decisions(NO_ENDED, np.empty(0, np.uint64))


class DecisionCollector:
    """Gathers the decisions of a message log, group by group."""

    def __init__(self) -> None:
        self._found: list[tuple[int, EndedRows]] = []

    def take(self, group: Group) -> None:
        """Look at the next group. Raises BatchMalformed when a record of it is none."""
        for offset, batch in group.batches():
            if batch.kind != BatchKind.CONTROL:
                break  # Records stand before the rows of their commit.
            for record in decode_sound(whole_batch(group, offset, batch)):
                if isinstance(record, Ended):
                    self._found.append((offset, decode_ended(record.rows)))

    def decisions(self) -> Decisions:
        """All of them."""
        if not self._found:
            return NO_DECISIONS
        rows = np.concatenate([rows for _, rows in self._found])
        counts = [len(rows) for _, rows in self._found]
        offsets = np.repeat(np.array([offset for offset, _ in self._found], np.uint64), counts)
        order = np.argsort(rows["sequence"], kind="stable")
        return Decisions(rows.take(order), offsets.take(order))


def as_outcomes(rows: EndedRows) -> OutcomeRows:
    """The outcomes that these rows get, each with a part of its own.

    Nobody knows yet which row a drained one is at its taker: its decision names the taker alone.
    """
    parts = np.zeros(len(rows), PART)
    leaves = rows["reason"] == Reason.DRAINED
    parts["target_log_id"] = np.where(leaves, rows["other"], 0)
    parts["batch_id"] = np.where(leaves, 0, rows["other"])
    parts["target_appended_at_ms"] = np.where(leaves, 0, rows["other_at_ms"])
    parts["claimed_at_ms"], parts["reason"] = rows["decided_at_ms"], rows["reason"]
    parts["outcome"], parts["count"], parts["attempt"] = Outcome.CANCELLED, 1, 1
    hashes = np.zeros(len(rows), np.uint64)
    return OutcomeRows(rows["sequence"].copy(), rows["deliver_at_ms"].copy(), parts, np.arange(len(rows)), hashes)


class _Gathered:
    """Outcomes one behind the other, in memory that is reserved for a file of some bytes."""

    def __init__(self, size_bytes: int = 0) -> None:
        self._parts = [NO_OUTCOMES.parts]
        self._parts_count = 0
        columns = NO_OUTCOMES.sequences, NO_OUTCOMES.deliver_at_ms, NO_OUTCOMES.part_of, NO_OUTCOMES.content_hash
        self._columns = Growing(columns, size_bytes // ROW_BYTES)

    def add(self, found: OutcomeRows) -> None:
        part_of = found.part_of + self._parts_count
        columns = found.sequences, found.deliver_at_ms, part_of, found.content_hash
        for room, column in zip(self._columns.more(len(part_of)), columns, strict=True):
            room[:] = column
        self._parts.append(found.parts)
        self._parts_count += len(found.parts)

    def rows(self) -> OutcomeRows:
        sequences, due, part_of, hashes = self._columns.columns()
        return OutcomeRows(sequences, due, np.concatenate(self._parts), part_of, hashes)


def _decode(segment: Segment, hour: int, batches: list[Batch], part: range | None) -> OutcomeRows:
    if any(batch.outcome.hour != hour for batch in batches):
        raise DamagedData(segment.path, 0, "it holds outcomes of another hour")
    found = decode_outcomes(batches)
    return found if part is None else take_outcomes(found, rows_of_part(found.sequences, part))
