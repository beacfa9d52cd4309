"""Place asker: asks a delay server for the least loaded instants of messages that are sent with ``spread``
(docs/quotas.md).

Invariant: an instant that comes back lies within its message's window, so nothing is delivered early because of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.client.instants import monotonic_us
from delayd.client.limits import need_timedelta
from delayd.client.link import unreadable
from delayd.client.meta import MetaView
from delayd.client.retry import Backoff, spread_ms
from delayd.client.sending.groups import DelayGroup, Groups
from delayd.client.sending.options import Columns, Single
from delayd.errors import BadArgument, BadRequest, ConnectionLost, RequestTimedOut, RetryLater, ServerUnavailable
from delayd.wire.frame import Head
from delayd.wire.quotas import encode_instants, read_instants
from delayd.wire.requests import RequestType

SPREAD_MAX = timedelta(days=7)
# A server looks for each message alone, at most so many in a request; messages of one second need one look.
APART_MAX = 512
TOGETHER_MIN = 32
TOGETHER_MAX = 65_536
APART_MS_MAX = 86_000_000  # Messages of one request are due within so much time; a server takes a day.
SECOND_MS = 1_000


def spread_of(spread: timedelta) -> int:
    """The window of a send in ms; BadArgument when no server would take it."""
    if not timedelta(0) <= need_timedelta("spread", spread, BadArgument) <= SPREAD_MAX:
        raise BadArgument(f"spread is {spread} and must lie within 0 and {SPREAD_MAX.days} days")
    return spread // timedelta(milliseconds=1)


class PlaceAsker:
    """Asks delay servers for instants; used by one producer, on one loop."""

    def __init__(self, groups: Groups, meta: MetaView, timeout_ms: float, unreached_s: float = 0.0) -> None:
        """``unreached_s``: how much of the time limit is left when a call is given up because nobody is reached."""
        self._unreached_s = unreached_s
        self._groups = groups
        self._meta = meta
        self._timeout_s = timeout_ms / 1000

    async def place(self, row: Single, window_ms: int) -> Single:
        """A send with the instant that a server chose."""
        subject, body, when, relative, *rest = row
        column = np.array([when], np.int64)
        (instant_ms,) = (await self._ask_all(subject, column, relative, window_ms)).tolist()
        return (subject, body, instant_ms, False, *rest)

    async def place_columns(self, columns: Columns, window_ms: int) -> Columns:
        """A batch with the instants that a server chose."""
        if not columns.bodies:
            return columns
        subject = columns.subject.decode("ascii")
        instants_ms = await self._ask_all(subject, columns.deliver, columns.relative, window_ms)
        return columns._replace(deliver=instants_ms, relative=False)

    async def _ask_all(self, subject: str, deliver: Int64s, relative: bool, window_ms: int) -> Int64s:
        loop, backoff = asyncio.get_running_loop(), Backoff()
        deadline = loop.time() + self._timeout_s
        while True:
            group: DelayGroup | None = None
            try:
                async with asyncio.timeout(max(0.0, deadline - loop.time())):
                    group = self._groups.choose() or await self._groups.find()
                    await group.link.connection()
                    due_ms = group.link.clock.latest_ms_column(deliver) if relative else deliver
                    return await self._ask_group(group, subject, due_ms, window_ms, deadline)
            except TimeoutError:
                raise RequestTimedOut(
                    "no delay server chose an instant in time; nothing was sent", sent=False
                ) from None
            except (RetryLater, ConnectionLost, RequestTimedOut) as error:
                if group is not None and not isinstance(error, ServerUnavailable):
                    group.refused(loop.time())
                    if self._groups.another_takes():
                        continue
                self._meta.refresh_soon()
                hint_ms = spread_ms(error.retry_after_ms) if error.retry_after_ms else 0.0
                wait_s = max(hint_ms, backoff.next_ms()) / 1000
                until = deadline - self._unreached_s if isinstance(error, ServerUnavailable) else deadline
                if loop.time() + wait_s >= until:
                    raise
                await asyncio.sleep(wait_s)

    async def _ask_group(
        self, group: DelayGroup, subject: str, due_ms: Int64s, window_ms: int, deadline: float
    ) -> Int64s:
        chosen = np.empty(len(due_ms), np.int64)
        head: Head = {"subject": subject, "spread_ms": window_ms}
        for rows in _requests(due_ms):
            own = due_ms.take(rows)
            left_ms = max(0.0, deadline - asyncio.get_running_loop().time()) * 1000
            connection = await group.link.connection()
            asked_us = monotonic_us()
            group.asked(asyncio.get_running_loop().time())
            answer = await connection.request(RequestType.PLACES, head, [encode_instants(own)], timeout_ms=left_ms)
            try:
                group.link.hear(asked_us, answer.head)
                found = read_instants(answer.body)
                if len(found) != len(own) or (found < own).any():
                    raise BadRequest("its instants are not those of the messages that were asked for")
            except BadRequest as error:
                raise unreadable(connection, error) from error
            chosen[rows] = found
        return chosen


def _requests(due_ms: Int64s) -> Iterator[NDArray[np.intp]]:
    """The rows of each request."""
    order = np.argsort(due_ms, kind="stable")
    seconds = due_ms.take(order) // SECOND_MS
    _, begins, counts = np.unique(seconds, return_index=True, return_counts=True)
    many = counts >= TOGETHER_MIN
    for begin, count in zip(begins[many].tolist(), counts[many].tolist(), strict=True):
        for first in range(begin, begin + count, TOGETHER_MAX):
            yield order[first : min(first + TOGETHER_MAX, begin + count)]
    apart = order.take(np.flatnonzero(np.repeat(~many, counts)))
    while len(apart):
        near = int(np.searchsorted(due_ms.take(apart), int(due_ms[apart[0]]) + APART_MS_MAX, "right"))
        yield apart[: min(near, APART_MAX)]
        apart = apart[min(near, APART_MAX) :]
