"""Log files: files of the message log and the pull log that were removed, cut or damaged are set aside by name until
they are back.

Invariant: an entry concerns only the contents of its file. Messages in a message log file that can't be read are passed
over for each group by `Quarantine`. If batches in doubt are in that file, delay servers must wait (rule H2), because
nobody else knows which of their batches arrived.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from delayd.errors import DamagedData, DataError, DelaydError, HandoffRefused
from delayd.log.group import CommitGroup
from delayd.log.log import Log
from delayd.log.watch import LOOK_MS, Append, LogWatch, OnFiles, Told
from delayd.machine.executor import Done, Executor, Priority, run
from delayd.machine.identity import Site
from delayd.wire.mend import Decision, Quarantined

from .alarms import Alarms
from .recovery import Recovered
from .unread_pulls import ID as PULL
from .unread_pulls import UnreadPulls

MESSAGE = "message"
WINDOW = "window"  # The id of the entry for batches in doubt that can't be read.
FILE_COSTS = {
    Decision.TAKE: "the file is looked for again now, and written again if it is gone and the server still has it open"
}
WINDOW_COSTS = {
    Decision.TAKE: "the file is read again now; nothing is lost by it",
    Decision.GIVE_UP: "delay servers go on: what they had handed over and heard nothing of may be delivered twice",
}

log = logging.getLogger(__name__)


OnCheckpoint = Callable[[DelaydError | None], None]
"""Called when a checkpoint is durable that began after it was wanted, or with the reason why it is not."""


class Entry(NamedTuple):
    """The damage of one file, and since when it is known."""

    damage: DamagedData
    since_ms: int


class LogFiles:
    """Watches both logs; belongs to the loop."""

    def __init__(self, site: Site, recovered: Recovered, alarms: Alarms, commit: Executor) -> None:
        self.on_whole: Callable[[], None] = lambda: None  # Called when a file of the message log can be read again.
        self.on_pull_log_rolled: Callable[[], None] = lambda: None
        self.on_window: Callable[[list[CommitGroup]], None] = lambda groups: None
        self.on_checkpoint_wanted: Callable[[OnCheckpoint], None] = lambda counted: None
        self.unread_pulls = UnreadPulls(site, recovered, alarms)
        self._look = alarms.alarm(self._look_at_all)
        self._look.after(LOOK_MS)
        self._message_log = recovered.message_log
        self._work = site.worker
        self._clock = site.clock
        self._entries: dict[str, Entry] = {}
        self._window_offset = min(recovered.marks.window_offset, recovered.marks.indexed_offset)
        self._reading_window = False
        # Whether an operator gives up the batches in doubt, and the next checkpoint is to store that.
        self.drops_window = False
        if recovered.window_damage is not None:
            self._put(WINDOW, recovered.window_damage)
        self._watches = {MESSAGE: self._watch(MESSAGE, recovered.message_log, commit.submit, lambda: None)}

    def watch_pull_log(self, pull_log: Log) -> None:
        """Watch the pull log too, because it can be read now."""
        # The loop itself appends to the pull log, so these jobs run on the loop.
        self._watches[PULL] = self._watch(
            PULL, pull_log, lambda job, done: done(run(job)), lambda: self.on_pull_log_rolled()
        )

    def __iter__(self) -> Iterator[Quarantined]:
        for id_, entry in self._entries.items():
            what = (entry.damage.path, entry.damage.position, str(entry.damage), 0, entry.since_ms)
            yield Quarantined(id_, *what, costs=WINDOW_COSTS if id_ == WINDOW else FILE_COSTS)
        yield from self.unread_pulls

    @property
    def window_offset(self) -> int | None:
        """From which offset on the batches in doubt must be read again; None when all are known, or are being given
        up.
        """
        return self._window_offset if WINDOW in self._entries and not self.drops_window else None

    def check_window(self) -> None:
        """Refuse a hello while nobody can say which batches arrived."""
        if WINDOW in self._entries:
            reason = self._entries[WINDOW].damage
            raise HandoffRefused(
                f"what is in doubt here can't be read: {reason}. Restore it; or `delayd mend give-up {WINDOW}`, "
                "after which what was in doubt may be delivered twice"
            )

    def stood_still(self, ms: int) -> None:
        """No file could change for so long: the next look comes so much later."""
        if self._look.at_ms is not None:
            self._look.at(self._look.at_ms + ms)

    def _look_at_all(self) -> None:
        self._look.after(LOOK_MS)
        for watch in self._watches.values():
            watch.look()
        self._read_window()

    def release(self, id_: str, told: Told) -> None:
        """Look for one of the files now, because an operator asks for it."""
        if id_ == WINDOW:
            self._read_window(told)
        elif id_ == PULL:
            self.unread_pulls.release(told)
        else:
            self._watches[id_.split("/")[1]].look(told)

    def look_at_messages(self, told: Told) -> None:
        """Take files of the message log that were put back, because an operator asks for what is in them."""
        self._watches[MESSAGE].look(told)

    def drop_window(self, told: Told) -> None:
        """Go on without knowing which batches were in doubt, because an operator says so; a checkpoint stores that
        before any hello is answered.
        """

        def checkpointed(refused: DelaydError | None) -> None:
            self.drops_window = False
            if refused is not None:
                told(False, f"nothing was stored: {refused.message}")
                return
            self._lift(WINDOW)
            told(True, "it was given up")

        self.drops_window = True
        self.on_checkpoint_wanted(checkpointed)

    def _watch(self, name: str, log_: Log, append: Append, rolled: Callable[[], None]) -> LogWatch:
        on_files = OnFiles(partial(self._put_file, name), partial(self._lift_file, name), rolled)
        return LogWatch(log_, append, self._work, self._clock, on_files)

    def _put_file(self, log_name: str, name: str, damage: DamagedData) -> None:
        self._put(f"log/{log_name}/{name}", damage)

    def _lift_file(self, log_name: str, name: str) -> None:
        self._lift(f"log/{log_name}/{name}")
        if log_name == MESSAGE:
            self.on_whole()

    def _put(self, id_: str, damage: DamagedData) -> None:
        known = self._entries.get(id_)
        self._entries[id_] = Entry(damage, self._clock.now_ms() if known is None else known.since_ms)
        if known is None or str(known.damage) != str(damage):
            log.critical("quarantined id=%s rows=%d reason=%r", id_, 0, str(damage))

    def _lift(self, id_: str) -> None:
        if self._entries.pop(id_, None) is not None:
            log.info("released id=%s rows=%d", id_, 0)

    def _read_window(self, told: Told | None = None) -> None:
        if WINDOW not in self._entries or self._reading_window:
            if told is not None:
                told(False, "it is being read")
            return
        self._reading_window = True
        work = partial(_groups_from, self._message_log, self._window_offset)
        self._work.submit(work, partial(self._window_read, told), Priority.DUE)

    def _window_read(self, told: Told | None, done: Done[list[CommitGroup]]) -> None:
        self._reading_window = False
        try:
            groups = done.result()
        except DataError as error:
            if isinstance(error, DamagedData) and WINDOW in self._entries:
                self._put(WINDOW, error)
            if told is not None:
                told(False, str(error))
            return
        if WINDOW in self._entries:
            self.on_window(groups)
            self._lift(WINDOW)
        if told is not None:
            told(True, "what is in doubt is known again")


def _groups_from(message_log: Log, offset: int) -> list[CommitGroup]:
    """Read all groups from an offset on; rule H2 bounds how much that is."""
    return list(message_log.scan(offset, message_log.durable, 0 if offset == 0 else None))
