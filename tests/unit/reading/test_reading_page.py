"""The page about reading: its examples run, in order, and it names all methods and columns."""

import re
from pathlib import Path

import pytest

import delayd
from tests.books import START_MS, Books

_PAGE = (Path(__file__).parents[3] / "docs" / "reading.md").read_text()


def test_the_examples_of_the_page_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    books = Books(str(tmp_path))
    books.send([START_MS + row for row in range(3)])
    books.checkpoint()
    books.hand_over([3], delay_ms=5)
    names: dict[str, object] = {}
    examples = re.findall(r"^```python\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) == 5
    for example in examples:
        exec(example.replace("/var/lib/delayd", books.root), names)
    books.close()
    shown = capsys.readouterr().out
    assert "2026112016 2 open" in shown and "[1 2]" in shown and "claimed" in shown


def test_the_page_names_each_method_and_column() -> None:
    for name in ("hours", "schedule", "dispatch", "trace", "refresh", "damage"):
        assert hasattr(delayd.Data, name) and f"data.{name}" in _PAGE


def test_the_page_names_each_column_of_hours_and_traces(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.send([START_MS])
    books.close()
    data = delayd.open_data(books.root)
    own = set(data.hours().names) | set(data.trace("orders", 1).names)
    added = (
        "outcome",
        "reason",
        "other_sequence",
        "other_deliver_at_ms",
        "target",
        "claimed_at_ms",
        "target_appended_at_ms",
        "late_ms",
    )
    assert set(added) < set(data.schedule("2026112016").names)
    for name in (*own, *added):
        assert f"`{name}`" in _PAGE, name
