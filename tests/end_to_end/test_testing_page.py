"""The examples of docs/testing.md run as test modules."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
# All cases run in tests/conformance/test_public.py.
SOME = "test_a_body or test_an_order or test_an_unpaid or test_a_payment or test_a_receipt_names"


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 4
    for number, example in enumerate(examples):
        (tmp_path / f"test_{number}.py").write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SOME, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0 and re.search(r"^9 passed", ended.stdout, re.MULTILINE), ended.stdout
