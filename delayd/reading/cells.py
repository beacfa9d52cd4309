"""Cells: columns of values as every engine gets them, and a table of them as numpy columns, an Arrow table or a pandas
frame.

Invariant: unknown values are null, instants are int64 milliseconds in UTC, and text is an index into names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from delayd.errors import BadSetting

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

INSTALL = "pip install 'delayd[spark]'"
NO_TEXT = np.empty(0, np.str_)

Mask = NDArray[np.bool_]
Value = str | int | None
Types = Mapping[str, str]
"""The types of columns: "string", "long", "boolean" and "timestamp", as Spark calls them, and "id", a string."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A column: int64 or bool values, or indexes into ``names`` of a column of text; ``known`` None: none is null.

    The values of an ``instant`` are milliseconds, shown as an instant in UTC.
    """

    values: NDArray[np.generic]
    known: Mask | None = None
    names: Sequence[str] | None = None
    instant: bool = False

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: NDArray[np.generic] | slice) -> "Cells":
        """Some of its rows."""
        return Cells(self.values[rows], None if self.known is None else self.known[rows], self.names, self.instant)

    def to_numpy(self) -> NDArray[Any]:
        """Its values as an array; masked where values are unknown."""
        values: NDArray[Any] = self.values
        if self.names is not None:
            values = np.array(self.names, np.str_)[self.values.astype(np.int64)] if len(self.values) else NO_TEXT
        elif self.instant:
            values = self.values.astype("datetime64[ms]")
        return values if self.known is None else np.ma.MaskedArray(values, ~self.known)

    def to_list(self) -> list[str | int | bool | None]:
        """Its values as Python has them."""
        listed: list[str | int | bool | None] = self.values.tolist()
        if self.names is not None:
            listed = [self.names[int(index)] for index in self.values]
        elif self.instant:
            listed = np.datetime_as_string(self.values.astype("datetime64[ms]"), timezone="UTC").tolist()
        if self.known is not None:
            listed = [value if known else None for value, known in zip(listed, self.known.tolist(), strict=True)]
        return listed


Columns = Mapping[str, Cells]


def join(parts: Sequence[Cells]) -> Cells:
    """The cells of several tables' column, one table behind the other; at least one."""
    if len(parts) == 1:
        return parts[0]
    values, names = [part.values for part in parts], [*(name for part in parts for name in part.names or ())]
    if parts[0].names is not None:
        firsts = np.cumsum([0, *(len(part.names or ()) for part in parts)]).tolist()
        values = [part.values.astype(np.int64) + first for part, first in zip(parts, firsts, strict=False)]
    known = [np.ones(len(part), np.bool_) if part.known is None else part.known for part in parts]
    is_known = None if all(part.known is None for part in parts) else np.concatenate(known)
    return Cells(np.concatenate(values), is_known, names if parts[0].names is not None else None, parts[0].instant)


def columns_of(types: Types, rows: Sequence[tuple[Value, ...]]) -> Columns:
    """Rows as columns of their types; for a few rows. None is an unknown value, and a timestamp is milliseconds."""
    columns: dict[str, Cells] = {}
    for index, (name, kind) in enumerate(types.items()):
        values = [row[index] for row in rows]
        known = None if None not in values else np.array([value is not None for value in values], np.bool_)
        if kind in ("string", "id"):
            names = [str(value or "") for value in values]
            columns[name] = Cells(np.arange(len(names)), known, names)
        else:
            numbers = np.array([value or 0 for value in values], np.int64)
            columns[name] = Cells(numbers, known, instant=kind == "timestamp")
    return columns


def count_rows(columns: Columns) -> int:
    """How many rows columns have."""
    return len(next(iter(columns.values())))


class Table:
    """A table: named numpy columns of one length. ``len()`` counts its rows, ``dict()`` makes a dict of its columns.

    Numbers are int64, flags bool, names text, and instants there twice: as milliseconds since the epoch (``…_at_ms``,
    int64) and as datetime64 in UTC (``…_at``). A column that can have unknown values is a masked array.

    Example::

        table = data.schedule("2026112216")
        print(len(table), table.names)
        late = table["late_ms"].max()
        frame = table.to_pandas()
    """

    def __init__(self, types: Types, cells: Columns) -> None:
        """``types`` are those of each column."""
        self._types = types
        self._cells = cells
        self._made: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._made:
            self._made[name] = self._cells[name].to_numpy()
        return self._made[name]

    def __len__(self) -> int:
        return count_rows(self._cells)

    def __repr__(self) -> str:
        return f"<Table of {len(self):,} rows: {', '.join(self.names)}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its columns, in order."""
        return tuple(self._types)

    def keys(self) -> tuple[str, ...]:
        """The same, for ``dict()``."""
        return self.names

    def to_arrow(self) -> "pa.Table":
        """The table as Arrow has it: text and unknown values become Arrow's own, instants are timestamps in UTC.

        Raises:
            BadSetting: pyarrow is missing.
        """
        need("pyarrow", "an Arrow table")
        from delayd.reading.arrow import arrow_table

        return arrow_table(self._types, self._cells)

    def to_pandas(self) -> "pd.DataFrame":
        """The table as a pandas frame, made from the Arrow table.

        Raises:
            BadSetting: pandas or pyarrow is missing.
        """
        need("pandas", "a pandas frame")
        return self.to_arrow().to_pandas()


def need(package: str, what: str) -> None:
    """Raise BadSetting unless an optional package is there."""
    if find_spec(package) is None:
        raise BadSetting(f"{what} needs {package}: {INSTALL}; the numpy columns are there without it")
