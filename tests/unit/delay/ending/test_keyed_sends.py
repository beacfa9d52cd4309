"""Keyed sends: the verdict about each row is durable before anybody hears of it, and the same in each life."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from delayd.batch.content import Hasher
from delayd.delay.ending.keyed_sends import KeyedSends
from delayd.delay.quarantine import Kind
from delayd.errors import DiskReserve, SlowDown
from delayd.testing.disk import Crash
from delayd.testing.tree import PowerLoss
from delayd.wire.ending import CancelAnswer, MessageState
from tests.unit.delay.ending.keyed import (
    ACCEPTED,
    IN_FLIGHT,
    KEEP,
    KEPT,
    REJECT,
    REJECTED,
    REPLACE,
    REPLACED,
    Verdict,
    send,
    sent,
    verdicts,
)
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000


def end(world: World) -> None:
    world.drain(6 * HOUR_MS)
    world.check_books()
    world.check_sealing()


@pytest.mark.parametrize("policy", [REJECT, KEEP, REPLACE])
@pytest.mark.parametrize("due_ms", [5_000, HOUR_MS + 5_000, 40 * HOUR_MS])
@pytest.mark.parametrize("filed", [False, True])
@pytest.mark.parametrize("crashed", [False, True])
def test_rule_P1_a_row_meets_the_pending_row_of_its_key(policy: int, due_ms: int, filed: bool, crashed: bool) -> None:
    world = World(load_ahead_ms=1_000)
    assert sent(world, wanted(3, due_ms, "first"), [b"a", b"", b"c"], policy) == [(ACCEPTED, 0)] * 3
    if filed:
        world.checkpoint()
    if crashed:
        world = world.after_crash(PowerLoss.ALL_LOST)
    told = sent(world, wanted(3, due_ms, "second"), [b"a", b"", b"b"], policy)
    expected = {REJECT: (REJECTED, 1), KEEP: (KEPT, 1), REPLACE: (REPLACED, 1)}[policy]
    assert told == [expected, (ACCEPTED, 0), (ACCEPTED, 0)]
    first = world.states(world.receipts("first"))
    assert first[0] is (MessageState.REPLACED if policy == REPLACE else MessageState.PENDING)
    second = world.states(world.receipts("second-0"))
    assert second == [{REJECT: MessageState.REJECTED, KEEP: MessageState.KEPT, REPLACE: MessageState.PENDING}[policy]]
    again = world.after_crash()
    end(again)
    end(world)


def test_a_key_is_free_when_its_row_has_ended_or_was_cancelled() -> None:
    world = World()
    sent(world, wanted(1, 5_000, "sent"), [b"a"], REJECT)
    world.pass_ms(8_000)
    assert sent(world, wanted(1, 15_000, "again"), [b"a"], REJECT) == [(ACCEPTED, 0)]
    world.cancel(world.receipts("again"))
    world.settle()
    assert sent(world, wanted(1, 15_000, "last"), [b"a"], REJECT) == [(ACCEPTED, 0)]
    end(world)


def test_a_key_belongs_to_its_subject() -> None:
    world = World()
    rows = [*wanted(1, 5_000, "one", b"a"), *wanted(1, 5_000, "two", b"b")]
    assert sent(world, rows, [b"k", b"k"], REJECT) == [(ACCEPTED, 0)] * 2
    assert sent(world, wanted(1, 5_000, "three", b"b"), [b"k"], REJECT) == [(REJECTED, 2)]


def test_rows_of_one_batch_and_of_one_commit_meet_one_another_in_their_order() -> None:
    world = World()
    world.send(wanted(1, 5_000, "plain"))  # Its commit is under way while the others are looked up.
    keys = [b"a", b"a", b"b", b"a", b"b", b"a", b"a"]
    first = send(world, wanted(7, 5_000, "first"), keys, [REJECT, KEEP, REPLACE, REPLACE, REJECT, REJECT, REPLACE])
    second = send(world, wanted(3, 5_000, "second"), [b"b", b"a", b"b"], [REPLACE, KEEP, REJECT])
    world.settle()
    assert verdicts(world, first) == [
        (ACCEPTED, 0),
        (KEPT, 2),
        (ACCEPTED, 0),
        (REPLACED, 2),
        (REJECTED, 4),
        (REJECTED, 5),
        (REPLACED, 5),
    ]
    assert verdicts(world, second) == [(REPLACED, 4), (KEPT, 8), (REJECTED, 9)]
    again = world.after_crash(PowerLoss.ALL_LOST)
    end(again)
    assert {body for target in again.outside.targets.values() for kept in target.log for body in kept.bodies} == {
        b"plain-0",
        b"first-6",
        b"second-0",
    }


def flying() -> World:
    """A world with a row that is in flight, under the key a: its target hangs."""
    world = World()
    sent(world, wanted(1, 1_000, "flies"), [b"a"], REJECT)
    world.outside.targets[0x7001].hangs = True
    world.pass_ms(2_000)
    return world


@pytest.mark.parametrize("policy", [REJECT, KEEP, REPLACE])
def test_a_send_that_meets_a_row_in_flight_takes_the_key_when_that_row_is_decided(policy: int) -> None:
    world = flying()
    first = send(world, wanted(1, 50_000, "first"), [b"a"], policy)
    other = sent(world, wanted(1, 50_000, "other"), [b"b"], policy)
    assert other == [(ACCEPTED, 0)], "only what meets the row waits"
    second = send(world, wanted(1, 51_000, "second"), [b"a"], policy)
    world.settle()
    assert not {first, second} & world.outside.accepted.keys()
    world.outside.targets[0x7001].hangs = False
    world.pass_ms(1_000)
    assert verdicts(world, first) == [(ACCEPTED, 0)]
    met = {REJECT: REJECTED, KEEP: KEPT, REPLACE: REPLACED}[policy]
    base_sequence = world.outside.accepted[first][1].base_sequence
    assert verdicts(world, second) == [(met, base_sequence)], "it waited behind the first"
    end(world)


@pytest.mark.parametrize("policy", [REJECT, KEEP, REPLACE])
def test_a_row_that_stays_in_flight_is_met_as_such_after_a_while(policy: int) -> None:
    world = flying()
    number = send(world, wanted(2, 50_000, "next"), [b"a", b"a"], policy)
    world.settle()
    assert number not in world.outside.accepted
    world.pass_ms(6_000)
    assert verdicts(world, number) == [({REJECT: REJECTED, KEEP: IN_FLIGHT, REPLACE: IN_FLIGHT}[policy], 1)] * 2
    world.outside.targets[0x7001].hangs = False
    world.pass_ms(1_000)
    assert sent(world, wanted(1, 50_000, "last"), [b"a"], policy) == [(ACCEPTED, 0)]
    end(world)


def test_a_row_that_is_replaced_at_once_is_not_sent_though_it_is_due() -> None:
    world = World()
    told = sent(world, wanted(3, 0, "now"), [b"a"] * 3, [REPLACE, REPLACE, REJECT])
    assert told == [(ACCEPTED, 0), (REPLACED, 1), (REJECTED, 2)]
    end(world)
    assert [body for target in world.outside.targets.values() for kept in target.log for body in kept.bodies] == [
        b"now-1"
    ]


def test_rule_I1_a_repeated_batch_gets_the_same_verdicts_in_each_life() -> None:
    world = World()
    sent(world, wanted(2, 50_000, "first"), [b"a", b"b"], REJECT)
    number = send(world, wanted(3, 50_000, "second"), [b"a", b"b", b"b"], [KEEP, REPLACE, REJECT])
    world.settle()
    told = verdicts(world, number)
    assert told == [(KEPT, 1), (REPLACED, 2), (REJECTED, 4)]
    for life in (world, world.after_crash(), world.after_crash(PowerLoss.ALL_LOST)):
        life.send_again(number)  # `World` compares the answers.
        life.settle()
        life.checkpoint()
        later = life.after_crash()
        held = later.core.producers.held_bytes
        later.send_again(number)
        later.settle()
        assert verdicts(later, number) == told
        assert later.core.producers.held_bytes == held == life.core.producers.held_bytes


def test_what_was_decided_counts_as_memory_of_producers() -> None:
    world = World()
    sent(world, wanted(10, 50_000, "first"), [b"%d" % row for row in range(10)], REJECT)
    held = world.core.producers.held_bytes
    sent(world, wanted(10, 50_000, "second"), [b"%d" % row for row in range(10)], REJECT)
    _, accepted = world.outside.accepted[2]
    grown = world.core.producers.held_bytes - held
    assert len(accepted.decided) >= 400 and grown == len(accepted.decided), "the first number is forgotten"


def test_a_full_disk_undoes_verdicts_and_refuses_the_batches() -> None:
    world = World()
    sent(world, wanted(2, 50_000, "first"), [b"a", b"b"], REJECT)
    capacity, world.disk.capacity_bytes = world.disk.capacity_bytes, 0
    number = send(world, wanted(3, 50_000, "second"), [b"a", b"a", b"c"], REPLACE)
    world.settle()
    assert number not in world.outside.accepted and isinstance(world.outside.refused[-1][1], DiskReserve)
    assert world.core.intake.queued_bytes == 0
    world.disk.capacity_bytes = capacity
    assert world.states(world.receipts("first")) == [MessageState.PENDING] * 2
    world.core.reserve(capacity)
    told = sent(world, wanted(2, 50_000, "third"), [b"c", b"a"], REJECT)
    assert told == [(ACCEPTED, 0), (REJECTED, 1)]
    end(world)


def test_while_the_index_is_not_whole_batches_with_keys_are_told_to_wait_and_others_are_not() -> None:
    world = World()
    sent(world, wanted(1, 50_000, "first"), [b"a"], REJECT)
    world.checkpoint()
    world.disk.remove(f"/data/delay/keys/{1:020}.log")
    world = world.after_crash()
    send(world, wanted(1, 50_000, "second"), [b"a"], REJECT)
    plain = world.send(wanted(1, 50_000, "plain"))
    world.settle()
    assert plain in world.outside.accepted
    assert isinstance(world.outside.refused[-1][1], SlowDown)
    world.pass_ms(2_000)
    assert sent(world, wanted(1, 50_000, "third"), [b"a"], REJECT) == [(REJECTED, 1)]
    end(world)


@pytest.mark.parametrize("policy", [REJECT, KEEP, REPLACE])
def test_no_verdict_is_given_while_the_files_of_the_row_that_is_met_can_t_be_read(policy: int) -> None:
    world = World()
    sent(world, wanted(2, 5_000, "first"), [b"cancelled", b"sent"], REJECT)
    world.cancel(world.receipts("first-0"))
    world.pass_ms(8_000)
    world.checkpoint()
    world = world.after_crash()
    world.disk.faults.fail_reads["/dispatch/"] = 1_000
    keys = (b"cancelled", b"sent", b"other")
    numbers = [send(world, wanted(1, 50_000, f"unread {key!r}"), [key], policy) for key in keys]
    world.settle()
    assert world.outside.accepted.keys() & set(numbers) == {numbers[2]}, "only what meets the rows is refused"
    refused = dict(world.outside.refused)
    assert all(isinstance(refused[number], SlowDown) for number in numbers[:2])
    world.disk.faults.fail_reads.clear()
    assert sent(world, wanted(2, 50_000, "second"), [b"cancelled", b"sent"], policy) == [(ACCEPTED, 0)] * 2
    end(world)


@pytest.mark.parametrize("policy", [REJECT, KEEP, REPLACE])
def test_an_ended_row_is_known_as_such_while_bodies_of_its_hour_can_t_be_read(policy: int) -> None:
    world = World(load_ahead_ms=1_000, tail_bytes=0, source_cache_bytes=1 << 20)
    sent(world, wanted(1, HOUR_MS + 60_000, "cancelled"), [b"a"], REJECT)
    sent(world, wanted(1, HOUR_MS + 90_000, "held"), [b"b"], REJECT)
    world.checkpoint()
    world = world.after_crash()
    world.cancel(world.receipts("cancelled"))
    world.pass_ms(HOUR_MS + 70_000)
    world.checkpoint()
    world.disk.faults.fail_reads["/schedule/"] = 1_000_000
    world.pass_ms(25_000)
    assert [entry.kind for entry in world.core.quarantine] == [Kind.ROWS], "a row of the same hour is held"
    assert sent(world, wanted(1, 2 * HOUR_MS, "next"), [b"a"], policy) == [(ACCEPTED, 0)]
    assert world.states(world.receipts("cancelled")) == [MessageState.CANCELLED]
    world.disk.faults.fail_reads.clear()
    end(world)


def test_a_look_up_is_compared_with_what_came_since() -> None:
    world = World()
    world.own_all_keys()
    first = send(world, wanted(1, 50_000, "first"), [b"a"], REJECT)
    commit, _, worker = world.executors()
    worker.run_one()
    worker.complete_one()  # The first batch is queued, and its commit begins.
    second = send(world, wanted(1, 50_000, "second"), [b"a"], REJECT)
    worker.run_one()  # The second one is looked up while nothing of the first is in the index.
    commit.run_one()
    commit.complete_one()
    world.settle()
    assert verdicts(world, first) == [(ACCEPTED, 0)]
    assert verdicts(world, second) == [(REJECTED, 1)]
    assert not world.core.endings.taken_names._since


def test_a_row_of_a_commit_that_has_just_become_durable_can_be_replaced() -> None:
    world = World()
    first = send(world, wanted(1, 50_000, "first"), [b"a"], REJECT)
    queue_all(world)
    second = send(world, wanted(1, 50_000, "second"), [b"a"], REPLACE)
    queue_all(world)
    world.settle()
    assert verdicts(world, first) == [(ACCEPTED, 0)]
    assert verdicts(world, second) == [(REPLACED, 1)]
    end(world)


def test_a_full_disk_refuses_queued_batches_with_the_ones_that_it_could_not_take() -> None:
    world = World()
    sent(world, wanted(1, 50_000, "first"), [b"a"], REJECT)
    capacity, world.disk.capacity_bytes = world.disk.capacity_bytes, 0
    numbers = []
    for name in ("second", "third"):
        numbers.append(send(world, wanted(1, 50_000, name), [b"b"], REJECT))
        queue_all(world)
    assert len(world.core.endings.keyed_sends._queued) == 1
    world.settle()
    assert [number for number, _ in world.outside.refused] == numbers
    assert not world.core.endings.keyed_sends._queued and not world.core.endings.taken_names._watches
    world.disk.capacity_bytes = capacity
    world.core.reserve(capacity)
    end(world)


def queue_all(world: World) -> None:
    """Look up what is sent, and queue it; no commit ends."""
    _, _, worker = world.executors()
    while worker.waiting or worker.ran:
        worker.run_one()
        worker.complete_one()


def test_a_stop_waits_for_batches_whose_keys_are_looked_up() -> None:
    world = World()
    number = send(world, wanted(2, 50_000, "first"), [b"a", b"b"], REJECT)
    assert world.stop() and number in world.outside.accepted
    again = world.after_crash(PowerLoss.ALL_LOST)
    assert sent(again, wanted(1, 50_000, "second"), [b"b"], REJECT) == [(REJECTED, 2)]


def test_a_row_of_the_commit_before_can_be_replaced() -> None:
    world = World()
    numbers = [send(world, wanted(1, 50_000, f"row{n}"), [b"a"], REPLACE) for n in range(5)]
    world.settle()
    assert [verdicts(world, number) for number in numbers] == [
        [(ACCEPTED, 0)],
        *([(REPLACED, sequence)] for sequence in range(1, 5)),
    ]
    end(world)


def test_rule_C3_names_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hasher, "hashes", lambda self, names: np.full(names.n, 7, np.uint64))
    world = World()
    told = sent(world, wanted(5, 50_000, "first"), [b"a", b"b", b"a", b"c", b"b"], REJECT)
    assert told == [(ACCEPTED, 0), (ACCEPTED, 0), (REJECTED, 1), (ACCEPTED, 0), (REJECTED, 2)]
    told = sent(world, wanted(3, 50_000, "second"), [b"c", b"d", b"c"], REPLACE)
    assert told == [(REPLACED, 4), (ACCEPTED, 0), (REPLACED, 6)]
    world.checkpoint()
    again = world.after_crash()
    assert sent(again, wanted(2, 50_000, "third"), [b"d", b"c"], REJECT) == [(REJECTED, 7), (REJECTED, 8)]


def test_a_cancel_of_a_row_that_was_replaced_cancels_nothing_else() -> None:
    world = World()
    sent(world, wanted(1, 50_000, "first"), [b"a"], REJECT)
    sent(world, wanted(1, 50_000, "second"), [b"a"], REPLACE)
    told = world.cancel(world.receipts("first"))
    world.settle()
    assert told == [[CancelAnswer.CANCELLED]]
    assert world.states(world.receipts("second")) == [MessageState.PENDING]


def live(world: World) -> None:
    """Keyed sends of all kinds, with checkpoints and merges of runs between them."""
    sent(world, wanted(3, 2_000, "a"), [b"k1", b"k2", b"k1"], REJECT)
    sent(world, wanted(3, HOUR_MS, "b"), [b"k1", b"k2", b"k3"], [REPLACE, KEEP, REJECT])
    world.checkpoint()
    sent(world, wanted(3, 30 * HOUR_MS, "c"), [b"k3", b"k3", b"k4"], REPLACE)
    world.checkpoint()
    sent(world, wanted(2, 3_000, "d"), [b"k4", b"k5"], REPLACE)
    world.pass_ms(5_000)
    world.checkpoint()
    sent(world, wanted(2, 40_000, "e"), [b"k2", b"k5"], REJECT)


@pytest.mark.parametrize("way", [None, PowerLoss.ALL_LOST, PowerLoss.TORN, PowerLoss.REORDERED])
def test_rule_P1_verdicts_and_rows_are_whole_or_not_there_wherever_the_server_dies(way: PowerLoss | None) -> None:
    whole = World()
    begun = len(whole.disk.operations)
    live(whole)
    operations = len(whole.disk.operations)
    random = Random(operations)
    for dies_at in sorted(random.sample(range(begun + 1, operations), 40)):
        world = World()
        world.disk.faults.crash_at = dies_at
        with pytest.raises(Crash):
            live(world)
        again = world.after_crash(way, dies_at)
        end(again)


class Model:
    """One dict: which row has a key, as long as it is pending."""

    def __init__(self) -> None:
        self.holders: dict[bytes, int] = {}

    def send(self, base_sequence: int, keys: Sequence[bytes], policies: Sequence[int]) -> list[Verdict]:
        told: list[Verdict] = []
        for sequence, (key, policy) in enumerate(zip(keys, policies, strict=True), base_sequence):
            holder = self.holders.get(key)
            if not key or holder is None:
                told.append((ACCEPTED, 0))
            else:
                told.append(({REJECT: REJECTED, KEEP: KEPT, REPLACE: REPLACED}[policy], holder))
            if key and (holder is None or policy == REPLACE):
                self.holders[key] = sequence
        return told


@pytest.mark.parametrize("seed", range(12))
def test_random_lives_agree_with_one_dict(seed: int) -> None:
    random, world, model = Random(seed), World(seed=seed, load_ahead_ms=1_000), Model()
    numbered = 0
    for _ in range(40):
        match random.choice("sssskcCpx"):
            case "s" | "k":
                batches = []
                for _ in range(random.choice((1, 1, 3))):
                    keys = [
                        random.choice((b"", b"k%d" % random.randrange(12))) for _ in range(random.choice((1, 4, 40)))
                    ]
                    policies = [random.choice((REJECT, KEEP, REPLACE)) for _ in keys]
                    numbered += 1
                    rows = wanted(len(keys), random.choice((2, 30, 60)) * HOUR_MS, f"b{numbered}")
                    batches.append((send(world, rows, keys, policies), keys, policies))
                world.settle()
                for number, keys, policies in batches:
                    base = world.outside.accepted[number][1].base_sequence
                    flags = [policy if key else 0 for key, policy in zip(keys, policies, strict=True)]
                    assert verdicts(world, number) == model.send(base, keys, flags)
            case "c":
                world.checkpoint()
            case "C":
                asked = world.some_receipts(random)
                if asked is not None:
                    world.cancel(asked)
                    world.settle()
                    gone = set(asked.sequences.tolist())
                    model.holders = {key: row for key, row in model.holders.items() if row not in gone}
            case "p":
                world.pass_ms(random.choice((10, 2_000)))
            case "x":
                world = world.after_crash(random.choice((None, PowerLoss.ALL_LOST, PowerLoss.TORN)), seed)
                for number in random.sample(sorted(world.outside.accepted), min(3, len(world.outside.accepted))):
                    if world.outside.last_number - number < 1:
                        world.send_again(number)
                world.settle()
    end(world)


def test_a_round_takes_no_more_than_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.delay.ending.keyed_sends.ROUND_ROWS_MAX", 4)
    world = World()
    world.own_all_keys()
    rounds: list[int] = []
    queue = KeyedSends._queue

    def counted(self: KeyedSends, batches: Sequence[object], looked_up: Sequence[object]) -> None:
        rounds.append(len(batches))
        queue(self, batches, looked_up)  # type: ignore[arg-type]

    monkeypatch.setattr(KeyedSends, "_queue", counted)
    numbers = [send(world, wanted(2, 50_000, f"n{n}"), [b"%d" % n, b"x"], REJECT) for n in range(6)]
    world.settle()
    assert rounds == [1, 2, 2, 1]
    assert [verdicts(world, number)[0] for number in numbers] == [(ACCEPTED, 0)] * 6
