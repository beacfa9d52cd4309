"""Lane: pulls the messages of one handler, gives each of them a slot, and settles it when the handler has ended.

     pulled ──slot free──▶ running ──returned──▶ acknowledged
                              ├──raised──▶ given back with a pause, or rejected
                              ├──over the time limit──▶ coroutine: cancelled, then given back when it has ended
                              │                         function, or a coroutine that goes on all the same: given back;
                              │                         the slot is lost until it ends, and an exclusive lane
                              │                         without any other slot gives up its lead
                              └──worker stops, drain over──▶ given back uncounted

Invariant: a message is settled once, and a slot is free only when the handler in it has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from concurrent.futures import CancelledError as WaitCancelled
from typing import Any

from delayd.client.pulling.acks import Word, WordKind
from delayd.client.pulling.consume_options import exclusive_of
from delayd.client.pulling.consumer import AsyncConsumer, AsyncMessage, Message
from delayd.client.routing import RetryWaits
from delayd.errors import AlreadyClosed, CallerError, DelaydError
from delayd.machine.operating import LogLimit
from delayd.worker.handler import Handler
from delayd.worker.job import Chain, HandlerThreads, Job, run_in_thread, work_on
from delayd.worker.verdicts import BlockingWords, JobVerdict, Settler, VerdictKind

ATTEMPTS_OVER = "its attempts are over"
SLOW_HELP = "it goes on and its lease is extended, for a day at most; a time_limit= has its message given back earlier"
LOST_HELP = (
    "it goes on, for nobody can end a function, and its message comes again; give it a longer time_limit=, or None"
)
CANCEL_S = 2.0  # A coroutine that is cancelled at the end of the drain has this long to clean up.
CLOSE_S = 5.0  # When a server is away at the end, acknowledgements are waited for this long.

log = logging.getLogger(__name__)
limited = LogLimit(log)


class Lane:
    """One handler at work. Made inside the running loop; ``consumer`` is its own."""

    def __init__(self, handler: Handler, consumer: AsyncConsumer, chain: Chain) -> None:
        settings = handler.settings
        self.handler = handler
        self._names = (settings.label, settings.group)
        self._consumer = consumer
        self._chain = chain
        self._settler = Settler(consumer, settings)
        self._loop = asyncio.get_running_loop()
        self._slots = settings.concurrency
        self._limit_s = None if settings.limit is None else settings.limit.total_seconds()
        slow_s = None if handler.slow_after is None else handler.slow_after.total_seconds()
        self._look_s = slow_s if self._limit_s is None else self._limit_s  # After this a handler is looked at.
        # How long a coroutine over its limit may clean up: half of the time that its lease still lasts then.
        self._clean_up_s = min(CANCEL_S, settings.lease.total_seconds() / 12)
        self._jobs: dict[Job, None] = {}  # Those that hold a slot, in the order of their start.
        self._free: asyncio.Future[None] | None = None  # Set while the lane waits for a slot.
        self._idle: asyncio.Future[None] | None = None  # Set while the drain waits for the handlers.
        self._watch: asyncio.TimerHandle | None = None  # Looks at the time limit of the oldest.
        window = exclusive_of(settings.exclusive)
        self._window_s = None if window is None else window.total_seconds()
        self._ended: list[Job] = []  # Jobs of threads that are not settled yet.
        self._settling: asyncio.Task[None] | None = None
        self._aside: set[asyncio.Task[None]] = set()  # Those that settle messages whose handlers have not ended.
        self._words = BlockingWords(consumer, self._loop)
        self._threads = (
            None if handler.is_coroutine else HandlerThreads(handler.name, self._work_in_thread, self._take_ended)
        )
        self.failed: asyncio.Future[None] = self._loop.create_future()  # Raises a bug of this code.

    @property
    def running(self) -> int:
        """How many handlers are at work whose message is still this worker's."""
        return sum(not job.is_settled for job in self._jobs)

    async def pull(self) -> None:
        """Hand messages to the handler until cancelled. Raises the error of a request that can never succeed."""
        backoff = RetryWaits()
        while True:
            try:
                async for message in self._consumer:
                    self._start(message)
                    if len(self._jobs) >= self._slots:
                        await self._slot()
                return  # Somebody closed the consumer.
            except (CallerError, AlreadyClosed):
                raise
            except DelaydError as error:
                limited.error(
                    f"pull_failed {self._names}",
                    "pull_failed subject=%s group=%s code=%s reason=%r",
                    *self._names,
                    error.code,
                    error.message,
                )
                await asyncio.sleep(backoff.next_ms() / 1000)

    async def drain(self, until: float) -> None:
        """Wait for the handlers until an instant of the loop's clock; nothing is pulled any more."""
        while self.running and (left_s := until - self._loop.time()) > 0:
            self._idle = self._loop.create_future()
            await asyncio.wait([self._idle], timeout=left_s)

    async def close(self) -> int:
        """End what is still running, give its messages back uncounted, and disconnect; returns how many went back."""
        jobs = list(self._jobs)
        await self._cancel_coroutines(jobs)
        left = [job for job in jobs if not job.is_settled and not job.given.is_settled]
        for job in left:
            job.is_settled = True
        if self._watch is not None:
            self._watch.cancel()
        if self._threads is not None:
            self._threads.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._settling is not None:
                    await self._settling
                if self._aside:
                    await asyncio.wait(self._aside)
                await self._settler.close([job.message for job in left])
        except TimeoutError:
            log.warning("close_overdue subject=%s group=%s limit_s=%g", *self._names, CLOSE_S)
        return len(left)

    def _start(self, message: AsyncMessage) -> None:
        given = message if self._threads is None else Message.of(message, self._words)
        job = Job(message, given, self._loop.time())
        self._jobs[job] = None
        if self._threads is not None:
            self._threads.start(job)
        else:
            job.task = self._loop.create_task(self._work_on_loop(job))
            job.task.add_done_callback(self._check)
        if self._look_s is not None and self._watch is None:
            self._watch = self._loop.call_later(self._look_s, self._look)

    async def _slot(self) -> None:
        """Wait for a free slot."""
        while len(self._jobs) >= self._slots:
            self._free = self._loop.create_future()
            if not self._leads_in_vain:
                await self._free
            elif not (await asyncio.wait([self._free], timeout=self._window_s))[0]:
                # Every handler hangs, and still did after a window: another process can go on.
                log.error("lead_given_up subject=%s group=%s lost=%d", *self._names, len(self._jobs))
                await self._consumer.step_down()
                await self._free

    @property
    def _leads_in_vain(self) -> bool:
        """Whether this lane may lead its group, though each of its handlers hangs beyond its time limit."""
        return self._window_s is not None and all(job.over_time for job in self._jobs)

    def _leave(self, job: Job) -> None:
        """The handler of a job has ended: its slot is free."""
        if job.is_lost:
            took_s = self._loop.time() - job.started
            log.info("slot_free_again subject=%s group=%s took_s=%.1f", *self._names, took_s)
        del self._jobs[job]
        for waiting in (self._free, self._idle):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def _settle_aside(self, job: Job, verdict: JobVerdict) -> None:
        task = self._loop.create_task(self._settle(job, verdict))
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)
        task.add_done_callback(self._check)

    async def _settle(self, job: Job, verdict: JobVerdict) -> None:
        if job.is_settled:
            return
        job.is_settled = True
        told = None if job.given.is_settled else await self._settler.settle(job.message, verdict)
        if verdict.kind is not VerdictKind.ACK:
            self._tell(job, verdict, told)

    # Coroutines, on the loop.

    async def _work_on_loop(self, job: Job) -> None:
        try:
            await work_on(job, self.handler, self._chain, _awaited)
            if not job.is_given_back:
                await self._settle(job, job.verdict)
        finally:
            self._leave(job)

    async def _cancel_coroutines(self, jobs: list[Job]) -> None:
        tasks = []
        for job in jobs:
            if job.task is not None:
                job.is_stopped = True
                job.task.cancel()
                tasks.append(job.task)
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)

    # Functions, in threads.

    def _work_in_thread(self, job: Job) -> None:
        run_in_thread(job, self.handler, self._chain, self._wait_on_loop)

    async def _wait_on_loop(self, coroutine: Coroutine[Any, Any, object]) -> object:
        # This blocks the handler's thread and never suspends: the loop runs the coroutine meanwhile.
        waited = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return waited.result()
        except WaitCancelled:
            raise RuntimeError("the worker stopped before a coroutine of its middleware had ended") from None

    def _take_ended(self, jobs: list[Job]) -> None:
        self._ended += jobs
        self._settle_soon()

    def _settle_soon(self) -> None:
        if self._settling is None:
            self._settling = self._loop.create_task(self._settle_ended())
            self._settling.add_done_callback(self._check)

    async def _settle_ended(self) -> None:
        try:
            while self._ended:
                ended, self._ended = self._ended, []
                for job in ended:
                    await self._settle(job, job.verdict)
                    self._leave(job)
        finally:
            self._settling = None

    # The time limit.

    def _look(self) -> None:
        """Stop the handlers whose time is over, and look again when that of the next one is."""
        self._watch = None
        assert self._look_s is not None, "only handlers that may be slow are watched"
        now = self._loop.time()
        for job in self._jobs:
            if job.over_time:
                continue
            left_s = job.started + self._look_s - now
            if left_s > 0:
                self._watch = self._loop.call_later(left_s, self._look)
                return
            job.over_time = True
            if self._limit_s is None:
                self._tell_slow(job)
            elif job.task is not None:
                job.task.cancel()
                # It may clean up; one that goes on holds its slot as a function does.
                self._loop.call_later(self._clean_up_s, self._look_at_cancelled, job)
            elif not job.is_settled:
                self._lose(job)
        if self._free is not None and not self._free.done() and self._leads_in_vain:
            self._free.set_result(None)  # Whoever waits for a slot counts its window from now on.

    def _look_at_cancelled(self, job: Job) -> None:
        if job in self._jobs and not job.is_settled:
            self._lose(job)

    def _lose(self, job: Job) -> None:
        job.is_lost = True
        lost = sum(each.is_lost for each in self._jobs)
        told = (*self._names, self._limit_s, lost, self._slots, LOST_HELP)
        log.error(
            "slot_lost subject=%s group=%s limit_s=%g lost=%d of=%d help=%r",
            *told,
        )
        error = f"{self.handler.name} took longer than its time limit, {self.handler.settings.limit}"
        self._settle_aside(job, JobVerdict(VerdictKind.NACK, error=error))

    def _tell_slow(self, job: Job) -> None:
        """Log that a function takes long, and what becomes of its message."""
        which = (*self._names, self.handler.name, job.message.sequence, self._look_s, SLOW_HELP)
        limited.warning(
            f"handler_slow {self._names}",
            "handler_slow subject=%s group=%s handler=%s sequence=%d after_s=%g help=%r",
            *which,
        )

    # What the log says.

    def _tell(self, job: Job, verdict: JobVerdict, word: Word | None) -> None:
        """Log why a message was not handled, and what becomes of it: the ``word`` that was said of it, if one was."""
        message = job.message
        which = (*self._names, message.sequence, message.origin_sequence, message.attempt)
        if job.trouble and verdict.kind is VerdictKind.NACK:
            again = "never" if word is None or word.kind is WordKind.REJECT else f"{word.delay_ms / 1000:g}"
            limited.warning(
                f"handler_failed {self._names}",
                "handler_failed subject=%s group=%s sequence=%d origin=%d attempt=%d again_in_s=%s\n%s",
                *which,
                again,
                job.trouble,
            )
        if word is not None and word.kind is WordKind.REJECT:
            limited.warning(
                f"message_rejected {self._names}",
                "message_rejected subject=%s group=%s sequence=%d origin=%d attempt=%d reason=%r",
                *which,
                verdict.reason or ATTEMPTS_OVER,
            )

    def _check(self, task: asyncio.Task[None]) -> None:
        """Raise a bug of this code where the worker looks."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)


async def _awaited(coroutine: Awaitable[object]) -> object:
    return await coroutine
