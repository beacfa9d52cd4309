"""A folder's place: the same at each look, another one for a copy."""

import shutil
from pathlib import Path

from delayd.machine.identity import known_place, place_of, settle_place
from delayd.testing.state import MemoryState


def test_a_copy_has_another_place_and_a_renamed_folder_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "delay"
    folder.mkdir()
    (folder / "file").write_text("x")
    place = place_of(str(folder))
    assert 0 < place < 1 << 64
    assert place_of(str(folder)) == place
    shutil.copytree(folder, tmp_path / "copy")
    assert place_of(str(tmp_path / "copy")) != place
    folder.rename(tmp_path / "renamed")
    assert place_of(str(tmp_path / "renamed")) == place


def test_rule_H8_a_copy_that_is_put_back_where_it_came_from_has_another_place(tmp_path: Path) -> None:
    folder, backup = tmp_path / "delay", tmp_path / "backup"
    (folder / "state.lmdb").mkdir(parents=True)
    (folder / "state.lmdb" / "data.mdb").write_text("x")
    place = place_of(str(folder))
    shutil.copytree(folder, backup)
    inode = folder.stat().st_ino
    # Every file keeps its inode, and every time is set that can be set.
    shutil.copytree(backup, folder, dirs_exist_ok=True)
    assert folder.stat().st_ino == inode
    restored = place_of(str(folder))
    assert restored != place
    # A tool that leaves alone what looks the same puts another file in the place of the state.
    shutil.copy2(backup / "state.lmdb" / "data.mdb", folder / "new")
    (folder / "new").rename(folder / "state.lmdb" / "data.mdb")
    assert place_of(str(folder)) != restored


def test_a_place_is_settled_once_and_a_move_is_noticed() -> None:
    state = MemoryState()
    assert not settle_place(state, 5)
    assert not settle_place(state, 5)
    assert settle_place(state, 6) and known_place(state) == 6
    assert not settle_place(state, 6)
    state.commit([(b"place", b"\xc1")])
    assert known_place(state) is None and not settle_place(state, 6)
