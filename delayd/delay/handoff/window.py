"""Window: the batches handed to one target that are not decided yet, and W, the end of those that are (rule H1).

A batch is *decided* when its outcome is durable in the dispatch log. W = (epoch, id) ends the decided prefix: the
target may forget each batch up to it. An example, in epoch 7, with the batches 1 to 5 handed over:

1. Rows of an earlier epoch may be at the target, and nobody has decided on them: W is (0, 0), so the target keeps all.
2. They are settled, and 1, 2 and 4 are decided: W is (7, 2). Batch 4 lies behind 3, so the target keeps 3, 4 and 5.
3. Batch 3 is decided, too: W is (7, 4).
4. All are decided: W is (7, 5), the last id that was given.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.delay.rows import Rows


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
