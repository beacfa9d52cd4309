"""Outbox: messages that a producer was given and that have no outcome yet: single sends are gathered, batches are cut
in pieces.

Invariant: at most two batches of single sends for each delay server and lane are under way, and at most 16 pieces of
batches, so a slow server leads to fuller batches instead of more of them.

Single sends with keys have a lane of their own: a server looks their keys up, and refuses them while it can't, and no
other send waits for that.

When a gathering leaves depends on how many sends wait and how many batches are under way:

1. Nothing is under way: it leaves at the end of the loop's turn, with all sends of that turn. So a lone send never
   waits.
2. A crowd, CROWD_ROWS or more, leaves in the middle of the turn, if there is a slot.
3. One batch is under way, and fewer than COMPANY_ROWS sends wait: they leave when its acknowledgement comes, or when
   the linger is over. With COMPANY_ROWS or more they leave at the end of the turn.
4. Two batches are under way: all wait until one of them ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial

import numpy as np

from delayd.client.sending.block import Block, Progress
from delayd.client.sending.gathering import Gathering
from delayd.client.sending.options import Columns, Single
from delayd.client.sending.packing import BYTES_TARGET, ROWS_TARGET, split_rows
from delayd.client.sending.receipt import Receipt
from delayd.client.sending.sender import Parcel, Sender, Split
from delayd.client.sending.slots import Slots
from delayd.client.sending.unheard import Unheard
from delayd.client.sending.unsent import Waiter
from delayd.errors import QueueFull

SINGLES_UNDER_WAY = 2  # For each server: one batch is made durable while the next one travels.
# This many rows share the 0.3 ms that a batch costs both sides well enough; waiting for more is not worth it.
COMPANY_ROWS = 128
# A crowd's batch leaves at this size: further sends are gathered while it waits for its acknowledgement.
CROWD_ROWS = 512
PIECES_UNDER_WAY = 16  # 1,035 k messages/s with 16, 784 k with 4, 876 k with 64.
CLOSE_GATHERING_MS = 500.0  # A send may fail this much later than its own limit, while nothing gets through.


class Outbox:
    """Belongs to one loop; the caller has checked the rows and bounds their bytes."""

    def __init__(self, sender: Sender, linger_ms: float, timeout_ms: float, unheard: Unheard) -> None:
        self._sender = sender
        self._timeout_s = timeout_ms / 1000
        self.on_free: Callable[[int], None] = _nobody_waits  # Called with how many bytes of single sends have ended.
        self._loop = asyncio.get_running_loop()
        self._plain = _Lane(sender, linger_ms / 1000, self._leave, unheard)
        self._keyed = _Lane(sender, linger_ms / 1000, self._leave, unheard)
        self._pieces = Slots(lambda: PIECES_UNDER_WAY)
        self._under_way: dict[Parcel, asyncio.Future[None] | None] = {}  # Each with the future that `flush` waits for.
        self._tasks: set[asyncio.Task[None]] = set()  # Tasks of parcels that wait before they are carried.

    @property
    def unsent(self) -> int:
        """Messages that have no outcome yet."""
        gathered = self._plain.gathering.count + self._keyed.gathering.count
        return gathered + sum([parcel.rows.count for parcel in list(self._under_way)])

    def add(self, row: Single, byte_count: int, waiter: Waiter[Receipt]) -> None:
        """Take one send, which holds ``byte_count`` bytes."""
        label = row[5]
        lane = self._plain if label is None or not label.key else self._keyed
        gathering = lane.gathering
        # The same as `Gathering.add`: a call for each send would be a hundredth of its cost.
        gathering.rows.append(row)
        gathering.waiters.append(waiter)
        gathering.held_bytes += byte_count
        if len(gathering.rows) >= lane.look_at or gathering.held_bytes >= BYTES_TARGET:
            lane.look()

    async def add_batch(self, progress: Progress, columns: Columns) -> None:
        """Take the rows of one `send_batch`, piece by piece; returns when the last of them is under way."""
        for run in split_rows(columns.sizes):
            try:
                await self._pieces.take(self._loop.time() + self._timeout_s)
            except TimeoutError:
                rest = np.arange(run.start, len(columns.sizes))
                progress.fail(rest, QueueFull(f"{PIECES_UNDER_WAY} batches stayed under way for {self._timeout_s:g} s"))
                return
            parcel = self._sender.parcel(Block.cut(progress, columns, run))
            self._carry(parcel, self._pieces)

    async def flush(self) -> None:
        """Wait until everything that was added before has ended."""
        for lane in (self._plain, self._keyed):
            if lane.gathering.count:
                lane.close_gathering()
        ends: list[asyncio.Future[None]] = []
        for parcel, end in self._under_way.items():
            if end is None:
                end = self._under_way[parcel] = self._loop.create_future()
            ends.append(end)
        if ends:
            await asyncio.wait(ends)

    def _leave(self, parcel: Parcel, slots: Slots) -> None:
        """Carry a parcel as soon as it has a slot."""
        if slots.take_free():
            self._carry(parcel, slots)
        else:
            self._under_way[parcel] = None
            self._spawn(self._carry_when_free(parcel, slots))

    def _carry(self, parcel: Parcel, slots: Slots) -> None:
        """Carry a parcel that has a slot."""
        self._under_way.setdefault(parcel, None)
        self._sender.carry(parcel, partial(self._ended, slots))

    async def _carry_when_free(self, parcel: Parcel, slots: Slots) -> None:
        try:
            await slots.take(parcel.deadline)
        except TimeoutError:
            parcel.rows.fail(self._sender.given_up(parcel))
            self.on_free(parcel.rows.held_bytes)
            self._over(parcel)
            return
        self._carry(parcel, slots)

    def _ended(self, slots: Slots, parcel: Parcel, split: Split) -> None:
        slots.give()
        self.on_free(parcel.rows.held_bytes)
        if split:
            # Split parcels need no slot, because refusals are rare.
            self._spawn(self._carry_split(parcel, split))
        else:
            self._over(parcel)
        for lane in (self._plain, self._keyed):
            if slots in (lane.slots, self._pieces):
                lane.flush()

    async def _carry_split(self, parcel: Parcel, split: Split) -> None:
        """Carry the parts that a parcel was split into; the parcel ends with them."""
        await asyncio.gather(*(self._carry_part(part, wait_s) for part, wait_s in split))
        self._over(parcel)

    async def _carry_part(self, parcel: Parcel, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        ended: asyncio.Future[Split] = self._loop.create_future()
        self._sender.carry(parcel, lambda _, split: ended.set_result(split))
        await asyncio.gather(*(self._carry_part(part, part_wait_s) for part, part_wait_s in await ended))

    def _over(self, parcel: Parcel) -> None:
        end = self._under_way.pop(parcel)
        if end is not None and not end.done():
            end.set_result(None)

    def _spawn(self, waiting: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(waiting)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Lane:
    """Single sends that share batches, until these leave."""

    def __init__(
        self, sender: Sender, linger_s: float, leave: Callable[[Parcel, Slots], None], unheard: Unheard
    ) -> None:
        self.gathering = Gathering(unheard)
        self.look_at = 1  # `look` is called when this many rows are gathered.
        self.slots = Slots(lambda: SINGLES_UNDER_WAY * max(1, len(sender.groups)))
        self._sender = sender
        self._linger_s = linger_s
        self._leave = leave
        self._unheard = unheard
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None  # Set while anything is gathered.

    def look(self) -> None:
        """Decide when the gathering leaves, at its first row and whenever it has become much larger."""
        count = self.gathering.count
        if count >= ROWS_TARGET or self.gathering.held_bytes >= BYTES_TARGET:
            self.close_gathering()
        elif count >= CROWD_ROWS:
            self.look_at = ROWS_TARGET
            if self.slots.free:
                self.close_gathering()
        elif count >= COMPANY_ROWS:
            self.look_at = CROWD_ROWS
            if self.slots.free:
                self._set_timer(self._loop.call_soon(self.flush))
        else:
            self.look_at = COMPANY_ROWS
            if self.slots.taken:
                self._set_timer(self._loop.call_later(self._linger_s, self.flush))
            else:
                self._set_timer(self._loop.call_soon(self.flush))

    def _set_timer(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def flush(self) -> None:
        """Send what is gathered, if it may leave now."""
        self._set_timer(None)
        if not self.gathering.count:
            return
        if self.slots.free:
            self.close_gathering()
        else:
            self._set_timer(self._loop.call_later(CLOSE_GATHERING_MS / 1000, self.close_gathering))

    def close_gathering(self) -> None:
        """End the gathering: it leaves when it has a slot, and its time limit begins now."""
        self._set_timer(None)
        self.look_at = 1
        parcel = self._sender.parcel(self.gathering)
        self.gathering = Gathering(self._unheard)
        self._leave(parcel, self.slots)


def _nobody_waits(_: int) -> None:
    """Nothing was queued by single sends."""
