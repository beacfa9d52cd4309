"""What a pull log says of groups, and lies that it can't tell (rules Q1, Q5)."""

from collections.abc import Sequence

import pytest

from delayd.log.checkpoint import CheckpointFile
from delayd.log.control import GroupDeleted, GroupSetBack, Record, RetryDecided, as_record, encode_records
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import LogPlace, open_log
from delayd.log.pull import PullEntry, PullOp, RetryRow, encode_entries, encode_rows, encode_void
from delayd.log.segment import FileKind
from delayd.machine.disk import Disk
from delayd.reading.consumption import Consumption, read_consumption
from delayd.reading.files.directory import Directory, Role
from delayd.testing.disk import MemoryDisk

INCARNATION = 77
PULL, ACK, NACK, LAPSED, RETURNED = PullOp.PULL, PullOp.ACK, PullOp.NACK, PullOp.LAPSED, PullOp.RETURNED


def pull(first: int, count: int, consume: int, attempt: int = 1, group: int = 1) -> PullEntry:
    return PullEntry(PULL, attempt, group, INCARNATION, first, consume, count, 5, 1_000)


def end(op: PullOp, first: int, count: int, group: int = 1) -> PullEntry:
    return PullEntry(op, 0, group, INCARNATION, first, 0, count, 5)


def retry(first: int, count: int, consume: int, reason: str = "", group: int = 1) -> RetryDecided:
    rows = [RetryRow(INCARNATION, first, consume, count, 1, 2_000, reason, "")]
    return RetryDecided(5, first + 1, group, 8, 1_000, encode_rows(rows))


def read(
    *lives: Sequence[PullEntry | RetryDecided | GroupSetBack | GroupDeleted], groups: int = 2, counted: bool = False
) -> Consumption:
    """Read a pull log in which each list is what one life of the server wrote."""
    disk: Disk = MemoryDisk()
    disk.make_folder("/rt/pull")
    log = open_log(disk, LogPlace("/rt/pull", FileKind.PULL, 9), 1)
    records: list[Record] = [
        {"type": "group", "group_id": n, "subject": "orders", "group": f"g{n}"} for n in range(1, groups + 1)
    ]
    log.append([NewGroup(GroupKind.CONTROL, [encode_records(records)], 1, 1)], 1)
    for epoch, entries in enumerate(lives, 1):
        for entry in entries:
            if isinstance(entry, RetryDecided | GroupSetBack | GroupDeleted):
                new = NewGroup(GroupKind.CONTROL, [encode_records([as_record(entry)])], epoch, 1)
            else:
                new = NewGroup(GroupKind.DATA, encode_entries([entry]), epoch, 1, 0, 1)
            log.append([new], 1)
    log.flush()
    log.close()
    if counted:
        CheckpointFile(disk, "/rt", 9).publish({"pull_offset": log.end}, 1)
    return read_consumption(disk, Directory("/rt", Role.REALTIME, 9), [])


def test_each_message_that_was_given_out_is_counted_by_what_became_of_it() -> None:
    found = read(
        [
            pull(0, 10, 0),
            pull(10, 5, 0, group=2),
            end(ACK, 0, 4),
            end(NACK, 4, 1),
            end(RETURNED, 5, 2),
            # A lease lapses for its whole range, though some of it was acknowledged.
            end(LAPSED, 0, 10),
            pull(15, 1, 4, attempt=2),
            pull(16, 2, 5),
            end(ACK, 15, 3),
            pull(18, 2, 12),
        ]
    )
    assert found.faults == ()
    one, two = found.groups
    assert (one.subject, one.group, one.pulled, one.redelivered) == ("orders", "g1", 15, 1)
    assert (one.acknowledged, one.given_back, one.lapsed, one.outstanding, one.gaps) == (7, 3, 3, 2, 2)
    assert (two.pulled, two.acknowledged, two.outstanding) == (5, 0, 5)


@pytest.mark.parametrize("counted", [False, True])
def test_rule_L2_a_power_cut_may_take_what_no_checkpoint_counts(counted: bool) -> None:
    found = read([pull(0, 10, 0), pull(10, 5, 0, group=2), pull(15, 2, 12)], counted=counted)
    assert found.ends == (("orders", 14 if counted else 0),)


def test_rule_L2_a_group_that_was_set_back_gets_other_messages_under_the_same_numbers() -> None:
    back = GroupSetBack(1, 3, encode_void([(3, 10)]))
    found = read([pull(0, 10, 0), end(ACK, 0, 10)], [back, pull(10, 2, 3), end(ACK, 10, 2)], counted=True)
    assert found.faults == ()
    assert found.ends == (("orders", 5),)
    later = read([pull(0, 10, 0)], [back, end(ACK, 0, 3), pull(10, 2, 3)], counted=True)
    assert later.faults == () and [(each.acknowledged, each.outstanding) for each in later.groups] == [(3, 7), (0, 2)]
    lied = read([pull(0, 10, 0), end(ACK, 0, 10)], [pull(10, 2, 3)], counted=True)
    assert lied.faults == ("message 3 of orders was given to group g1 of orders again after it was acknowledged",)


def test_rule_L2_what_a_deleted_group_was_given_proves_nothing_for_no_start_sets_it_back() -> None:
    assert read([pull(0, 10, 0), GroupDeleted(1), pull(10, 5, 0, group=2)], counted=True).ends == (("orders", 5),)


def test_what_was_sent_back_to_the_delay_server_is_not_outstanding() -> None:
    found = read(
        [
            pull(0, 10, 0),
            pull(10, 4, 0, group=2),
            retry(2, 3, 2),
            retry(5, 1, 5, "no such order"),
            retry(10, 4, 0, group=2),
            # The lease of all ten ends.
            end(LAPSED, 0, 10),
            pull(14, 2, 0, attempt=2),
            end(ACK, 14, 2),
        ]
    )
    assert found.faults == ()
    one, two = found.groups
    assert (one.pulled, one.acknowledged, one.sent_back, one.lapsed, one.outstanding) == (12, 2, 4, 6, 0)
    assert (two.pulled, two.sent_back, two.outstanding) == (4, 4, 0)


def test_one_acknowledgement_may_span_what_another_group_was_given() -> None:
    found = read([pull(0, 2, 0), pull(2, 3, 0, group=2), pull(5, 2, 2), end(ACK, 0, 7)])
    assert found.faults == ()
    assert [(books.acknowledged, books.outstanding) for books in found.groups] == [(4, 0), (0, 3)]


def test_a_new_life_may_leave_out_pull_sequences() -> None:
    assert read([pull(0, 2, 0)], [pull(9, 2, 2)]).faults == ()


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ([pull(0, 2, 0), end(ACK, 2, 1)], "ACK of pull sequences 2 to 2 begins with what group g1"),
        ([pull(0, 2, 0), end(ACK, 0, 3)], "ends with what group g1 of orders did not hold"),
        ([end(ACK, 0, 1), pull(0, 2, 0)], "begins with what group g1 of orders did not hold"),
        ([pull(0, 2, 0), end(ACK, 0, 1), end(NACK, 0, 1)], "NACK of pull sequences 0 to 0 begins"),
        ([pull(0, 2, 0), end(ACK, 0, 2, group=2)], "what group g2 of orders did not hold"),
        ([pull(0, 2, 0), pull(1, 2, 2)], "pull sequences 1 to 1 are given out twice"),
        ([pull(0, 2, 0), pull(5, 2, 2)], "pull sequences 2 to 4 are left out"),
        ([pull(0, 2, 0), end(ACK, 0, 2), pull(2, 1, 1, attempt=2)], "message 1 of orders was given"),
        ([pull(0, 2, 0), retry(0, 2, 0), pull(2, 1, 1, attempt=2)], "g1 of orders again after it was sent back"),
        ([pull(0, 2, 0), retry(1, 2, 1)], "retry of pull sequences 1 to 2 ends with what group g1"),
        ([RetryDecided(5, 1, 1, 8, 0, b"?"), pull(0, 1, 0)], "1 entries of the pull log say what no server writes"),
        ([pull(0, 2, 0, group=7)], "an entry names the group 7, which no record before it made"),
        ([pull(0, 0, 0), pull(0, 1, 0)], "1 entries of the pull log say what no server writes"),
        ([pull((1 << 64) - 1, 5, 0), pull(0, 1, (1 << 63) + 5)], "2 entries of the pull log say what no server writes"),
    ],
)  # fmt: skip
def test_rule_Q5_what_no_server_writes_is_named(entries: list[PullEntry | RetryDecided], what: str) -> None:
    assert [fault for fault in read(entries).faults if what in fault], read(entries).faults


def test_a_pull_log_without_entries_says_nothing() -> None:
    assert read([pull(0, 0, 0)])[0] == ()
    assert read_consumption(MemoryDisk(), Directory("/rt", Role.REALTIME, 9), []) == Consumption()


def test_the_time_to_acknowledge_is_from_the_pull_of_each_message() -> None:
    def ack(first: int, count: int, at_ms: int) -> PullEntry:
        return PullEntry(ACK, 0, 1, INCARNATION, first, 0, count, at_ms)

    # Pulled at 5 ms: 3 are acknowledged after 200 ms, 1 after 700 ms, and 2 by a clock that was set back; 4 are held.
    found = read([pull(0, 10, 0), ack(0, 3, 205), ack(3, 1, 705), ack(4, 2, 1)])
    (group,) = found.groups
    assert (group.acknowledged, group.ack_ms_total, group.ack_ms_max) == (6, 3 * 200 + 700, 700)
