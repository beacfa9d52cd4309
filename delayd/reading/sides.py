"""Sides: compares the rows that realtime servers held of a delay server's hours, by their tallies, with those that it
calls DISPATCHED.

Invariant: only sealed hours are compared, because in other hours a row may be at its target without a durable outcome.
A target is compared only if each message that it ever had is tallied or still in its log (docs/formats/tally.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from delayd.batch import BatchKind
from delayd.content import Tally, tally
from delayd.disk import Disk
from delayd.errors import CallerError, DamagedData
from delayd.log.dispatch import Outcome, OutcomeRows
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.log.tally import NO_TALLIES, Tallies, covered, decode_tallies, joined, sum_tallies, tally_place
from delayd.log.tallying import Tallier
from delayd.reading.directory import Directory
from delayd.reading.groups import TornTail, log_size, read_log, segment_bases
from delayd.reading.realtime import TargetIndex, TargetRows, read_target_rows

HourOf = tuple[int, int]  # A delay server's log_id, and the hour since the epoch.


@dataclass(frozen=True, slots=True)
class TargetTallies:
    """The contents of the tally log of a realtime server; ``end`` is the offset in its message log at which the entries
    end.

    ``whole``: every message from the first one on is in an entry or behind ``end``.
    """

    log_id: int
    entries: Tallies
    start: int  # Where its message log began when this was read.

    @property
    def end(self) -> int:
        """The offset below which the entries count messages."""
        return int(self.entries["end"].max(initial=0))

    @property
    def whole(self) -> bool:
        """Whether no message was left out: the entries have no gap, and there is none between them and the message
        log.
        """
        ranges = covered(self.entries)
        return ranges == [(0, self.end)] and self.start <= self.end if ranges else self.start == 0

    def of_hour(self, origin: int, hour: int) -> Tallies:
        """The entries of one hour."""
        found: Tallies = self.entries[
            (self.entries["origin_log_id"] == np.uint64(origin)) & (self.entries["hour"] == hour)
        ]
        return found


def read_held(disk: Disk, directory: Directory, torn: list[TornTail]) -> TargetTallies:
    """Read the tally log of a realtime server, before its message log is read.

    Raises:
        DamagedData: a group of it does not check.
    """
    place = tally_place(directory.path, directory.log_id)
    bases = segment_bases(disk, _message_place(directory))
    if not disk.list_folder(place.folder):
        return TargetTallies(directory.log_id, NO_TALLIES, bases[0] if bases else 0)
    groups = read_log(disk, place, 0, log_size(disk, place), torn)
    batches = [batch for group in groups for _, batch in group.batches() if batch.kind == BatchKind.TALLY]
    return TargetTallies(
        directory.log_id, joined([decode_tallies(batch) for batch in batches]), bases[0] if bases else 0
    )


def held_now(disk: Disk, directory: Directory, torn: list[TornTail]) -> tuple[TargetTallies, dict[HourOf, Tally]]:
    """Everything that a realtime server held, by delay server and hour: its entries, and the log behind them.

    Raises:
        LogMoved: segments went away meanwhile.
        DamagedData: a group does not check, or holds no messages.
    """
    held = read_held(disk, directory, torn)
    place = _message_place(directory)
    start = max(held.end, held.start)
    tallier = Tallier(start)
    for group in read_log(disk, place, start, log_size(disk, place), torn) if log_size(disk, place) > start else ():
        try:
            tallier.take(group)
        except CallerError as error:
            base = max(base for base in segment_bases(disk, place) if base <= group.header.offset)
            path, position = f"{place.folder}/{segment_name(base)}", group.header.offset - base + FILE_HEADER_BYTES
            raise DamagedData(path, position, f"the group there: {error.message}") from error
    return held, {key: found for key, found, _ in sum_tallies(joined([held.entries, tallier.entries()]))}


@dataclass(slots=True)
class SidesCheck:
    """Compares one sealed hour on both sides; its rows come in parts. Targets that still have all of it are left
    out.
    """

    helds: Sequence[TargetTallies]
    index: TargetIndex
    origin: int
    hour: int
    _own: dict[int, Tally] = field(default_factory=dict)  # By target: the tally from the dispatch log.
    # By target: the tally of rows that its log still has behind its entries.
    _kept: dict[int, Tally] = field(default_factory=dict)
    _in_doubt: bool = False

    @property
    def _wanted(self) -> Iterator[tuple[int, TargetTallies, Tallies]]:
        """Targets by number that were tallied without a gap, and whose retention has removed rows of the hour."""
        for number, held in enumerate(self.helds):
            entries = held.of_hour(self.origin, self.hour)
            start = self.index.targets[number].start
            if held.whole and start <= held.end and (entries["begin"] < start).any():
                yield number, held, entries

    def add_sent(self, outcomes: OutcomeRows) -> None:
        """Take the next outcomes."""
        self._in_doubt |= bool((outcomes.parts["outcome"] == Outcome.IN_DOUBT).any())
        for number, held, _ in self._wanted:
            self._own[number] = self._own.get(number, Tally()) + tally_of(outcomes, held.log_id)

    def add_held(self, realtime: TargetRows) -> None:
        """Take the next rows that the targets' logs keep."""
        for number, held, _ in self._wanted:
            self._kept[number] = self._kept.get(number, Tally()) + _tally_behind(held, number, realtime)

    def proved(self) -> int:
        """How many messages that targets have removed are proved by the targets' tallies, which agree with the dispatch
        log.
        """
        if self._in_doubt:
            return 0
        batches = self.index.batches
        of_hour = (batches["origin_log_id"] == np.uint64(self.origin)) & (batches["hour"] == self.hour)
        proved = 0
        for number, _, entries in self._wanted:
            own = self._own.get(number, Tally())
            if own == self._kept.get(number, Tally()) + _sum(entries):
                proved += own.rows - int(batches["count"][of_hour & (batches["target"] == number)].sum())
        return proved

    def differences(self) -> list[str]:
        """The differences, for people. None if rows were called in doubt: these may be at a target or not."""
        if self._in_doubt:
            return []
        found: list[str] = []
        for number, held, entries in self._wanted:
            own = self._own.get(number, Tally())
            theirs = self._kept.get(number, Tally()) + _sum(entries)
            if own != theirs:
                found.append(
                    f"the realtime server {held.log_id:016x} held {theirs.rows} messages of it with the tally "
                    f"{theirs.digest}, the dispatch log says {own.rows} with {own.digest}"
                )
        return found


def deleted_hour_differs(
    disk: Disk, helds: Sequence[TargetTallies], index: TargetIndex, key: HourOf, sealed: Tally, in_doubt: int
) -> str:
    """Where the targets differ from the seal of a deleted hour; "" if they do not.

    Targets whose logs are not here may have the missing rows, so fewer rows than were sealed are no difference.
    """
    origin, hour = key
    batches = index.batches
    found = Tally()
    for number, held in enumerate(helds):
        own = (batches["target"] == number) & (batches["origin_log_id"] == origin) & (batches["hour"] == hour)
        own &= batches["offset"] >= held.end
        found += _sum(held.of_hour(origin, hour))
        if own.any():
            found += _tally_behind(held, number, read_target_rows(disk, index, batches[own]))
    differs = found.rows > sealed.rows + in_doubt or (found.rows == sealed.rows and not in_doubt and found != sealed)
    if not differs:
        return ""
    return (
        f"its realtime servers held {found.rows} messages of it with the tally {found.digest}, "
        f"its seal says {sealed.rows} with {sealed.digest}"
    )


def tally_of(outcomes: OutcomeRows, target_log_id: int | None = None) -> Tally:
    """The tally of an hour's DISPATCHED outcomes, for one realtime server or for all of them."""
    handed_over = outcomes.parts["outcome"] == Outcome.DISPATCHED
    if target_log_id is not None:
        handed_over &= outcomes.parts["target_log_id"] == np.uint64(target_log_id)
    if handed_over.all():
        return tally(outcomes.sequences, outcomes.deliver_at_ms, outcomes.content_hash)
    rows = np.flatnonzero(handed_over[outcomes.part_of])
    return tally(outcomes.sequences[rows], outcomes.deliver_at_ms[rows], outcomes.content_hash[rows])


def tallies_by_target(outcomes: OutcomeRows) -> Mapping[int, Tally]:
    """The same for each realtime server that the outcomes name."""
    handed_over = outcomes.parts["outcome"] == Outcome.DISPATCHED
    targets = np.unique(outcomes.parts["target_log_id"][handed_over]).tolist()
    return {target: tally_of(outcomes, target) for target in targets}


def segment_differs(entries: Tallies, found: Tallies) -> str:
    """Where the entries of a segment differ from what its bytes give; "" if they do not."""
    said = {key: (total, differing) for key, total, differing in sum_tallies(entries)}
    given = {key: (total, differing) for key, total, differing in sum_tallies(found)}
    for key in sorted(said.keys() | given.keys()):
        if said.get(key) != given.get(key):
            own, theirs = said.get(key, (Tally(), 0))[0], given.get(key, (Tally(), 0))[0]
            return (
                f"it says {own.rows} messages of the delay server {key[0]:016x} and hour {key[1]} with the tally "
                f"{own.digest}, the message log has {theirs.rows} with {theirs.digest}"
            )
    return ""


def _sum(entries: Tallies) -> Tally:
    total = Tally()
    for _, found, _ in sum_tallies(entries):
        total += found
    return total


def _tally_behind(held: TargetTallies, number: int, realtime: TargetRows) -> Tally:
    """The tally of a target's rows behind all entries, by the hashes that are stored beside the rows."""
    batches = realtime.batches
    own = (batches["target"] == number) & (batches["offset"] >= held.end)
    rows = np.flatnonzero(own[realtime.batch_of])
    return tally(realtime.sequence[rows], realtime.deliver_at_ms[rows], realtime.hashes()[rows])


def _message_place(directory: Directory) -> LogPlace:
    return LogPlace(directory.message_folder, FileKind.REALTIME, directory.log_id)
