"""What a planted bug is made of."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """One name that stands for something else while a bug is planted."""

    where: object
    name: str
    what: object


Bugs = dict[str, list[Patch]]
"""Bugs by name, which begins with the rule that each takes out."""


def changed(function: Callable[..., Any], piece: str, into: str) -> Callable[..., Any]:
    """The same function with a piece of its source changed, which must be in it once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(piece) == 1, f"{function.__qualname__} has {piece!r} {source.count(piece)} times"
    found: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + source.replace(piece, into), function.__module__, "exec")
    exec(code, function.__globals__, found)
    return found[function.__name__]  # type: ignore[no-any-return]
