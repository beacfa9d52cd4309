"""Walks at several delay servers: asked at the same time, one that fails keeps nobody from the others."""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np
import pytest

from delayd.client.sending.asking import AskedRows, MessageAsker, NewInstants
from delayd.client.sending.walking import Walked, Walker, bounds_of
from delayd.errors import ConnectionLost
from delayd.hours import INSTANT_MS_MAX
from delayd.log_id import LogId
from delayd.wire.ending import ANSWER, AnswerRows, CancelAnswer, RescheduleAnswer
from delayd.wire.finding import FOUND, Piece, Place, Window

FIRST, SECOND, THIRD = 0xA1, 0xB2, 0xC3
WINDOW = Window(b"orders", 0, INSTANT_MS_MAX)
DUE_MS = 1_900_000_000_000
SHIFT_MS = 1_000


class Servers:
    """Delay servers, each with its pending messages by sequence, in the place of those that a `MessageAsker` asks."""

    def __init__(self, rows: int, *log_ids: int, rows_of_piece: int = 2) -> None:
        self.pending = {log_id: dict.fromkeys(range(1, rows + 1), DUE_MS) for log_id in log_ids}
        self.away: set[int] = set()
        self.dies_after: dict[int, int] = {}  # Requests about messages that a server still answers.
        self.rows_of_piece = rows_of_piece
        self.meet = asyncio.Barrier(len(log_ids))
        self.met: set[int] = set()

    async def servers(self) -> list[int]:
        return list(self.pending)

    async def find(self, log_id: int, window: Window) -> Piece:
        if log_id not in self.met:
            self.met.add(log_id)
            # Nobody goes on before each server has been asked.
            await self.meet.wait()
        for _ in range(5):  # An answer takes some turns of the loop.
            await asyncio.sleep(0)
        self._check(log_id)
        pending = self.pending[log_id]
        until = window.until_sequence or max(pending) + 1
        left = [each for each in sorted(pending) if window.place.sequence < each < until]
        rows = np.zeros(len(left[: self.rows_of_piece]), FOUND)
        rows["sequence"] = left[: self.rows_of_piece]
        rows["deliver_at_ms"] = [pending[sequence] for sequence in left[: self.rows_of_piece]]
        place = Place(0, int(rows["sequence"][-1])) if len(left) > len(rows) else None
        return Piece(rows, 0, 0, until, place)

    async def cancel(self, asked: AskedRows) -> AnswerRows:
        log_id = self._asked(asked)
        for sequence in asked.asked.sequences.tolist():  # type: ignore[union-attr]
            del self.pending[log_id][sequence]
        return self._answers(asked, CancelAnswer.CANCELLED)

    async def reschedule(self, asked: AskedRows, instants: NewInstants) -> tuple[object, AnswerRows]:
        log_id = self._asked(asked)
        pending = self.pending[log_id]
        for sequence, due_ms in zip(asked.asked.sequences.tolist(), instants._when.tolist(), strict=True):  # type: ignore[union-attr]
            del pending[sequence]
            pending[max(pending, default=0) + 100] = due_ms
        return None, self._answers(asked, RescheduleAnswer.MOVED)

    def _asked(self, asked: AskedRows) -> int:
        assert asked.log_ids is not None
        log_id = int(asked.log_ids[0])
        self._check(log_id)
        if log_id in self.dies_after:
            self.dies_after[log_id] -= 1
            if self.dies_after[log_id] < 0:
                self.away.add(log_id)
        self._check(log_id)
        return log_id

    def _check(self, log_id: int) -> None:
        if log_id in self.away:
            raise ConnectionLost("it is away", sent=True)

    def _answers(self, asked: AskedRows, answer: int) -> AnswerRows:
        rows = np.zeros(asked.row_count, ANSWER)
        rows["answer"] = answer
        return rows


def _walker(servers: Servers) -> Walker:
    return Walker(cast(MessageAsker, servers))


def test_all_servers_are_asked_at_the_same_time() -> None:
    async def story() -> None:
        servers = Servers(5, FIRST, SECOND, THIRD)
        walked = await asyncio.wait_for(_walker(servers).cancel(WINDOW, dry_run=False, progress=None), 60)
        assert walked == Walked(found=15, done=15)
        assert not any(servers.pending.values())

    asyncio.run(story())


def test_a_server_that_is_away_is_named_and_the_others_work_is_told() -> None:
    async def story() -> None:
        servers = Servers(5, FIRST, SECOND, THIRD)
        servers.away = {SECOND}
        with pytest.raises(ConnectionLost) as raised:
            await _walker(servers).cancel(WINDOW, dry_run=False, progress=None)
        details = raised.value.details
        assert (details["servers"], details["found"], details["done"]) == (str(LogId(SECOND)), 10, 10)
        assert [len(rows) for rows in servers.pending.values()] == [0, 5, 0]

    asyncio.run(story())


@pytest.mark.parametrize("requests", range(4))
def test_a_move_that_failed_goes_on_by_its_error_and_moves_nothing_twice(requests: int) -> None:
    async def story() -> None:
        servers = Servers(5, FIRST, SECOND)
        servers.dies_after = {SECOND: requests}
        walker, resume, done = _walker(servers), "", 0
        if requests < 3:
            with pytest.raises(ConnectionLost) as raised:
                await walker.reschedule(WINDOW, SHIFT_MS, {}, dry_run=False, progress=None)
            resume, done = str(raised.value.details["resume"]), int(raised.value.details["done"])
            assert done == 5 + 2 * requests
        servers.away, servers.dies_after = set(), {}
        walked = await walker.reschedule(WINDOW, SHIFT_MS, bounds_of(resume), dry_run=False, progress=None)
        assert walked.resume == "" and done + walked.done == 10
        assert all(set(rows.values()) == {DUE_MS + SHIFT_MS} for rows in servers.pending.values())

    asyncio.run(story())


def test_a_progress_that_raises_stops_the_walk_at_all_servers() -> None:
    async def story() -> None:
        servers = Servers(9, FIRST, SECOND, THIRD)
        told: list[Walked] = []

        def progress(walked: Walked) -> None:
            told.append(walked)
            if len(told) == 2:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await _walker(servers).cancel(WINDOW, dry_run=False, progress=progress)
        left = sum(map(len, servers.pending.values()))
        for _ in range(100):
            await asyncio.sleep(0)
        assert sum(map(len, servers.pending.values())) == left > 0
        assert len(told) <= 4, "only answers that were there already are told"

    asyncio.run(story())
