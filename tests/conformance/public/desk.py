"""A desk: one subject of a home, with what most cases do there."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import delayd
from delayd import Message
from tests.waiting import DEADLINE_S

AT_ONCE = timedelta(0)
SOON = timedelta(milliseconds=30)
LATER = timedelta(hours=1)
LONG = timedelta(seconds=DEADLINE_S)
MOMENT = timedelta(milliseconds=100)  # In which a message that must not come would have come, most of the time.
NEXT = timedelta(milliseconds=20)  # For what is to come again.


class Desk:
    """One subject; its consumers are closed with it."""

    def __init__(self, address: str, subject: str, producer: delayd.Producer) -> None:
        self.address = address
        self.subject = subject
        self.producer = producer
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def send(self, *bodies: bytes, delay: timedelta = AT_ONCE, **settings: Any) -> list[delayd.Receipt]:
        """Send each body on its own."""
        return [self.producer.send(self.subject, body, delay=delay, **settings) for body in bodies]

    def consumer(self, group: str = "g", subject: str | list[str] = "", **settings: Any) -> delayd.Consumer:
        """A consumer, by default of this subject."""
        return self._stack.enter_context(
            delayd.Consumer(self.address, subject or self.subject, group, prefetch=False, **settings)
        )

    def take(self, consumer: delayd.Consumer, count: int = 1) -> list[Message]:
        """So many messages, which nobody has settled yet."""
        found: list[Message] = []
        while len(found) < count:
            batch = consumer.pull(count - len(found), wait=LONG)
            assert len(batch), f"{count} messages come, and {len(found)} came"
            found += batch
        return found

    def one(self, consumer: delayd.Consumer) -> Message:
        """The next message."""
        return self.take(consumer)[0]

    def is_empty(self, consumer: delayd.Consumer) -> bool:
        """Whether nothing comes for a moment."""
        return not len(consumer.pull(wait=MOMENT))
