"""Messages: what became of one, by the id of its receipt or by its key; cancel it, move it; list what is pending.

Invariant: an answer says what the servers said. A message that is known and can't be changed any more is a 409, whose
`state` says why.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from delayd.batch.names import MESSAGE_BYTES_MAX
from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import Receipt
from delayd.errors import BadArgument, DelaydError
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.sends import Lines, decoded, part, queried, read_body
from delayd.gateway.values import JSON, Given, When, body_of, utc
from delayd.hours import instant_text
from delayd.outcome import MessageState
from delayd.wire.asked import CancelAnswer, RescheduleAnswer

AGAIN = {"Retry-After": "1"}  # A message in flight is decided a moment later, most often.

_WHEN = msgspec.json.Decoder(When)
_encode = msgspec.json.Encoder().encode


class Named:
    """One message that a path or a query names."""

    def __init__(self, request: Request) -> None:
        self.subject = part(request, "subject")
        token, key = request.path_params.get("id"), queried(request, "key").get("key")
        if (token is None) == (key is None):
            raise BadArgument("name one message: by the id of its receipt in the path, or by ?key= behind messages")
        self.receipt = None if token is None else Receipt.of_token(token)
        self.key = key


async def get(producer: AsyncProducer, named: Named) -> Response:
    """What became of a message."""
    info = await producer.get(named.subject, receipt=named.receipt, key=named.key)
    if info.state is MessageState.UNKNOWN:
        raise _unknown()
    told: dict[str, object] = {"state": info.state.name.lower(), "deliver_at": instant_text(info.deliver_at_ms)}
    told |= {name: value for name, value in info._asdict().items() if value is not None and name != "state"}
    if info.target_log_id is not None:
        told["target_log_id"] = f"{info.target_log_id:016x}"
    return Response(_encode(told), media_type=JSON)


async def cancel(producer: AsyncProducer, named: Named) -> Response:
    """End a message that is pending."""
    answer = await producer.cancel(named.subject, receipt=named.receipt, key=named.key)
    if answer is not CancelAnswer.CANCELLED:
        raise _refused(answer.name)
    return Response(_encode({"state": "cancelled"}), media_type=JSON)


async def move(producer: AsyncProducer, named: Named, request: Request) -> Response:
    """Move a pending message to another instant."""
    when = decoded(_WHEN, await read_body(request, MESSAGE_BYTES_MAX)).terms()
    moved = await producer.reschedule(named.subject, receipt=named.receipt, key=named.key, **when)  # type: ignore[arg-type]
    if moved.answer is not RescheduleAnswer.MOVED or moved.receipt is None:
        raise _refused(moved.answer.name)
    return Response(_encode(Given.of(moved.receipt)), media_type=JSON)


async def pending(producer: AsyncProducer, request: Request) -> Response:
    """List the pending messages of a subject, as lines, however many there are."""
    query = queried(request, "due_from", "due_before", "tag", "contents")

    def bound(name: str) -> datetime | None:
        text = query.get(name)
        return None if text is None else utc(text, name)

    contents = query.get("contents", "false")
    if contents not in ("true", "false"):
        raise BadArgument(f"contents is true or false, not {contents[:40]!r}")
    pages = producer.pending(
        part(request, "subject"),
        due_from=bound("due_from"),
        due_before=bound("due_before"),
        tag=query.get("tag"),
        contents=contents == "true",
    )

    first = await anext(pages, None)  # An error before any line has a status of its own.

    async def lines() -> AsyncIterator[bytes]:
        page = first
        while page is not None:
            some: list[bytes] = []
            for message in page:
                told: dict[str, object] = {"id": message.receipt.token, "sequence": message.receipt.sequence}
                told |= {"deliver_at": instant_text(message.receipt.deliver_at_ms)}
                told |= {"deliver_at_ms": message.receipt.deliver_at_ms, "bytes": message.size}
                if message.key is not None:
                    told["key"] = message.key
                if message.tags:
                    told["tags"] = message.tags
                if message.body is not None:
                    told |= body_of(message.body)
                if message.headers:
                    told["headers"] = {name: _text(value) for name, value in message.headers.items()}
                some.append(_encode(told))
            yield b"\n".join([*some, b""])
            try:
                page = await anext(pages, None)
            except DelaydError as error:
                yield _encode(problem(error)) + b"\n"
                return
        yield _encode({"pending": pages.found, "in_flight": pages.in_flight, "unread": pages.unread}) + b"\n"

    return Lines(lines())


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def _unknown() -> Refusal:
    return Refusal(404, "unknown", "no such message is kept here; the logs of its hour may be deleted")


def _refused(answer: str) -> Refusal:
    if answer == "UNKNOWN":
        return _unknown()
    if answer == "IN_FLIGHT":
        return Refusal(
            409, "in_flight", "the message is being handed over at this moment; ask again a moment later", AGAIN
        )
    return Refusal(409, answer.lower(), "the message has ended; GET says how, and when")
