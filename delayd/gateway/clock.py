"""The clock of servers in memory, over HTTP: what a test of a program in any language moves (docs/gateway.md)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from delayd.client.instants import instant_ms
from delayd.errors import BadArgument
from delayd.gateway.sends import decoded, queried, read_body
from delayd.gateway.values import JSON, Instant, duration
from delayd.hours import instant_text

WORDS_BYTES_MAX = 4_096

_encode = msgspec.json.Encoder().encode


class MovableClock(Protocol):
    """A clock that stands or ticks, and goes on when it is moved; see `delayd.testing.InMemoryBroker`."""

    @property
    def now(self) -> datetime:
        """What it shows."""
        ...

    async def advance_async(self, by: timedelta) -> None:
        """Let so much time pass; all that is due by then has been offered on return."""
        ...

    async def move_to_async(self, instant: datetime) -> None:
        """The same, until an instant; BadArgument when the clock is past it."""
        ...


class Move(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a clock goes: one of the two."""

    by: str | None = None
    to: Instant | None = None


_MOVE = msgspec.json.Decoder(Move)


async def show(clock: MovableClock, request: Request) -> Response:
    """What the clock shows."""
    queried(request)
    now_ms = instant_ms(clock.now, "now")
    return Response(_encode({"now": instant_text(now_ms), "now_ms": now_ms}), media_type=JSON)


async def advance(clock: MovableClock, request: Request) -> Response:
    """Move the clock; all that is due by then is there when this is answered."""
    move = decoded(_MOVE, await read_body(request, WORDS_BYTES_MAX))
    if (move.by is None) == (move.to is None):
        raise BadArgument("give by, such as 2d, or to, an instant with its offset from UTC")
    if move.by is not None:
        await clock.advance_async(duration(move.by))
    elif move.to is not None:
        await clock.move_to_async(move.to)
    return await show(clock, request)
