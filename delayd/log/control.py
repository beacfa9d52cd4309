"""Control records: what a log says about itself, as batches between those of messages (docs/formats/batch.md).

Each body of a CONTROL batch is one msgpack map with a ``type``; a reader passes over types that it does not know.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import msgpack
import numpy as np

from delayd.batch import Batch, BatchKind, ColumnId
from delayd.encode import encode, lay_out
from delayd.errors import BatchMalformed

RecordValue = int | str | bytes | list[int]
Record = Mapping[str, RecordValue]


def encode_records(records: Sequence[Record]) -> bytes:
    """Make one CONTROL batch of at most 65,536 records."""
    ends, bodies = lay_out([cast(bytes, msgpack.packb(record)) for record in records], 0)
    padding = bytes(-len(bodies) & 7)
    return encode(
        BatchKind.CONTROL, None, len(records), [(ColumnId.BODY_END, ends.astype(np.uint32))], [bodies, padding]
    )


def decode_records(batch: Batch) -> list[dict[str, RecordValue]]:
    """Read the records of a verified CONTROL batch.

    Raises:
        BatchMalformed: a body is no map.
    """
    starts, ends = batch.region(ColumnId.BODY_END)
    records: list[dict[str, RecordValue]] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        record: object = msgpack.unpackb(batch.heap[start:end])
        if not isinstance(record, dict):
            raise BatchMalformed(f"a control record is a {type(record).__name__} instead of a map")
        records.append(record)
    return records
