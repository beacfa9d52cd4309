"""Sources: the Python files of a program under development, and whether one of them has changed."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Self

Stamp = tuple[int, int]

_PASSED_OVER = {"__pycache__", "site-packages", "node_modules"}
_ENVIRONMENT = "pyvenv.cfg"  # A folder with this is an environment, whose thousands of files nobody edits.


class Sources:
    """Python files below a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._stamps = dict(self._scan())

    @classmethod
    def of(cls, module: str) -> Self:
        """The files beside a module, and below; of a package, those below it. Nothing is imported."""
        top = module.partition(".")[0]
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        spec = find_spec(top)
        if spec is not None and spec.submodule_search_locations:
            return cls(next(iter(spec.submodule_search_locations)))
        if spec is not None and spec.origin is not None and os.path.isfile(spec.origin):
            return cls(os.path.dirname(spec.origin))
        return cls(os.getcwd())

    def changed(self) -> list[str]:
        """The files that are new, gone or different since the last look, as paths below the folder."""
        before, now = self._stamps, dict(self._scan())
        self._stamps = now
        changed = [path for path in before.keys() | now.keys() if before.get(path) != now.get(path)]
        return sorted(os.path.relpath(path, self.folder) for path in changed)

    def _scan(self) -> Iterator[tuple[str, Stamp]]:
        for folder, folders, files in os.walk(self.folder):
            if _ENVIRONMENT in files:
                folders.clear()
                continue
            folders[:] = [name for name in folders if name not in _PASSED_OVER and not name.startswith(".")]
            for name in files:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    try:
                        found = os.stat(path)
                    except OSError:
                        continue  # An editor has just put another file in its place: the next look sees that one.
                    yield path, (found.st_mtime_ns, found.st_size)
