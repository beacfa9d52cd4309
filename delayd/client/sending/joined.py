"""Joined questions: those about single messages that wait for room at one server travel together.

Invariant: each caller hears what it would have heard alone. When a joined request fails as a whole, because one of its
questions spoils it or because its sender was cancelled, each question is asked alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from delayd.errors import DelaydError
from delayd.wire.ending import AnswerRows, Asked, AskedKeys
from delayd.wire.requests import RequestType

JOINED_MAX = 4_096  # Questions in one request.

Kind = tuple[RequestType, int, bytes]  # What is asked, of which server, about which subject's keys.
Ask = Callable[[RequestType, int, Asked | AskedKeys, float], Awaitable[AnswerRows]]


@dataclass(slots=True)
class _Question:
    """One question, which has one row."""

    asked: Asked | AskedKeys
    deadline: float
    answer: asyncio.Future[AnswerRows | None] = field(init=False)  # None: ask alone.
    taken: bool = False

    def __post_init__(self) -> None:
        self.answer = asyncio.get_running_loop().create_future()


class Joined:
    """The questions that wait, of one producer; belongs to one loop."""

    def __init__(self, room: asyncio.Semaphore, ask: Ask) -> None:
        self._room = room
        self._ask = ask
        self._waiting: dict[Kind, list[_Question]] = {}

    async def ask(self, request: RequestType, log_id: int, asked: Asked | AskedKeys, deadline: float) -> AnswerRows:
        """Ask about one message."""
        kind = (request, log_id, asked.subject if isinstance(asked, AskedKeys) else b"")
        question = _Question(asked, deadline)
        self._waiting.setdefault(kind, []).append(question)
        try:
            async with self._room:
                # Whoever gets room first asks for all that wait.
                while not question.taken:
                    await self._ask_together(kind)
            answer = await question.answer
        finally:
            if not question.taken:
                self._take_out(kind, [question])
        if answer is None:
            async with self._room:
                return await self._ask(request, log_id, asked, deadline)
        return answer

    async def _ask_together(self, kind: Kind) -> None:
        request, log_id, _ = kind
        questions = self._waiting[kind][:JOINED_MAX]
        self._take_out(kind, questions)
        for question in questions:
            question.taken = True
        rows: AnswerRows | None = None
        try:
            together = _join([question.asked for question in questions])
            rows = await self._ask(request, log_id, together, max(question.deadline for question in questions))
        except DelaydError:
            # Of several questions each is asked alone now, and hears its own error. A bug of ours is raised here.
            if len(questions) == 1:
                raise
        finally:
            for number, question in enumerate(questions):
                if not question.answer.done():
                    question.answer.set_result(None if rows is None else rows[number : number + 1])

    def _take_out(self, kind: Kind, questions: Sequence[_Question]) -> None:
        gone = set(map(id, questions))
        left = [question for question in self._waiting[kind] if id(question) not in gone]
        if left:
            self._waiting[kind] = left
        else:
            del self._waiting[kind]


def _join(asked: Sequence[Asked | AskedKeys]) -> Asked | AskedKeys:
    """Make one question of those of one kind."""
    first = asked[0]
    if isinstance(first, AskedKeys):
        return AskedKeys(first.subject, [key for each in asked if isinstance(each, AskedKeys) for key in each.keys])
    rows = [each for each in asked if isinstance(each, Asked)]
    return Asked(*(np.concatenate(columns) for columns in zip(*rows, strict=True)))
