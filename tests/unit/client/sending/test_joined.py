"""Questions about single messages that wait for room travel together, and each caller hears what is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest

from delayd.client.sending.asking import Joined, Row
from delayd.errors import BadRequest, RequestTimedOut
from delayd.wire.ending import ANSWER, AnswerRows, Asked, AskedKeys
from delayd.wire.requests import RequestType

LOG_ID = 7


def about(sequence: int) -> Row:
    return sequence, 5, 6


class Server:
    """Answers each row with its own sequence, or with the length of its key, once it may."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.may = asyncio.Event()
        self.room = asyncio.Semaphore(1)
        self.joined = Joined(lambda log_id: self.room, self.ask)

    async def ask(self, request: RequestType, log_id: int, asked: Asked | AskedKeys, deadline: float) -> AnswerRows:
        values = [len(key) for key in asked.keys] if isinstance(asked, AskedKeys) else asked.sequences.tolist()
        self.requests.append(len(values))
        await self.may.wait()
        if 13 in values:
            raise BadRequest("13 is no number")
        rows = np.zeros(len(values), ANSWER)
        rows["other"] = values
        return rows

    async def cancel(self, asked: Row | AskedKeys) -> int:
        rows = await self.joined.ask(RequestType.CANCEL, LOG_ID, asked, 0.0)
        assert len(rows) == 1
        return int(rows["other"][0])


def play(story: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        await story(Server())

    asyncio.run(run())


async def begin(server: Server, asked: Sequence[Row | AskedKeys]) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(server.cancel(each)) for each in asked]
    await asyncio.sleep(0)
    return tasks


def test_those_that_wait_for_room_share_a_request() -> None:
    async def story(server: Server) -> None:
        tasks = await begin(server, [about(number) for number in range(100, 140)])
        server.may.set()
        assert await asyncio.gather(*tasks) == list(range(100, 140))
        # The first one had room at once, and so all that came in this turn went with it.
        assert sum(server.requests) == 40 and len(server.requests) <= 2

    play(story)


def test_keys_of_two_subjects_never_share_one() -> None:
    async def story(server: Server) -> None:
        asked = [AskedKeys(subject, [b"k" * length]) for length in (1, 2, 3) for subject in (b"one", b"two")]
        tasks = await begin(server, [about(1), *asked])
        server.may.set()
        assert await asyncio.gather(*tasks) == [1, 1, 1, 2, 2, 3, 3]
        assert sorted(server.requests) == [1, 3, 3]

    play(story)


def test_a_question_that_spoils_a_request_fails_alone() -> None:
    async def story(server: Server) -> None:
        tasks = await begin(server, [about(number) for number in (11, 12, 13, 14)])
        server.may.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[2], BadRequest)
        assert [answer for answer in answers if not isinstance(answer, BaseException)] == [11, 12, 14]

    play(story)


def test_whoever_goes_away_takes_nobody_along() -> None:
    async def story(server: Server) -> None:
        tasks = await begin(server, [about(number) for number in range(20, 30)])
        tasks[0].cancel()  # It asks for all of them.
        tasks[5].cancel()
        await asyncio.sleep(0)
        server.may.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [
            number in (0, 5) for number in range(10)
        ]
        assert [answer for answer in answers if isinstance(answer, int)] == [21, 22, 23, 24, 26, 27, 28, 29]

    play(story)


def test_whoever_goes_away_before_there_is_room_is_not_asked_for() -> None:
    async def story(server: Server) -> None:
        first = await begin(server, [about(1)])
        later = await begin(server, [about(2), about(3)])
        later[0].cancel()
        await asyncio.sleep(0)
        server.may.set()
        assert await first[0] == 1
        assert await later[1] == 3
        assert server.requests == [1, 1]

    play(story)


def test_an_error_about_one_question_reaches_its_caller() -> None:
    async def story(server: Server) -> None:
        async def late(*arguments: object) -> AnswerRows:
            raise RequestTimedOut("too late", sent=True)

        server.joined = Joined(lambda log_id: server.room, late)
        with pytest.raises(RequestTimedOut):
            await server.cancel(about(1))

    play(story)


def test_a_bug_of_our_own_reaches_all_callers() -> None:
    async def story(server: Server) -> None:
        async def broken(*arguments: object) -> AnswerRows:
            raise ZeroDivisionError

        server.joined = Joined(lambda log_id: server.room, broken)
        answers = await asyncio.gather(*(server.cancel(about(number)) for number in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ZeroDivisionError] * 3

    play(story)


def test_a_server_that_is_away_keeps_nobody_from_another_one() -> None:
    async def story(server: Server) -> None:
        rooms = {LOG_ID: asyncio.Semaphore(1), 8: asyncio.Semaphore(1)}

        async def ask(request: RequestType, log_id: int, asked: Asked | AskedKeys, deadline: float) -> AnswerRows:
            if log_id == LOG_ID:
                await server.may.wait()
            return np.zeros(len(asked[1]), ANSWER)

        server.joined = Joined(rooms.__getitem__, ask)
        held = [asyncio.create_task(server.joined.ask(RequestType.GET, LOG_ID, about(1), 0.0)) for _ in range(3)]
        await asyncio.sleep(0)
        assert len(await server.joined.ask(RequestType.GET, 8, about(1), 0.0)) == 1
        assert not any(task.done() for task in held)
        server.may.set()
        await asyncio.gather(*held)

    play(story)
