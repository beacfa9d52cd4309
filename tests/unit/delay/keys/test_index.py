"""The index of keys: memory, runs, checkpoints and merges (docs/keys.md)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delayd.batch.content import Hasher
from delayd.delay.keys import index as index_module
from delayd.delay.keys.index import _first_to_merge
from delayd.log.key_run import run_path
from tests.worlds.keys import DUE_MS, FOLDER, HOUR, SEED, KeyHouse, KeyRow, names_of

NONE = (0, 0, 0)


def name(n: int) -> tuple[bytes, bytes]:
    """A name of a test."""
    return (b"orders", b"key-%d" % n)


def rows(first: int, count: int, sequence: int | None = None) -> list[KeyRow]:
    """Rows of the names from ``first`` on."""
    begin = first if sequence is None else sequence
    return [KeyRow(name(first + n), begin + n + 1) for n in range(count)]


def test_the_newest_row_of_a_key_wins_wherever_it_stands() -> None:
    house = KeyHouse()
    house.add([KeyRow(name(1), 1), KeyRow(name(2), 2), KeyRow(name(1), 3)])
    assert house.find([name(1), name(2), name(3)]) == [(3, DUE_MS, HOUR), (2, DUE_MS, HOUR), NONE]
    house.checkpoint()
    house.add([KeyRow(name(2), 4, DUE_MS + 5, HOUR + 1)])
    assert house.find([name(1), name(2)]) == [(3, DUE_MS, HOUR), (4, DUE_MS + 5, HOUR + 1)]
    house.checkpoint()
    assert house.find([name(1), name(2)]) == [(3, DUE_MS, HOUR), (4, DUE_MS + 5, HOUR + 1)]


def test_rows_that_come_during_a_checkpoint_are_in_the_next_run() -> None:
    house = KeyHouse()
    house.add(rows(0, 10))
    frozen = house.index.freeze()
    house.add(rows(10, 10))
    house.index.counted(house.index.write(frozen))
    assert [found[0] for found in house.find([name(n) for n in range(20)])] == list(range(1, 21))
    assert len(house.index) == 20


def test_a_checkpoint_that_fails_keeps_its_rows_for_the_next_one() -> None:
    house = KeyHouse()
    house.add(rows(0, 10))
    house.index.freeze()
    house.add(rows(10, 10))
    assert [found[0] for found in house.find([name(0), name(19)])] == [1, 20]
    house.checkpoint()
    again = house.started_again(house.disk.after_crash())
    assert [found[0] for found in again.find([name(0), name(19)])] == [1, 20]


def test_parts_in_memory_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "LOOP_ENTRIES", 256)
    house = KeyHouse()
    for first in range(0, 4_000, 10):
        house.add(rows(first, 10))
        house.worker.run_all()
    assert len(house.index.view().parts) < 10
    assert [found[0] for found in house.find([name(0), name(3_999)])] == [1, 4_000]


def test_runs_are_merged_and_the_old_files_go_when_nothing_names_them() -> None:
    house = KeyHouse()
    for first in range(4):
        house.add(rows(first * 100, 100))
        house.checkpoint()
        house.worker.run_all()
    assert len(house.index.view().runs) < 4
    house.checkpoint()
    house.worker.run_all()
    assert len(house.files()) == len(house.index.view().runs) == len(house.known.runs)
    assert [found[0] for found in house.find([name(n) for n in range(400)])] == list(range(1, 401))


def test_an_older_entry_does_not_count_again_when_the_newest_is_of_a_deleted_hour() -> None:
    house = KeyHouse()
    house.add([KeyRow(name(n), n + 1, DUE_MS, HOUR) for n in range(1_000)])
    house.checkpoint()
    for sequence in (2_000, 2_001):
        house.add([KeyRow(name(1), sequence, DUE_MS, HOUR + 1)])
        house.checkpoint()
    house.worker.run_all()
    # The two newest runs were merged, the oldest one was not: the entry of the deleted hour must stay.
    assert len(house.index.view().runs) == 2
    assert house.find([name(1)]) == [(2_001, DUE_MS, HOUR + 1)]


def test_a_merge_that_meets_damage_leaves_the_index_not_whole() -> None:
    house = KeyHouse()
    for first in (0, 100):
        house.add(rows(first, 100))
        house.checkpoint()
    file = house.disk.open(run_path(FOLDER, house.known.runs[0].number), write=True)
    file.pwritev([b"xxxx"], 400)
    house.worker.run_all()
    assert not house.index.whole
    assert "keys/" in str(house.index.damage)


def test_a_merge_that_finds_the_disk_full_is_tried_again() -> None:
    house = KeyHouse()
    for first in (0, 100):
        house.add(rows(first, 100))
        house.checkpoint()
    house.disk.capacity_bytes = house.disk.used_bytes + 100
    house.worker.run_all()
    assert house.index.whole
    assert len(house.index.view().runs) == 2
    house.disk.capacity_bytes = 1 << 40
    house.checkpoint()
    house.worker.run_all()
    assert len(house.index.view().runs) == 1


def test_a_run_that_is_gone_or_damaged_leaves_the_index_not_whole() -> None:
    house = KeyHouse()
    house.add(rows(0, 100))
    house.checkpoint()
    path = run_path(FOLDER, house.known.runs[0].number)
    gone = house.disk.after_kill()
    gone.remove(path)
    assert "missing" in str(house.started_again(gone).index.damage)
    cut = house.disk.after_kill()
    cut.open(path, write=True).truncate(100)
    assert not house.started_again(cut).index.whole


def test_rule_C3_names_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hasher, "hashes", lambda self, names: np.full(names.n, 5, np.uint64))
    house = KeyHouse()
    house.add(rows(0, 100))
    house.add(rows(50, 100, 100))
    expected = [*range(1, 51), *range(101, 201)]
    assert [found[0] for found in house.find([name(n) for n in range(150)])] == expected
    house.checkpoint()
    house.add(rows(0, 20, 300))
    house.checkpoint()
    assert [found[0] for found in house.find([name(n) for n in range(150)])] == [*range(301, 321), *expected[20:]]
    house.worker.run_all()
    assert [found[0] for found in house.find([name(n) for n in range(150)])] == [*range(301, 321), *expected[20:]]
    assert house.find([(b"orders", b"other")]) == [NONE]


def test_runs_are_merged_when_the_newest_are_larger_than_half_of_the_next_older_one() -> None:
    assert _first_to_merge([]) is None
    assert _first_to_merge([100]) is None
    assert _first_to_merge([100, 50]) is None
    assert _first_to_merge([100, 51]) == 0
    assert _first_to_merge([1_000, 100, 51]) == 1
    assert _first_to_merge([200, 100, 51]) == 0


def test_the_hash_is_that_of_the_page() -> None:
    folder = Path(__file__).parents[4] / "docs/formats"
    pages = [(folder / page).read_text() for page in ("content.md", "keys.md")]
    told: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", "\n".join(pages), re.DOTALL)), told)
    pairs = [(b"orders", b"order-42"), (b"s" * 255, b"k" * 200), (b"a", b"bc"), (b"12345678", b"\0")]
    expected = [told["name_hash"](SEED, *pair) for pair in pairs]
    assert Hasher(SEED).hashes(names_of(pairs)).tolist() == expected
    assert f"{expected[0]:016x}" in pages[1]
