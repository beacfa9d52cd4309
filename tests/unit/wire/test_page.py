"""docs/protocol.md has the answer of each request that the code declares."""

import re
from pathlib import Path

from delayd.wire.requests import RequestType

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()


def test_the_page_has_the_answer_of_each_request_once() -> None:
    rows = re.findall(r"^\| (\d+ [A-Z_]{3,}(?:, \d+ [A-Z_]{3,})*) \| ", PAGE, re.MULTILINE)
    answered = [name for row in rows for name in row.split(", ")]
    assert sorted(answered) == sorted(f"{kind.value} {kind.name}" for kind in RequestType)
