"""Window: the rows of one target that wait, in the order in which they fell due; the batches handed to it that are not
decided yet; and W, the end of those that are (rule H1).

A batch is *decided* when its outcome is durable in the dispatch log. W = (epoch, id) ends the decided prefix: the
target may forget each batch up to it. An example, in epoch 7, with the batches 1 to 5 handed over:

1. Rows of an earlier epoch may be at the target, and nobody has decided on them: W is (0, 0), so the target keeps all.
2. They are settled, and 1, 2 and 4 are decided: W is (7, 2). Batch 4 lies behind 3, so the target keeps 3, 4 and 5.
3. Batch 3 is decided, too: W is (7, 4).
4. All are decided: W is (7, 5), the last id that was given.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import FEW_ROWS, Int64s
from delayd.batch.sequences import among, message_log_offset
from delayd.delay.rows import NO_ROWS, Rows, due_at_ms, join_rows, without


@dataclass(slots=True)
class SentBatch:
    """One handed-over batch: its rows, and what its outcome will say."""

    batch_id: int
    hour: int
    rows: Rows
    deliver_at_ms: Int64s
    claimed_at_ms: int
    size_bytes: int
    hashes: NDArray[np.uint64]  # One content hash a row.
    acknowledged: bool = False


@dataclass(frozen=True, slots=True)
class MayHaveLeft:
    """Rows that a target may have had: those that had been given numbers, and were due by then."""

    sequences_below: int
    due_until_ms: int

    def among(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows are such."""
        found: NDArray[np.bool_] = rows["sequence"] < np.uint64(self.sequences_below)
        if found.any():
            found &= due_at_ms(rows) <= self.due_until_ms
        return found


class Window:
    """Undecided batches by rising id; ids count per epoch and target and are never reused."""

    def __init__(self, epoch: int) -> None:
        self.earlier_settled = False  # Whether everything of earlier epochs is decided.
        self.size_bytes = 0
        self._epoch = epoch
        self._last_id = 0
        self._undecided: dict[int, SentBatch] = {}

    def __len__(self) -> int:
        return len(self._undecided)

    @property
    def w(self) -> tuple[int, int]:
        """W = (epoch, id): every batch up to it is decided durably; (0, 0) while an earlier epoch is not settled."""
        if not self.earlier_settled:
            return (0, 0)
        return (self._epoch, next(iter(self._undecided), self._last_id + 1) - 1)

    def next_id(self) -> int:
        """The id of the next batch."""
        self._last_id += 1
        return self._last_id

    def add(self, sent: SentBatch) -> None:
        """Remember a batch that is about to leave."""
        self._undecided[sent.batch_id] = sent
        self.size_bytes += sent.size_bytes

    @property
    def last_id(self) -> int:
        """The number of the newest batch."""
        return self._last_id

    def get(self, batch_id: int) -> SentBatch | None:
        """An undecided batch."""
        return self._undecided.get(batch_id)

    def decide(self, batch_id: int) -> SentBatch:
        """Forget a batch whose outcome is durable, or that was refused by name and so never appended."""
        sent = self._undecided.pop(batch_id)
        self.size_bytes -= sent.size_bytes
        return sent

    def unacknowledged(self) -> list[SentBatch]:
        """Batches that may be at the target or on their way."""
        return [sent for sent in self._undecided.values() if not sent.acknowledged]

    def rows(self) -> list[Rows]:
        """The rows of every undecided batch."""
        return [sent.rows for sent in self._undecided.values()]


JOINED_ROWS = 4_096  # Arrays are joined up to this length: so a queue of single rows is a few arrays of 128 KB each.
PILED_FROM_ROWS = 131_072  # With more rows the target is away, or far behind.
PILED_ROWS = 16_384


class WaitingRows:
    """A queue of row arrays, taken from the front by rows and bytes."""

    def __init__(self) -> None:
        self.size_bytes = 0  # The bytes that the rows need in frames.
        self._parts: deque[Rows] = deque()
        self._lowest: deque[int | None] = deque()  # The lowest location of each array, once it was computed.
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, rows: Rows) -> None:
        """Put rows behind the others."""
        if len(rows):
            self.size_bytes += size_of(rows)
            self._count += len(rows)
            # A row that is taken out of a long queue has its array copied, so that one is not too long.
            size = PILED_ROWS if self._count > PILED_FROM_ROWS else len(rows)
            for first in range(0, len(rows), size):
                self._parts.append(rows[first : first + size])
                self._lowest.append(None)
            if len(self._parts) > 1:
                self._join_last()

    def give_back(self, rows: Rows) -> None:
        """Put rows that were taken back before the others."""
        if len(rows):
            self._parts.appendleft(rows)
            self._lowest.appendleft(None)
            self._count += len(rows)
            self.size_bytes += size_of(rows)

    def take(self, rows_max: int, bytes_max: int) -> Rows:
        """Take up to ``rows_max`` rows with up to ``bytes_max`` bytes, at least one row."""
        if self._count <= rows_max and self.size_bytes <= bytes_max:
            return self.take_all()
        taken: list[Rows] = []
        while self._parts and rows_max > 0 and bytes_max > 0:
            part = self._parts.popleft()
            self._lowest.popleft()
            fits = int(np.searchsorted(np.cumsum(part["length"][:rows_max], dtype=np.int64), bytes_max, "right"))
            fits = max(fits, 0 if taken else 1)
            if fits < len(part):
                self._parts.appendleft(part[fits:])
                self._lowest.appendleft(None)
            if not fits:
                break
            taken.append(part[:fits])
            rows_max -= fits
            size_bytes = size_of(taken[-1])
            bytes_max -= size_bytes
            self.size_bytes -= size_bytes
        rows = taken[0] if len(taken) == 1 else join_rows(taken)
        self._count -= len(rows)
        return rows

    def take_all(self) -> Rows:
        """Take every row."""
        parts = self._clear()
        if not parts:
            return NO_ROWS
        return parts[0] if len(parts) == 1 else join_rows(parts)

    def take_out(self, sequences: NDArray[np.uint64], arrays: Collection[int]) -> list[Rows]:
        """Take rows from anywhere; returns them, in several arrays. ``sequences`` rise, and ``arrays`` are the ids of
        the arrays in which the rows stand: the others stay as they are.
        """
        parts, lowest = self._parts, self._lowest
        self._parts, self._lowest = deque(), deque()
        taken: list[Rows] = []
        for part, known in zip(parts, lowest, strict=True):
            kept, found = split_off([part], sequences, arrays)
            taken += found
            self._parts.extend(kept)
            self._lowest.extend([None if found else known] * len(kept))
        self._count -= sum(map(len, taken))
        self.size_bytes -= sum(map(size_of, taken))
        return taken

    def remove(self, ended: NDArray[np.uint64]) -> None:
        """Drop rows whose sequences are among ``ended``, sorted."""
        for part in self._clear():
            self.add(without(part, ended))

    def parts(self) -> list[Rows]:
        """View the rows, in several arrays."""
        return list(self._parts)

    def lowest_message_log_offset(self) -> int | None:
        """Lowest message log offset that a row refers to (rule P6); None when no row refers to one.

        Arrays whose lowest location is known are not looked at again, except at the front.
        """
        for index, (part, lowest) in enumerate(zip(self._parts, self._lowest, strict=True)):
            if lowest is None:
                self._lowest[index] = int(part["location"].min())
        locations = [lowest for lowest in self._lowest if lowest is not None]
        return message_log_offset(min(locations)) if locations else None

    def _clear(self) -> deque[Rows]:
        parts, self._parts, self._count, self.size_bytes = self._parts, deque(), 0, 0
        self._lowest.clear()
        return parts

    def _join_last(self) -> None:
        """Join the last arrays while the older one is not longer than the newer one: so each row is copied a few times
        only.
        """
        while len(self._parts) > 1 and len(self._parts[-2]) <= len(self._parts[-1]) < JOINED_ROWS:
            newer = self._parts.pop()
            self._lowest.pop()
            self._parts[-1] = join_rows([self._parts[-1], newer])
            self._lowest[-1] = None


def split_off(
    parts: Iterable[Rows], sequences: NDArray[np.uint64], arrays: Collection[int]
) -> tuple[list[Rows], list[Rows]]:
    """Arrays without the rows of ``sequences``, which rise; and these rows. Only the arrays with the ids ``arrays`` are
    looked into.
    """
    kept: list[Rows] = []
    taken: list[Rows] = []
    for part in parts:
        if id(part) not in arrays:
            kept.append(part)
            continue
        found = among(part["sequence"], sequences)
        if not found.any():
            kept.append(part)
            continue
        taken.append(part.take(np.flatnonzero(found)))
        if not found.all():
            kept.append(part.take(np.flatnonzero(~found)))
    return kept, taken


def size_of(rows: Rows) -> int:
    """Bytes that rows need in frames."""
    if len(rows) <= FEW_ROWS:
        return sum(rows["length"].tolist())
    return int(rows["length"].sum(dtype=np.int64))


def lowest_offset(parts: "deque[Rows] | list[Rows]") -> int | None:
    """Lowest message log offset of rows in several arrays, None without any."""
    lowest = [int(part["location"].min()) for part in parts if len(part)]
    return message_log_offset(min(lowest)) if lowest else None
