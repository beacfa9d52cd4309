"""Given out: which pull sequences each life of a server gave out; from that it follows which handles can be valid
(rules Q1, Q5).
"""

from collections.abc import Sequence

from .held import Run
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

    def lost(
        self,
        known: tuple[int, int],
        gone: Ranges,
        incarnation: int,
        start: int,
        end: int,
        own: Sequence[Run],
        others: Sequence[Run],
    ) -> list[tuple[int, int]]:
        """Return the parts of the pull sequences ``start`` to ``end`` that an acknowledgement names and that are stale.

        Only a part may be stale, because clients merge neighbouring handles. A sequence that is neither held nor among
        ``gone`` was acknowledged before, in whatever life (rule Q5). ``known`` bounds the sequences of which the group
        knows that.
        """
        life = incarnation >> SECRET_BITS
        first, stop = self._of_life.get(life, (0, 0))
        if life == self.life:
            stop = known[1]
        first = max(first, known[0])
        if first <= start and end <= stop and not others and not gone.overlaps(start, end):
            return []
        lost = Ranges(gone.within(start, end))
        for run in others:
            lost.add(run.start, run.end)
        if start < first:
            lost.add(start, min(first, end))
        if stop < end:
            lost.add(max(start, stop), end)
        for run in own:
            lost.remove(run.start, run.end)
        return list(lost)


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
