"""A peer that asks a delay server and keeps its answers."""

from __future__ import annotations

from collections.abc import Mapping

from delayd.errors import DelaydError
from delayd.wire.frame import Head, HeadValue
from tests.delay_harness import World


class Answers:
    """Keeps what a peer is told."""

    def __init__(self) -> None:
        self.heads: list[Head] = []

    def answer(self, request_id: int, head: Mapping[str, HeadValue]) -> None:
        self.heads.append(dict(head))

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        raise error


def decided(world: World, action: str, id_: str) -> tuple[bool, str]:
    """Have an operator release or drop what is set aside; whether it was done, and what was said."""
    told: list[tuple[bool, str]] = []

    def hear(done: bool, text: str) -> None:
        told.append((done, text))

    (world.core.release if action == "release" else world.core.drop)(id_, hear)
    world.settle()
    (answer,) = told
    return answer
