"""The last group of a message log does not check: what names a message of it proves that it was durable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delayd.errors import DamagedData
from delayd.log.group import MAGIC_BYTES
from delayd.log.log import segment_name
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from tests.memory_files import content, files, put
from tests.worlds.delay import FOLDER, TARGET_IDS, Remains, World, wanted

HOUR_MS = 3_600_000
LOG = f"{FOLDER}/message/{segment_name(0)}"
CHECKPOINT = f"{FOLDER}/checkpoint"


def left_behind(delay_ms: int) -> tuple[Remains, str, bytes]:
    """What a power loss leaves a second after a message was sent; the message log and its bytes."""
    world = World()
    world.send(wanted(1, HOUR_MS, "first"))
    world.settle()
    world.send(wanted(1, delay_ms, "last"))
    world.pass_ms(1_000)
    remains = world.remains(PowerLoss.ALL_LOST)
    (path,) = files(remains.disk, f"{FOLDER}/message")
    return remains, path, content(remains.disk, path)


def with_damage(whole: bytes, damage: str) -> bytes:
    return whole[:-8] if damage == "short" else whole[:-1] + bytes([whole[-1] ^ 1])


@pytest.mark.parametrize("damage", ["flipped", "short"])
def test_rule_L5_a_last_group_that_an_outcome_names_is_damage_and_is_not_cut(damage: str) -> None:
    remains, path, whole = left_behind(500)
    bad = with_damage(whole, damage)
    put(remains.disk, path, bad)
    for _ in range(2):
        with pytest.raises(DamagedData, match=r"message 2 from there on was durable.*give-up") as raised:
            World(remains)
        assert raised.value.path == path and content(remains.disk, path) == bad
    put(remains.disk, path, whole)
    again = World(remains)
    again.drain(2 * HOUR_MS)
    again.check_books()
    assert len(again.outside.targets[TARGET_IDS[0]].log) == 2


@pytest.mark.parametrize("damage", ["flipped", "short"])
def test_rule_L5_a_last_group_that_no_outcome_names_is_cut_as_torn(damage: str) -> None:
    remains, path, whole = left_behind(2 * HOUR_MS)
    put(remains.disk, path, with_damage(whole, damage))
    again = World(remains)
    assert again.core.intake.next_sequence == 2
    assert len(content(remains.disk, path)) < len(whole)


def filed_and_not_counted() -> tuple[Remains, Remains, bytes]:
    """What a power loss leaves before a checkpoint that files message 2, and after it; the message log."""
    world = World()
    world.send(wanted(1, 2 * HOUR_MS, "first"))
    world.settle()
    world.checkpoint()
    world.send(wanted(1, 2 * HOUR_MS, "last"))
    world.pass_ms(1_000)
    before = world.remains(PowerLoss.ALL_LOST)
    world.checkpoint()
    after = world.remains(PowerLoss.ALL_LOST)
    return before, after, content(after.disk, LOG)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("damage", ["flipped", "short"])
def test_rule_L5_a_last_group_whose_rows_are_filed_is_damage_and_is_not_cut(damage: str, published: bool) -> None:
    """A checkpoint died before the state counted it, or the state is an older one than the checkpoint file."""
    before, after, whole = filed_and_not_counted()
    remains = replace(after, state=before.state)
    if not published:
        put(remains.disk, CHECKPOINT, content(before.disk, CHECKPOINT))
    bad = with_damage(whole, damage)
    put(remains.disk, LOG, bad)
    why = (
        "the checkpoint file counts the log up to" if published else "message 2 from there on was durable: it is filed"
    )
    with pytest.raises(DamagedData, match=why) as raised:
        World(remains)
    assert raised.value.path == LOG and content(remains.disk, LOG) == bad
    put(remains.disk, LOG, whole)
    again = World(remains)
    again.drain(3 * HOUR_MS)
    again.check_books()


def test_rule_L5_rows_that_a_checkpoint_has_counted_prove_nothing_of_a_torn_tail() -> None:
    before, _, whole = filed_and_not_counted()
    put(before.disk, LOG, with_damage(whole, "short"))
    assert World(before).core.intake.next_sequence == 2


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_rule_L5_a_row_that_took_the_place_of_another_one_was_durable(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The outcome of the row that was moved names the row that took its place, which has no outcome yet."""
    world = World()
    world.send(wanted(1, HOUR_MS, "moved"))
    world.settle()
    world.checkpoint()
    world.reschedule(world.receipts("moved"), START_MS + 2 * HOUR_MS)
    world.pass_ms(1_000)
    remains = world.remains(PowerLoss.ALL_LOST)
    whole = content(remains.disk, LOG)
    if damage == "gone":
        put(remains.disk, LOG, whole[: whole.rindex(MAGIC_BYTES)])
        assert World(remains).core.intake.next_sequence == 3
        assert "log_end_lost" in caplog.text and "outcomes_up_to=2" in caplog.text
    else:
        put(remains.disk, LOG, with_damage(whole, damage))
        with pytest.raises(DamagedData, match=r"message 2 from there on was durable: an outcome in .* names it"):
            World(remains)


@pytest.mark.parametrize("damage", ["flipped", "short"])
def test_rule_L5_what_a_stop_in_order_has_written_is_never_cut(damage: str) -> None:
    world = World()
    world.send(wanted(1, 2 * HOUR_MS, "last"))
    world.settle()
    assert world.stop()
    remains = world.remains(PowerLoss.ALL_LOST)
    bad = with_damage(content(remains.disk, LOG), damage)
    put(remains.disk, LOG, bad)
    if damage == "short":
        with pytest.raises(DamagedData):
            World(remains)
    else:
        # Its last checkpoint counts all of it, so a start needs none of it.
        assert World(remains).core.intake.next_sequence == 2
    assert content(remains.disk, LOG) == bad
