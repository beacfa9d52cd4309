"""Retry requests: it reads and checks RETRY and REJECT before anything is decided (docs/protocol.md)."""

from collections.abc import Callable, Sequence

from delayd.errors import BadRequest
from delayd.life import ERROR_BYTES_MAX
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    HANDLE_MOST,
    INT_MAX,
    need_list,
)

from .pulls import HANDLES_MAX
from .retries import Wanted

DELAY_MS_MAX = 2 * 366 * 24 * 3_600_000  # As far ahead as a message can be due.


def retries_of(head: Head) -> list[Wanted]:
    """Messages that are to come again."""
    return _wanted(head, "retries", _retry)


def rejects_of(head: Head) -> list[Wanted]:
    """Messages that are to become dead letters."""
    return _wanted(head, "rejects", _reject)


def _retry(handle: tuple[int, int, int], rest: Sequence[HeadValue]) -> Wanted:
    delay_ms, error = rest
    if type(delay_ms) is not int or not 0 <= delay_ms <= DELAY_MS_MAX:
        raise BadRequest(f"a message comes again after 0 to {DELAY_MS_MAX} ms", field="retries")
    return Wanted(*handle, delay_ms, "", _text(error, "retries"))


def _reject(handle: tuple[int, int, int], rest: Sequence[HeadValue]) -> Wanted:
    reason, error = (_text(value, "rejects") for value in rest)
    if not reason:
        raise BadRequest("a message is rejected for a reason", field="rejects")
    return Wanted(*handle, 0, reason, error)


def _wanted(head: Head, name: str, read: Callable[[tuple[int, int, int], Sequence[HeadValue]], Wanted]) -> list[Wanted]:
    rows = need_list(head, name)
    if len(rows) > HANDLES_MAX:
        raise BadRequest(f"more than {HANDLES_MAX} handles in one request; send several", field=name)
    found: list[Wanted] = []
    for row in rows:
        if type(row) is not list or len(row) != 5:
            raise BadRequest(f"a row of {name} has 5 fields", field=name)
        incarnation, first, covered = (_number(row[at], most, name) for at, most in enumerate(HANDLE_MOST))
        if not 0 < covered <= INT_MAX - first:
            raise BadRequest(f"a handle covers {covered} messages from {first} on", field=name)
        found.append(read((incarnation, first, first + covered), row[3:]))
    last: Wanted | None = None
    for each in sorted(found):
        if last is not None and (last.incarnation, last.end) > (each.incarnation, each.first):
            raise BadRequest(f"{name} names the pull sequence {each.first} twice", field=name)
        last = each
    return found


def _number(value: HeadValue, most: int, name: str) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise BadRequest(f"a handle of {name} has numbers of 0 to {most}", field=name)
    return value


def _text(value: HeadValue, name: str) -> str:
    if type(value) is not str or len(value) > 2 * ERROR_BYTES_MAX:
        raise BadRequest(f"a text of {name} has at most {2 * ERROR_BYTES_MAX} characters", field=name)
    return value
