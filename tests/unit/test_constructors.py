"""Constructors: a reader can tell what goes into an object, because it is at most six values, or values with names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import delayd

_REPOSITORY = Path(delayd.__file__).parent.parent
_HOUSES = ("delayd", "realtime", "meta", "cli")
_ARGUMENTS_MAX = 6
# Arguments that users give by name; each has its own line in help().
_PUBLIC = {"Consumes", "Sends"}  # Of both consumers, of both producers.


def constructors() -> Iterator[tuple[str, int]]:
    """Each class with an ``__init__``, and how many arguments that takes."""
    for house in _HOUSES:
        for path in (_REPOSITORY / house).rglob("*.py"):
            for each in ast.walk(ast.parse(path.read_text())):
                if isinstance(each, ast.ClassDef):
                    for made in each.body:
                        if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                            found = [*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs]
                            yield each.name, len(found) - 1


def test_no_constructor_takes_more_than_six_arguments() -> None:
    found = dict(constructors())
    assert len(found) > 150
    assert {name for name, count in found.items() if count > _ARGUMENTS_MAX} == _PUBLIC
