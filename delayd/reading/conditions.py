"""Conditions on columns of a table, and the hours that can have rows which meet them.

Invariant: a condition never drops a row that meets it. A null meets no condition but that of being null, also
when it is negated, as in SQL.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from operator import contains, ge, gt, le, lt

import numpy as np
from numpy.typing import NDArray

from delayd.errors import BadArgument
from delayd.hours import hour_from_name, hour_of_ms
from delayd.reading.tables import Cells, Mask

HOURS_MAX = 1 << 32  # An hour is a u32 in every file.
EVERY_HOUR = range(HOURS_MAX)
US_A_MS = 1_000
DUE_MS, DUE = "deliver_at_ms", "deliver_at"


class Comparison(StrEnum):
    """How a value is compared."""

    IN = "in"  # Also "=": one of some values.
    BELOW = "<"
    UP_TO = "<="
    ABOVE = ">"
    FROM = ">="
    NULL = "is null"
    PREFIX = "begins with"
    SUFFIX = "ends with"
    CONTAINS = "contains"


Value = str | int
LOWER = (Comparison.IN, Comparison.ABOVE, Comparison.FROM)  # What bounds values from below, and from above.
UPPER = (Comparison.IN, Comparison.BELOW, Comparison.UP_TO)
TEXTS: dict[Comparison, Callable[[str, str], bool]] = {
    Comparison.BELOW: lt,
    Comparison.UP_TO: le,
    Comparison.ABOVE: gt,
    Comparison.FROM: ge,
    Comparison.PREFIX: str.startswith,
    Comparison.SUFFIX: str.endswith,
    Comparison.CONTAINS: contains,
}
NUMBERS: dict[Comparison, Callable[[NDArray[np.generic], Value], Mask]] = {
    Comparison.BELOW: np.less,
    Comparison.UP_TO: np.less_equal,
    Comparison.ABOVE: np.greater,
    Comparison.FROM: np.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition. ``values`` are texts, numbers, or of an instant microseconds since the epoch; one, but for IN."""

    column: str
    comparison: Comparison
    values: tuple[Value, ...] = ()
    negated: bool = False

    def rows(self, cells: Cells) -> Mask:
        """Which rows of the column meet it: bool[n]."""
        known = np.ones(len(cells), np.bool_) if cells.known is None else cells.known
        if self.comparison is Comparison.NULL:
            return known.copy() if self.negated else ~known
        if cells.names is not None:
            met = np.array([self._text(name) for name in cells.names] or [False], np.bool_)[cells.values.astype(int)]
        else:
            met = self._numbers(cells.values.astype(np.int64) * US_A_MS if cells.instant else cells.values)
        found: Mask = (met != self.negated) & known
        return found

    def holds(self, text: str) -> bool:
        """Whether a text that is not null meets it."""
        if self.comparison is Comparison.NULL:
            return self.negated
        return self._text(text) != self.negated

    @property
    def hours(self) -> range:
        """The hours that can have such rows. A message that was past due when accepted is in a later hour."""
        if self.negated or not self.values:
            return EVERY_HOUR
        lowest, highest = min(self.values), max(self.values)
        if self.column == "hour":
            try:
                first, last = hour_from_name(str(lowest)), hour_from_name(str(highest))
            except BadArgument:
                return EVERY_HOUR  # A text is compared that is no hour.
            first += self.comparison is Comparison.ABOVE
            last -= self.comparison is Comparison.BELOW
            return range(first if self.comparison in LOWER else 0, last + 1 if self.comparison in UPPER else HOURS_MAX)
        due_ms = self._due_ms(lowest)
        if due_ms is None or self.comparison not in LOWER:
            return EVERY_HOUR
        return range(min(max(0, hour_of_ms(due_ms)), HOURS_MAX), HOURS_MAX)

    @property
    def due_ms_max(self) -> int | None:
        """No row is due later than this; None when it says nothing of that."""
        if self.negated or not self.values or self.comparison not in UPPER:
            return None
        latest = max(self.values)
        if self.comparison is Comparison.BELOW and isinstance(latest, int):
            latest -= 1
        return self._due_ms(latest)

    def _due_ms(self, value: Value) -> int | None:
        if self.column not in (DUE_MS, DUE) or not isinstance(value, int):
            return None
        return value if self.column == DUE_MS else value // US_A_MS

    def _text(self, name: str) -> bool:
        if self.comparison is Comparison.IN:
            return name in self.values
        return TEXTS[self.comparison](name, str(self.values[0]))

    def _numbers(self, numbers: NDArray[np.generic]) -> Mask:
        if self.comparison is Comparison.IN:
            return np.isin(numbers, np.array(self.values))
        return NUMBERS[self.comparison](numbers, self.values[0])


def common_hours(conditions: Iterable[Condition], hours: range) -> range:
    """The hours among some that can have rows which meet all filters."""
    for each in conditions:
        hours = range(max(hours.start, each.hours.start), min(hours.stop, each.hours.stop))
    return hours


def due_ms_max(conditions: Iterable[Condition]) -> int | None:
    """The latest due instant of rows that meet all conditions; None: any."""
    return min((each.due_ms_max for each in conditions if each.due_ms_max is not None), default=None)
