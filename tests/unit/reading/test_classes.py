"""The word that a table has for a row is the class that the audit counts it in, and LOST is what the audit calls so."""

from collections import Counter

import pytest

from delayd.errors import BadArgument, DamagedData
from delayd.reading.books import report_plan
from delayd.reading.files.groups import LogMoved
from delayd.reading.findings import FindingKind, HourSummary
from delayd.reading.plan import plan_audit, plan_hours
from delayd.reading.tables import TABLES, HourTables
from delayd.testing.disk import MemoryDisk
from tests.simulation.audit import BOOKS
from tests.tamper.honest import honest
from tests.tamper.liar import Liar
from tests.tamper.lies import Lie, all_lies

COUNTED = {
    "DEAD": "dead",
    "CANCELLED": "cancelled",
    "EXPIRED": "expired",
    "IN_DOUBT": "in_doubt",
    "PENDING": "pending",
    "UNDECIDED": "undecided",
    "WAITING": "waiting",
    "LOST": "missing",
    "UNPROVEN": "unproven",
}


def check_states(disk: MemoryDisk, now_ms: int) -> Counter[str]:
    """Hold each hour's lifecycle against its figures, and each LOST row against the findings; the words by number."""
    plan, tails = plan_audit(disk, BOOKS, now_ms)
    report = report_plan(disk, BOOKS, now_ms, plan, tails, None)
    summaries = {(each.log_id, each.hour): each for each in report.hours}
    lost = {(each.log_id, each.hour, each.sequence) for each in report.findings if each.kind is FindingKind.LOST}
    words: Counter[str] = Counter()
    for books in plan_hours(disk, plan, tails):
        tables = HourTables(books)
        columns = {name: make(tables).to_list() for name, (_, make) in TABLES["lifecycle"].columns.items()}
        counted = Counter(str(state) for state in columns["state"])
        _check_counts(counted, summaries[books.log_id, books.hour])
        for sequence, state in zip(columns["sequence"], columns["state"], strict=True):
            if state == "LOST":
                assert (books.log_id, books.hour, sequence) in lost
        words += counted
    return words


def _check_counts(counted: Counter[str], summary: HourSummary) -> None:
    for word, field in COUNTED.items():
        assert counted[word] == getattr(summary, field), (word, summary)
    assert counted["DELIVERED"] + counted["UNPROVEN"] == summary.dispatched
    assert counted.total() == summary.scheduled


def test_the_words_of_an_honest_directory_are_its_figures() -> None:
    words = check_states(*honest())
    assert words["DELIVERED"] and words["PENDING"] and not words["LOST"]


def test_what_a_target_forgot_is_lost_and_without_its_log_unproven() -> None:
    disk, now_ms = honest()
    liar = Liar(disk)
    for name in liar.disk.list_folder(f"{BOOKS}/realtime-0/message"):
        liar.disk.remove(f"{BOOKS}/realtime-0/message/{name}")
    for name in ("checkpoint",):
        liar.disk.remove(f"{BOOKS}/realtime-0/{name}")
    words = check_states(liar.disk, now_ms)
    assert words["UNPROVEN"] and not words["LOST"]


@pytest.mark.parametrize("lie", all_lies()[::6], ids=lambda lie: lie.name.replace(" ", "_"))
def test_the_words_of_a_lie_are_its_figures(lie: Lie) -> None:
    disk, now_ms = honest()
    liar = Liar(disk)
    lie.tell(liar)
    try:
        check_states(liar.disk, now_ms)
    except (BadArgument, DamagedData, LogMoved):
        pass  # The audit ends with this error, so there is no table to check.
