"""Hour outcomes: where in an hour's dispatch log the outcome of each row stands, so that no look-up reads all of it.

Invariant: what was read stays true, because groups are only appended. When the last group that was read does not stand
there any more, or the next one does not follow it, this is another file, and the caller begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId
from delayd.batch.sequences import Sequences, add_part, find
from delayd.errors import DamagedData
from delayd.log.hour import OutcomeRows, decode_outcomes
from delayd.log.segment import Segment

BLOCK_BYTES = 4 << 10  # Groups that are read together.
ROW_BYTES = 12


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of the rows that have outcomes, by rising sequence, and the block of each."""

    sequences: Sequences
    blocks: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.sequences)


class HourOutcomes:
    """What is known of one hour's dispatch log, up to the offset ``end``."""

    def __init__(self) -> None:
        self.end = 0
        self._last = 0  # Offset of the last group below ``end``.
        self._crc32c = 0  # Of that group.
        self._starts: list[int] = []  # Offsets of the blocks.
        self._parts: list[_Part] = []

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        return ROW_BYTES * sum(map(len, self._parts))

    def read_on(self, segment: Segment, until: int, give_way: Callable[[], None]) -> None:
        """Read what has been appended since, up to the offset ``until`` at least, where a group ends.

        Raises:
            DamagedData: a group does not check, or does not follow what was read before, or none ends there.
        """
        if self.end and segment.read_front(self._last, None)[0].header_crc32c != self._crc32c:
            raise DamagedData(segment.path, segment.position(self._last), "another group stands there by now")
        while self.end < until:
            self._read_piece(segment, until, give_way)

    def _read_piece(self, segment: Segment, until: int, give_way: Callable[[], None]) -> None:
        began = last = self.end
        scan = segment.scan(began, self._crc32c)
        starts: list[int] = []
        sequences: list[Sequences] = []
        counts: list[int] = []
        while scan.offset < until:
            offset, group = scan.offset, next(scan, None)
            if group is None:
                break
            last = offset
            if not starts or offset - starts[-1] >= BLOCK_BYTES:
                starts.append(offset)
                counts.append(0)
            for _, batch in group.batches():
                sequences.append(batch.uint64s(ColumnId.SEQUENCE).copy())
                counts[-1] += batch.count
            give_way()
        _check_end(segment, scan.offset, until, scan.reason)
        if self.end != began:
            # A more urgent look-up has read on while this one gave way.
            return
        assert scan.crc32c is not None, "a group ends there"
        blocks = np.arange(len(self._starts), len(self._starts) + len(starts), dtype=np.uint32)
        part = _in_order([_Part(np.concatenate(sequences), blocks.repeat(counts))])
        add_part(self._parts, part, _in_order)
        self._starts += starts
        self.end, self._last, self._crc32c = until, last, scan.crc32c

    def has_any(self, wanted: Sequences, until: int) -> bool:
        """Whether one of the wanted rows may have an outcome up to the offset ``until``; the loop may ask, too."""
        if self.end < until:
            return True
        # The end was looked at first, so whatever another thread adds meanwhile lies behind it.
        return any(len(_blocks_of(part, wanted)) for part in tuple(self._parts))

    def find(self, segment: Segment, wanted: Sequences) -> OutcomeRows:
        """Outcomes among which are those of the wanted rows that have one.

        Raises:
            DamagedData: a group does not check.
        """
        blocks: set[int] = set()
        for part in self._parts:
            blocks.update(_blocks_of(part, wanted).tolist())
        return decode_outcomes([batch for block in sorted(blocks) for batch in self._read(segment, block)])

    def _read(self, segment: Segment, block: int) -> Iterator[Batch]:
        start = self._starts[block]
        end = self._starts[block + 1] if block + 1 < len(self._starts) else self.end
        scan = segment.scan(start, None, end - start)
        while scan.offset < end:
            group = next(scan, None)
            if group is None:
                break
            for _, batch in group.batches():
                yield batch
        _check_end(segment, scan.offset, end, scan.reason)


def _blocks_of(part: _Part, wanted: Sequences) -> NDArray[np.uint32]:
    """The blocks in which the outcomes of wanted rows stand, for those that have one."""
    return part.blocks.take(find(part.sequences, wanted)[1])


def _in_order(parts: Sequence[_Part]) -> _Part:
    sequences = np.concatenate([part.sequences for part in parts])
    order = np.argsort(sequences, kind="stable")
    return _Part(sequences.take(order), np.concatenate([part.blocks for part in parts]).take(order))


def _check_end(segment: Segment, offset: int, until: int, reason: str) -> None:
    if reason or offset != until:
        what = reason or f"no group ends at offset {until}, up to which it was fsynced"
        raise DamagedData(segment.path, segment.position(offset), what)
