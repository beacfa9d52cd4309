"""Given out: which pull sequences each life of a server gave out; from that it follows which handles can be valid
(rules Q1, Q5).
"""

from collections.abc import Sequence

from .kept import LIVES_MAX, Life
from .ranges import Ranges

SECRET_BITS = 48  # Random bits of an incarnation: with full requests and no pause, guessing one takes years.
# The bits above hold the low part of the epoch: they tell handles of this life from those of earlier lives.
LIFE_MASK = 0xFFFF


class GivenOut:
    """The newest lives, this one included."""

    def __init__(self, lives: Sequence[Life], epoch: int) -> None:
        self.life = epoch & LIFE_MASK
        self._of_life = _kept_of(lives[-LIVES_MAX:])

    def lost(self, known_from: int, next_pull: int, incarnation: int, left: Ranges) -> list[tuple[int, int]]:
        """The parts of ``left``, pull sequences of an incarnation, of which a group does not know what became of them.

        The group knows it from ``known_from`` on, for what the incarnation's life gave out and did not lose in a crash.
        A sequence that is known, is not held and was not given back was acknowledged, in whatever life (rule Q5).
        """
        life = incarnation >> SECRET_BITS
        first, stop = self._of_life.get(life, (0, 0))
        first, stop = max(first, known_from), next_pull if life == self.life else stop
        unknown = left.copy()
        if first < stop:
            unknown.remove(first, stop)
        return list(unknown)


def _kept_of(lives: Sequence[Life]) -> dict[int, tuple[int, int]]:
    """For each life, the pull sequences that it gave out and that survived it: from its first one to the first one of
    the next life.
    """
    stops = [life.pull_first for life in lives[1:]]
    # The last life still goes on, so nobody knows where it ends.
    return {
        life.epoch & LIFE_MASK: (life.pull_first, stop)
        for life, stop in zip(lives, [*stops, lives[-1].pull_first], strict=True)
    }
