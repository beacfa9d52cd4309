"""Tables fit the terminal: at 80 columns as lines, at 40 as records, and nothing of a value is lost."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.listing import Cell, Column, ColumnKind, show
from delayd.outcome import Outcome
from tests.books import START_MS, Books

from .runner import run

_COLUMNS = (
    Column("subject"),
    Column("address", spare=True),
    Column("due_ms", ColumnKind.INSTANT),
    Column("rows_waiting", ColumnKind.NUMBER),
    Column("detail"),
)
_ROWS: list[tuple[Cell, ...]] = [
    ("orders.cancel", "127.0.0.1:7401", 1_795_248_000_123, 12_345, "the target is away, and was seen 12 s ago"),
    ("bücher", "127.0.0.1:7402", 0, None, "-"),
]
_FILES = (
    "schedule hours",
    "schedule show",
    "schedule show --body",
    "dispatch show",
    "log verify --all",
    "seals",
    "audit",
)
# A line of a report; the terminal folds it itself.
_SENTENCE = re.compile(r"\d+ (files|wait)|lateness|scheduled|the books|no hour")


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Messages that are handed over, dead and pending, with names as long as real ones."""
    books = Books(str(tmp_path))
    books.send([START_MS + row * 1000 for row in range(6)], subjects=("orders.cancel-unpaid", "bills"))
    books.checkpoint()
    books.hand_over([1, 3], delay_ms=5)
    books.decide([2], Outcome.DEAD)
    yield books
    books.close()


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int | None) -> tuple[str, str]:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    show(_COLUMNS, _ROWS, "table")
    return capsys.readouterr()


@pytest.mark.parametrize("width", [None, 200, 110, 100, 90, 80, 70, 60, 40, 30, 1])
def test_no_line_is_wider_than_the_terminal_and_no_value_is_cut(
    width: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = shown(monkeypatch, capsys, width)
    lines = out.splitlines()
    if width is not None and width > 20:
        assert max(map(len, lines)) <= width
    squeezed = re.sub(r"\s", "", out)
    left_out = "no room for address" in err
    for cell in ("orders.cancel", "2026-11-21T08:00:00.123Z", "12,345", "bücher"):
        assert cell in squeezed
    assert ("127.0.0.1:7401" in squeezed) != left_out
    if width is None:
        # A file has room for anything: a row stays one line for `grep`.
        assert len(lines) == 4 and not err


def test_a_table_takes_the_first_layout_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first_lines = {
        200: "subject         address          due                        rows waiting   detail",
        113: "subject        address         due                       rows waiting  detail",
        108: "rows",
        70: "rows",
        40: "subject       orders.cancel",
    }
    for width, first in first_lines.items():
        out, err = shown(monkeypatch, capsys, width)
        assert out.splitlines()[0].strip() == first
        assert (err == "delayd: no room for address; a wider terminal or --format json shows all\n") == (width == 70)


@pytest.mark.parametrize("command", _FILES)
def test_each_listing_of_files_fits_80_columns_as_lines_and_40_as_records(books: Books, command: str) -> None:
    for width in (80, 40):
        ran = run(*command.split(), "--data", books.root, environment={"COLUMNS": str(width), "LINES": ""})
        assert ran.code in (0, 3) and ran.out
        wide = [line for line in ran.out.splitlines() if len(line) > width and not _SENTENCE.match(line)]
        assert not wide, wide
