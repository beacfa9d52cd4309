"""A service that holds messages until they are due and delivers each of them once, on time.

What a program uses is named here and loaded on first use: a server never pays for the clients, nor they for a server.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Each name that delayd offers, and the module that it lives in. Type checkers read the same names from imports
# under TYPE_CHECKING.
_HOMES: dict[str, str] = {}

__all__ = ["__version__"]

if not TYPE_CHECKING:
    # Hidden from type checkers, which would take any misspelt name for one that exists.
    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
