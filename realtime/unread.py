"""Unread: what a start could not read stays set aside until its files are whole again, or are given up; then the server
begins anew, for only a start reads files into memory (rule L10; docs/decisions.md, 0017).

- ``pull``: the pull log above its checkpoint. Nobody knows which messages are leased or acknowledged, or which groups
  there are. So nothing is pulled or acknowledged, retention removes nothing, and checkpoints repeat what the last one
  said about groups (rule Q1).
- ``window``: the message log from the first batch in doubt on. Nobody knows which batches arrived, so the hellos of
  delay servers are refused (rule H2).

An example: a start meets damage in the pull log. Delay servers hand messages over all the same. At 12:00:00 somebody
begins to copy the file back, and at 12:00:07 it is there. The looks at 12:00:05 and 12:00:10 see a file that has
changed. That at 12:00:15 sees one that has rested, so it is read once more, as the start reads it. It is whole. A
checkpoint is taken, so that the next start needs nothing that only this life has, and the server begins anew.

Files that are removed, cut or replaced under the running server are set aside too, by name, until they are back
(`LogFiles`); an entry concerns only what its file holds.

Invariant: a pull log that somebody may still be writing is not read: the end of a log that is being copied looks like
an end that a crash has torn, and it would be cut off.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from delayd.errors import DamagedData, DelaydError, HandoffRefused, NotReady, RetryLater
from delayd.log.log import Append, Log, LogWatch, OnFiles, Told
from delayd.log.tail import Damage, find_damage, give_up, ids_skipped
from delayd.machine.disk import Disk, list_named, open_named
from delayd.machine.executor import Done, Executor, run
from delayd.machine.identity import Site
from delayd.machine.state import OperatorLog
from delayd.wire.status import Decision, Quarantined

from .recovery import PullReplay, Recovered, groups_behind, set_back

PULL = "pull"  # The ids of the entries for operators.
WINDOW = "window"
REST_MS = 5_000  # Files that were the same at two looks, so long apart, are not being copied any more.
AGAIN_MS = 30_000  # A disk may read again what it did not: another try without a change of the files.
RETRY_MS = 5_000  # The hint to consumers.
COSTS = {
    PULL: {
        Decision.TAKE: "its files are read again now; that is also done when they have changed",
        Decision.GIVE_UP: "what can't be read of it is given up: what was acknowledged there comes again, and groups "
        "that were made there begin anew",
    },
    WINDOW: {
        Decision.TAKE: "the file is read again now; nothing is lost by it",
        Decision.GIVE_UP: "delay servers go on: what they had handed over and heard nothing of may be delivered twice",
    },
}

FILE_COSTS = {
    Decision.TAKE: "the file is looked for again now, and written again if it is gone and the server still has it open"
}

log = logging.getLogger(__name__)

OnCheckpoint = Callable[[DelaydError | None], None]
"""Called when a checkpoint is durable that began after it was wanted, or with the reason why it is not."""
Seen = list[tuple[str, int | None, int]]
BeginAnew = Callable[[str], None]
OnFile = Callable[[], None]


class _Try(NamedTuple):
    """A thing that is read again; with ``drops`` it is given up first."""

    id: str
    drops: bool = False
    told: Told = lambda done, what: None


class Unread:
    """Tries what a start could not read, one thing at a time; belongs to the loop.

    ``checkpoint`` takes a checkpoint. ``begin_anew`` has the server begin anew in place.
    """

    def __init__(
        self, site: Site, recovered: Recovered, checkpoint: Callable[[OnCheckpoint], None], begin_anew: BeginAnew
    ) -> None:
        self.gives_window_up = False  # Whether the next checkpoint is to say that no batch is in doubt.
        self._site = site
        self._recovered = recovered
        self._checkpoint, self._begin_anew = checkpoint, begin_anew
        self._begun = False
        self._since_ms = site.clock.now_ms()
        self._look = site.alarms.alarm(self._look_at_files)
        self._again_ms = 0
        self._seen: Seen = []
        self._tried: Seen = []
        self._waiting: list[_Try] = []
        self._running = False
        self._damage: dict[str, DamagedData] = {}
        for id_, damage in ((PULL, recovered.pull_damage), (WINDOW, recovered.window_damage)):
            if damage is not None:
                self._put(id_, damage)
        if self._damage:
            self._plan()

    def __iter__(self) -> Iterator[Quarantined]:
        for id_, damage in self._damage.items():
            what = (damage.path, damage.position, str(damage), 0, self._since_ms)
            yield Quarantined(id_, *what, costs=COSTS[id_])

    def check_pulls(self) -> None:
        """Refuse a consumer while nobody can say what was acknowledged."""
        if PULL in self._damage:
            raise NotReady(
                f"nobody can say what was acknowledged here: {self._damage[PULL]}. It goes on when that is mended; or "
                f"`delayd mend give-up {PULL}`, after which messages come again",
                retry_after_ms=RETRY_MS,
            )

    def check_window(self) -> None:
        """Refuse a hello while nobody can say which batches arrived."""
        if WINDOW in self._damage:
            raise HandoffRefused(
                f"what is in doubt here can't be read: {self._damage[WINDOW]}. Restore it; or `delayd mend give-up "
                f"{WINDOW}`, after which what was in doubt may be delivered twice"
            )

    def window_offset(self, indexed: int) -> int | None:
        """From which offset on the next start reads the batches in doubt, if this one could not; ``indexed``, the end
        of what a checkpoint covers, where they are given up. A later start reads all of them or none.
        """
        if WINDOW not in self._damage:
            return None
        return indexed if self.gives_window_up else self._recovered.window_offset

    def decide(self, id_: str, told: Told, *, drops: bool) -> None:
        """Read it now, because an operator asks for it; with ``drops`` it is given up."""
        if self._begun:
            told(False, "the server is about to begin anew; say it again in a moment")
            return
        self._waiting.insert(0, _Try(id_, drops, told))
        self._next()

    def _plan(self) -> None:
        self._look.after(REST_MS)
        self._again_ms = self._again_ms or self._site.clock.monotonic_ms() + AGAIN_MS

    def _look_at_files(self) -> None:
        self._plan()
        if not self._running and not self._begun:
            self._running = True
            work = partial(_files_of, self._site.disk, self._recovered.pull_place.folder)
            self._site.worker.submit(work, self._looked)

    def _looked(self, done: Done[Seen]) -> None:
        self._running = False
        try:
            found = done.result()
        except (DelaydError, OSError) as error:
            log.warning("pull_log_not_looked_at reason=%r", str(error))
            self._next()
            return
        rested, self._seen = found == self._seen, found
        again = self._site.clock.monotonic_ms() >= self._again_ms
        if rested and (found != self._tried or again) and PULL in self._damage:
            self._waiting.append(_Try(PULL))
        if again:
            self._again_ms = self._site.clock.monotonic_ms() + AGAIN_MS
            if WINDOW in self._damage:
                self._waiting.append(_Try(WINDOW))
        self._next()

    def _next(self) -> None:
        if self._running or self._begun or not self._waiting:
            return
        self._running = True
        each = self._waiting.pop(0)
        if each.id == WINDOW and each.drops:
            self.gives_window_up = True
            self._whole(each)
            return
        if each.id == WINDOW:
            work = partial(_check_window, self._recovered)
        elif each.drops:
            # If the last try stopped at entries that check but say what no server writes, reading does not find that.
            damage, folder = self._damage[PULL], self._recovered.pull_place.folder
            stopped_at = damage.position if damage.path == folder else None
            work = partial(_give_up_pulls, self._site, self._recovered, stopped_at)
        else:
            self._tried = self._seen
            self._site.worker.submit(partial(_read_pulls, self._site, self._recovered), partial(self._judge, each))
            return
        self._site.worker.submit(work, partial(self._read, each))

    def _judge(self, each: _Try, done: Done[tuple[PullReplay, Log]]) -> None:
        """Set groups back as the next start would, or it might find, once more, that it can't."""
        try:
            replay, pull_log = done.result()
        except (DelaydError, OSError):
            self._read(each, done)
            return
        try:
            behind = groups_behind(replay, self._recovered.index, self._recovered.unread_from)
        except RetryLater as error:
            pull_log.close()
            self._end(each, False, str(error))
            return
        work = partial(_set_back, self._site, self._recovered, replay, behind, pull_log)
        self._site.worker.submit(work, partial(self._read, each))

    def _read(self, each: _Try, done: Done[object]) -> None:
        try:
            done.result()
        except (DelaydError, OSError) as error:
            if isinstance(error, DamagedData):
                self._put(each.id, error)
            self._end(each, False, str(error))
            return
        self._whole(each)

    def _whole(self, each: _Try) -> None:
        """Take a checkpoint before the next life begins: then that needs no file that only this life can read."""
        self._checkpoint(partial(self._checkpointed, each))

    def _checkpointed(self, each: _Try, refused: DelaydError | None) -> None:
        if refused is not None:
            self.gives_window_up = False
            self._end(each, False, f"nothing was stored: {refused.message}")
            return
        self._begun = True
        what = "it was given up" if each.drops else "it is whole again"
        self._end(each, True, f"{what}, and the server begins anew")
        self._begin_anew(f"{each.id}: {what}")

    def _end(self, each: _Try, done: bool, what: str) -> None:
        self._running = False
        each.told(done, what)
        if self._begun:
            for other in self._waiting:
                other.told(False, "the server is about to begin anew; say it again in a moment")
        self._next()

    def _put(self, id_: str, damage: DamagedData) -> None:
        known = self._damage.get(id_)
        self._damage[id_] = damage
        if known is None or str(known) != str(damage):
            if id_ == PULL:
                log.critical("pull_log_unread reason=%r fix=delayd_mend_take_or_give_up_%s", str(damage), PULL)
            else:
                log.critical("quarantined id=%s rows=%d reason=%r", id_, 0, str(damage))


def _files_of(disk: Disk, folder: str) -> Seen:
    """List the folder of a log: name, file and size of each."""
    found: Seen = []
    for name in list_named(disk, folder):
        path = f"{folder}/{name}"
        file = open_named(disk, path)
        try:
            found.append((name, disk.file_id(path), file.size()))
        finally:
            file.close()
    return found


def _read_pulls(site: Site, recovered: Recovered) -> tuple[PullReplay, Log]:
    """Read the pull log as the next start will; raises what that meets."""
    return recovered.read_pulls(recovered.index.blank(), site.clock.now_ms())


def _set_back(site: Site, recovered: Recovered, replay: PullReplay, behind: Mapping[int, int], pull_log: Log) -> None:
    """Set groups back, durably, and forget the pull log; raises DiskFull."""
    assert recovered.unread_from is not None, "the pull log is unread"
    try:
        set_back(replay, behind, pull_log, site.epoch, recovered.unread_from)
    finally:
        pull_log.close()


def _check_window(recovered: Recovered) -> None:
    """Read the batches in doubt as the next start will, and forget them; raises what that meets."""
    for _ in recovered.window_groups():
        pass


def _give_up_pulls(site: Site, recovered: Recovered, stopped_at: int | None) -> None:
    """Have the pull log end at its last good group; the rest is put aside."""
    place, marks, now_ms = recovered.pull_place, recovered.marks, site.clock.now_ms()
    damage = find_damage(site.disk, place, marks.pull_offset, marks.pull_crc32c, now_ms)
    if damage is None and stopped_at is not None:
        error = DamagedData(place.folder, stopped_at, "it says what no server writes")
        damage = Damage(error, marks.pull_offset, marks.pull_crc32c, stopped_at, 0, 0, 0)
    if damage is not None:
        skip = ids_skipped(damage, site.epoch, now_ms)
        for path in give_up(site.disk, place, damage, f"{site.folder}/quarantine", now_ms, [skip]):
            log.warning("put_aside path=%s", path)
        puts, removes = OperatorLog(site.state).entry(now_ms, f"gave up pull behind {damage.good_until}")
        site.state.commit(puts, removes)
    _read_pulls(site, recovered)[1].close()


MESSAGE, PULL = "message", "pull"


class UnreadEntry(NamedTuple):
    """The damage of one file, and since when it is known."""

    damage: DamagedData
    since_ms: int


class LogFiles:
    """Watches both logs; belongs to the loop. ``on_whole``: a file of the message log can be read again."""

    def __init__(
        self, site: Site, recovered: Recovered, commit: Executor, on_whole: OnFile, on_pull_log_rolled: OnFile
    ) -> None:
        self._site = site
        self._on_whole = on_whole
        self._entries: dict[str, UnreadEntry] = {}
        self._watches = {MESSAGE: self._watch(MESSAGE, recovered.message_log, commit.submit, lambda: None)}
        if recovered.pull_log is not None:
            # The loop itself appends to the pull log, so these jobs run on the loop.
            pull_log = recovered.pull_log
            self._watches[PULL] = self._watch(PULL, pull_log, lambda job, done: done(run(job)), on_pull_log_rolled)

    def __iter__(self) -> Iterator[Quarantined]:
        for id_, entry in self._entries.items():
            what = (entry.damage.path, entry.damage.position, str(entry.damage), 0, entry.since_ms)
            yield Quarantined(id_, *what, costs=FILE_COSTS)

    def release(self, id_: str, told: Told) -> None:
        """Look for one of the files now, because an operator asks for it."""
        self._watches[id_.split("/")[1]].look(told)

    def look_at_messages(self, told: Told) -> None:
        """Take files of the message log that were put back, because an operator asks for what is in them."""
        self._watches[MESSAGE].look(told)

    def _watch(self, name: str, log_: Log, append: Append, rolled: Callable[[], None]) -> LogWatch:
        on_files = OnFiles(partial(self._put_file, name), partial(self._lift_file, name), rolled)
        return LogWatch(log_, append, self._site.worker, self._site.alarms, on_files)

    def _put_file(self, log_name: str, name: str, damage: DamagedData) -> None:
        self._put(f"log/{log_name}/{name}", damage)

    def _lift_file(self, log_name: str, name: str) -> None:
        self._lift(f"log/{log_name}/{name}")
        if log_name == MESSAGE:
            self._on_whole()

    def _put(self, id_: str, damage: DamagedData) -> None:
        known = self._entries.get(id_)
        self._entries[id_] = UnreadEntry(damage, self._site.clock.now_ms() if known is None else known.since_ms)
        if known is None or str(known.damage) != str(damage):
            log.critical("quarantined id=%s rows=%d reason=%r", id_, 0, str(damage))

    def _lift(self, id_: str) -> None:
        if self._entries.pop(id_, None) is not None:
            log.info("released id=%s rows=%d", id_, 0)
