"""Items of single rows, as `find`, `sql` and archives show them."""

import numpy as np

from delayd.batch.batch import encode, encode_subject_table, parse
from delayd.batch.columns import BatchKind, ColumnId, SchedulePart
from delayd.reading.files.items import bodies_of, keys_of, packed_headers_of, tags_of


def test_a_body_that_its_file_has_left_out_is_none_and_one_that_is_empty_is_empty() -> None:
    table = encode_subject_table([b"orders"])
    first = len(table)
    batch = parse(
        encode(
            BatchKind.SCHEDULE,
            SchedulePart(0, 1, 0),
            3,
            [
                (ColumnId.DELIVER_AT_MS, np.zeros(3, np.int64)),
                (ColumnId.SEQUENCE, np.arange(3, dtype=np.uint64)),
                (ColumnId.BODY_END, np.array([first + 4, first + 8, first + 8], np.uint32)),
                (ColumnId.BODY_LEFT_OUT, np.array([0, 5, 0], np.uint32)),
            ],
            [table, b"here", bytes(4)],
            1,
        )
    )
    every = np.arange(3)
    assert list(bodies_of(batch, every)) == [b"here", None, b""]
    assert list(bodies_of(batch, every[::-2])) == [b"", b"here"]
    assert list(keys_of(batch, every)) == [None] * 3 and list(tags_of(batch, every)) == [[]] * 3
    assert packed_headers_of(batch, every) == [b""] * 3
