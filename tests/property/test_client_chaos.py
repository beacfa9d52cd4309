"""Two delay servers that drop connections, refuse and stall at random: each send is kept once or known not to be.

What a receipt names is there once, what failed with OutcomeUnknown at most once, and what failed otherwise is not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from delayd import AsyncProducer, Receipt
from delayd.errors import HourFull, OutcomeUnknown, SlowDown
from delayd.net.connection import Connection
from delayd.wire.frame import Frame
from tests.unit.client.servers import SmallDelay, drop_after, drop_before, rows_of
from tests.unit.client.servers import refuse as refused
from tests.unit.client.world import PAST_MS, World, on_loop

Step = Callable[[Connection, Frame], bool]
SENDS = 60
STEPS = ("accept", "drop before", "drop after", "later", "first row", "later for the first row", "restart")


def step_of(name: str, delay: SmallDelay) -> Step:
    if name == "drop before":
        return drop_before
    if name == "drop after":
        return drop_after(delay)
    if name == "later":
        return refused(delay, SlowDown("later", retry_after_ms=2), [])
    if name == "first row":
        return refused(delay, HourFull("that hour is full"), [0])
    if name == "later for the first row":
        return refused(delay, SlowDown("later", retry_after_ms=2), [0])
    if name == "restart":
        return lambda connection, frame: drop_all(delay)
    return lambda connection, frame: False


def drop_all(delay: SmallDelay) -> bool:
    delay.drop_connections()
    return True


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(STEPS), max_size=25),
    st.lists(st.sampled_from(STEPS), max_size=25),
    st.lists(st.integers(0, 9), min_size=SENDS, max_size=SENDS),
)
def test_rule_I3_every_send_is_kept_once_or_known_not_to_be(
    first: list[str], second: list[str], pauses: list[int]
) -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        world.delay.script.extend(step_of(name, world.delay) for name in first)
        other.script.extend(step_of(name, other) for name in second)
        async with AsyncProducer(world.address, timeout_ms=10_000, linger_ms=1) as producer:
            sends: list[asyncio.Future[Receipt]] = []
            for row, pause in enumerate(pauses):
                sends.append(producer.send(f"s{row % 3}", b"%d" % row, deliver_at_ms=PAST_MS + row))
                for _ in range(pause):
                    await asyncio.sleep(0)
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
        places = {
            (delay.log_id, sequence): body
            for delay in (world.delay, other)
            for kept in delay.kept
            for sequence, (_, body, _) in enumerate(rows_of(kept.batch), int(str(kept.result["base_sequence"])))
        }
        times = Counter(places.values())
        assert len(places) == len(world.delay.rows) + len(other.rows)
        for row, outcome in enumerate(outcomes):
            body = b"%d" % row
            if isinstance(outcome, Receipt):
                assert places[outcome.log_id, outcome.sequence] == body and times[body] == 1
                assert outcome.deliver_at_ms == PAST_MS + row
            elif isinstance(outcome, OutcomeUnknown):
                assert times[body] <= 1
            else:
                assert isinstance(outcome, HourFull) and times[body] == 0

    on_loop(scenario)
