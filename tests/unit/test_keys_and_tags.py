"""What is checked of the keys and tags of a batch, alone and in arrays: the same rows are at fault."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from delayd.batch import labels as tags_module
from delayd.batch import validate
from delayd.batch.batch import parse
from delayd.batch.columns import FEW_ROWS, BatchKind, ColumnId
from delayd.batch.labels import bloom_of, bloom_of_item, encode_tags
from delayd.batch.names import KEY_BYTES_MAX, TAG_BYTES_MAX, TAGS_MAX
from delayd.batch.validate import check_batch, check_key, refused_rows
from delayd.errors import BadKey, BadTags, BatchMalformed, DelaydError
from tests.batches import messages, with_true_checksums

MANY = FEW_ROWS + 8

BAD_KEYS = [b"k" * (KEY_BYTES_MAX + 1), b"\xff", "ä".encode()[:1], "ä".encode()[1:], b"1234567\xc3", b"\xed\xa0\x80"]


def keyed(keys: list[bytes], flags: list[int] | None = None) -> bytes:
    return messages([b"b"] * len(keys), keys=keys, flags=flags)


def with_column(data: bytes, column: ColumnId, values: np.ndarray[tuple[int], np.dtype[np.generic]]) -> bytes:
    changed = bytearray(data)
    at = parse(data).offsets[column]
    changed[at : at + values.nbytes] = values.tobytes()
    return with_true_checksums(changed)


def with_tag_items(items: list[bytes]) -> bytes:
    """A batch whose rows have these bytes as tags; their blooms are those of the tags where there are any."""
    blooms = np.zeros(len(items), np.uint64)
    for row, item in enumerate(items):
        try:
            blooms[row] = bloom_of_item(item)
        except BadTags:
            continue
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.batches.encode_tags", lambda row: items[int(row[0])])
        patched.setattr("tests.batches.bloom_of", lambda row: int(blooms[int(row[0])]))
        return messages([b"b"] * len(items), tags=[[str(row)] for row in range(len(items))])


@pytest.mark.parametrize("count", [1, 3, MANY])
@pytest.mark.parametrize("bad", BAD_KEYS, ids=repr)
def test_a_bad_key_is_refused_with_the_rows_that_have_it(bad: bytes, count: int) -> None:
    keys = [b"\xc3\xa4bcdefg"] * count
    keys[-1] = bad
    with pytest.raises(BadKey, match=f"row {count - 1}: ") as caught:
        check_batch(parse(keyed(keys)))
    assert refused_rows(caught.value) == [count - 1]
    with pytest.raises(BadKey):
        check_key(bad)


@pytest.mark.parametrize("count", [2, MANY])
def test_a_character_that_is_cut_between_two_keys_makes_both_bad(count: int) -> None:
    """All bytes of both keys together are UTF-8, and no zero stands between them."""
    whole = "1234567ä1234567".encode()
    keys = [whole[:8], whole[8:], *[b"k"] * (count - 2)]
    with pytest.raises(BadKey) as caught:
        check_batch(parse(keyed(keys)))
    assert refused_rows(caught.value) == [0, 1]


@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize(("key", "flag"), [(b"k", 4), (b"k", 0x8000), (b"", 1), (b"", 2), (b"", 3), (b"", 4)])
def test_flags_that_a_row_can_t_have_are_refused(key: bytes, flag: int, count: int) -> None:
    keys, flags = [b"k"] * (count - 1) + [key], [2] * (count - 1) + [flag]
    with pytest.raises(BatchMalformed, match=f"row {count - 1} .* row_flags is {flag}"):
        check_batch(parse(keyed(keys, flags)))


def test_flags_without_keys_and_tags_without_blooms_are_refused() -> None:
    with pytest.raises(BatchMalformed, match="row_flags is there without column key_end"):
        check_batch(parse(messages([b"b"], flags=[0])))
    data = messages([b"b"], tags=[["t"]])
    at = parse(data).offsets
    assert {ColumnId.TAG_BLOOM, ColumnId.TAGS_END} < set(at)
    for missing, found in ((ColumnId.TAG_BLOOM, ColumnId.TAGS_END), (ColumnId.TAGS_END, ColumnId.TAG_BLOOM)):
        columns = parse(data).layout.columns - {missing}
        with pytest.raises(BatchMalformed, match=f"{found.name.lower()} is there without column"):
            validate._check_columns(BatchKind.PRODUCER, columns)


def test_the_bloom_is_that_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/formats/batch.md").read_text()
    code = page.partition("def bloom(")[2].partition("```")[0]
    names: dict[str, Any] = {"crc32c": crc32c}
    exec("def bloom(" + code, names)
    table = page.partition("| tags | tag_bloom")[2].partition("\n\n")[0]
    told = re.findall(r"^\| (.*) \| `([0-9a-f]+)` \|$", table, re.MULTILINE)
    assert len(told) == 5
    for which, bloom in told:
        listed = re.findall(r"`([%\w]+)`", which)
        assert int(bloom, 16) == bloom_of(listed) == names["bloom"](listed)
    many = [f"tag-{n}" for n in range(TAGS_MAX)]
    assert bloom_of(many) == names["bloom"](many)


BAD_ITEMS = [
    b"\xc1",
    b"\x90",
    b"\xa1t",
    b"\x91",
    b"\x91\xa1t\x00",
    b"\x91\x01",
    b"\x91\xc4\x01t",
    b"\x91\xa0",
    b"\x91\xa1\xff",
    b"\x92\xa1t\xa1t",
    msgpack.packb(["t" * (TAG_BYTES_MAX + 1)]),
    msgpack.packb(["ä" * (TAG_BYTES_MAX // 2) + "x"]),
    msgpack.packb([str(n) for n in range(TAGS_MAX + 1)]),
    b"\xdd\x00\x00\x00\x01" + b"\xdb\x00\x00\x00\x01t" * 200,
    b"\x91" * 500,
]


@pytest.mark.parametrize("count", [1, 2, MANY])
@pytest.mark.parametrize("bad", BAD_ITEMS, ids=repr)
def test_tags_that_are_no_array_of_distinct_texts_are_refused_with_their_rows(bad: bytes, count: int) -> None:
    with pytest.raises(BadTags, match=f"row {count - 1}: ") as caught:
        check_batch(parse(with_tag_items([encode_tags(["t"])] * (count - 1) + [bad])))
    assert refused_rows(caught.value) == [count - 1]


@pytest.mark.parametrize("count", [1, MANY])
def test_a_bloom_that_is_not_that_of_the_tags_is_refused(count: int) -> None:
    tags: list[list[str]] = [["t", "u"]] * count
    data = messages([b"b"] * count, tags=tags)
    for wrong in (0, bloom_of(["t"]), bloom_of(["t", "u"]) | 1 << 63):
        blooms = np.full(count, bloom_of(["t", "u"]), np.uint64)
        blooms[-1] = wrong
        with pytest.raises(BadTags, match="is not that of its tags") as caught:
            check_batch(parse(with_column(data, ColumnId.TAG_BLOOM, blooms)))
        assert refused_rows(caught.value) == [count - 1]
    bare = with_column(messages([b"b"], tags=[[]]), ColumnId.TAG_BLOOM, np.array([1], np.uint64))
    with pytest.raises(BadTags):
        check_batch(parse(bare))


def test_items_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors of the hash are known, so somebody may make tags that have the hash of other ones."""
    monkeypatch.setattr("delayd.batch.content.Region.values", lambda region: np.zeros(len(region), np.uint64))
    check_batch(parse(messages([b"b"] * MANY, tags=[["t", "u", "v"][: row % 4] for row in range(MANY)])))
    data = with_tag_items([b"\x91\xa1t"] * (MANY - 1) + [b"\x91\xa1\xff"])
    blooms = np.full(MANY, bloom_of(["t"]), np.uint64)
    with pytest.raises(BadTags) as caught:
        check_batch(parse(with_column(data, ColumnId.TAG_BLOOM, blooms)))
    assert refused_rows(caught.value) == [MANY - 1]


@given(
    st.lists(st.sampled_from([b"", b"k", b"12345678", "ä".encode(), *BAD_KEYS]), min_size=1, max_size=20),
    st.lists(st.sampled_from([b"", b"\x91\xa1t", b"\x92\xa1t\xa1u", *BAD_ITEMS]), min_size=20, max_size=20),
)
def test_few_rows_are_judged_as_many_are(keys: list[bytes], items: list[bytes]) -> None:
    def judged(data: bytes) -> object:
        try:
            check_batch(parse(data))
        except DelaydError as error:
            return error.code, error.message, refused_rows(error)
        return None

    for data in (keyed(keys), with_tag_items(items[: len(keys)])):
        few = judged(data)
        with pytest.MonkeyPatch.context() as patched:
            for module in (validate, tags_module):
                patched.setattr(module, "FEW_ROWS", 0)
            assert judged(data) == few
