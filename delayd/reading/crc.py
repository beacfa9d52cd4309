"""Crc: the CRC-32C of joined bytes, from the checksums of their pieces, for many of them at once.

A checksum is a polynomial's remainder, so the checksum of ``a + b`` is that of ``a``, moved on by the length of ``b``,
plus that of ``b``. Moving on by 2^k bytes is linear: four tables of 256 entries, one for each byte of the checksum.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

UInt32s = NDArray[np.uint32]
Int64s = NDArray[np.int64]

POLYNOMIAL = np.uint32(0x82F63B78)  # Castagnoli's polynomial, with its bits reversed.
LENGTH_BITS = 27  # Lengths below 128 MiB: a group is shorter.


def joined(crcs: UInt32s, lengths: Int64s, starts: Int64s) -> UInt32s:
    """The checksum of each whole; its pieces stand one behind the other, beginning at its entry of ``starts``.

    Args:
        crcs: of each piece.
        lengths: of each piece, in bytes.
        starts: for each whole the index of its first piece, rising; each has one.
    """
    ends = np.cumsum(lengths)
    counts = np.diff(np.append(starts, len(lengths)))
    behind = np.repeat(ends[starts + counts - 1], counts) - ends
    return np.bitwise_xor.reduceat(_moved(crcs, behind), starts)


def _moved(crcs: UInt32s, lengths: Int64s) -> UInt32s:
    """Each checksum, moved on by ``lengths`` bytes."""
    moved = crcs.copy()
    for bit in range(LENGTH_BITS):
        rows = np.flatnonzero(lengths >> bit & 1)
        if len(rows):
            moved[rows] = _apply(_tables(bit), moved[rows])
    return moved


def _apply(tables: UInt32s, values: UInt32s) -> UInt32s:
    found: UInt32s = tables[0].take(values & np.uint32(255))
    for byte in (1, 2, 3):
        found ^= tables[byte].take(values >> np.uint32(8 * byte) & np.uint32(255))
    return found


@lru_cache(maxsize=LENGTH_BITS)
def _tables(bit: int) -> UInt32s:
    """Tables that move a checksum on by 2^bit bytes: uint32[4, 256]."""
    if bit:
        before = _tables(bit - 1)
        return _apply(before, before.ravel()).reshape(4, 256)
    values = np.arange(256, dtype=np.uint32) << (np.arange(4, dtype=np.uint32) * np.uint32(8))[:, None]
    for _ in range(8):
        values = values >> np.uint32(1) ^ POLYNOMIAL * (values & np.uint32(1))
    return values
