"""docs/security.md names a test for each attacker, and each of these tests is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_each_attacker_has_a_test_that_is_there() -> None:
    rows = [line for line in PAGE.split("## What a peer could do")[1].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`([\w/]+\.py):(test_\w+)`", row)
        assert named, f"no test shows what stops: {row}"
        for file, name in named:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {name}"
