"""Trees and proofs: the product against the checker of 100 lines, which uses nothing of it."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayd.reading.proofs import check_message
from delayd.reading.tlog import (
    LogProof,
    NotProved,
    Signer,
    Tree,
    check_consistency,
    checkpoint_body,
    leaf_hash,
    parse_checkpoint,
    parse_growth,
    parse_proof,
    parse_signatures,
    root_of_path,
)
from examples.check_proof import root_of

SIGNER = Signer("example.com/log", bytes(range(32)))
CHECKPOINT = parse_checkpoint(SIGNER.sign(checkpoint_body(SIGNER.name, 3, bytes(32))))
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


LINES = st.lists(
    st.one_of(
        st.sampled_from(["c2sp.org/tlog-proof@v1", "extra AAAA", "index 0", "old 1", "", *CHECKPOINT.text.split("\n")]),
        st.text(max_size=20),
    ),
    max_size=12,
).map("\n".join)


@given(text=LINES)
def test_any_text_is_read_or_refused_with_a_sentence(text: str) -> None:
    for read in (parse_proof, parse_growth, parse_checkpoint, parse_signatures):
        try:
            read(text)
        except NotProved as error:
            assert str(error)


@given(extra=st.one_of(st.binary(max_size=400), st.binary(min_size=288, max_size=288)), version=st.booleans())
def test_any_extra_data_is_refused_with_a_sentence(extra: bytes, version: bool) -> None:
    found = (1).to_bytes(8, "little") + extra[8:] if version else extra
    with pytest.raises(NotProved):
        check_message(LogProof(found, 0, (), CHECKPOINT), SIGNER.key)
