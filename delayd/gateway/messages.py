"""Messages: what became of one, by the id of its receipt or by its key; cancel it, move it; list what is pending.

Invariant: an answer says what the servers said. A message that is known and can't be changed any more is a 409, whose
`state` says why.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from delayd.batch.names import MESSAGE_BYTES_MAX
from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import Receipt
from delayd.errors import DelaydError
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.sends import Lines, decoded, part, queried, query_of, read_body
from delayd.gateway.values import JSON, Browse, ByKey, Given, When, body_of, header_texts, utc
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
        self.receipt: Receipt | None = None
        self.key: str | None = None
        if "id" in request.path_params:
            queried(request)
            self.receipt = Receipt.of_token(part(request, "id"))
        else:
            self.key = query_of(request, ByKey).key


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


async def listed(producer: AsyncProducer, request: Request) -> Response:
    """One message by its key, or the pending messages of a subject, as lines, however many there are."""
    wish = query_of(request, Browse)
    if wish.key is not None:
        return await get(producer, Named(request))
    pages = producer.pending(
        part(request, "subject"),
        due_from=utc(wish.due_from, "due_from"),
        due_before=utc(wish.due_before, "due_before"),
        tag=wish.tag,
        contents=wish.contents,
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
                    told["headers"] = header_texts(message.headers)
                some.append(_encode(told))
            yield b"\n".join([*some, b""])
            try:
                page = await anext(pages, None)
            except DelaydError as error:
                yield _encode(problem(error)) + b"\n"
                return
        yield _encode({"pending": pages.found, "in_flight": pages.in_flight, "unread": pages.unread}) + b"\n"

    return Lines(lines())


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
