"""Lives: what the servers' headers of a message say of its earlier lives, and whose attempts are over (rule Q2)."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from delayd.client.pulling.acks import Handles
from delayd.client.pulling.message import MessageColumns, Pulled, PulledPart, comes_again, life_of
from delayd.client.pulling.options import ConsumerSettings
from delayd.client.pulling.words import Word, later, rejected
from delayd.errors import BadArgument
from delayd.limits import ORDERED_WAIT_MS_MAX


def over(attempt: int, most: int) -> str:
    """The reason of a dead letter whose attempts are over."""
    return f"its attempts are over: {attempt} of {most}"


def word_back(settings: ConsumerSettings, attempt: int, delay: timedelta | None, error: str) -> Word:
    """What a message that is given back after that attempt is to become."""
    word = later(delay, error, settings.backoff, attempt)
    most = settings.max_attempts
    if most is not None and attempt >= most:
        return rejected(over(attempt, most), error)
    if settings.ordered and word.delay_ms > ORDERED_WAIT_MS_MAX:
        # Here, because a server refuses all words of a request, those of other messages too.
        raise BadArgument(f"delay is {delay}; a message of an ordered group comes again after 24 hours at most")
    return word


def words_back(
    settings: ConsumerSettings, columns: MessageColumns, delay: timedelta | None, error: str
) -> list[tuple[Handles, Word]]:
    """The same for a batch, as few words as there are attempts: handles, and what their messages are to become."""
    by_attempt: dict[int, Handles] = {}
    attempts = columns.attempts.tolist()
    at = 0
    for part, handle in zip(columns.pulled.parts, columns.pulled.handles, strict=True):
        of_part = attempts[at : at + len(part.rows)]
        at += len(part.rows)
        if len(set(of_part)) == 1:
            by_attempt.setdefault(of_part[0], []).append(handle)
            continue
        incarnation, first, _, *place = handle
        for row, attempt in enumerate(of_part):
            by_attempt.setdefault(attempt, []).append([incarnation, first + row, 1, *place])
    return [(handles, word_back(settings, attempt, delay, error)) for attempt, handles in by_attempt.items()]


class Divided(NamedTuple):
    """An answer without the messages whose attempts are over, and these."""

    pulled: Pulled | None
    dead: list[tuple[Handles, Word]]


def divide(pulled: Pulled, most: int) -> Divided:
    """Take out of an answer the messages whose consumers have ended ``most`` times without a word."""
    kept: list[PulledPart] = []
    dead: list[tuple[Handles, Word]] = []
    for part in pulled.parts:
        for piece, attempt in _by_attempt(part):
            if attempt <= most:
                kept.append(piece)
            else:
                dead.append((pulled._replace(parts=(piece,)).handles, rejected(over(attempt - 1, most), "")))
    if not dead:
        return Divided(pulled, [])
    return Divided(pulled._replace(parts=tuple(kept)) if kept else None, dead)


def _by_attempt(part: PulledPart) -> list[tuple[PulledPart, int]]:
    """A part cut where the attempt changes, over all lives of its messages."""
    pieces: list[tuple[PulledPart, int]] = []
    if not comes_again(part.batch):
        return [(part, part.attempt)]
    for at, row in enumerate(part.rows):
        attempt = part.attempt + life_of(part.batch, row).attempts
        last = pieces[-1] if pieces else None
        if last is not None and last[1] == attempt:
            pieces[-1] = (last[0]._replace(rows=range(last[0].rows.start, row + 1)), attempt)
        else:
            pieces.append((part._replace(rows=range(row, row + 1), pull_first=part.pull_first + at), attempt))
    return pieces
