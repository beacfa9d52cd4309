"""``delayd sql``: one query over the tables of data directories and archives, by DuckDB.

Invariant: rows are listed as they come, and a table shows no more of them than --limit says.
"""

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import click

from delayd.reading.tables import need

from .hour_commands import HourRange, hours_options
from .listing import Cell, Column, ColumnKind, JsonText
from .shared_options import Command, Shown, bundle, paths_of, place_params, shown_options

if TYPE_CHECKING:
    import pyarrow as pa

NAMES = ("sequence", "other_sequence", "epoch", "batch_id", "place", "number", "target_offset", "offset")
_HOURS_MAX = 1 << 32  # An hour is a u32 in every file.


@click.command(cls=Command)
@click.argument("query", metavar="QUERY")
@bundle("places", paths_of, *place_params)
@hours_options
@shown_options
def sql(query: str, places: tuple[str, ...], hours: HourRange, shown: Shown) -> None:
    """Ask a query in SQL, of data directories and archives.

    The views are `schedule`, `dispatch`, `message`, `lifecycle`, `hours`, `findings`, `seals` and others, with the
    columns that docs/spark-tables.md lists. `key`, `tags`, `headers` and `body` are there when the query names them.
    What the query does not name is not read; --from and --to leave out hours. Rows of a damaged hour are left out, and
    `hours` calls it DAMAGED.

    The command needs DuckDB: pip install 'delayd[sql]'.

    $ delayd sql "select hour, scheduled, lost from hours"
    $ delayd sql "select * from lifecycle where key = 'order-42'" --from -48h
    $ delayd sql "select subject, count(*) from schedule group by subject" /mnt/a /mnt/b s3://books/delayd
    """
    need("duckdb", "`delayd sql`", "sql")
    need("pyarrow", "`delayd sql`", "sql")
    # Only this command needs them.
    from delayd.reading.sql import answer

    chosen = range(hours.first or 0, _HOURS_MAX if hours.until is None else hours.until)
    with answer(query, places, chosen, time.time_ns() // 1_000_000) as rows:
        shown.show([_column(field) for field in rows.schema], _cells(rows))


def _column(field: "pa.Field") -> Column:
    import pyarrow as pa

    kind = ColumnKind.TEXT
    if pa.types.is_integer(field.type):
        kind = ColumnKind.NAME if field.name in NAMES else ColumnKind.NUMBER
        if field.name.endswith("_at_ms"):
            kind = ColumnKind.INSTANT
    return Column(field.name, kind)


def _cells(rows: "pa.RecordBatchReader") -> Iterator[tuple[Cell, ...]]:
    for batch in rows:
        columns = [map(_cell, column.to_pylist()) for column in batch.columns]
        yield from zip(*columns, strict=True)


def _cell(value: object) -> Cell:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, list | dict):
        return JsonText(json.dumps(value, default=_plain))
    return str(value)


def _plain(value: object) -> str:
    return _text(value) if isinstance(value, bytes) else str(value)


def _text(value: bytes) -> str:
    """Bytes as text; in hex when they are none in UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()
