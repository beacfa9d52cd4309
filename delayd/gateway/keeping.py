"""Keeping: messages of a list or a stream are sent, most of them as columns, and it is told what became of each.

Rows with the same `ColumnForm` are one *group*: one call of `send_batch`. Rows that have no form, such as those with
`spread_ms`, are a group, too, and sent one by one. Groups leave at the same time, but for their keys:

     row  key  form         group   is sent
     0    a    delay        0       at once, with row 2
     1    –    delay        1       at once
     2    b    delay        0
     3    a    deliver_at   2       when group 0 has ended
     4    a    delay        3       when group 2 has ended; not with row 0, because row 3 comes in between

Invariant: a message with a key is decided after all those with this key that stand before it in its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np

from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import BatchFailed, BatchReceipt, Failure, Receipt
from delayd.errors import CallerError, DelaydError
from delayd.gateway.once import Queue
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.streams import Told, Wished
from delayd.gateway.values import ColumnForm, Given, columns_of, queued

_Sent = asyncio.Future[Receipt] | DelaydError  # A message under way, or why it is not sent.


class SendGroup(NamedTuple):
    """Messages that are sent by one call, or one by one when they have no form."""

    number: int
    form: ColumnForm | None
    rows: list[int]  # Rising.
    keys: set[str]


class _Turn(NamedTuple):
    before: set[asyncio.Future[None]]  # The ends of groups with which this one shares a key.
    end: asyncio.Future[None]


def groups_of(wished: Sequence[Wished]) -> list[SendGroup]:
    """Groups of messages; each key has its messages in their order, in groups of rising numbers."""
    groups: list[SendGroup] = []
    latest: dict[ColumnForm | None, SendGroup] = {}
    holders: dict[str, int] = {}  # The number of the last group that has a key.
    for row, message in enumerate(wished):
        form, key = (None, None) if isinstance(message, DelaydError) else (message.column_form(), message.key)
        group = latest.get(form)
        if group is None or (key is not None and holders.get(key, -1) > group.number):
            group = latest[form] = SendGroup(len(groups), form, [], set())
            groups.append(group)
        group.rows.append(row)
        if key is not None:
            group.keys.add(key)
            holders[key] = group.number
    return groups


class Keeper:
    """Sends the messages of one request to a subject, a piece after the other; belongs to one loop."""

    def __init__(self, producer: AsyncProducer, subject: str) -> None:
        self._producer = producer
        self._subject = subject
        self._queue: Queue = partial(queued, producer.send_nowait, subject)
        self._ends: dict[str, asyncio.Future[None]] = {}  # By key: the end of the last group under way that has it.

    async def keep(self, wished: Sequence[Wished]) -> list[Told]:
        """Send messages that came together, and tell of each what became of it once all have ended.

        Pieces that are under way at one time take their turns in the order in which these calls begin.
        """
        told: list[Told] = [{}] * len(wished)
        groups = groups_of(wished)
        turns = [self._turn(group) for group in groups]
        sends = [self._in_turn(*each, wished, told) for each in zip(groups, turns, strict=True)]
        await asyncio.gather(*sends)
        return told

    def _turn(self, group: SendGroup) -> _Turn:
        turn = _Turn(
            {self._ends[key] for key in group.keys if key in self._ends}, asyncio.get_running_loop().create_future()
        )
        self._ends |= dict.fromkeys(group.keys, turn.end)
        return turn

    async def _in_turn(self, group: SendGroup, turn: _Turn, wished: Sequence[Wished], told: list[Told]) -> None:
        try:
            if turn.before:
                await asyncio.wait(turn.before)
            left: Sequence[int] = group.rows
            if group.form is not None:
                left = await self._send_columns(group.form, wished, group.rows, told)
            kept = await keep_each(repeat(self._queue), [wished[row] for row in left])
            for row, each in zip(left, kept, strict=True):
                told[row] = each
        finally:
            turn.end.set_result(None)
            for key in group.keys:
                if self._ends.get(key) is turn.end:
                    del self._ends[key]

    async def _send_columns(
        self, form: ColumnForm, wished: Sequence[Wished], rows: Sequence[int], told: list[Told]
    ) -> Sequence[int]:
        """Send messages as columns, and note in ``told`` what became of them. Returns those that are yet to be sent,
        each by itself, because something is wrong with one of them.
        """
        messages = [message for row in rows if not isinstance(message := wished[row], DelaydError)]
        try:
            bodies = [message.content() for message in messages]
            receipt = await self._producer.send_batch(self._subject, bodies, **columns_of(form, messages))
            failures: Sequence[Failure] = ()
        except CallerError:
            return rows
        except BatchFailed as error:
            receipt, failures = error.receipt, error.failures
        except DelaydError as error:
            receipt, failures = BatchReceipt(()), (Failure(np.arange(len(rows)), error),)
        for part in receipt.parts:
            for row, each in zip(part.rows.tolist(), Given.of_part(part), strict=True):
                told[rows[row]] = problem(each) if isinstance(each, DelaydError) else each
        for failure in failures:
            for row in failure.rows.tolist():
                told[rows[row]] = problem(failure.error)
        return ()


async def keep_each(queues: Iterator[Queue], wished: Sequence[Wished]) -> list[Told]:
    """Send messages one by one, in their order, each by the next of the queues, and tell of each."""
    sent = [_begin(queue, message) for message, queue in zip(wished, queues, strict=False)]
    return [await _told(each) for each in sent]


def _begin(queue: Queue, message: Wished) -> _Sent:
    if isinstance(message, DelaydError):
        return message
    try:
        return queue(message, message.content(), message.headers)
    except DelaydError as error:
        return error


async def _told(sent: _Sent) -> Told:
    """A receipt, or why the message is not kept."""
    if isinstance(sent, DelaydError):
        return problem(sent)
    try:
        return Given.of(await sent)
    except (DelaydError, Refusal) as error:
        return problem(error)
