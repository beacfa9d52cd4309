"""Verdicts: what becomes of a message after its handler has ended, and the exceptions by which a handler says so."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum
from typing import NamedTuple

from delayd.client.limits import need_text, need_timedelta
from delayd.client.pulling.acks import DELAY_MAX
from delayd.errors import BadArgument, BadBody

ERROR_CHARACTERS_MAX = 2_000  # Of an exception's text; it travels with the message.


class Retry(Exception):
    """Raised by a handler: the message is to come again, after ``after`` or by the back-off of its handler.

    It counts as an attempt, as any other exception does.

    Example::

        raise delayd.Retry(after=timedelta(minutes=5), error="the bank asks to wait")
    """

    def __init__(self, after: timedelta | None = None, *, error: str = "") -> None:
        if after is not None and not timedelta(0) <= need_timedelta("after", after) <= DELAY_MAX:
            raise BadArgument(f"after is {after} and must lie within 0 and {DELAY_MAX.days} days")
        self.after = after
        self.error = need_text("error", error)
        super().__init__(error or ("again by its back-off" if after is None else f"again after {after}"))


class Reject(Exception):
    """Raised by a handler: the message can never be handled; it becomes a dead letter with this reason.

    Example::

        raise delayd.Reject("order 42 does not exist")
    """

    def __init__(self, reason: str) -> None:
        if not need_text("reason", reason):
            raise BadArgument("reason is empty; say why the message is rejected: Reject('no such order')")
        self.reason = reason
        super().__init__(reason)


class Kind(Enum):
    """What is done with a message."""

    ACK = "ack"
    NACK = "nack"
    REJECT = "reject"


class Verdict(NamedTuple):
    """What becomes of one message; ``delay`` None means the back-off."""

    kind: Kind
    delay: timedelta | None = None
    reason: str = ""
    error: str = ""


ACK = Verdict(Kind.ACK)


def verdict_of(error: BaseException) -> Verdict:
    """What becomes of a message whose handler has raised."""
    if isinstance(error, Retry):
        return Verdict(Kind.NACK, error.after, error=error.error)
    if isinstance(error, Reject):
        return Verdict(Kind.REJECT, reason=error.reason)
    if isinstance(error, BadBody):
        # Its bytes stay as they are, so another attempt would end in the same way.
        return Verdict(Kind.REJECT, reason=error.message, error=text_of(error))
    return Verdict(Kind.NACK, error=text_of(error))


def text_of(error: BaseException) -> str:
    """An exception in one line."""
    try:
        told = str(error)
    except Exception as untold:  # noqa: BLE001 - an exception of the user's may do anything when it is asked.
        told = f"its text can't be had: {type(untold).__name__}"
    return f"{type(error).__name__}: {told}"[:ERROR_CHARACTERS_MAX] if told else type(error).__name__
