"""Where the batches of each delay server and hour stand in an index of realtime logs."""

from dataclasses import replace

import numpy as np

from delayd.reading.files.row_arrays import BATCH
from delayd.reading.files.target_index import NO_INDEX, TargetIndex

# Delay server, hour and rows of each batch, in the order in which two realtime servers have stored them.
STORED = ((7, 5, 1), (7, 5, 2), (9, 5, 4), (7, 6, 8), (9, 5, 16), (7, 5, 32), (1 << 63, 0, 64), (8, 6, 128))


def stored() -> TargetIndex:
    batches = np.zeros(len(STORED), BATCH)
    for name, column in zip(("origin_log_id", "hour", "count"), zip(*STORED, strict=True), strict=True):
        batches[name] = np.array(column, batches.dtype[name])
    return replace(NO_INDEX, batches=batches)


def test_each_batch_stands_under_its_server_and_hour_in_the_order_of_the_index() -> None:
    places = {key: found.tolist() for key, found in stored().by_hour().items()}
    assert places == {(7, 5): [0, 1, 5], (7, 6): [3], (9, 5): [2, 4], (8, 6): [7], (1 << 63, 0): [6]}
    assert stored().rows_by_hour() == {(7, 5): 35, (7, 6): 8, (9, 5): 20, (8, 6): 128, (1 << 63, 0): 64}
    assert not NO_INDEX.by_hour() and not NO_INDEX.rows_by_hour()


def test_the_batches_at_places_are_those_and_no_others_between_them() -> None:
    index = stored()
    for places in ([], [3], [0, 1], [2, 3, 4], [2, 4], [0, 1, 5], list(range(len(STORED)))):
        found = index.at(np.array(places, np.int64))
        assert found["count"].tolist() == [STORED[place][2] for place in places]
