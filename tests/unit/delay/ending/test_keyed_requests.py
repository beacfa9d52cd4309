"""Requests by key: a key names the newest row that took it, whatever happens while the request is under way."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from delayd.delay.ending.requested import Wish
from delayd.delay.requests import Requests
from delayd.errors import BadRequest, DelaydError, DiskReserve, SlowDown
from delayd.testing.clock import START_MS
from delayd.testing.disk import Crash
from delayd.testing.tree import PowerLoss
from delayd.wire.ending import (
    AnswerRows,
    AskedKeys,
    CancelAnswer,
    MessageState,
    RescheduleAnswer,
    decode_answers,
    encode_asked_keys,
)
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import RequestType
from tests.unit.delay.answers import Answers
from tests.unit.delay.ending.keyed import ACCEPTED, REJECT, REPLACE, names, send, sent, verdicts
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000
SUBJECT = b"orders.eu"
CANCELLED, DISPATCHED = CancelAnswer.CANCELLED, CancelAnswer.ALREADY_DISPATCHED
IN_FLIGHT, UNKNOWN = CancelAnswer.IN_FLIGHT, CancelAnswer.UNKNOWN


def ask(
    world: World, wish: Wish, keys: Sequence[bytes], wanted_at_ms: Sequence[int] | None = None
) -> list[AnswerRows | DelaydError]:
    """Ask, and hear the answer later in the list that is returned."""
    told: list[AnswerRows | DelaydError] = []

    def heard(what: AnswerRows | DelaydError) -> None:
        told.append(what)
        if wish is Wish.CANCEL and not isinstance(what, DelaydError):
            gone = what["sequence"].compress(what["answer"] == CANCELLED).tolist()
            world.outside.cancel_asked.update(gone)
            world.outside.cancelled.update(gone)

    instants = None if wanted_at_ms is None else np.array(wanted_at_ms, np.int64)
    world.core.endings.ask_by_key(wish, names(keys, wanted_at_ms), heard, instants)
    return told


def answers(world: World, wish: Wish, keys: Sequence[bytes], wanted_at_ms: Sequence[int] | None = None) -> AnswerRows:
    """Ask, and let everything happen that takes no time."""
    told = ask(world, wish, keys, wanted_at_ms)
    world.settle()
    (what,) = told
    assert not isinstance(what, DelaydError), what
    return what


def cancel(world: World, keys: Sequence[bytes]) -> list[CancelAnswer]:
    return [CancelAnswer(answer) for answer in answers(world, Wish.CANCEL, keys)["answer"].tolist()]


def states(world: World, keys: Sequence[bytes]) -> list[MessageState]:
    return [MessageState(state) for state in answers(world, Wish.GET, keys)["state"].tolist()]


def end(world: World) -> None:
    world.drain(6 * HOUR_MS)
    world.check_books()
    world.check_sealing()


@pytest.mark.parametrize("due_ms", [5_000, HOUR_MS + 5_000, 40 * HOUR_MS])
@pytest.mark.parametrize("filed", [False, True])
@pytest.mark.parametrize("crashed", [False, True])
def test_rule_C1_a_row_is_cancelled_by_its_key_wherever_it_stands(due_ms: int, filed: bool, crashed: bool) -> None:
    world = World(load_ahead_ms=1_000)
    sent(world, wanted(3, due_ms, "row"), [b"a", b"b", b"c"], REJECT)
    if filed:
        world.checkpoint()
    if crashed:
        world = world.after_crash(PowerLoss.ALL_LOST)
    keys = [b"b", b"none", b"a", b"b"]
    assert states(world, keys) == [
        MessageState.PENDING,
        MessageState.UNKNOWN,
        MessageState.PENDING,
        MessageState.PENDING,
    ]
    assert cancel(world, keys) == [CANCELLED, UNKNOWN, CANCELLED, CANCELLED]
    assert cancel(world, [b"b"]) == [CANCELLED]
    assert states(world, keys) == [MessageState.CANCELLED, MessageState.UNKNOWN, *[MessageState.CANCELLED] * 2]
    assert sent(world, wanted(1, due_ms, "again"), [b"a"], REJECT) == [(ACCEPTED, 0)]
    assert states(world, [b"a", b"b"]) == [MessageState.PENDING, MessageState.CANCELLED]
    end(world.after_crash())
    end(world)
    assert cancel(world, [b"c", b"a", b"b"]) == [DISPATCHED, DISPATCHED, CANCELLED]


def test_a_key_names_the_newest_row_and_the_answer_its_receipt() -> None:
    world = World()
    sent(world, wanted(1, 50_000, "first"), [b"a"], REJECT)
    sent(world, wanted(1, 90_000, "second"), [b"a"], REPLACE)
    sent(world, wanted(1, 95_000, "third"), [b"a"], REJECT)
    (row,) = answers(world, Wish.GET, [b"a"])
    assert (int(row["sequence"]), int(row["deliver_at_ms"])) == (2, START_MS + 90_000)
    assert row["state"] == MessageState.PENDING
    assert cancel(world, [b"a"]) == [CANCELLED]
    assert world.states(world.receipts("second")) == [MessageState.CANCELLED]


def test_a_row_filed_in_a_later_hour_than_it_is_due_is_found_by_its_key() -> None:
    world = World()
    sent(world, wanted(1, -3 * HOUR_MS, "late"), [b"a"], REJECT)
    world.pass_ms(2_000)
    (row,) = answers(world, Wish.GET, [b"a"])
    assert row["state"] == MessageState.DISPATCHED
    assert int(row["accepted_at_ms"]) // HOUR_MS == START_MS // HOUR_MS


def test_rows_that_take_the_key_while_a_request_is_under_way_are_the_ones_that_count() -> None:
    world = World()
    sent(world, wanted(1, 50_000, "first"), [b"a"], REJECT)
    commit, _, worker = world.executors()
    second = send(world, wanted(1, 60_000, "second"), [b"a"], REPLACE)
    told = ask(world, Wish.CANCEL, [b"a", b"b"])
    while worker.waiting or worker.ran:
        worker.run_one()  # Both look-ups see the first row only.
        worker.complete_one()
    third = send(world, wanted(1, 60_000, "third"), [b"b"], REJECT)
    commit.run_one()
    world.settle()
    assert [verdicts(world, number)[0][0] != 0 for number in (second, third)] == [True, False]
    (what,) = told
    assert not isinstance(what, DelaydError)
    assert int(what["sequence"][0]) == 2 and what["answer"][0] == CANCELLED
    assert world.states(world.receipts("first", "second")) == [MessageState.REPLACED, MessageState.CANCELLED]
    assert not world.core.endings.taken_names._since and not world.core.endings.taken_names._watches


def test_a_request_by_key_waits_for_the_rows_of_its_own_commit() -> None:
    world = World()
    sent(world, wanted(1, 50_000, "first"), [b"a"], REJECT)
    world.send(wanted(1, 50_000, "plain"))  # Its commit is under way, so the next two share one.
    _, _, worker = world.executors()
    send(world, wanted(1, 60_000, "second"), [b"a"], REPLACE)
    told = ask(world, Wish.CANCEL, [b"a"])
    while worker.waiting or worker.ran:
        worker.run_one()
        worker.complete_one()
    assert world.core.endings.requests.waiting and world.core.endings.keyed_sends.waiting
    world.settle()
    (what,) = told
    assert not isinstance(what, DelaydError)
    assert int(what["sequence"][0]) == 3 and what["answer"][0] == CANCELLED
    end(world)


@pytest.mark.parametrize("wish", [Wish.CANCEL, Wish.MOVE])
def test_rule_B2_a_key_that_each_commit_takes_holds_up_no_request_about_other_messages(wish: Wish) -> None:
    world = World()
    sent(world, wanted(1, 50_000, "hot"), [b"hot"], REJECT)
    world.send(wanted(2, 50_000, "other"))
    world.settle()
    commit, _, worker = world.executors()
    world.send(wanted(1, 50_000, "plain"))
    told = ask(world, wish, [b"hot"], [START_MS + 70_000] if wish is Wish.MOVE else None)
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
    assert what["answer"].tolist() == [CANCELLED if wish is Wish.CANCEL else RescheduleAnswer.IN_FLIGHT]
    end(world)


def test_a_row_is_moved_by_its_key_and_the_moved_row_keeps_it() -> None:
    world = World()
    sent(world, wanted(2, 50_000, "row"), [b"a", b"b"], REJECT)
    moved = answers(world, Wish.MOVE, [b"a", b"none"], [START_MS + 70_000, START_MS + 80_000])
    assert moved["answer"].tolist() == [RescheduleAnswer.MOVED, RescheduleAnswer.UNKNOWN]
    assert int(moved["sequence"][0]) == 3
    assert sent(world, wanted(1, 50_000, "next"), [b"a"], REJECT)[0][1] == 3
    for life in (world, world.after_crash(PowerLoss.ALL_LOST)):
        life.checkpoint()
        (row,) = answers(life, Wish.GET, [b"a"])
        assert (int(row["sequence"]), row["state"]) == (3, MessageState.PENDING)
        again = answers(life, Wish.MOVE, [b"a"], [START_MS + 90_000])
        assert again["answer"].tolist() == [RescheduleAnswer.MOVED]
        assert cancel(life, [b"a"]) == [CANCELLED]


def test_one_key_can_not_be_wanted_at_two_instants() -> None:
    world = World()
    sent(world, wanted(1, 50_000, "row"), [b"a"], REJECT)
    told = ask(world, Wish.MOVE, [b"a", b"a"], [START_MS + 70_000, START_MS + 80_000])
    world.settle()
    assert isinstance(told[0], BadRequest)
    assert world.core.endings.requests._rows == 0 and not world.core.endings.taken_names._watches
    both = answers(world, Wish.MOVE, [b"x", b"y"], [START_MS + 70_000, START_MS + 80_000])
    assert both["answer"].tolist() == [RescheduleAnswer.UNKNOWN] * 2


def test_a_full_disk_undoes_a_cancel_by_key() -> None:
    world = World()
    sent(world, wanted(1, 50_000, "row"), [b"a"], REJECT)
    capacity, world.disk.capacity_bytes = world.disk.capacity_bytes, 0
    told = ask(world, Wish.CANCEL, [b"a"])
    world.settle()
    assert isinstance(told[0], DiskReserve)
    assert world.core.endings.requests._rows == 0 and not world.core.endings.taken_names._watches
    world.disk.capacity_bytes = capacity
    world.core.reserve(capacity)
    assert states(world, [b"a"]) == [MessageState.PENDING]


def test_while_the_index_is_made_again_requests_by_key_wait() -> None:
    world = World()
    sent(world, wanted(1, 50_000, "row"), [b"a"], REJECT)
    world.checkpoint()
    world.disk.remove(f"/data/delay/keys/{1:020}.log")
    world = world.after_crash()
    with pytest.raises(SlowDown):
        ask(world, Wish.GET, [b"a"])
    world.pass_ms(2_000)
    assert states(world, [b"a"]) == [MessageState.PENDING]


def test_a_block_that_is_found_damaged_by_a_request_has_the_index_made_again() -> None:
    world = World()
    sent(world, wanted(1, 50_000, "row"), [b"a"], REJECT)
    world.checkpoint()
    path = f"/data/delay/keys/{1:020}.log"
    file = world.disk.open(path, write=True)
    file.pwritev([b"\xff"], 130)
    told = ask(world, Wish.GET, [b"a"])
    world.settle()
    assert isinstance(told[0], SlowDown) and not world.core._keys.whole
    assert world.core.endings.requests._rows == 0
    world.pass_ms(2_000)
    assert states(world, [b"a"]) == [MessageState.PENDING]
    file.close()


def test_requests_by_key_come_over_the_wire() -> None:
    world, peer = World(), Answers()
    sent(world, wanted(2, 50_000, "row"), [b"a", b"b"], REJECT)
    requests = Requests(world.core, world.clock, dict)
    head: Head = {"log_id": world.core.identity.log_id}
    body = encode_asked_keys(AskedKeys(SUBJECT, [b"b", b"c"]))
    move = encode_asked_keys(AskedKeys(SUBJECT, [b"a"]), np.array([START_MS + 70_000], np.int64))
    for number, (kind, data) in enumerate(
        [(RequestType.GET, body), (RequestType.CANCEL, body), (RequestType.RESCHEDULE, move)]
    ):
        requests.received(peer, Frame(kind, 0, number, head, memoryview(data)))
        world.settle()
    got, cancelled, moved = map(decode_answers, peer.bodies)
    assert got["state"].tolist() == [MessageState.PENDING, MessageState.UNKNOWN]
    assert cancelled["answer"].tolist() == [CANCELLED, UNKNOWN]
    assert moved["answer"].tolist() == [RescheduleAnswer.MOVED]


def live(world: World) -> None:
    """Cancels and moves by key beside keyed sends, with checkpoints between them."""
    sent(world, wanted(3, HOUR_MS, "a"), [b"k1", b"k2", b"k3"], REJECT)
    cancel(world, [b"k1", b"k9"])
    world.checkpoint()
    send(world, wanted(2, 50_000, "b"), [b"k1", b"k2"], REPLACE)
    ask(world, Wish.CANCEL, [b"k2", b"k3"])
    world.settle()
    world.checkpoint()
    answers(world, Wish.MOVE, [b"k1"], [START_MS + 2 * HOUR_MS])
    cancel(world, [b"k1"])


@pytest.mark.parametrize("way", [None, PowerLoss.ALL_LOST, PowerLoss.TORN, PowerLoss.REORDERED])
def test_rule_C2_a_cancel_by_key_lasts_wherever_the_server_dies(way: PowerLoss | None) -> None:
    whole = World()
    begun = len(whole.disk.operations)
    live(whole)
    operations = len(whole.disk.operations)
    random = Random(operations)
    for dies_at in sorted(random.sample(range(begun + 1, operations), 30)):
        world = World()
        world.disk.faults.crash_at = dies_at
        with pytest.raises(Crash):
            live(world)
        again = world.after_crash(way, dies_at)
        # What was decided and not answered may have been asked for.
        again.outside.cancel_asked.update(range(1, again.core.intake.next_sequence))
        end(again)
