"""Find, listings, tables and traces say of a message what the audit counts it as: they ask the same functions."""

from collections.abc import Iterator

import pytest

from delayd.errors import BadArgument, DamagedData
from delayd.hours import hour_name
from delayd.reading.data import NONE, Data, schedules
from delayd.reading.files.origins import outcome_word
from delayd.reading.files.stored_groups import LogMoved
from delayd.reading.find import FileFinder, Search, WantedMessages
from delayd.reading.plan import plan_audit, plan_hours
from delayd.reading.tables import HourTables
from delayd.reading.trace import trace
from delayd.testing.disk import MemoryDisk
from tests.simulation.audit import BOOKS
from tests.tamper.honest import honest
from tests.tamper.liar import Liar
from tests.tamper.lies import Lie, all_lies

Rows = dict[tuple[int, int, int], str]  # By delay server, hour and sequence.


def audited(disk: MemoryDisk, now_ms: int) -> Rows:
    """The word of each row by which the audit counts it; a row that is scheduled twice counts by its first copy."""
    plan, tails = plan_audit(disk, (BOOKS,), now_ms)
    said: Rows = {}
    for books in plan_hours(disk, plan, tails):
        tables = HourTables(books)
        outcome, reason = tables.decided["outcome"], tables.decided["reason"]
        for row, sequence in enumerate(tables.schedule.sequence.tolist()):
            part = {"outcome": outcome[row], "reason": reason[row]}
            word = outcome_word(part) if outcome[row] else "pending"  # type: ignore[arg-type]
            said.setdefault((books.log_id, books.hour, sequence), word)
    return said


def listed(disk: MemoryDisk, damage: list[DamagedData]) -> Iterator[tuple[tuple[int, int, int], str]]:
    """The same by the listings of hours."""
    for each in schedules(disk, BOOKS, damage):
        for number in each.hours():
            hour = each.read(number)
            for sequence, at in zip(hour.rows.sequence.tolist(), hour.outcome_of.tolist(), strict=True):
                part = None if at == NONE else hour.outcomes.parts[hour.outcomes.part_of[at]]
                yield (each.directory.log_id, number, sequence), "pending" if part is None else outcome_word(part)


def check(disk: MemoryDisk, now_ms: int) -> Rows:
    said, damage = audited(disk, now_ms), list[DamagedData]()
    shown: Rows = {}
    for key, word in listed(disk, damage):
        shown.setdefault(key, word)
    scheduled = {key: word for key, word in said.items() if key in shown}
    assert shown == scheduled and len(shown) == len(said)
    words = {key[::2]: word for key, word in said.items()}
    found = list(FileFinder(disk, BOOKS, Search(WantedMessages(), ended=True)).found())
    states = {(row.log_id, row.sequence): row.state for each in found for row in each.rows}
    if not any(each.damage for each in found) and len(words) == len(said):
        assert states == words
    return said


def test_all_readers_of_an_honest_directory_say_the_same() -> None:
    disk, now_ms = honest()
    said = check(disk, now_ms)
    assert {"pending", "dispatched"} <= set(said.values())
    data = Data(BOOKS, disk)
    (log_id, hour, sequence), _ = next(iter(said.items()))
    table = data.schedule(hour_name(hour))
    assert dict(zip(table["sequence"].tolist(), table["outcome"].tolist(), strict=True)) == {
        each: None if word == "pending" else word.upper() for (_, own, each), word in said.items() if own == hour
    }
    subject = str(table["subject"][table["sequence"] == sequence][0])
    (found,) = trace(disk, BOOKS, subject, sequence, log_id)
    assert any(step.what == "claimed" for step in found.steps)


@pytest.mark.parametrize("lie", all_lies()[::9], ids=lambda lie: lie.name.replace(" ", "_"))
def test_all_readers_believe_the_same_of_a_lie(lie: Lie) -> None:
    disk, now_ms = honest()
    liar = Liar(disk)
    lie.tell(liar)
    try:
        check(liar.disk, now_ms)
    except (BadArgument, DamagedData, LogMoved):
        pass  # What can't be read is said of nobody.
