"""Held: the pull sequences of a group that are pulled and not acknowledged yet, as runs, kept in pieces of bounded
length.

Invariant: runs are disjoint and rise by pull sequence; a run is never changed, only replaced, so a list of runs that a
checkpoint has copied does not change. A change costs the logarithm of the runs and one piece.
"""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

PIECE_RUNS = 512  # A piece is searched by bisection and moved in memory as a whole; both take less than a microsecond.


class Run(NamedTuple):
    """Neighbouring messages that one consumer was given for ``lease_ms``: pull sequences [start, end)."""

    start: int
    end: int
    consume_first: int
    attempt: int
    incarnation: int
    lease_ms: int = 0

    @property
    def messages(self) -> int:
        """How many messages."""
        return self.end - self.start

    def cut(self, start: int, end: int) -> "Run":
        """The part of the run within [start, end)."""
        first, last = max(self.start, start), min(self.end, end)
        consume_first = self.consume_first + first - self.start
        return Run(first, last, consume_first, self.attempt, self.incarnation, self.lease_ms)


class Held:
    """The runs of one group."""

    __slots__ = ("_firsts", "_oldest", "_pieces", "messages", "runs")

    def __init__(self) -> None:
        self.messages = 0
        self.runs = 0
        self._pieces: list[list[Run]] = []
        self._firsts: list[int] = []  # For each piece: where its first run starts.
        self._oldest: list[int | None] = []  # For each piece: its lowest consume sequence; None: not known.

    def __len__(self) -> int:
        """How many runs."""
        return self.runs

    def __iter__(self) -> Iterator[Run]:
        for piece in self._pieces:
            yield from piece

    @property
    def oldest(self) -> int | None:
        """The lowest consume sequence; None when nothing is held."""
        lowest: int | None = None
        for at, known in enumerate(self._oldest):
            if known is None:
                known = self._oldest[at] = min([run.consume_first for run in self._pieces[at]])
            if lowest is None or known < lowest:
                lowest = known
        return lowest

    def copy(self) -> list[Run]:
        """All runs, as a list of their own; some nanoseconds a run."""
        runs: list[Run] = []
        for piece in self._pieces:
            runs += piece
        return runs

    def add(self, run: Run) -> None:
        """Hold a run; no part of it may be held already."""
        self.messages += run.end - run.start
        self.runs += 1
        if not self._pieces or (run.start > self._pieces[-1][-1].start and len(self._pieces[-1]) >= PIECE_RUNS):
            self._pieces.append([run])
            self._firsts.append(run.start)
            self._oldest.append(run.consume_first)
            return
        at = max(0, bisect.bisect_right(self._firsts, run.start) - 1)
        piece = self._pieces[at]
        if run.start > piece[-1].start:
            piece.append(run)
        else:
            bisect.insort(piece, run)
        self._changed(at)

    def within(self, start: int, end: int) -> list[Run]:
        """The held parts of [start, end): each run is cut to it; rising."""
        found: list[Run] = []
        at, index = self._find(start)
        while at < len(self._pieces):
            piece = self._pieces[at]
            while index < len(piece):
                run = piece[index]
                if run.start >= end:
                    return found
                found.append(run if start <= run.start and run.end <= end else run.cut(start, end))
                index += 1
            at, index = at + 1, 0
        return found

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any part of [start, end) is held."""
        at = bisect.bisect_right(self._firsts, start) - 1
        # This is called after every request, with the lease that ends first.
        if at >= 0 and (index := bisect.bisect_left(self._pieces[at], (start + 1,))):
            if self._pieces[at][index - 1].end > start:
                return True
            if index < len(self._pieces[at]):
                return self._pieces[at][index].start < end
        return at + 1 < len(self._firsts) and self._firsts[at + 1] < end

    def take(self, start: int, end: int, incarnation: int) -> list[Run]:
        """Stop holding the parts of [start, end) that were pulled in this incarnation; return them."""
        at, index = self._find(start)
        if at < len(self._pieces):
            run = self._pieces[at][index]
            if run.start == start and run.end == end and run.incarnation == incarnation:
                # Nearly every consumer acknowledges a whole run at once.
                self._drop(at, index)
                return [run]
        taken: list[Run] = []
        begin = at
        while at < len(self._pieces) and self._pieces[at][index].start < end:
            pieces = len(self._pieces)
            self._take_of_piece(at, index, (start, end, incarnation), taken)
            # A run that was cut in two may have split its piece; both halves were looked at.
            at, index = at + 1 + len(self._pieces) - pieces, 0
        # Empty pieces are removed together: removing them one by one would move all pieces behind each.
        if not all(self._pieces[begin:at]):
            kept = [each for each in range(begin, at) if self._pieces[each]]
            self._pieces[begin:at] = [self._pieces[each] for each in kept]
            self._firsts[begin:at] = [self._firsts[each] for each in kept]
            self._oldest[begin:at] = [self._oldest[each] for each in kept]
        self.messages -= sum([run.end - run.start for run in taken])
        return taken

    def _take_of_piece(self, at: int, index: int, wanted: tuple[int, int, int], taken: list[Run]) -> None:
        start, end, incarnation = wanted
        piece = self._pieces[at]
        left: list[Run] = []
        until = index
        while until < len(piece) and piece[until].start < end:
            run = piece[until]
            until += 1
            if run.incarnation != incarnation:
                left.append(run)
                continue
            if run.start < start:
                left.append(run.cut(run.start, start))
            taken.append(run if start <= run.start and run.end <= end else run.cut(start, end))
            if end < run.end:
                left.append(run.cut(end, run.end))
        self.runs += len(left) - (until - index)
        piece[index:until] = left
        if piece:
            self._changed(at)

    def _drop(self, at: int, index: int) -> None:
        piece = self._pieces[at]
        run = piece.pop(index)
        self.runs -= 1
        self.messages -= run.end - run.start
        if piece:
            self._changed(at)
        else:
            del self._pieces[at], self._firsts[at], self._oldest[at]

    def _find(self, start: int) -> tuple[int, int]:
        """The piece, and the place in it, of the first run that ends behind ``start``; behind all pieces if there is
        none.
        """
        at = max(0, bisect.bisect_right(self._firsts, start) - 1)
        if at >= len(self._pieces):
            return at, 0
        piece = self._pieces[at]
        index = bisect.bisect_left(piece, (start,))
        if index and piece[index - 1].end > start:
            index -= 1
        return (at, index) if index < len(piece) else (at + 1, 0)

    def _changed(self, at: int) -> None:
        piece = self._pieces[at]
        self._firsts[at] = piece[0].start
        self._oldest[at] = None
        if len(piece) > 2 * PIECE_RUNS:
            self._pieces[at : at + 1] = [piece[:PIECE_RUNS], piece[PIECE_RUNS:]]
            self._firsts[at : at + 1] = [piece[0].start, piece[PIECE_RUNS].start]
            self._oldest[at : at + 1] = [None, None]
