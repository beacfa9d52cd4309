"""Records of sends that are to happen once: the server decides about a record and the row behind it (docs/once.md)."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

from delayd.batch.columns import RECORD_FLAG, ProducerPart
from delayd.client.asking import once
from delayd.delay.ending import own_rows
from delayd.delay.ending.keyed_sends import KEEP, REJECT, REPLACE
from delayd.delay.ending.message_requests import MessageRequests
from delayd.delay.ending.requested import RequestWish, Whole
from delayd.errors import BadRequest
from delayd.hours import INSTANT_MS_MAX
from delayd.outcome import MessageState, Reason
from delayd.recurrence.deciding import RunPolicy
from delayd.recurrence.recurrence import Recurrence
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES
from delayd.testing.tree import PowerLoss
from delayd.wire.asked import ANSWER, AskedWindow, Content, read_piece
from delayd.wire.heads import need_maps
from delayd.wire.once import KEPT_MS, SendRecord
from delayd.wire.recurring import RecurringRequest, RecurringSpec, RecurringWish, body_of
from delayd.wire.requests import RequestType
from tests.batches import messages
from tests.worlds.delay import ACCEPTED, World, wanted
from tests.worlds.outside import Wanted

RECORD = b"%once"
KEPT, REJECTED, REPLACED = int(Reason.KEPT), int(Reason.REJECTED), int(Reason.REPLACED)
HOUR_MS = 3_600_000


def pair(name: str, due_ms: int = 50_000) -> list[Wanted]:
    """A record and a message."""
    return wanted(1, KEPT_MS, f"record of {name}", RECORD) + wanted(1, due_ms, name)


def end(world: World) -> None:
    """Each row has an outcome, and the books balance."""
    world.drain(30 * HOUR_MS)
    world.check_books()
    world.check_sealing()


def test_a_message_is_kept_with_its_record_and_refused_when_there_was_one() -> None:
    world = World()
    flags = [RECORD_FLAG, 0]
    assert world.sent_keyed(pair("first"), [b"n", b""], flags) == [ACCEPTED] * 2
    assert world.sent_keyed(pair("second"), [b"n", b""], flags) == [(KEPT, 1), (REJECTED, 1)]
    world.checkpoint()
    for life in (world, world.after_crash(PowerLoss.ALL_LOST), world.after_crash()):
        assert life.sent_keyed(pair("third"), [b"n", b"k"], [*flags[:1], REJECT]) == [(KEPT, 1), (REJECTED, 1)]
        assert life.sent_keyed(pair("fourth")[1:], [b"k"], REJECT) == [ACCEPTED], "the third one took no key"
        assert life.sent_keyed(pair("fifth")[:1], [b"n"], RECORD_FLAG) == [(KEPT, 1)], "a record alone"
    end(world)


def test_records_of_one_commit_meet_each_other_before_other_rows_do() -> None:
    world = World()
    rows = [*pair("a"), *pair("b"), *pair("c"), *wanted(1, 50_000, "d")]
    keys = [b"n", b"k", b"n", b"k", b"m", b"k", b"k"]
    flags = [RECORD_FLAG, REPLACE, RECORD_FLAG, REPLACE, RECORD_FLAG, REPLACE, KEEP]
    # The record of b meets that of a, so b replaces nothing; c replaces a, and c stands for d.
    assert world.sent_keyed(rows, keys, flags) == [
        ACCEPTED,
        ACCEPTED,
        (KEPT, 1),
        (REJECTED, 1),
        ACCEPTED,
        (REPLACED, 2),
        (KEPT, 6),
    ]
    numbers = [world.send_keyed(pair(f"e{number}"), [b"o", b""], [RECORD_FLAG, 0]) for number in range(3)]
    world.settle()
    assert [world.verdicts(number)[1] for number in numbers] == [ACCEPTED, (REJECTED, 8), (REJECTED, 8)]
    end(world)


def test_a_record_at_the_end_of_a_batch_stands_alone() -> None:
    world = World()
    world.sent_keyed(pair("first"), [b"n", b""], [RECORD_FLAG, 0])
    world.sent_keyed(wanted(1, 50_000, "second"), [b"k"], REJECT)
    numbers = [
        world.send_keyed(pair("again")[:1], [b"n"], RECORD_FLAG),
        world.send_keyed(wanted(1, 50_000, "of another sender"), [b"l"], REJECT),
        world.send_keyed(pair("new")[:1], [b"m"], RECORD_FLAG),
        world.send_keyed(wanted(1, 50_000, "of a third one"), [b"k"], REJECT),
    ]
    world.settle()
    assert [world.verdicts(number) for number in numbers] == [[(KEPT, 1)], [ACCEPTED], [ACCEPTED], [(REJECTED, 3)]]
    end(world)


def test_there_is_no_record_of_a_message_that_was_refused_for_its_key() -> None:
    world = World()
    world.sent_keyed(wanted(1, 50_000, "first"), [b"k"], REJECT)
    flags = [RECORD_FLAG, REJECT]
    assert world.sent_keyed(pair("second"), [b"n", b"k"], flags) == [(REJECTED, 1)] * 2
    kept = world.sent_keyed(pair("third"), [b"m", b"k"], [RECORD_FLAG, KEEP])
    assert kept == [ACCEPTED, (KEPT, 1)], "of one for which another stands there is a record"
    for life in (world, world.after_crash(PowerLoss.ALL_LOST)):
        assert life.sent_keyed(pair("fourth"), [b"n", b"l"], flags) == [ACCEPTED] * 2
        assert life.sent_keyed(pair("fifth"), [b"m", b"o"], flags) == [(KEPT, 4), (REJECTED, 4)]
    end(world)


def test_a_record_ends_a_day_later_and_is_handed_over_to_nobody() -> None:
    world = World()
    world.sent_keyed(pair("first", 40 * HOUR_MS), [b"n", b""], [RECORD_FLAG, 0])
    records = world.receipts("record of first")
    world.clock.advance(KEPT_MS - 2_000)
    world.pass_ms(1_000)
    assert world.states(records) == [MessageState.PENDING]
    assert world.sent_keyed(pair("second"), [b"n", b""], [RECORD_FLAG, 0])[1] == (REJECTED, 1)
    world.pass_ms(3_000)
    assert world.states(records) == [MessageState.CANCELLED]
    assert world.sent_keyed(pair("third"), [b"n", b""], [RECORD_FLAG, 0]) == [ACCEPTED] * 2


def test_what_became_of_a_record_is_told_also_when_it_was_taken_weeks_late() -> None:
    world = World()
    due_ms = -20 * 24 * HOUR_MS + 7
    assert world.sent_keyed(wanted(1, due_ms, "late", RECORD), [b"n"], RECORD_FLAG) == [ACCEPTED]
    world.pass_ms(1_000)
    world.checkpoint()
    assert world.states(world.receipts("late-0")) == [MessageState.CANCELLED]
    assert world.sent_keyed(pair("next"), [b"n", b""], [RECORD_FLAG, 0]) == [ACCEPTED] * 2


def tries(caplog: pytest.LogCaptureFixture, subject: str) -> int:
    return sum(record.message.startswith(f"own_rows_not_decided subject={subject} ") for record in caplog.records)


def test_own_rows_that_a_full_disk_keeps_are_tried_again_each_second(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    spec = RecurringSpec(Recurrence(every=timedelta(seconds=1)), RunPolicy(misfire="all"), "orders.eu", b"")
    request = RecurringRequest(RecurringWish.PUT, b"each", spec=spec)
    world.ask(RequestType.RECUR, request.to_head(world.server.log_id), b"".join(body_of(spec.encode())))
    world.sent_keyed(
        [*wanted(1, 2_500, "record", RECORD), *wanted(1, 50_000, "message")], [b"n", b""], [RECORD_FLAG, 0]
    )
    world.pass_ms(1_500)
    world.disk.capacity_bytes = world.disk.used_bytes
    world.pass_ms(5_000)
    assert 0 < tries(caplog, "%once") <= 6 and 0 < tries(caplog, "%cron") <= 6, "a try each second"
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(3_000)
    assert world.states(world.receipts("record-0")) == [MessageState.CANCELLED]
    assert len(world.bodies()) >= 8, "occurrences that were missed are sent"


def test_a_record_that_cannot_end_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is answered as while its hour can't be read, and one ends at a time."""
    monkeypatch.setattr(own_rows, "AT_ONCE", 1)
    world = World()
    world.send_keyed(wanted(1, HOUR_MS, "stuck", RECORD), [b"n"], RECORD_FLAG)
    world.settle()
    world.checkpoint()
    world.clock.advance(HOUR_MS - 3_000)
    world.pass_ms(500)
    stuck = world.receipts("stuck-0").sequences
    decide = MessageRequests.take

    def left_in_flight(self: MessageRequests, whole: Whole) -> None:
        if whole.wish is RequestWish.CANCEL and whole.asked.sequences.tolist() == stuck.tolist():
            whole.reply.end(np.zeros(1, ANSWER))
        else:
            decide(self, whole)

    with monkeypatch.context() as patched:
        patched.setattr(MessageRequests, "take", left_in_flight)
        world.sent_keyed(wanted(3, HOUR_MS, "other", RECORD), [b"a", b"b", b"c"], RECORD_FLAG)
        world.pass_ms(6_000)
        states = world.states(world.receipts("other-0", "other-1", "other-2", "stuck-0"))
        assert sorted(states) == sorted([MessageState.CANCELLED] * 3 + [MessageState.PENDING])
    world.pass_ms(6_000)
    assert world.states(world.receipts("stuck-0")) == [MessageState.CANCELLED], "it is tried again"


def test_a_record_that_says_nothing_spoils_no_other_one() -> None:
    world = World()
    bodies = [SendRecord(b"d" * 32, 7, START_MS, START_MS).encode(), b"", b"x" * 57]
    rows = [(START_MS + KEPT_MS + number, RECORD, body) for number, body in enumerate(bodies)]
    world.sent_keyed(rows, [b"a", b"b", b"c"], RECORD_FLAG)
    window = AskedWindow(RECORD, 0, INSTANT_MS_MAX, rows_max=10, content=Content.WHOLE)
    piece = read_piece(*world.ask(RequestType.FIND, window.to_head(world.server.log_id)))
    found = once._records_of(world.server.log_id, piece)
    assert found[world.server.log_id, 1].record.digest == b"d" * 32
    for sequence in (2, 3):
        with pytest.raises(BadRequest, match="another Idempotency-Key"):
            _ = found[world.server.log_id, sequence].record


@pytest.mark.parametrize(
    ("subjects", "subject_of", "flags", "code"),
    [
        ([b"a", RECORD], [1, 0], [RECORD_FLAG, 0], None),
        ([b"a", RECORD], [1, 0], [0, 0], "bad_subject"),
        ([b"a", RECORD], [1, 0], [RECORD_FLAG, RECORD_FLAG], "batch_malformed"),
        ([b"a", b"%cron"], [1, 0], [0, 0], "bad_subject"),
    ],
)
def test_a_client_sends_records_to_their_subject_and_nothing_else(
    subjects: list[bytes], subject_of: list[int], flags: list[int], code: str | None
) -> None:
    body = messages(
        [b"", b"x"],
        due=[START_MS + KEPT_MS, START_MS + HOUR_MS],
        keys=[b"n", b"k"],
        flags=flags,
        subjects=subjects,
        subject_of=subject_of,
        part=ProducerPart(7, 1, 1),
    )
    (result,) = need_maps(World().ask(RequestType.SEND, body=body)[0], "results")
    assert result.get("error") == code
