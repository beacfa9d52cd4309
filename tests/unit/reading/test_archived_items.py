"""Keys, tags, headers and bodies in an archive: there on request, as views have them, and each body is proved."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from delayd.errors import BadArgument
from delayd.reading.archive.archive_audit import audit_archive
from delayd.reading.archive.archiver import archive_directory
from delayd.reading.archive.store import FolderStore
from delayd.reading.files.items import ITEMS
from delayd.reading.views.planning import plan_view
from delayd.reading.views.query import ViewQuery, types_of
from tests.books import HOUR, START_MS, Books
from tests.unit.cli.runner import run

from .archived import NOW_MS, SCHEDULE_KEY, audited, rewrite, tree

HEADERS: Sequence[dict[str, str | bytes]] = ({"a": "text", "b": "é"}, {}, {"raw": b"\xff\x00"}, {"as bytes": b"ascii"})
ROWS = 12
Change = Callable[[list[dict[str, object]]], None]


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """A sealed hour of two subjects, with headers that are text, bytes, and bytes that could be text."""
    books = Books(str(tmp_path / "data"))
    every = range(ROWS)
    sent = books.send(
        [START_MS + row for row in every],
        subjects=("orders", "bills"),
        keys=[f"key {row}" for row in every],
        tags=[["eu"] if row % 2 else [] for row in every],
        headers=[HEADERS[row % len(HEADERS)] for row in every],
    )
    books.hand_over(sent)
    books.checkpoint()
    books.seal(HOUR)
    books.see_realtime(NOW_MS)
    yield books
    books.close()


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(str(tmp_path / "archive"))


def rows_of(view: str, *places: str) -> list[dict[str, object]]:
    query = ViewQuery(view, tuple(types_of(view, tuple(ITEMS))))
    parts = plan_view(query, places, 2, NOW_MS)
    return [row for part in parts for batch in part.read() for row in batch.to_pylist()]


@pytest.mark.parametrize("view", ["schedule", "lifecycle"])
def test_views_have_the_same_items_of_an_archive_as_of_its_directory(
    books: Books, store: FolderStore, view: str
) -> None:
    assert not archive_directory(books.root, store, items=("body", "key", "headers", "tags")).faults
    here, there = rows_of(view, books.root), rows_of(view, store.uri)
    assert there == here and len(there) == ROWS
    assert there[0]["key"] == "key 0" and there[0]["body"] == b"body 1"
    assert there[0]["headers"] == [("a", b"text"), ("b", "é".encode())]
    assert audited(store).balanced and not audited(store).broken_seals


@pytest.mark.parametrize("items", [("body",), ("headers", "body"), ("key",), ("tags", "headers")])
def test_a_note_says_which_items_are_in_and_the_others_are_null(
    books: Books, store: FolderStore, items: tuple[str, ...]
) -> None:
    archive_directory(books.root, store, items=items)
    said = json.loads((Path(store.uri) / SCHEDULE_KEY.note).read_text())
    assert (said["version"], sorted(said["with"])) == (2, sorted(items))
    with pq.ParquetFile(Path(store.uri) / SCHEDULE_KEY.file) as file:
        found = [name for name in file.schema_arrow.names if name in (*ITEMS, "headers_hash")]
    assert found == [name for name in ITEMS if name in items] + ["headers_hash"] * ("body" in items)
    here, there = rows_of("schedule", books.root), rows_of("schedule", store.uri)
    for name in ITEMS:
        expected = [row[name] if name in items else None for row in here]
        assert [row[name] for row in there] == expected, name
    assert audited(store).balanced and not audited(store).broken_seals


def test_without_items_files_and_notes_are_those_of_version_1(
    books: Books, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        # Nobody reads batches once more.
        patched.setattr("delayd.reading.archive.archiver.read_items", lambda *_: pytest.fail("items were read"))
        archive_directory(books.root, store)
    said = json.loads((Path(store.uri) / SCHEDULE_KEY.note).read_text())
    assert said["version"] == 1 and "with" not in said
    with pq.ParquetFile(Path(store.uri) / SCHEDULE_KEY.file) as file:
        assert not {*ITEMS, "headers_hash"} & set(file.schema_arrow.names)
        assert (file.schema_arrow.metadata or {})[b"delayd.version"] == b"1"
    before = tree(store)
    # What is there is never changed, whatever a later run asks for.
    assert archive_directory(books.root, store, items=("body",)).written == () and tree(store) == before


def replaced(**values: object) -> Change:
    return lambda rows: rows[0].update(values)


def swapped(rows: list[dict[str, object]]) -> None:
    rows[1]["body"], rows[5]["body"] = rows[5]["body"], rows[1]["body"]


CHANGES: dict[str, Change] = {
    "a body": replaced(body=b"body 9"),
    "a body that is gone": replaced(body=None),
    "two bodies": swapped,
    "headers": replaced(headers=[("a", b"other"), ("b", "é".encode())]),
    "their hash": replaced(headers_hash=7),
    "a body that is left out": replaced(left_out=True),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_body_that_is_not_the_one_of_its_row_breaks_the_seal_and_is_named(
    books: Books, store: FolderStore, what: str
) -> None:
    archive_directory(books.root, store, items=("body", "headers"))
    rewrite(store, SCHEDULE_KEY, _edited(CHANGES[what]))
    (broken,) = audited(store).broken_seals
    named = "message 2 and those of 1 others" if what == "two bodies" else "message 1"
    assert broken.differs == f"{store.uri}/{SCHEDULE_KEY.file}: the body of {named} is not the one of its content hash"
    assert run("audit", "--data", store.uri).code == 3
    query = ViewQuery("hours", ("hour", "state", "detail"))
    ((row,),) = (batch.to_pylist() for part in plan_view(query, [store.uri], 1, NOW_MS) for batch in part.read())
    assert row["state"] == "BROKEN" and "is not the one of its content hash" in row["detail"]


def _edited(change: Change) -> Callable[[pa.Table], pa.Table]:
    def edit(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        change(rows)
        return pa.Table.from_pylist(rows, table.schema)

    return edit


def test_a_body_is_proved_without_the_headers_too(books: Books, store: FolderStore) -> None:
    archive_directory(books.root, store, items=("body",))
    rewrite(store, SCHEDULE_KEY, _edited(CHANGES["a body"]))
    assert "the body of message 1 is not" in audited(store).broken_seals[0].differs


def test_a_body_is_compared_before_it_counts_as_archived(
    books: Books, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("delayd.reading.archive.archiver.read_items", lambda *words: _other_bodies(*words))
        (fault,) = archive_directory(books.root, store, items=("body",)).faults
    assert "was not archived: the body of message 1 and those of 11 others" in fault
    assert not tree(store)


def _other_bodies(
    _disk: object, _snapshot: object, _hour: object, rows: Sequence[object], names: Sequence[str]
) -> object:
    return {name: [b""] * len(rows) if name == "packed_headers" else [b"other"] * len(rows) for name in names}


def test_bodies_that_are_many_together_are_written_a_group_at_a_time(
    books: Books, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("archive.rows", "parquet"):
        monkeypatch.setattr(f"delayd.reading.{module}.GROUP_BYTES", 20)
    assert not archive_directory(books.root, store, items=("body",)).faults
    with pq.ParquetFile(Path(store.uri) / SCHEDULE_KEY.file) as file:
        assert file.num_row_groups == ROWS / 2
    assert [row["body"] for row in rows_of("schedule", store.uri)] == [b"body %d" % row for row in range(1, ROWS + 1)]


def test_the_command_takes_columns_and_refuses_others(books: Books, store: FolderStore) -> None:
    ran = run("archive", "--data", books.root, "--to", store.uri, "--with", "key,size")
    assert ran.code == 2 and "'size' is not one of key, tags, headers, body" in ran.err and not tree(store)
    assert run("archive", "--data", books.root, "--to", store.uri, "--with", "key,body").code == 0
    ran = run(
        "sql", "select subject from schedule where key = 'key 3' and body = 'body 4'", store.uri, "--format", "json"
    )
    assert (ran.code, json.loads(ran.out)) == (0, [{"subject": "bills"}])
    with pytest.raises(BadArgument, match="'size' is not one of"):
        archive_directory(books.root, store, items=("size",))
    assert audit_archive(store, now_ms=NOW_MS).balanced
