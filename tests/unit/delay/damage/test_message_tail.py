"""The last group of a message log does not check: what names a message of it proves that it was durable (rule L5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from delayd.errors import DamagedData
from delayd.hours import HOUR_MS
from delayd.log.group import MAGIC_BYTES
from delayd.log.log import segment_name
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from tests.memory_files import content, put
from tests.worlds.delay import FOLDER, Remains, World, wanted

LOG = f"{FOLDER}/message/{segment_name(0)}"
CHECKPOINT = f"{FOLDER}/checkpoint"


def left(world: World) -> Remains:
    world.pass_ms(1_000)
    return world.remains(PowerLoss.ALL_LOST)


def handed_over() -> tuple[Remains, str]:
    world = World()
    world.send(wanted(1, HOUR_MS, "first"))
    world.settle()
    world.send(wanted(1, 500, "last"))
    return left(world), r"message 2 from there on was durable.*give-up"


def moved() -> tuple[Remains, str]:
    """The outcome of the row that was moved names the row that took its place, which has no outcome yet."""
    world = World()
    world.send(wanted(1, HOUR_MS, "moved"))
    world.settle()
    world.checkpoint()
    world.reschedule(world.receipts("moved"), START_MS + 2 * HOUR_MS)
    return left(world), "message 2 from there on was durable: an outcome in .* names it"


def filed(published: bool) -> tuple[Remains, str]:
    """A checkpoint died before the state counted it, or the state is an older one than the checkpoint file."""
    world = World()
    world.send(wanted(1, 2 * HOUR_MS, "first"))
    world.settle()
    world.checkpoint()
    world.send(wanted(1, 2 * HOUR_MS, "last"))
    before = left(world)
    world.checkpoint()
    after = replace(world.remains(PowerLoss.ALL_LOST), state=before.state)
    if published:
        return after, "the checkpoint file counts the log up to"
    put(after.disk, CHECKPOINT, content(before.disk, CHECKPOINT))
    return after, "message 2 from there on was durable: it is filed"


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("named", [handed_over, moved, lambda: filed(False), lambda: filed(True)])
def test_rule_L5_a_last_group_that_is_named_elsewhere_is_damage_and_is_not_cut(
    named: Callable[[], tuple[Remains, str]], flipped: bool
) -> None:
    remains, why = named()
    whole = content(remains.disk, LOG)
    bad = whole[:-1] + bytes([whole[-1] ^ 1]) if flipped else whole[:-8]
    put(remains.disk, LOG, bad)
    for _ in range(2):
        with pytest.raises(DamagedData, match=why) as raised:
            World(remains)
        assert raised.value.path == LOG and content(remains.disk, LOG) == bad
    put(remains.disk, LOG, whole)
    again = World(remains)
    again.drain(3 * HOUR_MS)
    again.check_books()


@pytest.mark.parametrize("counted", [False, True])
def test_rule_L5_a_last_group_that_nothing_names_is_cut_as_torn(counted: bool) -> None:
    world = World()
    world.send(wanted(1, 2 * HOUR_MS, "first"))
    world.settle()
    if counted:
        world.checkpoint()  # Rows that a checkpoint has counted prove nothing of what is behind them.
    world.send(wanted(1, 2 * HOUR_MS, "last"))
    remains = left(world)
    put(remains.disk, LOG, content(remains.disk, LOG)[:-8])
    assert World(remains).core.logs.intake.next_sequence == 2


@pytest.mark.parametrize("named", [handed_over, moved])
def test_rule_I5_a_sequence_that_an_outcome_names_behind_the_end_is_given_to_nobody(
    named: Callable[[], tuple[Remains, str]], caplog: pytest.LogCaptureFixture
) -> None:
    remains, _ = named()
    whole = content(remains.disk, LOG)
    put(remains.disk, LOG, whole[: whole.rindex(MAGIC_BYTES)])
    assert World(remains).core.logs.intake.next_sequence == 3
    assert "log_end_lost" in caplog.text and "outcomes_up_to=2" in caplog.text
