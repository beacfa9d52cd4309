"""The last group of a message log does not check: an outcome that names a message of it proves that it was durable."""

from __future__ import annotations

import pytest

from delayd.errors import DamagedData
from delayd.testing.tree import PowerLoss
from tests.memory_files import content, files, put
from tests.worlds.delay import FOLDER, TARGET_IDS, Remains, World, wanted

HOUR_MS = 3_600_000


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
        with pytest.raises(DamagedData, match=r"message 2 was in it.*give-up") as raised:
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
