"""The content hash of a batch against the page's definition, item by item (docs/formats/content.md)."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayd.batch import content
from delayd.batch.batch import parse
from delayd.batch.content import (
    Region,
    Regions,
    content_hash,
    hash_bare,
    hash_items,
    hash_rows,
    subject_state,
    subject_states,
)
from tests.batches import messages

PAGE = Path(__file__).parents[2] / "docs/formats/content.md"
items = st.lists(st.binary(max_size=70), min_size=1, max_size=20)


@cache
def of_the_page() -> dict[str, Any]:
    """The functions of the page's programs."""
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    names: dict[str, Any] = {}
    exec(program, names)
    return names


def by_the_page(subject: bytes, headers: bytes, body: bytes) -> int:
    made = of_the_page()["content_hash"](subject, headers, body)
    assert isinstance(made, int)
    return made


def region(parts: list[bytes]) -> Region:
    padded = b"".join(part + bytes(-len(part) % 8) for part in parts)
    return Region(np.frombuffer(padded, np.uint64), np.array([len(part) for part in parts], np.int64))


def test_rule_S6_the_page_gives_its_own_examples() -> None:
    examples = re.findall(r"`(b'.*?'), (b'.*?'), (b'.*?')` \| `([0-9a-f]{16})`", PAGE.read_text())
    assert len(examples) >= 5
    for subject, headers, body, expected in examples:
        parts = tuple(eval(part) for part in (subject, headers, body))
        assert f"{by_the_page(*parts):016x}" == expected
        assert f"{content_hash(*parts):016x}" == expected


@given(st.binary(min_size=1, max_size=30), items, st.data())
def test_rule_S6_a_batch_is_hashed_as_the_page_says(subject: bytes, bodies: list[bytes], data: st.DataObject) -> None:
    headers = data.draw(st.lists(st.binary(max_size=20), min_size=len(bodies), max_size=len(bodies)))
    expected = [by_the_page(subject, head, body) for head, body in zip(headers, bodies, strict=True)]
    assert hash_items(subject_state(subject), region(headers), region(bodies)).tolist() == expected
    assert [content_hash(subject, head, body) for head, body in zip(headers, bodies, strict=True)] == expected
    without = [by_the_page(subject, b"", body) for body in bodies]
    assert [hash_bare(subject, body + bytes(-len(body) % 8), len(body)) for body in bodies] == without
    assert hash_items(subject_state(subject), None, region(bodies)).tolist() == without


@given(st.lists(items, min_size=1, max_size=8))
def test_rule_S6_regions_that_are_gathered_are_hashed_as_one(batches: list[list[bytes]]) -> None:
    gathered = Regions()
    for _ in range(2):
        for number, batch in enumerate(batches):
            gathered.add_empty(number)
            gathered.add(region(batch))
        expected = [body for number, batch in enumerate(batches) for body in [b""] * number + batch]
        hashes = hash_items(subject_state(b"a"), None, gathered.take()).tolist()
        assert hashes == [content_hash(b"a", b"", body) for body in expected]


@pytest.mark.parametrize("length", range(65))
@pytest.mark.parametrize("count", [1, 2, 7])
def test_rule_S6_bodies_of_each_length(length: int, count: int) -> None:
    bodies = [bytes((row + place) % 251 for place in range(length)) for row in range(count)]
    expected = [by_the_page(b"orders", b"", body) for body in bodies]
    assert hash_items(subject_state(b"orders"), None, region(bodies)).tolist() == expected
    mixed = [*bodies, b"", b"x" * (length + 9), b""]
    expected = [by_the_page(b"orders", b"", body) for body in mixed]
    assert hash_items(subject_state(b"orders"), None, region(mixed)).tolist() == expected


@pytest.mark.parametrize("shift", range(8))
def test_rule_S6_words_need_not_be_aligned(shift: int) -> None:
    bodies = [b"a" * 20, b"b" * 24, b"c" * 3]
    padded = b"".join(body + bytes(-len(body) % 8) for body in bodies)
    words = np.frombuffer(bytes(shift) + padded, np.uint64, len(padded) // 8, shift)
    found = hash_items(subject_state(b"s"), None, Region(words, np.array([20, 24, 3], np.int64)))
    assert found.tolist() == [by_the_page(b"s", b"", body) for body in bodies]


@pytest.mark.parametrize("sizes", [[40] * 30, [0, 8, 100, 0, 7, 3_000, 16] * 9, [0, 0, 0]])
def test_rule_S6_a_large_batch_is_hashed_in_pieces(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [bytes([row % 256]) * size for row, size in enumerate(sizes)]
    whole = hash_items(1, None, region(bodies))
    monkeypatch.setattr(content, "RAGGED_WORDS", 17)
    assert hash_items(1, None, region(bodies)).tolist() == whole.tolist()
    assert whole.tolist() == [hash_items(1, None, region([body]))[0] for body in bodies]


def test_rule_S6_each_row_of_a_batch_has_its_own_subject_and_headers() -> None:
    bodies, headers, names = [b"one", b"", b"three" * 9], [b"\x81\xa1k\xa1v", b"\x80", b""], [b"orders", b"mail"]
    batch = parse(messages(bodies, headers=headers, subjects=names, subject_of=[0, 1, 0]))
    expected = [by_the_page(names[of], headers[row], bodies[row]) for row, of in enumerate([0, 1, 0])]
    assert hash_rows(batch).tolist() == expected
    assert subject_states(names).tolist() == [subject_state(name) for name in names]


@given(st.binary(min_size=1, max_size=9), st.binary(max_size=40), st.binary(max_size=40))
def test_rule_S6_what_is_moved_swapped_or_changed_is_seen(subject: bytes, headers: bytes, body: bytes) -> None:
    own = content_hash(subject, headers, body)
    others = {
        *((subject, body, headers), (headers, subject, body), (subject + b"x", headers, body)),
        *((subject, headers + body, b""), (subject, b"", headers + body), (subject, headers, body + b"\0")),
        *((subject, headers, body[1:] + body[:1]), (subject, headers[::-1], body), (subject, headers, body[8:])),
        *((subject, headers, body[8:16] + body[:8] + body[16:]),),
    } - {(subject, headers, body)}
    assert own not in {content_hash(*other) for other in others}


def test_rule_S6_each_change_of_one_half_of_a_word_is_seen() -> None:
    # The factors are odd, so no half but itself gives the same product: each bit that flips, alone or with neighbours.
    rng = np.random.default_rng(7)
    body = rng.integers(0, 256, 64, np.uint8)
    for before in (body, np.zeros_like(body), np.full_like(body, 255)):
        own = int(hash_items(5, None, region([bytes(before)]))[0])
        for half in range(16):
            halves = np.tile(before.view(np.uint32), (34, 1))
            halves[:32, half] ^= np.uint32(1) << np.arange(32, dtype=np.uint32)
            halves[32:, half] ^= np.array([0xFFFF_FFFF, 0x8000_8000], np.uint32)
            changed = hash_items(5, None, Region(halves.reshape(-1).view(np.uint64), np.full(34, 64, np.int64)))
            assert not (changed == np.uint64(own)).any(), half


def test_rule_S6_a_million_similar_bodies_have_as_many_hashes() -> None:
    numbers = np.arange(1_000_000, dtype=np.uint64)
    words = np.empty((len(numbers), 3), np.uint64)
    # Counters, in each place of a word, and two that grow against each other.
    words[:, 0], words[:, 1], words[:, 2] = numbers << np.uint64(44), np.uint64(1) << np.uint64(63), ~numbers
    lengths = np.full(len(numbers), 24, np.int64)
    for column in range(3):
        rolled = np.roll(words, column, axis=1).reshape(-1)
        assert len(np.unique(hash_items(5, None, Region(np.ascontiguousarray(rolled), lengths)))) == len(numbers)
    flips = np.uint64(1) << np.arange(64, dtype=np.uint64)
    pairs = np.zeros((64, 64, 64), np.uint64)
    # Every pair of two flipped bits, one in each of two words.
    pairs[:, :, 0], pairs[:, :, 1] = flips[:, None], flips[None, :]
    found = hash_items(5, None, Region(pairs.reshape(-1), np.full(4_096, 512, np.int64)))
    assert len(np.unique(found)) == 4_096
