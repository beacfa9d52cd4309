"""Target words: the decisions of operators about targets, kept in the state (rules H5, H7, H8, S2). A *word* is such a
decision.

A target that is *lost* is sent nothing any more, for good: rows that it may hold become IN_DOUBT, and once that is
durable another target may get its subjects. A target that is *accepted* goes on although it lost data.

    said ──lost/ durable──▶ LOST, nothing is sent ──IN_DOUBT durable──▶ FREED, its subjects are asked for anew
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from delayd.delay.handoff.target_ends import KEY as END_KEY
from delayd.delay.handoff.target_ends import PREFIX as END_PREFIX
from delayd.machine.state import OperatorLog, Pairs, State

LOST_PREFIX = b"lost/"
ACCEPTED_PREFIX = b"accepted/"

Parts = NDArray[np.void]


class Lost(NamedTuple):
    """A target that an operator has given up. Rows due later than `until_ms` were never sent to it."""

    until_ms: int
    freed: bool  # All rows that it may hold are IN_DOUBT, durably.


class AcceptedTarget(NamedTuple):
    """A target that an operator has accepted: its batches up to this one don't count when its log's end is checked."""

    epoch: int
    batch_id: int


class TargetWords:
    """The decisions by log_id. A change made here counts when the returned pairs are durable."""

    def __init__(self, state: State) -> None:
        self.lost: dict[int, Lost] = {}
        for key, value in state.scan(LOST_PREFIX):
            until_ms, freed = msgpack.unpackb(value)
            self.lost[_log_id(key)] = Lost(int(until_ms), bool(freed))
        self._operators = OperatorLog(state)

    def unfreed(self) -> list[int]:
        """Targets that were given up, and of which not all rows are IN_DOUBT durably."""
        return [log_id for log_id, lost in self.lost.items() if not lost.freed]

    def without_freed(self, notes: Mapping[bytes, int]) -> dict[bytes, int]:
        """Notes of subjects, without those that name a target which holds nothing any more."""
        freed = {log_id for log_id, lost in self.lost.items() if lost.freed}
        return {subject: log_id for subject, log_id in notes.items() if log_id not in freed}

    def lose(self, log_id: int, until_ms: int, now_ms: int) -> Pairs:
        """Give a target up; call `take_back` if that could not be stored."""
        self.lost[log_id] = lost = Lost(until_ms, freed=False)
        puts, removes = self._operators.entry(now_ms, f"target {log_id:016x} is lost")
        return Pairs([*puts, (_key(LOST_PREFIX, log_id), msgpack.packb(lost))], removes)

    def take_back(self, log_id: int) -> None:
        """The decision to give a target up could not be stored."""
        del self.lost[log_id]

    def free(self, log_id: int) -> Pairs:
        """All rows that the target may hold are in doubt; call `freed` when the returned pairs are durable."""
        return Pairs([(_key(LOST_PREFIX, log_id), msgpack.packb(self._freed(log_id)))], [])

    def freed(self, log_id: int) -> None:
        """It is durable that every row that may be at the target is in doubt."""
        self.lost[log_id] = self._freed(log_id)

    def is_freed(self, log_id: int) -> bool:
        """Whether a target was given up and nothing waits for that any more."""
        lost = self.lost.get(log_id)
        return lost is not None and lost.freed

    def _freed(self, log_id: int) -> Lost:
        return Lost(self.lost[log_id].until_ms, freed=True)

    def accept(self, log_id: int, accepted: AcceptedTarget, now_ms: int) -> Pairs:
        """Go on with a target that lost data: where its log should end is counted anew."""
        puts, removes = self._operators.entry(now_ms, f"target {log_id:016x} is accepted as it is")
        puts += [(_key(ACCEPTED_PREFIX, log_id), msgpack.packb(accepted))]
        return Pairs(puts, [*removes, END_KEY.pack(END_PREFIX, log_id)])


def accepted_targets(state: State) -> dict[int, AcceptedTarget]:
    """Where the counting of each accepted target begins."""
    return {
        _log_id(key): AcceptedTarget(*map(int, msgpack.unpackb(value))) for key, value in state.scan(ACCEPTED_PREFIX)
    }


def counts(parts: Parts, accepted: AcceptedTarget | None) -> NDArray[np.bool_]:
    """Which parts of a dispatch log count when the end of a target's log is checked: bool[n]."""
    if accepted is None:
        return np.ones(len(parts), np.bool_)
    epoch, batch_id = np.uint64(accepted.epoch), np.uint64(accepted.batch_id)
    same: NDArray[np.bool_] = (parts["epoch"] == epoch) & (parts["batch_id"] > batch_id)
    return (parts["epoch"] > epoch) | same


def _key(prefix: bytes, log_id: int) -> bytes:
    return prefix + log_id.to_bytes(8, "big")


def _log_id(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")
