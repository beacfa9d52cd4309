"""A row that a decision has ended is pending for no reader, however long its outcome takes to be written."""

from __future__ import annotations

import pytest

from delayd.delay.books.outcomes import Flushed, OutcomeLog
from delayd.delay.books.retention import SEGMENTS_KEPT_MS
from delayd.reading.books import audit_directory
from delayd.reading.find import FileFinder, Search, WantedMessages
from delayd.reading.plan import plan_audit, plan_hours
from delayd.reading.tables import LIFECYCLE, HourTables
from delayd.reading.trace import trace
from delayd.testing.clock import START_MS
from delayd.testing.disk import MemoryDisk
from delayd.testing.tree import PowerLoss
from tests.worlds.delay import DATA, World, wanted
from tests.worlds.key_books import KEEP, REJECT, REPLACE

HOUR_MS = 3_600_000
SUBJECT = "orders.eu"
# What became of rows 1 to 3 and 6; 4 took the place of the moved one, 5 of the replaced one, which 6 met.
ENDED = {1: "cancelled", 2: "moved", 3: "replaced", 6: "kept"}
PENDING = (4, 5)


@pytest.fixture(params=[False, True], ids=["not filed", "filed"])
def disk(request: pytest.FixtureRequest) -> MemoryDisk:
    """What a power cut leaves when decisions are durable, and no outcome of theirs is written."""
    return decided(filed=request.param)


def decided(*, filed: bool) -> MemoryDisk:
    world = World()
    world.sent_keyed(wanted(1, 5 * HOUR_MS, "cancelled"), [b"a"], REJECT)
    world.sent_keyed(wanted(1, 6 * HOUR_MS, "moved"), [b"b"], REJECT)
    world.sent_keyed(wanted(1, 7 * HOUR_MS, "replaced"), [b"c"], REJECT)
    if filed:
        world.checkpoint()
    commit, _, worker = world.executors()
    world.cancel(world.receipts("cancelled"))
    world.reschedule(world.receipts("moved"), START_MS + 8 * HOUR_MS)
    world.send_keyed(wanted(1, 9 * HOUR_MS, "newer"), [b"c"], REPLACE)
    while commit.step() or worker.step():
        pass
    world.send_keyed(wanted(1, 9 * HOUR_MS, "met"), [b"c"], KEEP)
    while commit.step() or worker.step():
        pass
    assert not world.outcomes()
    return world.remains(PowerLoss.ALL_LOST).disk


def test_a_trace_says_how_a_row_has_ended_and_where_that_stands(disk: MemoryDisk) -> None:
    for sequence, what in ENDED.items():
        (found,) = trace(disk, DATA, SUBJECT, sequence)
        assert (found.steps[-1].what, found.waits_for) == (what, "")
        assert "/message/" in found.steps[-1].path and found.steps[-1].at_ms == START_MS
        assert any("does not have it yet" in sentence for sentence in found.unseen)
    for sequence in PENDING:
        (found,) = trace(disk, DATA, SUBJECT, sequence)
        assert found.waits_for


def test_find_lists_no_ended_row_as_pending(disk: MemoryDisk) -> None:
    for everything in (False, True):
        search = Search(WantedMessages(), ended=everything)
        states = {row.sequence: row.state for found in FileFinder(disk, DATA, search).found() for row in found.rows}
        assert states == {**dict.fromkeys(PENDING, "pending"), **(ENDED if everything else {})}


def test_the_audit_and_the_tables_count_no_ended_row_as_pending(disk: MemoryDisk) -> None:
    report = audit_directory(DATA, now_ms=START_MS, disk=disk)
    assert report.balanced and (report.total.pending, report.total.cancelled) == (len(PENDING), len(ENDED))
    late = audit_directory(DATA, now_ms=START_MS + 30 * HOUR_MS, disk=disk)
    assert late.total.cancelled == len(ENDED)
    plan, tails = plan_audit(disk, (DATA,), START_MS)
    said: dict[int, tuple[object, object]] = {}
    for books in plan_hours(disk, plan, tails):
        tables = HourTables(books)
        columns = [LIFECYCLE[name][1](tables).to_list() for name in ("sequence", "state", "reason")]
        said |= {int(str(sequence)): (state, reason) for sequence, state, reason in zip(*columns, strict=True)}
    assert said == {
        **dict.fromkeys(PENDING, ("PENDING", None)),
        **{sequence: ("CANCELLED", what.upper()) for sequence, what in ENDED.items()},
    }


def test_the_message_log_keeps_a_decision_until_its_outcome_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(segment_bytes=4_096)
    world.sent_keyed(wanted(1, 30 * HOUR_MS, "row"), [b"a"], REJECT)

    def live() -> int:
        """Send enough for a few files, and go on for as long as files are kept for readers; how many there are."""
        for _ in range(4):
            world.send([(START_MS + 40 * HOUR_MS, b"other", bytes(4_096))])
            world.settle()
            world.checkpoint()
            world.clock.advance(SEGMENTS_KEPT_MS)
            world.pass_ms(1_000)
            world.sweep()
            world.settle()
        return len(world.disk.list_folder(f"{DATA}/delay/message"))

    with monkeypatch.context() as stopped:
        stopped.setattr(
            OutcomeLog,
            "_write",
            lambda log, group: Flushed({}, dict.fromkeys((row.hour for row in group.recorded), "full"), {}),
        )
        world.cancel(world.receipts("row"))
        world.settle()
        kept = live()
        assert live() > kept, "no file behind the decision is removed"
        (found,) = trace(world.disk, DATA, SUBJECT, 1)
        assert found.steps[-1].what == "cancelled" and "/message/" in found.steps[-1].path
    world.pass_ms(10_000)
    assert live() <= kept, "its outcome is written"
    (found,) = trace(world.disk, DATA, SUBJECT, 1)
    assert found.steps[-1].what == "cancelled" and "/dispatch/" in found.steps[-1].path
