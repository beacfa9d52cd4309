"""Finds a module of ``realtime``, ``meta``, ``cli`` or ``spark``, however delayd was installed.

A wheel carries these folders inside ``delayd/``; in the repository, and so in an editable install, they lie beside it.
Other distributions install top-level packages of the same names. The invariant: what ``find`` returns is delayd's own,
or it raises and has imported nothing.
"""

from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent


class ProgramNotFound(ImportError):
    """A part of delayd is not installed, or a package of another distribution is in its place."""


def find(name: str) -> ModuleType:
    """Import ``name``, such as ``meta.program``, from inside ``delayd/`` if it is there, else from beside it.

    Raises ``ProgramNotFound`` when the folder is missing or another package of its name comes first on the path.
    An ``ImportError`` from inside the module passes through.
    """
    folder = name.partition(".")[0]
    if find_spec(f"delayd.{folder}") is not None:
        return import_module(f"delayd.{name}")
    expected = _FOLDER.parent / folder / "__init__.py"
    if not expected.exists():
        raise ProgramNotFound(f"{_FOLDER} was installed without its part {folder!r}: install delayd again")
    spec = find_spec(folder)
    if spec is None or spec.origin is None:
        raise ProgramNotFound(f"{_FOLDER.parent} is not on Python's path: install delayd, or start Python there")
    if Path(spec.origin).resolve() != expected:
        raise ProgramNotFound(
            f"delayd's own {folder!r} ({expected.parent}) is shadowed by {_owner(folder, spec.origin)}: "
            "remove that package from this environment, or install delayd as a wheel, which keeps its copy inside"
        )
    return import_module(name)


def _owner(folder: str, origin: str) -> str:
    owners = sorted(set(packages_distributions().get(folder, [])) - {"delayd"})
    return f"{origin}, which {' and '.join(owners)} installed" if owners else origin
