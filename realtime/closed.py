"""Closed: each segment of the message log that gets no more groups is read once, beside the loop, and tallied.

The tally of a segment is written to the tally log before retention may remove the segment. A row whose bytes don't
match its content hash is logged by name (rules S5, S6; docs/decisions.md, 0010). None of this is on the path of
a request.

Invariant: a piece reads a bounded part, and whatever fails is tried again after a while. A segment that can't be read
is left out after some tries, so that it does not hold up the others.
The tally log goes on where it ends; when it does not check it is set aside and made again for what is kept (rule L9).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from delayd.batch.columns import BatchKind
from delayd.errors import (
    CallerError,
    DamagedData,
    DelaydError,
    DiskFull,
    NotWritable,
    ServerStopped,
    Shortage,
)
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import Log, LogPlace, open_log
from delayd.log.tally import Differing, Tallier, Tallies, covered, decode_tallies, encode_tallies, joined
from delayd.machine.disk import Disk
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site
from delayd.machine.operating import Wait, WaitKind, counted

PIECE_BYTES = 4 << 20  # One job reads this much: some 10 ms.
PAUSE_MS = 20  # Pause between two jobs, so that a segment of 256 MiB takes two seconds and a part of one core.
RETRY_MS = 30_000
TRIES_MAX = 3  # After this many tries a segment is left out.
PASSES = (DiskFull, NotWritable, Shortage)  # Errors that say nothing about the segment that was read.
OFFSET_MAX = (1 << 63) - 1

ASIDE_SUFFIX = ".damaged"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reading:
    """One segment that is being read, [begin, end); only the job under way uses it."""

    begin: int
    end: int
    tallier: Tallier
    at: int
    crc32c: int | None = None
    entries: Tallies | None = None


class ClosedSegments:
    """Reads closed segments one after the other; belongs to the loop."""

    def __init__(self, site: Site, message_log: Log, tally_log: TallyLog) -> None:
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.rolls_at = 0  # The message log may have another segment when it ends behind this offset: then call `look`.
        self.end = tally_log.end  # How far the tally log is durable.
        self._message_log = message_log
        self._tally_log = tally_log
        self._executor = site.worker
        self._clock = site.clock
        self._turn = site.alarms.alarm(self._go_on)
        self._reading: _Reading | None = None
        self._under_way = False
        self._tries = 0
        self._hurries = self._loops = False
        self._begin_from(tally_log.entries)
        self.look()

    @property
    def kept_from(self) -> int:
        """Retention must keep the log from this offset on; a segment that can't be read or tallied does not hold
        retention up.
        """
        return OFFSET_MAX if self._tries else self._at

    @property
    def differing(self) -> int:
        """Rows of closed segments that are still kept whose bytes don't match their content hash."""
        return sum(rows for begin, rows in self._differing.items() if begin >= self._message_log.start)

    def waits(self) -> Iterator[Wait]:
        """List findings that an operator should know."""
        if rows := self.differing:
            why = "their content hash is another one than their bytes give, so somebody has changed them; "
            why += f"first: {self._first}" if self._first else "they were found by an earlier life of this server"
            yield WaitKind.CONTENT_DIFFERS.wait(why, messages=counted(rows, "message|messages"))

    def look(self, pause_ms: int = 0) -> None:
        """Read on after a pause, if there is something to read."""
        begin = self._message_log.segments[-1].base_offset
        self.rolls_at = begin + self._message_log.place.segment_bytes
        if self._turn.at_ms is None and not self._under_way and begin > self._at:
            self._turn.after(pause_ms)

    def _go_on(self) -> None:
        if not self._under_way:
            self._start()

    def hurry(self) -> None:
        """Read on without pauses: retention waits for it."""
        self._hurries = True
        if self._loops:
            return
        self._loops = True
        while self._hurries and not self._under_way:
            self._hurries = self._start()
        self._loops = False

    def close(self) -> None:
        """Close the tally log."""
        self._tally_log.close()

    def _start(self) -> bool:
        """Start to read the next piece; False when there is none."""
        reading = self._reading = self._reading or self._next()
        if reading is None:
            return False
        self._under_way = True
        work = partial(_piece, self._message_log, self._tally_log, reading, self._clock.now_ms())
        self._executor.submit(work, self._done, Priority.SPARE)
        return True

    def _begin_from(self, entries: Tallies) -> None:
        self._at = max([self._message_log.start, *(end for _, end in covered(entries))])
        self._differing: dict[int, int] = {}
        self._first = ""
        for entry in entries[entries["differing"] > 0]:
            begin = int(entry["begin"])
            self._differing[begin] = self._differing.get(begin, 0) + int(entry["differing"])

    def _next(self) -> _Reading | None:
        segments = self._message_log.segments
        for segment, following in pairwise(segments):
            if segment.base_offset >= self._at:
                begin = segment.base_offset
                return _Reading(begin, following.base_offset, Tallier(begin), begin)
        self._at = max(self._at, segments[-1].base_offset)
        return None

    def _done(self, done: Done[bool]) -> None:
        self._under_way = False
        reading = self._reading
        assert reading is not None, "one was being read"
        try:
            finished = done.result()
        except ServerStopped as error:
            self.on_failure(error)
            return
        except (DelaydError, OSError) as error:
            self._failed(reading, error)
            return
        if finished:
            self._finished(reading)
        if self._hurries:
            self.hurry()
        self.look(PAUSE_MS)

    def _finished(self, reading: _Reading) -> None:
        self._reading, self.end = None, self._tally_log.end
        self._tries = 0
        if reading.entries is None:
            self._begin_from(self._tally_log.entries)
            return
        self._at = reading.end
        found = reading.tallier
        if found.differing_count:
            self._differing[reading.begin] = found.differing_count
            self._tell(found.differing, found.differing_count)
        log.info(
            "segment_tallied begin=%d end=%d rows=%d differing=%d",
            *(reading.begin, reading.end, int(reading.entries["rows"].sum(dtype=np.uint64)), found.differing_count),
        )

    def _failed(self, reading: _Reading, error: DelaydError | OSError) -> None:
        self._reading = None
        self._hurries = False
        self._tries += 1
        leaves_out = self._tries >= TRIES_MAX and not isinstance(error, PASSES)
        log.log(
            logging.ERROR if leaves_out else logging.WARNING,
            "segment_not_tallied begin=%d end=%d reason=%r then=%s",
            *(reading.begin, reading.end, str(error), "left_out" if leaves_out else "tried_again"),
        )
        if leaves_out:
            self._at, self._tries = reading.end, 0
            self.look(PAUSE_MS)
        else:
            self._turn.after(RETRY_MS)

    def _tell(self, found: list[Differing], count: int) -> None:
        told = [self._told(each) for each in found[:10]]
        self._first = self._first or told[0]
        log.critical("stored_content_differs rows=%d messages=%r", count, told)

    def _told(self, found: Differing) -> str:
        path, position = self._message_log.file_position(found.offset)
        return f"{path} at byte {position}, row {found.row}: message {found.sequence} of {found.origin_log_id:016x}"


def _piece(message_log: Log, tally_log: TallyLog, reading: _Reading, now_ms: int) -> bool:
    """Read one piece of a segment, and write the results after the last one; return whether it was the last one."""
    stop = min(reading.at + PIECE_BYTES, reading.end)
    try:
        for group in message_log.scan(reading.at, stop, reading.crc32c):
            reading.tallier.take(group)
            reading.at, reading.crc32c = group.end, group.header.header_crc32c
    except CallerError as error:
        raise DamagedData(*message_log.file_position(reading.at), f"the group there: {error.message}") from error
    if reading.at < reading.end:
        return False
    entries = reading.tallier.entries()
    if tally_log.add(entries, now_ms):
        reading.entries = entries
    return True


class TallyLog:
    """The open tally log; ``entries`` are the entries that it held when it was opened."""

    def __init__(self, disk: Disk, place: LogPlace, epoch: int, now_ms: int, counted: int) -> None:
        """Open it; ``counted`` is the offset up to which a checkpoint says that it was durable.

        Raises:
            NewerFormat: a later version wrote it.
            Shortage: this process lacks what that needs.
        """
        self._disk = disk
        self._place = place
        self._epoch = epoch
        self._log: Log | None = None  # Created with the first entries.
        self.entries: Tallies = joined(())
        if not counted and not disk.list_folder(place.folder):
            return
        try:
            self._log = self._open(now_ms, counted)
        except DamagedData as error:
            self._begin_again(error)

    @property
    def end(self) -> int:
        """Offset up to which it is durable."""
        return self._log.durable if self._log else 0

    def add(self, entries: Tallies, now_ms: int) -> bool:
        """Append the entries of a segment, durable on return; False when the log was damaged and had to be begun anew
        instead.

        Raises:
            DiskFull, Shortage: nothing was appended.
            ServerStopped: the disk is in a state that only a restart resolves.
        """
        if self._log is None:
            self._log = open_log(self._disk, self._place, now_ms)
        damage = next((found.damage for found in self._log.look()), None)
        if damage is not None:
            self._log.close()
            self._log = None
            self._begin_again(damage)
            return False
        batches = encode_tallies(entries)
        self._log.append([NewGroup(GroupKind.DATA, batches, self._epoch, now_ms, 0, len(entries))], now_ms)
        self._log.flush()
        return True

    def close(self) -> None:
        """Close the file."""
        if self._log is not None:
            self._log.close()

    def _open(self, now_ms: int, counted: int) -> Log:
        found = open_log(self._disk, self._place, now_ms, counted, None)
        try:
            groups = found.scan(found.start, found.durable, 0)
            batches = [batch for group in groups for _, batch in group.batches() if batch.kind == BatchKind.TALLY]
            self.entries = joined([decode_tallies(batch) for batch in batches])
        except DamagedData:
            found.close()
            raise
        return found

    def _begin_again(self, damage: DamagedData) -> None:
        log.critical(
            "tally_log_damaged path=%s position=%d reason=%r then=set_aside_and_made_again_as_far_as_messages_are_kept",
            *(damage.path, damage.position, damage.what),
        )
        folder = self._place.folder
        for name in self._disk.list_folder(folder):
            if name.endswith(".log"):
                self._disk.rename(f"{folder}/{name}", f"{folder}/{name}.{self._epoch}{ASIDE_SUFFIX}")
        self._disk.sync_folder(folder)
        self.entries = joined(())
