"""Who asks a world for the pieces of a walk, and is refused none."""

from __future__ import annotations

from collections.abc import Callable

from delayd.errors import DelaydError
from delayd.wire.asked import Piece


def hear(told: list[Piece]) -> Callable[[Piece | DelaydError], None]:
    """What `Endings.find` calls: each piece is added to ``told``."""

    def heard(what: Piece | DelaydError) -> None:
        assert not isinstance(what, DelaydError), what
        told.append(what)

    return heard
