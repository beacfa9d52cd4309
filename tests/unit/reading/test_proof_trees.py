"""Trees and proofs: the product against the checker of 100 lines, which uses nothing of it."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayd.reading.tlog import NotProved, Tree, check_consistency, leaf_hash, root_of_path
from examples.check_proof import root_of

SIZES = st.one_of(st.integers(0, 70), st.integers(0, 2_000))


def entry(number: int) -> bytes:
    return b"entry %d" % number


def tree(size: int) -> Tree:
    return Tree([leaf_hash(entry(number)) for number in range(size)])


def reference(low: int, high: int) -> bytes:
    """MTH of RFC 6962, as its section 2.1 says it."""
    if high - low < 2:
        return hashlib.sha256(b"\x00" + entry(low) if high > low else b"").digest()
    middle = low + (1 << (high - low - 1).bit_length() - 1)
    return hashlib.sha256(b"\x01" + reference(low, middle) + reference(middle, high)).digest()


@given(size=SIZES)
def test_the_root_is_that_of_the_definition(size: int) -> None:
    assert tree(size).root == reference(0, size)


@given(size=SIZES.filter(bool), data=st.data())
def test_each_place_has_a_path_that_both_follow_to_the_root_and_no_other_entry_does(
    size: int, data: st.DataObject
) -> None:
    index, other = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    found = tree(size)
    path = found.path(index)
    assert (
        root_of_path(leaf_hash(entry(index)), index, size, path)
        == found.root
        == root_of(entry(index), index, size, path)
    )
    if other != index:
        assert root_of_path(leaf_hash(entry(other)), index, size, path) != found.root
        assert leads_elsewhere(index, other, size, path, found.root)


def leads_elsewhere(index: int, other: int, size: int, path: list[bytes], root: bytes) -> bool:
    """Whether an entry's path proves it at no other place."""
    try:
        return root_of_path(leaf_hash(entry(index)), other, size, path) != root
    except NotProved:
        return True


@given(new=SIZES, data=st.data())
def test_a_tree_proves_each_earlier_one_and_no_other(new: int, data: st.DataObject) -> None:
    old = data.draw(st.integers(0, new))
    found, earlier = tree(new), tree(old)
    proof = found.consistency(old)
    check_consistency((old, earlier.root), (new, found.root), proof)
    if old:
        with pytest.raises(NotProved):
            check_consistency((old, bytes(32)), (new, found.root), proof)
        with pytest.raises(NotProved):
            check_consistency((old, earlier.root), (new, bytes(32)), proof)
    for place in range(len(proof)):
        with pytest.raises(NotProved):
            check_consistency((old, earlier.root), (new, found.root), proof[:place] + proof[place + 1 :])
