"""An operator's word at a delay server is durable before it is answered: no crash and no restart takes it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from delayd.errors import DiskReserve, ServerFenced
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.hour import dispatch_path, schedule_path
from delayd.outcome import MessageState
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES, Crash
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import Head
from delayd.wire.requests import RequestType
from tests.worlds.delay import FOLDER, PRODUCER_ID, TARGET_IDS, World, small_slots, wanted

TARGET = TARGET_IDS[0]
FAR_MS = 5 * HOUR_MS
FAR, HOUR = hour_of_ms(START_MS + FAR_MS), hour_of_ms(START_MS)
WAYS = (None, PowerLoss.ALL_LOST, PowerLoss.REORDERED)


class Word(NamedTuple):
    """One word: what stands before it, its request, and what must hold in each life behind its answer."""

    prepare: Callable[[], World]
    kind: RequestType
    head: Head
    is_kept: Callable[[World], bool]


def after_the_targets_loss() -> World:
    world = World.greeted()
    target = world.outside.targets[TARGET]
    target.log.clear()
    target.synced = 0
    world.cut(TARGET)
    world.send(wanted(1, 0, "a"))
    world.pass_ms(10_000)
    assert world.server.is_alarmed_at(TARGET)
    return world


def fenced_by_the_target() -> World:
    """This directory was restored: the target has heard of a far later life of it."""
    world = World.greeted()
    world.outside.targets[TARGET].origin = (world.server.epoch + 1_000, 0xBAD)
    world.cut(TARGET)
    world.pass_ms(3_000)
    assert world.server.is_fenced
    return world


def with_lost_value(key: bytes) -> World:
    world = World.greeted()
    world.checkpoint()
    remains = world.remains(late=False)
    remains.state._pairs[key] = b"no checksum"
    life = World(remains)
    life.settle()
    assert len(life.server.set_aside) == 1
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
    assert len(life.server.set_aside) == 1
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


def nothing_waits(world: World) -> bool:
    return not world.server.has_set_aside


def speaks_to_its_target(world: World) -> bool:
    return world.target_info()["state"] == "ready" and not world.server.is_fenced


def takes_batches(world: World) -> bool:
    number = world.send(wanted(1, FAR_MS, f"again-{world.outside.last_number}"))
    world.settle()
    return nothing_waits(world) and number in world.outside.accepted


def is_dead(world: World) -> bool:
    return nothing_waits(world) and world.states(world.receipts("rotten")) == [MessageState.DEAD] * 3


def mend(prepare: Callable[[], World], decision: str, id_: str, is_kept: Callable[[World], bool]) -> Word:
    return Word(prepare, RequestType.MEND, {"id": id_, "decision": decision}, is_kept)


PRODUCER = f"producer/{PRODUCER_ID:016x}"
WORDS = {
    "target lost": Word(
        World.greeted, RequestType.TARGET_LOST, {"log_id": TARGET}, lambda world: world.server.has_given_up(TARGET)
    ),
    "target accept, which lost data": Word(
        after_the_targets_loss, RequestType.TARGET_ACCEPT, {"log_id": TARGET}, speaks_to_its_target
    ),
    "target accept, of a restored server": Word(
        fenced_by_the_target, RequestType.TARGET_ACCEPT, {"log_id": TARGET}, speaks_to_its_target
    ),
    "release target": mend(lambda: with_lost_value(b"target/mail"), "release", "target/mail", nothing_waits),
    "release producer": mend(
        lambda: with_lost_value(b"producer/" + PRODUCER_ID.to_bytes(8)), "release", PRODUCER, takes_batches
    ),
    "give up schedule": mend(
        lambda: without_file(schedule_path(FOLDER, FAR)), "give-up", f"schedule/{hour_name(FAR)}", nothing_waits
    ),
    "give up dispatch": mend(
        lambda: without_file(dispatch_path(FOLDER, HOUR)), "give-up", f"dispatch/{hour_name(HOUR)}", nothing_waits
    ),
    "give up rows": mend(with_rotten_bodies, "give-up", f"rows/{hour_name(FAR)}", is_dead),
}


def said(world: World, word: Word) -> bool:
    """Say it, and do all that comes of it, a checkpoint too; whether it was answered, perhaps before a crash."""
    told: list[object] = []
    try:
        told = world.begin(word.kind, word.head)  # type: ignore[assignment]
        world.settle()
        assert len(told) == 1
        world.pass_ms(1_000)
        world.checkpoint()
    except Crash:
        pass
    for answer in told:
        assert isinstance(answer, tuple) and answer[0].get("done", True) is True, answer
    return bool(told)


@pytest.mark.parametrize("name", WORDS)
def test_a_word_that_was_answered_is_kept_whichever_disk_operation_the_server_dies_at(name: str) -> None:
    word = WORDS[name]
    with small_slots():
        world = word.prepare()
        first = len(world.disk.operations) + 1
        assert said(world, word) and word.is_kept(world)
        for at in range(first, len(world.disk.operations) + 2):
            world = word.prepare()
            world.disk.faults.crash_at = at
            told = said(world, word)
            for way in WAYS:
                life = world.after_crash(way, late=False)
                if not told:
                    # It may be said again, and then it counts.
                    life.pass_ms(3_000)
                    assert word.is_kept(life) or said(life, word)
                life.pass_ms(3_000)
                for each in (life, *(life.after_crash(again, late=False) for again in WAYS[:2])):
                    each.pass_ms(3_000)
                    assert word.is_kept(each), f"died {way} at {at}, {world.disk.operations[-1]}, told {told}"
                    each.check_logs()


def test_rule_H8_a_server_that_its_target_fenced_off_gives_no_receipts_in_its_next_life_either() -> None:
    world = fenced_by_the_target()
    for way in WAYS:
        life = world.after_crash(way, late=False)
        target = life.outside.targets[TARGET]
        target.up = False
        for each in (life, life.after_crash(None, late=False)):
            number = each.send(wanted(1, 1_000, "new"))
            each.pass_ms(5_000)
            assert [(refused, type(why)) for refused, why in each.outside.refused] == [(number, ServerFenced)]
            each.outside.refused.clear()
        # The newest directory is back, or the target has made up its mind: it serves again, and the mark is gone.
        life = life.after_crash(None, late=False)
        target = life.outside.targets[TARGET]
        target.restart()
        target.origin = (0, 0)
        life.pass_ms(5_000)
        for each in (life, life.after_crash(PowerLoss.ALL_LOST, late=False)):
            number = each.send(wanted(1, 1_000, "new"))
            each.settle()
            assert number in each.outside.accepted and not each.state.scan(b"refuser/")
    remains = world.remains(late=False)
    ((key, _),) = remains.state.scan(b"refuser/")
    remains.state.flip(key)
    assert World(remains).server.is_fenced, "a mark that does not check counts as one"


def test_rule_L8_a_restored_server_answers_an_operator_on_a_full_disk_and_can_be_told_again() -> None:
    world = fenced_by_the_target()
    world.disk.capacity_bytes = world.disk.used_bytes
    for _ in range(2):
        with pytest.raises(DiskReserve, match=r"nothing was stored: no space is left for .*; free some or move"):
            world.ask(RequestType.TARGET_ACCEPT, {"log_id": TARGET})
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(5_000)
    assert world.server.is_fenced, "what was refused is not carried out later"
    world.ask(RequestType.TARGET_ACCEPT, {"log_id": TARGET})
    world.pass_ms(1_000)
    assert speaks_to_its_target(world)
    world.send(wanted(3, 1_000, "after"))
    world.drain(10_000)
    world.check_books()


def test_rule_L8_a_target_is_given_up_on_a_full_disk_and_its_subjects_are_free_later() -> None:
    world = World.greeted()
    world.outside.targets[TARGET].up = False
    world.send(wanted(3, 1_000, "in doubt"))
    world.pass_ms(3_000)
    world.disk.capacity_bytes = world.disk.used_bytes
    with pytest.raises(DiskReserve, match="its subjects are free when there is space: no space is left for "):
        world.ask(RequestType.TARGET_LOST, {"log_id": TARGET})
    assert world.server.has_given_up(TARGET)
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(5_000)
    assert world.states(world.receipts("in doubt")) == [MessageState.IN_DOUBT] * 3
