"""What a caller asks of a schedule meets what the schedule has missed: nothing of that is lost."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

import delayd
from delayd.delay.ending.occurrences import Asks, Recurs, carrier_due_ms
from delayd.errors import SlowDown
from delayd.recurrence.deciding import RunPolicy
from delayd.wire.recurring import AskedSchedule, RecurringRecord, RecurringRequest, RecurringSpec, RecurringWish

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


SKIPS = RecurringSpec(delayd.Recurrence(every=timedelta(hours=1)), RunPolicy(overlap="skip"), "reports", b"")
SCHEDULE = AskedSchedule("reports", "report")
HOUR_MS = 3_600_000


def begun(spec: RecurringSpec) -> RecurringRecord:
    return RecurringRecord(spec, 1, BEGUN_MS, BEGUN_MS, BEGUN_MS)


@pytest.mark.parametrize(("is_busy", "sent", "skipped"), [(False, 1, {}), (True, 0, {"overlap": 1})])
def test_an_occurrence_waits_until_it_is_known_whether_an_earlier_one_is_acknowledged(
    is_busy: bool, sent: int, skipped: dict[str, int]
) -> None:
    now_ms = BEGUN_MS + HOUR_MS
    asking = Recurs(now_ms, now_ms + 2_000)
    assert asking(NAME, begun(SKIPS)) is None and asking.unanswered == {SCHEDULE}
    decided = Recurs(now_ms, now_ms + 2_000, overlaps={SCHEDULE: is_busy})(NAME, begun(SKIPS))
    assert decided is not None
    assert (len(decided.sent), decided.record.skipped, decided.record.decided_ms) == (sent, skipped, now_ms)


def test_it_is_decided_at_its_instant_and_not_ahead() -> None:
    ahead_ms = BEGUN_MS + HOUR_MS - 1_000
    decided = Recurs(ahead_ms, ahead_ms + 2_000)(NAME, begun(SKIPS))
    assert decided is not None and not decided.sent and decided.record.decided_ms == ahead_ms
    assert carrier_due_ms(decided.record, ahead_ms) == BEGUN_MS + HOUR_MS


def test_an_answer_about_another_subject_does_not_count() -> None:
    now_ms = BEGUN_MS + HOUR_MS
    asking = Recurs(now_ms, now_ms, overlaps={AskedSchedule("others", "report"): False})
    assert asking(NAME, begun(SKIPS)) is None


@pytest.mark.parametrize("paused", [False, True])
def test_a_change_asks_again_unless_nothing_runs_or_nobody_could_tell_for_a_minute(paused: bool) -> None:
    now_ms, pause = BEGUN_MS + HOUR_MS, RecurringRequest(RecurringWish.PAUSE, NAME, note="why")
    record = replace(begun(SKIPS), paused=paused)
    if not paused:
        with pytest.raises(SlowDown, match="unacknowledged"):
            Asks(pause, Recurs(now_ms, now_ms))(NAME, record)
    untold: frozenset[str] = frozenset() if paused else frozenset({"reports"})
    decided = Asks(pause, Recurs(now_ms, now_ms, untold=untold))(NAME, record)
    assert decided is not None and decided.record.paused and not decided.sent
    assert decided.record.skipped == {"paused" if paused else "overlap": 1}
