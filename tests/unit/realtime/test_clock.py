"""The clock of a realtime server, and an operator's word about it."""

from delayd.wire.requests import RequestType

from .world import SimPeer, World

HOUR_MS = 3_600_000


def test_rule_T1_an_operators_word_makes_a_clock_that_jumped_believed() -> None:
    world, peer = World(), SimPeer()
    before_ms = world.clock.now_ms()
    world.clock.step_wall(HOUR_MS)
    status, _ = world.ask(peer, RequestType.STATUS, {})
    assert (status["now_ms"], status["clock_confirmed"]) == (before_ms, False)
    answer, _ = world.ask(peer, RequestType.TRUST_CLOCK, {})
    assert answer == {"now_ms": before_ms + HOUR_MS}
    status, _ = world.ask(peer, RequestType.STATUS, {})
    assert (status["now_ms"], status["clock_confirmed"]) == (before_ms + HOUR_MS, True)
