"""The docstring of each package is a map: who opens a folder finds each file of it there, and no file that is gone."""

import ast
import re
from pathlib import Path

import pytest

import delayd

_PACKAGE = Path(delayd.__file__).parent
_REPOSITORY = _PACKAGE.parent
_HOUSES = [_PACKAGE, *(_REPOSITORY / name for name in ("realtime", "meta", "cli", "spark"))]
_ROOMS = sorted({init.parent for house in _HOUSES for init in house.rglob("__init__.py")} - {_PACKAGE})
_LINE = re.compile(r"^    ([a-z_]+(?:, [a-z_]+)*) {2,}\S", re.MULTILINE)
_ASIDE = re.compile(r"`([a-z_]+)`")


@pytest.mark.parametrize("room", _ROOMS, ids=lambda room: str(room.relative_to(_REPOSITORY)))
def test_the_map_of_a_package_names_its_files_and_no_others(room: Path) -> None:
    told = ast.get_docstring(ast.parse((room / "__init__.py").read_text()), clean=False) or ""
    heads = {name for heads in _LINE.findall(told) for name in heads.split(", ")}
    files = {path.stem for path in room.glob("*.py")} - {"__init__"}
    files |= {init.parent.name for init in room.glob("*/__init__.py")}
    missing, gone = files - heads - set(_ASIDE.findall(told)), heads - files
    assert not missing, f"the map in {room}/__init__.py lacks {sorted(missing)}"
    assert not gone, f"the map in {room}/__init__.py names {sorted(gone)}, which are not there"
