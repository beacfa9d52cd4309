"""Blocking: the words of a message in a function's thread, said on the worker's loop while the thread waits."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from datetime import timedelta

from delayd.client.pulling.acks import ACK, Handles, Word
from delayd.client.pulling.consumer import AsyncConsumer
from delayd.errors import AlreadyClosed

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
