"""The import contracts cover every module: one that they forget could import anything. Tests lie where sources lie."""

import ast
import re
import tomllib
from importlib import import_module
from pathlib import Path

import delayd

_PACKAGE = Path(delayd.__file__).parent
_REPOSITORY = _PACKAGE.parent
_BESIDE = ("realtime", "meta", "cli", "bench")
_TOPS = ("delayd", "realtime", "meta", "cli", "spark", "bench", "examples", "tests")
_UNIT = Path(__file__).parent


def test_each_module_of_delayd_has_its_layer() -> None:
    modules = {f"delayd.{path.stem}" for path in _PACKAGE.glob("*.py")} - {"delayd.__init__"}
    packages = {f"delayd.{path.parent.name}" for path in _PACKAGE.glob("*/__init__.py")}
    missing = (modules | packages) - _names_in_layers()
    assert not missing, f"name {sorted(missing)} in [tool.importlinter] of pyproject.toml"


def test_the_loop_sockets_time_and_chance_are_forbidden_to_whole_packages() -> None:
    contract = _contract("pure-cores")
    packages = {path.parent.name for path in _REPOSITORY.glob("*/__init__.py")} - {"bench", "examples", "tests"}
    assert set(contract["source_modules"]) == packages
    assert set(contract["forbidden_modules"]) >= {"asyncio", "socket", "time", "random"}


def test_each_folder_of_unit_tests_is_a_folder_of_sources() -> None:
    folders = {path.parent.relative_to(_UNIT) for path in _UNIT.rglob("test_*.py")}
    sources = {path.parent.relative_to(_PACKAGE) for path in _PACKAGE.rglob("*.py")}
    sources |= {path.parent.relative_to(_REPOSITORY) for top in _BESIDE for path in (_REPOSITORY / top).rglob("*.py")}
    assert folders <= sources, f"nothing is tested by {sorted(map(str, folders - sources))}"


def test_rule_L6_nothing_maps_a_file_into_memory_and_lmdb_is_opened_by_the_state_alone() -> None:
    sources = [
        path for top in ("delayd", "realtime", "meta", "cli", "spark") for path in (_REPOSITORY / top).rglob("*.py")
    ]
    texts = {str(path.relative_to(_REPOSITORY)): path.read_text() for path in sources}
    maps = re.compile(r"\bimport mmap\b|\bfrom mmap\b|\bmemmap\(|\bmmap_mode\b")
    assert not [name for name, text in texts.items() if maps.search(text)], "read by position"
    opens = [name for name, text in texts.items() if re.search(r"^(?:import|from) lmdb\b", text, re.MULTILINE)]
    assert opens == ["delayd/machine/state.py"]
    # `give-up` runs while its server is stopped, and holds the lock of the directory.
    uses = {name for name, text in texts.items() if re.search(r"\bLmdbState\(|import .*\bLmdbState\b", text)}
    assert uses == {"delayd/net/machine.py", "cli/mend.py"}, "nobody but a server reads LMDB"


def test_no_test_module_imports_another_one() -> None:
    tests = _REPOSITORY / "tests"
    imports = re.compile(
        r"^ *(?:from \S*\btest_\w+ import|from \. import .*\btest_|import tests\S*\.test_)", re.MULTILINE
    )
    found = [str(path.relative_to(tests)) for path in tests.rglob("*.py") if imports.search(path.read_text())]
    assert not found, "what two test modules need lies in a module of its own"


def test_an_old_name_of_a_world_is_the_same_module_and_nothing_here_imports_it() -> None:
    tests, old_names = _REPOSITORY / "tests", dict[str, str]()
    for path in (*tests.glob("delay_*.py"), *(tests / "unit/realtime" / f"{name}.py" for name in ("batches", "world"))):
        (alias,) = re.findall(r"^from tests\.worlds import (\w+)$", path.read_text(), re.MULTILINE)
        old_names[".".join(path.relative_to(_REPOSITORY).with_suffix("").parts)] = f"tests.worlds.{alias}"
    assert len(old_names) == 8
    for old, new in old_names.items():
        assert import_module(old) is import_module(new)
    files = [path for top in _TOPS for path in (_REPOSITORY / top).rglob("*.py")]
    last = re.compile(rf"\b(?:{'|'.join(name.rpartition('.')[2] for name in old_names)})\b")
    suspects = {path: text for path in files if last.search(text := path.read_text())}
    users = [str(path) for path, text in suspects.items() if _imported(path, text) & old_names.keys()]
    assert not users, "import the worlds by their names in tests/worlds"


def test_packages_that_a_wheel_puts_below_delayd_import_themselves_by_their_place() -> None:
    absolute = [
        f"{path}: {line}"
        for package in ("realtime", "meta", "cli", "spark")
        for path in (_REPOSITORY / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) (realtime|meta|cli|spark)\b", line)
    ]
    assert not absolute, "an installed server has no such package: write `from .x import`"


def _imported(path: Path, text: str) -> set[str]:
    """The full names of all modules that a file may import, and of what it imports from them."""
    package = path.relative_to(_REPOSITORY).parent.parts
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def _names_in_layers() -> set[str]:
    layers = _contract("layers")["layers"]
    return {name.strip(" ()") for layer in layers for name in layer.replace("|", ":").split(":")}


def _contract(name: str) -> dict[str, list[str]]:
    settings = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())
    contracts: dict[str, dict[str, list[str]]] = {
        str(each["id"]): each for each in settings["tool"]["importlinter"]["contracts"]
    }
    return contracts[name]
