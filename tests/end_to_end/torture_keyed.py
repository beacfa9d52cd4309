"""The users of a torture whose messages have keys: they send, cancel, move and ask, by key and by receipt.

Invariant: each user has keys and a producer of its own, and waits for an answer before it asks about the same key
again; so the ledger knows which answers are true.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from delayd import AsyncProducer, BatchFailed, CancelAnswer, Receipt, RescheduleAnswer, SendVerdict
from delayd.client.sending.receipts import Accepted as AcceptedBatch
from delayd.client.sending.receipts import Verdicts
from delayd.client.sending.send_options import OnConflict
from delayd.errors import DelaydError, InFlight, KeyPending, OutcomeUnknown, SendHandle
from delayd.wire.asked import AnswerRows

from .torture_cancel import HANG_S, outcome_of
from .torture_keys import Accepted, Asked, KeyLedger, Row
from .torture_ledger import Ledger

CONFLICTS: tuple[OnConflict, ...] = ("reject", "keep", "replace")
USERS = 16
TIMEOUTS_MS = (2_500, 30_000)  # Some give up within a restart, the others outlast it.
KEYS_MIN = 10  # Of a user.
MESSAGES_OF_A_KEY = 8  # In a round.
BY_KEY_SHARE = 0.5
CALLS = 6  # So many batches share what a user is to send in a round.
ROWS_MAX = 3_000
SINGLES = (1, 12)
MET_SHARE = 0.2  # Receipts of messages that met others are asked about more seldom.
RECENT = 2_000  # Receipts that a user keeps.
BODY_BYTES = (0, 60)
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
PAUSE_S = (0.0, 0.15)
AGAIN_S = 0.1
KNOWN_WITHIN_S = 90.0  # A server tries every 30 s to read an hour that it could not.
ASKED_MAX = 8_000


@dataclass
class KeyedUser:
    """One user: its keys, how many messages it still is to send, and the receipts that it keeps."""

    name: int
    producer: AsyncProducer
    keys: KeyLedger
    ledger: Ledger
    draw: random.Random
    left: int = 0
    rows_max: int = 1  # Of one call.
    keys_count: int = KEYS_MIN
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # All is sent.
    rests: asyncio.Event = field(default_factory=asyncio.Event)  # It waits for no answer.
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))

    def begin(self, messages: int) -> None:
        """Send so many more."""
        self.left += messages
        self.idle.clear()
        self.rows_max = min(ROWS_MAX, 2 * self.left // CALLS + 6)
        self.keys_count = max(self.keys_count, messages // MESSAGES_OF_A_KEY)

    async def act(self) -> None:
        """Do one thing, whatever the servers do."""
        roll = self.draw.random()
        if roll < 0.42:
            await self._send_batch(min(self.left, self.draw.randint(1, self.rows_max)))
        elif roll < 0.5:
            await self._send_singles(min(self.left, self.draw.randint(*SINGLES)))
        else:
            ask = self.draw.choice((self.cancel, self.move, self.get))
            await ask(self._draw_asked(self.draw.randint(1, self.rows_max)))

    # Sends.

    async def _send_batch(self, count: int) -> None:
        # Some keys more than once, so that rows of one batch meet each other.
        keys, conflict = [self._key() for _ in range(count)], self.draw.choice(CONFLICTS)
        numbers, bodies, instants = self._begin(keys, conflict)
        try:
            async with asyncio.timeout(HANG_S):
                receipt = await self.producer.send_batch(
                    self.keys.subject, bodies, np.array(instants), keys=keys, on_conflict=conflict
                )
        except BatchFailed as failed:
            # No row of these batches is refused alone, so there is one part, or one failure.
            self.ledger.broken(f"a batch was taken in part: {failed}")
        except DelaydError as error:
            await self._failed(numbers, error)
        else:
            for part in receipt.parts:
                self._told([numbers[row] for row in part.rows.tolist()], part.accepted)

    async def _send_singles(self, count: int) -> None:
        # Each key once, for nobody says in which order singles are decided.
        keys = sorted({self._key() for _ in range(count)})
        conflict = self.draw.choice(CONFLICTS)
        numbers, bodies, instants = self._begin(keys, conflict)
        producer, subject = self.producer, self.keys.subject
        async with asyncio.timeout(HANG_S):
            outcomes = await asyncio.gather(
                *(
                    producer.send(subject, body, deliver_at_ms=instant, key=key, on_conflict=conflict)
                    for body, instant, key in zip(bodies, instants, keys, strict=True)
                ),
                return_exceptions=True,
            )
        unknown: dict[SendHandle, list[int]] = {}
        for number, outcome in zip(numbers, outcomes, strict=True):
            if isinstance(outcome, OutcomeUnknown):
                self.ledger.fault(outcome)
                unknown.setdefault(outcome.handle, []).append(number)
            elif isinstance(outcome, BaseException):
                self._single_failed(number, outcome)
            else:
                self._single(number, outcome)
        for handle, together in unknown.items():
            # Nobody else sends with this producer, so these are the rows of the batch in which they travelled.
            await self._ask_outcome(together, handle)

    def _single(self, number: int, receipt: Receipt) -> None:
        name = (receipt.log_id, receipt.sequence)
        first = Accepted(name, receipt.accepted_at_ms)
        if receipt.kept:
            self.keys.met(number, SendVerdict.KEPT, None, Row(name, receipt.deliver_at_ms))
            return
        if receipt.replaced is None:
            self.keys.accepted(number, first, now_ms())
        else:
            self.keys.replaced(number, first, Row((receipt.log_id, receipt.replaced), None))
        self._recent.append(number)

    def _single_failed(self, number: int, error: BaseException) -> None:
        if isinstance(error, KeyPending):
            other = Row((error.log_id, error.sequence), error.deliver_at_ms)
            self.keys.met(number, SendVerdict.REJECTED, None, other)
        elif isinstance(error, InFlight):
            self.keys.met(number, SendVerdict.IN_FLIGHT, None, None)
        elif isinstance(error, DelaydError):
            self.ledger.fault(error)
            self.keys.refused(number)
        else:
            raise error

    async def _failed(self, numbers: Sequence[int], error: DelaydError) -> None:
        self.ledger.fault(error)
        if isinstance(error, OutcomeUnknown):
            await self._ask_outcome(numbers, error.handle)
        else:
            for number in numbers:
                self.keys.refused(number)

    async def _ask_outcome(self, numbers: Sequence[int], handle: SendHandle) -> None:
        accepted = await outcome_of(self.producer, handle, self.ledger)
        if accepted is not None:
            self._told(numbers, accepted)
            return
        for number in numbers:
            self.keys.refused(number)

    def _told(self, numbers: Sequence[int], accepted: AcceptedBatch) -> None:
        """What became of the rows of a batch, in their order."""
        verdicts, at_ms = Verdicts.of(accepted), now_ms()
        met_columns = (verdicts.verdict, verdicts.other, verdicts.other_at_ms)
        columns = zip(*(column.tolist() for column in met_columns), strict=True)
        for place, (number, (verdict, other, other_at_ms)) in enumerate(zip(numbers, columns, strict=True)):
            first = Accepted((accepted.log_id, accepted.base_sequence + place), accepted.accepted_at_ms)
            met = Row((accepted.log_id, other), other_at_ms)
            if verdict == SendVerdict.ACCEPTED:
                self.keys.accepted(number, first, at_ms)
            elif verdict == SendVerdict.REPLACED:
                self.keys.replaced(number, first, met)
            else:
                self.keys.met(number, SendVerdict(verdict), first, met)
            if verdict in (SendVerdict.ACCEPTED, SendVerdict.REPLACED) or self.draw.random() < MET_SHARE:
                self._recent.append(number)

    def _begin(self, keys: Sequence[str], conflict: OnConflict) -> tuple[list[int], list[bytes], list[int]]:
        self.left -= len(keys)
        instants = draw_instants(self.draw, len(keys))
        sent = [
            self.keys.send(key, conflict, instant, self.draw.randint(*BODY_BYTES))
            for key, instant in zip(keys, instants, strict=True)
        ]
        return [number for number, _ in sent], [body for _, body in sent], instants

    # Cancels, moves and questions.

    async def cancel(self, asked: Asked) -> bool:
        """Cancel messages; whether an answer came."""
        for number in asked.numbers:
            self.keys.cancelling(number)
        try:
            async with asyncio.timeout(HANG_S):
                answers = await self.producer.cancel_batch(self.keys.subject, receipt=asked.receipts, keys=asked.keys)
        except DelaydError as error:
            self.ledger.fault(error)
            for number, key in asked.each():
                self.keys.cancel_lost(number, key)
            return False
        at_ms = now_ms()
        for number, answer in zip(asked.numbers, answers.tolist(), strict=True):
            self.keys.cancel_answered(number, CancelAnswer(answer), at_ms)
        return True

    async def move(self, asked: Asked) -> bool:
        """Move messages to other instants; whether an answer came."""
        instants = draw_instants(self.draw, len(asked.numbers))
        for number, instant in zip(asked.numbers, instants, strict=True):
            self.keys.moving(number, instant)
        try:
            async with asyncio.timeout(HANG_S):
                told = await self.producer.reschedule_batch(
                    self.keys.subject, receipt=asked.receipts, keys=asked.keys, deliver_at_ms=np.array(instants)
                )
        except DelaydError as error:
            self.ledger.fault(error)
            for (number, key), instant in zip(asked.each(), instants, strict=True):
                self.keys.move_lost(number, key, instant)
            return False
        at_ms = now_ms()
        names = zip(told.log_ids.tolist(), told.sequences.tolist(), strict=True)
        rows = [Row(name, due) for name, due in zip(names, told.deliver_at_ms.tolist(), strict=True)]
        for number, answer, instant, row in zip(asked.numbers, told.answers.tolist(), instants, rows, strict=True):
            self.keys.move_answered(number, RescheduleAnswer(answer), instant, row, at_ms)
        return True

    async def get(self, asked: Asked) -> AnswerRows | None:
        """Ask what became of messages; the answers, unless none came."""
        before = [number is not None and self.ledger.was_delivered(number) for number in asked.numbers]
        try:
            async with asyncio.timeout(HANG_S):
                rows = await self.producer.get_batch(self.keys.subject, receipt=asked.receipts, keys=asked.keys)
        except DelaydError as error:
            self.ledger.fault(error)
            return None
        at_ms = now_ms()
        for number, row, delivered in zip(asked.numbers, rows, before, strict=True):
            self.keys.state_answered(number, row, at_ms, delivered=delivered)
        return rows

    def _draw_asked(self, count: int) -> Asked:
        if self.draw.random() < BY_KEY_SHARE or not self._recent:
            return self.keys.by_keys(sorted({self._key() for _ in range(count)}))
        return self.keys.of_receipts(self.draw.sample(self._recent, min(count, len(self._recent))))

    def _key(self) -> str:
        return f"{self.name}/{self.draw.randrange(self.keys_count)}"


@dataclass
class KeyedUsers:
    """All users with keys of one torture."""

    meta: str
    ledger: Ledger
    keys: KeyLedger
    seed: int
    _users: list[KeyedUser] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _sending: asyncio.Event = field(default_factory=asyncio.Event)
    _over: bool = False

    async def __aenter__(self) -> Self:
        for name in range(USERS):
            producer = AsyncProducer(self.meta, timeout_ms=TIMEOUTS_MS[name % len(TIMEOUTS_MS)])
            draw = random.Random(f"{self.seed} keys {name}")
            user = KeyedUser(name, producer, self.keys, self.ledger, draw)
            user.rests.set()
            self._users.append(user)
            self._tasks.append(asyncio.get_running_loop().create_task(self._live(user)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._sending.set()
        for task in self._tasks:
            if error is not None:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def sent(self) -> None:
        """Wait until all have been sent."""
        while self.left:
            self.check()
            idle = [asyncio.ensure_future(user.idle.wait()) for user in self._users if user.left]
            await asyncio.wait([*idle, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for wait in idle:
                wait.cancel()

    @property
    def left(self) -> int:
        """How many messages are still to be sent."""
        return sum(user.left for user in self._users)

    def begin(self, messages: int) -> None:
        """Send so many more."""
        for user in self._users:
            user.begin(messages // len(self._users) + (user.name < messages % len(self._users)))

    def check(self) -> None:
        """Raise what ended a user that should go on."""
        for task in self._tasks:
            if task.done():
                task.result()

    def resume(self) -> None:
        """Go on."""
        self._sending.set()

    async def quiet(self) -> None:
        """Rest, and learn what became of each message that may be pending. The servers must be up."""
        self._sending.clear()
        try:
            async with asyncio.timeout(KNOWN_WITHIN_S):
                await asyncio.gather(*(user.rests.wait() for user in self._users))
                self.keys.is_quiet()
                numbers = self.keys.open_numbers()
                for at in range(0, len(numbers), ASKED_MAX):
                    await self._settle(numbers[at : at + ASKED_MAX])
        except TimeoutError:
            self.ledger.broken(f"{KNOWN_WITHIN_S:g} s after all was quiet, a question about keys has no answer")

    async def _settle(self, numbers: list[int]) -> None:
        """Ask until none of them is in flight, by key where that names it, and by receipt."""
        user = self._users[-1]
        newest = [number for number in numbers if self.keys.is_newest(number)]
        for left, asked_of in ((newest, self.keys.of_keys), (numbers, self.keys.of_receipts)):
            while left:
                rows = await user.get(asked_of(left))
                if rows is not None:
                    left = [
                        number for number, row in zip(left, rows, strict=True) if not self.keys.settled(number, row)
                    ]
                if left:
                    await asyncio.sleep(AGAIN_S)

    async def _live(self, user: KeyedUser) -> None:
        async with user.producer:
            while not self._over:
                await self._sending.wait()
                if not user.left:
                    user.idle.set()
                else:
                    user.rests.clear()
                    await user.act()
                    user.rests.set()
                await asyncio.sleep(user.draw.uniform(*PAUSE_S))


def draw_instants(draw: random.Random, count: int) -> list[int]:
    """Most within seconds, some all in one instant, some past due, and some in later hours."""
    at_ms = now_ms()
    together = at_ms + draw.randint(200, 4_000) if draw.random() < 0.25 else 0
    instants: list[int] = []
    for _ in range(count):
        roll = draw.random()
        if roll < 0.1:
            instants.append(at_ms + draw.randint(2 * HOUR_MS, 6 * HOUR_MS))
        elif roll < 0.16:
            instants.append(at_ms - draw.randint(0, 20_000))
        elif roll < 0.3:
            instants.append(at_ms + draw.randint(4_000, 15_000))
        else:
            instants.append(together or at_ms + draw.randint(50, 4_000))
    return instants


def now_ms() -> int:
    """By this machine's clock, which is the servers' too while no round steps that."""
    return int(time.time() * 1000)
