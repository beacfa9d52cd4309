"""What the state says of targets: operators' words, how far each target's log was acknowledged, and who refuses this
server (docs/handoff.md).

Invariant: a target's word, end or refusal counts when it is durable. An end is written with each commit of the worker
(`KeepingEnds`), so that no commit passes an acknowledgement and forgets the end that it names (rule H7).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from delayd.errors import DamagedValue, DiskFull, DiskReserve, key_text
from delayd.machine.executor import Done, Executor
from delayd.machine.operating import Wait
from delayd.machine.state import OperatorLog, Pairs, State

log = logging.getLogger(__name__)

# `<u64 log_id>` [until_ms, freed]: a target that an operator gave up, and whether all that it may hold is IN_DOUBT.
LOST_PREFIX = b"lost/"
# `<u64 log_id>` [epoch, batch id]: a target that an operator accepted; batches up to this one say nothing of where its
# log ends.
ACCEPTED_PREFIX = b"accepted/"
END_PREFIX = b"end/"  # `<u64 log_id>` The highest offset at that realtime server that a dispatch log names (rule H7).
# `<u64 log_id>` A target that takes this server for a restored copy, and that each start asks before it serves anybody
# (rule H8): whether an operator has accepted that it forgets what it had heard. Gone when it hears a hello.
REFUSER_PREFIX = b"refuser/"

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
        return Pairs(puts, [*removes, _key(END_PREFIX, log_id)])


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


class TargetCount(NamedTuple):
    """How a target was counted: the highest offset, 0 for none, and whether its counting had been begun anew before."""

    offset: int
    anew: bool


class TargetEnds:
    """Ends by log_id: those in the state, those that unsealed dispatch logs name, and those of this life.

    ``everywhere`` reads all dispatch logs; it is used when a value of the state does not check (rule L9). ``accepted``
    are the targets whose counting an operator has begun anew. ``damaged_hours`` are the hours whose dispatch logs are
    damaged, and ``given_up`` those whose dispatch logs operators gave up. While there are any such hours, an end says
    only that a target has acknowledged at least that much.
    """

    def __init__(
        self,
        state: State,
        found: Mapping[int, int],
        everywhere: Callable[[], Mapping[int, int]] = dict,
        accepted: Iterable[int] = (),
        damaged_hours: Collection[int] = (),
        given_up: Collection[int] = (),
    ) -> None:
        self._damaged, self._given_up = damaged_hours, given_up
        self._accepted = set(accepted)
        damaged: list[DamagedValue] = []
        self._ends = {_log_id(key): int(msgpack.unpackb(value)) for key, value in state.scan(END_PREFIX, damaged)}
        if damaged:
            # Nobody knows any more which offsets the deleted dispatch logs named; a target that lost only that much is
            # not noticed.
            for error in damaged:
                log.warning("value_rebuilt key=%s source=%s", key_text(error.key), "the dispatch logs that are kept")
            for target, offset in everywhere().items():
                self.name(target, offset)
        for target, offset in found.items():
            self.name(target, offset)

    @property
    def unread(self) -> set[int]:
        """Hours whose outcomes are not all known: a target may have acknowledged more than the ends say."""
        return {*self._damaged, *self._given_up}

    def of(self, target: int) -> int:
        """The highest offset that is known; 0 when there is none."""
        return self._ends.get(target, 0)

    def said(self, target: int) -> int | None:
        """The end that a hello names: None when an operator accepted the target, and nothing was recorded of it since.

        An end of 0 would say that nothing was ever recorded: a target that kept a part of its log would then take this
        server for one that was restored from a copy (rule H8).
        """
        offset = self.of(target)
        return None if not offset and target in self._accepted else offset

    def name(self, target: int, offset: int) -> None:
        """Take an offset that is about to be recorded in a dispatch log."""
        self._ends[target] = max(self.of(target), offset)

    def reset(self, target: int) -> TargetCount:
        """Count a target anew because an operator accepts it as it is (rule H7). Returns the count before, for
        `take_back`.
        """
        before = TargetCount(self._ends.pop(target, 0), target in self._accepted)
        self._accepted.add(target)
        return before

    def take_back(self, target: int, before: TargetCount) -> None:
        """An operator's decision could not be stored: the count before it is valid again."""
        if not before.anew:
            self._accepted.discard(target)
        if before.offset:
            self.name(target, before.offset)

    def rows(self) -> dict[bytes, bytes]:
        """The ends as they stand in the state; may be called on another thread than the loop's."""
        # An offset is named here before it is recorded, so this copy has every offset that a file shows.
        return {_key(END_PREFIX, target): msgpack.packb(offset) for target, offset in dict(self._ends).items()}


class KeepingEnds:
    """A `State` whose every commit holds the ends too; it commits on one thread only."""

    def __init__(self, state: State, ends: TargetEnds) -> None:
        self._state = state
        self._ends = ends
        self._kept: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> bytes | None:
        """See State."""
        return self._state.get(key)

    def scan(self, prefix: bytes, damaged: list[DamagedValue] | None = None) -> list[tuple[bytes, bytes]]:
        """See State."""
        return self._state.scan(prefix, damaged)

    def commit(self, puts: Iterable[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        """See State."""
        rows = self._ends.rows()
        risen = [pair for pair in rows.items() if self._kept.get(pair[0]) != pair[1]]
        self._state.commit(chain(puts, risen), removes)
        self._kept = rows

    def waits(self) -> list[Wait]:
        """See State."""
        return self._state.waits()

    def close(self) -> None:
        """See State."""
        self._state.close()


Stored = Callable[[DiskReserve | None], None]
"""Called when the change is durable, with None, or with the reason why nothing was stored."""


class Refusers:
    """Refusing targets by log_id; for the loop alone. `worker` writes to the state, in the order of the calls here."""

    def __init__(self, state: State, worker: Executor) -> None:
        self._state = state
        self._worker = worker
        damaged: list[DamagedValue] = []
        # Whether an operator has accepted that the target forgets what it has heard of this server.
        self._accepted = {
            _log_id(key): bool(msgpack.unpackb(value)) for key, value in state.scan(REFUSER_PREFIX, damaged)
        }
        for error in damaged:
            # The key names the target that is to be asked first; an operator must repeat a decision about it.
            log.warning("value_rebuilt key=%s source=%s", key_text(error.key), "its key")
            self._accepted[_log_id(error.key)] = False

    def __contains__(self, target: object) -> bool:
        return target in self._accepted

    def is_accepted(self, target: int) -> bool:
        """Whether an operator has decided that the target shall forget what it has heard."""
        return self._accepted.get(target, False)

    def note(self, target: int) -> None:
        """Note that the target refuses this server; on a full disk the next refusal tries again."""
        if target not in self._accepted:
            self._accepted[target] = False

            def stored(refused: DiskReserve | None) -> None:
                if refused is not None:
                    self._accepted.pop(target, None)

            self._commit([(_key(REFUSER_PREFIX, target), msgpack.packb(False))], [], stored)

    def accepting(self, target: int) -> tuple[bytes, bytes]:
        """The pair that the transaction of an operator's decision stores; call `accept` when it is durable."""
        return _key(REFUSER_PREFIX, target), msgpack.packb(True)

    def accept(self, target: int) -> None:
        """An operator's decision is durable."""
        self._accepted[target] = True

    def losing(self, target: int) -> bytes:
        """The key that the transaction removes which gives the target up; call `lose` when it is durable."""
        return _key(REFUSER_PREFIX, target)

    def lose(self, target: int) -> None:
        """Forget a target that was given up."""
        self._accepted.pop(target, None)

    def forget(self, target: int, forgotten: Stored) -> None:
        """Forget a target that accepts this server again; ``forgotten`` is called when that is durable."""
        if target not in self._accepted:
            forgotten(None)
            return
        accepted = self._accepted.pop(target)

        def stored(refused: DiskReserve | None) -> None:
            if refused is not None:
                self._accepted.setdefault(target, accepted)
            forgotten(refused)

        self._commit([], [_key(REFUSER_PREFIX, target)], stored)

    def _commit(self, puts: Sequence[tuple[bytes, bytes]], removes: Sequence[bytes], stored: Stored) -> None:
        def written(ended: Done[None]) -> None:
            try:
                ended.result()
            except DiskFull as error:
                stored(DiskReserve(f"nothing was stored: {error.message}"))
            else:
                stored(None)

        self._worker.submit(partial(self._state.commit, puts, removes), written)
