"""State on real files, and the fake's part in crashes."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from delayd.errors import DamagedData, DirectoryInUse, NewerFormat, NotWritable, SyncFailed
from delayd.state import LMDB_META, LmdbState
from delayd.testing.disk import Crash, Faults, MemoryDisk
from delayd.testing.state import MemoryState


def test_what_was_committed_is_there_after_a_reopen(tmp_path: Path) -> None:
    state = LmdbState(str(tmp_path / "state.lmdb"))
    state.commit([(b"a", b"1"), (b"b", b"2")])
    state.commit([], [b"b"])
    state.close()
    state = LmdbState(str(tmp_path / "state.lmdb"))
    assert state.scan(b"") == [(b"a", b"1")]
    state.close()


def test_the_file_is_as_long_as_what_it_holds(tmp_path: Path) -> None:
    state = LmdbState(str(tmp_path / "state.lmdb"))
    state.commit([(b"a", b"1")])
    assert (tmp_path / "state.lmdb" / "data.mdb").stat().st_size < 1 << 20
    state.close()


def test_a_state_in_use_by_this_process_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "state.lmdb")
    state = LmdbState(path)
    with pytest.raises(DirectoryInUse, match="this process"):
        LmdbState(path)
    state.close()
    LmdbState(path).close()


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
    data[LMDB_META.size - 4 : LMDB_META.size] = (9).to_bytes(4, "little")
    (path / "data.mdb").write_bytes(data)
    with pytest.raises(NewerFormat, match="version 9") as refused:
        LmdbState(str(path))
    assert refused.value.version == 9


def test_a_state_cut_to_nothing_but_its_first_bytes_is_damage(tmp_path: Path) -> None:
    (tmp_path / "state.lmdb").mkdir()
    (tmp_path / "state.lmdb" / "data.mdb").write_bytes(b"x" * 10)
    with pytest.raises(DamagedData):
        LmdbState(str(tmp_path / "state.lmdb"))


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


def test_dying_at_a_commit_leaves_nothing_of_it_and_dying_after_it_all() -> None:
    disk = MemoryDisk(Faults(crash_at=2))
    state = MemoryState(disk)
    state.commit([(b"a", b"1")])
    with pytest.raises(Crash):
        state.commit([(b"a", b"2"), (b"b", b"2")])
    with pytest.raises(Crash):
        state.get(b"a")
    assert state.after_crash().scan(b"") == [(b"a", b"1")]


def test_a_commit_whose_sync_fails_is_not_there() -> None:
    state = MemoryState(MemoryDisk(Faults(fail_sync_at=1)))
    with pytest.raises(SyncFailed):
        state.commit([(b"a", b"1")])
    assert state.after_crash().scan(b"") == []


def test_a_commit_whose_sync_is_skipped_is_seen_and_lost_at_a_crash() -> None:
    state = MemoryState(MemoryDisk(Faults(skip_sync_at=2)))
    state.commit([(b"a", b"1")])
    state.commit([(b"a", b"2")])
    assert state.get(b"a") == b"2"
    assert state.after_crash().get(b"a") == b"1"
    state.commit([(b"b", b"1")])
    assert state.after_crash().scan(b"") == [(b"a", b"2"), (b"b", b"1")]
