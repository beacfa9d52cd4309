"""Outcomes: they are gathered and fsynced into the dispatch logs of their hours, as `delayd.log.committer` explains.

A group holds outcomes of several hours; those of an hour whose file finds no space wait for the next group. An outcome
counts only when it is durable: only then W passes its batch (rule H1), and only then a session begins (rule H4).

Nothing is written to a damaged dispatch log: outcomes of its hour go to a file beside it, and to a further one when
that is damaged as well (rules L5, L10). An example: the log of 15:00 is damaged, then ``quarantine/2027011515.log``,
too; new outcomes go to ``quarantine/2027011515.2.log``. When all three check, `open_dispatch_log` appends to the log
what only the files beside it have, and removes these.
"""

import errno
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ROWS_MAX
from delayd.delay.filing.hour_table import OutcomeEnd
from delayd.delay.filing.log_range import HandedOver
from delayd.errors import BadArgument, DamagedData, DiskFull, NotWritable, Shortage, Unreadable
from delayd.hours import hour_from_name, hour_name
from delayd.log.committer import Committer
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import (
    NewPart,
    OutcomeRows,
    decode_outcomes,
    dispatch_path,
    encode_outcomes,
    join_columns,
    missing_parts,
)
from delayd.log.log import write_again
from delayd.log.segment import FileHeader, FileKind, Segment, UnfinishedFile, create_segment, open_segment
from delayd.machine.alarms import FULL_AGAIN_MS
from delayd.machine.disk import Disk, list_named
from delayd.machine.executor import Done
from delayd.machine.identity import Site
from delayd.outcome import Outcome, Proof, Reason, reason_name

log = logging.getLogger(__name__)

# What may become of a row: its outcome, and the reason of one that was cancelled.
ENDINGS = (
    *((outcome, 0) for outcome in Outcome if outcome.proof is not Proof.REASON),
    *((Outcome.CANCELLED, reason) for reason in Reason),
)
OUTCOMES_BESIDE = re.compile(r"([0-9]{10})(?:\.([0-9]+))?\.log")


class Recorded(NamedTuple):
    """Rows of one hour with the same outcome, and the function to call when it is durable."""

    hour: int
    part: NewPart
    on_durable: Callable[[], object]


class AfterFlush(NamedTuple):
    """Somebody who waits for outcomes, and what is called when they are durable, or can't be written now."""

    durable: Callable[[], None]
    full: Callable[[str], None] | None  # None: whoever waits goes on waiting until there is space.


@dataclass(slots=True)
class _Flush:
    """The outcomes that are written together, and who waits for all of them."""

    recorded: list[Recorded]
    after: list[AfterFlush]
    now_ms: int
    # Those who wait for no space: they hear why outcomes can't be written.
    refused: list[Callable[[], None]] = field(default_factory=list)


class Flushed(NamedTuple):
    """The result of a flush, by hour: durable ends of the files that it wrote, why outcomes could not be written, and
    new damage.
    """

    ends: dict[int, int]
    full: dict[int, str]
    # By hour: why its own file can't be appended to; its outcomes are in a file beside it.
    damaged: dict[int, DamagedData]


class OutcomeLog(Committer[_Flush, Flushed]):
    """The one writer of the dispatch logs. ``segments`` are open files by hour, at their ends; it owns them.

    Invariant: ``ends`` names durable bytes only. Nobody reads a dispatch log further while it is being written.
    """

    def __init__(
        self,
        site: Site,
        flush_ms: int,
        segments: dict[int, Segment],
        ends: dict[int, OutcomeEnd],
        apart: dict[int, OutcomeEnd],
        quarantined: Container[int] = (),
    ) -> None:
        super().__init__("dispatch logs", site.worker, site.clock)
        self.ends = ends  # By hour, of dispatch logs that this life has opened and that are not deleted.
        # By hour, what `ends` does not count: logs that were sealed or damaged before this life, and what stands beside
        # damaged ones. Only figures are made of it.
        self.apart = apart
        # The rows whose outcome this life has made durable, by outcome and reason.
        self._ended = Counter(dict.fromkeys(ENDINGS, 0))
        self.blocked = ""  # Why some outcomes can't be written: nothing more is sent until they can (rule L8).
        # Called with the rows of each flush whose outcomes are durable, in several arrays.
        self.on_ended: Callable[[list[NDArray[np.uint64]]], None] = lambda sequences: None
        # Called with the rows of each outcome that is recorded, while somebody waits for one.
        self.on_recorded: Callable[[NDArray[np.uint64]], None] | None = None
        self._filed_below = 0
        self._moved = set(ends)  # Hours whose end is in no checkpoint yet.
        self._disk = site.disk
        self._folder = site.folder
        self._log_id = site.log_id
        self._epoch = site.epoch
        self._flush_ms = flush_ms
        self._quarantined = quarantined  # Hours whose own file is damaged and is not appended to.
        self.on_damaged: Callable[[int, DamagedData], None] = (
            _nobody_hears  # Called with hours whose file was found damaged.
        )
        self._segments = segments  # Used by the executor only, once a flush was submitted.
        # By hour: the newest file beside a damaged one, and its durable end, which `ends` does not count.
        self._beside = {
            hour: (segment.path, segment.durable) for hour, segment in segments.items() if hour in quarantined
        }
        self._waiting: list[Recorded] = []
        self._after_waiting: list[AfterFlush] = []
        self._handed_over: list[HandedOver] = []
        self._flush = site.alarms.alarm(self.commit)
        site.alarms.look(self.look)

    @property
    def idle(self) -> bool:
        """Whether every recorded outcome is durable."""
        return super().idle and not self._waiting

    def ended(self) -> dict[str, int]:
        """The rows whose outcome this life has made durable, by what became of them, such as ``moved``."""
        return {
            reason_name(reason) if outcome.proof is Proof.REASON else outcome.word: rows
            for (outcome, reason), rows in self._ended.items()
        }

    def record(self, hour: int, part: NewPart, on_durable: Callable[[], object]) -> None:
        """Take an outcome; it is written with the next flush."""
        self._waiting.append(Recorded(hour, part, on_durable))
        if self._flush.at_ms is None:
            self._flush.after(self._flush_ms)
        if self.on_recorded is not None:
            self.on_recorded(part.sequences)

    def when_durable(self, durable: Callable[[], None], full: Callable[[str], None] | None = None) -> None:
        """Call ``durable`` when everything recorded so far is.

        With ``full`` the caller does not wait for space: this is called in its place, with the reason, when something
        can't be written. What was recorded is tried again all the same.
        """
        if self._waiting:
            self._after_waiting.append(AfterFlush(durable, full))
        elif self._under_way is not None:
            self._under_way.after.append(AfterFlush(durable, full))
        else:
            durable()

    def _close(self) -> _Flush | None:
        self._flush.off()
        if not self._waiting:
            return None
        flushing, self._waiting = self._waiting, []
        after, self._after_waiting = self._after_waiting, []
        return _Flush(flushing, after, self._clock.now_ms())

    def counted(self) -> Iterator[tuple[int, OutcomeEnd]]:
        """All that is counted of the dispatch logs that are not deleted, with their hours: an hour may come twice."""
        return chain(self.ends.items(), self.apart.items())

    def forget(self, hour: int) -> None:
        """Count no more of an hour whose files are gone."""
        self.ends.pop(hour, None)
        self.apart.pop(hour, None)

    def filed(self, below: int) -> None:
        """Leave rows with lower sequences out of `take_handed_over`: they are in schedule logs already."""
        self._filed_below = below

    def take_moved(self) -> list[int]:
        """Take the hours whose end has changed since the last checkpoint took it, rising."""
        moved, self._moved = sorted(self._moved & self.ends.keys()), set()
        return moved

    def take_handed_over(self) -> list[HandedOver]:
        """Take the rows whose outcome DISPATCHED became durable since the last call, in several pieces."""
        taken, self._handed_over = self._handed_over, []
        return taken

    def unwritten_hours(self) -> set[int]:
        """Hours with recorded outcomes that are not durable yet."""
        return {recorded.hour for recorded in self._unwritten()}

    def unwritten(self) -> Iterator[NDArray[np.uint64]]:
        """The sequences of all recorded outcomes that are not durable yet, in several arrays."""
        return (recorded.part.sequences for recorded in self._unwritten())

    def unwritten_of(self, hour: int) -> list[NDArray[np.uint64]]:
        """The sequences of an hour's recorded outcomes that are not durable yet, in several arrays."""
        return [each.part.sequences for each in self._unwritten() if each.hour == hour]

    def _unwritten(self) -> Iterator[Recorded]:
        return chain(self._waiting, () if self._under_way is None else self._under_way.recorded)

    def close_hour(self, hour: int, done: Callable[[], None]) -> None:
        """Close the file of an hour that takes no more outcomes."""

        def closed(ended: Done[None]) -> None:
            ended.result()
            done()

        self._executor.submit(partial(self._close_file, hour), closed)

    def without(self, hour: int, work: Callable[[], None], done: Callable[[Done[None]], None]) -> None:
        """Do something with an hour's files on the thread that writes, with none of them open; the next outcome opens
        the one that the hour's state asks for.
        """

        def alone() -> None:
            self._close_file(hour)
            work()
            self._beside.pop(hour, None)  # What stood beside the hour's own file was appended to it.

        self._executor.submit(alone, done)

    def _set_blocked(self, full: dict[int, str]) -> None:
        was_blocked, self.blocked = bool(self.blocked), next(iter(full.values()), "")
        if was_blocked != bool(full):
            # Without durable outcomes nothing more may leave: here deliveries stop and go on again.
            level = logging.WARNING if full else logging.INFO
            log.log(level, "dispatch_logs_full hours=%d reason=%r", len(full), self.blocked)

    def look(self) -> None:
        """Check whether the open files are still in place: write a removed one again, and set others aside."""
        self._executor.submit(self._look, self._looked)

    def _look(self) -> dict[int, DamagedData]:
        damaged: dict[int, DamagedData] = {}
        for hour, segment in list(self._segments.items()):
            damage = segment.look()
            if damage is None:
                continue
            if not write_again([segment]):
                continue  # There was no space to write it again; the next look tries again.
            self._close_file(hour)
            try:
                self._open(hour, self._clock.now_ms(), damaged)
            except (DiskFull, Shortage):
                pass  # The next flush opens it.
            except DamagedData as error:
                damaged[hour] = error
        return damaged

    def write_again(self) -> None:
        """Write removed files again, when nothing is under way any more."""
        write_again(self._segments.values())

    def _looked(self, done: Done[dict[int, DamagedData]]) -> None:
        for hour, error in done.result().items():
            self.on_damaged(hour, error)

    def _jobs(self, group: _Flush) -> tuple[Callable[[], Flushed], None]:
        return partial(self._write, group), None

    def _write(self, group: _Flush) -> Flushed:
        """Append and fsync hour by hour."""
        by_hour: defaultdict[int, list[NewPart]] = defaultdict(list)
        for recorded in group.recorded:
            by_hour[recorded.hour].append(recorded.part)
        now_ms = group.now_ms
        flushed = Flushed({}, {}, {})
        for hour, parts in by_hour.items():
            try:
                segment = self._append(hour, _groups(hour, parts, self._epoch, now_ms), now_ms, flushed.damaged)
            except (DiskFull, Shortage) as error:
                flushed.full[hour] = str(error)
                continue
            except DamagedData as error:
                # Even a new file beside the damaged ones can't be written: these outcomes wait, and so does everything
                # behind them.
                flushed.damaged[hour] = error
                flushed.full[hour] = str(error)
                continue
            segment.flush()
            flushed.ends[hour] = segment.durable
            if segment.path != dispatch_path(self._folder, hour):
                self._beside[hour] = segment.path, segment.durable
        return flushed

    def _note(self, group: _Flush, written: Flushed) -> None:
        ends, full, damaged = written
        for hour, error in damaged.items():
            self.on_damaged(hour, error)
        self._set_blocked(full)
        if full:
            self._waiting = [recorded for recorded in group.recorded if recorded.hour in full] + self._waiting
            group.recorded = [recorded for recorded in group.recorded if recorded.hour not in full]
            waiting, group.after = group.after + self._after_waiting, []
            self._after_waiting = [each for each in waiting if each.full is None]
            group.refused = [partial(each.full, self.blocked) for each in waiting if each.full is not None]
        if self._waiting:
            self._flush.after(FULL_AGAIN_MS if full else self._flush_ms)
        self._note_ends(group.recorded, ends)

    def _durable(self, group: _Flush, written: Flushed) -> None:
        self._note_handed_over(group.recorded)
        self.on_ended([recorded.part.sequences for recorded in group.recorded])
        for recorded in group.recorded:
            recorded.on_durable()
        for after in group.after:
            after.durable()
        for refused in group.refused:
            refused()

    def _note_ends(self, flushed: list[Recorded], ends: dict[int, int]) -> None:
        counts: dict[int, int] = {}
        dead_counts: dict[int, int] = {}
        for hour, part, _ in flushed:
            count = len(part.sequences)
            counts[hour] = counts.get(hour, 0) + count
            self._ended[part.outcome, part.reason] += count
            if part.outcome is Outcome.DEAD:
                dead_counts[hour] = dead_counts.get(hour, 0) + count
        for hour, count in counts.items():
            is_aside = hour in self._quarantined
            own = self.apart if is_aside else self.ends
            length, rows, dead = own.get(hour, OutcomeEnd())
            end = length if is_aside else ends[hour]
            own[hour] = OutcomeEnd(end, rows + count, dead + dead_counts.get(hour, 0))
            if not is_aside:
                self._moved.add(hour)

    def _note_handed_over(self, flushed: list[Recorded]) -> None:
        parts = [
            recorded.part
            for recorded in flushed
            # Outcomes in a file beside a damaged one count only when the damaged one was restored.
            if recorded.part.outcome is Outcome.DISPATCHED and recorded.hour not in self._quarantined
        ]
        if parts:
            sequences, _, hashes = join_columns(parts)
            wanted = sequences >= np.uint64(self._filed_below)
            self._handed_over.append(HandedOver(sequences[wanted], hashes[wanted]))

    def _append(self, hour: int, groups: list[NewGroup], now_ms: int, damaged: dict[int, DamagedData]) -> Segment:
        """Append to an hour's file, or to one beside it; new damage is put into ``damaged``."""
        segment = self._open(hour, now_ms, damaged)
        try:
            segment.append(groups)
        except DamagedData:
            # Its descriptor was closed for other files, and somebody has removed or replaced the file since.
            self._close_file(hour)
            segment = self._open(hour, now_ms, damaged)
            segment.append(groups)
        return segment

    def _open(self, hour: int, now_ms: int, damaged: dict[int, DamagedData]) -> Segment:
        """The open file of an hour; a file beside it when its own is damaged. New damage is put into ``damaged``."""
        segment = self._segments.get(hour)
        if segment is None:
            # A file that was closed may have been damaged since: bytes that were durable are no torn tail (rule L5).
            known = self.ends.get(hour, OutcomeEnd()).length
            if hour not in self._quarantined:
                try:
                    segment = self._open_at(hour, dispatch_path(self._folder, hour), known, now_ms)
                except DamagedData as error:
                    damaged[hour] = error
            if segment is None:
                segment = self._open_beside(hour, now_ms, damaged)
            self._segments[hour] = segment
        return segment

    def _open_beside(self, hour: int, now_ms: int, damaged: dict[int, DamagedData]) -> Segment:
        """The newest file beside a damaged one; a new one when the newest is damaged as well."""
        number = max(outcomes_beside(self._disk, self._folder).get(hour, [1]))
        path = quarantine_path(self._folder, hour, number)
        written, end = self._beside.get(hour, ("", 0))
        try:
            return self._open_at(hour, path, end if path == written else 0, now_ms)
        except DamagedData as error:
            damaged[hour] = error
        return self._open_at(hour, quarantine_path(self._folder, hour, number + 1), 0, now_ms)

    def _open_at(self, hour: int, path: str, known: int, now_ms: int) -> Segment:
        self._disk.make_folder(path.rpartition("/")[0])
        if known or self._disk.exists(path):
            segment = reopen_dispatch_log(self._disk, path, self._log_id, known, hour)
            if segment is not None:
                return segment
        header = FileHeader(FileKind.DISPATCH, self._log_id, 0, hour, now_ms)
        return create_segment(self._disk, path, header).remember_file()

    def _close_file(self, hour: int) -> None:
        segment = self._segments.pop(hour, None)
        if segment is not None:
            segment.close()


def reopen_dispatch_log(disk: Disk, path: str, log_id: int, known: int = 0, hour: int | None = None) -> Segment | None:
    """Open a dispatch log at its end, recovered; None when its creation had not finished: then it is removed.

    Raises:
        DamagedData: a group that was durable does not check, or it is another hour's; all up to the offset ``known``
            was durable.
        Shortage: this process can't read now.
    """
    try:
        segment = open_segment(disk, path, FileKind.DISPATCH, log_id, write=True)
    except FileNotFoundError:
        raise DamagedData(path, 0, "the file is gone") from None
    except NotWritable as error:
        raise Unreadable(path, 0, errno.EACCES) from error
    except UnfinishedFile:
        if known:
            raise DamagedData(path, 0, f"its file header is cut short, {known} bytes of groups were there") from None
        disk.remove(path)
        disk.sync_folder(path.rpartition("/")[0])
        return None
    try:
        if hour is not None and segment.header.number != hour:
            raise DamagedData(path, 0, f"its header says that it is of hour {hour_name(segment.header.number)}")
        segment.recover(0, 0, known, last=True)
    except BaseException:
        segment.close()
        raise
    return segment.remember_file()


def _groups(hour: int, parts: list[NewPart], epoch: int, now_ms: int) -> list[NewGroup]:
    """Make groups of one batch of at most 65,536 rows each; a part is never larger than one handed-over batch."""
    groups: list[NewGroup] = []
    taken: list[NewPart] = []
    rows = 0
    for part in parts:
        count = len(part.sequences)
        if rows + count > ROWS_MAX:
            groups.append(NewGroup(GroupKind.DATA, [encode_outcomes(hour, taken)], epoch, now_ms, 0, rows))
            taken, rows = [], 0
        taken.append(part)
        rows += count
    groups.append(NewGroup(GroupKind.DATA, [encode_outcomes(hour, taken)], epoch, now_ms, 0, rows))
    return groups


def _nobody_hears(hour: int, error: DamagedData) -> None:
    """Whoever sets damaged hours aside has not been made yet."""


def list_dispatch_logs(disk: Disk, folder: str) -> list[tuple[int, str]]:
    """Hours that have a dispatch log, rising, each with its path."""
    found: list[tuple[int, str]] = []
    for day in disk.list_folder(f"{folder}/dispatch"):
        for name in disk.list_folder(f"{folder}/dispatch/{day}"):
            # A log that was being written again when its server died has another name.
            if name.endswith(".log"):
                found.append((hour_from_name(name.removesuffix(".log")), f"{folder}/dispatch/{day}/{name}"))
    return found


def open_dispatch_log(site: Site, hour: int, known: int) -> tuple[Segment, OutcomeRows] | None:
    """Open an hour's dispatch log, with what came to be known while it was damaged; None when it holds nothing yet.

    The files beside it are gone once all that they tell is in the log.

    Raises:
        DamagedData, Shortage: it does not check or can't be read; all up to the offset ``known`` was durable.
    """
    segment = reopen_dispatch_log(site.disk, dispatch_path(site.folder, hour), site.log_id, known, hour)
    if segment is None:
        return None
    try:
        outcomes = read_outcomes(segment)
        beside = [
            quarantine_path(site.folder, hour, number)
            for number in outcomes_beside(site.disk, site.folder).get(hour, ())
        ]
        for path in beside:
            other = reopen_dispatch_log(site.disk, path, site.log_id, 0, hour)
            if other is None:
                continue
            try:
                parts = missing_parts(read_outcomes(other), outcomes)
            finally:
                other.close()
            if parts:
                segment.append(_groups(hour, parts, site.epoch, site.clock.now_ms()))
                segment.flush()
                outcomes = read_outcomes(segment)
        if beside:
            for path in beside:
                site.disk.remove(path)
            site.disk.sync_folder(f"{site.folder}/quarantine")
            log.info("hour_restored hour=%s", hour_name(hour))
    except BaseException:
        segment.close()
        raise
    return segment, outcomes


def read_outcomes(
    segment: Segment, until: int | None = None, give_way: Callable[[], None] = lambda: None
) -> OutcomeRows:
    """Decode the outcomes of an hour: all of the file, or those below the offset ``until``, where a group ends.

    ``give_way`` is called between groups, so that more urgent jobs can run.

    Raises:
        DamagedData: a group does not check, or none ends at ``until``.
    """
    scan = segment.scan(0, 0)
    batches: list[Batch] = []
    while until is None or scan.offset < until:
        group = next(scan, None)
        if group is None:
            break
        batches.extend(batch for _, batch in group.batches())
        give_way()
    if scan.reason or (until is not None and scan.offset != until):
        reason = scan.reason or f"no group ends at offset {until}, up to which it was fsynced"
        raise DamagedData(segment.path, segment.position(scan.offset), reason)
    return decode_outcomes(batches)


def quarantine_path(folder: str, hour: int, number: int = 1) -> str:
    """Path of a file that takes outcomes of an hour while its dispatch log and the files with lower numbers are
    damaged.
    """
    name = hour_name(hour) if number == 1 else f"{hour_name(hour)}.{number}"
    return f"{folder}/quarantine/{name}.log"


def outcomes_beside(disk: Disk, folder: str) -> dict[int, list[int]]:
    """The numbers, rising, of the files that stand beside damaged dispatch logs, by hour."""
    found: dict[int, list[int]] = {}
    for name in list_named(disk, f"{folder}/quarantine"):
        match = OUTCOMES_BESIDE.fullmatch(name)
        if match is None:
            continue
        try:
            found.setdefault(hour_from_name(match[1]), []).append(int(match[2] or 1))
        except BadArgument:
            continue  # These ten digits name no hour: no server wrote such a file.
    return {hour: sorted(numbers) for hour, numbers in found.items()}
