"""Requests that name rows by their keys: what goes in comes out, and what is no key is refused."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.batch.batch import encode, encode_subject_table, lay_out
from delayd.batch.columns import ROWS_MAX, BatchKind, ColumnId
from delayd.batch.names import KEY_BYTES_MAX, SUBJECT_BYTES_MAX
from delayd.errors import BadKey, BadRequest, BatchMalformed, CallerError
from delayd.wire.asked import (
    KEY_ROWS_MAX,
    Asked,
    AskedKeys,
    encode_asked,
    encode_asked_keys,
    read_asked,
    read_asked_keys,
    wanted_of_keys,
)
from delayd.wire.requests import ASKED_BODY_BYTES_MAX

RECEIPT = Asked(np.array([7], np.uint64), np.array([5]), np.array([6]))


def test_the_largest_request_fits_its_room() -> None:
    subject, keys = b"s" * SUBJECT_BYTES_MAX, [b"k" * KEY_BYTES_MAX] * KEY_ROWS_MAX
    assert len(encode_asked_keys(AskedKeys(subject, keys))) <= ASKED_BODY_BYTES_MAX
    assert KEY_ROWS_MAX < ROWS_MAX


def test_a_request_names_rows_by_receipt_or_by_key() -> None:
    assert read_asked_keys(encode_asked(RECEIPT)) is None
    with pytest.raises(BadRequest, match="by their keys"):
        read_asked(encode_asked_keys(AskedKeys(b"s", [b"k"])))
    table = encode_subject_table([b"s"])
    ends, keys = lay_out([b"k"], len(table))
    both = [(ColumnId.SEQUENCE, RECEIPT.sequences), (ColumnId.KEY_END, ends)]
    with pytest.raises(BatchMalformed, match="can't have the column sequence"):
        read_asked_keys(encode(BatchKind.ASKED, None, 1, both, [table, keys], 1))


def test_a_request_by_key_says_to_which_instants_exactly_when_it_moves_rows() -> None:
    keys, instants = AskedKeys(b"s", [b"k", b"l"]), np.array([5, 6])
    asking, moving = read_asked_keys(encode_asked_keys(keys)), read_asked_keys(encode_asked_keys(keys, instants))
    assert asking is not None and moving is not None
    assert wanted_of_keys(asking, moves=False) is None
    wanted = wanted_of_keys(moving, moves=True)
    assert wanted is not None and wanted.tolist() == [5, 6]
    with pytest.raises(BatchMalformed, match="does not say to which instants"):
        wanted_of_keys(asking, moves=True)
    with pytest.raises(BatchMalformed, match="only a RESCHEDULE does"):
        wanted_of_keys(moving, moves=False)


@pytest.mark.parametrize("key", [b"", b"k" * (KEY_BYTES_MAX + 1), b"\xff"])
@pytest.mark.parametrize("others", [0, 1, 50])
def test_what_is_no_key_is_refused(key: bytes, others: int) -> None:
    with pytest.raises(BadKey) as caught:
        read_asked_keys(encode_asked_keys(AskedKeys(b"s", [b"k"] * others + [key])))
    assert isinstance(caught.value, CallerError)
