"""Whoever cancels messages of a torture and asks about them, while servers die; what it hears goes into the ledger.

Invariant: an answer that never came says nothing. When all is quiet, each such message is asked about until it is known
what became of it.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from delayd import AsyncProducer, BatchReceipt, CancelAnswer, MessageState, Receipt
from delayd.client.sending.receipts import Accepted
from delayd.errors import DelaydError, SendHandle

from .torture_ledger import Ledger

RECEIPTS_MAX = 300  # The newest ones: most of their messages are not due yet, or just leave.
RECENT = 25  # Most are drawn from so many.
HANG_S = 120.0  # No call of a client may take longer, whatever its servers do, on a machine that is busy.
AGAIN_S = 0.05
KNOWN_WITHIN_S = 60.0  # A server tries every 30 s to read an hour that it could not.
ASKED_MAX = 60  # Receipts whose messages are asked about, each time that all is quiet.
SHARE = 0.5  # So many batches are cancelled a while after they were sent.


@dataclass(slots=True)
class _Known:
    """What a producer was given for some messages of one subject."""

    subject: str
    receipt: Receipt | BatchReceipt
    numbers: list[int]


@dataclass(slots=True)
class Canceller:
    """Cancels what was sent before."""

    ledger: Ledger
    _known: deque[_Known] = field(default_factory=lambda: deque(maxlen=RECEIPTS_MAX))
    _unanswered: list[_Known] = field(default_factory=list)

    def sent(self, subject: str, receipt: Receipt | BatchReceipt, numbers: list[int]) -> None:
        """Messages are kept; ``numbers`` are in the order of the receipt."""
        self._known.append(_Known(subject, receipt, numbers))

    async def cancel_some(self, producer: AsyncProducer, draw: random.Random) -> None:
        """Cancel the messages of some receipt, or ask what became of them."""
        if not self._known:
            return
        known = draw.choice(list(self._known)[-RECENT if draw.random() < 0.7 else 0 :])
        if draw.random() < SHARE:
            await self._cancel(producer, known)
        else:
            await self._ask(producer, known)

    async def quiet(self, producer: AsyncProducer, draw: random.Random) -> None:
        """Learn what became of each message whose cancel got no answer, and ask about some others."""
        unanswered, self._unanswered = self._unanswered, []
        try:
            async with asyncio.timeout(KNOWN_WITHIN_S):
                for known in unanswered:
                    await _until_known(self._cancel, producer, known)
                for known in draw.sample(list(self._known), min(len(self._known), ASKED_MAX)):
                    await _until_known(self._ask, producer, known)
        except TimeoutError:
            self.ledger.broken(f"{KNOWN_WITHIN_S:g} s after all was quiet, a cancel or a question has no answer")
        self._unanswered.clear()

    async def _cancel(self, producer: AsyncProducer, known: _Known) -> bool:
        """Cancel messages; whether each of them is known now to be cancelled or not."""
        self.ledger.cancelling(known.numbers)
        try:
            async with asyncio.timeout(HANG_S):
                if isinstance(known.receipt, Receipt):
                    answers = [await producer.cancel(known.subject, receipt=known.receipt)]
                else:
                    told = await producer.cancel_batch(known.subject, receipt=known.receipt)
                    answers = [CancelAnswer(answer) for answer in told.tolist()]
        except DelaydError as error:
            self.ledger.fault(error)
            self._unanswered.append(known)
            return False
        for number, answer in zip(known.numbers, answers, strict=True):
            self.ledger.cancel_answered(number, answer)
        flying = [
            number for number, answer in zip(known.numbers, answers, strict=True) if answer is CancelAnswer.IN_FLIGHT
        ]
        if not all(map(self.ledger.may_stay_in_flight, flying)):
            self._unanswered.append(known)
            return False
        return True

    async def _ask(self, producer: AsyncProducer, known: _Known) -> bool:
        """Ask what became of messages; whether an answer came."""
        # What is heard about a message while others cancel it may be old; what was known before may not.
        before = [self.ledger.sent[number].cancelled for number in known.numbers]
        try:
            async with asyncio.timeout(HANG_S):
                if isinstance(known.receipt, Receipt):
                    states = [(await producer.get(known.subject, receipt=known.receipt)).state]
                else:
                    told = await producer.get_batch(known.subject, receipt=known.receipt)
                    states = [MessageState(state) for state in told["state"].tolist()]
        except DelaydError as error:
            self.ledger.fault(error)
            return False
        for number, state, was in zip(known.numbers, states, before, strict=True):
            self.ledger.state_answered(number, state, cancelled_before=was)
        return True


async def outcome_of(producer: AsyncProducer, handle: SendHandle, ledger: Ledger) -> Accepted | None:
    """Learn what became of a batch whose outcome is unknown."""
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                return await producer.outcome(handle)
            except DelaydError as error:
                ledger.fault(error)
            await asyncio.sleep(AGAIN_S)


async def _until_known(
    ask: Callable[[AsyncProducer, _Known], Awaitable[bool]], producer: AsyncProducer, known: _Known
) -> None:
    # Nothing but the servers knows when the answer will be another one.
    while True:
        if await ask(producer, known):
            return
        await asyncio.sleep(AGAIN_S)
