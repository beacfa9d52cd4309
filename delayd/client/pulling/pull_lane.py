"""Pull lane: the one PULL of a consumer that is under way; it is tried again until it is answered or its time is up.

Invariant: messages that a server has given out reach this consumer, which gives back those that nobody wants any more.
So a PULL is never just forgotten: to end it, the server is asked to answer it now. A PULL without trouble needs no
task: its request leaves at once, and its answer is handed on where it arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from delayd.client.instants import monotonic_us
from delayd.client.pulling.options import ConsumerSettings
from delayd.client.retry import Backoff, spread_ms
from delayd.errors import DelaydError, RequestFailed, RequestTimedOut, RetryLater, ServerUnavailable
from delayd.net.calls import OnAnswer
from delayd.net.connection import Connection
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.requests import RequestType

ANSWER_MS_MAX = 10_000.0  # A server may take this much longer than the PULL asked it to wait.
# How long a close waits for the answer to a PULL that it ends, because the answer may hold messages.
END_MS_MAX = 1_000.0

OnEnd = Callable[[Frame | DelaydError, int], None]
"""Called with the answer or the error, and when it was asked for (monotonic us)."""


class PullLane:
    """PULLs of one group of one subject, or of one subscription, one at a time; belongs to a loop.

    ``names`` says which, in the fields that each request has; ``connection`` may change it when it makes a connection.
    """

    def __init__(
        self,
        names: Mapping[str, HeadValue],
        terms: Mapping[str, HeadValue],
        standing: Callable[[], Connection | None],
        connection: Callable[[], Awaitable[Connection]],
        settings: ConsumerSettings,
        on_end: OnEnd,
    ) -> None:
        self._names = names
        self._terms = terms
        self._standing = standing
        self._connection = connection
        self._timeout_s = settings.timeout_ms / 1000
        self._unreached_s = settings.unreached_s
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.trouble: DelaydError | None = None  # Why the last try failed; None once one is answered.
        self._asked: _Asked | None = None
        self._trying: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a PULL waits for its answer."""
        return self._asked is not None

    @property
    def is_asking(self) -> bool:
        """Whether a PULL has left, and waits for its answer."""
        return self._asked is not None and self._asked.connection is not None

    def start(self, most: int, wait_ms: int, ahead: int) -> None:
        """Ask for up to ``most`` messages for a busy caller that has ``ahead`` messages left; 0 means that the caller
        waits.

        There must be nothing under way.
        """
        assert self._asked is None, "one PULL at a time"
        head: Head = {**self._terms, "max_messages": most, "wait_ms": wait_ms}
        if ahead:
            head["ahead"] = ahead
        asked = self._asked = _Asked(head, wait_ms, self._loop.time() + self._timeout_s)
        connection = self._standing()
        if connection is not None:
            self._ask(asked, connection)
        else:
            self._try_in(asked, 0.0)

    def withdraw(self) -> None:
        """Nobody waits any more: ask the server to answer the PULL under way at once, with the messages that it has
        given out.
        """
        asked = self._asked
        if asked is not None and asked.connection is not None:
            self._end_at_server(asked.connection, _ignore)

    async def end(self) -> bool:
        """End the PULL under way for good: its answer is handed on, if it comes in time.

        Returns True if it did not come: then the connection must be ended, so that the server forgets the PULL.
        """
        asked = self._asked
        if asked is not None and asked.connection is not None:
            ended: asyncio.Future[None] = self._loop.create_future()
            # Frames of one connection keep their order, so the PULL's own answer comes before this one.
            self._end_at_server(asked.connection, lambda answer: ended.set_result(None))
            await ended
        asked, self._asked = self._asked, None
        trying, self._trying = self._trying, None
        if trying is not None:
            trying.cancel()
            await asyncio.wait([trying])
        if asked is None or asked.connection is None:
            return False
        asked.connection.forget(asked.request_id)
        return True

    def _end_at_server(self, connection: Connection, ended: OnAnswer) -> None:
        connection.call(RequestType.PULL_END, self._names, (), ended, END_MS_MAX)

    def _ask(self, asked: _Asked, connection: Connection) -> None:
        asked.connection, asked.asked_us = connection, monotonic_us()

        def answered(answer: Frame | DelaydError) -> None:
            if self._asked is asked:
                self._answered(asked, connection, answer)

        timeout_ms = asked.wait_ms + ANSWER_MS_MAX
        head = {**self._names, **asked.head}
        asked.request_id = connection.call(RequestType.PULL, head, (), answered, timeout_ms)

    def _answered(self, asked: _Asked, connection: Connection, answer: Frame | DelaydError) -> None:
        if isinstance(answer, RequestTimedOut):
            # Its answer may still come, and nobody would take the messages in it.
            connection.abort()
        if isinstance(answer, DelaydError):
            self._failed(asked, answer)
        else:
            self._asked = self.trouble = None
            self._on_end(answer, asked.asked_us)

    def _failed(self, asked: _Asked, error: DelaydError) -> None:
        asked.connection = None
        self.trouble = error
        if isinstance(error, RequestFailed | RetryLater):
            asked.backoff = asked.backoff or Backoff()
            later = isinstance(error, RetryLater)
            wait_s = (spread_ms(error.retry_after_ms) if later else asked.backoff.next_ms()) / 1000
            left_s = self._unreached_s if isinstance(error, ServerUnavailable) else 0.0
            if self._loop.time() + wait_s < asked.deadline - left_s:
                self._try_in(asked, wait_s)
                return
        self._asked = None
        self._on_end(error, asked.asked_us)

    def _try_in(self, asked: _Asked, wait_s: float) -> None:
        self._trying = self._loop.create_task(self._try(asked, wait_s))

    async def _try(self, asked: _Asked, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        try:
            connection = await self._connection()
        except DelaydError as error:
            self._trying = None
            self._failed(asked, error)
        else:
            self._trying = None
            self._ask(asked, connection)


class _Asked:
    """One PULL over all its tries."""

    __slots__ = ("asked_us", "backoff", "connection", "deadline", "head", "request_id", "wait_ms")

    def __init__(self, head: Head, wait_ms: int, deadline: float) -> None:
        self.head = head
        self.wait_ms = wait_ms
        self.deadline = deadline
        self.backoff: Backoff | None = None  # Set from the first failure on.
        self.connection: Connection | None = None  # The connection on which the request may have left.
        self.request_id = 0
        self.asked_us = 0


def _ignore(answer: Frame | DelaydError) -> None:
    """Do nothing: the PULL is answered, or tried again, in any case."""
