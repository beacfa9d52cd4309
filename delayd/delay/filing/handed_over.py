"""Handed over: rows that need no body in a schedule log any more, because their outcome is durable."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class HandedOver(NamedTuple):
    """Rows whose outcome DISPATCHED is durable: their sequences, and the content hashes under which they left."""

    sequences: NDArray[np.uint64]
    hashes: NDArray[np.uint64]


NOTHING_HANDED_OVER = HandedOver(np.empty(0, np.uint64), np.empty(0, np.uint64))


def sort_handed_over(pieces: Sequence[HandedOver]) -> HandedOver:
    """Join several, by rising sequence."""
    sequences, hashes = map(np.concatenate, zip(NOTHING_HANDED_OVER, *pieces, strict=True))
    order = np.argsort(sequences, kind="stable")
    return HandedOver(sequences.take(order), hashes.take(order))
