"""Settle: tells the server what became of the messages of one handler. The one place that acknowledges anything.

Acknowledgements are not waited for one by one: the consumer gathers those of many handlers into one request, which the
server makes durable. A failure is logged, and the messages that it concerns come again when their lease ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from delayd.client.pulling.acks import ACK, Word, rejected
from delayd.client.pulling.consumer import AsyncConsumer, AsyncMessage
from delayd.errors import AlreadyClosed, DelaydError
from delayd.machine.operating import LogLimit
from delayd.worker.handler import HandlerSettings
from delayd.worker.verdicts import Kind, Verdict

log = logging.getLogger(__name__)
limited = LogLimit(log)


class Settler:
    """What becomes of the messages of one consumer."""

    def __init__(self, consumer: AsyncConsumer, settings: HandlerSettings) -> None:
        self._consumer = consumer
        self._settings = settings

    async def settle(self, message: AsyncMessage, verdict: Verdict) -> Word | None:
        """Tell the server soon; only the order in which it hears of many is not kept.

        Returns what was said of the message; None when nothing could be said.
        """
        word = self._word(message, verdict)
        return word if await self._give(lambda: self._consumer.settle([message.handle], False, word)) else None

    def _word(self, message: AsyncMessage, verdict: Verdict) -> Word:
        if verdict.kind is Kind.ACK:
            return ACK
        if verdict.kind is Kind.REJECT:
            return rejected(verdict.reason, verdict.error)
        try:
            return self._consumer.word_back(message.attempt, verdict.delay, verdict.error)
        except DelaydError as error:
            # No message of this group may wait for so long.
            self._log(error)
            return self._consumer.word_back(message.attempt, None, verdict.error)

    async def close(self, left: Sequence[AsyncMessage]) -> None:
        """Give back, uncounted, messages whose handlers have not ended; wait until all is durable, and disconnect."""
        try:
            self._consumer.give_back(left)
            await self._consumer.close()
        except DelaydError as error:
            # The consumer has logged each failure when it came.
            log.debug("closed_with_failures reason=%r", error.message)

    async def _give(self, settle: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Whether this is on its way."""
        try:
            await settle()
        except AlreadyClosed:
            return True  # The worker stopped without this message, and gave it back.
        except DelaydError as error:
            self._log(error)
            return False
        return True

    def _log(self, error: DelaydError) -> None:
        names = (self._settings.label, self._settings.group)
        limited.warning(
            f"not_acknowledged {names}",
            "not_acknowledged subject=%s group=%s code=%s reason=%r",
            *names,
            error.code,
            error.message,
        )


def consumer_of(address: str, settings: HandlerSettings) -> AsyncConsumer:
    """The consumer of one handler, in the running loop."""
    names = (settings.subject, settings.group)
    return AsyncConsumer(
        address,
        *names,
        lease=settings.lease,
        max_attempts=settings.max_attempts,
        backoff=settings.backoff,
        auto_extend=settings.auto_extend,
        ordered=settings.ordered,
        start=settings.start,
        tags_any=settings.tags_any,
        tags_all=settings.tags_all,
        exclusive=settings.exclusive,
        group_max_in_flight=settings.group_max_in_flight,
    )
