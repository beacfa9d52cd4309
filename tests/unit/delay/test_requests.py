"""Requests of a delay server: what is answered, and what is refused by name."""

from collections.abc import Callable

import pytest

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind, DispatchPart, ProducerPart
from delayd.delay.producers import Allowance, Waiter
from delayd.delay.requests import PIECE_BATCHES, Requests, split
from delayd.errors import BatchMalformed, UnknownRequest, UnknownServer
from delayd.testing.clock import START_MS
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import BATCHES_MAX
from tests.batches import messages
from tests.unit.delay.answers import Answers
from tests.worlds.delay import World

HOUR_MS = 3_600_000
DISPATCH = DispatchPart(1, 2, 3, 4, 5, 6, 7)


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
    with pytest.raises(UnknownRequest, match="a delay server does not serve PULL"):
        requests.received(Answers(), frame(RequestType.PULL))


def test_an_outcome_is_asked_of_the_server_that_was_sent_to(requests: Requests) -> None:
    head: Head = {"log_id": 5, "producer_id": 1, "producer_batch": 1}
    with pytest.raises(UnknownServer, match="ask 0000000000000005"):
        requests.received(Answers(), frame(RequestType.OUTCOME, head))


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


def test_a_body_of_several_batches_is_taken_batch_by_batch() -> None:
    batch = messages([b"a", b"b"])
    assert [each.count for each in split(batch + batch) if isinstance(each, Batch)] == [2, 2]


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (sent(9, START_MS + 900 * 24 * HOUR_MS), "past_horizon"),
        (sent(9, 5), "bad_instant"),
        (damaged(sent(9), 0), "batch_malformed"),  # The magic, the version, the kind, the flags.
        (damaged(sent(9), 4), "batch_malformed"),
        (damaged(sent(9), 5), "batch_malformed"),
        (damaged(sent(9), 6), "batch_malformed"),
        (damaged(sent(9), 12), "batch_malformed"),  # The count, the heap's place, checksums, the part, columns, heap.
        (damaged(sent(9), 17), "batch_malformed"),
        (damaged(sent(9), 30), "batch_malformed"),
        (damaged(sent(9), 36), "batch_malformed"),
        (damaged(sent(9), 41), "batch_malformed"),
        (damaged(sent(9), 90), "batch_malformed"),
        (damaged(sent(9), len(sent(9)) - 1), "batch_malformed"),
        (
            messages([b""], sequences=[1], kind=BatchKind.DISPATCH, part=DispatchPart(1, 2, 3, 4, 5, 6, 7)),
            "batch_malformed",
        ),
        (messages([b""], due=[START_MS], subjects=[b"a b"]), "bad_subject"),
        (messages([b""], due=[START_MS], headers=[b"\xc1"]), "bad_headers"),
        (messages([b""], due=[START_MS], headers=[bytes(40_000)]), "message_too_large"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_bad_batch_is_refused_by_name_and_its_neighbours_are_kept(
    world: World, requests: Requests, bad: bytes, code: str, place: int
) -> None:
    good = [sent(number) for number in (1, 2, 3)]
    results = results_of(world, requests, b"".join([*good[:place], bad, *good[place:]]))
    assert results[place]["error"] == code and results[place]["message"]
    del results[place]
    assert [result["base_sequence"] for result in results] == [1, 3, 5]
    assert [world.core.outcome(7, number) is not None for number in (1, 2, 3, 9)] == [True, True, True, False]


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


def outcome_of(requests: Requests, world: World, number: int) -> Answers:
    peer = Answers()
    head: Head = {"log_id": world.core.site.identity.log_id, "producer_id": 7, "producer_batch": number}
    requests.received(peer, frame(RequestType.OUTCOME, head))
    return peer


def test_rule_I6_an_outcome_is_answered_when_it_can_not_change_any_more(world: World, requests: Requests) -> None:
    sender = Answers()
    requests.received(sender, frame(RequestType.SEND, {}, sent(1)))
    asked = outcome_of(requests, world, 1)
    assert not asked.heads
    world.settle()
    assert asked.heads[0]["state"] == "accepted"
    (not_kept,) = outcome_of(requests, world, 2).heads
    assert not_kept["state"] == "unknown" and not_kept["result"] is None
    assert results_of(world, requests, sent(2))[0]["error"] == "batch_number_reused"
    assert "error" not in results_of(world, requests, sent(3))[0]


def test_rule_B1_a_connection_that_ends_leaves_nothing_behind(requests: Requests) -> None:
    for _ in range(10):
        peer = Answers()
        requests.received(peer, frame(RequestType.SEND, {}, sent(1)))
        requests.disconnected(peer)
    assert not requests.allowances
