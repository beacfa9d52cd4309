"""Terms: how a group begins, as the first PULL or SUBSCRIBE says, and which messages of its subject it wants, by their
tags (docs/consuming.md, Filters; rule Q7).

Invariant: the terms of a group that exists do not change; who says others is refused by name, and who says none gets
those of the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId
from delayd.batch.labels import bloom_of, decode_tags, encode_tags
from delayd.batch.names import TAGS_MAX
from delayd.errors import BadArgument, BadRequest, BadTags, NotOrdered, OtherFilter
from delayd.wire.consuming import AtInstant, AtSequence, End, Position, read_position
from delayd.wire.frame import Head
from delayd.wire.heads import need_bool, need_strs

from .subject_index import Index, StoredBatches, Subject

if TYPE_CHECKING:
    from .groups import Group

FIELDS = frozenset(
    {"start", "ephemeral", "tags_any", "tags_all", "ordered"}
)  # Of a request that says how a group begins.


class Filter(NamedTuple):
    """Messages with any of some tags, and with all of some; no tags are no condition."""

    any: tuple[str, ...] = ()
    all: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [f"{name} of {', '.join(tags)}" for name, tags in (("any", self.any), ("all", self.all)) if tags]
        return " and ".join(words) or "none"

    def matches(self, batch: Batch, row: int, rows: int) -> NDArray[np.bool_]:
        """Which messages from a row on it lets through: bool[rows]; their tags are read where the blooms fit. It is not
        asked of OPEN.
        """
        found = np.zeros(rows, np.bool_)
        if ColumnId.TAG_BLOOM not in batch.offsets or ColumnId.TAGS_END not in batch.offsets:
            return found
        blooms = batch.uint64s(ColumnId.TAG_BLOOM)[row : row + rows]
        may = _has(blooms, self.all)
        if self.any:
            may &= np.logical_or.reduce([_has(blooms, (tag,)) for tag in self.any])
        starts, ends = batch.region(ColumnId.TAGS_END)
        heap, wanted, one = batch.heap, set(self.all), set(self.any)
        for at in np.flatnonzero(may).tolist():
            try:
                tags = set(decode_tags(bytes(heap[int(starts[row + at]) : int(ends[row + at])])))
            except BadTags:
                continue  # Whoever sent it was no delayd client, and no filter can want it.
            found[at] = wanted <= tags and not (one and one.isdisjoint(tags))
        return found


OPEN = Filter()  # There is only one filter that lets everything through, so that a look at it costs nothing.


def filter_of(head: Head) -> Filter:
    """The filter in a PULL or SUBSCRIBE.

    Raises:
        BadRequest: a field is malformed.
    """
    wanted = Filter(*(_tags(head, name) if name in head else () for name in ("tags_any", "tags_all")))
    return wanted if wanted != OPEN else OPEN


def encode_filter(wanted: Filter) -> bytes:
    """The bytes in the record of a group."""
    return cast(bytes, msgpack.packb([wanted.any, wanted.all]))


def decode_filter(data: bytes) -> Filter:
    """Read what `encode_filter` wrote."""
    tags_any, tags_all = msgpack.unpackb(data)
    return Filter(tuple(tags_any), tuple(tags_all))


def _tags(head: Head, name: str) -> tuple[str, ...]:
    tags = tuple(sorted(set(need_strs(head, name))))
    try:
        encode_tags(tags)
    except BadTags as error:
        raise BadRequest(f"{name}: {error.message}; a filter has at most {TAGS_MAX} tags", field=name) from error
    return tags


def _has(blooms: NDArray[np.uint64], tags: tuple[str, ...]) -> NDArray[np.bool_]:
    bits = np.uint64(bloom_of(tags))
    has: NDArray[np.bool_] = blooms & bits == bits
    return has


class Beginning(NamedTuple):
    """How a group begins that a request makes; of a group that exists it changes nothing."""

    start: Position = End.EARLIEST
    ephemeral: bool = False
    filter: Filter = OPEN
    ordered: bool = False


FROM_EARLIEST = Beginning()


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
