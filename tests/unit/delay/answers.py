"""A peer that asks a delay server and keeps its answers; what the server's files say became of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from delayd.batch.columns import Buffer
from delayd.delay.books.outcomes import list_dispatch_logs, read_outcomes
from delayd.errors import DelaydError
from delayd.log.segment import FileKind, open_segment
from delayd.outcome import Outcome
from delayd.wire.frame import Head, HeadValue
from tests.worlds.delay import World
from tests.worlds.files import FOLDER


class Answers:
    """Keeps what a peer is told."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self.bodies: list[bytes] = []

    def answer(self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = ()) -> None:
        self.heads.append(dict(head))
        self.bodies.append(b"".join(body))

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        raise error


def decided(world: World, action: str, id_: str) -> tuple[bool, str]:
    """Have an operator release or drop what is set aside; whether it was done, and what was said."""
    told: list[tuple[bool, str]] = []

    def hear(done: bool, text: str) -> None:
        told.append((done, text))

    (world.core.repair.decisions.release if action == "release" else world.core.repair.decisions.drop)(id_, hear)
    world.settle()
    (answer,) = told
    return answer


def outcomes(world: World) -> Counter[Outcome]:
    """How many rows got each outcome, as the dispatch logs say."""
    counted: Counter[Outcome] = Counter()
    for _, path in list_dispatch_logs(world.disk, FOLDER):
        rows = read_outcomes(
            open_segment(world.disk, path, FileKind.DISPATCH, world.core.site.identity.log_id, write=False)
        )
        assert len(np.unique(rows.sequences)) == len(rows.sequences), "a row has two outcomes"
        counted.update(Outcome(outcome) for outcome in rows.parts["outcome"][rows.part_of].tolist())
    return counted
