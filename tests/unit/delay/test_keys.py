"""The index of keys: damage is never believed, a deleted hour hides no other, and a key is small (docs/keys.md)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from delayd.batch.content import Hasher
from delayd.errors import DataError
from delayd.log.key_run import run_path
from delayd.testing.disk import MemoryDisk
from tests.memory_files import content, put
from tests.worlds.keys import DUE_MS, FOLDER, HOUR, SEED, KeyHouse, KeyRow, Name, names_of

LONG = b"k" * 200


def rows_of(count: int, first: int = 0, size: int = 200) -> list[KeyRow]:
    """Rows whose keys have many lengths."""
    return [KeyRow((b"orders", LONG[: n % size] + b"%d" % n), n + 1) for n in range(first, first + count)]


def names(rows: list[KeyRow]) -> list[Name]:
    return [row.name for row in rows]


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 5_000])
def test_each_name_of_a_run_is_found_and_no_other(count: int) -> None:
    house, rows = KeyHouse(), rows_of(count)
    house.add(rows)
    house.checkpoint()
    again = house.started_again(house.disk.after_crash())
    assert again.find(names(rows)) == [tuple(row[1:]) for row in rows]
    others = [(b"orders2", row.name[1]) for row in rows] + [(b"orders", row.name[1][:-1] + b"x") for row in rows]
    assert again.find(others) == [(0, 0, 0)] * len(others)


def test_rule_L9_each_flipped_byte_and_each_cut_is_damage_with_a_name_or_changes_nothing() -> None:
    house, rows = KeyHouse(), rows_of(70)
    house.add(rows)
    house.checkpoint()
    path = run_path(FOLDER, house.known.runs[0].number)
    whole, expected = content(house.disk, path), [tuple(row[1:]) for row in rows]
    bad = [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in range(len(whole))]
    for at, data in enumerate([*bad, *(whole[:size] for size in (0, 10, 64, 127, 128, 1_000)), None]):
        disk = house.disk.after_kill()
        if data is None:
            disk.remove(path)
        else:
            put(disk, path, data)
        again = house.started_again(disk)
        if not again.index.whole:
            assert path in str(again.index.damage)
            continue
        try:
            # What a look-up does not read, a merge does.
            assert again.find(names(rows)) == expected, f"byte {at} is believed"
            again.index.view().runs[0].read(0, again.index.view().runs[0].blocks, Hasher(SEED))
        except DataError as error:
            assert path in str(error)
            continue
        raise AssertionError(f"byte {at} is believed")


def test_a_merge_that_meets_damage_and_a_read_that_fails_once_are_told_apart() -> None:
    house = KeyHouse(MemoryDisk())
    house.add(rows_of(100))
    house.checkpoint()
    house.disk.faults.fail_reads["/keys/"] = 1
    with pytest.raises(DataError):
        house.find(names(rows_of(1)))
    assert house.find(names(rows_of(1))) == [(1, DUE_MS, HOUR)]
    file = house.disk.open(run_path(FOLDER, house.known.runs[0].number), write=True)
    file.pwritev([b"xxxx"], 400)
    house.add(rows_of(100, first=100))
    house.checkpoint()
    house.worker.run_all()
    assert not house.index.whole and "keys/" in str(house.index.damage)


def test_an_older_entry_does_not_count_again_when_the_newest_is_of_a_deleted_hour() -> None:
    house = KeyHouse()
    house.add(rows_of(1_000, size=1))
    house.checkpoint()
    for sequence in (2_000, 2_001):
        house.add([KeyRow((b"orders", b"1"), sequence, DUE_MS, HOUR + 1)])
        house.checkpoint()
    house.worker.run_all()
    # The two newest runs were merged, the oldest one was not: the entry of the deleted hour must stay.
    assert len(house.index.view().runs) == 2
    assert house.find([(b"orders", b"1")]) == [(2_001, DUE_MS, HOUR + 1)]


def test_a_key_takes_so_many_bytes_and_runs_and_parts_in_memory_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    house = KeyHouse()
    house.add([KeyRow((b"orders", b"order-%07d" % n), n + 1) for n in range(20_000)])
    house.checkpoint()
    (run,) = house.index.view().runs
    assert house.known.runs[0].total_bytes / len(run) < 47 and run._tables.nbytes / len(run) < 2.5
    monkeypatch.setattr("delayd.delay.keys.index.LOOP_ENTRIES", 256)
    for first in range(20_000, 24_000, 10):
        house.add(rows_of(10, first))
        house.worker.run_all()
    assert len(house.index.view().parts) < 10


def test_the_hash_is_that_of_the_page() -> None:
    folder = Path(__file__).parents[3] / "docs/formats"
    pages = [(folder / page).read_text() for page in ("content.md", "keys.md")]
    told: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", "\n".join(pages), re.DOTALL)), told)
    pairs = [(b"orders", b"order-42"), (b"s" * 255, b"k" * 200), (b"a", b"bc"), (b"12345678", b"\0")]
    expected = [told["name_hash"](SEED, *pair) for pair in pairs]
    assert Hasher(SEED).hashes(names_of(pairs)).tolist() == expected
    assert f"{expected[0]:016x}" in pages[1]
