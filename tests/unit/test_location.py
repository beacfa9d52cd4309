"""Locations: one u64 names a row of a log, the same way in memory, in consume logs and in audits."""

import numpy as np
import pytest

from delayd.batch.sequences import OFFSET_MAX, are_filed, locate, pack_locations


@pytest.mark.parametrize("in_schedule_log", [False, True])
def test_a_location_gives_back_what_it_was_made_of(in_schedule_log: bool) -> None:
    offsets = np.array([0, 8, OFFSET_MAX, OFFSET_MAX - 7], np.uint64)
    batch_rows = np.array([0, 65_535, 65_535, 1], np.uint32)
    locations = pack_locations(in_schedule_log, offsets, batch_rows)
    assert are_filed(locations).tolist() == [in_schedule_log] * 4
    places = zip([in_schedule_log] * 4, offsets.tolist(), batch_rows.tolist(), strict=True)
    assert [locate(location) for location in locations.tolist()] == list(places)


def test_an_offset_or_row_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(AssertionError, match="140 TB"):
        pack_locations(False, OFFSET_MAX + 1, np.zeros(1, np.uint16))
    with pytest.raises(AssertionError, match="65,536 rows"):
        pack_locations(False, 0, np.array([65_536], np.uint32))


def test_each_location_in_the_message_log_is_lower_than_all_in_schedule_logs() -> None:
    last = pack_locations(False, OFFSET_MAX, np.array([65_535], np.uint32))
    first = pack_locations(True, 0, np.array([0], np.uint32))
    assert last[0] < first[0]
