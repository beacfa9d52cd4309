"""Tokens of many receipts are those of each of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delayd.client.sending.receipts import Receipt, tokens_of
from delayd.errors import LogId

NUMBERS = st.integers(0, (1 << 64) - 1)
INSTANTS = st.integers(0, (1 << 47) - 1)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, INSTANTS, INSTANTS), max_size=20))
def test_tokens_of_columns_are_those_of_each_receipt(rows: list[tuple[int, int, int, int]]) -> None:
    log_ids, sequences, due_ms, at_ms = zip(*rows, strict=True) if rows else ((), (), (), ())
    unsigned = np.array(log_ids, np.uint64), np.array(sequences, np.uint64)
    found = tokens_of(*unsigned, np.array(due_ms, np.int64), np.array(at_ms, np.int64))
    receipts = [Receipt(LogId(log_id), number, due, at, False, False) for log_id, number, due, at in rows]
    assert found == [receipt.token for receipt in receipts]
