"""The text of a log_id is the same in a print, a repr and a format."""

import json
import pickle

import msgpack
import numpy as np

from delayd import LogId

NUMBER = 0xA0_0000_0000_0001


def test_a_log_id_is_a_number_with_the_text_that_listings_show() -> None:
    log_id = LogId(NUMBER)
    assert str(log_id) == repr(log_id) == f"{log_id}" == f"{NUMBER:016x}" == "00a0000000000001"
    assert f"{log_id:016x}" == str(log_id) and log_id == NUMBER and {log_id: 1}[NUMBER] == 1  # type: ignore[index]
    assert msgpack.unpackb(msgpack.packb(log_id)) == NUMBER and json.loads(json.dumps(log_id)) == NUMBER
    assert pickle.loads(pickle.dumps(log_id)) == log_id and np.uint64(log_id) == NUMBER
