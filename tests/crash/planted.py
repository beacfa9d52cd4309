"""Bugs in the sealing and the deleting of hours, which deaths of the delay server must show."""

from __future__ import annotations

from unittest.mock import patch

from delayd.delay.books import retention
from delayd.delay.books.retention import Retention, SealVerdict
from delayd.delay.books.sealing import SealLog, compare
from delayd.delay.filing.hour_table import HourFile, OutcomeEnd, hour_key, hour_put
from delayd.delay.filing.schedule_log import scan_schedule_log
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import Seal, SealFacts, SealMark, dispatch_path, encode_seal, schedule_path
from tests.worlds.bugs import SEAL_WITHOUT_A_SYNC
from tests.worlds.patches import Bugs, Patch

Deleted = tuple[list[int], dict[int, HourFile]]

_add = SealLog.add
_delete = Retention._delete


def _seal_again(self: SealLog, facts: SealFacts, now_ms: int) -> None:
    self._uncounted.clear()
    _add(self, facts, now_ms)


def _chain_to_nothing(self: SealLog, facts: SealFacts, now_ms: int) -> None:
    seal = Seal(self._log.place.log_id, self.end.seals, facts, bytes(32))
    self._log.append([NewGroup(GroupKind.DATA, [encode_seal(seal)], self._epoch, now_ms, 0, 1)], now_ms)
    self._log.flush()
    self.end = SealMark(self._log.end, self._log.crc32c, self.end.seals + 1, seal.sha256)


def _count_before_the_seal(
    self: Retention, hour: int, file: HourFile, end: OutcomeEnd, seals: SealLog, now_ms: int
) -> SealVerdict:
    stored = scan_schedule_log(self._disk, self._folder, self._log_id, hour, file)
    facts = compare(hour, (entry.batch for entry in stored), self._outcomes_of(hour, end))
    if facts is not None:
        self._state.commit([hour_put(hour, retention._sealed(file, facts))])
        seals.add(facts, now_ms)
        self._state.commit([seals.put(hour)])
        seals.counted(hour)
    return SealVerdict(facts)


def _remove_at_once(self: Retention, files: dict[int, HourFile]) -> Deleted:
    for hour in files:
        for path in (schedule_path(self._folder, hour), dispatch_path(self._folder, hour)):
            self._disk.remove(path)
            self._disk.sync_folder(path.rpartition("/")[0])
    self._state.commit([], [hour_key(hour) for hour in files])
    return list(files), {}


def _remove_the_dispatch_log_first(self: Retention, files: dict[int, HourFile]) -> Deleted:
    with (
        patch.object(retention, "schedule_path", dispatch_path),
        patch.object(retention, "dispatch_path", schedule_path),
    ):
        return _delete(self, files)


PLANTED: Bugs = {
    "S4: the state counts a seal that is not synced": SEAL_WITHOUT_A_SYNC,
    "S4: an hour that a crash left sealed is sealed again": [Patch(SealLog, "add", _seal_again)],
    "S4: a seal does not name the one before": [Patch(SealLog, "add", _chain_to_nothing)],
    "S4: the state calls an hour sealed before its seal is durable": [
        Patch(Retention, "_verdict", _count_before_the_seal)
    ],
    "P3: files go before the published table says so": [Patch(Retention, "_delete", _remove_at_once)],
    "P3: the dispatch log goes before the schedule log": [Patch(Retention, "_delete", _remove_the_dispatch_log_first)],
}
