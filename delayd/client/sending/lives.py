"""Lives: where a message is now that a group gave back (docs/clients.md, Follow a message that comes again).

     the receipt of a send ─▶ GET: handed over to realtime server T     its group at T has the retry subject s
                                                                         │
     the delay server of the receipt ─▶ FIND s, origin=sequence  ◀───────┘  ─▶ the message as it waits there

Invariant: what is told about a life is told about the message of that receipt, in that group, and about no other one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from delayd.client.admin.groups import find_group
from delayd.client.sending.message_asker import (
    AskedOne,
    MessageAsker,
    MessageInfo,
    NewInstants,
    asked_of,
    info_of,
)
from delayd.client.sending.pending import PendingMessage, page_of
from delayd.errors import BadArgument
from delayd.hours import INSTANT_MS_MAX
from delayd.life import DEAD_TAG
from delayd.wire.ending import CancelAnswer, MessageState, RescheduleAnswer
from delayd.wire.finding import Content, Place, Window

_CANCEL_OF = {
    MessageState.CANCELLED: CancelAnswer.CANCELLED,
    MessageState.IN_FLIGHT: CancelAnswer.IN_FLIGHT,
    MessageState.UNKNOWN: CancelAnswer.UNKNOWN,
}


class Life(NamedTuple):
    """A message as it waits for a group.

    ``kept_as`` is the subject under which its delay server keeps it; ``message`` is None when nothing waits there.
    ``in_flight``: it is being handed over to the group again at this moment.
    """

    kept_as: str
    message: PendingMessage | None
    in_flight: bool

    @property
    def is_dead(self) -> bool:
        """Whether it is a dead letter."""
        return self.message is not None and DEAD_TAG in self.message.tags


class _Followed(NamedTuple):
    """The first life of a message, and what waits for the group; ``life`` is None while it was not handed over."""

    log_id: int
    answer: np.void  # Of its delay server about the first life; its dtype is ANSWER.
    life: Life | None

    @property
    def first(self) -> MessageInfo:
        """What became of the first life."""
        return info_of(self.answer)

    def need_handed_over(self, group: str) -> None:
        """Raise BadArgument while the message is pending for all groups."""
        if self.first.state is MessageState.PENDING:
            what = f"the message was not handed over to {group} yet, and is pending for all groups of its subject"
            raise BadArgument(f"{what}; leave out group= to end or move it for all of them")

    @property
    def told(self) -> CancelAnswer:
        """The answer to a wish about it when nothing waits for the group."""
        if self.life is not None and self.life.in_flight:
            return CancelAnswer.IN_FLIGHT
        return _CANCEL_OF.get(self.first.state, CancelAnswer.ALREADY_DISPATCHED)


class Follower:
    """Asks about single messages for one producer, on one loop; without a group, about their first lives."""

    def __init__(self, address: str, messages: MessageAsker) -> None:
        self._address = address
        self._messages = messages

    async def get(self, subject: str, group: str | None, one: AskedOne) -> MessageInfo:
        """What became of a message for a group: of its first life, or of the one that waits for the group."""
        if group is None:
            return await self._messages.get_one(one)
        followed = await self._follow(subject, group, one)
        life = followed.life
        if life is None or life.message is None:
            in_flight = life is not None and life.in_flight
            return followed.first._replace(state=MessageState.IN_FLIGHT) if in_flight else followed.first
        waiting = await self._messages.get_one(asked_of(life.kept_as, life.message.receipt))
        is_dead = life.is_dead and waiting.state is MessageState.PENDING
        return waiting._replace(state=MessageState.DEAD) if is_dead else waiting

    async def cancel(self, subject: str, group: str | None, one: AskedOne) -> CancelAnswer:
        """End a message that waits to come to a group again, or is a dead letter of it."""
        if group is None:
            return await self._messages.cancel_one(one)
        followed = await self._follow(subject, group, one)
        followed.need_handed_over(group)
        life = followed.life
        if life is None or life.message is None:
            return followed.told
        return await self._messages.cancel_one(asked_of(life.kept_as, life.message.receipt))

    async def reschedule(
        self, subject: str, group: str | None, one: AskedOne, instants: NewInstants
    ) -> tuple[int, np.void]:
        """Move a message that waits to come to a group again; a dead letter comes at that instant.

        Returns the delay server and its answer, which is about the first life when nothing waits for the group.
        """
        if group is None:
            return await self._move(one, instants)
        followed = await self._follow(subject, group, one)
        followed.need_handed_over(group)
        life = followed.life
        if life is None or life.message is None:
            answer = followed.answer.copy()
            answer["answer"] = RescheduleAnswer[followed.told.name]
            return followed.log_id, answer
        return await self._move(asked_of(life.kept_as, life.message.receipt), instants)

    async def _move(self, one: AskedOne, instants: NewInstants) -> tuple[int, np.void]:
        log_ids, answers = await self._messages.reschedule(one.rows(), instants)
        return int(log_ids[0]), answers[0]

    async def _follow(self, subject: str, group: str, one: AskedOne) -> _Followed:
        log_ids, answers = await self._messages.locate(one.rows())
        log_id, answer = int(log_ids[0]), answers[0]
        if answer["state"] != MessageState.DISPATCHED:
            return _Followed(log_id, answer, None)
        target = int(answer["target_log_id"])
        places = await find_group(self._address, subject, group)
        kept_as = next((place.kept_as for place in places if place.server.log_id == target), None)
        if kept_as is None:
            raise BadArgument(f"the realtime server {target:016x} of this message has no group {group}")
        window = Window(kept_as.encode(), 0, INSTANT_MS_MAX, content=Content.LABELS, origin=int(answer["sequence"]))
        return _Followed(log_id, answer, await self._life(log_id, kept_as, window))

    async def _life(self, log_id: int, kept_as: str, window: Window) -> Life:
        found: PendingMessage | None = None
        in_flight = False
        at: Place | None = window.place
        while at is not None:
            piece = await self._messages.find(log_id, window._replace(place=at))
            window = window._replace(until_sequence=piece.until_sequence)
            in_flight = in_flight or piece.in_flight > 0
            for message in page_of(log_id, piece, whole=False):
                # A newer life takes the place of an older one.
                if found is None or message.receipt.sequence > found.receipt.sequence:
                    found = message
            at = piece.place
        return Life(kept_as, found, in_flight)
