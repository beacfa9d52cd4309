"""An answer about a row is derived from the ledger alone: nobody else asks those who have a part of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import delayd.delay

_ROOM = Path(delayd.delay.__file__).parent
_LEDGER = _ROOM / "ledger" / "ledger.py"
# What tells where a row is, or what it ended as: in a window, a file, a decision, an outcome that is not durable.
_TELLS = {"unwritten", "unwritten_of", "may_have_left", "at_hand", "look_up", "is_owed"}
_PARTS = {"delayd.delay.ledger.outside", "delayd.delay.ledger.hour_outcomes"}
# Who may be asked whether a row has ended, or let it pass; a class with such a method would be a second ledger.
_ANSWERS = {"may_leave", "claim", "claims", "has_ended", "have_ended", "are_ending", "without_outcome"}


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(_ROOM.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def test_only_the_ledger_asks_who_has_a_part_of_the_answer() -> None:
    asking = {
        (path.relative_to(_ROOM).as_posix(), node.func.attr)
        for path, tree in _trees()
        if path.parent != _LEDGER.parent
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TELLS
    }
    assert not asking, "ask the ledger"
    finds = {
        path.relative_to(_ROOM).as_posix()
        for path, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "find" and _name(node.value) == "owed"
    }
    assert finds == {"ledger/ledger.py"}, "what a decision has ended is told by the ledger"


def test_only_the_ledger_knows_its_parts() -> None:
    knowing = {
        path.relative_to(_ROOM).as_posix()
        for path, tree in _trees()
        if path.parent != _LEDGER.parent
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in _PARTS
    }
    assert not knowing, "these are parts of the ledger's answer, and not answers"


def test_only_the_ledger_says_whether_a_row_has_ended_and_lets_rows_pass() -> None:
    saying = {
        node.name
        for _, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and _ANSWERS & {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        and "slots" not in node.name.lower()  # The slots of keys that a server claims are none of its rows.
    }
    assert saying == {"Ledger"}


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
