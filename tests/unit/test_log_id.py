"""The text of a log_id is the same in a print, a repr and a format."""

import json
import pickle

import msgpack
import numpy as np

from delayd import LogId, OutcomeUnknown, Receipt, SendHandle

NUMBER = 0xA0_0000_0000_0001


def test_a_log_id_is_a_number_with_the_text_that_listings_show() -> None:
    log_id = LogId(NUMBER)
    assert str(log_id) == repr(log_id) == f"{log_id}" == f"{NUMBER:016x}" == "00a0000000000001"
    assert f"{log_id:016x}" == str(log_id) and log_id == NUMBER and {log_id: 1}[NUMBER] == 1  # type: ignore[index]
    assert msgpack.unpackb(msgpack.packb(log_id)) == NUMBER and json.loads(json.dumps(log_id)) == NUMBER
    assert pickle.loads(pickle.dumps(log_id)) == log_id and np.uint64(log_id) == NUMBER


def test_receipts_and_handles_show_it() -> None:
    assert "log_id=00a0000000000001, sequence=7" in repr(Receipt(LogId(NUMBER), 7, 1, 1, True, False))
    handle = OutcomeUnknown("broke", SendHandle(LogId(NUMBER), 1, 2)).handle
    assert "log_id=00a0000000000001" in repr(handle)


def test_a_receipt_gives_its_instants_as_datetimes_too() -> None:
    receipt = Receipt(LogId(NUMBER), 7, 1_798_790_400_001, 1_798_790_400_000, False, False)
    assert receipt.deliver_at.isoformat() == "2027-01-01T08:00:00.001000+00:00"
    assert receipt.accepted_at.isoformat() == "2027-01-01T08:00:00+00:00"
