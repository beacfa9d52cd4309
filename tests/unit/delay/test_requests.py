"""Requests of a delay server: what is answered, and what is refused by name."""

from collections.abc import Mapping

import pytest

from delayd.delay.requests import Requests, split
from delayd.errors import BatchMalformed, UnknownRequest, UnknownServer
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.requests import RequestType
from tests.batches import messages
from tests.delay_harness import World

HOUR_MS = 3_600_000


class Answers:
    """Keeps what a peer is told."""

    def __init__(self) -> None:
        self.heads: list[Head] = []

    def answer(self, request_id: int, head: Mapping[str, HeadValue]) -> None:
        self.heads.append(dict(head))


def frame(kind: int, head: Head | None = None, body: bytes = b"") -> Frame:
    return Frame(kind, 0, 1, head or {}, memoryview(body))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def requests(world: World) -> Requests:
    return Requests(world.core, world.clock, lambda: {"role": "delay"})


def test_rule_T1_an_operators_word_makes_a_clock_that_jumped_believed(world: World, requests: Requests) -> None:
    before_ms = world.clock.now_ms()
    world.clock.step_wall(HOUR_MS)
    assert world.clock.now_ms() == before_ms and not world.clock.confirmed
    peer = Answers()
    requests.received(peer, frame(RequestType.TRUST_CLOCK))
    assert peer.heads == [{"now_ms": before_ms + HOUR_MS}]
    assert world.clock.now_ms() == before_ms + HOUR_MS
    assert world.clock.restart_evidence().wall_ms == before_ms + HOUR_MS


def test_a_request_of_another_role_is_refused_by_name(requests: Requests) -> None:
    with pytest.raises(UnknownRequest, match="PULL is not served by a delay server"):
        requests.received(Answers(), frame(RequestType.PULL))


def test_an_outcome_is_asked_of_the_server_that_was_sent_to(requests: Requests) -> None:
    head: Head = {"log_id": 5, "producer_id": 1, "producer_batch": 1}
    with pytest.raises(UnknownServer, match="ask 0000000000000005"):
        requests.received(Answers(), frame(RequestType.OUTCOME, head))


def test_a_body_is_whole_producer_batches_or_nothing_of_it_is_taken() -> None:
    batch = messages([b"a", b"b"])
    assert [each.count for each in split(batch + batch)] == [2, 2]
    for body in (b"", batch[:-8], batch + bytes(8)):
        with pytest.raises(BatchMalformed):
            split(body)
