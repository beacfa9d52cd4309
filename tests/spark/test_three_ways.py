"""Three audits of one plan agree, row by row: with numpy, in Spark, and as SQL over an export."""

from pathlib import Path

import pytest

from tests.books import HOUR_MS, START_MS, Books
from tests.three_audits import audit_three_ways

pytestmark = [
    pytest.mark.usefixtures("session"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400),
]


@pytest.fixture
def books(tmp_path: Path) -> Books:
    """Sound ones, of two subjects and four hours."""
    books = Books(str(tmp_path / "data"))
    rows = books.send([START_MS + row * HOUR_MS // 20 for row in range(60)], subjects=("orders", "bills"))
    books.checkpoint()
    books.hand_over(rows)
    letter, moved = books.send([START_MS + 50 * HOUR_MS] * 2, subjects=("%retry/0000000000000002/1", "orders"))
    books.redrive([letter, moved])
    books.see_all(START_MS + 4 * HOUR_MS)
    return books


@pytest.mark.parametrize("fault", [False, True])
def test_three_audits_agree(books: Books, tmp_path: Path, fault: bool) -> None:
    if fault:
        books.send([START_MS + 7_000, START_MS + 8_000])
        books.record(books.hand_over([63], claimed_ms=START_MS))
    books.close()
    audits = audit_three_ways(Path(books.root), START_MS + 4 * HOUR_MS, tmp_path / "out", spark=True)
    assert audits.differences == [] and audits.report.balanced is not fault
    assert (audits.report.total.cancelled, audits.report.total.moved, audits.report.total.redriven) == (2, 2, 1)
    rows = 64 if fault else 62
    assert audits.line == f"audit numpy={rows} spark={rows} sql={rows} agree"
