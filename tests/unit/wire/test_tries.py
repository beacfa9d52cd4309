"""Numbers of tries: what a head says of them, and what is none (docs/keys.md, Tries)."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.errors import BadRequest
from delayd.wire.asked import (
    AskedKeys,
    encode_asked_keys,
    read_asked_keys,
    read_tries,
)

NUMBERS = {"asker": 7, "low_water": 3}


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
