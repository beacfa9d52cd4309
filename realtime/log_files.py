"""Log files: files of the message log and the pull log that are removed, cut or damaged under a running server are set
aside by name until they are back.

Invariant: an entry concerns only the contents of its file. Messages in a message log file that can't be read are passed
over for each group by `Quarantine`.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from delayd.errors import DamagedData
from delayd.log.log import LOOK_MS, Append, Log, LogWatch, OnFiles, Told
from delayd.machine.executor import Executor, run
from delayd.machine.identity import Site
from delayd.wire.status import Decision, Quarantined

from .alarms import Alarms
from .recovery import Recovered

MESSAGE, PULL = "message", "pull"
FILE_COSTS = {
    Decision.TAKE: "the file is looked for again now, and written again if it is gone and the server still has it open"
}

log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """The damage of one file, and since when it is known."""

    damage: DamagedData
    since_ms: int


class LogFiles:
    """Watches both logs; belongs to the loop."""

    def __init__(self, site: Site, recovered: Recovered, alarms: Alarms, commit: Executor) -> None:
        self.on_whole: Callable[[], None] = lambda: None  # Called when a file of the message log can be read again.
        self.on_pull_log_rolled: Callable[[], None] = lambda: None
        self._look = alarms.alarm(self._look_at_all)
        self._look.after(LOOK_MS)
        self._work = site.worker
        self._clock = site.clock
        self._entries: dict[str, Entry] = {}
        self._watches = {MESSAGE: self._watch(MESSAGE, recovered.message_log, commit.submit, lambda: None)}
        if recovered.pull_log is not None:
            # The loop itself appends to the pull log, so these jobs run on the loop.
            self._watches[PULL] = self._watch(
                PULL, recovered.pull_log, lambda job, done: done(run(job)), lambda: self.on_pull_log_rolled()
            )

    def __iter__(self) -> Iterator[Quarantined]:
        for id_, entry in self._entries.items():
            what = (entry.damage.path, entry.damage.position, str(entry.damage), 0, entry.since_ms)
            yield Quarantined(id_, *what, costs=FILE_COSTS)

    def stood_still(self, ms: int) -> None:
        """No file could change for so long: the next look comes so much later."""
        if self._look.at_ms is not None:
            self._look.at(self._look.at_ms + ms)

    def _look_at_all(self) -> None:
        self._look.after(LOOK_MS)
        for watch in self._watches.values():
            watch.look()

    def release(self, id_: str, told: Told) -> None:
        """Look for one of the files now, because an operator asks for it."""
        self._watches[id_.split("/")[1]].look(told)

    def look_at_messages(self, told: Told) -> None:
        """Take files of the message log that were put back, because an operator asks for what is in them."""
        self._watches[MESSAGE].look(told)

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
