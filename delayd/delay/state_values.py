"""Values of the state that several parts read and write (docs/formats/checkpoint.md)."""

from collections.abc import Mapping
from typing import cast

from delayd.log.checkpoint import Value

TARGET_PREFIX = b"target/"  # `<subject>` Its realtime server, by log_id (rule H5).

# Rows that decisions have ended, and whose outcomes were not all durable then: 48 bytes each, as in the record `ended`
# (docs/keys.md, Records; rule C2).
ENDED_KEY = b"ended"

# When an operator last let this server go on though its directory was put back from an older copy: what recurred up to
# then may have been sent (docs/recurring.md).
RESTORED_KEY = b"restored"

DROPPED_KEY = b"dropped"  # As in the checkpoint file: rows of schedule logs that operators gave up (rule S5).


def encode_dropped(dropped: Mapping[int, int]) -> list[Value]:
    """Encode the rows that operators gave up, as the state and the checkpoint file have them: ``[[hour, rows], …]``."""
    return [[hour, rows] for hour, rows in sorted(dropped.items())]


def decode_dropped(pairs: Value) -> dict[int, int]:
    """Read what `encode_dropped` has encoded."""
    return dict(cast("list[tuple[int, int]]", pairs))
