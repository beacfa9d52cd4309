"""The background thread behind the blocking clients: one event loop, and ways to hand it work.

Invariant: work is done on the loop's thread in the order in which each caller posted it. After a fork the child does
not have this thread; `OwnEngine` gives it another one.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from _queue import SimpleQueue  # As in `delayd.executor`.
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Generic, TypeVar, TypeVarTuple

import uvloop

from delayd.errors import AlreadyClosed, BadSetting
from delayd.executor import Done

R = TypeVar("R")
Fields = TypeVarTuple("Fields")
Work = Callable[[], None]


# Libraries that put greenlets in place of threads: who they are, the module that knows, what it is asked, and how they
# leave threads alone.
_PATCHERS = (
    ("gevent", "gevent.monkey", "is_module_patched", "threading", "monkey.patch_all(thread=False)"),
    ("eventlet", "eventlet.patcher", "is_monkey_patched", "thread", "eventlet.monkey_patch(thread=False)"),
)


def need_real_threads() -> None:
    """BadSetting where threads are greenlets: all of them would wait for ever for a loop that never gets its turn."""
    for who, module, asks, what, instead in _PATCHERS:
        patcher = sys.modules.get(module)
        if patcher is not None and getattr(patcher, asks)(what):
            raise BadSetting(
                f"{who} has put greenlets in place of this program's threads, and delayd needs a thread of its own;"
                f" patch with {instead}, or use delayd in another process"
            )


class LoopThread:
    """A running loop; made by the first use of a blocking client in a process, ended by its close."""

    def __init__(self, name: str) -> None:
        need_real_threads()
        self.loop = uvloop.new_event_loop()
        self._inbox: deque[Work] = deque()
        self._woken = False
        self._closed = False
        self._ended = False  # Nobody reads the inbox any more.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def post(self, work: Work) -> None:
        """Run this on the loop soon; many posts cost one wake-up. AlreadyClosed when the thread has ended."""
        self._inbox.append(work)
        # The flag is set before the wake-up and cleared before the inbox is emptied: a post in between wakes the loop
        # once more.
        if not self._woken:
            try:
                self._woken = True
                self.loop.call_soon_threadsafe(self._empty_inbox)
            except RuntimeError:
                self._ended = True
            except BaseException:
                # A Ctrl-C came in between: the next post wakes the loop.
                self._woken = False
                raise
        # The thread sets its flag and then looks into the inbox once more, so either the thread sees this work or this
        # call sees the flag.
        if self._ended:
            raise AlreadyClosed("this client was closed")

    def call(self, coroutine: Coroutine[object, object, R], *, ends_with_caller: bool = False) -> R:
        """Run a coroutine on the loop, after all work that was posted before, and wait for its result.

        If the caller is interrupted, as by Ctrl-C, the coroutine goes on, or is cancelled if it ``ends_with_caller``.
        AlreadyClosed when the thread has ended.
        """
        # A Ctrl-C in a future's wait can leave the future's lock taken, and then this loop would wait for it for ever.
        answers: SimpleQueue[Done[R]] = SimpleQueue()
        tasks: list[asyncio.Task[R]] = []

        def start() -> None:
            task = self.loop.create_task(coroutine)
            tasks.append(task)
            task.add_done_callback(finished)

        def finished(task: asyncio.Task[R]) -> None:
            if task.cancelled():
                answers.put(Done(AlreadyClosed("this client was closed meanwhile")))
            elif (error := task.exception()) is not None:
                answers.put(Done(error))
            else:
                answers.put(Done((task.result(),)))

        def leave() -> None:
            if not tasks:
                coroutine.close()
            elif ends_with_caller:
                tasks[0].cancel()

        try:
            if self._closed:
                raise AlreadyClosed("this client was closed")
            self.post(start)
            answer = answers.get()
        except AlreadyClosed:
            if not tasks:
                coroutine.close()
            raise
        except BaseException:
            # This runs after `start`, if `start` was posted at all.
            self.post(leave)
            raise
        return answer.result()

    def run(self, function: Callable[[], R]) -> R:
        """As `call`, for a function that makes what belongs to the loop."""

        async def called() -> R:
            return function()

        return self.call(called())

    def call_within(self, coroutine: Coroutine[object, object, object], limit_s: float) -> bool:
        """Run a coroutine on the loop; return whether it ended in time. Its exception is ignored."""
        ended = threading.Event()

        def start() -> None:
            self.loop.create_task(coroutine).add_done_callback(finished)

        def finished(task: asyncio.Task[object]) -> None:
            if not task.cancelled():
                # An exception that nobody fetches would be logged as a bug.
                task.exception()
            ended.set()

        self.post(start)
        return ended.wait(limit_s)

    def close(self) -> None:
        """End the loop and the thread; callers that still wait in `call` get AlreadyClosed."""
        self.end(None)

    def end(self, limit_s: float | None) -> None:
        """As `close`, and wait for the thread's end at most so long."""
        if not self._closed:
            self._closed = True
            # The loop may be emptying the inbox at this moment: then it has stopped before `post` wakes it.
            with suppress(AlreadyClosed):
                self.post(self.loop.stop)
            self._thread.join(limit_s)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self._ended = True
            self._empty_inbox()
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


class Inbox(Generic[*Fields]):
    """What callers of any thread hand to the loop, in their order; many items cost one post.

    ``take`` is called on the loop with the fields of each item.
    """

    __slots__ = ("_items", "_posted", "_take", "_thread")

    def __init__(self, thread: LoopThread, take: Callable[[*Fields], None]) -> None:
        self._thread = thread
        self._take = take
        self._items: deque[tuple[*Fields]] = deque()
        self._posted = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: tuple[*Fields]) -> None:
        """Hand one item over. AlreadyClosed when the thread has ended."""
        self._items.append(item)
        # The flag is set before the post and cleared before the items are taken: a put in between posts once more.
        if not self._posted:
            try:
                self._posted = True
                self._thread.post(self._take_all)
            except BaseException:
                # A Ctrl-C came in between: the next put posts again.
                self._posted = False
                raise

    def _take_all(self) -> None:
        self._posted = False
        items, take = self._items, self._take
        while items:
            take(*items.popleft())
