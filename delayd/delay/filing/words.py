"""Words: what an operator has said of an hour's damaged log, as the state keeps it until a start has done it."""

import zlib
from typing import NamedTuple

import msgpack
import numpy as np

from delayd.batch.sequences import NO_SEQUENCES, Sequences
from delayd.delay.filing.hour_table import hour_key

GIVEN_UP_PREFIX = b"given_up/"  # Hours whose dispatch logs operators gave up.

SALVAGE_PREFIX = b"salvage/"  # Hours whose schedule logs operators gave up, until a start has done that.

SEQUENCE_MAX = (1 << 64) - 1


class GivenUp(NamedTuple):
    """An operator's word on an hour's dispatch log, and whether each row that it concerns is IN_DOUBT, durably.

    It concerns rows of the hour with sequences below ``below`` that have no outcome and are not ``pending`` (sorted).
    """

    at_ms: int
    done: bool
    below: int = SEQUENCE_MAX
    pending: Sequences = NO_SEQUENCES

    def encode(self) -> bytes:
        """As the state has it."""
        steps = np.diff(self.pending, prepend=np.uint64(0)).tobytes()
        known = [] if self.done else [self.below, zlib.compress(steps, 1)]
        return bytes(msgpack.packb([self.at_ms, self.done, *known]))

    @classmethod
    def decode(cls, value: bytes) -> "GivenUp":
        """Read what `encode` has encoded."""
        at_ms, done, *rest = msgpack.unpackb(value)
        if done:
            return cls(at_ms, True)
        below, steps = rest
        return cls(at_ms, False, below, np.cumsum(np.frombuffer(zlib.decompress(steps), np.uint64), dtype=np.uint64))


def given_up_key(hour: int) -> bytes:
    """The key of an operator's word on an hour's dispatch log."""
    return hour_key(hour, GIVEN_UP_PREFIX)


def given_up_put(hour: int, word: GivenUp) -> tuple[bytes, bytes]:
    """The row of an operator's word on an hour's dispatch log."""
    return given_up_key(hour), word.encode()


def salvage_key(hour: int) -> bytes:
    """The key of an operator's word on an hour's schedule log."""
    return hour_key(hour, SALVAGE_PREFIX)


def salvage_put(hour: int, at_ms: int) -> tuple[bytes, bytes]:
    """The row of an operator's word on an hour's schedule log: when it was said."""
    return salvage_key(hour), msgpack.packb(at_ms)
