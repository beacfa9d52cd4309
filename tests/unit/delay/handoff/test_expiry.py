"""Rule S8: what is undelivered when it expires ends as EXPIRED; nothing else does, and nothing of it is handed over."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ProducerPart
from delayd.batch.validate import check_expiry, refused_rows
from delayd.delay.producers import AcceptedBatch
from delayd.errors import BadExpiry, DelaydError
from delayd.hours import INSTANT_MS_MAX
from delayd.testing.clock import START_MS
from tests.batches import messages
from tests.worlds.delay import PRODUCER_ID, TARGET_IDS, World

TARGET = TARGET_IDS[0]


def _send(world: World, number: int, due: list[int], expires: list[int] | None) -> list[AcceptedBatch | DelaydError]:
    heard: list[AcceptedBatch | DelaydError] = []
    bodies = [b"%d-%d" % (number, row) for row in range(len(due))]
    data = messages(bodies, due=due, expires=expires, part=ProducerPart(PRODUCER_ID, number, 0))
    world.core.send(parse(data), lambda what, _: heard.append(what))
    world.settle()
    return heard


def test_many_expired_rows_do_not_keep_the_server_in_one_turn() -> None:
    world = World(frame_rows_max=10)
    world.pass_ms(100)
    world.crash_target(TARGET)
    now = world.clock.now_ms()
    for number in range(1, 11):
        _send(world, number, [now] * 50, [now + 1_000] * 50)
    world.pass_ms(20_000)
    world.outside.targets[TARGET].restart()
    ended = [world.core.standing.counters()["expired_rows"]]
    pump = type(world.core.handoff.dispatcher.links[TARGET].sender).pump

    def count(self: object, *rest: object) -> None:
        pump(self, *rest)  # type: ignore[arg-type]
        ended.append(world.core.standing.counters()["expired_rows"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world.core.handoff.dispatcher.links[TARGET].sender), "pump", count)
        world.pass_ms(10_000)
    assert ended[-1] == 500 and max(np.diff(ended)) <= 10


DUE = 2_000_000_000_000


def _batch(expires: list[int]) -> Batch:
    return parse(messages([b"x"] * len(expires), due=[DUE] * len(expires), expires=expires))


@pytest.mark.parametrize("wrong", [DUE, DUE - 1, 1, -1, -(2**63), INSTANT_MS_MAX + 1, 2**63 - 1])
def test_an_expiry_before_the_due_instant_is_refused_with_its_rows(wrong: int) -> None:
    world = World()
    (heard,) = _send(world, 1, [START_MS + 5_000] * 3, [0, START_MS + 5_000, START_MS + 5_001])
    assert isinstance(heard, BadExpiry) and refused_rows(heard) == [1]
    with pytest.raises(BadExpiry) as caught:
        check_expiry(_batch([0, wrong, DUE + 1, INSTANT_MS_MAX, wrong]), again=False)
    assert refused_rows(caught.value) == [1, 4]
