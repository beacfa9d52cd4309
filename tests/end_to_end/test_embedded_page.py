"""The examples of docs/embedded.md run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

from tests.waiting import DEADLINE_S

PAGE = Path(__file__).parents[2] / "docs" / "embedded.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    assert len(EXAMPLES) == 2
    for example in EXAMPLES:
        command = [sys.executable, "-W", "error", "-c", example]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S * 2)
        assert ended.returncode == 0, ended.stderr
    assert "data" in ended.stdout
