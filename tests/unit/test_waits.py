"""Tests wait by the two functions of tests/waiting.py, and by nothing of their own."""

from __future__ import annotations

import ast
import asyncio
import time
from pathlib import Path

import pytest

from tests.waiting import until, wait_until

TESTS = Path(__file__).parents[1]
# Programs and threads that do something again and again; they wait for nothing.
REPEATED = {
    "end_to_end/fake_server.py",  # a server that a file holds
    "end_to_end/full_disk.py",  # fills a disk, and pulls
    "fuzz/client.py",  # dials a server that starts anew
}


def test_no_loop_of_a_test_sleeps_between_two_looks() -> None:
    found = {str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if _sleeps_in_a_loop(path)}
    assert found - REPEATED == {"waiting.py"}, "tests.waiting has what waits for a condition"
    assert found >= REPEATED, "no exception without its reason"


def test_a_condition_is_returned_once_it_gives_something() -> None:
    looks = iter(["", [], "found"])
    assert wait_until(lambda: next(looks), every_s=0) == "found"


def test_what_never_holds_is_told_at_the_deadline() -> None:
    before = time.monotonic()
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: state 7"):
        wait_until(lambda: False, lambda: "state 7", within_s=0.05)
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: all came"):
        asyncio.run(until(lambda: False, "all came", within_s=0.05))
    assert time.monotonic() - before >= 0.1


def _sleeps_in_a_loop(path: Path) -> bool:
    text = path.read_text()
    if "time.sleep" not in text:
        return False
    loops = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.While))
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep"
        for loop in loops
        for node in ast.walk(loop)
    )
