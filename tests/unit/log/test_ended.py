"""Ended rows: what a reader of decisions takes, and what it refuses."""

import numpy as np
import pytest

from delayd.errors import BatchMalformed
from delayd.log.dispatch import Reason, reason_name
from delayd.log.ended import ENDED, EndedRows, decode_ended


def rows(*sequences: int, reason: int = Reason.CANCELLED) -> EndedRows:
    made = np.zeros(len(sequences), ENDED)
    made["sequence"], made["reason"] = sequences, reason
    return made


def test_ended_rows_come_back_as_they_were_written() -> None:
    written = rows(3, 5, 9)
    assert np.array_equal(decode_ended(written.tobytes()), written)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (rows(1).tobytes()[:-1], "47 bytes"),
        (rows(2, 1).tobytes(), "do not rise"),
        (rows(2, 2).tobytes(), "do not rise"),
        (rows(1, reason=2).tobytes(), "unknown reason"),
        (rows(1).tobytes()[:-1] + b"\1", "unknown reason"),
    ],
)
def test_rows_that_no_server_writes_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(BatchMalformed, match=why):
        decode_ended(data)


def test_a_reason_has_a_word_and_an_unknown_one_stays_a_number() -> None:
    assert [reason_name(reason) for reason in (Reason.CANCELLED, Reason.IN_FLIGHT, 99)] == [
        "cancelled",
        "in_flight",
        "99",
    ]
