"""Tally log: the writer of tallies: it counts the rows that this server held, by segment (docs/formats/tally.md).

Invariant: entries are durable before retention may remove the messages that they count. A tally log that does not check
is set aside and made again, as far as the message log is kept (rule L9). Once the core runs, only the worker thread
uses this.
"""

import logging

from delayd.batch.columns import BatchKind
from delayd.errors import DamagedData
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import Log, LogPlace, open_log
from delayd.log.tally import Tallies, decode_tallies, encode_tallies, joined
from delayd.machine.disk import Disk

ASIDE_SUFFIX = ".damaged"

log = logging.getLogger(__name__)


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
