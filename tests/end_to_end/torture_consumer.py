"""One consumer of a torture, which acknowledges in every way there is, gives back, and lets leases run out.

Invariant: what it tells the ledger to be acknowledged, the servers have called durable.
"""

import random
import time
from datetime import timedelta

from delayd import AsyncConsumer, AsyncMessageBatch
from delayd.errors import DelaydError

from .torture_ledger import Delivered, Group, Ledger

PULL_WAIT = timedelta(seconds=1)
SINGLES_MAX = 20  # Acknowledged one by one, each with a fsync of its own; the leases of the others run out.


class ConsumerLife:
    """One consumer object, from its first pull to its close."""

    def __init__(self, consumer: AsyncConsumer, group: Group, ledger: Ledger, draw: random.Random) -> None:
        self._consumer = consumer
        self._group = group
        self._ledger = ledger
        self._draw = draw
        self._not_flushed: list[int] = []
        self._held_on_to: list[tuple[AsyncMessageBatch, list[int]]] = []

    async def pull(self, calm: bool) -> None:
        """Take messages and do something with them."""
        try:
            batch = await self._consumer.pull(wait=PULL_WAIT)
            numbers = self._deliver(batch)
            if len(numbers) == len(batch) and numbers:
                await self._settle(batch, numbers, 0.0 if calm else self._draw.random())
            if self._held_on_to and (calm or self._draw.random() < 0.3):
                late, numbers = self._held_on_to.pop()
                await self._acknowledge_soon(late, numbers)
            if self._not_flushed and (calm or self._draw.random() < 0.3):
                await self._consumer.flush()
                self._ledger.acknowledged(self._group, self._not_flushed)
                self._not_flushed.clear()
        except DelaydError as error:
            # It may tell of any acknowledgement that nobody waited for, so none of them counts as durable.
            self._ledger.fault(error)
            self._not_flushed.clear()

    def _deliver(self, batch: AsyncMessageBatch) -> list[int]:
        now_ms, now = int(time.time() * 1000), time.monotonic()
        names = zip(batch.log_ids.tolist(), batch.sequences.tolist(), strict=True)
        numbers: list[int] = []
        for body, name, deliver_at_ms in zip(batch.bodies, names, batch.deliver_at_ms.tolist(), strict=True):
            delivered = Delivered(body, batch.subject, name, deliver_at_ms)
            number = self._ledger.deliver(
                self._group, delivered, now_ms=now_ms, now=now, lease_ends=batch.pulled.lease_ends
            )
            if number is not None:
                numbers.append(number)
        return numbers

    async def _settle(self, batch: AsyncMessageBatch, numbers: list[int], roll: float) -> None:
        if roll < 0.5:
            self._ledger.acknowledging(self._group, numbers)
            await batch.ack()
            self._ledger.acknowledged(self._group, numbers)
        elif roll < 0.65:
            await self._acknowledge_soon(batch, numbers)
        elif roll < 0.85:
            await self._settle_singles(batch, numbers)
        elif roll < 0.93:
            self._ledger.given_back(self._group, numbers)
            await batch.nack(timedelta(0))
        elif roll < 0.97:
            self._held_on_to.append((batch, numbers))
        # And of the rest the lease runs out.

    async def _acknowledge_soon(self, batch: AsyncMessageBatch, numbers: list[int]) -> None:
        self._ledger.acknowledging(self._group, numbers)
        await batch.ack(wait=False)
        self._not_flushed += numbers

    async def _settle_singles(self, batch: AsyncMessageBatch, numbers: list[int]) -> None:
        for row in self._draw.sample(range(len(batch)), min(len(batch), SINGLES_MAX)):
            if self._draw.random() < 0.1:
                self._ledger.given_back(self._group, [numbers[row]])
                await batch[row].nack(timedelta(0))
            else:
                self._ledger.acknowledging(self._group, [numbers[row]])
                await batch[row].ack()
                self._ledger.acknowledged(self._group, [numbers[row]])
