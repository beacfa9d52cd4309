"""Carried: keys, tags, headers and bodies of archived messages, and the proof that a body is the one of its row.

Invariant: a body gives the content hash of its row, which the seal's digests cover. That hash is made of the subject,
the packed headers and the body (docs/formats/content.md). A map of headers gives the packed ones only if they were
packed as delayd's clients do; so what packed headers add to the hash stands in the column `headers_hash` wherever the
file's `headers` do not give it.

Importing it needs pyarrow.
"""

from collections.abc import Callable, Mapping, Sequence

import msgpack
import numpy as np
import pyarrow as pa

from delayd.batch.content import NOT_STATED, Region, UInt64s, mixed, subject_states
from delayd.reading.arrow import TYPES
from delayd.reading.files.items import ITEMS, PACKED_HEADERS
from delayd.reading.files.row_arrays import ScheduleRows
from delayd.reading.tables import Types

HEADERS_HASH = "headers_hash"
PROVED = ("headers", HEADERS_HASH, "body")  # The columns that content hashes are compared with.
ReadItems = Callable[[ScheduleRows, Sequence[str]], Mapping[str, list[object]]]


def carried_types(items: Sequence[str]) -> Types:
    """The columns of a file that has these items, in order."""
    types = {name: name for name in ITEMS if name in items}
    return {**types, HEADERS_HASH: "long"} if "body" in items else types


def carried_columns(rows: ScheduleRows, items: Sequence[str], read: ReadItems) -> dict[str, pa.Array]:
    """The columns of some rows, of which ``read`` reads the items."""
    if not items:
        return {}  # Reading costs a look at each batch.
    found = dict(read(rows, (*items, PACKED_HEADERS) if "body" in items else items))
    columns = {name: pa.array(found[name], TYPES[name]) for name in items}
    if "body" in items:
        packed = _values([each for each in found[PACKED_HEADERS] if isinstance(each, bytes)])
        said = _values(_packed(columns["headers"]) if "headers" in items else [b""] * len(rows))
        columns[HEADERS_HASH] = pa.array(packed.view(np.int64), mask=packed == said)
    return columns


def wrong_bodies(rows: ScheduleRows, carried: pa.Table) -> list[int]:
    """The sequences of rows whose bodies are not theirs, or are missing though nobody has left them out.

    ``carried`` has the columns of PROVED that the file of these rows has.
    """
    if "body" not in carried.column_names or not len(rows):
        return []
    bodies, stated = carried.column("body"), carried.column(HEADERS_HASH)
    headers = _packed(carried.column("headers")) if "headers" in carried.column_names else [b""] * len(rows)
    values = np.where(
        stated.is_valid().to_numpy(zero_copy_only=False),
        stated.fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64),
        _values(headers),
    )
    values += subject_states([name.encode() for name in rows.subjects])[rows.subject]
    hashes = np.maximum(mixed(values) + _values(bodies.fill_null(b"").to_pylist()), np.uint64(1))
    known = bodies.is_valid().to_numpy(zero_copy_only=False)
    differs = known & (hashes != rows.hashes()) & (rows.hashes() != NOT_STATED)
    wrong: list[int] = rows.sequence[differs | (known == np.isin(rows.sequence, rows.left_out))].tolist()
    return wrong


def _packed(headers: pa.Array | pa.ChunkedArray) -> list[bytes]:
    """Headers as delayd's clients pack them: values are text where they can be."""
    return [
        msgpack.packb({name: _as_text(value) for name, value in each}) if each else b"" for each in headers.to_pylist()
    ]


def _as_text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _values(items: Sequence[bytes]) -> UInt64s:
    """What items add to a content hash: uint64[n]."""
    words = b"".join([item + bytes(-len(item) & 7) for item in items])
    lengths = np.fromiter(map(len, items), np.int64, len(items))
    return Region(np.frombuffer(words, np.uint64), lengths).values()
