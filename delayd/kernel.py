"""Kernel: pieces of hot paths that the optional package `delayd-kernel` has compiled (docs/kernel.md).

Invariant: a compiled piece returns the same bytes as its twin here, and raises nothing where the twin does not. So
everything works without the package, and callers can't tell which of the two runs.
"""

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar

VERSION = 3  # Another number means that arguments or results of pieces differ.
TWINS = "python"  # What a server tells when it runs the twins because the package is not there.
VARIABLE = "DELAYD_KERNEL"  # With "off" the twins run although the package is there.

P = ParamSpec("P")
R = TypeVar("R")


def choose(name: str, twin: Callable[P, R]) -> Callable[P, R]:
    """The compiled piece of this name, or else its twin, which is called with the same arguments."""
    piece: Callable[P, R] = getattr(_compiled, name, twin)
    return piece


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get(VARIABLE) == "off":
        return None, f"{TWINS} ({VARIABLE}=off)"
    try:
        found = importlib.import_module("delayd_kernel")
    except ImportError:
        return None, TWINS
    if found.VERSION != VERSION:
        what = f"delayd-kernel {found.VERSION} is installed, and this delayd needs {VERSION}"
        return None, f"{TWINS} ({what}: pip install 'delayd[fast]')"
    return found, f"compiled {VERSION}"


_compiled, state = _load()
"""``state`` says which of the two runs, and why."""
