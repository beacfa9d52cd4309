"""Keyed sends: the verdict about each row is durable before anybody hears of it, and the same in each life."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from delayd.batch.content import Hasher
from delayd.errors import SlowDown
from delayd.testing.tree import PowerLoss
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


def flying() -> World:
    """A world with a row that is in flight, under the key a: its target hangs."""
    world = World()
    sent(world, wanted(1, 1_000, "flies"), [b"a"], REJECT)
    world.outside.targets[0x7001].hangs = True
    world.pass_ms(2_000)
    return world


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
