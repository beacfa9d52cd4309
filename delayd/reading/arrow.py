"""Columns of a table as arrays of Arrow, without a Python object a row. Importing it needs pyarrow."""

import numpy as np
import pyarrow as pa

from delayd.reading.tables import Cells

TYPES = {"string": pa.string(), "long": pa.int64(), "boolean": pa.bool_()}


def to_arrow(cells: Cells) -> pa.Array:
    """A column as an array."""
    mask = None if cells.known is None else ~cells.known
    if cells.names is None:
        return pa.array(cells.values, mask=mask)
    return pa.array(cells.names, pa.string()).take(pa.array(cells.values.astype(np.int64), mask=mask))
