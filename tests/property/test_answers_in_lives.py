"""Every answer about a message agrees with what was seen outside, at each instant of random lives of a delay server.

The lives are those of `Chaos`: hours are loaded and sealed, checkpoints pass, disks fill, both sides die. After most
steps somebody asks what became of some messages, and lists what is pending. An answer may be true at any instant from
the question on, so it is held against what was outside at its two ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from delayd.errors import DelaydError
from delayd.outcome import MessageState
from delayd.wire.asked import AnswerRows
from tests.worlds.bugs import PLANTED_IN_ANSWERS
from tests.worlds.chaos import Chaos
from tests.worlds.delay import small_slots

SEEDS = 60
PARTS = 2
SEEDS_PLANTED = 120
ASKED = 0.4  # Of the steps, behind so many somebody asks.
DELIVERED = (MessageState.DISPATCHED,)
ENDED_HERE = (MessageState.CANCELLED, MessageState.REPLACED, MessageState.REJECTED, MessageState.KEPT)
OPEN = (MessageState.PENDING, MessageState.IN_FLIGHT)


class Asking(Chaos):
    """A life in which somebody asks all the time."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._chance = Random(seed ^ 0xA5)
        self._ends: dict[bytes, MessageState] = {}  # What messages were said to have ended as.
        self.told = 0

    def _do(self, name: str, step: Callable[[], None]) -> None:
        super()._do(name, step)
        if self._chance.random() < ASKED:
            self._ask()

    def _bodies(self) -> dict[int, bytes]:
        """By sequence, the bodies of accepted messages."""
        return {
            accepted.base_sequence + row: body
            for sent, accepted in self.world.outside.accepted.values()
            for row, (_, _, body) in enumerate(sent.wanted)
        }

    def _at_targets(self) -> set[bytes]:
        logs = [kept for target in self.world.outside.targets.values() for kept in target.log]
        return {body for kept in logs for body in kept.bodies}

    def _ask(self) -> None:
        world = self.world
        asked = world.some_receipts(self._chance)
        if asked is None:
            return
        bodies, before = self._bodies(), self._at_targets()
        names = [bodies[sequence] for sequence in asked.sequences.tolist()]
        try:
            world.server.get(asked, partial(self._heard, names, before, set(world.outside.cancelled)))
            world.list_pending(partial(self._listed, before, set(world.outside.cancelled)))
        except DelaydError as error:
            self.trace.append(f"not asked: {error}")

    def _heard(
        self, names: list[bytes], before: set[bytes], cancelled: set[int], what: AnswerRows | DelaydError
    ) -> None:
        if isinstance(what, DelaydError):
            return
        now, newest = self._at_targets(), what["sequence"].tolist()
        for name, state, sequence in zip(names, map(MessageState, what["state"].tolist()), newest, strict=True):
            self.told += 1
            self._check(name, state, sequence, before & now, now, cancelled)

    def _check(
        self, name: bytes, state: MessageState, sequence: int, stayed: set[bytes], now: set[bytes], cancelled: set[int]
    ) -> None:
        known = self._ends.get(name)
        assert state not in (MessageState.UNKNOWN, MessageState.MOVED), f"{name!r} was accepted, and is {state.name}"
        assert known in (None, state) or state is MessageState.IN_FLIGHT, f"{name!r} is {known}, then {state.name}"
        if state is MessageState.PENDING:
            assert name not in stayed, f"{name!r} is PENDING, and a target has it"
            assert sequence not in cancelled, f"{name!r} is PENDING, and was answered CANCELLED"
        elif state in DELIVERED:
            assert name in now, f"{name!r} is DISPATCHED, and no target has it"
        elif state in ENDED_HERE:
            assert name not in now, f"{name!r} is {state.name}, and a target has it"
        if state not in OPEN:
            self._ends[name] = state

    def _listed(self, before: set[bytes], cancelled: set[int], listed: list[int]) -> None:
        bodies, stayed = self._bodies(), before & self._at_targets()
        for sequence in listed:
            body = bodies.get(sequence)
            assert sequence not in cancelled, f"row {sequence} is listed, and was answered CANCELLED"
            assert body is None or body not in stayed, f"{body!r} is listed, and a target has it"

    def _heal(self) -> None:
        super()._heal()
        world = self.world
        asked = world.all_receipts()
        if asked is None:
            return
        bodies, now = self._bodies(), self._at_targets()
        told = world.states(asked)
        for sequence, state in zip(asked.sequences.tolist(), told, strict=True):
            body = bodies[sequence]
            wanted = DELIVERED if body in now else ENDED_HERE
            assert state in wanted, (
                f"{body!r} is {state.name} in the end, and {'' if body in now else 'no '}target has it"
            )
            assert self._ends.get(body, state) is state, f"{body!r} was {self._ends[body].name}, and is {state.name}"


def lives(seeds: range) -> int:
    told = 0
    with small_slots():
        for seed in seeds:
            life = Asking(seed)
            life.run()
            told += life.told
    return told


@pytest.mark.parametrize("part", range(PARTS))
def test_each_answer_is_true_at_some_instant_between_question_and_answer(part: int) -> None:
    told = lives(range(part, SEEDS, PARTS))
    assert told > 10 * SEEDS // PARTS, "somebody must have been answered"


@pytest.mark.parametrize("name", PLANTED_IN_ANSWERS)
def test_an_answer_that_is_not_derived_from_all_that_is_known_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in PLANTED_IN_ANSWERS[name]:
        monkeypatch.setattr(*bug)
    with pytest.raises(AssertionError, match="seed "):
        lives(range(SEEDS_PLANTED))
