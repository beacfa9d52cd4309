"""Seal log: the writer of a delay server's seals (docs/formats/seal.md, rule S4).

Invariant: a seal is durable before the state counts it, and an hour has one seal. If a crash leaves a seal uncounted,
the next start finds it, and it is not written a second time. Only the worker thread uses this.
"""

import logging
from collections.abc import Container

import msgpack

from delayd.batch.columns import BatchKind
from delayd.errors import DamagedData, DamagedValue, key_text
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import Log, open_log
from delayd.log.seal import Seal, SealFacts, SealMark, decode_seals, encode_seal, seal_place
from delayd.log.watch import write_again
from delayd.machine.disk import Disk
from delayd.machine.state import State

KEY = b"seal"

log = logging.getLogger(__name__)


class SealDiffers(Exception):
    """An hour has a seal that a crash left uncounted, and comparing its files now gives another one."""


class SealLog:
    """The open seal log; made by `open_seal_log`."""

    def __init__(self, log: Log, epoch: int, end: SealMark, uncounted: dict[int, tuple[SealMark, Seal]]) -> None:
        self.end = end  # Just behind the last durable seal.
        self._log = log
        self._epoch = epoch
        self._uncounted = uncounted  # By hour, in the order of the log: the mark before a seal, and the seal.

    def add(self, facts: SealFacts, now_ms: int) -> None:
        """Append the seal of an hour; durable on return.

        Raises:
            SealDiffers: the hour has another seal.
            DiskFull: nothing was appended.
            DamagedData: the file was removed, replaced or cut; nothing was appended.
        """
        known = self._uncounted.get(facts.hour)
        if known is not None:
            if known[1].facts != facts:
                raise SealDiffers(f"seal {known[1].number} says {known[1].facts}, the files say {facts}")
            return
        if damage := self.look():
            raise damage
        before = self.end
        seal = Seal(self._log.place.log_id, before.seals, facts, before.sha256)
        batch = encode_seal(seal)
        self._log.append([NewGroup(GroupKind.DATA, [batch], self._epoch, now_ms, 0, 1)], now_ms)
        self._log.flush()
        self._uncounted[facts.hour] = (before, seal)
        self.end = SealMark(self._log.end, self._log.crc32c, before.seals + 1, seal.sha256)

    def put(self, hour: int) -> tuple[bytes, bytes]:
        """The row of the state that counts an hour's seal; seals of other hours that the state does not call sealed
        still wait.
        """
        left = (mark for other, (mark, _) in self._uncounted.items() if other != hour)
        return KEY, msgpack.packb(next(left, self.end))

    def counted(self, hour: int) -> None:
        """The state now counts an hour's seal."""
        self._uncounted.pop(hour, None)

    def last_hour(self) -> int:
        """The latest hour that has a seal, in the whole log; -1 without any. Reads all of it."""
        hours = [-1]
        for group in self._log.scan(self._log.start, self._log.durable):
            for _, batch in group.batches():
                if batch.kind == BatchKind.SEAL:
                    hours.extend(seal.facts.hour for seal in decode_seals(batch))
        return max(hours)

    def look(self) -> DamagedData | None:
        """Check the log's files; return the damage if someone has changed them."""
        return next((found.damage for found in self._log.look()), None)

    def write_again(self) -> None:
        """Write removed files again, when nothing is under way any more."""
        write_again(self._log.segments)

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def open_seal_log(
    disk: Disk,
    state: State,
    folder: str,
    log_id: int,
    epoch: int,
    now_ms: int,
    sealed: Container[int],
    *,
    whole: bool = False,
) -> SealLog:
    """Open the seal log at its end; seals of hours that are not ``sealed`` by the state wait to be counted.

    With ``whole`` the log is read from its beginning; that is also done when the state's mark does not check (rule L9).

    Raises:
        DamagedData: it is shorter than the state counts, or the seals behind that point don't continue the chain.
    """
    mark = SealMark()
    try:
        row = state.get(KEY)
        if row and not whole:
            mark = SealMark(*msgpack.unpackb(row))
    except DamagedValue as error:
        log.warning("value_rebuilt key=%s source=%s", key_text(error.key), seal_place(folder, log_id).folder)
    seal_log = open_log(disk, seal_place(folder, log_id), now_ms, mark.offset, mark.crc32c)
    uncounted: dict[int, tuple[SealMark, Seal]] = {}
    end = mark
    for group in seal_log.scan(mark.offset, seal_log.durable, mark.crc32c):
        seals = [seal for _, batch in group.batches() if batch.kind == BatchKind.SEAL for seal in decode_seals(batch)]
        for seal in seals:
            if (seal.number, seal.previous_sha256) != (end.seals, end.sha256):
                seal_log.close()
                what = f"seal {seal.number} does not follow the {end.seals} seals before it"
                raise DamagedData(seal_log.place.folder, group.header.offset, what)
            if seal.facts.hour not in sealed:
                uncounted[seal.facts.hour] = (end, seal)
            end = SealMark(group.end, group.header.header_crc32c, seal.number + 1, seal.sha256)
    return SealLog(seal_log, epoch, end, uncounted)
