"""Patterns are searched in whole regions, and find the rows that a search in each item finds."""

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delayd.errors import BadArgument
from delayd.reading.find import BytesPattern, required_literal

PATTERNS = (
    *(b"a", b"ab", b"aa", b"a.b", b"a.*b", b"a|bb", b"[ab]a", b"(?i)AB", b"^a", b"a$", b"b?", b"a{2}", b"a{2,}b"),
    *(b"a+b", b"(ab)+", b"\\x61b", b"\\141", b"a\\.b", b"\\ba", b"(?:a|b)b", b"ab?a", b"[^a]b", b"ab(?=a)", b"(?<!a)b"),
    *(b"", b"\0", b"a[]b]", b"ba{0}b", b"a{,3}b", b"a{x", b".", b"(?P<x>a)b", b"\\Aab", b"b\\Z", b"a\\n?b"),
)


def _laid_out(items: list[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
    heap, starts, ends = b"before--", [], []
    for item in items:
        starts.append(len(heap))
        ends.append(len(heap) + len(item))
        heap += item + bytes(-len(item) & 7)
    return heap + b"behind ab aa", np.array(starts), np.array(ends)


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=25)
@given(st.lists(st.text("ab.\n\0B", max_size=20).map(str.encode), min_size=1, max_size=30), st.data())
@example([b"xxxxxxxa", b"ab"], None)
@example([b"xxxxxxxa", b"aab"], None)
@example([b"", b"", b"ab", b""], None)
def test_the_rows_are_those_of_a_search_in_each_item(
    pattern: bytes, items: list[bytes], data: st.DataObject | None
) -> None:
    wanted = np.ones(len(items), np.bool_)
    if data is not None:
        wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(items), max_size=len(items))))
    heap, starts, ends = _laid_out(items)
    found = BytesPattern(pattern).rows(heap, starts, ends, wanted)
    expected = [bool(want and re.search(pattern, item)) for want, item in zip(wanted, items, strict=True)]
    assert found.tolist() == expected


def test_a_required_literal_is_in_each_match() -> None:
    known = {
        b"order-42": (b"order-42", True),
        b"customer [0-9]+ paid": (b"customer ", False),
        b"a\\.b": (b"a.b", True),
        b"ab*c": (b"a", False),
        b"ab+c": (b"ab", False),
        b"abc?de": (b"ab", False),
        b"x(abc|d)yz": (b"yz", False),
        b"a|b": (b"", False),
        b"(?i)abc": (b"", False),
        b"\\x41bc": (b"bc", False),
        b"\\d12": (b"12", False),
        b"a{2}bc": (b"bc", False),
        b"": (b"", False),
    }
    assert {pattern: required_literal(pattern) for pattern in known} == known


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Of patterns such as [[a].
@given(st.text("ab.*+?{}[]()|^$\\2,0:", max_size=12).map(str.encode), st.text("ab2,.", max_size=12).map(str.encode))
def test_no_pattern_matches_without_its_literal(pattern: bytes, item: bytes) -> None:
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError):
        return
    literal, whole = required_literal(pattern)
    found = compiled.search(item)
    assert found is None or literal in item
    assert not whole or (found is not None) == (literal in item)


def test_what_is_no_pattern_is_refused_by_name() -> None:
    with pytest.raises(BadArgument, match=r"'\(a' is no regular expression"):
        BytesPattern(b"(a")


def test_a_greedy_pattern_is_bounded_by_its_item() -> None:
    # A search through the whole region would run to its end for each of the items: minutes.
    heap, starts, ends = _laid_out([b"a" * 200] * 4_000)
    assert not BytesPattern(b"a.*b").rows(heap[: ends[-1]], starts, ends, np.ones(4_000, np.bool_)).any()
