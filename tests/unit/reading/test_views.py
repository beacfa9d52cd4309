"""Views: which hours and rows are read, by whom, and what damage costs."""

import pickle
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from delayd.errors import BadArgument, DamagedData
from delayd.hours import hour_name
from delayd.machine.disk import File, RealDisk
from delayd.reading import plan as plans
from delayd.reading.archive.archiver import archive_directory
from delayd.reading.archive.store import FolderStore, open_store
from delayd.reading.conditions import EVERY_HOUR, Comparison, Condition, Value, common_hours, due_ms_max
from delayd.reading.files.directory import find_directories, take_snapshot
from delayd.reading.files.items import read_items
from delayd.reading.files.origins import NO_HOURS, read_hour
from delayd.reading.files.stored_groups import segment_bases
from delayd.reading.tables import Cells
from delayd.reading.views import planning
from delayd.reading.views.parts import ViewPart
from delayd.reading.views.planning import plan_view
from delayd.reading.views.query import ViewQuery, types_of
from tests.books import DELAY_ID, HOUR, HOUR_MS, START_MS, Books
from tests.unit.reading.archived import HOURS, NOW_MS, SCHEDULE_KEY, audited_fleet, write_books

TEXT = Cells(np.array([0, 1, 2, 3, 0]), np.array([True, True, True, False, True]), ["b", "ab", "c", ""])
LONG = Cells(np.array([3, -1, 7, 0, 3]), np.array([True, True, True, False, True]))
INSTANT = Cells(LONG.values, LONG.known, instant=True)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Books:
    """Three sealed hours of 16 messages each, and later ones that wait: filed and not."""
    books = write_books(tmp_path_factory.mktemp("views") / "data")
    books.send([START_MS + 5 * HOUR_MS + row for row in range(6)], keys=[f"k{row}" for row in range(6)])
    books.checkpoint()
    books.send([START_MS + 5 * HOUR_MS + row for row in range(4)])
    books.see_realtime(NOW_MS)
    books.close()
    return books


def parts_of(view: str, *places: str, tasks: int = 3, conditions: Sequence[Condition] = ()) -> list[ViewPart]:
    query = ViewQuery(view, tuple(types_of(view)), conditions=tuple(conditions))
    return plan_view(query, places, tasks, NOW_MS)


def rows_of(parts: Sequence[ViewPart]) -> list[dict[str, object]]:
    # Parts go to other processes.
    batches = [batch for part in parts for batch in pickle.loads(pickle.dumps(part)).read()]
    rows = pa.Table.from_batches(batches).to_pylist() if batches else []
    return sorted(rows, key=lambda row: (row["hour"] or "", row.get("sequence") or 0))


def hours_read(parts: Sequence[ViewPart]) -> set[int]:
    own = {hour for part in parts if part.hours for origin in part.hours.plan.origins for hour in origin.hours}
    return own | {each.key[1] for part in parts for each in part.archived}


@pytest.mark.parametrize(("comparison", "negated"), [*product(Comparison, (False, True))])
def test_a_condition_is_met_by_the_rows_of_which_it_is_true(comparison: Comparison, negated: bool) -> None:
    texts: tuple[Value, ...] = () if comparison is Comparison.NULL else ("b", "c")
    values = {"b": 0, "c": 7}
    for cells, said in ((TEXT, texts), (LONG, tuple(values[str(each)] for each in texts))):
        if cells is LONG and comparison in (Comparison.PREFIX, Comparison.SUFFIX, Comparison.CONTAINS):
            continue
        wanted = said if comparison is Comparison.IN else said[:1]
        found = Condition("any", comparison, wanted, negated).rows(cells).tolist()
        assert found == [_is_true(each, comparison, wanted, negated) for each in cells.to_list()], cells


def _is_true(value: Value | None, comparison: Comparison, said: tuple[Value, ...], negated: bool) -> bool:
    if comparison is Comparison.NULL:
        return (value is None) != negated
    if value is None:
        return False
    text, first = str(value), str(said[0])
    met = {
        Comparison.IN: value in said,
        Comparison.PREFIX: text.startswith(first),
        Comparison.SUFFIX: text.endswith(first),
        Comparison.CONTAINS: first in text,
        Comparison.BELOW: value < said[0],  # type: ignore[operator]
        Comparison.UP_TO: value <= said[0],  # type: ignore[operator]
        Comparison.ABOVE: value > said[0],  # type: ignore[operator]
        Comparison.FROM: value >= said[0],  # type: ignore[operator]
    }[comparison]
    return bool(met != negated)


def test_an_instant_is_compared_by_microseconds() -> None:
    # 3 ms is not above 3.000 ms, and it is above 2.999 ms.
    assert Condition("at", Comparison.ABOVE, (3_000,)).rows(INSTANT).tolist() == [False, False, True, False, False]
    assert Condition("at", Comparison.ABOVE, (2_999,)).rows(INSTANT).tolist() == [True, False, True, False, True]


def test_conditions_bound_the_hours_and_no_hour_with_such_rows_is_left_out() -> None:
    def hours(column: str, comparison: Comparison, *values: Value, negated: bool = False) -> range:
        return common_hours([Condition(column, comparison, values, negated)], EVERY_HOUR)

    first, last = hour_name(HOUR), hour_name(HOUR + 2)
    assert hours("hour", Comparison.IN, first, last) == range(HOUR, HOUR + 3)
    assert hours("hour", Comparison.BELOW, last).stop == HOUR + 2
    assert hours("hour", Comparison.UP_TO, last).stop == HOUR + 3
    assert hours("hour", Comparison.ABOVE, first).start == HOUR + 1
    assert hours("hour", Comparison.FROM, first).start == HOUR
    assert hours("deliver_at_ms", Comparison.FROM, START_MS).start == HOUR
    assert hours("deliver_at", Comparison.ABOVE, START_MS * 1_000 - 1).start == HOUR - 1
    # What was past due when it was accepted is in a later hour.
    assert hours("deliver_at_ms", Comparison.BELOW, START_MS) == EVERY_HOUR
    for column, value in (("hour", "2026"), ("subject", first), ("deliver_at_ms", "x")):
        assert hours(column, Comparison.IN, value) == EVERY_HOUR
    assert hours("hour", Comparison.IN, first, negated=True) == EVERY_HOUR
    upper = [Condition("deliver_at", Comparison.UP_TO, (7_999,)), Condition("deliver_at_ms", Comparison.IN, (9, 8))]
    assert due_ms_max(upper) == 7 and due_ms_max([]) is None


@pytest.mark.parametrize("view", ["accepted", "decision", "schedule", "dispatch", "message", "lifecycle", "hours"])
def test_many_parts_have_the_rows_of_one_and_have_them_again(books: Books, view: str) -> None:
    parts = parts_of(view, books.root, tasks=5)
    assert rows_of(parts) == rows_of(parts) == rows_of(parts_of(view, books.root, tasks=1)) != []
    assert len(parts) > 1


@pytest.mark.parametrize("view", ["schedule", "dispatch", "message", "lifecycle"])
def test_a_large_hour_is_shared_by_parts_that_have_its_rows_together(
    books: Books, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> list[dict[str, object]]:
        return [{name: row[name] for name in row if name != "place"} for row in rows_of(parts)]

    hour = Condition("hour", Comparison.IN, (hour_name(HOUR + 5 if view == "lifecycle" else HOUR),))
    parts = parts_of(view, books.root, conditions=[hour])
    expected = told()
    assert len(parts) == 1
    for module in (plans, planning):
        monkeypatch.setattr(module, "PART_ROWS_MAX", 3)
    monkeypatch.setattr("delayd.reading.files.origins.SAMPLE_ROWS", 1)
    parts = parts_of(view, books.root, conditions=[hour])
    assert len(parts) == 3 and told() == expected
    assert sum(bool(rows_of([part])) for part in parts) == 3


def test_conditions_leave_out_hours_and_rows(books: Books, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    archive_directory(books.root, store)
    for place, sealed_only in ((books.root, False), (store.uri, True)):
        for view in ("schedule", "dispatch", "lifecycle"):
            every = rows_of(parts_of(view, place))
            late = Condition("deliver_at_ms", Comparison.FROM, (START_MS + HOUR_MS,))
            early = Condition("deliver_at_ms", Comparison.BELOW, (START_MS + 2 * HOUR_MS,))
            bills = Condition("subject", Comparison.IN, ("bills",))
            parts = parts_of(view, place, conditions=[late, early, bills])
            assert rows_of(parts) == [
                row for row in every if row["hour"] == hour_name(HOUR + 1) and row["subject"] == "bills"
            ]
            # The last of these is not sealed, so nobody knows when its rows are due.
            not_sealed = {HOUR + 5} if not sealed_only else {HOUR + 2}
            assert hours_read(parts) == {HOUR + 1} | not_sealed
            nobody = Condition("log_id", Comparison.IN, ("0" * 16,))
            assert parts_of(view, place, conditions=[nobody]) == []


def test_a_part_knows_nothing_of_other_hours(books: Books) -> None:
    parts = parts_of("lifecycle", books.root, tasks=9)
    assert len(parts) == HOURS + 1
    for part in parts:
        assert part.hours is not None and part.hours.tails is not None
        (origin,) = part.hours.plan.origins
        assert set(part.hours.plan.index.batches["hour"].tolist()) <= set(origin.hours)
        assert set(part.hours.tails[0].unfiled.counts()) <= set(origin.hours)


def test_no_file_of_another_hour_is_opened(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    own = RealDisk.open

    def watched(disk: RealDisk, path: str, *, write: bool = False, create: bool = False) -> File:
        opened.append(path)
        return own(disk, path, write=write, create=create)

    monkeypatch.setattr(RealDisk, "open", watched)
    for view in ("schedule", "dispatch", "lifecycle", "hours"):
        opened.clear()
        parts = plan_view(ViewQuery(view, tuple(types_of(view)), range(HOUR + 1, HOUR + 2)), (books.root,), 4, NOW_MS)
        assert sum(batch.num_rows for part in parts for batch in part.read())
        of_hours = {path for path in opened if "/schedule/" in path or "/dispatch/" in path}
        assert of_hours and all(path.endswith(f"/{hour_name(HOUR + 1)}.log") for path in of_hours), view


def test_an_archive_that_was_changed_costs_the_hour_of_that_file(books: Books, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    archive_directory(books.root, store)
    first, second, _ = sorted(tmp_path.rglob("schedule/day=*/**/*.parquet"))
    first.write_bytes(second.read_bytes())
    second.unlink()
    states = {row["hour"]: (row["state"], row["detail"]) for row in rows_of(parts_of("hours", store.uri))}
    assert [state for state, _ in states.values()] == ["DAMAGED", "DAMAGED", "SEALED"]
    assert "is another file than" in str(states[hour_name(HOUR)]) and "is gone" in str(states[hour_name(HOUR + 1)])
    assert {row["hour"] for row in rows_of(parts_of("schedule", store.uri))} == {hour_name(HOUR + 2)}
    with pytest.raises(BadArgument, match="holds no archive"):
        parts_of("schedule", f"file://{tmp_path}/nothing")


@pytest.fixture
def retained(tmp_path: Path) -> Iterator[tuple[Books, FolderStore]]:
    """Three archived hours; of the second one and of those before it the realtime server has removed rows since."""
    books = write_books(tmp_path / "data", segment_bytes=1)
    store = FolderStore(str(tmp_path / "archive"))
    archive_directory(books.root, store)
    log = books.target
    log.remove(log.detach_below(segment_bases(RealDisk(), log.place)[-3]))
    yield books, store
    books.close()


def test_what_retention_removed_at_a_target_is_read_from_the_archive(retained: tuple[Books, FolderStore]) -> None:
    books, store = retained
    alone, report = audited_fleet(books.root), audited_fleet(books.root, store.uri)
    assert 0 < alone.total.unproven < 30 and (report.total.unproven, report.total.dispatched) == (0, 30)
    assert Counter(row["state"] for row in rows_of(parts_of("lifecycle", books.root)))["UNPROVEN"]
    for tasks in (1, 5):
        both = parts_of("lifecycle", books.root, store.uri, tasks=tasks)
        assert all(part.hours for part in both), "what retention has left is read from the directory"
        states = Counter(row["state"] for row in rows_of(both))
        assert (states["UNPROVEN"], states["DELIVERED"]) == (0, 30)
        hours = rows_of(parts_of("hours", books.root, store.uri, tasks=tasks))
        assert [(row["state"], row["unproven"], row["dispatched"], row["balanced"]) for row in hours] == [
            ("SEALED", 0, 10, True)
        ] * HOURS
        messages = rows_of(parts_of("message", books.root, store.uri, tasks=tasks))
        assert [_placeless(row) for row in messages] == [
            _placeless(row) for row in rows_of(parts_of("message", store.uri))
        ]
        findings = Counter(row["kind"] for row in rows_of(parts_of("findings", books.root, store.uri, tasks=tasks)))
        assert findings == Counter(each.kind.name for each in report.findings)


def test_parts_of_a_large_hour_have_together_what_the_archive_has_of_it(
    retained: tuple[Books, FolderStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    books, store = retained
    expected = [_placeless(row) for row in rows_of(parts_of("message", store.uri))]
    for module in (plans, planning):
        monkeypatch.setattr(module, "PART_ROWS_MAX", 3)
    monkeypatch.setattr("delayd.reading.files.origins.SAMPLE_ROWS", 1)
    for view in ("lifecycle", "message"):
        parts = parts_of(view, books.root, store.uri)
        assert sum(bool(rows_of([part])) for part in parts) == 3
        found = [_placeless(row) for row in rows_of(parts)]
        assert found == expected if view == "message" else {row["state"] for row in found} >= {"DELIVERED"}


def test_what_no_archive_has_of_a_target_is_read_from_its_log(
    retained: tuple[Books, FolderStore], tmp_path: Path
) -> None:
    books, store = retained
    for table in ("message", "notes/message"):
        shutil.rmtree(Path(store.uri) / table)
    only_realtime = tmp_path / "machine"
    shutil.copytree(books.realtime, only_realtime / "realtime")
    expected = audited_fleet(store.uri, str(only_realtime)).total
    states = Counter(row["state"] for row in rows_of(parts_of("lifecycle", store.uri, str(only_realtime))))
    assert (states["UNPROVEN"], states["DELIVERED"]) == (expected.unproven, 30 - expected.unproven)
    assert 0 < expected.unproven < 30


def test_a_message_file_that_a_second_archive_has_is_used(retained: tuple[Books, FolderStore], tmp_path: Path) -> None:
    _, store = retained
    shutil.copytree(store.uri, tmp_path / "second")
    for table in ("message", "notes/message"):
        shutil.rmtree(Path(store.uri) / table)
    states = Counter(row["state"] for row in rows_of(parts_of("lifecycle", store.uri, str(tmp_path / "second"))))
    assert (states["UNPROVEN"], states["DELIVERED"]) == (0, 30)


def test_what_is_wrong_with_the_totals_of_an_archive_is_a_finding(retained: tuple[Books, FolderStore]) -> None:
    books, store = retained
    (Path(store.uri) / SCHEDULE_KEY.note).unlink()
    for places in ((store.uri,), (books.root, store.uri)):
        report, rows = audited_fleet(*places), rows_of(parts_of("findings", *places))
        details = {row["detail"] for row in rows if row["kind"] == "CONSERVATION"}
        assert details == {each.detail for each in report.faults} and details


def test_an_older_copy_leaves_an_hour_that_was_sealed_since_to_the_archive(tmp_path: Path) -> None:
    books = Books(str(tmp_path / "data"))
    sent = books.send([START_MS, START_MS + 1])
    books.checkpoint()
    shutil.copytree(books.root, tmp_path / "older")
    books.hand_over(sent)
    books.checkpoint()
    books.seal(HOUR)
    books.see_realtime(NOW_MS)
    books.close()
    store = FolderStore(str(tmp_path / "archive"))
    archive_directory(books.root, store)
    rows = rows_of(parts_of("lifecycle", str(tmp_path / "older"), store.uri))
    assert [row["state"] for row in rows] == ["DELIVERED"] * 2
    assert audited_fleet(str(tmp_path / "older"), store.uri).total.dispatched == 2


def test_damage_of_no_single_hour_is_a_row_without_one(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.send([START_MS])
    books.checkpoint()
    books.send([START_MS + 1])
    books.close()
    log = next((tmp_path / "delay" / "message").iterdir())
    log.write_bytes(log.read_bytes()[:-100])
    data = bytearray(log.read_bytes())
    data[200] ^= 1
    log.write_bytes(data)
    (row,) = [each for each in rows_of(parts_of("hours", books.root)) if each["hour"] is None]
    assert (row["log_id"], row["state"]) == (f"{DELAY_ID:016x}", "DAMAGED") and log.name in str(row["detail"])
    assert [each["sequence"] for each in rows_of(parts_of("schedule", books.root))] == [1]


def test_items_of_another_message_are_never_given(books: Books) -> None:
    disk = RealDisk()
    (directory,) = [each for each in find_directories(disk, books.root) if each.role == "delay"]
    snapshot = take_snapshot(disk, directory)
    rows = read_hour(disk, snapshot, NO_HOURS, HOUR)
    assert read_items(disk, snapshot, HOUR, rows, ["body"])["body"][0] == b"body 1"
    rows.location[0], rows.location[1] = rows.location[1], rows.location[0]
    with pytest.raises(DamagedData, match="holds other messages than were read"):
        read_items(disk, snapshot, HOUR, rows, ["body"])


def test_a_table_is_read_without_bodies_and_an_audit_with_them(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    keys = [f"k{row}" for row in range(2_000)]
    for keyed in (False, True):  # Labels of rows with keys are hashed, so batches of these are read whole.
        due = [START_MS + keyed * HOUR_MS + row for row in range(2_000)]
        books.send(due, subjects=("orders", "bills"), keys=keys if keyed else ())
    books.checkpoint()
    books.close()
    expected = rows_of(parts_of("schedule", books.root))
    for hour in (HOUR, HOUR + 1):
        path = books.path_of("schedule", hour)
        data = bytearray(path.read_bytes())
        data[data.rindex(b"body ")] ^= 1
        path.write_bytes(data)
    assert [row["state"] for row in rows_of(parts_of("hours", books.root))] == ["DAMAGED", "DAMAGED"]
    assert rows_of(parts_of("schedule", books.root)) == expected[:2_000]
    assert [row["subject"] for row in expected[:3]] == ["orders", "bills", "orders"]
    assert expected[0]["labels_hash"] is None and expected[2_000]["labels_hash"] is not None


def test_a_table_of_subjects_may_be_longer_than_what_is_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = Books(str(tmp_path))
    names = [f"orders.{number}" for number in range(900)]
    books.send([START_MS + row for row in range(2_000)], subjects=names)
    books.checkpoint()
    books.close()
    for ahead in (4 << 10, 0, 1 << 20):
        monkeypatch.setattr("delayd.reading.files.stored_groups.SUBJECTS_BYTES", ahead)
        rows = rows_of(parts_of("schedule", books.root))
        assert [row["subject"] for row in rows] == [names[row % 900] for row in range(2_000)]


@pytest.mark.parametrize("view", ["schedule", "dispatch", "lifecycle", "message"])
def test_conditions_on_subjects_give_the_rows_that_meet_them_filed_or_not(books: Books, view: str) -> None:
    every = rows_of(parts_of(view, books.root))
    subjects = {row["subject"] for row in every}
    assert subjects == {"orders", "bills"}
    for comparison, values in ((Comparison.IN, ("bills",)), (Comparison.PREFIX, ("or",)), (Comparison.NULL, ())):
        for negated in (False, True):
            parts = parts_of(view, books.root, conditions=[Condition("subject", comparison, values, negated)])
            wanted = {name for name in subjects if _is_true(str(name), comparison, values, negated)}
            assert [_placeless(row) for row in rows_of(parts)] == [
                _placeless(row) for row in every if row["subject"] in wanted
            ]


def test_rows_of_other_subjects_are_left_out_also_where_spark_adds_that_the_subject_is_there(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    own = plans.plan_hours

    def watched(*given: object, wanted: object, **named: object) -> object:
        asked.append(wanted is not None)
        return own(*given, wanted=wanted, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("delayd.reading.views.parts.plan_hours", watched)
    one = Condition("subject", Comparison.IN, ("bills",))
    there, missing = (Condition("subject", Comparison.NULL, (), negated) for negated in (True, False))
    for conditions, leaves_out in (((one,), True), ((one, there), True), ((missing,), False), ((), False)):
        asked.clear()
        for part in parts_of("schedule", books.root, tasks=1, conditions=conditions):
            assert {batch.num_columns for batch in part.read()} <= {len(types_of("schedule"))}
        assert asked == [leaves_out], conditions


def _placeless(row: dict[str, object]) -> dict[str, object]:
    return {name: row[name] for name in row if name != "place"}
