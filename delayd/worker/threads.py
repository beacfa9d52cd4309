"""Threads: where the plain functions of one handler run, each message in a context of its own.

Invariant: there are never more threads than messages under way, so a handler has at most as many as it has slots. They
are daemons, because nobody can end a thread whose function hangs, and it must not keep the process.
"""

from __future__ import annotations

import asyncio
import threading
from _queue import SimpleQueue  # As in `delayd.machine.executor`.
from collections import deque
from collections.abc import Callable
from contextvars import copy_context

from delayd.client.blocking import need_real_threads
from delayd.worker.job import Job


class Threads:
    """The threads of one handler. ``work`` is called in a thread; ``ended`` on the loop, once for many jobs."""

    def __init__(self, name: str, work: Callable[[Job], None], ended: Callable[[list[Job]], None]) -> None:
        need_real_threads()
        self._name = name
        self._work = work
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: deque[Job] = deque()
        self._woken = False
        self._under_way = 0
        self._count = 0

    def start(self, job: Job) -> None:
        """Run a job, in a thread that is idle or in another one."""
        self._under_way += 1
        if self._under_way > self._count:
            self._count += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._count}", daemon=True).start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads, each as soon as its function ends."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _serve(self) -> None:
        jobs, work, context = self._jobs, self._work, self._context
        while (job := jobs.get()) is not None:
            context.copy().run(work, job)
            self._done.append(job)
            # The flag is set before the wake-up and cleared before the jobs are taken: a job in between wakes again.
            if not self._woken:
                self._woken = True
                try:
                    self._loop.call_soon_threadsafe(self._take)
                except RuntimeError:
                    return  # The loop has ended: the worker stopped without this job.

    def _take(self) -> None:
        self._woken = False
        done, ended = self._done, []
        while done:
            ended.append(done.popleft())
        self._under_way -= len(ended)
        if ended:
            self._ended(ended)
