"""The background thread behind the blocking clients: one event loop, and ways to hand it work.

Invariant: work is done on the loop's thread in the order in which each caller posted it. After a fork the child has no
such thread and must not touch what it inherited, for the parent goes on with it (rule I2). Nor is it ever freed there,
which would take the parent's sockets out of the epoll set that both share: the vanished thread's stack still holds it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import TypeVar

import uvloop

from delayd.errors import AlreadyClosed
from delayd.executor import Done

R = TypeVar("R")
Work = Callable[[], None]


class LoopThread:
    """A running loop; made by the first use of a blocking client in a process, ended by its close."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self.loop = uvloop.new_event_loop()
        self._inbox: deque[Work] = deque()
        self._woken = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, work: Work) -> None:
        """Do it on the loop, soon; many posts cost one wake-up."""
        self._inbox.append(work)
        # Set before the wake-up and cleared before the inbox is emptied: a post between the two wakes once more.
        if not self._woken:
            self._woken = True
            self.loop.call_soon_threadsafe(self._empty_inbox)

    def call(self, coroutine: Coroutine[object, object, R]) -> R:
        """Run a coroutine on the loop, after what was posted before, and wait for its result.

        AlreadyClosed when the thread has ended.
        """
        if self._closed:
            coroutine.close()
            raise AlreadyClosed("this client was closed")
        # A Ctrl-C in a future's wait can leave the future's lock taken, on which this loop would then stand for ever.
        answers: SimpleQueue[Done[R]] = SimpleQueue()

        def finished(task: asyncio.Task[R]) -> None:
            if task.cancelled():
                answers.put(Done(AlreadyClosed("this client was closed meanwhile")))
            elif (error := task.exception()) is not None:
                answers.put(Done(error))
            else:
                answers.put(Done((task.result(),)))

        self.post(lambda: self.loop.create_task(coroutine).add_done_callback(finished))
        return answers.get().result()

    def close(self) -> None:
        """End the loop and the thread; whoever still waits in `call` gets AlreadyClosed."""
        if not self._closed:
            self._closed = True
            self.post(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self.loop.close()

    def _empty_inbox(self) -> None:
        self._woken = False
        inbox = self._inbox
        while inbox:
            inbox.popleft()()
