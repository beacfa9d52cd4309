"""The delay server's books as a reader outside keeps them: outcomes, sealed hours, and what was removed of both.

Invariant: an hour's outcomes may vanish only when the hour was sealed, and a sealed hour never changes (rules S1, S2).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from delayd.batch.columns import ColumnId
from delayd.log.group import CommitGroup
from delayd.log.hour import decode_outcomes
from delayd.log.segment import FileKind
from delayd.outcome import Outcome
from delayd.testing.disk import MemoryDisk
from tests.simulation.readings import Readings
from tests.worlds.delay import FOLDER
from tests.worlds.delay_adapter import HourTable, list_dispatch_logs
from tests.worlds.files import read_schedule_log

Told = tuple[int, int, int, int]
"""An outcome's hour, target, offset there and batch id; of a row that ended before: hour, NO_TARGET, why and when."""
NO_TARGET = 0
EXPIRED = -1  # Why a row ended that no request has ended.


class DelayBooks:
    """Kept over all lives of one delay server."""

    def __init__(self, log_id: int) -> None:
        self.removed: dict[int, dict[int, Told]] = {}  # Hours whose files are gone, with what they said.
        self.sealed: dict[int, dict[int, Told]] = {}
        self._log_id = log_id
        self._readings: Readings[tuple[int, Told]] = Readings(FileKind.DISPATCH, log_id, _decode)

    def outcomes(self, disk: MemoryDisk, hours: HourTable, *, torn: bool) -> dict[int, Told]:
        """By sequence, what became of each row that ever had an outcome; each has one. ``torn``: see `Readings.of`."""
        found: dict[int, Told] = {}
        of_hour: dict[int, dict[int, Told]] = {}
        for hour, path in list_dispatch_logs(disk, FOLDER):
            rows = of_hour[hour] = {}
            for sequence, told in self._readings.of(disk, path, torn=torn):
                assert sequence not in found, f"sequence {sequence} has two outcomes"
                assert told[0] == hour, f"an outcome of hour {told[0]} is in the file of hour {hour}"
                found[sequence] = rows[sequence] = told
        self._look_at_seals(disk, hours, of_hour)
        for hour, rows in self.removed.items():
            assert hour not in of_hour or rows == of_hour[hour], f"hour {hour} came back, and is another one"
            found.update(rows)
        return found

    def filed_in_sealed(self, rows: Iterable[tuple[int, int]]) -> None:
        """Check that no accepted row, of (hour, sequence), was filed in an hour behind its seal (rule P5)."""
        for hour, sequence in rows:
            assert hour not in self.sealed or sequence in self.sealed[hour], (
                f"sequence {sequence} is accepted for hour {hour}, which was sealed without it"
            )

    def _look_at_seals(self, disk: MemoryDisk, hours: HourTable, of_hour: dict[int, dict[int, Told]]) -> None:
        for hour, rows in self.sealed.items():
            if hour in of_hour:
                assert of_hour[hour] == rows, f"hour {hour} was sealed, and its outcomes are other ones now"
            else:
                self.removed[hour] = rows
        for hour in hours.rows["hour"].tolist():
            file = hours.get(hour)
            if not file.sealed or hour in self.sealed:
                continue
            if file.removed:
                # Sealed and being deleted between two readings: its schedule log may be gone already.
                if hour in of_hour:
                    self.sealed[hour] = of_hour[hour]
                continue
            stored, damage = read_schedule_log(disk, FOLDER, self._log_id, hour, file)
            assert damage is None, str(damage)
            scheduled = [entry.batch.uint64s(ColumnId.SEQUENCE) for entry in stored]
            wanted = set(np.concatenate(scheduled).tolist()) if scheduled else set[int]()
            rows = of_hour.get(hour, {})
            assert wanted == rows.keys(), f"hour {hour} is sealed, and its two sides differ by {wanted ^ rows.keys()}"
            self.sealed[hour] = rows


def _decode(group: CommitGroup) -> list[tuple[int, Told]]:
    rows = decode_outcomes([batch for _, batch in group.batches()])
    found: list[tuple[int, Told]] = []
    hours = [batch.outcome.hour for _, batch in group.batches()]
    for sequence, part_of in zip(rows.sequences.tolist(), rows.part_of.tolist(), strict=True):
        part = rows.parts[part_of]
        outcome = Outcome(part["outcome"])
        if outcome in (Outcome.CANCELLED, Outcome.EXPIRED):
            why = EXPIRED if outcome == Outcome.EXPIRED else int(part["reason"])
            found.append((sequence, (hours[0], NO_TARGET, why, int(part["claimed_at_ms"]))))
            continue
        assert outcome == Outcome.DISPATCHED, f"sequence {sequence} is {outcome.name}"
        told = (hours[0], int(part["target_log_id"]), int(part["target_offset"]), int(part["batch_id"]))
        found.append((sequence, told))
    return found
