"""SQL: one query of DuckDB over the tables of data directories and archives (docs/fleet.md).

Invariant: views that the query does not name are not read, and the others are read by one plan each, hour by hour, so
memory holds no more than DuckDB wants: what is too much for it, it writes into a folder that is removed at the end.

Importing it needs pyarrow and duckdb.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory

import duckdb
import pyarrow as pa

from delayd.errors import BadArgument
from delayd.reading.files.items import ITEMS
from delayd.reading.files.stored_groups import until_still
from delayd.reading.views.planning import plan_view
from delayd.reading.views.query import VIEWS, WITH_ITEMS, ViewQuery, types_of

READ = "rows_of_a_view"  # The name under which DuckDB finds the rows that it is to take.
BATCH_ROWS = 4_096  # Rows of an answer that are Python objects at a time.


@contextmanager
def answer(sql: str, places: Sequence[str], hours: range, now_ms: int) -> Iterator[pa.RecordBatchReader]:
    """Ask one query; its rows can be read within the block.

    Example::

        with answer("select hour, lost from hours", ["/var/lib/delayd"], EVERY_HOUR, now_ms) as rows:
            print(rows.read_all().to_pandas())

    Args:
        sql: one SELECT. The views are those of Spark's data source (docs/spark-tables.md). `schedule` and `lifecycle`
            have `key`, `tags`, `headers` and `body`, too, if the query names these columns.
        places: data directories, and archives by their URIs or folders.
        hours: which hours the views have.
        now_ms: the wall clock, in milliseconds since the epoch.

    Raises:
        BadArgument: this is no query, or a place holds nothing of delayd.
        DamagedData, NewerFormat: what a plan needs can't be read.
        BadSetting, ServerUnavailable: an archive can't be read.
    """
    words = set(re.findall(r"\w+", sql.lower()))
    items = [name for name in ITEMS if name in words]
    queries = {
        view: ViewQuery(view, tuple(types_of(view, items if view in WITH_ITEMS else ())), hours) for view in VIEWS
    }
    with TemporaryDirectory() as folder, duckdb.connect(config={"temp_directory": folder}) as connection:
        connection.execute("set timezone = 'UTC'")
        connection.execute("set enable_progress_bar = false")
        for view, query in queries.items():
            _take(connection, f'create table "{view}" as', query.schema.empty_table())
        # A mistake should be told before minutes of reading.
        _check(connection, sql)
        for view in words & queries.keys():
            until_still(" ".join(places), partial(_fill, connection, queries[view], places, now_ms))
        yield _asked(connection, sql)


def _fill(connection: duckdb.DuckDBPyConnection, query: ViewQuery, places: Sequence[str], now_ms: int) -> None:
    connection.execute(f'delete from "{query.view}"')  # An attempt during which files went away may have left rows.
    parts = plan_view(query, places, 1, now_ms)
    batches = (batch for part in parts for batch in part.read())
    _take(connection, f'insert into "{query.view}"', pa.RecordBatchReader.from_batches(query.schema, batches))


def _take(connection: duckdb.DuckDBPyConnection, what: str, rows: pa.Table | pa.RecordBatchReader) -> None:
    connection.register(READ, rows)
    try:
        connection.execute(f"{what} select * from {READ}")
    finally:
        connection.unregister(READ)


def _check(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    try:
        statements = connection.extract_statements(sql)
        if [each.type for each in statements] != [duckdb.StatementType.SELECT]:
            raise BadArgument("a query is one SELECT; to change or write something, export the tables first")
        connection.execute(f"explain {sql}")
    except duckdb.Error as error:
        raise BadArgument(f"DuckDB can't take the query: {error}") from error


def _asked(connection: duckdb.DuckDBPyConnection, sql: str) -> pa.RecordBatchReader:
    try:
        return connection.sql(sql).to_arrow_reader(BATCH_ROWS)
    except duckdb.Error as error:
        raise BadArgument(f"DuckDB can't answer the query: {error}") from error
