"""Positions: where a group of consumers begins, or is moved to, as requests name it (docs/protocol.md, PULL, SUBSCRIBE
and MOVE_GROUP).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from delayd.errors import BadRequest
from delayd.wire.heads import (
    INT_MAX,
    as_head,
    need_instant,
    need_int,
)

from .frame import Head, HeadValue


class End(Enum):
    """One of the two ends of what is kept of a subject."""

    EARLIEST = "earliest"  # The first message that is kept.
    LATEST = "latest"  # Behind the last one.


class AtInstant(NamedTuple):
    """The first message that a delay server handed over at this instant or later."""

    instant_ms: int


class AtSequence(NamedTuple):
    """The message with this consume sequence."""

    sequence: int


Position = End | AtInstant | AtSequence


def position_value(position: Position) -> HeadValue:
    """A position as the field of a head."""
    return position.value if isinstance(position, End) else dict(position._asdict())


def read_position(head: Head, name: str) -> Position:
    """The position in a field.

    Raises:
        BadRequest: it is none.
    """
    value = head.get(name)
    for end in End:
        if value == end.value:
            return end
    if isinstance(value, dict) and len(value) == 1:
        inner = as_head(value, name)
        if "instant_ms" in inner:
            return AtInstant(need_instant(inner, "instant_ms"))
        if "sequence" in inner:
            return AtSequence(need_int(inner, "sequence", 0, INT_MAX))
    known = "earliest, latest, {instant_ms} or {sequence}"
    raise BadRequest(f"{name} is {value!r:.100}, and must be {known}", field=name)
