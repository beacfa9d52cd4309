"""The pages of operations and of log lines, and the files that they name."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operations.md").read_text()
LOG_LINES = (ROOT / "docs" / "log-lines.md").read_text()


def files_on_the_page() -> set[str]:
    """Files of a data directory, as the page writes them."""
    section = PAGE[PAGE.index("## Files") : PAGE.index("## Settings")]
    rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    return {path for cells in rows for path in re.findall(r"`([^`]+)`", cells)}


def as_on_the_page(path: str) -> str:
    """A file's path in a data directory, as the page writes it."""
    path = re.sub(r"\d{20}", "<offset>", path)
    path = re.sub(r"\d{10}", "<hour>", path)
    path = re.sub(r"consume/\d{8}", "consume/<subject>", path)
    return re.sub(r"\d{8}", "<day>", path)
