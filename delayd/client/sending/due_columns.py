"""Due columns: when the messages of a batch are due: one instant for all, or a column of Python's, numpy's or pandas'
own kinds.

Invariant: no conversion makes an instant earlier or a delay shorter: values finer than the unit are rounded up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.client.instants import MACHINE_HORIZON, ONE_OF_THREE, Horizon, delay_us_of, instant_ms, within_horizon
from delayd.errors import BadArgument, BadInstant, NaiveDatetime, PastHorizon

INT64_MAX = (1 << 63) - 1


class PandasColumn(Protocol):
    """A Series or an Index of pandas, which is not imported here."""

    @property
    def array(self) -> Any:
        """Its values."""
        ...


# When the messages of a batch are due: one for all, or one for each.
DeliverAtMs = int | Sequence[int] | NDArray[np.integer]
DeliverAt = datetime | Sequence[datetime] | NDArray[np.datetime64] | PandasColumn
Delays = timedelta | Sequence[timedelta] | NDArray[np.timedelta64] | PandasColumn


def wish_column(
    delay: Delays | None,
    deliver_at: DeliverAt | None,
    deliver_at_ms: DeliverAtMs | None,
    count: int,
    horizon: Horizon = MACHINE_HORIZON,
) -> tuple[Int64s, bool]:
    """Do the same as `wish` for ``count`` messages: read the one of the three that was given, as one value for all or
    one for each.

    Returns what `Wish` holds, `when` as int64[count].

    Raises:
        BadArgument: none or several were given, of a wrong type, another number of them, or a negative delay.
        BadInstant: one is before 2001-09-09, or no instant.
        NaiveDatetime: a datetime, or a column of pandas, without a time zone.
        PastHorizon: one is due later than the horizon from now.
    """
    if deliver_at_ms is not None and delay is None and deliver_at is None:
        return _checked(_for_each(_whole_ms(deliver_at_ms), count, "deliver_at_ms: {} instants"), horizon), False
    if delay is not None and deliver_at is None and deliver_at_ms is None:
        delays_us = _for_each(_delays_us(delay, horizon.ms), count, "delay: {} delays")
        return horizon.delay_us() + delays_us, True
    if deliver_at is not None and delay is None and deliver_at_ms is None:
        return _checked(_for_each(_instants_ms(deliver_at), count, "deliver_at: {} instants"), horizon), False
    raise BadArgument(ONE_OF_THREE)


def _for_each(column: Int64s, count: int, told: str) -> Int64s:
    if column.ndim > 1:
        given = told.format(f"{column.ndim} dimensions of")
        raise BadArgument(f"{given} were given; give one for each body, or one for all")
    if column.ndim and len(column) != count:
        given = told.format(len(column))
        raise BadArgument(f"{given} were given for {count} bodies; give one for each, or one for all")
    return column if column.ndim else np.full(count, column, np.int64)


def _checked(column: Int64s, horizon: Horizon) -> Int64s:
    if column.size:
        within_horizon(int(column.max()), horizon)
        within_horizon(int(column.min()), horizon)
    return column


def _whole_ms(values: DeliverAtMs) -> Int64s:
    column = np.asarray(values)
    if column.dtype.kind not in "iu":
        hint = "; give it as deliver_at=" if column.dtype.kind == "M" or _of_datetimes(column) else ""
        raise BadArgument(f"deliver_at_ms must be whole milliseconds since the epoch, not {column.dtype}{hint}")
    if column.dtype.kind == "u" and column.size and int(column.max()) > INT64_MAX:
        # The cast would make it a negative number.
        raise PastHorizon(f"deliver_at_ms {int(column.max())} is past the horizon of any server")
    return column.astype(np.int64)


def _instants_ms(values: DeliverAt) -> Int64s:
    if isinstance(values, datetime):
        return np.array(instant_ms(values), np.int64)
    column = _typed(values, "M")
    if column is None:
        return np.array([instant_ms(value) for value in _items("deliver_at", values)], np.int64)
    # In ms, rounded up, because a message must not be delivered up to a millisecond early.
    whole = column.astype("datetime64[ms]")
    if np.isnat(whole).any():
        raise BadInstant(
            f"deliver_at of row {int(np.isnat(np.atleast_1d(whole)).argmax())} is NaT, which is no instant"
        )
    ms: Int64s = whole.astype(np.int64)
    return ms + (whole < column)


def _delays_us(values: Delays, horizon_ms: int) -> Int64s:
    if isinstance(values, timedelta):
        return np.array(delay_us_of(values, horizon_ms), np.int64)
    column = _typed(values, "m")
    if column is None:
        return np.array([delay_us_of(value, horizon_ms) for value in _items("delay", values)], np.int64)
    whole = column.astype("timedelta64[us]")
    if np.isnat(whole).any():
        raise BadArgument(f"delay of row {int(np.isnat(np.atleast_1d(whole)).argmax())} is NaT, which is no delay")
    us: Int64s = whole.astype(np.int64)
    us = us + (whole < column)
    for extreme in (us.min(), us.max()) if us.size else ():
        delay_us_of(timedelta(microseconds=int(extreme)), horizon_ms)
    return us


def _typed(values: object, kind: str) -> NDArray[Any] | None:
    """A column of numpy's or pandas' own instants ("M", in UTC) or lengths of time ("m"); None when it is none."""
    array = getattr(values, "array", None)
    if array is not None and kind == "M" and getattr(array.dtype, "kind", "") == "M":
        if getattr(array.dtype, "tz", None) is None:
            raise NaiveDatetime(
                "deliver_at has no time zone; name the one in which its times are meant, such as"
                " column.dt.tz_localize('Europe/Berlin')"
            )
        return np.asarray(array.tz_convert(None), dtype=f"datetime64[{array.dtype.unit}]")
    if isinstance(values, np.datetime64 | np.timedelta64) or hasattr(values, "dtype"):
        column = np.asarray(values)
        return column if column.dtype.kind == kind else None
    return None


def _items(name: str, values: object) -> Iterable[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        kind = "datetime" if name == "deliver_at" else "timedelta"
        raise BadArgument(f"{name} must be a {kind}, or a column of them, not {type(values).__name__}")
    return values


def _of_datetimes(column: NDArray[Any]) -> bool:
    return column.dtype.kind == "O" and column.size > 0 and isinstance(column.flat[0], datetime)
