"""Push targets over HTTP: `/v1/push` (docs/push.md).

Invariant: a key is told once, to whoever creates it; what signs, and the values of a target's own headers, are in no
other answer.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from delayd.client.asking.push import create_target, delete_target
from delayd.errors import BadArgument
from delayd.gateway.problems import Refusal
from delayd.gateway.push import Push
from delayd.gateway.sends import decoded, part, queried, read_body
from delayd.gateway.signing import new_key, rotated, shown_key, valid_keys
from delayd.gateway.values import JSON, duration
from delayd.wire.push import ASYMMETRIC, PushTarget, header_pairs

BYTES_MAX = 64 << 10
KEPT = "24h"  # So long the old key signs, too.

_encode = msgspec.json.Encoder().encode


class Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be said of a target; what is not said stays, or has its default."""

    url: str | None = None
    headers: dict[str, str] | None = None
    content_type: str | None = None
    batch: int | None = None
    timeout: str | None = None
    attempts: int | None = None
    backoff_first: str | None = None
    backoff_most: str | None = None
    rate: str | None = None
    concurrency: int | None = None
    flow_rate: str | None = None
    flow_concurrency: int | None = None
    paused: bool | None = None
    note: str | None = None


class NewTarget(Terms, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A target to be created."""

    name: str
    subject: str
    url: str
    group: str | None = None
    key: str | None = None  # One that the receiver has already; without it one is made.
    asymmetric: bool = False


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new key for a target."""

    key: str | None = None
    asymmetric: bool | None = None  # None: as it was.
    keep: str = KEPT


_NEW, _TERMS, _ROTATION = msgspec.json.Decoder(NewTarget), msgspec.json.Decoder(Terms), msgspec.json.Decoder(Rotation)


def changed(target: PushTarget, terms: Terms) -> PushTarget:
    """A target with other terms."""
    given: dict[str, Any] = {}
    for name in ("url", "content_type", "batch", "attempts", "rate", "concurrency", "flow_rate", "flow_concurrency"):
        given[name] = getattr(terms, name)
    for name, text in (
        ("timeout_ms", terms.timeout),
        ("first_ms", terms.backoff_first),
        ("most_ms", terms.backoff_most),
    ):
        given[name] = None if text is None else round(duration(text).total_seconds() * 1_000)
    if terms.headers is not None:
        if not all(text.isprintable() for header in terms.headers.items() for text in header):
            raise BadArgument("a header has a control character, such as the end of a line")
        given["headers"] = "\n".join(f"{name}: {value}" for name, value in terms.headers.items())
    given["paused"], given["note"] = terms.paused, terms.note
    if terms.paused is False and terms.note is None:
        given["note"] = ""  # Why it was paused does not count any more.
    return target._replace(**{name: value for name, value in given.items() if value is not None})


def made(wish: NewTarget) -> PushTarget:
    """A new target; BadArgument when it can't be."""
    key = wish.key or new_key(asymmetric=wish.asymmetric)
    group = wish.group or f"push/{wish.name}"
    return changed(PushTarget(wish.name, wish.subject, wish.url, group, key), wish)


def target_view(target: PushTarget) -> dict[str, object]:
    """A target as it is shown."""
    told: dict[str, object] = {"name": target.name, "subject": target.subject, "url": target.url}
    told |= {"group": target.group, "paused": target.paused, "note": target.note, "version": target.version}
    told |= {"headers": [name for name, _ in header_pairs(target.headers)], "content_type": target.content_type}
    told |= {"batch": target.batch, "timeout_ms": target.timeout_ms, "attempts": target.attempts}
    told |= {"backoff_first_ms": target.first_ms, "backoff_most_ms": target.most_ms, "rate": target.rate}
    told |= {"concurrency": target.concurrency, "flow_rate": target.flow_rate}
    told |= {"flow_concurrency": target.flow_concurrency, "keys": len(valid_keys(target, round(time.time() * 1_000)))}
    return told


class PushRoutes:
    """What is asked of targets."""

    def __init__(self, push: Push) -> None:
        self._push = push

    async def listed(self, request: Request) -> Response:
        """All targets."""
        queried(request)
        return _answer({"targets": [self._view(target) for target in await self._push.targets()]})

    async def create(self, request: Request) -> Response:
        """A new target; the answer has its key."""
        queried(request)
        target = made(decoded(_NEW, await read_body(request, BYTES_MAX)))
        async with self._push.at_meta() as connection:
            await create_target(connection, target)
        return _answer({**target_view(target), "key": shown_key(target.keys)}, 201, f"push/{target.name}")

    async def get(self, request: Request) -> Response:
        """One target."""
        queried(request)
        return _answer(self._view(await self._found(request)))

    async def change(self, request: Request) -> Response:
        """Other terms of a target."""
        queried(request)
        terms = decoded(_TERMS, await read_body(request, BYTES_MAX))
        await self._found(request)
        return _answer(target_view(await self._push.change(part(request, "name"), lambda known: changed(known, terms))))

    async def delete(self, request: Request) -> Response:
        """No target any more; its group stays."""
        queried(request)
        target = await self._found(request)
        async with self._push.at_meta() as connection:
            await delete_target(connection, target.name)
        return _answer({"name": target.name, "subject": target.subject, "group": target.group})

    async def rotate(self, request: Request) -> Response:
        """A new key; the answer has it."""
        queried(request)
        wish = decoded(_ROTATION, await read_body(request, BYTES_MAX) or b"{}")
        await self._found(request)
        until_ms = round((time.time() + duration(wish.keep).total_seconds()) * 1_000)

        def change(known: PushTarget) -> PushTarget:
            asymmetric = known.keys.startswith(ASYMMETRIC) if wish.asymmetric is None else wish.asymmetric
            return rotated(known, wish.key or new_key(asymmetric=asymmetric), until_ms)

        target = await self._push.change(part(request, "name"), change)
        return _answer({**target_view(target), "key": shown_key(target.keys.split(" ")[0])})

    async def test(self, request: Request) -> Response:
        """One POST now, from this gateway."""
        queried(request)
        outcome = await self._push.try_once(await self._found(request))
        answer = outcome.answer.decode(errors="replace")
        return _answer({"taken": outcome.is_done, "status": outcome.status, "what": outcome.what, "answer": answer})

    async def _found(self, request: Request) -> PushTarget:
        name = part(request, "name")
        try:
            return await self._push.target(name)
        except BadArgument as error:
            raise Refusal(404, "unknown", error.message) from error

    def _view(self, target: PushTarget) -> dict[str, object]:
        told = target_view(target)
        pusher = self._push.pushers.get(target.name)
        if pusher is not None:
            counts = pusher.counts
            told["here"] = {
                "posts": counts.posts,
                "delivered": counts.delivered,
                "failed": counts.failed,
                "put_off": counts.put_off,
                "under_way": pusher.under_way,
                "rests_ms": round(pusher.rests_s * 1_000),
                "last_failure": pusher.last_failure,
            }
        return told


def _answer(told: dict[str, object], status: int = 200, location: str | None = None) -> Response:
    return Response(_encode(told), status, None if location is None else {"Location": location}, JSON)
