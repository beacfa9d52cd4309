"""The index of keys: memory, runs, checkpoints and merges (docs/keys.md)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from delayd.batch.content import Hasher
from delayd.delay.keys import index as index_module
from delayd.delay.keys.index import _first_to_merge
from delayd.log.key_run import run_path
from tests.worlds.keys import DUE_MS, FOLDER, HOUR, SEED, KeyHouse, KeyRow, names_of


def name(n: int) -> tuple[bytes, bytes]:
    """A name of a test."""
    return (b"orders", b"key-%d" % n)


def rows(first: int, count: int, sequence: int | None = None) -> list[KeyRow]:
    """Rows of the names from ``first`` on."""
    begin = first if sequence is None else sequence
    return [KeyRow(name(first + n), begin + n + 1) for n in range(count)]


def test_parts_in_memory_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "LOOP_ENTRIES", 256)
    house = KeyHouse()
    for first in range(0, 4_000, 10):
        house.add(rows(first, 10))
        house.worker.run_all()
    assert len(house.index.view().parts) < 10
    assert [found[0] for found in house.find([name(0), name(3_999)])] == [1, 4_000]


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
