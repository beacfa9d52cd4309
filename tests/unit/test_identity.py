"""The identity of a directory and the epochs of its lives."""

from __future__ import annotations

import msgpack
import pytest

from delayd.errors import DamagedData, DamagedValue, EpochOutOfRange, NewerFormat, StateMissing
from delayd.machine.identity import (
    EPOCH_MAX,
    EPOCH_STEPS_MAX,
    FORMAT,
    Identity,
    check_epoch,
    open_identity,
)
from delayd.testing.disk import MemoryDisk
from delayd.testing.state import MemoryState

LOG_ID = (1 << 64) - 3


def never_drawn() -> int:
    raise AssertionError("a known directory keeps its log_id")


def test_rule_H3_the_epoch_is_durable_when_it_is_known() -> None:
    disk = MemoryDisk()
    state = MemoryState(disk)
    open_identity(state, "DATA/meta", lambda: LOG_ID)
    assert state.commits == 1
    assert open_identity(state.after_crash(), "DATA/meta", never_drawn).epoch == 2


def test_a_directory_of_a_newer_delayd_is_left_alone() -> None:
    state = MemoryState()
    state.commit([(b"format", msgpack.packb(FORMAT + 1))])
    with pytest.raises(NewerFormat, match="run a newer delayd"):
        open_identity(state, "DATA/meta", never_drawn)
    assert state.commits == 1


@pytest.mark.parametrize(
    "pairs", [[(b"epoch", b"\x01")], [(b"log_id", b"\x01")], [(b"log_id", b"\x01"), (b"epoch", b"")]]
)
def test_a_directory_that_lost_a_part_of_its_identity_is_damaged(pairs: list[tuple[bytes, bytes]]) -> None:
    state = MemoryState()
    state.commit([(b"format", b"\x01"), *pairs])
    with pytest.raises(DamagedData, match="DATA/meta"):
        open_identity(state, "DATA/meta", never_drawn)


@pytest.mark.parametrize("key", [b"format", b"log_id", b"epoch", b"identity"])
def test_rule_L9_an_identity_is_kept_twice_and_one_damaged_value_changes_nothing(key: bytes) -> None:
    state = MemoryState()
    open_identity(state, "DATA/meta", lambda: LOG_ID)
    for bit in range(8 * 5):
        state.flip(key, bit)
        assert open_identity(state, "DATA/meta", never_drawn) == Identity(LOG_ID, bit + 2)


@pytest.mark.parametrize("key", [b"log_id", b"epoch"])
def test_rule_L9_an_identity_that_checks_in_neither_place_is_refused(key: bytes) -> None:
    state = MemoryState()
    open_identity(state, "DATA/meta", lambda: LOG_ID)
    state.flip(key)
    state.flip(b"identity")
    with pytest.raises(DamagedValue, match="the value of"):
        open_identity(state, "DATA/meta", never_drawn)


def test_logs_without_a_state_are_refused_by_name_and_an_empty_directory_is_new() -> None:
    disk = MemoryDisk()
    disk.make_folder("/data/delay/message")
    assert open_identity(MemoryState(), "/data/delay/state.lmdb", lambda: LOG_ID, disk).epoch == 1
    disk.open("/data/delay/message/0.log", create=True).close()
    with pytest.raises(StateMissing, match=r"state\.lmdb holds no state, and /data/delay/message shows"):
        open_identity(MemoryState(), "/data/delay/state.lmdb", lambda: LOG_ID, disk)


@pytest.mark.parametrize(("epoch", "heard"), [(EPOCH_MAX + 1, 0), ((1 << 64) - 1, 3), (4 + EPOCH_STEPS_MAX, 3)])
def test_rule_H8_an_epoch_out_of_bounds_is_named(epoch: int, heard: int) -> None:
    with pytest.raises(EpochOutOfRange, match=str(epoch)):
        check_epoch(epoch, heard, "delay server 1")
    check_epoch(3 + EPOCH_STEPS_MAX, 3, "delay server 1")
    check_epoch(EPOCH_MAX, 0, "delay server 1")
