"""Listing: one renderer for every listing, a table for people, JSON and CSV for programs; and progress of long work.

Invariant: JSON and CSV hold the exact values, with their units in the names of the columns; only a table rounds them or
writes an instant as a date, and shows each value that its headings promise in full. All are written as the rows come, a
table in pieces, JSON as one array with one object a line: a listing of millions costs time and no memory.
"""

import csv
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import islice, zip_longest
from typing import NamedTuple, Protocol, TextIO

import click
from rich.cells import cell_len

from delayd.hours import duration_text, instant_text

GAP, GAP_NARROW = 3, 2  # Blanks between two columns.
TEXT_WIDTH_MIN = 16  # A last column of text is never folded narrower than this.

Cell = str | int | float | bool | None


class JsonText(str):
    """A cell that is JSON: a listing in JSON shows its value and not a text."""

    __slots__ = ()


class ColumnKind(Enum):
    """What a column holds. It decides how a table writes the cells."""

    TEXT = "text"
    NUMBER = "number"  # A count.
    NAME = "name"  # A number that names something, written without separators.
    INSTANT = "instant"  # Milliseconds since the epoch.
    DURATION = "duration"  # Milliseconds.
    SIZE = "size"  # Bytes.


class Column(NamedTuple):
    """A column: its name in JSON and CSV, and what it holds."""

    name: str
    kind: ColumnKind = ColumnKind.TEXT
    detail: bool = False  # No table shows it.
    spare: bool = False  # A table that is too wide for the terminal leaves this column out, and says so.

    @property
    def heading(self) -> str:
        """The heading in a table: without the unit, because the values show it."""
        name = self.name
        if self.kind in (ColumnKind.INSTANT, ColumnKind.DURATION):
            name = name.removesuffix("_ms")
        if self.kind is ColumnKind.SIZE:
            name = name.removesuffix("_bytes")
        return name.replace("_", " ")


def columns(spec: str) -> tuple[Column, ...]:
    """Columns as words, such as ``subject late_ms:duration,spare``: a name, and behind a colon its kind unless that
    is text, and whether it is a detail or spare.
    """
    made: list[Column] = []
    for word in spec.split():
        name, _, text = word.partition(":")
        tags = text.split(",") if text else []
        kind = next((ColumnKind(tag) for tag in tags if tag not in ("detail", "spare")), ColumnKind.TEXT)
        made.append(Column(name, kind, "detail" in tags, "spare" in tags))
    return tuple(made)


class _Layout(NamedTuple):
    """How a piece of a table is written: which columns, how wide each, and how far apart."""

    places: tuple[int, ...]
    widths: tuple[int, ...]
    gap: int
    folds: bool = False  # A long text of the last column goes on in the next line.


class ListingTable:
    """Writes rows that come in pieces, so that they fit a width.

    Without a width, as into a file, each row is one line whatever its length, for `grep` and `less -S`. With one, a
    table that is too wide moves its columns together, folds its headings, leaves out its spare columns, folds the text
    of its last column, and at last writes each row as lines of a name and a value: the first of these that fits.
    """

    def __init__(self, columns: Sequence[Column], out: TextIO, width: int | None) -> None:
        self._numbers = [number for number, column in enumerate(columns) if not column.detail]
        self._columns = [columns[number] for number in self._numbers]
        self._widest = [0] * len(self._columns)  # The widest cell of each column so far.
        self._out = out
        self._width = width
        self._rule = "─" if (out.encoding or "").lower().startswith("utf") else "-"
        self._layout: _Layout | None = None
        self._begun = False
        self._left_out: set[str] = set()

    def write(self, rows: Sequence[Sequence[Cell]]) -> None:
        """Write the next rows; the first ones stand below the headings."""
        if not rows:
            return
        texts = [
            [_cell_text(column, row[number]) for number, column in zip(self._numbers, self._columns, strict=True)]
            for row in rows
        ]
        self._widest = [
            max(width, *map(_width, cells)) for width, cells in zip(self._widest, zip(*texts, strict=True), strict=True)
        ]
        layout = self._layout_of()
        if layout is None:
            self._write_records(texts)
        else:
            self._write_lines(layout, texts)
        self._begun = True

    def end(self) -> None:
        """Name the columns for which there was no room."""
        if self._left_out:
            names = ", ".join(column.heading for column in self._columns if column.name in self._left_out)
            self._out.flush()
            click.echo(f"delayd: no room for {names}; a wider terminal or --format json shows all", err=True)

    def _layout_of(self) -> _Layout | None:
        """The first layout that fits. None when no table fits and each row must become several lines."""
        every = tuple(range(len(self._columns)))
        kept = tuple(place for place in every if not self._columns[place].spare)
        wide = tuple(max(self._widest[place], len(self._columns[place].heading)) for place in every)
        if self._width is None:
            return _Layout(every, wide, GAP)
        for places in (every, kept):
            whole = tuple(wide[place] for place in places)
            folded = tuple(max(self._widest[place], *map(len, self._words(place))) for place in places)
            for widths, gap in ((whole, GAP), (whole, GAP_NARROW), (folded, GAP_NARROW)):
                if _total(widths, gap) <= self._width:
                    return _Layout(places, widths, gap)
            left = self._width - _total(folded[:-1], GAP_NARROW) - GAP_NARROW
            if self._columns[places[-1]].kind is ColumnKind.TEXT and left >= TEXT_WIDTH_MIN:
                return _Layout(places, (*folded[:-1], left), GAP_NARROW, folds=True)
        return None

    def _words(self, place: int) -> list[str]:
        return self._columns[place].heading.split()

    def _write_lines(self, layout: _Layout, texts: Sequence[Sequence[str]]) -> None:
        if self._layout is None:
            self._headings(layout)
        self._layout = layout
        self._left_out |= {column.name for column in self._columns} - {
            self._columns[place].name for place in layout.places
        }
        for cells in texts:
            shown = [cells[place] for place in layout.places]
            if not layout.folds:
                self._line(layout, shown)
                continue
            for number, piece in enumerate(_folded(shown[-1], layout.widths[-1])):
                self._line(layout, [*(shown[:-1] if not number else [""] * (len(shown) - 1)), piece])

    def _headings(self, layout: _Layout) -> None:
        columns = [
            _folded(self._columns[place].heading, width)
            for place, width in zip(layout.places, layout.widths, strict=True)
        ]
        height = max(map(len, columns))
        for line in zip_longest(*([""] * (height - len(words)) + words for words in columns), fillvalue=""):
            self._line(layout, line)
        self._out.write(self._rule * _total(layout.widths, layout.gap) + "\n")

    def _line(self, layout: _Layout, cells: Sequence[str]) -> None:
        padded = []
        for text, width, place in zip(cells, layout.widths, layout.places, strict=True):
            blanks = " " * (width - _width(text))
            right = self._columns[place].kind not in (ColumnKind.TEXT, ColumnKind.INSTANT)
            padded.append(blanks + text if right else text + blanks)
        self._out.write((" " * layout.gap).join(padded).rstrip() + "\n")

    def _write_records(self, texts: Sequence[Sequence[str]]) -> None:
        names = [column.heading for column in self._columns]
        indent = max(map(len, names)) + GAP_NARROW
        room = max(1, (self._width or 0) - indent)
        for cells in texts:
            if self._begun:
                self._out.write("\n")
            self._begun = True
            for name, text in zip(names, cells, strict=True):
                for number, piece in enumerate(_folded(text, room)):
                    self._out.write(f"{'' if number else name:{indent}}{piece}".rstrip() + "\n")


def width_of(out: TextIO) -> int | None:
    """How many characters fit into a line of a stream. None when nobody knows, as for a file.

    COLUMNS says so for a pipe too, when somebody set it. Shells and readline leave it to their children together with
    LINES: that is the size of their terminal, and no word about this pipe.
    """
    if not out.isatty() and (not os.environ.get("COLUMNS") or os.environ.get("LINES")):
        return None
    return shutil.get_terminal_size().columns


def size_text(size: float) -> str:
    """Bytes with the unit that suits them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _total(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * max(0, len(widths) - 1)


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _folded(text: str, width: int) -> list[str]:
    """A text as lines of at most ``width``, cut between words, and within those that are longer."""
    lines = [""]
    for word in text.split(" "):
        while word:
            room = width - _width(lines[-1]) - bool(lines[-1])
            if _width(word) <= room:
                lines[-1] += f" {word}" if lines[-1] else word
                break
            if lines[-1]:
                lines.append("")
                continue
            count = _fitting(word, width)
            lines[-1], word = word[:count], word[count:]
            lines.append("")
    return lines if lines[-1] or len(lines) == 1 else lines[:-1]


def _fitting(word: str, width: int) -> int:
    """How many of its characters fit. At least one: with none the loop would never end."""
    count = 0
    while count < len(word) and _width(word[: count + 1]) <= width:
        count += 1
    return max(1, count)


def _cell_text(column: Column, cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return cell
    match column.kind:
        case ColumnKind.INSTANT:
            return instant_text(int(cell))
        case ColumnKind.DURATION:
            return duration_text(cell)
        case ColumnKind.SIZE:
            return size_text(cell)
        case ColumnKind.NUMBER:
            return f"{cell:,}"
        case ColumnKind.TEXT | ColumnKind.NAME:
            return str(cell)


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
    table = ListingTable(columns, out, width_of(out))
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


class Advance(Protocol):
    """Says that more is done; a total that was not known before may come with it."""

    def __call__(self, count: int, total: int | None = None) -> None: ...


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Advance]:
    """Show how much of ``total`` is done, as often as the yielded function says so; a total of None is not known."""
    if not sys.stderr.isatty():
        yield _unseen
        return
    # Drawing takes longer to import than most commands take.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(count: int, total: int | None = None) -> None:
            bar.update(task, advance=count, total=total)

        yield advance


def _unseen(count: int, total: int | None = None) -> None:
    """Nobody watches."""
