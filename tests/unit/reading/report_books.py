"""Fixed books and the page of their audit; ``python -m tests.unit.reading.report_books`` writes that page anew.

Look at the page in a browser before you commit it.
"""

import os
import sys
import tempfile
from pathlib import Path

from delayd.log.pull import PullEntry, PullOp
from delayd.outcome import Outcome
from delayd.reading.books import audit_directory
from delayd.reading.report import page
from tests.books import HOUR, HOUR_MS, START_MS, Books

PAGE = Path(__file__).with_name("audit_page.html")
NOW_MS = START_MS + 6 * HOUR_MS
STALL_MS = START_MS + HOUR_MS + 600_000
VERSION = "0.0"  # In place of that of today, which changes with each release.


def write_books(root: str) -> None:
    """Three hours: a sealed one, one with a stall and losses, one that is open; and a message that is due in a year."""
    books = Books(root)
    books.hello(0, START_MS - HOUR_MS)
    for sequence in books.send(
        [START_MS + 60_000 * row for row in range(50)], subjects=("orders.cancel", "mail.digest")
    ):
        books.hand_over([sequence], delay_ms=2 + sequence % 7 * sequence)
    rows = books.send([STALL_MS + 30_000 * row for row in range(40)], subjects=("orders.cancel", "billing.retry"))
    lost, dead, twice, early, slow, *others = rows
    books.gaps = [["stood still", STALL_MS, STALL_MS + 600_000]]
    for sequence in others:
        due_ms = books.rows[sequence].deliver_at_ms
        books.hand_over([sequence], claimed_ms=max(due_ms, min(STALL_MS + 600_000, due_ms + 600_000)))
    books.hand_over([slow], delay_ms=7_500)
    books.hand_over([early], claimed_ms=STALL_MS)
    books.record(books.hand_over([twice]))
    books.decide([dead], Outcome.DEAD)
    del lost
    books.checkpoint()
    books.seal(HOUR)
    books.send([START_MS + 5 * HOUR_MS + 3_000_000 + 60_000 * row for row in range(20)], subjects=("mail.digest",))
    books.send([START_MS + 365 * 24 * HOUR_MS])
    books.see_all(START_MS + 5 * HOUR_MS)
    books.consume("orders.cancel", "billing", [PullEntry(PullOp.PULL, 1, 1, 77, 0, 0, 20, START_MS)])
    books.close()


def made_page(folder: str) -> str:
    """The page of the audit of these books, written in a folder; the page names it only as ``books``."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        write_books("books")
        return page.audit_page(audit_directory("books", now_ms=NOW_MS), version=VERSION)
    finally:
        os.chdir(before)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(made_page(folder), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
