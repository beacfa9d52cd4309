"""One renderer for every listing: a table for people, JSON and CSV for programs.

Invariant: JSON and CSV hold the exact values, with their units in the names of the columns; only a table rounds them or
writes an instant as a date. All are written as the rows come, a table in pieces, JSON as one array with one object a
line: a listing of millions costs time and no memory.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple, TextIO

import click
from rich.cells import cell_len

from .times import duration_text, instant_text

LIMIT_DEFAULT = 100  # Fills a screen or two; a listing of millions is asked for on purpose.
PIECE_ROWS = 1_000  # Of a table, whose columns are as wide as the widest cell of this and the pieces before it.
GAP = "   "  # Between two columns.

Cell = str | int | float | bool | None


class Kind(Enum):
    """What a column holds, which says how a table writes it."""

    TEXT = "text"
    NUMBER = "number"  # A count.
    NAME = "name"  # A number that names something, written without separators.
    INSTANT = "instant"  # Milliseconds since the epoch.
    DURATION = "duration"  # Milliseconds.
    SIZE = "size"  # Bytes.


class Column(NamedTuple):
    """A column: its name in JSON and CSV, what it holds, and whether a table, which has no room, leaves it out."""

    name: str
    kind: Kind = Kind.TEXT
    detail: bool = False

    @property
    def heading(self) -> str:
        """What stands above it in a table, where a value shows its unit itself."""
        name = self.name
        if self.kind in (Kind.INSTANT, Kind.DURATION):
            name = name.removesuffix("_ms")
        if self.kind is Kind.SIZE:
            name = name.removesuffix("_bytes")
        return name.replace("_", " ")


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


def size_text(size: float) -> str:
    """Bytes with the unit that suits them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def printable(data: bytes, length_max: int = 80) -> str:
    """Bytes as one line that no terminal obeys, cut with an ellipsis when they are long."""
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
    table = _Table(columns, out)
    piece: list[Sequence[Cell]] = []
    try:
        for row in rows:
            piece.append(row)
            if len(piece) == PIECE_ROWS:
                piece, full = [], piece
                table.write(full)
    finally:
        # What was read before a damaged place is shown, as in the other formats.
        table.write(piece)


class _Table:
    """Columns of text; no line is folded, so that each row stays one line for `grep` and `less -S`."""

    def __init__(self, columns: Sequence[Column], out: TextIO) -> None:
        self._shown = [(number, column) for number, column in enumerate(columns) if not column.detail]
        self._right = [column.kind not in (Kind.TEXT, Kind.INSTANT) for _, column in self._shown]
        self._widths = [len(column.heading) for _, column in self._shown]
        self._out = out
        self._begun = False

    def write(self, rows: Sequence[Sequence[Cell]]) -> None:
        """Write the next rows, below the headings if they are the first ones."""
        if not rows:
            return
        texts = [[_cell_text(column, row[number]) for number, column in self._shown] for row in rows]
        self._widths = [
            max(width, *map(_width, cells)) for width, cells in zip(self._widths, zip(*texts, strict=True), strict=True)
        ]
        if not self._begun:
            self._begun = True
            self._line([column.heading for _, column in self._shown])
            rule = "─" if (self._out.encoding or "").lower().startswith("utf") else "-"
            self._out.write(rule * (sum(self._widths) + len(GAP) * (len(self._widths) - 1)) + "\n")
        for cells in texts:
            self._line(cells)

    def _line(self, cells: Sequence[str]) -> None:
        padded = [
            " " * (width - _width(text)) + text if right else text + " " * (width - _width(text))
            for text, width, right in zip(cells, self._widths, self._right, strict=True)
        ]
        self._out.write(GAP.join(padded).rstrip() + "\n")


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _write_json(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], out: TextIO) -> None:
    names = [column.name for column in columns]
    before = "[\n"
    for row in rows:
        item = json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False)
        out.write(f"{before}{item}")
        before = ",\n"
    out.write("[]\n" if before == "[\n" else "\n]\n")


def _write_csv(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], out: TextIO) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    writer.writerows([_csv_cell(cell) for cell in row] for row in rows)


def _csv_cell(cell: Cell) -> Cell:
    return ("true" if cell else "false") if isinstance(cell, bool) else cell


def _cell_text(column: Column, cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return cell
    match column.kind:
        case Kind.INSTANT:
            return instant_text(int(cell))
        case Kind.DURATION:
            return duration_text(cell)
        case Kind.SIZE:
            return size_text(cell)
        case Kind.NUMBER:
            return f"{cell:,}"
        case Kind.TEXT | Kind.NAME:
            return str(cell)
