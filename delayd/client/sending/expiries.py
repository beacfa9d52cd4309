"""Expiries: when messages expire, as callers say it and as a column of a batch (rule S8).

Invariant: an expiry is an instant, or a time that begins when the message is due; a caller gives one of the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.client.instants import HORIZON_MS, instant_ms
from delayd.client.limits import need_timedelta
from delayd.client.sending.due_columns import PandasColumn
from delayd.errors import BadArgument, BadExpiry, NaiveDatetime
from delayd.hours import INSTANT_MS_MAX, INSTANT_MS_MIN

_MS = timedelta(milliseconds=1)
_BOTH = "give ttl or expires_at, not both"

Ttls = timedelta | Iterable[timedelta | None] | NDArray[np.timedelta64] | PandasColumn
ExpireAt = datetime | Iterable[datetime | None] | NDArray[np.datetime64] | PandasColumn


class Expiry(NamedTuple):
    """When one message expires: one of the two, in ms; both 0: never."""

    at_ms: int = 0
    ttl_ms: int = 0


NEVER = Expiry()


def expiry_of(ttl: timedelta | None, expires_at: datetime | None) -> Expiry:
    """Check the expiry of one message.

    Raises:
        BadArgument: both were given, or values of another type.
        BadExpiry: a time that is not above 0, or an instant that no message can have.
        NaiveDatetime: a datetime without a time zone.
    """
    if ttl is None:
        return NEVER if expires_at is None else Expiry(at_ms=_instant(expires_at))
    if expires_at is not None:
        raise BadArgument(_BOTH)
    return Expiry(ttl_ms=_length(ttl))


def expiries_of(ttl: Ttls | None, expires_at: ExpireAt | None, count: int) -> list[Expiry] | None:
    """Check the expiries of ``count`` messages: one for all, or one for each, None for a message that never expires.

    Raises as `expiry_of`, with the row.
    """
    if ttl is None and expires_at is None:
        return None
    if ttl is not None and expires_at is not None:
        raise BadArgument(_BOTH)
    if isinstance(ttl, timedelta) or isinstance(expires_at, datetime):
        return [expiry_of(ttl, expires_at)] * count  # type: ignore[arg-type]
    name, values = ("ttl", ttl) if expires_at is None else ("expires_at", expires_at)
    found: list[Expiry] = []
    for row, value in enumerate(_listed(name, values)):
        try:
            if value != value:
                raise BadArgument(f"{name} is {value}; say None for a message that never expires")
            found.append(expiry_of(value, None) if expires_at is None else expiry_of(None, value))
        except (BadArgument, BadExpiry, NaiveDatetime) as error:
            raise type(error)(f"row {row}: {error.message}") from error
    if len(found) != count:
        raise BadArgument(
            f"{len(found)} values of {name} were given for {count} bodies; give one for each, or one for all"
        )
    return found


def check_after(expiry: Expiry, due_ms: int) -> None:
    """Refuse a message that would expire before it is due, or at that instant, with BadExpiry."""
    if expiry.at_ms and expiry.at_ms <= due_ms:
        raise BadExpiry(f"a message that is due at {due_ms} ms can't expire at {expiry.at_ms} ms; say a later instant")


def expiry_column(at_ms: Int64s, ttl_ms: Int64s, due_ms: Int64s) -> Int64s:
    """The instants at which messages expire, 0 for never."""
    return np.where(ttl_ms > 0, due_ms + ttl_ms, at_ms)


def _length(ttl: timedelta) -> int:
    if not timedelta(0) < need_timedelta("ttl", ttl, BadArgument) <= HORIZON_MS * _MS:
        raise BadExpiry(f"ttl is {ttl} and must be more than 0 and at most {HORIZON_MS // 86_400_000} days")
    return -(-ttl // _MS)


def _instant(expires_at: datetime) -> int:
    instant = instant_ms(expires_at, "expires_at")
    if not INSTANT_MS_MIN <= instant <= INSTANT_MS_MAX:
        raise BadExpiry(f"expires_at {expires_at.isoformat()} is before 2001-09-09, or later than any message")
    return instant


def _listed(name: str, values: Any) -> Iterable[Any]:
    """The values one by one; those of numpy's own instants (in UTC) and lengths of time as Python's, rounded up."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        kind = "timedelta" if name == "ttl" else "datetime"
        raise BadArgument(f"{name} must be a {kind}, or a column of them, not {type(values).__name__}")
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "mM":
        return values
    if np.isnat(values).any():
        raise BadArgument(f"{name} of row {int(np.isnat(values).argmax())} is NaT; in a list, None stands for never")
    whole = values.astype(f"{values.dtype.kind}8[us]")
    whole = whole + (whole < values).astype("m8[us]")
    listed: list[Any] = whole.tolist()
    # What Python has no value for comes as a number, and is refused as one.
    return listed if values.dtype.kind == "m" else [_in_utc(value) for value in listed]


def _in_utc(value: Any) -> Any:
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
