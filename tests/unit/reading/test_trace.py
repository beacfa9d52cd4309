"""What groups of consumers did with one message, as a trace tells it from the pull log."""

from __future__ import annotations

from delayd.log.control import GroupCreated, GroupSetBack
from delayd.log.pull import PullEntry, PullOp, encode_void
from delayd.reading.trace import _Pulled


def test_rule_L2_what_a_power_cut_took_is_not_taken_for_the_message_that_got_its_number() -> None:
    found = _Pulled(target=9, subject="orders", consume=5, claimed_at_ms=0)
    records: list[GroupCreated | GroupSetBack | PullEntry] = [
        GroupCreated(1, "orders", "billing"),
        PullEntry(PullOp.PULL, 1, 1, 77, 0, 4, 4, 10),
        PullEntry(PullOp.ACK, 0, 1, 77, 0, 0, 1, 11),
        GroupSetBack(1, 5, encode_void([(1, 4)])),
        PullEntry(PullOp.PULL, 1, 1, 78, 4, 5, 1, 20),
        PullEntry(PullOp.ACK, 0, 1, 78, 4, 0, 1, 21),
    ]
    for at, record in enumerate(records[:4]):
        found.take(record, "pull", at)
    assert [(step.what, step.detail) for step in found.steps] == [
        ("pulled", "group billing, attempt 1"),
        ("let go", "group billing was set back"),
    ]
    assert found.last == [("billing", "")]
    for at, record in enumerate(records[4:], 4):
        found.take(record, "pull", at)
    assert found.last == [("billing", "acknowledged")]
