"""Requests by key: a key names the newest row that took it, whatever happens while the request is under way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from delayd.delay.ending.requested import RequestWish
from delayd.errors import DelaydError
from delayd.testing.clock import START_MS
from delayd.wire.asked import (
    AnswerRows,
    CancelAnswer,
    RescheduleAnswer,
)
from tests.unit.delay.ending.keyed import REJECT, REPLACE, names, send, sent
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000
CANCELLED, DISPATCHED = CancelAnswer.CANCELLED, CancelAnswer.ALREADY_DISPATCHED
IN_FLIGHT, UNKNOWN = CancelAnswer.IN_FLIGHT, CancelAnswer.UNKNOWN


def ask(
    world: World, wish: RequestWish, keys: Sequence[bytes], wanted_at_ms: Sequence[int] | None = None
) -> list[AnswerRows | DelaydError]:
    """Ask, and hear the answer later in the list that is returned."""
    told: list[AnswerRows | DelaydError] = []

    def heard(what: AnswerRows | DelaydError) -> None:
        told.append(what)
        if wish is RequestWish.CANCEL and not isinstance(what, DelaydError):
            gone = what["sequence"].compress(what["answer"] == CANCELLED).tolist()
            world.outside.cancel_asked.update(gone)
            world.outside.cancelled.update(gone)

    instants = None if wanted_at_ms is None else np.array(wanted_at_ms, np.int64)
    world.core.asked.endings.ask_by_key(wish, names(keys, wanted_at_ms), heard, instants)
    return told


def answers(
    world: World, wish: RequestWish, keys: Sequence[bytes], wanted_at_ms: Sequence[int] | None = None
) -> AnswerRows:
    """Ask, and let everything happen that takes no time."""
    told = ask(world, wish, keys, wanted_at_ms)
    world.settle()
    (what,) = told
    assert not isinstance(what, DelaydError), what
    return what


def cancel(world: World, keys: Sequence[bytes]) -> list[CancelAnswer]:
    return [CancelAnswer(answer) for answer in answers(world, RequestWish.CANCEL, keys)["answer"].tolist()]


def end(world: World) -> None:
    world.drain(6 * HOUR_MS)
    world.check_books()
    world.check_sealing()


def test_a_request_by_key_waits_for_the_rows_of_its_own_commit() -> None:
    world = World()
    sent(world, wanted(1, 50_000, "first"), [b"a"], REJECT)
    world.send(wanted(1, 50_000, "plain"))  # Its commit is under way, so the next two share one.
    _, _, worker = world.executors()
    send(world, wanted(1, 60_000, "second"), [b"a"], REPLACE)
    told = ask(world, RequestWish.CANCEL, [b"a"])
    while worker.waiting or worker.ran:
        worker.run_one()
        worker.complete_one()
    assert world.core.asked.endings.requests.waiting and world.core.asked.endings.keyed_sends.waiting
    world.settle()
    (what,) = told
    assert not isinstance(what, DelaydError)
    assert int(what["sequence"][0]) == 3 and what["answer"][0] == CANCELLED
    end(world)


@pytest.mark.parametrize("wish", [RequestWish.CANCEL, RequestWish.MOVE])
def test_rule_B2_a_key_that_each_commit_takes_holds_up_no_request_about_other_messages(wish: RequestWish) -> None:
    world = World()
    sent(world, wanted(1, 50_000, "hot"), [b"hot"], REJECT)
    world.send(wanted(2, 50_000, "other"))
    world.settle()
    commit, _, worker = world.executors()
    world.send(wanted(1, 50_000, "plain"))
    told = ask(world, wish, [b"hot"], [START_MS + 70_000] if wish is RequestWish.MOVE else None)
    others: list[list[list[CancelAnswer]]] = []
    row = world.receipts("other")
    for number in range(20):
        # The next commit has a row with the key, too: it is looked up while this one is written.
        send(world, wanted(1, 60_000, f"hot{number}"), [b"hot"], REPLACE)
        if number < 2:
            others.append(world.cancel(row.take([number])))
        worker.run_all()
        commit.step()
        worker.run_all()
        if told:
            break
    assert 3 < number < 12, "it waits for some of the commits"
    assert [answers for each in others for answers in each] == [[CANCELLED], [CANCELLED]]
    (what,) = told
    assert not isinstance(what, DelaydError)
    # What has waited long enough is decided before the rows of a commit; a move can only be asked for again.
    assert what["answer"].tolist() == [CANCELLED if wish is RequestWish.CANCEL else RescheduleAnswer.IN_FLIGHT]
    end(world)
