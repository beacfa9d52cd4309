"""Unread pulls: a pull log that a start could not read above its checkpoint waits here until it can be read or is given
up.

Meanwhile nobody knows which messages are leased or acknowledged, or which groups exist. So nothing is pulled or
acknowledged, retention removes nothing, and checkpoints repeat what the last one said about groups. Everything else
goes on. Consumers go on when the file is back, or when an operator gives it up (rules Q1, L10).

Invariant: a file that somebody may still be writing is not read: the end of a log that is being copied looks like an
end that a crash has torn, and it would be cut off.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from delayd.errors import DamagedData, DataError, DelaydError, NotReady
from delayd.log.give_up import Damage, find_damage, give_up
from delayd.log.group import CommitGroup
from delayd.log.log import Log, LogPlace, open_log
from delayd.log.watch import Told
from delayd.machine.disk import Disk, list_named, open_named
from delayd.machine.executor import Done
from delayd.machine.identity import Site
from delayd.machine.state import OperatorLog
from delayd.wire.mend import Decision, Quarantined

from .alarms import Alarms
from .kept import Marks
from .pull_replay import PullReplay
from .recovery import Recovered

ID = "pull"  # The id of the entry for operators.
# How often the files are looked at; files that were the same at two looks are not being copied any more.
LOOK_MS = 5_000
AGAIN_MS = 30_000  # A disk may read again what it did not: another try without a change of the files.
RETRY_MS = 5_000  # The hint to consumers.
PIECE_BYTES = 4 << 20  # Read at a time beside the loop.
TURN_ENTRIES = 2_000  # Entries applied in one turn of the loop; each takes a few microseconds.
COSTS = {
    Decision.TAKE: "its files are read again now; that is also done when they have changed",
    Decision.GIVE_UP: "what can't be read of it is given up: what was acknowledged there comes again, and groups that "
    "were made there begin anew",
}

log = logging.getLogger(__name__)

Seen = list[tuple[str, int | None, int]]


class UnreadPulls:
    """Reads the pull log as soon as that is possible; belongs to the loop.

    ``on_read`` is called with a replay that is done, and the log that it has read.
    """

    def __init__(self, site: Site, recovered: Recovered, alarms: Alarms) -> None:
        self.on_read: Callable[[PullReplay, Log], None] = lambda replay, log: None
        self.damage = recovered.pull_damage  # None once all of it is read.
        self._site = site
        self._place = recovered.pull_place
        self._marks = recovered.marks
        self._replay = recovered.new_replay
        self._clock = site.clock
        self._since_ms = site.clock.now_ms()
        self._look = alarms.alarm(self._look_at_files)
        self._turn = alarms.alarm(self._apply_some)
        self._busy = False
        self._seen: Seen = []
        self._tried: Seen | None = None
        self._again_ms = site.clock.monotonic_ms() + AGAIN_MS
        self._told: list[Told] = []
        self._reading: tuple[Log, PullReplay] | None = None
        self._groups: deque[CommitGroup] = deque()  # Read and not applied yet.
        if self.damage is not None:
            self._name(self.damage)
            self._look.after(LOOK_MS)

    def __iter__(self) -> Iterator[Quarantined]:
        if self.damage is not None:
            what = (self.damage.path, self.damage.position, str(self.damage), 0, self._since_ms)
            yield Quarantined(ID, *what, costs=COSTS)

    def error(self) -> NotReady:
        """The error that consumers are told."""
        why = self.damage or "it is being read"
        return NotReady(
            f"nobody can say what was acknowledged here, for the pull log can't be read: {why}. Restore the file; or "
            f"`delayd mend give-up {ID}`, after which messages come again",
            retry_after_ms=RETRY_MS,
        )

    def _look_at_files(self) -> None:
        if self.damage is None:
            return
        self._look.after(LOOK_MS)
        if not self._busy:
            self._busy = True
            self._site.worker.submit(partial(_look, self._site.disk, self._place.folder), self._looked)

    def release(self, told: Told) -> None:
        """Read the log now, because an operator asks for it."""
        self._told.append(told)
        self._try()

    def drop(self, told: Told) -> None:
        """Give up the part that can't be read, because an operator says so."""
        if self._busy:
            told(False, "it is being read")
            return
        self._busy = True
        now_ms = self._clock.now_ms()
        # Damage is found again by reading. If the last try stopped at entries that check but can't be applied, their
        # place is passed on.
        stopped_at = self.damage.position if self.damage and self.damage.path == self._place.folder else None
        work = partial(_give_up, self._site, self._place, self._marks, now_ms, stopped_at)
        self._site.worker.submit(work, partial(self._given_up, told))

    def _given_up(self, told: Told, done: Done[None]) -> None:
        self._busy = False
        try:
            done.result()
        except (DelaydError, OSError) as error:
            told(False, str(error))
            # Others may have asked for a try meanwhile.
            self._tell(False, str(error))
            return
        self.release(told)

    def _looked(self, done: Done[Seen]) -> None:
        self._busy = False
        try:
            found = done.result()
        except (DataError, OSError) as error:
            log.warning("pull_log_not_looked_at reason=%r", str(error))
            self._tell(False, str(error))
            return
        rested, self._seen = found == self._seen, found
        # An operator who asked for a try during this look does not wait for the next look.
        if self._told or (rested and (found != self._tried or self._clock.monotonic_ms() >= self._again_ms)):
            self._try()

    def _try(self) -> None:
        if self._busy or self.damage is None:
            return
        self._busy = True
        self._tried, self._again_ms = self._seen, self._clock.monotonic_ms() + AGAIN_MS
        marks = (self._marks.pull_offset, self._marks.pull_crc32c)
        work = partial(open_log, self._site.disk, self._place, self._clock.now_ms(), *marks, leave_out=True)
        self._site.worker.submit(work, self._opened)

    def _opened(self, done: Done[Log]) -> None:
        try:
            opened = done.result()
        except (DataError, OSError) as error:
            self._failed(error)
            return
        try:
            self._reading = opened, self._replay()
        except DataError as error:
            opened.close()
            self._failed(error)
            return
        self._read_on()

    def _read_on(self) -> None:
        assert self._reading is not None, "a log is open"
        opened, replay = self._reading
        if replay.offset >= opened.durable:
            self._reading, self.damage, self._busy = None, None, False
            log.warning("pull_log_read_again path=%s groups=%d", self._place.folder, len(replay.groups))
            self.on_read(replay, opened)
            self._tell(True, "consumers are served again")
            return
        self._site.worker.submit(partial(_piece, opened, replay.offset, replay.crc32c), self._read)

    def _read(self, done: Done[list[CommitGroup]]) -> None:
        try:
            self._groups.extend(done.result())
        except (DataError, OSError) as error:
            self._failed(error)
            return
        self._apply_some()

    def _apply_some(self) -> None:
        assert self._reading is not None, "a log is open"
        left = TURN_ENTRIES
        try:
            while self._groups and left > 0:
                left -= 1 + self._reading[1].take(self._groups.popleft())
        except DamagedData as error:
            self._failed(error)
            return
        if self._groups:
            self._turn.soon()
        else:
            self._read_on()

    def _failed(self, error: DelaydError | OSError) -> None:
        """Forget this try; the next one begins anew."""
        if self._reading is not None:
            self._reading[0].close()
        self._reading, self._busy = None, False
        self._groups.clear()
        if isinstance(error, DamagedData) and str(error) != str(self.damage):
            self._name(error)
        self._tell(False, str(error))

    def _name(self, damage: DamagedData) -> None:
        self.damage = damage
        log.critical("pull_log_unread reason=%r fix=delayd_mend_take_or_give_up_%s", str(damage), ID)

    def _tell(self, done: bool, what: str) -> None:
        told, self._told = self._told, []
        for each in told:
            each(done, what)


def _look(disk: Disk, folder: str) -> Seen:
    """List the folder of the log: name, file and size of each."""
    found: Seen = []
    for name in list_named(disk, folder):
        path = f"{folder}/{name}"
        file = open_named(disk, path)
        try:
            found.append((name, disk.file_id(path), file.size()))
        finally:
            file.close()
    return found


def _piece(opened: Log, offset: int, crc32c: int) -> list[CommitGroup]:
    groups: list[CommitGroup] = []
    size = 0
    for group in opened.scan(offset, opened.durable, crc32c):
        groups.append(group)
        size += group.header.total_bytes
        if size >= PIECE_BYTES:
            break
    return groups


def _give_up(site: Site, place: LogPlace, marks: Marks, now_ms: int, stopped_at: int | None) -> None:
    damage = find_damage(site.disk, place, marks.pull_offset, marks.pull_crc32c, now_ms)
    if damage is None and stopped_at is not None:
        error = DamagedData(place.folder, stopped_at, "it says what no server writes")
        damage = Damage(error, marks.pull_offset, marks.pull_crc32c, stopped_at, 0, 0, 0)
    if damage is None:
        return
    for path in give_up(site.disk, place, damage, f"{site.folder}/quarantine", now_ms):
        log.warning("put_aside path=%s", path)
    puts, removes = OperatorLog(site.state).entry(now_ms, f"gave up pull behind {damage.good_until}")
    site.state.commit(puts, removes)
