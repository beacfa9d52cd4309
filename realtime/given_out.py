"""Which pull sequences each life of a server gave out, and so which handles can be true (rules Q1, Q5)."""

from collections.abc import Sequence

from .held import Run
from .kept import LIVES_MAX, Life
from .ranges import Ranges

SECRET_BITS = 48  # Random bits of an incarnation: whoever guesses with full requests and no pause needs years for one.
LIFE_MASK = 0xFFFF  # Above them the epoch, as far as it fits: what this life gave out is told from what older ones did.


class GivenOut:
    """The newest lives, and this one."""

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
        """What of the pull sequences from ``start`` to ``end`` an acknowledgement names in vain.

        It may be a part, for clients merge neighbouring handles. What is not held any more and not among what is
        ``gone`` was acknowledged before, in whatever life (rule Q5). ``known`` bounds what the group can know of.
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
    """For each life the pull sequences that it gave out and that survived it: from its first one to the next life's."""
    stops = [life.pull_first for life in lives[1:]]
    # Nobody knows yet where the last one ends, for it goes on.
    return {
        life.epoch & LIFE_MASK: (life.pull_first, stop)
        for life, stop in zip(lives, [*stops, lives[-1].pull_first], strict=True)
    }
