"""Decisions: messages that are to come again later, or are dead letters; a RETRY or REJECT for each call (rule Q2).

They are rare beside acknowledgements, so nothing is gathered: the server makes those durable together that come at the
same time.

Invariant: a decision is made once, however often its request is sent; the server answers a repeated one as done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from delayd.client.instants import HORIZON_MS
from delayd.client.limits import need_timedelta
from delayd.client.link import unreadable
from delayd.client.pulling.acks import Handles, stale_error
from delayd.client.retry import Backoff, spread_ms
from delayd.errors import BadArgument, BadRequest, RequestFailed, RetryLater
from delayd.life import cut_text
from delayd.net.connection import Connection
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import HANDLE_MOST, RequestType, need_rows

_MS = timedelta(milliseconds=1)
_LISTS = {RequestType.RETRY: "retries", RequestType.REJECT: "rejects"}


class Decision(NamedTuple):
    """What becomes of some messages; ``values`` stand behind each handle in the request."""

    request: RequestType
    handles: Handles
    values: tuple[int | str, str]

    @classmethod
    def retry(cls, handles: Handles, delay: timedelta, error: str) -> Decision:
        """They come again after a delay; BadArgument when it can't be."""
        delay_ms = -(-need_timedelta("delay", delay) // _MS)
        if not 0 <= delay_ms <= HORIZON_MS:
            raise BadArgument(
                f"delay is {delay} and must lie within 0 and {timedelta(milliseconds=HORIZON_MS).days} days"
            )
        return cls(RequestType.RETRY, handles, (delay_ms, _text("error", error)))

    @classmethod
    def reject(cls, handles: Handles, reason: str, error: str) -> Decision:
        """They are dead letters; BadArgument without a reason."""
        if not _text("reason", reason):
            raise BadArgument("say why the message is rejected, such as reject('no such order')")
        return cls(RequestType.REJECT, handles, (_text("reason", reason), _text("error", error)))


async def decide(
    decision: Decision,
    names: Mapping[str, HeadValue],
    connection: Callable[[], Awaitable[Connection]],
    timeout_ms: float,
) -> None:
    """Have a server make a decision durable; ``names`` say the subject and the group.

    Raises:
        StaleHandle: the server does not hold some of the messages any more; it has decided on the others.
        DelaydError: the server could not be reached in time, or refused.
    """
    rows: Sequence[HeadValue] = [[*handle[:3], *decision.values] for handle in decision.handles]
    head: Head = {**names, _LISTS[decision.request]: list(rows)}
    loop = asyncio.get_running_loop()
    deadline, backoff = loop.time() + timeout_ms / 1000, Backoff()
    while True:
        try:
            standing = await connection()
            left_ms = max((deadline - loop.time()) * 1000, 1)
            answer = await standing.request(decision.request, head, timeout_ms=left_ms)
            try:
                stale = need_rows(answer.head, "stale", 3, HANDLE_MOST)
            except BadRequest as error:
                raise unreadable(standing, error) from error
            break
        except (RequestFailed, RetryLater) as error:
            later = isinstance(error, RetryLater)
            wait_s = (spread_ms(error.retry_after_ms) if later else backoff.next_ms()) / 1000
            if loop.time() + wait_s >= deadline:
                raise
        await asyncio.sleep(wait_s)
    lost = stale_error(decision.handles, stale)
    if lost is not None:
        raise lost


def _text(name: str, value: str) -> str:
    if type(value) is not str:
        raise BadArgument(f"{name} is text, not {type(value).__name__}")
    return cut_text(value)
