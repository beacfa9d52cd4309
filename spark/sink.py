"""The sink ``frame.write.format("delayd")``: each row of a frame becomes a scheduled message (docs/spark.md).

Invariants: a row is told from others by subject, key and due instant, and each such row becomes one message, however
often Spark runs its task: a pending message holds its key, and of rows that are due soon a task first asks the delay
servers which of them have left already. No row of a chunk is sent before all of them were checked.
Receipts get their names when all tasks have ended, so a table of receipts is of whole jobs.

An example: a task with rows 1 to 3 fails after the delay server has kept 1 and 2, and 1 has been delivered. When Spark
runs it again, the server knows 1 as DISPATCHED with the row's own instant, so it is not sent; 2 is sent and is KEPT,
which means that the first one stands for it; 3 is ACCEPTED. If row 1 has the key of a delivered message with another
instant, it is a new one, such as next month's reminder.
"""

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from delayd.batch.columns import Int64s
from delayd.batch.names import KEY_BYTES_MAX, MESSAGE_BYTES_MAX
from delayd.client.instants import MACHINE_HORIZON, within_horizon
from delayd.client.limits import check_body, check_sent_subject, need_meta, pack_headers
from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import BatchReceipt, SendVerdict
from delayd.client.sending.send_options import REJECT, OnConflict, check_key, expiry_of, label_of
from delayd.errors import BadArgument, CallerError, InFlight
from delayd.hours import INSTANT_MS_MIN
from delayd.outcome import MessageState

# What is checked and sent together. A call of the producer is for one subject and costs as much as 30 rows of it: with
# a thousand subjects in a partition, this many rows are 130 of each.
CHUNK_ROWS, CHUNK_BYTES = 131_072, 32 << 20
# A row that is due later is still pending if an earlier try has sent it, so its key keeps a second one away. This is
# longer than a chunk takes to be sent, and than clocks differ.
SOON_MS = 300_000
TRIES_MAX = 5  # Each waits up to five seconds at the server for a message that is being handed over.
OPTIONS = ("meta", "origin", "on_conflict", "receipts", "dry_run")
ON_CONFLICT: Mapping[str, OnConflict] = {"keep": "keep", "replace": "replace"}
# The columns that a frame may have, and the types of each, by the first word that Spark writes for it.
TYPES: Mapping[str, tuple[str, ...]] = {
    "subject": ("string",),
    "body": ("binary", "string"),
    "deliver_at": ("timestamp",),
    "deliver_at_ms": ("bigint",),
    "key": ("string", "binary"),
    "id": ("string", "bigint", "int"),
    "headers": ("map<string,string>", "map<string,binary>"),
    "tags": ("array<string>",),
    "ttl": ("interval",),
    "expires_at": ("timestamp",),
    "ordering_key": ("string", "binary"),
}
# Which of them a frame must have, and what is refused otherwise.
ONE_OF = (("subject",), ("body",), ("deliver_at", "deliver_at_ms"), ("key", "id"))
REQUIRED = ("subject", "body", "due", "key")
# What refuses a value, column by column; the producer holds the same limits.
CHECKS: Mapping[str, Callable[[Any], object]] = {
    "subject": check_sent_subject,
    "body": check_body,
    "due": lambda instant_ms: within_horizon(instant_ms, MACHINE_HORIZON),
    "key": check_key,
    "headers": pack_headers,
    "tags": lambda tags: label_of(None, REJECT, tags),
    "ttl": lambda ttl: expiry_of(ttl, None),
    "expires_at": lambda instant: expiry_of(None, instant),
    "ordering_key": lambda key: label_of(None, REJECT, None, ordering_key=key),
}
# The states of a row that an earlier try has sent and that is not pending, so that its key would not hold a second one.
ENDED = tuple({*MessageState} - {MessageState.UNKNOWN, MessageState.PENDING, MessageState.REJECTED, MessageState.KEPT})
VERDICTS = pa.array([verdict.name for verdict in SendVerdict])  # By their numbers.
SENT_BEFORE = "SENT_BEFORE"  # What the receipt of such a row says in place of a `SendVerdict`.
RECEIPT = pa.schema(
    [
        *((name, pa.string()) for name in ("subject", "key", "verdict", "log_id")),
        *((name, pa.int64()) for name in ("sequence", "deliver_at_ms", "accepted_at_ms")),
    ]
)

Rows = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What ``.option(…)`` has said of a write, checked.

    Raises:
        BadArgument: an unknown option, or a wrong value.
    """

    meta: str
    origin: str | None
    on_conflict: OnConflict
    receipts: str | None
    dry_run: bool

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "SinkOptions":
        """Read Spark's options; their names come in small letters."""
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise BadArgument(f"option {unknown[0]!r} of a write is not one of {', '.join(OPTIONS)}")
        on_conflict = options.get("on_conflict", "keep")
        if on_conflict not in ON_CONFLICT:
            # With "reject" a task that Spark repeats would be refused its own rows.
            raise BadArgument(f"on_conflict {on_conflict!r} is not one of {', '.join(ON_CONFLICT)}")
        dry_run = options.get("dry_run", "false").lower()
        if dry_run not in ("true", "false"):
            raise BadArgument(f"dry_run {dry_run!r} is not true or false")
        meta = need_meta(options.get("meta"))
        return cls(meta, options.get("origin"), ON_CONFLICT[on_conflict], options.get("receipts"), dry_run == "true")


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Refuse a frame whose columns can't be messages, before any task runs.

    Raises:
        BadArgument: with the column: unknown, missing, doubled, or of a wrong type.
    """
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name, found in types.items():
        if name not in TYPES:
            raise BadArgument(f"column {name!r} is not one of {', '.join(TYPES)}: select or rename what is sent")
        if found.partition(" ")[0] not in TYPES[name]:
            raise BadArgument(f"column {name!r} is {found}; it must be {' or '.join(TYPES[name])}")
    for names in ONE_OF:
        count = sum(name in types for name in names)
        if count == 0:
            why = ": without it a task that Spark repeats would send its rows twice" if "key" in names else ""
            raise BadArgument(f"the frame has no column {' or '.join(map(repr, names))}{why}")
        if count > 1:
            raise BadArgument(f"the frame has both columns {' and '.join(map(repr, names))}; give one of them")
    if ("id" in types) is not (options.origin is not None):
        raise BadArgument("option 'origin' and column 'id' belong together: a row's key is ORIGIN:ID")


@dataclass
class Written(WriterCommitMessage):
    """What a task tells the driver: its file of receipts, complete and without its final name."""

    receipts: str | None


class DelaydWriter(DataSourceArrowWriter):
    """Sends the rows of a frame, each task those of one partition."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Send one partition."""
        context = TaskContext.get()
        partition, attempt = (context.partitionId(), context.taskAttemptId()) if context is not None else (0, 0)
        chunks = (Chunk.of(table, first, partition, self._options) for first, table in gathered(iterator))
        if self._options.dry_run:
            for _ in chunks:
                pass
            return Written(None)
        return asyncio.run(self._send(chunks, f"_{self._job}-{partition:05}-{attempt}"))

    async def _send(self, chunks: "Iterator[Chunk]", name: str) -> Written:
        with ReceiptFile(self._options.receipts, name) as receipts:
            async with AsyncProducer(self._options.meta) as producer:
                sender = Sender(producer, self._options.on_conflict, told=receipts.path is not None)
                for chunk in chunks:
                    # The producer joins what is sent at the same time, so subjects of few rows share batches.
                    sent = await asyncio.gather(*map(sender.send, chunk.by_subject()))
                    receipts.add([batch for batches in sent for batch in batches])
        return Written(receipts.path)

    def commit(self, messages: "list[WriterCommitMessage | None]") -> None:
        """Give the receipts of all tasks their names."""
        for number, path in enumerate(self._files(messages)):
            disk, place = open_place(path)
            folder = place.rpartition("/")[0]
            disk.move(place, f"{folder}/receipts-{self._job}-{number:05}.parquet")

    def abort(self, messages: "list[WriterCommitMessage | None]") -> None:
        """Remove them: the run that succeeds has the receipts of all rows."""
        for path in self._files(messages):
            disk, place = open_place(path)
            disk.delete_file(place)

    def _files(self, messages: "list[WriterCommitMessage | None]") -> list[str]:
        return [each.receipts for each in messages if isinstance(each, Written) and each.receipts is not None]


def gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.Table]]:
    """Join small batches into tables worth a send, each with the number of its first row."""
    held: list[pa.RecordBatch] = []
    rows = first = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= CHUNK_ROWS or sum(each.nbytes for each in held) >= CHUNK_BYTES:
            yield first, pa.Table.from_batches(held)
            first, rows, held = first + rows, 0, []
    if rows:
        yield first, pa.Table.from_batches(held)


class Chunk(NamedTuple):
    """Rows that were checked: columns of Python's values, sorted by subject."""

    columns: Mapping[str, Sequence[Any]]

    @classmethod
    def of(cls, table: pa.Table, first: int, partition: int, options: SinkOptions) -> "Chunk":
        """Check the rows of a table.

        Raises:
            BadArgument: what is wrong with which row and column. Rows count from 0 within their partition.
        """
        columns = _named(table, options)
        for name, column in columns.items():
            row, why = _first_wrong(name, column)
            if row is not None:
                told = _column_of(name, table)
                raise BadArgument(f"row {first + row} of partition {partition}, column {told!r}: {why}")
        order = pa.array(np.argsort(_codes(columns["subject"]), kind="stable"))
        return cls({name: _listed(name, column.take(order)) for name, column in columns.items()})

    def by_subject(self) -> "Iterator[Chunk]":
        """Its rows as one chunk for each subject."""
        subjects, first = self.columns["subject"], 0
        for _, same in groupby(subjects):
            end = first + sum(1 for _ in same)
            yield Chunk({name: values[first:end] for name, values in self.columns.items()})
            first = end

    @property
    def row_count(self) -> int:
        """How many rows it has."""
        return len(self.columns["key"])

    def take(self, rows: Rows) -> "Chunk":
        """The rows that are chosen."""
        if rows.all():
            return self
        chosen = rows.tolist()
        return Chunk({name: list(compress(values, chosen)) for name, values in self.columns.items()})


def _named(table: pa.Table, options: SinkOptions) -> dict[str, pa.Array]:
    """Columns by the names that `Producer.send_batch` has, with due instants in ms under ``due``, and a key for each
    row.
    """
    columns: dict[str, pa.Array] = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if name == "id":
            columns["key"] = pc.binary_join_element_wise(f"{options.origin}:", column.cast(pa.string()), "")
        elif name == "deliver_at":
            # Rounded up, because a message must not be delivered up to a millisecond early.
            columns["due"] = pc.divide(pc.add(column.cast(pa.int64()), 999), 1_000)
        else:
            columns["due" if name == "deliver_at_ms" else name] = column
    return columns


def _listed(name: str, column: pa.Array) -> list[Any]:
    """The values of a column as the producer takes them."""
    values: list[Any] = (column.cast(pa.binary()) if name in ("body", "key") else column).to_pylist()
    return [None if pairs is None else dict(pairs) for pairs in values] if name == "headers" else values


def _first_wrong(name: str, column: pa.Array) -> tuple[int | None, str]:
    check, required = CHECKS[name], name in REQUIRED
    rows = _suspects(name, column)
    for row, value in zip(rows.tolist(), _listed(name, column.take(pa.array(rows))), strict=True):
        if value is None:
            if required:
                return row, "it is null"
            continue
        try:
            check(value)
        except CallerError as error:
            return row, error.message
    return None, ""


def _suspects(name: str, column: pa.Array) -> Int64s:
    """The rows whose values have to be checked one by one: those that Arrow finds near no limit are left out."""
    if name == "subject":
        codes = _codes(column)
        first = np.zeros(codes.max() + 1, np.int64)
        first[codes[::-1]] = np.arange(len(codes))[::-1]  # What is assigned last stays.
        return np.sort(first)
    if name == "body":
        sound = pc.less_equal(pc.binary_length(column), MESSAGE_BYTES_MAX)
    elif name == "due":
        latest_ms = MACHINE_HORIZON.wall_ms() + MACHINE_HORIZON.ms
        sound = pc.and_(pc.greater_equal(column, INSTANT_MS_MIN), pc.less_equal(column, latest_ms))
    elif name == "key" and pa.types.is_string(column.type):
        length = pc.binary_length(column)
        sound = pc.and_(pc.greater(length, 0), pc.less_equal(length, KEY_BYTES_MAX))
    else:
        return np.arange(len(column))
    return np.flatnonzero(~sound.fill_null(False).to_numpy(zero_copy_only=False))


def _codes(subjects: pa.Array) -> NDArray[np.integer[Any]]:
    """A number for each row, the same for rows of one subject."""
    codes: NDArray[np.integer[Any]] = subjects.dictionary_encode(null_encoding="encode").indices.to_numpy()
    return codes


def _column_of(name: str, table: pa.Table) -> str:
    given = {"due": ("deliver_at", "deliver_at_ms"), "key": ("key", "id")}.get(name, (name,))
    return next(each for each in given if each in table.column_names)


class Sender:
    """Sends rows of one subject."""

    def __init__(self, producer: AsyncProducer, on_conflict: OnConflict, *, told: bool) -> None:
        self._producer = producer
        self._on_conflict = on_conflict
        self._told = told

    async def send(self, chunk: Chunk) -> list[pa.RecordBatch]:
        """Send the rows of a chunk that has one subject; the receipts of all of them, if they are told.

        Raises:
            InFlight: another message with the key of a row is being handed over for longer than the tries take.
        """
        receipts: list[pa.RecordBatch] = []
        for _ in range(TRIES_MAX):
            chunk = await self._without_ended(chunk, receipts)
            if chunk.row_count:
                chunk = await self._send(chunk, receipts)
            if not chunk.row_count:
                return receipts
        subject, key = chunk.columns["subject"][0], chunk.columns["key"][0]
        raise InFlight(f"the message of {subject} with key {key!r} is being handed over; send again a moment later")

    async def _without_ended(self, chunk: Chunk, receipts: list[pa.RecordBatch]) -> Chunk:
        """The rows that no earlier try has sent, or that are pending; receipts of the others."""
        due_ms = np.array(chunk.columns["due"], np.int64)
        soon = due_ms < time.time_ns() // 1_000_000 + SOON_MS
        if not soon.any():
            return chunk
        keys = list(compress(chunk.columns["key"], soon.tolist()))
        answers = await self._producer.get_batch(chunk.columns["subject"][0], keys=keys)
        has_ended = np.isin(answers["state"], ENDED) & (answers["deliver_at_ms"] == due_ms[soon])
        ended = soon.copy()
        ended[soon] = has_ended
        if self._told:
            found = answers[has_ended]
            numbers = [found[name] for name in ("sequence", "deliver_at_ms", "accepted_at_ms")]
            receipts.append(_receipts(chunk.take(ended), pa.repeat(SENT_BEFORE, len(found)), None, numbers))
        return chunk.take(~ended)

    async def _send(self, chunk: Chunk, receipts: list[pa.RecordBatch]) -> Chunk:
        """Send rows; those that have to be sent again, because an earlier message is being handed over."""
        columns = chunk.columns
        receipt = await self._producer.send_batch(
            columns["subject"][0],
            columns["body"],
            columns["due"],
            keys=columns["key"],
            on_conflict=self._on_conflict,
            headers=columns.get("headers"),
            tags=columns.get("tags"),
            ttl=columns.get("ttl"),
            expires_at=columns.get("expires_at"),
            ordering_keys=columns.get("ordering_key"),
        )
        verdicts = receipt.verdicts
        again: Rows = verdicts == SendVerdict.IN_FLIGHT
        if self._told:
            receipts.append(self._receipts_of(chunk, receipt, ~again))
        return chunk.take(again)

    def _receipts_of(self, chunk: Chunk, receipt: BatchReceipt, rows: Rows) -> pa.RecordBatch:
        """Receipts of rows that were sent."""
        verdicts = receipt.verdicts
        kept: Rows = verdicts == SendVerdict.KEPT
        standing: list[NDArray[np.integer[Any]]] = [receipt.sequences, receipt.deliver_at_ms, receipt.accepted_at_ms]
        if kept.any():
            # The message that stands for a row that was kept is the earlier one.
            others = receipt.others, receipt.others_at_ms, receipt.others_filed_at_ms
            standing = [np.where(kept, *pair) for pair in zip(others, standing, strict=True)]
        names = VERDICTS.take(pa.array(verdicts[rows]))
        return _receipts(chunk.take(rows), names, receipt.log_ids[rows], [column[rows] for column in standing])


def _receipts(
    chunk: Chunk,
    verdicts: pa.Array,
    log_ids: NDArray[np.uint64] | None,
    numbers: Sequence[NDArray[np.integer[Any]]],
) -> pa.RecordBatch:
    """Receipts of rows; ``numbers`` are their sequences, due instants and instants of acceptance."""
    names = pa.nulls(len(verdicts), pa.string())
    if log_ids is not None:
        servers, index = np.unique(log_ids, return_inverse=True)
        names = pa.array([f"{log_id:016x}" for log_id in servers.tolist()], pa.string()).take(pa.array(index))
    keys = pa.array(chunk.columns["key"], pa.binary())
    signed = [column.astype(np.int64) for column in numbers]
    return pa.record_batch([chunk.columns["subject"], keys, verdicts, names, *signed], schema=RECEIPT)


class ReceiptFile:
    """Writes the receipts of a task into one file, which a task that fails removes; none when nobody asked for them."""

    def __init__(self, folder: str | None, name: str) -> None:
        self.path = None if folder is None else f"{folder.rstrip('/')}/{name}"
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> "ReceiptFile":
        if self.path is not None:
            disk, place = open_place(self.path)
            disk.create_dir(place.rpartition("/")[0])
            self._writer = pq.ParquetWriter(place, RECEIPT, filesystem=disk, compression="zstd")
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._writer is None or self.path is None:
            return
        self._writer.close()
        if error is not None:
            disk, place = open_place(self.path)
            disk.delete_file(place)

    def add(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Add receipts, as one row group."""
        if self._writer is not None and batches:
            self._writer.write_table(pa.Table.from_batches(batches))


def open_place(path: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """The file system of a path or URI, and the path in it."""
    if "://" in path:
        found: tuple[pyarrow.fs.FileSystem, str] = pyarrow.fs.FileSystem.from_uri(path)
        return found
    return pyarrow.fs.LocalFileSystem(), os.path.abspath(path)
