"""Two machines compare what one handed over and the other held, without their rows (rules S5, S6)."""

from delayd.reading.books import audit_directory
from delayd.reading.seals import Sides, compare_sides, parse_lines, read_sides
from delayd.reading.verify import verify_directory
from tests.simulation.audit import BOOKS
from tests.tamper.honest import DELAY, honest
from tests.tamper.liar import Liar
from tests.tamper.lies import all_lies

TARGET = f"{BOOKS}/realtime-0"
OTHER = f"{BOOKS}/realtime-1"


def liar() -> tuple[Liar, int]:
    disk, now_ms = honest()
    return Liar(disk), now_ms


def retain(books: Liar) -> None:
    """Remove what a realtime server's retention may: whole segments that were tallied."""
    bases = [int(name[:-4]) for name in books.disk.list_folder(f"{TARGET}/message")]
    for base in bases[:-1]:
        books.disk.remove(f"{TARGET}/message/{base:020}.log")
    books.publish(TARGET, keep_from=bases[-1])


def lines_of(books: Liar, *folders: str) -> str:
    return "\n".join(line for folder in folders for line in read_sides(books.disk, folder).lines())


def found(*texts: str) -> dict[bool | None, int]:
    sides = Sides()
    for text in texts:
        sides = sides.join(parse_lines(text.splitlines(), "lines"))
    states = [each.agrees for each in compare_sides(sides)]
    return {state: states.count(state) for state in set(states)}


def test_rule_S5_they_agree_after_the_realtime_server_has_removed_its_messages() -> None:
    books, now_ms = liar()
    before = lines_of(books, TARGET)
    retain(books)
    assert lines_of(books, TARGET) == before
    assert set(found(lines_of(books, DELAY), before, lines_of(books, OTHER))) == {True}
    report = audit_directory(BOOKS, now_ms=now_ms, disk=books.disk)
    assert report.balanced and report.total.unproven > 0
    # Nothing rests on the dispatch log's word alone: the tallies hold the very messages that are gone.
    sealed = {seal.hour for seal in report.seals}
    assert report.total.tallied == sum(hour.unproven for hour in report.hours if hour.hour in sealed) > 0
    assert verify_directory(BOOKS, disk=books.disk).sound


def test_rule_S5_a_tally_that_differs_proves_nothing_of_its_hour() -> None:
    books, now_ms = liar()
    retain(books)
    report = audit_directory(BOOKS, now_ms=now_ms, disk=books.disk)
    (lie,) = (lie for lie in all_lies() if lie.name.startswith("a tally has other first of a sealed hour that"))
    other = Liar(honest()[0])
    lie.tell(other)
    found = audit_directory(BOOKS, now_ms=now_ms, disk=other.disk)
    (broken,) = (hour for hour in found.hours if hour.hour in {seal.hour for seal in found.broken_seals})
    assert broken.unproven > 0 and broken.tallied == 0
    assert found.total.tallied < report.total.tallied and found.total.unproven == report.total.unproven


def test_hours_whose_other_realtime_server_is_not_here_are_left_open() -> None:
    books, _ = liar()
    states = found(lines_of(books, DELAY), lines_of(books, TARGET))
    assert set(states) == {True, None}
