"""Verdicts: what becomes of a message after its handler has ended, and how the server is told so.

A handler says it by returning, or by an exception: `Retry`, `Reject`, or any other one. `Settler` is the one place that
tells the server. Acknowledgements are not waited for one by one: the consumer gathers those of many handlers into one
request, which the server makes durable. A failure is logged, and the messages that it concerns come again when their
lease ends. `BlockingWords` are those that a function says itself, in its thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

from delayd.batch.labels import ERROR_BYTES_MAX, cut_text
from delayd.client.limits import need_text, need_timedelta
from delayd.client.pulling.acks import ACK, DELAY_MAX, Handles, Word, rejected
from delayd.client.pulling.consumer import AsyncConsumer, AsyncMessage
from delayd.errors import AlreadyClosed, BadArgument, BadBody, DelaydError
from delayd.machine.operating import LogLimit
from delayd.worker.handler import HandlerSettings


class Retry(Exception):
    """Raised by a handler: the message is to come again, after ``after`` or by the back-off of its handler.

    It counts as an attempt, as any other exception does.

    Example::

        raise delayd.Retry(after=timedelta(minutes=5), error="the bank asks to wait")
    """

    def __init__(self, after: timedelta | None = None, *, error: str = "") -> None:
        if after is not None and not timedelta(0) <= need_timedelta("after", after) <= DELAY_MAX:
            raise BadArgument(f"after is {after} and must lie within 0 and {DELAY_MAX.days} days")
        self.after = after
        self.error = need_text("error", error)
        super().__init__(error or ("again by its back-off" if after is None else f"again after {after}"))


class Reject(Exception):
    """Raised by a handler: the message can never be handled; it becomes a dead letter with this reason.

    Example::

        raise delayd.Reject("order 42 does not exist")
    """

    def __init__(self, reason: str) -> None:
        if not need_text("reason", reason):
            raise BadArgument("reason is empty; say why the message is rejected: Reject('no such order')")
        self.reason = reason
        super().__init__(reason)


class VerdictKind(Enum):
    """What is done with a message."""

    ACK = "ack"
    NACK = "nack"
    REJECT = "reject"


class JobVerdict(NamedTuple):
    """What becomes of one message; ``delay`` None means the back-off."""

    kind: VerdictKind
    delay: timedelta | None = None
    reason: str = ""
    error: str = ""


DONE = JobVerdict(VerdictKind.ACK)


def verdict_of(error: BaseException) -> JobVerdict:
    """What becomes of a message whose handler has raised."""
    if isinstance(error, Retry):
        return JobVerdict(VerdictKind.NACK, error.after, error=error.error)
    if isinstance(error, Reject):
        return JobVerdict(VerdictKind.REJECT, reason=error.reason)
    if isinstance(error, BadBody):
        # Its bytes stay as they are, so another attempt would end in the same way.
        return JobVerdict(VerdictKind.REJECT, reason=error.message, error=text_of(error))
    return JobVerdict(VerdictKind.NACK, error=text_of(error))


def text_of(error: BaseException) -> str:
    """An exception in one line."""
    try:
        told = str(error)
    except Exception as untold:  # noqa: BLE001 - an exception of the user's may do anything when it is asked.
        told = f"its text can't be had: {type(untold).__name__}"
    # It travels with the message.
    return cut_text(f"{type(error).__name__}: {told}", ERROR_BYTES_MAX) if told else type(error).__name__


log = logging.getLogger(__name__)
limited = LogLimit(log)


class Settler:
    """What becomes of the messages of one consumer."""

    def __init__(self, consumer: AsyncConsumer, settings: HandlerSettings) -> None:
        self._consumer = consumer
        self._settings = settings

    async def settle(self, message: AsyncMessage, verdict: JobVerdict) -> Word | None:
        """Tell the server soon; only the order in which it hears of many is not kept.

        Returns what was said of the message; None when nothing could be said.
        """
        word = self._word(message, verdict)
        return word if await self._give(lambda: self._consumer.settle([message.handle], False, word)) else None

    def _word(self, message: AsyncMessage, verdict: JobVerdict) -> Word:
        if verdict.kind is VerdictKind.ACK:
            return ACK
        if verdict.kind is VerdictKind.REJECT:
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


STOPPED = "the worker has stopped; the message comes again, or went back before"


class BlockingWords:
    """Says the words of one consumer's messages from any thread but its loop's; see Settling of the consumer."""

    def __init__(self, consumer: AsyncConsumer, loop: asyncio.AbstractEventLoop) -> None:
        self._consumer = consumer
        self._loop = loop

    async def settle(self, handles: Handles, wait: bool, word: Word = ACK) -> None:
        """Say ``word`` of the messages of ``handles``, and block meanwhile; with ``wait`` it is durable then."""
        saying = self._consumer.settle(handles, wait, word)
        try:
            said = asyncio.run_coroutine_threadsafe(saying, self._loop)
        except RuntimeError:
            saying.close()
            raise AlreadyClosed(STOPPED) from None
        try:
            said.result()
        except CancelledError:
            raise AlreadyClosed(STOPPED) from None

    def word_back(self, attempt: int, delay: timedelta | None, error: str) -> Word:
        """What a message becomes that is given back after its ``attempt``, with that ``delay`` and ``error``."""
        return self._consumer.word_back(attempt, delay, error)
