"""Requests of a delay server: what is answered, and what is refused by name."""

from collections.abc import Callable

import pytest

from delayd.batch.batch import Batch
from delayd.batch.columns import ProducerPart
from delayd.delay.producers import Allowance, Waiter
from delayd.delay.requests import PIECE_BATCHES, Requests
from delayd.errors import BatchMalformed
from delayd.testing.clock import START_MS
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import BATCHES_MAX
from tests.batches import messages
from tests.unit.delay.answers import Answers
from tests.worlds.delay import World

HOUR_MS = 3_600_000


def frame(kind: int, head: Head | None = None, body: bytes = b"") -> Frame:
    return Frame(kind, 0, 1, head or {}, memoryview(body))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def requests(world: World) -> Requests:
    return Requests(world.core, world.clock, lambda: {"role": "delay"})


def sent(number: int, due_ms: int = START_MS + HOUR_MS, rows: int = 2) -> bytes:
    return messages([b"x"] * rows, due=[due_ms] * rows, part=ProducerPart(7, number, 0))


def damaged(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 0x40
    return bytes(changed)


def results_of(world: World, requests: Requests, body: bytes) -> list[Head]:
    peer = Answers()
    requests.received(peer, frame(RequestType.SEND, {}, body))
    world.settle()
    (head,) = peer.heads
    return need_maps(head, "results")


def test_rule_B2_a_send_of_thousands_of_batches_is_taken_in_pieces_in_turn_with_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[Callable[[], None]] = []
    requests = Requests(world.core, world.clock, dict, turns.append)
    begun: list[int] = []
    taken = world.core.logs.intake.send

    def noted(batch: Batch, waiter: Waiter, allowance: Allowance | None = None) -> None:
        begun.append(batch.producer.producer_batch)
        taken(batch, waiter, allowance)

    monkeypatch.setattr(world.core.logs.intake, "send", noted)
    many, few = Answers(), Answers()
    requests.received(many, frame(RequestType.SEND, {}, b"".join(sent(number) for number in range(1, BATCHES_MAX + 1))))
    assert begun == list(range(1, PIECE_BATCHES + 1))
    requests.received(few, frame(RequestType.SEND, {}, sent(100_000)))
    while turns:
        before = len(begun)
        turns.pop(0)()
        assert len(begun) - before <= PIECE_BATCHES
    # The small one waited for two pieces, and not for sixty-four.
    assert begun.index(100_000) <= 3 * PIECE_BATCHES
    world.settle()
    assert [len(need_maps(head, "results")) for head in (*few.heads, *many.heads)] == [1, BATCHES_MAX]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        sent(1)[:-8],
        sent(1) + bytes(8),
        sent(1) + bytes(40),
        sent(1) + damaged(sent(2), 8),  # A length that leads nowhere.
        sent(1) + damaged(sent(2), 11),
        damaged(sent(1), 9) + sent(2),
        sent(1) * (BATCHES_MAX + 1),
    ],
)
def test_a_body_whose_lengths_do_not_chain_is_refused_whole(world: World, requests: Requests, body: bytes) -> None:
    with pytest.raises(BatchMalformed):
        requests.received(Answers(), frame(RequestType.SEND, {}, body))
    world.settle()
    assert world.core.outcome(7, 1) is None and world.core.logs.intake.next_sequence == 1


def test_a_send_takes_4096_batches(world: World, requests: Requests) -> None:
    body = b"".join(sent(number, rows=1) for number in range(1, BATCHES_MAX + 1))
    results = results_of(world, requests, body)
    assert [result["base_sequence"] for result in results] == list(range(1, BATCHES_MAX + 1))


def test_rule_B1_a_connection_that_ends_leaves_nothing_behind(requests: Requests) -> None:
    for _ in range(10):
        peer = Answers()
        requests.received(peer, frame(RequestType.SEND, {}, sent(1)))
        requests.disconnected(peer)
    assert not requests.allowances
