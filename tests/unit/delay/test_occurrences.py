"""What a caller asks of a schedule meets what the schedule has missed: nothing of that is lost."""

from __future__ import annotations

from datetime import timedelta

import pytest

import delayd
from delayd.delay.ending.occurrences import Asks, Recurs
from delayd.errors import SlowDown
from delayd.recurrence.deciding import RunPolicy
from delayd.wire.recurring import RecurringRecord, RecurringRequest, RecurringSpec, RecurringWish

BEGUN_MS = 1_798_761_600_000
NAME = b"report"
DAYS = 60
BODY_BYTES = 250_000  # So large that sixteen messages fill one decision.


def spec_of(hours: int) -> RecurringSpec:
    every = delayd.Recurrence(every=timedelta(hours=hours))
    return RecurringSpec(every, RunPolicy(misfire="all"), "reports", bytes(BODY_BYTES))


@pytest.mark.parametrize(
    "request_",
    [
        RecurringRequest(RecurringWish.PUT, NAME, 1, spec_of(48)),
        RecurringRequest(RecurringWish.PAUSE, NAME),
        RecurringRequest(RecurringWish.RUN, NAME, number=7),
    ],
    ids=lambda request: request.wish.value,
)
def test_a_change_waits_until_all_that_was_missed_is_sent(request_: RecurringRequest) -> None:
    record = RecurringRecord(spec_of(24), 1, BEGUN_MS, BEGUN_MS, BEGUN_MS)
    now_ms = BEGUN_MS + DAYS * 86_400_000 + 5
    sent, refused = list[int](), 0
    while True:
        try:
            decided = Asks(request_, Recurs(now_ms, now_ms))(NAME, record)
            break
        except SlowDown as error:
            assert error.retry_after_ms > 0 and "report" in error.message
        refused += 1
        part = Recurs(now_ms, now_ms).decided(NAME, record)
        assert part is not None
        record = part.record
        sent += part.sent
    assert decided is not None and refused >= 3
    sent += [instant for instant in decided.sent if instant != now_ms]
    assert sent == [BEGUN_MS + day * 86_400_000 for day in range(1, DAYS + 1)]
