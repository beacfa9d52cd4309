"""The index of keys in a server: what enters it, what a checkpoint counts of it, and how it is made again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.batch.content import Names
from delayd.delay.damage import keys_rebuild
from delayd.errors import DiskFull
from delayd.hours import hour_of_ms
from delayd.log.dispatch import Reason
from delayd.log.ended import ENDED, EndedRows
from delayd.log.key_run import STATE_KEY, KnownRuns, run_path
from delayd.log.schedule import schedule_path
from delayd.testing.clock import START_MS
from delayd.testing.disk import Crash
from delayd.testing.state import MemoryState
from delayd.testing.tree import PowerLoss
from tests.batches import SUBJECT, messages
from tests.worlds.delay import PRODUCER_ID, World, small_slots
from tests.worlds.files import FOLDER

HOUR_MS = 3_600_000
REPLACE = 2
FAR_MS = 40 * HOUR_MS


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_slots():
        yield


def disk_full(*args: object) -> None:
    raise DiskFull("state")


def flip(world: World, path: str, byte: int) -> None:
    """Flip a bit, or flip it back."""
    file = world.disk.open(path, write=True)
    file.pwritev([bytes([file.pread(1, byte)[0] ^ 1])], byte)
    file.sync()
    file.close()


def send(world: World, keys: list[bytes], number: int, due_ms: int = FAR_MS) -> None:
    """Send one message a key, in one batch."""
    bodies = [b"%d-%d" % (number, row) for row in range(len(keys))]
    due = [START_MS + due_ms + row for row in range(len(keys))]
    flags = [REPLACE if key else 0 for key in keys]
    data = messages(bodies, due=due, keys=keys, flags=flags, part=ProducerPart(PRODUCER_ID, number, 0))
    world.core.send(parse(data), lambda what, duplicate: None)
    world.settle()


def found(world: World, keys: list[bytes]) -> list[int]:
    """The sequence of the newest row of each key."""
    names = Names.of_lists([SUBJECT] * len(keys), keys)
    sequences: list[int] = world.core._keys.find(names).rows["sequence"].tolist()
    return sequences


def known(world: World) -> KnownRuns:
    """What the state says."""
    stored = world.state.get(STATE_KEY)
    assert stored is not None
    return KnownRuns.decode(stored)


def key_files(world: World) -> list[str]:
    return world.disk.list_folder(f"{FOLDER}/keys")


def make_again(world: World) -> None:
    """Let the ticks pass in which the index is made again."""
    world.pass_ms(2_000)


def test_rows_take_their_keys_when_they_are_durable_and_after_each_start() -> None:
    world = World()
    send(world, [b"a", b"", b"b"], 1)
    assert found(world, [b"a", b"b", b"c"]) == [1, 3, 0]
    again = world.after_crash()
    assert found(again, [b"a", b"b", b"c"]) == [1, 3, 0]
    again.checkpoint()
    send(again, [b"a", b"c"], 2)
    last = again.after_crash(PowerLoss.ALL_LOST)
    assert found(last, [b"a", b"b", b"c"]) == [4, 3, 5]
    assert last.core._keys.whole


def test_a_checkpoint_that_fails_loses_no_key_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    send(world, [b"a"], 1)
    monkeypatch.setattr(MemoryState, "commit", disk_full)
    world.core.checkpoint(lambda offset: None)
    world.settle()
    assert key_files(world) == []
    monkeypatch.undo()
    send(world, [b"b"], 2)
    world.pass_ms(2_000)
    assert [run.entries for run in known(world).runs] == [2]
    assert found(world.after_crash(), [b"a", b"b"]) == [1, 2]


@pytest.mark.parametrize("hurt", ["missing", "flipped", "value"])
def test_rule_L9_a_damaged_index_is_made_again_from_the_schedule_logs(hurt: str) -> None:
    world = World()
    send(world, [b"a", b"b"], 1)
    send(world, [b"a"], 2, FAR_MS + HOUR_MS)
    world.checkpoint()
    send(world, [b"c", b"b"], 3)
    path = run_path(FOLDER, known(world).runs[0].number)
    if hurt == "missing":
        world.disk.remove(path)
    elif hurt == "flipped":
        flip(world, path, 70)
    else:
        world.state.flip(STATE_KEY)
    again = world.after_crash()
    assert not again.core._keys.whole
    make_again(again)
    assert found(again, [b"a", b"b", b"c"]) == [3, 5, 4]
    again.checkpoint()
    assert found(again.after_crash(), [b"a", b"b", b"c"]) == [3, 5, 4]
    named = {run_path(FOLDER, run.number) for run in known(again).runs}
    assert named <= {f"{FOLDER}/keys/{name}" for name in key_files(again)}


def test_an_index_that_is_not_whole_stays_so_over_checkpoints_and_starts() -> None:
    world = World()
    send(world, [b"a"], 1)
    world.checkpoint()
    send(world, [b"b"], 2, FAR_MS + HOUR_MS)
    hour = schedule_path(FOLDER, hour_of_ms(START_MS + FAR_MS))
    flip(world, run_path(FOLDER, known(world).runs[0].number), 70)
    flip(world, hour, 200)
    again = world.after_crash()
    again.checkpoint()
    assert not known(again).whole and key_files(again) == []
    flip(again, hour, 200)
    last = again.after_crash()
    assert not last.core._keys.whole
    make_again(last)
    assert found(last, [b"a", b"b"]) == [1, 2]


def test_the_index_waits_for_an_hour_that_cannot_be_read_and_is_then_made_again() -> None:
    world = World()
    send(world, [b"a"], 1)
    send(world, [b"b"], 2, FAR_MS + HOUR_MS)
    world.checkpoint()
    hour = schedule_path(FOLDER, hour_of_ms(START_MS + FAR_MS + HOUR_MS))
    world.disk.remove(run_path(FOLDER, known(world).runs[0].number))
    flip(world, hour, 200)
    again = world.after_crash()
    make_again(again)
    assert not again.core._keys.whole and key_files(again) == []
    flip(again, hour, 200)
    make_again(again)
    assert not again.core._keys.whole, "it is tried every 30 s"
    again.pass_ms(keys_rebuild.AGAIN_MS)
    assert found(again, [b"a", b"b"]) == [1, 2]


def test_a_row_that_took_no_key_has_no_entry_after_the_index_was_made_again() -> None:
    world = World()
    send(world, [b"a"], 1)
    send(world, [b"a"], 2, FAR_MS + HOUR_MS)
    send(world, [b"b"], 3)
    world.core.ledger.owed.take(ended_rows(world, [(2, FAR_MS + HOUR_MS)], Reason.REJECTED))
    world.core.ledger.owed.take(ended_rows(world, [(3, FAR_MS)], Reason.CANCELLED))
    world.pass_ms(100)
    world.checkpoint()
    world.disk.remove(run_path(FOLDER, known(world).runs[0].number))
    again = world.after_crash()
    make_again(again)
    assert found(again, [b"a", b"b"]) == [1, 3]


def ended_rows(world: World, rows: list[tuple[int, int]], reason: Reason) -> EndedRows:
    found = np.zeros(len(rows), ENDED)
    for row, (sequence, due_ms) in zip(found, rows, strict=True):
        row["sequence"], row["deliver_at_ms"] = sequence, START_MS + due_ms
        row["hour"], row["reason"] = hour_of_ms(START_MS + due_ms), reason
    return found


@pytest.mark.parametrize("way", [None, PowerLoss.ALL_LOST, PowerLoss.TORN])
def test_a_crash_at_any_operation_of_checkpoints_and_merges_loses_no_key(way: PowerLoss | None) -> None:
    def live(world: World) -> None:
        for number in range(1, 6):
            send(world, [b"k%d" % number, b"same"], number)
            world.checkpoint()
        world.pass_ms(2_000)
        world.checkpoint()

    whole = World()
    live(whole)
    operations = len(whole.disk.operations)
    assert operations > 100
    for dies_at in range(1, operations, 3):
        world = World()
        world.disk.faults.crash_at = dies_at
        try:
            live(world)
        except Crash:
            pass
        again = world.after_crash(way, dies_at)
        assert again.core._keys.whole
        last = again.core.intake.next_sequence - 1
        expected = [2 * number - 1 if 2 * number <= last else 0 for number in range(1, 6)]
        assert found(again, [b"k%d" % number for number in range(1, 6)]) == expected
        assert found(again, [b"same"]) == [last]
