"""Messages: what became of one, by the id of its receipt or by its key; cancel it, move it; list what is pending.

The ETag of a pending message names it as it stands: a move gives it another one. With `If-Match` the delay
server moves or cancels the row that was seen and no other one, so of several such requests one is done.

Invariant: an answer says what the servers said. A message that is known and can't be changed any more is a 409, whose
`state` says why.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from delayd.batch.names import MESSAGE_BYTES_MAX
from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import Receipt
from delayd.errors import DelaydError
from delayd.gateway.conditions import changed_since, entity_tag, if_match
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.sends import Lines, decoded, part, queried, query_of, read_body
from delayd.gateway.values import JSON, Browse, ByKey, Given, When, body_of, header_texts, utc
from delayd.hours import instant_text
from delayd.outcome import MessageState
from delayd.wire.asked import CancelAnswer, RescheduleAnswer

LOOKS_MAX = 4  # A message that is looked at may be moved at the same moment.
AGAIN = {"Retry-After": "1"}  # A message in flight is decided a moment later, most often.

_WHEN = msgspec.json.Decoder(When)
_encode = msgspec.json.Encoder().encode


def message_tag(receipt: Receipt) -> dict[str, str]:
    """The ETag of a message as it stands when it has this receipt."""
    return entity_tag(_word_of(receipt))


def _word_of(receipt: Receipt) -> str:
    # Not the token: servers tell the instant of acceptance no more exactly than to the hour.
    return f"{receipt.log_id:016x}.{receipt.sequence}"


class Named(NamedTuple):
    """One message, named by a receipt or by its key."""

    subject: str
    receipt: Receipt | None = None
    key: str | None = None

    @classmethod
    def of(cls, request: Request) -> Named:
        """The message that a path or a query names."""
        subject = part(request, "subject")
        if "id" in request.path_params:
            queried(request)
            return cls(subject, receipt=Receipt.of_token(part(request, "id")))
        return cls(subject, key=query_of(request, ByKey).key)


async def get(producer: AsyncProducer, named: Named) -> Response:
    """What became of a message; with its ETag while it is pending."""
    info = await producer.get(named.subject, receipt=named.receipt, key=named.key)
    if info.state is MessageState.UNKNOWN:
        raise unknown_message()
    told: dict[str, object] = {"state": info.state.name.lower(), "deliver_at": instant_text(info.deliver_at_ms)}
    told |= {name: value for name, value in info._asdict().items() if value is not None and name != "state"}
    if info.target_log_id is not None:
        told["target_log_id"] = f"{info.target_log_id:016x}"
    current = await current_receipt(producer, named) if info.state is MessageState.PENDING else None
    return Response(_encode(told), headers=None if current is None else message_tag(current), media_type=JSON)


async def cancel(producer: AsyncProducer, named: Named, request: Request) -> Response:
    """End a message that is pending."""
    wish = await _required(producer, named, request)
    answer = await producer.cancel(named.subject, **wish)
    if answer is CancelAnswer.CHANGED:
        raise await _changed(producer, named)
    if answer is not CancelAnswer.CANCELLED:
        raise _refused(answer.name)
    return Response(_encode({"state": "cancelled"}), media_type=JSON)


async def move(producer: AsyncProducer, named: Named, request: Request) -> Response:
    """Move a pending message to another instant."""
    when: Any = decoded(_WHEN, await read_body(request, MESSAGE_BYTES_MAX)).terms()
    wish = await _required(producer, named, request)
    moved = await producer.reschedule(named.subject, **wish, **when)
    if moved.answer is RescheduleAnswer.CHANGED:
        raise await _changed(producer, named)
    if moved.answer is not RescheduleAnswer.MOVED or moved.receipt is None:
        raise _refused(moved.answer.name)
    return Response(_encode(Given.of(moved.receipt)), headers=message_tag(moved.receipt), media_type=JSON)


class _Wish(TypedDict):
    receipt: Receipt | None
    key: str | None
    if_unmoved: bool


async def _required(producer: AsyncProducer, named: Named, request: Request) -> _Wish:
    """How the message is named to the servers. With `If-Match` that is the receipt of the one that was seen, as it
    stands: the delay server changes it alone, and not when it was moved meanwhile.
    """
    seen = if_match(request)
    if seen is None:
        return {"receipt": named.receipt, "key": named.key, "if_unmoved": False}
    current = await current_receipt(producer, named)
    if current is not None:
        if _word_of(current) != seen:
            raise _moved_to(current)
        return {"receipt": current, "key": None, "if_unmoved": True}
    state = (await producer.get(**named._asdict())).state
    if state is MessageState.PENDING:
        raise _refused("IN_FLIGHT")  # It was moved or sent just now.
    raise _refused(state.name)


async def _changed(producer: AsyncProducer, named: Named) -> Refusal:
    """Why a message was not as it had been seen, at the moment of the decision."""
    current = await current_receipt(producer, named)
    return _refused("IN_FLIGHT") if current is None else _moved_to(current)


def _moved_to(current: Receipt) -> Refusal:
    return changed_since("the message was moved, or another one has its key", _word_of(current))


async def current_receipt(producer: AsyncProducer, named: Named) -> Receipt | None:
    """The receipt of a message as it stands now; None when it is not pending."""
    for _ in range(LOOKS_MAX):
        page = await producer.pending(**named._asdict(), page_size=1).next()
        if page is not None:
            return next(iter(page)).receipt
        if (await producer.get(**named._asdict())).state is not MessageState.PENDING:
            break
    return None


async def listed(producer: AsyncProducer, request: Request) -> Response:
    """One message by its key, or the pending messages of a subject, as lines, however many there are."""
    wish = query_of(request, Browse)
    if wish.key is not None:
        return await get(producer, Named.of(request))
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
                told: dict[str, object] = {"id": message.receipt.token}
                told |= {"log_id": f"{message.receipt.log_id:016x}", "sequence": message.receipt.sequence}
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


def unknown_message() -> Refusal:
    """The refusal of a request about a message that no server knows."""
    return Refusal(404, "unknown", "no such message is kept here; the logs of its hour may be deleted")


def _refused(answer: str) -> Refusal:
    if answer == "UNKNOWN":
        return unknown_message()
    if answer == "IN_FLIGHT":
        return Refusal(
            409, "in_flight", "the message is being handed over at this moment; ask again a moment later", AGAIN
        )
    return Refusal(409, answer.lower(), "the message has ended; GET says how, and when")
