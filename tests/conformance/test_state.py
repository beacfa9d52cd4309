"""What every state does: LMDB's and the one in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delayd.errors import DamagedValue
from delayd.machine.state import LmdbState, State
from delayd.testing.state import MemoryState

Damage = Callable[[State, bytes], State]


@pytest.fixture
def damage(folder_on_disk: Path) -> Damage:
    """Turns a bit of a stored value over; the state is opened anew."""

    def flip(state: State, key: bytes) -> State:
        if isinstance(state, MemoryState):
            state.flip(key, 3)
            return state
        state.close()
        folder = folder_on_disk / "new" / "state.lmdb"
        data = bytearray((folder / "data.mdb").read_bytes())
        for place in [found.end() for found in re.finditer(re.escape(key), data)]:
            data[place] ^= 8
        (folder / "data.mdb").write_bytes(data)
        return LmdbState(str(folder))

    return flip


@pytest.fixture(params=["lmdb", "memory"])
def state(request: pytest.FixtureRequest, folder_on_disk: Path) -> Iterator[State]:
    made = LmdbState(str(folder_on_disk / "new" / "state.lmdb")) if request.param == "lmdb" else MemoryState()
    yield made
    made.close()


def test_a_committed_pair_is_read_and_a_missing_key_is_none(state: State) -> None:
    state.commit([(b"a", b"1"), (b"b", b"")])
    assert state.get(b"a") == b"1"
    assert state.get(b"b") == b""
    assert state.get(b"c") is None


def test_a_later_put_replaces_and_a_remove_removes(state: State) -> None:
    state.commit([(b"a", b"1"), (b"b", b"2")])
    state.commit([(b"a", b"3")], [b"b", b"never there"])
    assert state.scan(b"") == [(b"a", b"3")]


def test_a_key_both_removed_and_put_is_put(state: State) -> None:
    state.commit([(b"a", b"1")])
    state.commit([(b"a", b"2")], [b"a"])
    assert state.get(b"a") == b"2"


def test_of_two_puts_of_a_key_the_last_counts(state: State) -> None:
    state.commit([(b"a", b"1"), (b"a", b"2")])
    assert state.get(b"a") == b"2"


def test_puts_may_come_one_at_a_time(state: State) -> None:
    state.commit((bytes([byte]), b"1") for byte in b"cab")
    assert [key for key, _ in state.scan(b"")] == [b"a", b"b", b"c"]
    with pytest.raises(ZeroDivisionError):
        state.commit((bytes([byte]), bytes([1 // (byte - 100)])) for byte in b"ed")
    assert [key for key, _ in state.scan(b"")] == [b"a", b"b", b"c"]


def test_scan_gives_exactly_the_keys_of_a_prefix_in_order(state: State) -> None:
    keys = [b"hour/\x00\x02", b"hour/\x00\x01", b"hour/\xff", b"hour", b"hours", b"a", b"z"]
    state.commit([(key, key[::-1]) for key in keys])
    assert [key for key, _ in state.scan(b"hour/")] == [b"hour/\x00\x01", b"hour/\x00\x02", b"hour/\xff"]
    assert [key for key, _ in state.scan(b"")] == sorted(keys)
    assert state.scan(b"zz") == []
    assert state.scan(b"\xff\xff") == []


def test_an_empty_state_scans_to_nothing(state: State) -> None:
    assert state.scan(b"") == []
    assert state.scan(b"a") == []


def test_an_empty_commit_is_fine(state: State) -> None:
    state.commit([])
    assert state.scan(b"") == []


@pytest.mark.parametrize("key", [b"", b"k" * 512])
def test_a_key_that_does_not_fit_refuses_the_whole_commit(state: State, key: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 511"):
        state.commit([(b"a", b"1"), (key, b"2")])
    with pytest.raises(ValueError, match="1 to 511"):
        state.commit([(b"a", b"1")], [key])
    assert state.scan(b"") == []


def test_the_longest_key_and_a_large_value_fit(state: State) -> None:
    state.commit([(b"k" * 511, b"v" * 100_000)])
    assert state.get(b"k" * 511) == b"v" * 100_000


def test_a_second_close_is_fine(state: State) -> None:
    state.close()
    state.close()


def test_rule_L9_a_value_that_does_not_check_is_named_and_never_returned(state: State, damage: Damage) -> None:
    state.commit([(b"hour/\x00\x01", b"one"), (b"hour/\x00\x02", b"two"), (b"hours", b"")])
    state = damage(state, b"hour/\x00\x01")
    assert state.get(b"hour/\x00\x02") == b"two"
    with pytest.raises(DamagedValue, match=r"the value of hour/0001 in .* does not check") as refused:
        state.get(b"hour/\x00\x01")
    assert refused.value.key == b"hour/\x00\x01" and refused.value.path.endswith(("data.mdb", "state"))
    with pytest.raises(DamagedValue):
        state.scan(b"hour/")
    damaged: list[DamagedValue] = []
    assert state.scan(b"", damaged) == [(b"hour/\x00\x02", b"two"), (b"hours", b"")]
    assert [error.key for error in damaged] == [b"hour/\x00\x01"]
    state.commit([(b"hour/\x00\x01", b"mended")])
    assert state.get(b"hour/\x00\x01") == b"mended"
    state.close()
