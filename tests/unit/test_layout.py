"""The layering contract covers every module: one that it does not name could import anything."""

import tomllib
from pathlib import Path

import delayd

_PACKAGE = Path(delayd.__file__).parent
_REPOSITORY = _PACKAGE.parent


def test_each_module_of_delayd_has_its_layer() -> None:
    modules = {f"delayd.{path.stem}" for path in _PACKAGE.glob("*.py")} - {"delayd.__init__"}
    packages = {f"delayd.{path.parent.name}" for path in _PACKAGE.glob("*/__init__.py")}
    missing = (modules | packages) - _names_in_layers()
    assert not missing, f"name {sorted(missing)} in [tool.importlinter] of pyproject.toml"


def _names_in_layers() -> set[str]:
    settings = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())
    (contract,) = (each for each in settings["tool"]["importlinter"]["contracts"] if each["id"] == "layers")
    return {name.strip(" ()") for layer in contract["layers"] for name in layer.replace("|", ":").split(":")}
