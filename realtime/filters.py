"""Filters: which messages of a subject a group wants, by their tags (docs/consuming.md, Filters; rule Q7)."""

from typing import NamedTuple, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId
from delayd.batch.labels import bloom_of, decode_tags, encode_tags
from delayd.batch.names import TAGS_MAX
from delayd.errors import BadRequest, BadTags
from delayd.wire.frame import Head
from delayd.wire.heads import need_strs


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
