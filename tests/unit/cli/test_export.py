"""The export on the command line."""

from pathlib import Path

from freezegun import freeze_time

from tests.books import HOUR_MS, START_MS, Books

from .runner import run


def test_an_export_lists_its_tables(tmp_path: Path) -> None:
    books = Books(str(tmp_path / "data"))
    books.hand_over(books.send([START_MS, START_MS + HOUR_MS], subjects=("orders", "bills")))
    books.close()
    out = tmp_path / "out"
    options = ("export", "--data", books.root, "--format", "csv", "--out", str(out))
    with freeze_time("2026-11-20T18:00:00Z"):
        ran = run(*options, "--to", "2026-11-20T17:00Z", "--subject", "orders")
        again = run(*options)
    assert ran.code == 0 and ran.err == ""
    rows = dict(line.split() for line in ran.out.splitlines() if line.startswith(str(out)))
    assert rows[f"{out}/schedule"] == rows[f"{out}/dispatch"] == rows[f"{out}/message"] == "1"
    assert {path.stem for path in out.iterdir()} == {Path(path).name for path in rows} | {"exported"}
    assert again.code == 2 and f"{out} has an export of another format or subject" in again.err
