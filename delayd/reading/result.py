"""Result: a table that a reader of files returns, as numpy columns, an Arrow table or a pandas frame."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from delayd.errors import BadSetting
from delayd.reading.tables import Cells, TableKind, Tables, join

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

INSTALL = "pip install 'delayd[spark]'"


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

    def __init__(self, types: Mapping[str, str], cells: Mapping[str, Cells]) -> None:
        """``types`` are those of `TableKind`, for each column."""
        self._types = types
        self._cells = cells
        self._made: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._made:
            self._made[name] = self._cells[name].to_numpy()
        return self._made[name]

    def __len__(self) -> int:
        return len(next(iter(self._cells.values())))

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
        from delayd.reading.arrow import table_of

        return table_of(self._types, self._cells)

    def to_pandas(self) -> "pd.DataFrame":
        """The table as a pandas frame, made from the Arrow table.

        Raises:
            BadSetting: pandas or pyarrow is missing.
        """
        need("pandas", "a pandas frame")
        return self.to_arrow().to_pandas()


def table_of(kind: TableKind[Tables], parts: Sequence[Tables], names: Sequence[str] | None = None) -> Table:
    """Make a table from the logs of hours, one behind the other; ``names`` are the columns, None for all."""
    columns: dict[str, tuple[str, Callable[[Tables], Cells]]] = kind.columns
    chosen = {name: columns[name] for name in names or columns}
    types = {name: type_ for name, (type_, _) in chosen.items()}
    return Table(types, {name: join([make(part) for part in parts]) for name, (_, make) in chosen.items()})


def need(package: str, what: str) -> None:
    """Raise BadSetting unless an optional package is there."""
    if find_spec(package) is None:
        raise BadSetting(f"{what} needs {package}: {INSTALL}; the numpy columns are there without it")
