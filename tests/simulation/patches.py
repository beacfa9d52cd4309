"""What a planted bug is made of."""

from __future__ import annotations

from typing import NamedTuple


class Patch(NamedTuple):
    """One name that stands for something else while a bug is planted."""

    where: object
    name: str
    what: object


Bugs = dict[str, list[Patch]]
"""Bugs by name, which begins with the rule that each takes out."""
