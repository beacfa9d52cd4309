"""Joined questions: those about single messages that wait for room at one server travel together.

Invariant: each caller hears what it would have heard alone, whatever becomes of the others. When a joined request fails
as a whole, because one of its questions spoils it, each question is asked alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import numpy as np

from delayd.errors import DelaydError
from delayd.wire.ending import AnswerRows, Asked, AskedKeys
from delayd.wire.requests import RequestType

JOINED_MAX = 4_096  # Questions in one request.

# What is asked, of which server, about messages of which subject, and that again where receipts name the messages.
Kind = tuple[RequestType, int, bytes, bytes]
Row = tuple[int, int, int]  # The fields of `Asked`.

# Takes a request, a server, its rows and a deadline, and where receipts name the messages their subject.
Ask = Callable[..., Awaitable[AnswerRows]]


class _Question(NamedTuple):
    """One question, which has one row."""

    asked: Row | AskedKeys
    deadline: float
    answer: asyncio.Future[AnswerRows | None]  # None: ask alone.


class Joined:
    """The questions that wait, of one producer; belongs to one loop."""

    def __init__(self, room: Callable[[int], asyncio.Semaphore], ask: Ask) -> None:
        self._room = room  # Of a server.
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Kind, list[_Question]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def ask(
        self, request: RequestType, log_id: int, asked: Row | AskedKeys, deadline: float, subject: bytes = b""
    ) -> AnswerRows:
        """Ask about one message; ``subject`` is that of a receipt."""
        kind = (request, log_id, asked.subject if isinstance(asked, AskedKeys) else subject, subject)
        question = _Question(asked, deadline, self._loop.create_future())
        waiting = self._waiting.get(kind)
        if waiting is None:
            self._waiting[kind] = [question]
            self._serve(kind)
        else:
            waiting.append(question)
        answer = await question.answer
        if answer is None:
            async with self._room(log_id):
                return await self._ask(request, log_id, _join([asked]), deadline, *_given(subject))
        return answer

    def _serve(self, kind: Kind) -> None:
        """Ask all that wait as soon as there is room."""
        serving = self._loop.create_task(self._ask_together(kind))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _ask_together(self, kind: Kind) -> None:
        request, log_id, _, subject = kind
        questions: list[_Question] = []
        try:
            async with self._room(log_id):
                waiting = self._waiting.pop(kind)
                if len(waiting) > JOINED_MAX:
                    self._waiting[kind] = waiting[JOINED_MAX:]
                    self._serve(kind)
                # Whoever went away is not asked for.
                questions = [question for question in waiting[:JOINED_MAX] if not question.answer.done()]
                if not questions:
                    return
                together = _join([question.asked for question in questions])
                deadline = max(question.deadline for question in questions)
                rows = await self._ask(request, log_id, together, deadline, *_given(subject))
        except BaseException as error:
            # Of several questions each is asked alone now, and hears its own error.
            spoiled = len(questions) > 1 and isinstance(error, DelaydError)
            for question in questions or self._waiting.pop(kind, []):
                if question.answer.done():
                    continue
                if spoiled:
                    question.answer.set_result(None)
                elif isinstance(error, asyncio.CancelledError):
                    question.answer.cancel()
                else:
                    question.answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for number, question in enumerate(questions):
                if not question.answer.done():
                    question.answer.set_result(rows[number : number + 1])


def _given(subject: bytes) -> tuple[bytes, ...]:
    return (subject,) if subject else ()


def _join(asked: Sequence[Row | AskedKeys]) -> Asked | AskedKeys:
    """Make one question of those of one kind."""
    first = asked[0]
    if isinstance(first, AskedKeys):
        named = [each for each in asked if isinstance(each, AskedKeys)]
        keys = [key for each in named for key in each.keys]
        return AskedKeys(first.subject, keys, [number for each in named for number in each.numbers])
    sequences, due_ms, accepted_ms = zip(*asked, strict=True)
    return Asked(np.array(sequences, np.uint64), np.array(due_ms, np.int64), np.array(accepted_ms, np.int64))
