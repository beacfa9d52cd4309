"""Items: keys, tags, headers and bodies of single rows, read from the batches in which the rows stand.

Invariant: a batch is read once, checked, and only for rows that were asked for; each row's sequence is compared with
that of its place, so that no message gets what another one carries.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind, ColumnId, Int64s
from delayd.batch.labels import KEY, decode_headers, decode_tags
from delayd.batch.sequences import ROW_BITS, ROW_MASK, locate
from delayd.errors import BadHeaders, BatchMalformed, DamagedData
from delayd.log.hour import schedule_path
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.machine.disk import Disk
from delayd.reading.files.directory import ScheduleSnapshot
from delayd.reading.files.origins import place_of, read_batch
from delayd.reading.files.row_arrays import ScheduleRows, UInt64s
from delayd.reading.files.stored_groups import LogMoved


def read_items(
    disk: Disk, snapshot: ScheduleSnapshot, hour: int, rows: ScheduleRows, names: Sequence[str]
) -> dict[str, list[object]]:
    """Read items of rows of an hour that `read_hour` returned, in their order; ``names`` are some of READERS.

    Raises:
        LogMoved: a file is gone.
        DamagedData: a batch does not check, or holds another message at that place.
    """
    found: dict[str, list[object]] = {name: [None] * len(rows) for name in names}
    batches, of_batch = np.unique(rows.location >> np.uint64(ROW_BITS), return_inverse=True)
    order = np.argsort(of_batch, kind="stable")
    bounds = np.searchsorted(of_batch[order], np.arange(len(batches) + 1)).tolist()
    for first, until in pairwise(bounds):
        own = order[first:until]
        in_schedule_log, offset, _ = locate(int(rows.location[own[0]]))
        batch, path = _batch(disk, snapshot, hour, in_schedule_log, offset)
        places = (rows.location[own] & np.uint64(ROW_MASK)).astype(np.int64)
        if in_schedule_log and not _holds(batch, places, rows.sequence[own]):
            raise DamagedData(path, 0, "a batch of it holds other messages than were read of its hour")
        for name in names:
            for row, item in zip(own.tolist(), READERS[name](batch, places), strict=True):
                found[name][row] = item
    return found


def first_key(headers: bytes) -> str | None:
    """The key of the first life of a message, which the headers of its later lives name."""
    if KEY.encode() not in headers:
        return None
    try:
        return str(decode_headers(headers).get(KEY) or "") or None
    except BadHeaders:
        return None  # Intake refuses such headers, so a file was changed, and nothing is known.


def _batch(disk: Disk, snapshot: ScheduleSnapshot, hour: int, in_schedule_log: bool, offset: int) -> tuple[Batch, str]:
    path, position = schedule_path(snapshot.directory.path, hour), offset + FILE_HEADER_BYTES
    if not in_schedule_log:
        path, position = place_of(disk, snapshot.place, offset)
    try:
        return read_batch(disk, path, position), path
    except FileNotFoundError:
        raise LogMoved(f"{path} is gone") from None
    except BatchMalformed as error:
        raise DamagedData(path, position, str(error)) from None


def _holds(batch: Batch, places: Int64s, sequences: UInt64s) -> bool:
    if batch.kind != BatchKind.SCHEDULE or int(places.max()) >= batch.count:
        return False
    return np.array_equal(batch.uint64s(ColumnId.SEQUENCE)[places], sequences)


def keys_of(batch: Batch, places: Int64s) -> list[str | None]:
    """The keys of some rows of a batch; of a later life the one that its first life had, None where there is none."""
    own, packed = bytes_of(batch, ColumnId.KEY_END, places), bytes_of(batch, ColumnId.HEADERS_END, places)
    pairs = zip(own, packed, strict=True)
    return [key.decode("utf-8", "backslashreplace") or first_key(headers) for key, headers in pairs]


def tags_of(batch: Batch, places: Int64s) -> Iterator[list[str]]:
    """The tags of some rows."""
    return (list(decode_tags(item)) for item in bytes_of(batch, ColumnId.TAGS_END, places))


def packed_headers_of(batch: Batch, places: Int64s) -> list[bytes]:
    """The headers of some rows as they were sent; empty where a message has none."""
    return bytes_of(batch, ColumnId.HEADERS_END, places)


def headers_of(batch: Batch, places: Int64s) -> Iterator[list[tuple[str, bytes]]]:
    """The headers of some rows, their values as bytes."""
    for item in packed_headers_of(batch, places):
        headers = decode_headers(item).items()
        yield [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]


def bodies_of(batch: Batch, places: Int64s) -> Iterator[bytes | None]:
    """The bodies of some rows; None for one that its file has left out."""
    bodies = bytes_of(batch, ColumnId.BODY_END, places)
    if ColumnId.BODY_LEFT_OUT not in batch:
        return iter(bodies)
    left_out = batch.uint32s(ColumnId.BODY_LEFT_OUT)[places].tolist()
    return (None if gone else body for gone, body in zip(left_out, bodies, strict=True))


def bytes_of(batch: Batch, column: ColumnId, places: Int64s) -> list[bytes]:
    """The items of some rows in a region, as they stand; empty where the batch has no such region."""
    if column not in batch:
        return [b""] * len(places)
    heap, (starts, ends) = batch.heap, batch.region(column)
    pairs = zip(starts[places].tolist(), ends[places].tolist(), strict=True)
    return [bytes(heap[start:end]) for start, end in pairs]


# A key is null where there is none, a body where its file has left it out.
ITEMS: Mapping[str, Callable[[Batch, Int64s], Iterable[object]]] = {
    "key": keys_of,
    "tags": tags_of,
    "headers": headers_of,
    "body": bodies_of,
}
PACKED_HEADERS = "packed_headers"  # The headers of a row as its content hash covers them.
READERS = {**ITEMS, PACKED_HEADERS: packed_headers_of}
