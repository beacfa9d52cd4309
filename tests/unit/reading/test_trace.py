"""What groups of consumers did with one message, as a trace tells it from the pull log."""

from __future__ import annotations

from delayd.log.control import GroupCreated, GroupSetBack, RetryDecided
from delayd.log.pull import PullEntry, PullOp, RetryRow, encode_rows, encode_void
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
        ("let go", "group billing was set back behind what had this number before"),
    ]
    assert found.last == [("billing", "")]
    for at, record in enumerate(records[4:], 4):
        found.take(record, "pull", at)
    assert found.last == [("billing", "acknowledged")]


def test_rule_L2_what_a_power_cut_undid_is_no_next_life_of_the_message_that_got_the_number() -> None:
    found = _Pulled(target=9, subject="orders", consume=5, claimed_at_ms=15)
    retry = RetryRow(77, 0, 5, 1, 1, 2_000, "", "boom")
    records: list[GroupCreated | GroupSetBack | RetryDecided | PullEntry] = [
        GroupCreated(1, "orders", "billing"),
        GroupCreated(2, "orders", "mail"),
        PullEntry(PullOp.PULL, 1, 1, 77, 0, 5, 1, 10),
        RetryDecided(5, 1, 1, 8, 11, encode_rows([retry])),
        GroupSetBack(1, 5, encode_void([(0, 1)])),
        PullEntry(PullOp.PULL, 1, 2, 78, 1, 5, 1, 20),
    ]
    for at, record in enumerate(records):
        found.take(record, "pull", at)
    assert [step.what for step in found.steps] == ["let go", "pulled"]
    assert found.lives == [] and found.last == [("billing", ""), ("mail", "pulled")]
