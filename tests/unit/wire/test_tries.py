"""Numbers of tries: what a head says of them, and what is none (docs/keys.md, Tries)."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.errors import BadRequest
from delayd.wire.asked import (
    AskedKeys,
    MoveTry,
    encode_asked_keys,
    read_asked_keys,
    read_move_try,
    read_tries,
)
from delayd.wire.frame import Head

NUMBERS = {"asker": 7, "low_water": 3}


def test_a_move_by_receipt_has_one_number_or_none() -> None:
    assert read_move_try({"log_id": 5}) is None
    found = read_move_try({**NUMBERS, "number": 4})
    assert found == MoveTry(asker=7, low_water=3, number=4)
    assert found.take(np.arange(2)) == found, "each piece of a request has the number of the whole"


@pytest.mark.parametrize(
    "head",
    [
        NUMBERS,
        {"number": 4},
        {"number": 4, "low_water": 3},
        {"number": 4, "asker": 7},
        {**NUMBERS, "number": 4, "asker": 0},
        {**NUMBERS, "number": -1},
        {**NUMBERS, "number": "4"},
        {**NUMBERS, "number": 4, "asker": 1 << 64},
    ],
)
def test_a_number_that_nobody_can_have_given_is_refused(head: Head) -> None:
    with pytest.raises(BadRequest):
        read_move_try(head)


def test_a_request_by_key_has_a_number_for_each_row_or_none() -> None:
    numbered = read_asked_keys(encode_asked_keys(AskedKeys(b"s", [b"k", b"l"], [8, 9])))
    plain = read_asked_keys(encode_asked_keys(AskedKeys(b"s", [b"k"])))
    assert numbered is not None and plain is not None
    tries = read_tries({**NUMBERS}, numbered)
    assert tries is not None and tries.numbers.tolist() == [8, 9]
    assert tries.take(np.array([1])).numbers.tolist() == [9]
    assert read_tries({}, plain) is None
    for head, batch in (({}, numbered), (NUMBERS, plain), ({**NUMBERS, "asker": 0}, numbered)):
        with pytest.raises(BadRequest):
            read_tries({**head}, batch)
