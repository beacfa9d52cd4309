"""The renderer of listings: exact for programs, readable for people."""

import csv
import io
import json
from collections.abc import Iterator

import pytest

from cli.listing import PIECE_ROWS, Cell, Column, ColumnKind, printable, show

_COLUMNS = (
    Column("subject"),
    Column("due_ms", ColumnKind.INSTANT),
    Column("late_ms", ColumnKind.DURATION),
    Column("rows", ColumnKind.NUMBER),
    Column("size_bytes", ColumnKind.SIZE),
    Column("sealed"),
)
_ROWS: list[tuple[Cell, ...]] = [
    ("orders.cancel", 1_795_248_000_123, 1_250, 12_345, 2_048, True),
    ('a "quoted", name', 0, None, 0, 0, False),
]


def test_json_is_an_array_of_objects_with_exact_values(capsys: pytest.CaptureFixture[str]) -> None:
    show(_COLUMNS, _ROWS, "json")
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "subject": "orders.cancel",
        "due_ms": 1_795_248_000_123,
        "late_ms": 1_250,
        "rows": 12_345,
        "size_bytes": 2_048,
        "sealed": True,
    }
    assert second["late_ms"] is None


def test_csv_has_a_heading_and_quotes_what_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    show(_COLUMNS, _ROWS, "csv")
    heading, first, second = csv.reader(io.StringIO(capsys.readouterr().out))
    assert heading == ["subject", "due_ms", "late_ms", "rows", "size_bytes", "sealed"]
    assert first == ["orders.cancel", "1795248000123", "1250", "12345", "2048", "true"]
    assert second == ['a "quoted", name', "0", "", "0", "0", "false"]


def test_a_table_writes_dates_units_and_thousands(capsys: pytest.CaptureFixture[str]) -> None:
    show(_COLUMNS, _ROWS, "table")
    out = capsys.readouterr().out
    assert "due" in out
    assert "due_ms" not in out
    for text in ("2026-11-21T08:00:00.123Z", "1.250 s", "12,345", "2.0 KiB", "yes", "no"):
        assert text in out


def test_a_long_table_is_written_in_pieces_and_its_columns_only_become_wider(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wide, source = PIECE_ROWS + 5, iter(range(3 * PIECE_ROWS))
    written: list[int] = []

    def rows() -> Iterator[tuple[Cell, ...]]:
        for number in source:
            if number % PIECE_ROWS == 0:
                written.append(len(capsys.readouterr().out.splitlines()))
            yield ("x" * (9 if number == wide else 1), number)

    show((Column("name"), Column("count", ColumnKind.NUMBER)), rows(), "table")
    last = capsys.readouterr().out.splitlines()
    assert written == [0, 2 + PIECE_ROWS, PIECE_ROWS], "no piece waits for the next one"
    assert last[0] == f"x           {2 * PIECE_ROWS:,}"


def test_wide_characters_take_two_places(capsys: pytest.CaptureFixture[str]) -> None:
    show((Column("a"), Column("b")), [("漢字", "1"), ("abcd", "2")], "table")
    assert capsys.readouterr().out.splitlines()[2:] == ["漢字   1", "abcd   2"]


def test_a_table_takes_no_markup_from_values(capsys: pytest.CaptureFixture[str]) -> None:
    show((Column("subject"),), [("[red]a[/red]",)], "table")
    assert "[red]a[/red]" in capsys.readouterr().out


def test_a_listing_ends_at_its_limit_and_says_so_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(_COLUMNS, _ROWS, "csv", 1) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err == "delayd: stopped after 1 rows; --limit 0 shows all, --limit N more\n"


def test_no_row_beyond_the_limit_is_made_but_the_one_that_tells_that_there_are_more() -> None:
    source = iter(_ROWS * 500)
    show(_COLUMNS, source, "csv", 5)
    assert len(list(source)) == 1_000 - 6


def test_bytes_are_shown_as_one_line_that_no_terminal_obeys() -> None:
    assert printable(b"a\x1b[31mb\r\n\xffc") == r"a\x1b[31mb\r\n\xffc"
    assert printable("grün".encode()) == "grün"
