"""Values of the state that several parts read and write (docs/formats/checkpoint.md)."""

from collections.abc import Mapping
from typing import cast

from delayd.log.checkpoint import Value

TARGET_PREFIX = b"target/"

ENDED_KEY = b"ended"  # Rows that decisions have ended, and whose outcomes are not durable yet (rule C2).

DROPPED_KEY = b"dropped"  # Rows of schedule logs that operators gave up (rule S5).


def encode_dropped(dropped: Mapping[int, int]) -> list[Value]:
    """Encode the rows that operators gave up, as the state and the checkpoint file have them: ``[[hour, rows], …]``."""
    return [[hour, rows] for hour, rows in sorted(dropped.items())]


def decode_dropped(pairs: Value) -> dict[int, int]:
    """Read what `encode_dropped` has encoded."""
    return dict(cast("list[tuple[int, int]]", pairs))
