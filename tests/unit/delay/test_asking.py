"""Cancels, moves and questions, by receipt and by key: what is answered is so, also on a full disk and in each life."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from errno import EMFILE
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

from delayd.batch.batch import encode
from delayd.batch.columns import BatchKind, ColumnId
from delayd.batch.content import Hasher
from delayd.errors import (
    BadArgument,
    BadRequest,
    BatchMalformed,
    DamagedData,
    DelaydError,
    DiskReserve,
    Shortage,
    SlowDown,
)
from delayd.hours import INSTANT_MS_MAX, hour_of_ms
from delayd.log.hour import dispatch_path
from delayd.machine.alarms import DAMAGED_AGAIN_MS
from delayd.machine.executor import Done
from delayd.outcome import MessageState, Reason
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES
from delayd.testing.tree import PowerLoss
from delayd.wire.asked import (
    AnswerRows,
    Asked,
    AskedKeys,
    AskedWindow,
    CancelAnswer,
    RescheduleAnswer,
    decode_answers,
    encode_asked,
    encode_asked_keys,
)
from delayd.wire.frame import Head
from delayd.wire.requests import RequestType
from tests.memory_files import content, put
from tests.worlds.delay import ACCEPTED, FOLDER, TARGET_IDS, Answer, World, wanted
from tests.worlds.key_books import KEEP, REJECT, REPLACE

CANCEL, MOVE, GET, FIND = RequestType.CANCEL, RequestType.RESCHEDULE, RequestType.GET, RequestType.FIND
CANCELLED, MOVED, IN_FLIGHT = CancelAnswer.CANCELLED, RescheduleAnswer.MOVED, RescheduleAnswer.IN_FLIGHT
PENDING = MessageState.PENDING
HOUR_MS = 3_600_000
SUBJECT = b"orders.eu"
POLICIES = pytest.mark.parametrize("policy", [REJECT, KEEP, REPLACE])
Told = list[Answer | DelaydError]


def begin(
    world: World, kind: RequestType, rows: Asked | list[bytes], to_ms: int | Sequence[int] = (), number: int = 0
) -> Told:
    """Ask about rows by their receipts or their keys; under a number, if there is one."""
    head: Head = {"log_id": world.server.log_id}
    count = len(rows.sequences if isinstance(rows, Asked) else rows)
    instants = np.array(np.broadcast_to(np.array(to_ms, np.int64), count)) if kind is MOVE else None
    if number:
        head |= {"asker": 7, "low_water": number}
    if isinstance(rows, Asked):
        if number:
            head["number"] = number
        body = encode_asked(rows, instants)
    else:
        body = encode_asked_keys(AskedKeys(SUBJECT, rows, [*range(number, number + count)] if number else ()), instants)
    if kind is CANCEL:
        world.outside.cancel_asked.update(range(1, world.status("next_sequence")))
    return world.begin(kind, head, body)


def read(world: World, told: Told) -> AnswerRows:
    (answer,) = told
    if isinstance(answer, DelaydError):
        raise answer
    found = decode_answers(answer[1])
    world.outside.cancelled.update(found["sequence"][found["state"] == MessageState.CANCELLED].tolist())
    return found


def ask(
    world: World, kind: RequestType, rows: Asked | list[bytes], to_ms: int | Sequence[int] = (), number: int = 0
) -> AnswerRows:
    """The same, and let everything happen that takes no time."""
    told = begin(world, kind, rows, to_ms, number)
    world.settle()
    return read(world, told)


def answers(*asked: object) -> list[int]:
    found: list[int] = ask(*asked)["answer"].tolist()  # type: ignore[arg-type]
    return found


def sent(count: int, after_ms: int, name: str = "row", **settings: Any) -> tuple[World, Asked]:
    world = World(None, seed=0, load_ahead_ms=1_000, **settings)
    world.send(wanted(count, after_ms, name))
    world.settle()
    return world, world.receipts(name)


def end(world: World) -> None:
    world.drain(6 * HOUR_MS)
    world.check_books()
    world.check_sealing()


# By receipt.


@pytest.mark.parametrize("after_ms", [5_000, 40 * HOUR_MS])
def test_a_full_disk_undoes_what_it_could_not_decide(after_ms: int) -> None:
    world, asked = sent(3, after_ms)
    world.disk.capacity_bytes = 0
    with pytest.raises(DiskReserve):
        ask(world, CANCEL, asked)
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.look_around()
    assert world.states(asked) == [PENDING] * 3
    assert answers(world, CANCEL, asked.take([1])) == [CANCELLED]
    end(world)


def test_a_row_that_falls_due_while_its_cancel_is_written_is_delivered_when_the_write_fails() -> None:
    world, asked = sent(2, 2_000)
    world.pass_ms(1_990)
    world.disk.capacity_bytes = 0
    told = begin(world, CANCEL, asked.take([0]))
    world.clock.advance(50)
    world.server.wake()
    world.settle()
    world.disk.capacity_bytes = CAPACITY_BYTES
    with pytest.raises(DiskReserve):
        read(world, told)
    end(world)
    assert not world.outside.cancelled


def test_a_row_of_a_sealed_hour_is_known_in_each_later_life_as_long_as_the_logs_are_kept() -> None:
    world, asked = sent(3, 500, retention_hours=1)
    assert answers(world, CANCEL, asked.take([2])) == [CANCELLED]
    world.drain()
    world.check_sealing()
    later = world.after_crash()
    assert later.states(asked) == [MessageState.DISPATCHED] * 2 + [MessageState.CANCELLED]
    assert ask(later, GET, asked)["attempt"].tolist() == [1, 1, 0], "the third one was handed over to nobody"
    assert answers(later, CANCEL, asked) == [*[CancelAnswer.ALREADY_DISPATCHED] * 2, CANCELLED]
    later.clock.advance(2 * HOUR_MS)
    later.delete_hours()
    assert later.states(asked) == [MessageState.UNKNOWN] * 3


@pytest.mark.parametrize("filed", [False, True])
def test_a_request_about_one_subject_touches_no_message_of_another(filed: bool) -> None:
    world = World(load_ahead_ms=1_000)
    world.send([*wanted(1, 5 * HOUR_MS, "mine", b"mails"), *wanted(1, 5 * HOUR_MS, "theirs")])
    world.settle()
    if filed:
        world.checkpoint()
    receipts = world.receipts("mine", "theirs")
    with pytest.raises(BadArgument):
        world.ask(CANCEL, {"log_id": world.server.log_id, "subject": "mails"}, encode_asked(receipts))
    assert world.states(receipts) == [PENDING] * 2


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", BatchMalformed),
        (bytes(64), BatchMalformed),
        (encode(BatchKind.SEAL, None, 1, [(ColumnId.SEAL, np.zeros(1, "V200"))], []), BatchMalformed),
        (encode_asked(Asked(np.ones(1, np.uint64), np.zeros(1, np.int64), np.zeros(1, np.int64)))[:-8], BatchMalformed),
        (encode_asked(Asked(np.ones(1, np.uint64), np.array([-1]), np.array([0]))), BadRequest),
        (encode_asked(Asked(np.ones(1, np.uint64), np.array([0]), np.array([1 << 62]))), BadRequest),
    ],
)
def test_rule_E1_a_body_that_asks_for_no_rows_is_refused_by_name(body: bytes, error: type[DelaydError]) -> None:
    world = World()
    for kind in (CANCEL, MOVE, GET):
        with pytest.raises(error):
            world.ask(kind, {"log_id": world.server.log_id}, body)


def test_rule_C1_a_receipt_of_another_hour_is_that_of_another_row_also_while_an_outcome_is_not_written() -> None:
    world, asked = sent(1, 5 * HOUR_MS)
    assert answers(world, CANCEL, asked) == [CANCELLED] and world.status("owed_rows") == 1
    made_up = asked._replace(accepted_at_ms=asked.accepted_at_ms + 9 * HOUR_MS)
    for owed in (1, 0):
        assert world.status("owed_rows") == owed
        assert world.states(asked) == [MessageState.CANCELLED] and world.states(made_up) != [MessageState.CANCELLED]
        world.pass_ms(5_000)


def test_long_messages_move_a_few_at_a_time_with_all_that_they_have() -> None:
    world = World(segment_bytes=64 << 20, intake_queue_bytes_max=64 << 20)
    for number in range(12):
        world.send([(START_MS + HOUR_MS, b"mail", (b"long-%d" % number).ljust(900_000, b"."))])
        world.settle()
    base = Asked(np.arange(1, 13, dtype=np.uint64), np.full(12, START_MS + HOUR_MS), np.full(12, START_MS))
    before = world.status("message_log_end")
    assert answers(world, MOVE, base, START_MS + 3 * HOUR_MS) == [MOVED] * 12
    assert 12 * 900_000 < world.status("message_log_end") - before < 12 * 920_000
    end(world)


def test_a_message_that_can_not_be_read_stays_and_is_asked_about_again() -> None:
    world, whole = sent(2, HOUR_MS, "whole", tail_bytes=0)
    world.send(wanted(2, HOUR_MS, "damaged"))
    world.settle()
    (name,) = world.disk.list_folder(f"{FOLDER}/message")
    file = world.disk.open(f"{FOLDER}/message/{name}", write=True)
    file.pwritev([b"D"], file.pread(file.size(), 0).index(b"damaged-1"))
    asked = world.receipts("whole", "damaged")
    assert answers(world, MOVE, asked, START_MS + 9_000) == [MOVED, MOVED, IN_FLIGHT, IN_FLIGHT]
    assert world.states(world.receipts("damaged")) == [PENDING] * 2 and len(whole.sequences) == 2


def test_two_moves_of_one_row_in_one_commit_are_both_done() -> None:
    world, one = sent(1, HOUR_MS)
    world.send(wanted(1, 5_000, "before"))
    first, second = (begin(world, MOVE, one, START_MS + to_ms) for to_ms in (2 * HOUR_MS, 9_000))
    world.settle()
    assert [read(world, told)["answer"].tolist() for told in (first, second)] == [[MOVED], [MOVED]]
    assert world.outside.newest(1, 0)[:2] == (int(read(world, second)["sequence"][0]), START_MS + 9_000)
    end(world)


# By key.


@pytest.mark.parametrize("kind", [CANCEL, MOVE])
def test_rule_B2_a_key_that_each_commit_takes_holds_up_no_request_about_other_messages(kind: RequestType) -> None:
    world = World()
    world.sent_keyed(wanted(1, 50_000, "hot"), [b"hot"], REJECT)
    world.send(wanted(2, 50_000, "other"))
    world.settle()
    commit, _, worker = world.executors()
    world.send(wanted(1, 50_000, "plain"))
    told = begin(world, kind, [b"hot"], START_MS + 70_000)
    others: list[Told] = []
    for number in range(20):
        # The next commit has a row with the key, too: it is looked up while this one is written.
        world.send_keyed(wanted(1, 60_000, f"hot{number}"), [b"hot"], REPLACE)
        if number < 2:
            others.append(begin(world, CANCEL, world.receipts("other").take([number])))
        worker.run_all()
        commit.step()
        worker.run_all()
        if told:
            break
    assert 3 < number < 12, "it waits for some of the commits"
    assert [read(world, each)["answer"].tolist() for each in others] == [[CANCELLED], [CANCELLED]]
    # What has waited long enough is decided before the rows of a commit; a move can only be asked for again.
    assert read(world, told)["answer"].tolist() == [CANCELLED if kind is CANCEL else IN_FLIGHT]
    end(world)


@POLICIES
def test_a_row_that_stays_in_flight_is_met_as_such_after_a_while(policy: int) -> None:
    world = World()
    world.sent_keyed(wanted(1, 1_000, "flies"), [b"a"], REJECT)
    world.outside.targets[TARGET_IDS[0]].hangs = True
    world.pass_ms(2_000)
    number = world.send_keyed(wanted(2, 50_000, "next"), [b"a", b"a"], policy)
    world.settle()
    assert number not in world.outside.accepted
    world.pass_ms(6_000)
    assert world.verdicts(number) == [(Reason.REJECTED if policy == REJECT else Reason.IN_FLIGHT, 1)] * 2
    world.outside.targets[TARGET_IDS[0]].hangs = False
    world.pass_ms(1_000)
    assert world.sent_keyed(wanted(1, 50_000, "last"), [b"a"], policy) == [ACCEPTED]
    end(world)


@POLICIES
def test_no_verdict_is_given_while_the_files_of_the_row_that_is_met_can_t_be_read(policy: int) -> None:
    world = World()
    world.sent_keyed(wanted(2, 5_000, "first"), [b"cancelled", b"sent"], REJECT)
    world.cancel(world.receipts("first-0"))
    world.pass_ms(8_000)
    world.checkpoint()
    world = world.after_crash()
    world.disk.faults.fail_reads["/dispatch/"] = 1_000
    keys = (b"cancelled", b"sent", b"other")
    numbers = [world.send_keyed(wanted(1, 50_000, f"unread {key!r}"), [key], policy) for key in keys]
    world.settle()
    assert world.outside.accepted.keys() & set(numbers) == {numbers[2]}, "only what meets the rows is refused"
    refused = dict(world.outside.refused)
    assert all(isinstance(refused[number], SlowDown) for number in numbers[:2])
    world.disk.faults.fail_reads.clear()
    assert world.sent_keyed(wanted(2, 50_000, "second"), [b"cancelled", b"sent"], policy) == [ACCEPTED] * 2
    end(world)


@POLICIES
def test_a_row_that_was_cancelled_is_met_as_in_flight_while_the_dispatch_log_that_says_so_is_damaged(
    policy: int,
) -> None:
    world = World()
    world.sent_keyed(wanted(1, 50_000, "first"), [b"a"], REJECT)
    world.cancel(world.receipts("first"))
    world.pass_ms(1_000)
    world.checkpoint()
    remains = world.remains(PowerLoss.ALL_LOST)
    path = dispatch_path(FOLDER, hour_of_ms(START_MS))
    whole = content(remains.disk, path)
    put(remains.disk, path, whole[:-1] + b"?")
    world = World(remains)
    assert ask(world, GET, [b"a"])["state"].tolist() == [MessageState.IN_FLIGHT]
    number = world.send_keyed(wanted(1, 50_000, "second"), [b"a"], policy)
    world.pass_ms(6_000)
    assert world.verdicts(number) == [(Reason.REJECTED if policy == REJECT else Reason.IN_FLIGHT, 1)]
    put(world.disk, path, whole)
    world.pass_ms(DAMAGED_AGAIN_MS + 1_000)
    assert ask(world, GET, [b"a"])["state"].tolist() == [MessageState.CANCELLED]
    assert world.sent_keyed(wanted(1, 50_000, "third"), [b"a"], policy) == [ACCEPTED]
    end(world)


def test_rule_C3_names_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hasher, "hashes", lambda self, names: np.full(names.n, 7, np.uint64))
    world, rejected, replaced = World(), Reason.REJECTED, Reason.REPLACED
    told = world.sent_keyed(wanted(5, 50_000, "first"), [b"a", b"b", b"a", b"c", b"b"], REJECT)
    assert told == [ACCEPTED, ACCEPTED, (rejected, 1), ACCEPTED, (rejected, 2)]
    told = world.sent_keyed(wanted(3, 50_000, "second"), [b"c", b"d", b"c"], REPLACE)
    assert told == [(replaced, 4), ACCEPTED, (replaced, 6)]
    world.checkpoint()
    again = world.after_crash()
    assert again.sent_keyed(wanted(2, 50_000, "third"), [b"d", b"c"], REJECT) == [(rejected, 7), (rejected, 8)]


# Tries: a change that is asked for again under its number is done once, and answered as the first time (rule I1).


def lives(world: World) -> list[World]:
    """The same life, one after a power loss, and one after a checkpoint and a power loss."""
    other = world.after_crash(PowerLoss.ALL_LOST)
    other.settle()
    other.checkpoint()
    return [world, world.after_crash(PowerLoss.ALL_LOST), other.after_crash(PowerLoss.ALL_LOST)]


def facts(told: AnswerRows) -> list[list[int]]:
    names = ("answer", "state", "sequence", "deliver_at_ms", "accepted_at_ms", "decided_at_ms")
    return [told[name].tolist() for name in names]


def due_of(world: World, asked: Asked) -> list[int]:
    """When messages are due that are pending."""
    told = ask(world, GET, asked)
    assert set(told["state"].tolist()) == {PENDING}
    due: list[int] = told["deliver_at_ms"].tolist()
    return due


def test_rule_I1_a_cancel_by_key_that_is_asked_again_ends_no_other_message() -> None:
    world = World()
    world.sent_keyed(wanted(2, 5 * HOUR_MS, "first"), [b"k", b"l"], REJECT)
    told = ask(world, CANCEL, [b"k", b"l"], number=1)
    assert told["answer"].tolist() == [CANCELLED] * 2
    assert world.sent_keyed(wanted(1, 6 * HOUR_MS, "second"), [b"k"], REJECT) == [ACCEPTED]
    for life in lives(world):
        second = life.receipts("second")
        assert facts(ask(life, CANCEL, [b"k", b"l"], number=1)) == facts(told) and life.states(second) == [PENDING]
        assert answers(life, CANCEL, [b"k"], (), 3) == [CANCELLED], "another number is another try"
        assert life.states(second) == [MessageState.CANCELLED]


def test_rule_I1_a_move_by_receipt_that_is_asked_again_undoes_no_later_move() -> None:
    world, receipt = sent(1, 5 * HOUR_MS)
    ten, noon = START_MS + 10 * HOUR_MS, START_MS + 12 * HOUR_MS
    told = ask(world, MOVE, receipt, ten, 1)
    assert told["answer"].tolist() == answers(world, MOVE, receipt, noon) == [MOVED]
    for life in lives(world):
        assert all(facts(ask(life, MOVE, receipt, ten, 1))[:5] == facts(told)[:5] for _ in range(2))
        assert due_of(life, receipt) == [noon]
        assert answers(life, MOVE, receipt, ten, 2) == [MOVED] and due_of(life, receipt) == [ten]


@pytest.mark.parametrize("seed", range(20))
def test_rule_I1_a_move_that_is_asked_again_while_its_first_try_is_under_way_is_done_once(seed: int) -> None:
    random = Random(seed)
    world, receipt = sent(1, 5 * HOUR_MS)
    ten, noon = START_MS + 10 * HOUR_MS, START_MS + 12 * HOUR_MS
    first = begin(world, MOVE, receipt, ten, 1)
    begun: dict[int, Told] = {}
    begins = {random.randrange(20): 0, random.randrange(20): 1}
    for step in range(30):
        if step in begins:
            number = begins[step]
            begun[number] = begin(world, MOVE, receipt, ten if number else noon, number)
        if moves := world.moves():
            random.choice(moves)()
    world.settle()
    told = read(world, first)
    assert 1 not in begun or facts(read(world, begun[1]))[:5] == facts(told)[:5]
    # Requests that are under way together may be decided in any order.
    is_last = 0 not in begun or read(world, begun[0])["sequence"][0] < told["sequence"][0]
    assert due_of(world, receipt) == [ten if is_last else noon]


def test_rule_B1_a_try_that_can_not_be_remembered_is_refused() -> None:
    world = World()
    world.sent_keyed(wanted(1, 5 * HOUR_MS, "first"), [b"k"], REJECT)
    world.core.logs.producers._bytes_max = 0
    receipt = world.receipts("first")
    for rows in (receipt, [b"k"]):
        with pytest.raises(SlowDown, match="as many tries as it can"):
            ask(world, MOVE, rows, START_MS + 10 * HOUR_MS, 1)
    assert due_of(world, receipt) == [START_MS + 5 * HOUR_MS]


# Large requests are done in pieces, and every request ends.

ROWS, HOURS = 60, 20
BY_KEY = pytest.mark.parametrize("by_key", [False, True])


def filled(monkeypatch: pytest.MonkeyPatch) -> tuple[World, Asked]:
    """Rows of many hours, each with a key; a piece is a few of them."""
    monkeypatch.setattr("delayd.delay.ending.requested.PIECE_ROWS", 64)
    monkeypatch.setattr("delayd.delay.ending.requested.HOUR_ROWS", 8)
    world = World(load_ahead_ms=1_000)
    rows = [(START_MS + (5 + row % HOURS) * HOUR_MS, SUBJECT, b"m-%d" % row) for row in range(ROWS)]
    world.send_keyed(rows, [b"k%d" % row for row in range(ROWS)], REJECT)
    world.settle()
    return world, world.receipts("m")


@BY_KEY
@pytest.mark.parametrize("kind", [CANCEL, MOVE, GET])
def test_rule_B2_a_request_of_many_rows_and_hours_is_answered_in_the_order_of_its_rows(
    kind: RequestType, by_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, asked = filled(monkeypatch)
    if by_key:
        world.checkpoint()
    order = np.random.default_rng(3).permutation(ROWS)
    to_ms = (START_MS + 50 * HOUR_MS + order).tolist()
    rows = ask(world, kind, [b"k%d" % row for row in order] if by_key else asked.take(order.tolist()), to_ms)
    if kind is MOVE:
        assert set(rows["answer"].tolist()) == {MOVED} and rows["deliver_at_ms"].tolist() == to_ms
    else:
        assert set(rows["state"].tolist()) == {PENDING if kind is GET else MessageState.CANCELLED}
        assert rows["sequence"].tolist() == (order + 1).tolist()
    assert world.status("asked_rows") == 0


@pytest.mark.parametrize("kind", [CANCEL, MOVE])
def test_a_disk_that_is_full_in_the_middle_leaves_the_other_rows_to_be_asked_for_again(
    kind: RequestType, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, asked = filled(monkeypatch)
    told = begin(world, kind, asked, START_MS + 50 * HOUR_MS)
    while not world.status("owed_rows"):
        move = world.next_move()
        assert move is not None
        move()
    world.disk.capacity_bytes = world.disk.used_bytes
    world.settle()
    world.disk.capacity_bytes = CAPACITY_BYTES
    done = {CANCELLED if kind is CANCEL else MOVED}
    again = {CancelAnswer.IN_FLIGHT if kind is CANCEL else IN_FLIGHT}
    assert set(read(world, told)["answer"].tolist()) == done | again, "what was done can't be refused any more"
    world.pass_ms(60_000)
    assert set(answers(world, kind, asked, START_MS + 50 * HOUR_MS)) == done


@pytest.mark.parametrize("error", [Shortage("a", EMFILE), DamagedData("a", 0, "rotten")], ids=repr)
@pytest.mark.parametrize(("kind", "by_key"), [*product((GET, CANCEL, MOVE), (False, True)), (FIND, False)])
def test_whatever_fails_beside_the_loop_is_told_by_name_and_the_next_request_is_served(
    kind: RequestType, error: DelaydError, by_key: bool
) -> None:
    world = World()
    world.sent_keyed(wanted(1, 5 * HOUR_MS, "row"), [b"k"], REJECT)
    world.checkpoint()
    rows: Asked | list[bytes] = [b"k"] if by_key else world.receipts("row")
    worker, fails = world.threads.worker, True
    submit = worker.submit

    def failing(work: Callable[[], object], done: Callable[[Done[object]], None], *priority: object) -> None:
        submit((lambda: (_ for _ in ()).throw(error)) if fails else work, done, *priority)  # type: ignore[arg-type]

    worker.submit = failing  # type: ignore[assignment, method-assign]
    window = AskedWindow(SUBJECT, 0, INSTANT_MS_MAX).to_head(world.server.log_id)
    for fails in (True, False):
        world.pass_ms(0 if fails else 60_000)
        told = world.begin(FIND, window) if kind is FIND else begin(world, kind, rows, START_MS + 7 * HOUR_MS)
        world.settle()
        (what,) = told
        assert isinstance(what, SlowDown) if fails else not isinstance(what, DelaydError)
        held = ("asked_rows", "asked_copies", "key_look_ups", "find_pieces", "queued_bytes")
        assert not any(map(world.status, held))


def test_a_server_that_stops_amid_a_move_says_which_rows_it_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.delay.ending.copies.COPY_ROWS", 1)  # Each row in a commit of its own.
    partly = steps = 0
    told: Told = []
    while not told:
        world, asked = sent(2, 5 * HOUR_MS)
        told = begin(world, MOVE, asked, START_MS + 6 * HOUR_MS)
        for _ in range(steps):
            move = world.next_move()
            if move is not None:
                move()
        is_done = bool(told)
        world.stop()
        moved = (read(world, told)["answer"] == MOVED).tolist() if isinstance((*told, None)[0], tuple) else [False] * 2
        world = world.after_crash(None)
        assert [due == START_MS + 6 * HOUR_MS for due in due_of(world, asked)] == moved, f"after {steps} steps"
        partly += moved.count(True) == 1
        steps += 1
        told = told if is_done else []
    assert partly
