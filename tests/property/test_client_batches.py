"""What producers pack: every batch passes the server's checks and holds the rows that went in, however regrouped."""

from __future__ import annotations

from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from delayd import BatchReceipt, Receipt
from delayd.batch.batch import encode_single
from delayd.batch.columns import ColumnId, Int64s
from delayd.batch.labels import encode_tags
from delayd.client.instants import ServerClock
from delayd.client.pulling.acks import merge
from delayd.client.sending.outbox import (
    BYTES_TARGET,
    ROWS_TARGET,
    Block,
    Gathering,
    Piece,
    Progress,
    pack_rows,
    row_bytes,
    split_rows,
)
from delayd.client.sending.receipts import Accepted
from delayd.client.sending.send_options import NO_LABEL, Columns, Label, Labels, SendItems, Single
from delayd.errors import DelaydError, HourFull
from tests.property.packed import LOG_ID, PART, Row, known_clock, unpacked

NAMES = st.text("abcXYZ019._%/-", min_size=1, max_size=12)
HEADERS = st.sampled_from([b"", b"\x80", b"\x81\xa1a\xa1b", b"\x81\xa3key\xc4\x01\x00"])
TAG_ITEMS = [b"", encode_tags(["eu"]), encode_tags(["eu", "urgent"])]
LABELS = st.none() | st.sampled_from(
    [Label(key, min(len(key), 2), item) for key in (b"", b"k", b"a key of more than a word") for item in TAG_ITEMS]
)
ROWS = st.lists(
    st.tuples(NAMES, st.binary(max_size=40), st.integers(0, 2**45), st.booleans(), HEADERS, LABELS),
    min_size=1,
    max_size=30,
)

Outcome = TypeVar("Outcome")


class Kept(Generic[Outcome]):
    """A waiter that keeps what it is told."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome | DelaydError] = []

    def done(self) -> bool:
        return False

    def set_result(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def set_exception(self, error: DelaydError) -> None:
        self.outcomes.append(error)


def gathered(sends: list[Single]) -> tuple[Gathering, list[Kept[Receipt]]]:
    gathering = Gathering()
    waiters: list[Kept[Receipt]] = [Kept() for _ in sends]
    for row, waiter in zip(sends, waiters, strict=True):
        gathering.add(row, row_bytes(row), waiter)
    return gathering, waiters


def expected(sends: list[Single], clock: ServerClock) -> list[Row]:
    return [
        (subject.encode(), body, clock.latest_ms(when) if relative else when, headers, label or NO_LABEL)
        for subject, body, when, relative, headers, label in sends
    ]


@given(ROWS)
def test_gathered_sends_come_out_as_they_went_in(sends: list[Single]) -> None:
    clock = known_clock()
    gathering, waiters = gathered(sends)
    assert unpacked(gathering.encode(PART, clock)) == expected(sends, clock)
    gathering.accept(Accepted(LOG_ID, 100, len(sends), 2_000, False))
    for at, (row, waiter) in enumerate(zip(expected(sends, clock), waiters, strict=True)):
        assert waiter.outcomes == [Receipt(LOG_ID, 100 + at, row[2], 2_000, row[2] <= 2_000, False)]


@given(ROWS, st.data())
def test_rows_that_were_split_off_end_once_and_on_the_right_side(sends: list[Single], data: st.DataObject) -> None:
    assume(len(sends) > 1)
    chosen = data.draw(st.sets(st.integers(0, len(sends) - 1), min_size=1, max_size=len(sends) - 1))
    gathering, waiters = gathered(sends)
    named, others = gathering.split(sorted(chosen))
    assert named.held_bytes + others.held_bytes == gathering.held_bytes
    clock = known_clock()
    assert unpacked(named.encode(PART, clock)) == expected([sends[row] for row in sorted(chosen)], clock)
    others.encode(PART, clock)
    named.fail(HourFull("full"))
    others.accept(Accepted(LOG_ID, 1, others.count, 0, False))
    for row, waiter in enumerate(waiters):
        assert [isinstance(outcome, HourFull) for outcome in waiter.outcomes] == [row in chosen]


@given(NAMES, st.binary(max_size=100), st.integers(0, 2**45))
def test_the_short_way_for_one_row_makes_the_same_bytes(subject: str, body: bytes, due: int) -> None:
    name = subject.encode()
    columns = {ColumnId.DELIVER_AT_MS: np.array([due])}
    regions = {ColumnId.BODY_END: SendItems([body], np.array([len(body)]))}
    assert encode_single(PART, due, name, body) == b"".join(pack_rows(PART, [name], columns, regions))


@given(st.lists(st.integers(0, 5 << 20), max_size=40), st.integers(0, 3))
def test_a_batch_is_cut_into_runs_that_cover_it_within_the_targets(sizes: list[int], many: int) -> None:
    column = np.array(sizes + [1] * (many * ROWS_TARGET), np.int64)
    runs = split_rows(column)
    assert [row for run, _ in runs for row in run] == list(range(len(column)))
    for run, size_bytes in runs:
        assert size_bytes == column[run.start : run.stop].sum()
        assert len(run) <= ROWS_TARGET
        assert len(run) == 1 or column[run.start : run.stop].sum() <= BYTES_TARGET


@given(ROWS, st.data())
def test_a_block_that_is_split_again_and_again_reports_every_row_once(sends: list[Single], data: st.DataObject) -> None:
    count = len(sends)
    bodies = [row[1] for row in sends]
    due: Int64s = np.array([row[2] for row in sends])
    sizes: Int64s = np.array([len(body) for body in bodies])
    labels = Labels(*zip(*(row[5] or NO_LABEL for row in sends), strict=True))
    columns = Columns(b"a", bodies, sizes, sizes, due, False, [row[4] for row in sends], labels)
    answer: Kept[BatchReceipt] = Kept()
    blocks = [Block(Piece(Progress(count, answer), np.arange(count), columns))]
    sequence = 1
    sequences: dict[int, bytes] = {}
    told: list[tuple[bytes, Label]] = []
    while blocks:
        block = blocks.pop()
        if block.count > 1 and data.draw(st.booleans()):
            rows = data.draw(st.sets(st.integers(0, block.count - 1), min_size=1, max_size=block.count - 1))
            blocks.extend(block.split(sorted(rows)))
            continue
        for at, row in enumerate(unpacked(block.encode(PART, known_clock()))):
            sequences[sequence + at] = row[1]
            told.append((row[1], row[4]))
        block.accept(Accepted(LOG_ID, sequence, block.count, 0, False))
        sequence += block.count
    (receipt,) = answer.outcomes
    assert isinstance(receipt, BatchReceipt)
    assert receipt.rows.tolist() == list(range(count)) and receipt.deliver_at_ms.tolist() == due.tolist()
    assert [sequences[number] for number in receipt.sequences.tolist()] == bodies
    assert sorted(told) == sorted((row[1], row[5] or NO_LABEL) for row in sends)


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 60), st.integers(1, 12)), max_size=30))
def test_merged_handles_name_the_same_messages_in_the_fewest_ranges(handles: list[tuple[int, int, int]]) -> None:
    merged = merge([list(handle) for handle in handles])
    named = {(life, first + at) for life, first, count in handles for at in range(count)}
    listed = [(life, first + at) for life, first, count in merged for at in range(count)]
    assert sorted(named) == listed
    for before, after in pairwise(merged):
        assert before[0] < after[0] or before[1] + before[2] < after[1]


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5_000_000), st.integers(0, 50_000)), min_size=1),
)
def test_rule_T2_the_latest_time_of_a_server_is_never_below_its_clock(
    lead_us: int, samples: list[tuple[int, int, int]]
) -> None:
    lead_us += 10**13
    clock = ServerClock("a server")
    now_us = 10**12
    best_us = 10**9
    for way_there_us, pause_us, way_back_us in samples:
        asked_us = now_us
        read_ms = (asked_us + way_there_us + lead_us) // 1000
        now_us = asked_us + way_there_us + way_back_us
        clock.sample(asked_us, now_us, read_ms, wall_us=asked_us + lead_us)
        best_us = min(best_us, way_there_us + way_back_us)
        now_us += pause_us
        truth_ms = (now_us + lead_us) // 1000
        # The clocks of this test do not drift, so the sample with the shortest way is as good as on its first day,
        # and a worse one that took its place with age is worse by no more than that age allows.
        assert truth_ms <= clock.latest_ms(now_us) <= truth_ms + best_us // 1000 + 3 + len(samples)
