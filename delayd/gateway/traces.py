"""Traces: the life of one message so far, as far as servers that run can tell it (docs/gateway.md).

     accepted ──▶ due ──▶ dispatched ──▶ appended ──▶ at each group: dispatched, pending (comes again), dead
                     └──▶ cancelled, expired, moved, …

Invariant: a step is told only when a server told it. When a group can't be asked, its problem stands in its place.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.responses import Response

from delayd.client.asking.ask import list_groups
from delayd.client.asking.messages import MessageInfo
from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import Receipt
from delayd.errors import DelaydError
from delayd.gateway.messages import Named, current_receipt, unknown_message
from delayd.gateway.problems import problem
from delayd.gateway.values import JSON
from delayd.hours import HOUR_MS, instant_text
from delayd.outcome import MessageState

GROUPS_MAX = 20  # Groups that are asked about one message; each is two requests or more.

_encode = msgspec.json.Encoder().encode


class LifeStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to a message, or is to happen; `at` is left out where no server tells an instant."""

    what: str
    at: str | None = None
    at_ms: int | None = None
    log_id: str | None = None
    sequence: int | None = None
    offset: int | None = None
    late_ms: int | None = None


class GroupLife(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a message is at one group: its state there, when it comes again, or why that is not known."""

    group: str
    state: str = ""
    deliver_at: str | None = None
    deliver_at_ms: int | None = None
    attempt: int | None = None
    code: str = ""
    detail: str = ""


class MessageLife(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The life of a message so far. `groups_left`: how many more groups there are that were not asked."""

    state: str
    deliver_at: str
    deliver_at_ms: int
    id: str | None = None
    steps: list[LifeStep]
    groups: list[GroupLife] = []
    groups_left: int = 0
    missing: list[str] = []


async def trace(producer: AsyncProducer, meta: str, named: Named) -> Response:
    """Answer what is known of a message."""
    info = await producer.get(**named._asdict())
    if info.state is MessageState.UNKNOWN:
        raise unknown_message()
    if named.receipt is None and info.state is MessageState.PENDING:
        named = named._replace(receipt=await current_receipt(producer, named))
    return Response(_encode(await life_of(producer, meta, named, info)), media_type=JSON)


async def life_of(producer: AsyncProducer, meta: str, named: Named, info: MessageInfo) -> MessageLife:
    """The life of a message, of which ``info`` is known; with a receipt of it also who has taken it."""
    receipt = named.receipt
    life = MessageLife(
        state=info.state.name.lower(),
        deliver_at=instant_text(info.deliver_at_ms),
        deliver_at_ms=info.deliver_at_ms,
        id=None if receipt is None else receipt.token,
        steps=_steps(receipt, info),
    )
    if info.state is not MessageState.DISPATCHED:
        return life
    listed = await list_groups(meta, named.subject, ages=False)
    names = list(dict.fromkeys(each.group for each in listed))
    groups = await asyncio.gather(*(_at_group(producer, named, name) for name in names[:GROUPS_MAX]))
    return msgspec.structs.replace(
        life, groups=groups, groups_left=max(0, len(names) - GROUPS_MAX), missing=list(listed.missing)
    )


def _steps(receipt: Receipt | None, info: MessageInfo) -> list[LifeStep]:
    steps: list[LifeStep] = []
    # The receipt of a list names the hour in which a message is filed, and no exact instant.
    if receipt is not None:
        exact = receipt.accepted_at_ms % HOUR_MS != 0
        at_ms = receipt.accepted_at_ms if exact else None
        steps.append(_step("accepted", at_ms, log_id=f"{receipt.log_id:016x}", sequence=receipt.sequence))
    steps.append(_step("due", info.deliver_at_ms))
    if info.state not in (MessageState.PENDING, MessageState.IN_FLIGHT):
        steps.append(_step(info.state.name.lower(), info.decided_at_ms))
    if info.target_log_id is not None and info.target_appended_at_ms is not None:
        late_ms = info.target_appended_at_ms - info.deliver_at_ms
        steps.append(
            _step(
                "appended",
                info.target_appended_at_ms,
                log_id=f"{info.target_log_id:016x}",
                offset=info.target_offset,
                late_ms=late_ms,
            )
        )
    if info.other is not None:
        steps.append(_step("other message due", info.other_at_ms, sequence=info.other))
    return steps


def _step(
    what: str,
    at_ms: int | None,
    *,
    log_id: str | None = None,
    sequence: int | None = None,
    offset: int | None = None,
    late_ms: int | None = None,
) -> LifeStep:
    at = None if at_ms is None else instant_text(at_ms)
    return LifeStep(what=what, at=at, at_ms=at_ms, log_id=log_id, sequence=sequence, offset=offset, late_ms=late_ms)


async def _at_group(producer: AsyncProducer, named: Named, group: str) -> GroupLife:
    try:
        own = await producer.get(**named._asdict(), group=group)
    except DelaydError as error:
        told = problem(error)
        return GroupLife(group=group, code=str(told["code"]), detail=str(told["detail"]))
    again = own.deliver_at_ms if own.state is MessageState.PENDING else None
    return GroupLife(
        group=group,
        state=own.state.name.lower(),
        deliver_at=None if again is None else instant_text(again),
        deliver_at_ms=again,
        attempt=own.attempt,
    )
