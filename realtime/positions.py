"""Positions: which message of a subject an instant, an end or a sequence stands for, and how a new group begins
(docs/protocol.md, A group and MOVE_GROUP).
"""

from typing import NamedTuple

from delayd.errors import BadArgument, NotOrdered, OtherFilter
from delayd.wire.consuming import AtInstant, AtSequence, End, Position, read_position
from delayd.wire.frame import Head
from delayd.wire.heads import need_bool

from .filters import OPEN, Filter, filter_of
from .groups import Group
from .index import Index, Subject
from .stored import StoredBatches


class Beginning(NamedTuple):
    """How a group begins that a request makes; of a group that exists it changes nothing."""

    start: Position = End.EARLIEST
    ephemeral: bool = False
    filter: Filter = OPEN
    ordered: bool = False


FROM_EARLIEST = Beginning()
FIELDS = frozenset(
    {"start", "ephemeral", "tags_any", "tags_all", "ordered"}
)  # Of a request that says how a group begins.


def beginning_of(head: Head) -> Beginning:
    """The beginning in a PULL or SUBSCRIBE.

    Raises:
        BadRequest: a field is malformed.
    """
    start = read_position(head, "start") if "start" in head else End.EARLIEST
    ephemeral, ordered = (name in head and need_bool(head, name) for name in ("ephemeral", "ordered"))
    return Beginning(start, ephemeral, filter_of(head), ordered)


def check_beginning(group: Group, beginning: Beginning) -> None:
    """Refuse who wants other messages than those that the group gets, or an order that it does not keep.

    Raises:
        OtherFilter, NotOrdered: what the group is.
    """
    subject, name = group.names
    if beginning.ordered and group.order is None:
        raise NotOrdered(f"group {name} of {subject} was made without an order; delete it, or name another group")
    wanted = beginning.filter
    if wanted is not OPEN and wanted != group.filter:
        what = f"group {name} of {subject} wants the tags {group.filter}, and not {wanted}"
        raise OtherFilter(f"{what}; name the same ones, or another group")


def begins_at_ms(position: Position, now_ms: int) -> int:
    """From which instant on a new group gets messages, where that has not come; 0: from its position on."""
    return position.instant_ms if isinstance(position, AtInstant) and position.instant_ms > now_ms else 0


def find(position: Position, subject: Subject, index: Index, stored: StoredBatches) -> int:
    """The consume sequence where a group begins.

    For an instant it looks at some twenty stored batches. Delay servers hand over by clocks of their own, so messages
    that were handed over within the difference of their clocks may lie on either side.

    Raises:
        BadArgument: no message has this sequence, or it is not kept any more.
        DelaydError: what is kept can't be read now.
    """
    first = index.first(subject)
    if position is End.EARLIEST:
        return first
    if position is End.LATEST:
        return subject.end
    if isinstance(position, AtSequence):
        if not first <= position.sequence <= subject.end:
            kept = f"{subject.name} has the messages {first} to {subject.end - 1}"
            if first == subject.end:
                kept = f"{subject.name} has no messages now"
            raise BadArgument(f"{kept}, and a group may go on at {first} to {subject.end}, not at {position.sequence}")
        return position.sequence
    assert isinstance(position, AtInstant)
    low, high = first, subject.end
    while low < high:
        middle = (low + high) // 2
        if stored.claimed_at_ms(index.locate(subject, middle).offset) < position.instant_ms:
            low = middle + 1
        else:
            high = middle
    return low
