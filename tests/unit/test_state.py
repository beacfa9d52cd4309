"""State on real files, and the fake's part in crashes."""

from __future__ import annotations

import resource
from pathlib import Path

import lmdb
import pytest

from delayd.errors import DamagedData, DamagedValue, NewerFormat, NotWritable, Shortage, SyncFailed
from delayd.machine.state import LmdbState, check_stored, read_state_file


def test_a_file_that_is_no_state_is_damage(tmp_path: Path) -> None:
    (tmp_path / "state.lmdb").mkdir()
    (tmp_path / "state.lmdb" / "data.mdb").write_bytes(b"x" * 8192)
    with pytest.raises(DamagedData) as refused:
        LmdbState(str(tmp_path / "state.lmdb"))
    assert refused.value.path == str(tmp_path / "state.lmdb" / "data.mdb")


def test_a_state_of_a_newer_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.lmdb"
    LmdbState(str(path)).close()
    data = bytearray((path / "data.mdb").read_bytes())
    data[20:24] = (9).to_bytes(4, "little")
    (path / "data.mdb").write_bytes(data)
    with pytest.raises(NewerFormat, match="version 9") as refused:
        LmdbState(str(path))
    assert refused.value.version == 9


def test_a_folder_that_can_not_be_written_is_named() -> None:
    with pytest.raises(NotWritable, match="/sys/delayd-test"):
        LmdbState("/sys/delayd-test/state.lmdb")


def test_a_commit_that_can_not_be_written_stops_the_server_and_is_not_there(tmp_path: Path) -> None:
    path = str(tmp_path / "state.lmdb")
    state = LmdbState(path)
    state.commit([(b"a", b"1")])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        with pytest.raises(SyncFailed):
            state.commit([(b"a", b"2"), (b"b", b"v" * 1_000_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    state.close()
    state = LmdbState(path)
    assert state.scan(b"") == [(b"a", b"1")]
    state.close()


def test_rule_L9_each_flipped_bit_of_the_file_is_found_or_without_meaning(tmp_path: Path) -> None:
    path = tmp_path / "state.lmdb"
    state = LmdbState(str(path))
    state.commit([(b"key/%d" % number, b"v" * 50) for number in range(100)])
    state.commit([(b"key/%d" % number, b"w" * 6_000) for number in range(3)], [b"key/%d" % (9 * n) for n in range(9)])
    pairs = state.scan(b"")
    state.close()
    data = (path / "data.mdb").read_bytes()
    found = missed = 0
    for bit in range(0, 8 * len(data), 331):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        (path / "data.mdb").write_bytes(damaged)
        try:
            state = LmdbState(str(path))
        except (DamagedData, NewerFormat):
            found += 1
            continue
        named: list[DamagedValue] = []
        kept = state.scan(b"", named)
        # A transaction that LMDB takes for undone is a state that was; it can't be told from a crash.
        assert set(kept) <= set(pairs) or bit // 8 < 8192, f"bit {bit} changes a value in silence"
        found += bool(named)
        missed += not named and kept != pairs
        state.close()
    assert found > 100 and missed <= 2


def test_a_state_file_is_read_without_lmdb(tmp_path: Path) -> None:
    state = LmdbState(str(tmp_path / "state.lmdb"))
    state.commit([(b"a", b"1"), (b"b", b"2" * 10_000)])
    pairs = read_state_file(str(tmp_path / "state.lmdb" / "data.mdb"))
    assert [(pair.key, check_stored("", pair.key, pair.stored)) for pair in pairs] == state.scan(b"")
    state.close()


@pytest.mark.parametrize("when", ["before a commit", "before the close"])
def test_rule_L10_a_state_that_is_removed_under_the_server_is_written_again(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.lmdb"
    state = LmdbState(str(path))
    state.commit([(b"a", b"1")])
    (path / "data.mdb").unlink()
    if when == "before a commit":
        state.commit([(b"b", b"2")])
        # A kill here loses nothing.
        assert [pair.key for pair in read_state_file(str(path / "data.mdb"))] == [b"a", b"b"]
        state.commit([(b"c", b"3")])
    state.close()
    assert caplog.text.count("state_written_again") == 1
    again = LmdbState(str(path))
    wanted = [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")]
    assert again.scan(b"") == (wanted if when == "before a commit" else wanted[:1])
    again.close()


def test_a_file_that_was_put_in_the_place_of_a_live_state_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "state.lmdb"
    other = LmdbState(str(tmp_path / "other"))
    other.commit([(b"old", b"1")])
    other.close()
    state = LmdbState(str(path))
    state.commit([(b"a", b"1")])
    (tmp_path / "other" / "data.mdb").rename(path / "data.mdb")
    state.commit([(b"b", b"2")])
    state.close()
    assert [pair.key for pair in read_state_file(str(path / "data.mdb"))] == [b"a", b"b"]
    assert [pair.key for pair in read_state_file(str(path / "data.mdb.replaced"))] == [b"old"]


@pytest.mark.parametrize("how", ["removed", "replaced", "committed"])
def test_a_file_that_goes_under_the_server_waits_for_an_operator(tmp_path: Path, how: str) -> None:
    state = LmdbState(str(tmp_path))
    state.look()
    assert state.waits() == []
    file = tmp_path / "data.mdb"
    if how == "replaced":
        (tmp_path / "other").write_bytes(file.read_bytes())
        (tmp_path / "other").rename(file)
    else:
        file.unlink()
    if how == "committed":
        state.commit([(b"key", b"value")])
    else:
        state.look()
    ((_, why, command),) = state.waits()
    assert str(file) in why and "restart" in command
    state.close()


def test_a_limit_on_memory_is_no_damage_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise lmdb.Error("state.lmdb: Cannot allocate memory")

    monkeypatch.setattr(lmdb, "open", refused)
    with pytest.raises(Shortage, match="memory"):
        LmdbState(str(tmp_path / "state.lmdb"))
