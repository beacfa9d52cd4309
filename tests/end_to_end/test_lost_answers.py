"""Answers that get lost on the way: the same request, sent again, is answered as the first time and changes nothing
(docs/keys.md, Tries). The client is written from docs/protocol.md alone.
"""

import struct
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.waiting import wait_until

from .raw_client import CANCEL, GET, RESCHEDULE, SEND, Answer, Head, Raw, asked, batch, frame, listed
from .up_process import Up, up

HOUR_MS = 3_600_000
MOVED, CANCELLED = 1, 1
PENDING, IN_FLIGHT, IS_CANCELLED = 1, 2, 7
NUMBERS = {"asker": 0xA5A5, "low_water": 1}

_numbers = count(1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder: Path = tmp_path_factory.mktemp("lost")
    with up(folder, "--port", "0") as running:
        yield running.until_ready()


class Row(NamedTuple):
    """What an answer says of a message."""

    answer: int
    state: int
    receipt: tuple[int, int, int]


def row_of(answer: Answer) -> Row:
    """The only row of an answer to CANCEL, GET or RESCHEDULE."""
    assert answer.code is None, answer
    said, state, due_ms, sequence, accepted_ms = struct.unpack("<BB6xq48xQq", answer.body)
    return Row(said, state, (sequence, due_ms, accepted_ms))


class Message:
    """A message, and callers who ask about it; each time by a connection of its own."""

    def __init__(self, servers: Up) -> None:
        self._servers = servers
        self.due_ms = int(time.time() * 1000) + 5 * HOUR_MS
        with self._connection() as raw:
            answer = raw.ask(SEND, {}, batch(next(_numbers), 1, due_ms=self.due_ms))
        (result,) = listed(answer.head, "results")
        self.receipt = (result["base_sequence"], self.due_ms, result["appended_at_ms"])
        self._log_id = answer.head["log_id"]

    def ask(self, kind: int, more: Head, wanted_at_ms: int | None = None) -> Answer:
        """Ask about the message by its first receipt."""
        with self._connection() as raw:
            return raw.ask(kind, {"log_id": self._log_id, **more}, asked(self.receipt, wanted_at_ms=wanted_at_ms))

    def move(self, more: Head, wanted_at_ms: int) -> Row:
        """Move it."""
        return row_of(self.ask(RESCHEDULE, more, wanted_at_ms))

    def loses_answer(self, kind: int, more: Head, wanted_at_ms: int | None = None) -> None:
        """Ask, and break the connection before the answer is read."""
        with self._connection() as raw:
            raw.write(frame(kind, 7, {"log_id": self._log_id, **more}, asked(self.receipt, wanted_at_ms=wanted_at_ms)))
            # While its commit is under way, the message is in flight.
            under_way = [(state, self.due_ms) for state in (PENDING, IN_FLIGHT)]
            wait_until(lambda: self.now() not in under_way, "the request is done")

    def now(self) -> tuple[int, int]:
        """The state of the message, and when it is due."""
        row = row_of(self.ask(GET, {}))
        return row.state, row.receipt[1]

    def _connection(self) -> Raw:
        return Raw(self._servers.ready("delay")[-1].endpoint.port)


def kill(servers: Up) -> None:
    """Kill the delay server, and wait for the next one."""
    ready = len(servers.ready("delay"))
    servers.kill("delay")
    servers.until(lambda: len(servers.ready("delay")) > ready, "the delay server is back")


@pytest.mark.parametrize("killed", [False, True])
def test_rule_I1_a_move_whose_answer_was_lost_undoes_no_later_move(servers: Up, killed: bool) -> None:
    message = Message(servers)
    ten, noon = message.due_ms + 5 * HOUR_MS, message.due_ms + 7 * HOUR_MS
    numbers = {**NUMBERS, "number": next(_numbers)}
    message.loses_answer(RESCHEDULE, numbers, ten)
    assert message.now() == (PENDING, ten)
    by_other = message.move({}, noon)
    assert (by_other.answer, by_other.receipt[1]) == (MOVED, noon)
    if killed:
        kill(servers)
    for _ in range(2):
        again = message.move(numbers, ten)
        assert (again.answer, again.state, again.receipt[1]) == (MOVED, PENDING, ten)
        assert again.receipt[0] < by_other.receipt[0]
        assert message.now() == (PENDING, noon), "the later move stands"
    assert message.move({**numbers, "number": next(_numbers)}, ten).answer == MOVED
    assert message.now() == (PENDING, ten), "another request is another move"


@pytest.mark.parametrize("killed", [False, True])
def test_a_cancel_whose_answer_was_lost_is_answered_as_the_first_time(servers: Up, killed: bool) -> None:
    message = Message(servers)
    message.loses_answer(CANCEL, {})
    first = message.ask(CANCEL, {})
    if killed:
        kill(servers)
    again = message.ask(CANCEL, {})
    assert row_of(again) == row_of(first)
    assert (row_of(again).answer, row_of(again).state) == (CANCELLED, IS_CANCELLED)
    assert again.body[16:24] == first.body[16:24], "the instant at which it was decided"


def test_a_number_comes_with_its_asker(servers: Up) -> None:
    message = Message(servers)
    wrong: list[Head] = [
        NUMBERS,
        {"number": 1},
        {"number": 1, "asker": 5},
        {**NUMBERS, "number": 1, "asker": 0},
        {**NUMBERS, "number": "1"},
    ]
    for head in wrong:
        assert message.ask(RESCHEDULE, head, message.due_ms + HOUR_MS).code == "bad_request", head
    assert message.now() == (PENDING, message.due_ms)
