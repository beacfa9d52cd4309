"""Parquet: rows of a table, written as they come into one file of large row groups.

Importing it needs pyarrow.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from delayd.reading.arrow import TYPES, to_arrow
from delayd.reading.tables import Columns, Types, count_rows, join

GROUP_ROWS = 131_072  # About 10 MB in memory; smaller groups make Parquet slow to read.
AT_ONCE_ROWS = 8_192  # Columns of fewer rows are joined first: making an Arrow array costs 20 us, however small.
GROUP_BYTES = 64 << 20  # A group with bodies may have fewer rows.
# Sequences and instants mostly differ little from one row to the next, and hashes have no order at all.
HASH_SUFFIX, HASH_ENCODING, NUMBER_ENCODING = "_hash", "PLAIN", "DELTA_BINARY_PACKED"
NAMED = ("string", "id")  # Types with few values for many rows, which a dictionary keeps once.


def slices(columns: Columns, rows_max: int) -> Iterator[Columns]:
    """Cut columns into pieces of at most so many rows."""
    for first in range(0, count_rows(columns), rows_max):
        yield {name: cells.take(slice(first, first + rows_max)) for name, cells in columns.items()}


class ParquetRows:
    """Writes one file. It gathers the rows of small hours, so that a group of rows is worth reading."""

    def __init__(self, path: Path, types: Types, facts: Mapping[str, str] | None = None) -> None:
        """``facts`` are kept in the file beside its schema. Raises OSError when the file can't be made."""
        self._schema = pa.schema([(name, TYPES[kind]) for name, kind in types.items()], facts)
        numbers = [name for name, kind in types.items() if kind == "long"]
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            use_dictionary=[name for name, kind in types.items() if kind in NAMED],
            column_encoding={
                name: HASH_ENCODING if name.endswith(HASH_SUFFIX) else NUMBER_ENCODING for name in numbers
            },
        )
        self._few: list[Columns] = []
        self._few_rows = 0
        self._gathered: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0  # Of what is gathered.

    def write(self, columns: Columns) -> None:
        """Add rows behind those that were written; raises OSError."""
        for part in slices(columns, GROUP_ROWS):
            self._few.append(part)
            self._few_rows += count_rows(part)
            if self._few_rows >= AT_ONCE_ROWS:
                self._convert()

    def write_arrays(self, arrays: Mapping[str, pa.Array]) -> None:
        """The same, of at most GROUP_ROWS rows."""
        rows = [arrays[name] for name in self._schema.names]
        self._gathered.append(pa.RecordBatch.from_arrays(rows, schema=self._schema))
        self._rows += self._gathered[-1].num_rows
        self._bytes += self._gathered[-1].nbytes
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Finish the file; raises OSError. Without this nobody can read it."""
        self._convert()
        self._flush()
        self._writer.close()

    def _convert(self) -> None:
        few, self._few, self._few_rows = self._few, [], 0
        if few:
            self.write_arrays({name: to_arrow(join([part[name] for part in few])) for name in self._schema.names})

    def _flush(self) -> None:
        if self._gathered:
            table = pa.Table.from_batches(self._gathered, self._schema)
            self._writer.write_table(table, row_group_size=GROUP_ROWS)
            self._gathered, self._rows, self._bytes = [], 0, 0
