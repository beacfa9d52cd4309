"""One renderer for every listing: a table for people, JSON and CSV for programs.

Invariant: JSON and CSV hold the exact values, with their units in the names of the columns; only a table rounds them or
writes an instant as a date. All are written as the rows come, a table in pieces, JSON as one array with one object a
line: a listing of millions costs time and no memory.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TextIO

import click

from .table import Cell, Column, JsonText, Table, width_of

LIMIT_DEFAULT = 100  # Fills a screen or two. A user who wants millions of rows says so.
PIECE_ROWS = 1_000  # A table is written in pieces of this many rows; a column is as wide as its widest cell so far.


def show(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], form: str, limit: int = 0) -> int:
    """Write rows to stdout as ``form`` says, at most ``limit`` of them unless it is 0; returns how many.

    A sentence on stderr says when more were there, or, below a table, that nothing was.
    """
    source = iter(rows)
    counted = _Counted(islice(source, min(limit, sys.maxsize)) if limit else source)
    writers = {"table": _write_table, "json": _write_json, "csv": _write_csv}
    writers[form](columns, counted, sys.stdout)
    if form == "table" and not counted.count:
        click.echo("delayd: nothing to list", err=True)
    if limit and counted.count == limit and next(source, None) is not None:
        sys.stdout.flush()
        click.echo(f"delayd: stopped after {limit} rows; --limit 0 shows all, --limit N more", err=True)
    return counted.count


def printable(data: bytes, length_max: int = 80) -> str:
    """Bytes as one line without characters that control a terminal; a long one is cut and ends with an ellipsis."""
    text = data[: 4 * length_max].decode("utf-8", "backslashreplace")
    safe = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return safe if len(safe) <= length_max and len(data) <= 4 * length_max else f"{safe[: length_max - 1]}…"


class _Counted(Iterator[Sequence[Cell]]):
    def __init__(self, rows: Iterator[Sequence[Cell]]) -> None:
        self.count = 0
        self._rows = rows

    def __next__(self) -> Sequence[Cell]:
        row = next(self._rows)
        self.count += 1
        return row


def _write_table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], out: TextIO) -> None:
    table = Table(columns, out, width_of(out))
    piece: list[Sequence[Cell]] = []
    try:
        for row in rows:
            piece.append(row)
            if len(piece) == PIECE_ROWS:
                piece, full = [], piece
                table.write(full)
    finally:
        # Show the rows that were read before the damage, as the other formats do.
        table.write(piece)
        table.end()


def _write_json(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], out: TextIO) -> None:
    names = [column.name for column in columns]
    before = "[\n"
    for row in rows:
        cells = (json.loads(cell) if isinstance(cell, JsonText) else cell for cell in row)
        item = json.dumps(dict(zip(names, cells, strict=True)), ensure_ascii=False)
        out.write(f"{before}{item}")
        before = ",\n"
    out.write("[]\n" if before == "[\n" else "\n]\n")


def _write_csv(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], out: TextIO) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    writer.writerows([_csv_cell(cell) for cell in row] for row in rows)


def _csv_cell(cell: Cell) -> Cell:
    return ("true" if cell else "false") if isinstance(cell, bool) else cell
