"""Target ends: the highest offset at each target that any dispatch log names, so that this server notices when a target
has lost data (rule H7).

Hours are sealed and deleted, but this server must still know what a target had acknowledged. Invariant: when a commit
of `KeepingEnds` changes an hour, the ends that the hour's dispatch log names become durable with it.
"""

import logging
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgpack

from delayd.errors import DamagedValue, key_text
from delayd.machine.operating import Wait
from delayd.machine.state import State

PREFIX = b"end/"
KEY = struct.Struct(">4sQ")

log = logging.getLogger(__name__)


class Counted(NamedTuple):
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
        self._ends = {KEY.unpack(key)[1]: int(msgpack.unpackb(value)) for key, value in state.scan(PREFIX, damaged)}
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

    def reset(self, target: int) -> Counted:
        """Count a target anew because an operator accepts it as it is (rule H7). Returns the count before, for
        `take_back`.
        """
        before = Counted(self._ends.pop(target, 0), target in self._accepted)
        self._accepted.add(target)
        return before

    def take_back(self, target: int, before: Counted) -> None:
        """An operator's decision could not be stored: the count before it is valid again."""
        if not before.anew:
            self._accepted.discard(target)
        if before.offset:
            self.name(target, before.offset)

    def rows(self) -> dict[bytes, bytes]:
        """The ends as they stand in the state; may be called on another thread than the loop's."""
        # An offset is named here before it is recorded, so this copy has every offset that a file shows.
        return {KEY.pack(PREFIX, target): msgpack.packb(offset) for target, offset in dict(self._ends).items()}


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
