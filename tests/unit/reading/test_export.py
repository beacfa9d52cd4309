"""An export holds each row of each log once, in either format, and nothing is left of one that failed."""

import csv
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from delayd.errors import BadArgument, BadSetting, DamagedData, DiskFull
from delayd.log.pull import PullEntry, PullOp
from delayd.outcome import Outcome
from delayd.reading import export, parquet
from delayd.reading.export import BY_HOUR, FACTS, LIST, export_directory
from tests.books import DELAY_ID, HOUR, HOUR_MS, REALTIME_ID, START_MS, Books
from tests.sql_audit import audit_by_sql

from .archived import HOURS, write_books

NOW_MS = START_MS + 2 * HOUR_MS
LOGS = {"accepted": 3, "decision": 0, "schedule": 5, "dispatch": 4, "message": 3}
TABLES = {
    **LOGS,
    "span": 1,
    "target": 1,
    "terms": 1,
    "server": 1,
    "skipped": 0,
    "hour": 2,
    "fault": 0,
    "consumption": 0,
}


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Two hours: two subjects, filed and not filed, one dead, one that waits."""
    books = Books(str(tmp_path / "data"))
    rows = books.send([START_MS, START_MS + 1, START_MS + 2], subjects=("orders", "bills"))
    books.checkpoint()
    books.hand_over(rows[:2])
    books.decide(rows[2:], Outcome.DEAD)
    books.send([START_MS + HOUR_MS, START_MS + HOUR_MS + 1], at_ms=START_MS + 5)
    books.hand_over([4], delay_ms=9)
    books.see_all(NOW_MS)
    yield books
    books.close()


def read(folder: Path, table: str) -> list[dict[str, object]]:
    return [row for path in files(folder, table, "parquet") for row in pq.ParquetFile(path).read().to_pylist()]


def files(folder: Path, table: str, form: str) -> list[Path]:
    """The files of a table, those of sealed hours first."""
    return [*sorted(folder.glob(f"{table}/*.{form}"), reverse=True), *folder.glob(f"{table}.{form}")]


def test_each_log_is_a_table_with_what_it_says(books: Books, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export_directory(books.root, str(out), now_ms=NOW_MS) == TABLES
    assert {path.stem: len(read(out, path.stem)) for path in out.iterdir() if path.name != LIST} == TABLES
    first = read(out, "schedule")[0]
    assert first["log_id"] == f"{DELAY_ID:016x}" and first["hour"] == "2026112016"
    assert (first["sequence"], first["subject"], first["deliver_at_ms"]) == (1, "orders", START_MS)
    dead = read(out, "dispatch")[2]
    assert (dead["sequence"], dead["outcome"], dead["target"], dead["claimed_at_ms"]) == (3, "DEAD", None, None)
    last = read(out, "message")[2]
    assert (last["log_id"], last["origin"], last["sequence"]) == (f"{REALTIME_ID:016x}", f"{DELAY_ID:016x}", 4)
    assert last["appended_at_ms"] == START_MS + HOUR_MS + 9 and (last["decided"], last["newer"]) == (False, False)


def test_csv_says_what_parquet_says(books: Books, tmp_path: Path) -> None:
    export_directory(books.root, str(tmp_path / "parquet"), now_ms=NOW_MS)
    export_directory(books.root, str(tmp_path / "csv"), now_ms=NOW_MS, form="csv")
    for name in TABLES:
        (path,) = files(tmp_path / "csv", name, "csv")
        with path.open() as file:
            found = list(csv.DictReader(file))
        expected = read(tmp_path / "parquet", name)
        assert found == [{column: _csv(column, value) for column, value in row.items()} for row in expected], name


def test_hours_and_a_subject_can_be_chosen(books: Books, tmp_path: Path) -> None:
    counts = export_directory(books.root, str(tmp_path / "hour"), now_ms=NOW_MS, hours=range(HOUR + 1, HOUR + 2))
    assert counts == {**TABLES, "accepted": 0, "schedule": 2, "dispatch": 1, "message": 1, "hour": 1}
    counts = export_directory(books.root, str(tmp_path / "subject"), now_ms=NOW_MS, subject="bills")
    assert counts == {**TABLES, "accepted": 1, "schedule": 1, "dispatch": 1, "message": 1, "hour": 0}
    assert [row["subject"] for row in read(tmp_path / "subject", "message")] == ["bills"]


def test_nothing_is_left_of_an_export_that_failed(books: Books, tmp_path: Path) -> None:
    path = books.path_of("schedule")
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData):
        export_directory(books.root, str(tmp_path / "out"), now_ms=NOW_MS)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_full_disk_is_named(books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    for module, name in ((export, "_CsvWriter"), (parquet, "ParquetRows")):
        writer = getattr(module, name)
        monkeypatch.setattr(module, name, lambda path, types, writer=writer: writer(Path("/dev/full"), types))
    with pytest.raises(DiskFull, match=r"no space is left for .*/out"):
        export_directory(books.root, str(tmp_path / "out"), now_ms=NOW_MS, form=form)
    assert list((tmp_path / "out").iterdir()) == []


def test_without_pyarrow_csv_is_written_and_parquet_says_what_to_install(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "pyarrow" else find_spec(name))
    with pytest.raises(BadSetting, match=r"needs pyarrow: pip install 'delayd\[spark\]', or export with --format csv"):
        export_directory(books.root, str(tmp_path / "out"), now_ms=NOW_MS)
    assert export_directory(books.root, str(tmp_path / "out"), now_ms=NOW_MS, form="csv") == TABLES


def _csv(column: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%dT%H:%M:%S}.{value.microsecond // 1000:03}Z"
    if value is not None and column in ("log_id", "origin", "target"):
        return f"id:{value}"
    return "" if value is None else str(value)


def test_what_realtime_servers_sum_up_are_tables(books: Books, tmp_path: Path) -> None:
    given = PullEntry(PullOp.PULL, 1, 1, 77, 0, 0, 2, START_MS)
    books.consume("orders", "billing", [given, given._replace(op=PullOp.ACK, covered=1)])
    out = tmp_path / "out"
    export_directory(books.root, str(out), now_ms=NOW_MS)
    (group,) = read(out, "consumption")
    assert (group["log_id"], group["subject"], group["consumers"]) == (f"{REALTIME_ID:016x}", "orders", "billing")
    assert (group["pulled"], group["acknowledged"], group["outstanding"]) == (2, 1, 1)
    export_directory(books.root, str(tmp_path / "bills"), now_ms=NOW_MS, subject="bills")
    assert not read(tmp_path / "bills", "consumption")


# Runs that go on with an export.


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Books]:
    """Three sealed hours, and one that is open."""
    books = write_books(tmp_path / "sealed")
    books.hand_over(books.send([START_MS + HOURS * HOUR_MS, START_MS + HOURS * HOUR_MS + 1]))
    books.checkpoint()
    books.see_realtime(NOW_MS)
    yield books
    books.close()


def everything(folder: Path) -> dict[str, list[dict[str, object]]]:
    """The rows of each table, in an order of their own."""
    return {name: sorted(read(folder, name), key=str) for name in (*BY_HOUR, *FACTS)}


def seal_one_more(books: Books) -> None:
    books.seal(HOUR + HOURS)
    books.hand_over(books.send([START_MS + (HOURS + 1) * HOUR_MS]))
    books.checkpoint()
    books.see_realtime(NOW_MS)


def test_a_later_run_adds_what_was_sealed_since_and_reads_nothing_else(
    sealed: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    first = export_directory(sealed.root, str(out), now_ms=NOW_MS)
    kept = {path: path.read_bytes() for path in out.rglob("sealed-*")}
    assert len(kept) == len(BY_HOUR) and first["schedule"] == 16 * HOURS + 2
    seal_one_more(sealed)
    with monkeypatch.context() as patched:
        for hour in range(HOURS):  # Who reads it ends.
            patched.setattr(sealed, "removed", {*sealed.removed, HOUR + hour})
            sealed.path_of("schedule", HOUR + hour).rename(tmp_path / f"hidden {hour}")
        sealed.publish()
        later = export_directory(sealed.root, str(out), now_ms=NOW_MS)
    assert (later["schedule"], later["hour"]) == (3, 2)
    assert {path: path.read_bytes() for path in kept} == kept
    assert {path.name for path in (out / "schedule").iterdir()} == {
        *("sealed-00001.parquet", "sealed-00002.parquet", "open.parquet"),
    }
    for hour in range(HOURS):
        (tmp_path / f"hidden {hour}").rename(sealed.path_of("schedule", HOUR + hour))
    sealed.publish()
    export_directory(sealed.root, str(tmp_path / "whole"), now_ms=NOW_MS)
    whole, found = everything(tmp_path / "whole"), everything(out)
    assert {name: found[name] for name in BY_HOUR} == {name: whole[name] for name in BY_HOUR}


def test_an_audit_by_sql_says_of_two_runs_what_it_says_of_one(sealed: Books, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_directory(sealed.root, str(out), now_ms=NOW_MS)
    seal_one_more(sealed)
    assert export_directory(sealed.root, str(out), now_ms=NOW_MS)["schedule"] == 3
    export_directory(sealed.root, str(tmp_path / "whole"), now_ms=NOW_MS)
    assert everything(out) == everything(tmp_path / "whole")
    assert audit_by_sql(out) == audit_by_sql(tmp_path / "whole")
    assert export_directory(sealed.root, str(out), now_ms=NOW_MS)["schedule"] == 1
    assert everything(out) == everything(tmp_path / "whole")


def test_a_run_that_dies_at_any_name_is_made_good_by_the_next_one(sealed: Books, tmp_path: Path) -> None:
    class Died(BaseException):
        pass

    begun = tmp_path / "begun"
    export_directory(sealed.root, str(begun), now_ms=NOW_MS)
    seal_one_more(sealed)
    export_directory(sealed.root, str(tmp_path / "whole"), now_ms=NOW_MS)
    rename, expected, deaths = Path.rename, everything(tmp_path / "whole"), 0
    while True:
        out = tmp_path / f"out {deaths}"
        shutil.copytree(begun, out)
        left = [deaths]

        def dies(path: Path, target: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] < 0:
                raise Died
            return rename(path, target)

        with pytest.MonkeyPatch.context() as patched, suppress(Died):
            patched.setattr(Path, "rename", dies)
            export_directory(sealed.root, str(out), now_ms=NOW_MS)
            break
        export_directory(sealed.root, str(out), now_ms=NOW_MS)
        assert everything(out) == expected, f"it died at name {deaths}"
        deaths += 1
    assert deaths == len(BY_HOUR) * 2 + len(FACTS) + 1


def test_a_folder_with_anything_else_is_refused(sealed: Books, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_directory(sealed.root, str(out), now_ms=NOW_MS, form="csv", subject="orders")
    before = {path: path.stat() for path in out.rglob("*")}
    for form, subject in (("csv", None), ("parquet", "orders"), ("csv", "bills")):
        with pytest.raises(BadArgument, match="has an export of another format or subject"):
            export_directory(sealed.root, str(out), now_ms=NOW_MS, form=form, subject=subject)
    (out / LIST).write_text("{")
    with pytest.raises(BadArgument, match=f"{LIST} is no list of an export"):
        export_directory(sealed.root, str(out), now_ms=NOW_MS, form="csv", subject="orders")
    with pytest.raises(BadArgument, match="is not empty, and has no export"):
        export_directory(sealed.root, str(tmp_path), now_ms=NOW_MS)
    assert {path.name for path in before} == {path.name for path in out.rglob("*")}
