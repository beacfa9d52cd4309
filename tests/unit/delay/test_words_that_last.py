"""An operator's word at a delay server is durable before it is answered: no crash and no restart takes it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from delayd.delay.handoff.link import Phase
from delayd.errors import DelaydError, ServerFenced
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.hour import dispatch_path, schedule_path
from delayd.outcome import Outcome
from delayd.testing.clock import START_MS
from delayd.testing.disk import Crash
from delayd.testing.tree import PowerLoss
from tests.unit.delay.answers import outcomes
from tests.unit.delay.handoff import TARGET, link_of, ready_world, target_of
from tests.worlds.delay import FOLDER, PRODUCER_ID, Remains, World, small_slots, wanted

FAR_MS = 5 * HOUR_MS
FAR = hour_of_ms(START_MS + FAR_MS)
HOUR = hour_of_ms(START_MS)
WAYS = (None, PowerLoss.ALL_LOST, PowerLoss.REORDERED)


class Word(NamedTuple):
    """One word: what stands before it, how it is said, and what must hold in each life behind its answer."""

    prepare: Callable[[], World]
    say: Callable[[World, Callable[..., None]], None]
    is_kept: Callable[[World], bool]


def next_life(world: World, way: PowerLoss | None = None) -> World:
    return world.after_crash(way, late=False)


def after_the_targets_loss() -> World:
    world = ready_world()
    target_of(world).log.clear()
    target_of(world).synced = 0
    world.cut(TARGET)
    world.send(wanted(1, 0, "a"))
    world.pass_ms(10_000)
    assert link_of(world).alarm
    return world


def fenced_by_the_target(epochs_ahead: int = 1_000) -> World:
    """This directory was restored: the target has heard of a far later life of it."""
    world = ready_world()
    target_of(world).origin = (world.core.site.identity.epoch + epochs_ahead, 0xBAD)
    world.cut(TARGET)
    world.pass_ms(3_000)
    assert world.core.fence.is_up
    return world


def with_lost_value(key: bytes) -> World:
    world = ready_world()
    world.checkpoint()
    remains = world.remains(late=False)
    remains.state._pairs[key] = b"no checksum"
    life = World(remains)
    life.settle()
    assert len(life.core.memory.quarantine) == 1
    return life


def without_file(path: str) -> World:
    world = World()
    world.send([*wanted(2, 500, "sent"), *wanted(3, FAR_MS, "far"), *wanted(2, 600_000, "later")])
    world.pass_ms(2_000)
    world.checkpoint()
    remains = world.remains(late=False)
    remains.disk.remove(path)
    life = World(remains)
    life.send(wanted(2, FAR_MS, "beside"))
    life.settle()
    life.checkpoint()
    assert len(life.core.memory.quarantine) == 1
    return life


def with_rotten_bodies() -> World:
    world = World(tail_bytes=0, source_cache_bytes=1 << 20)
    world.send(wanted(3, FAR_MS, "rotten"))
    world.settle()
    world.checkpoint()
    file = world.disk.open(schedule_path(FOLDER, FAR), write=True)
    file.pwritev([b"ROTTEN-1"], file.pread(file.size(), 0).index(b"rotten-1"))
    file.sync()
    world.clock.advance(FAR_MS - 10_000)
    world.pass_ms(15_000)
    return world


def release(id_: str) -> Callable[[World, Callable[..., None]], None]:
    return lambda world, hear: world.core.repair.decisions.release(id_, hear)


def drop(id_: str) -> Callable[[World, Callable[..., None]], None]:
    return lambda world, hear: world.core.repair.decisions.drop(id_, hear)


def nothing_waits(world: World) -> bool:
    return not len(world.core.memory.quarantine)


def speaks_to_its_target(world: World) -> bool:
    return link_of(world).phase is Phase.READY and not link_of(world).alarm and not world.core.fence.is_up


def takes_batches(world: World) -> bool:
    number = world.send(wanted(1, FAR_MS, f"again-{world.outside.last_number}"))
    world.settle()
    return nothing_waits(world) and number in world.outside.accepted


WORDS = {
    "target lost": Word(
        ready_world,
        lambda world, hear: world.core.handoff.targets.lose(TARGET, hear),
        lambda world: world.core.handoff.targets._words.is_freed(TARGET),
    ),
    "target accept, which lost data": Word(
        after_the_targets_loss,
        lambda world, hear: world.core.handoff.targets.accept(TARGET, hear),
        speaks_to_its_target,
    ),
    "target accept, of a restored server": Word(
        fenced_by_the_target, lambda world, hear: world.core.handoff.targets.accept(TARGET, hear), speaks_to_its_target
    ),
    "quarantine release target": Word(lambda: with_lost_value(b"target/mail"), release("target/mail"), nothing_waits),
    "quarantine release producer": Word(
        lambda: with_lost_value(b"producer/" + PRODUCER_ID.to_bytes(8)),
        release(f"producer/{PRODUCER_ID:016x}"),
        takes_batches,
    ),
    "quarantine drop schedule": Word(
        lambda: without_file(schedule_path(FOLDER, FAR)), drop(f"schedule/{hour_name(FAR)}"), nothing_waits
    ),
    "quarantine drop dispatch": Word(
        lambda: without_file(dispatch_path(FOLDER, HOUR)), drop(f"dispatch/{hour_name(HOUR)}"), nothing_waits
    ),
    "quarantine drop rows": Word(
        with_rotten_bodies,
        drop(f"rows/{hour_name(FAR)}"),
        lambda world: nothing_waits(world) and outcomes(world)[Outcome.DEAD] == 3,
    ),
}


def said(world: World, word: Word) -> list[object]:
    """Say it, and do all that comes of it, a checkpoint too; what was answered, perhaps before a crash."""
    told: list[object] = []

    def hear(*answer: object) -> None:
        assert not isinstance(answer[0], DelaydError) and answer[0], answer
        told.append(answer)

    try:
        word.say(world, hear)
        world.settle()
        assert len(told) == 1
        world.pass_ms(1_000)
        world.checkpoint()
    except Crash:
        pass
    return told


@pytest.mark.parametrize("name", WORDS)
def test_a_word_that_was_answered_is_kept_whichever_disk_operation_the_server_dies_at(name: str) -> None:
    word = WORDS[name]
    with small_slots():
        world = word.prepare()
        first = len(world.disk.operations) + 1
        assert said(world, word)
        assert word.is_kept(world)
        last = len(world.disk.operations) + 1
        for at in range(first, last + 1):
            world = word.prepare()
            world.disk.faults.crash_at = at
            told = said(world, word)
            for way in WAYS:
                life = next_life(world, way)
                if not told:
                    # It may be said again, and then it counts.
                    life.pass_ms(3_000)
                    if not word.is_kept(life):
                        assert said(life, word)
                life.pass_ms(3_000)
                for each in (life, next_life(life), next_life(life, PowerLoss.ALL_LOST)):
                    each.pass_ms(3_000)
                    assert word.is_kept(each), f"died {way} at {at}, {world.disk.operations[-1]}, told {told}"
                    each.check_logs()


def test_rule_H8_a_server_that_its_target_fenced_off_gives_no_receipts_in_its_next_life_either() -> None:
    world = fenced_by_the_target()
    for way in WAYS:
        life = next_life(world, way)
        target_of(life).up = False
        for each in (life, next_life(life)):
            number = each.send(wanted(1, 1_000, "new"))
            each.pass_ms(5_000)
            assert [(refused, type(why)) for refused, why in each.outside.refused] == [(number, ServerFenced)]
            each.outside.refused.clear()
        # The newest directory is back, or the target has made up its mind: it serves again, and the mark is gone.
        life = next_life(life)
        target_of(life).restart()
        target_of(life).origin = (0, 0)
        life.pass_ms(5_000)
        for each in (life, next_life(life, PowerLoss.ALL_LOST)):
            number = each.send(wanted(1, 1_000, "new"))
            each.settle()
            assert number in each.outside.accepted and not each.state.scan(b"refuser/")


def test_rule_H8_a_mark_that_does_not_check_counts_as_one() -> None:
    world = fenced_by_the_target()
    remains: Remains = world.remains(late=False)
    ((key, _),) = remains.state.scan(b"refuser/")
    remains.state.flip(key)
    assert World(remains).core.fence.is_up
