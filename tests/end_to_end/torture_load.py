"""The users of a torture: producers and consumers that go on whatever happens, and tell the ledger what they learn.

Invariant: what they do follows from the seed alone; only when it happens depends on the machine.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

import numpy as np

from delayd import AsyncConsumer, AsyncProducer, BatchFailed
from delayd.errors import DelaydError, OutcomeUnknown, SendHandle

from .torture_cancel import HANG_S, Canceller, outcome_of
from .torture_consumer import ConsumerLife
from .torture_keyed import KeyedUsers
from .torture_keys import KeyLedger
from .torture_ledger import Group, Ledger

KEYS_SUBJECT = "torture.keys"
SUBJECTS = ("torture.orders", "torture.mails/2")
CONSUMERS: dict[Group, int] = {
    (SUBJECTS[0], "billing"): 2,
    (SUBJECTS[0], "audit"): 1,
    (SUBJECTS[1], "billing"): 1,
    (KEYS_SUBJECT, "billing"): 2,
}
LEASE = timedelta(seconds=1.5)
TIMEOUTS_MS = (1_200, 30_000)  # One producer gives up within a restart, the other outlasts it.
CONSUMER_TIMEOUT_MS = 5_000
UNDER_WAY_MAX = 6  # Calls of one producer, so that a long outage gathers no mountain.
BATCH_ROWS = (1, 120)
SINGLES = (1, 12)
PAUSE_S = (0.1, 0.6)
BODY_BYTES = (0, 300)
LARGE_BODY_BYTES = 60_000
CANCEL_SHARE = 0.7  # So often somebody cancels or asks, for each call that sends.
BURST_CALLS = 12
HERD_ROWS = (300, 1_500)
HERD_AHEAD_MS = 1_500
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


class Load:
    """Producers and consumers; runs while its ``async with`` block does."""

    def __init__(self, meta: str, ledger: Ledger, keys: KeyLedger, seed: int, days: int) -> None:
        self._meta = meta
        self._ledger = ledger
        self._seed = seed
        self._days = days  # So far ahead are messages due.
        self._sending = asyncio.Event()
        self._calm = False
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._producers: list[AsyncProducer] = []
        self._canceller = Canceller(ledger)
        self.keyed = KeyedUsers(meta, ledger, keys, seed)

    async def __aenter__(self) -> Self:
        self._producers += [AsyncProducer(self._meta, timeout_ms=timeout_ms) for timeout_ms in TIMEOUTS_MS]
        for number, producer in enumerate(self._producers):
            self._start(self._produce(number, producer))
        for group, count in CONSUMERS.items():
            for number in range(count):
                self._start(self._consume(group, number))
        await self.keyed.__aenter__()
        self.resume()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._sending.set()
        await self.keyed.__aexit__(kind, error, trace)
        for task in self._tasks:
            if error is not None:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise what ended a producer or a consumer that should go on."""
        for task in self._tasks:
            if task.done():
                task.result()
        self.keyed.check()

    def resume(self) -> None:
        """Go on sending; consumers misbehave again."""
        self._calm = False
        self._sending.set()
        self.keyed.resume()

    def send_herd(self, draw: random.Random) -> int:
        """Begin to send messages that are all due in one instant; when, in ms since the epoch."""
        due_ms = int(time.time() * 1000) + HERD_AHEAD_MS
        self._call(self._send_many(draw.choice(self._producers), draw, [due_ms] * draw.randint(*HERD_ROWS)))
        return due_ms

    def send_burst(self, draw: random.Random) -> None:
        """Begin to send many batches and singles at once."""
        for _ in range(BURST_CALLS):
            producer = draw.choice(self._producers)
            self._call((self._send_batch if draw.random() < 0.6 else self._send_singles)(producer, draw))

    async def quiet(self) -> None:
        """Stop sending and learn what became of everything sent; from here on consumers acknowledge all they get.

        The servers must be up.
        """
        self._calm = True
        self._sending.clear()
        await self.keyed.quiet()
        while self._calls:
            await asyncio.wait(set(self._calls))
        await self._canceller.quiet(self._producers[-1], random.Random(f"{self._seed} {len(self._ledger.sent)}"))

    # Producers.

    async def _produce(self, number: int, producer: AsyncProducer) -> None:
        draw = random.Random(f"{self._seed} producer {number}")
        async with producer:
            while not self._over:
                await self._sending.wait()
                if len(self._calls) < UNDER_WAY_MAX * len(TIMEOUTS_MS):
                    self._call((self._send_batch if draw.random() < 0.6 else self._send_singles)(producer, draw))
                    if draw.random() < CANCEL_SHARE:
                        self._call(self._canceller.cancel_some(producer, draw))
                await asyncio.sleep(draw.uniform(*PAUSE_S))
            while self._calls:
                await asyncio.wait(set(self._calls))

    def _call(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._ended)

    async def _send_batch(self, producer: AsyncProducer, draw: random.Random) -> None:
        await self._send_many(producer, draw, self._draw_instants(draw, draw.randint(*BATCH_ROWS)))

    async def _send_many(self, producer: AsyncProducer, draw: random.Random, instants: list[int]) -> None:
        subject = draw.choice(SUBJECTS)
        messages = [self._ledger.send(subject, instant, _draw_size(draw)) for instant in instants]
        numbers = [number for number, _ in messages]
        try:
            async with asyncio.timeout(HANG_S):
                receipt = await producer.send_batch(subject, [body for _, body in messages], np.array(instants))
        except BatchFailed as failed:
            for part in failed.receipt.parts:
                for place, row in enumerate(part.rows.tolist()):
                    name = (part.accepted.log_id, part.accepted.base_sequence + place)
                    self._ledger.kept(numbers[row], name)
            for failure in failed.failures:
                self._failed(producer, [numbers[row] for row in failure.rows.tolist()], failure.error)
        except DelaydError as error:
            self._failed(producer, numbers, error)
        else:
            log_ids, sequences = receipt.log_ids.tolist(), receipt.sequences.tolist()
            for number, log_id, sequence in zip(numbers, log_ids, sequences, strict=True):
                self._ledger.kept(number, (log_id, sequence))
            self._canceller.sent(subject, receipt, numbers)

    async def _send_singles(self, producer: AsyncProducer, draw: random.Random) -> None:
        instants = self._draw_instants(draw, draw.randint(*SINGLES))
        await asyncio.gather(*(self._send(producer, draw.choice(SUBJECTS), at, _draw_size(draw)) for at in instants))

    async def _send(self, producer: AsyncProducer, subject: str, deliver_at_ms: int, size: int) -> None:
        number, body = self._ledger.send(subject, deliver_at_ms, size)
        try:
            async with asyncio.timeout(HANG_S):
                receipt = await producer.send(subject, body, deliver_at_ms=deliver_at_ms)
        except DelaydError as error:
            self._failed(producer, [number], error)
        else:
            self._ledger.kept(number, (receipt.log_id, receipt.sequence))
            self._canceller.sent(subject, receipt, [number])

    def _draw_instants(self, draw: random.Random, count: int) -> list[int]:
        """Most within seconds, some all in one instant, some past due, some later in the run, some in another hour."""
        now_ms = int(time.time() * 1000)
        instants: list[int] = []
        together = now_ms + draw.randint(200, 4_000) if draw.random() < 0.2 else 0
        for _ in range(count):
            roll = draw.random()
            if roll < 0.08:
                instants.append(now_ms + draw.randint(2 * HOUR_MS, self._days * DAY_MS))
            elif roll < 0.14:
                instants.append(now_ms + draw.randint(5_000, 90_000))
            elif roll < 0.22:
                instants.append(now_ms - draw.randint(0, 100_000))
            else:
                instants.append(together or now_ms + draw.randint(200, 4_000))
        return instants

    def _failed(self, producer: AsyncProducer, numbers: Sequence[int], error: DelaydError) -> None:
        self._ledger.fault(error)
        if isinstance(error, OutcomeUnknown):
            # Soon, for a server forgets it after a minute.
            self._call(self._learn(producer, error.handle, list(numbers)))
        for number in numbers:
            if isinstance(error, OutcomeUnknown):
                self._ledger.unknown(number)
            else:
                self._ledger.refused(number)

    async def _learn(self, producer: AsyncProducer, handle: SendHandle, numbers: list[int]) -> None:
        """Learn what became of messages of which nobody knows whether they are kept."""
        accepted = await outcome_of(producer, handle, self._ledger)
        for number in numbers:
            if accepted is None:
                self._ledger.refused(number)
            else:
                self._ledger.kept(number, None)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled() and call.exception() is not None:
            self._ledger.broken(f"a send ended with {call.exception()!r}")

    # Consumers.

    async def _consume(self, group: Group, number: int) -> None:
        draw = random.Random(f"{self._seed} consumer {group} {number}")
        while not self._over:
            consumer = AsyncConsumer(
                *(self._meta, *group),
                lease=LEASE,
                prefetch=draw.random() < 0.5,
                max_messages=draw.choice((7, 60, 500)),
                timeout_ms=CONSUMER_TIMEOUT_MS,
            )
            life = ConsumerLife(consumer, group, self._ledger, draw)
            pulls_left = draw.randint(40, 400)
            while pulls_left and not self._over:
                pulls_left -= 1
                async with asyncio.timeout(HANG_S):
                    await life.pull(self._calm)
            async with asyncio.timeout(HANG_S):
                with contextlib.suppress(DelaydError):
                    await consumer.close()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))


def _draw_size(draw: random.Random) -> int:
    return LARGE_BODY_BYTES if draw.random() < 0.005 else draw.randint(*BODY_BYTES)
