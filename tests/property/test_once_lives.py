"""Lives of requests that are done once, in a bounded form, and bugs that their account must find."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from delayd.client.asking.once import OnceSends
from delayd.client.sending.outbox import Recorded
from delayd.delay.ending.keyed_sends import KeyedSends, _Behind
from delayd.gateway.once import OnceRequest
from tests.property.once_lives import lives
from tests.worlds.patches import Patch, changed

SEEDS = range(4)
# A planted bug must show within these; the two are late answers of messages that are filed in another hour.
SEEDS_PLANTED = (*range(4, 30), 1101, 3082)


def test_whatever_happens_a_request_is_done_once_and_answered_as_the_first_time() -> None:
    found = lives(SEEDS)
    assert found["answers again"] > 20 and found["told other_request"] and found["told under_way"]
    assert all(found[each] for each in ("kills", "gateways killed", "answers lost", "given up", "jumps"))


@pytest.mark.parametrize(
    "bug",
    [
        Patch(
            KeyedSends,
            "_decide",
            changed(KeyedSends._decide, "np.flatnonzero(~took.take(place_of.take(behind.records)))", "NO_INDICES"),
        ),
        Patch(
            _Behind, "settle", changed(_Behind.settle, "places.took[records] = False", "places.took[records] = True")
        ),
        Patch(OnceSends, "_first", changed(OnceSends._first, "found.sequence + 1", "found.sequence")),
        Patch(OnceSends, "_first", changed(OnceSends._first, "len(places) == 1 and not keeps", "not keeps")),
        Patch(
            OnceSends,
            "_send",
            changed(OnceSends._send, "(row is None or found.record.digest != digest)", "row is None"),
        ),
        Patch(OnceRequest, "_claim", changed(OnceRequest._claim, "!= digest", "is None")),
        Patch(
            Recorded,
            "accept",
            changed(Recorded.accept, "accepted_at(told, kept.accepted_at_ms(filed_hour))", "told"),
        ),
    ],
    ids=lambda bug: f"{bug.name}",
)
def test_the_account_finds_a_bug(bug: Patch) -> None:
    with patch.object(*bug), pytest.raises(AssertionError, match="seed"):
        lives(SEEDS_PLANTED)
