"""Acks: which entries of the pull log a consumer's word becomes, and which of its handles are stale (rules Q1, Q5).

A message gets one word. To repeat it is no error, because a client asks again when an answer was lost; another word
about the same message would change nothing, and is told so.

An example: of 700 to 704, 700 was acknowledged, 701 was given back, 702 is to come again later, the lease of 703 has
ended and another consumer holds 704. An ACK of all five is done for 700, and stale for 701 and 702 (GIVEN_BACK), 703
(LEASE_ENDED) and 704 (ANOTHER_HOLDS). A RETRY of them is done for 702 only.
"""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from delayd.log.pull import COVERED_MAX, PullEntry, PullOp
from delayd.wire.consuming import StaleRow, Why

from .group_window import HELD, Became, StateRun
from .groups import Group
from .kept import LIVES_MAX, Life

SECRET_BITS = 48  # Random bits of an incarnation: with full requests and no pause, guessing one takes years.
# The bits above hold the low part of the epoch: they tell handles of this life from those of earlier lives.
LIFE_MASK = 0xFFFF

Handles = Sequence[Sequence[int]]
"""Each is (incarnation, first pull sequence, count)."""


class ConsumerWord(Enum):
    """What a consumer says of messages, and what became of a pull if it was said of it before."""

    ACK = PullOp.ACK, Became.ACKNOWLEDGED
    NACK = PullOp.NACK, Became.GIVEN_BACK
    RETURNED = PullOp.RETURNED, Became.GIVEN_BACK  # No handler was given them.
    # These become no entries: the decisions about retries are records, and nobody logs an extension.
    RETRY = PullOp.NACK, Became.RETRIED
    REJECT = PullOp.NACK, Became.REJECTED
    EXTEND = PullOp.ACK, None

    def __init__(self, op: PullOp, became: Became | None) -> None:
        self.op = op
        self.became = became


SAID = {
    PullOp.ACK: ConsumerWord.ACK,
    PullOp.NACK: ConsumerWord.NACK,
    PullOp.RETURNED: ConsumerWord.RETURNED,
}  # By the entries of words.
_WHY = {
    Became.HELD: Why.ANOTHER_HOLDS,
    Became.GIVEN_BACK: Why.GIVEN_BACK,
    Became.LAPSED: Why.LEASE_ENDED,
    Became.RETRIED: Why.GIVEN_BACK,
    Became.REJECTED: Why.GIVEN_BACK,
    Became.ACKNOWLEDGED: Why.ACKNOWLEDGED,
    Became.UNKNOWN: Why.UNKNOWN,
}


class NamedPulls(NamedTuple):
    """What the handles of one group name."""

    entries: list[PullEntry]  # Of the messages that the consumer holds.
    stale: list[StaleRow]
    asked_for: list[StaleRow]  # The ranges with anything stale, as the request named them.


class GivenOut:
    """Which pull sequences each of the newest lives of this server gave out; this life is one of them."""

    def __init__(self, lives: Sequence[Life], epoch: int) -> None:
        self.life = epoch & LIFE_MASK
        self._of_life = _kept_of(lives[-LIVES_MAX:])

    def became(self, group: Group, next_pull: int, incarnation: int, run: StateRun) -> Iterator[StateRun]:
        """What became of pull sequences that nobody holds. Those that no table of their group has were acknowledged, in
        whatever life (rule Q5); such a run is ``UNKNOWN``.

        The group knows it from its ``known_from`` on, for what the incarnation's life gave out and did not lose in a
        crash: a later life gives other messages the numbers that were lost.
        """
        life = incarnation >> SECRET_BITS
        first, stop = self._of_life.get(life, (0, 0))
        first = min(max(first, group.window.known_from, run.first), run.end)
        stop = max(first, min(next_pull if life == self.life else stop, run.end))
        known = Became.ACKNOWLEDGED if run.state == Became.UNKNOWN else Became(run.state)
        for start, end, became in (
            (run.first, first, Became.UNKNOWN),
            (first, stop, known),
            (stop, run.end, Became.UNKNOWN),
        ):
            if start < end:
                yield StateRun(start, end - start, became)


def by_source(group: Group, handles: Handles) -> list[tuple[Group, Handles]]:
    """Divide handles between a group and its child: pull sequences count up over both (rule Q2)."""
    child = group.child
    if child is None:
        return [(group, handles)]
    own: list[Sequence[int]] = []
    of_child: list[Sequence[int]] = []
    # Handles that name a message twice must not divide its range twice.
    for incarnation, start, end in _merged(handles):
        for run in child.window.handles.within(start, end):
            if start < run.first:
                own.append([incarnation, start, run.first - start])
            if of_child and of_child[-1][0] == incarnation and sum(of_child[-1][1:]) == run.first > start:
                of_child[-1] = [incarnation, of_child[-1][1], of_child[-1][2] + run.messages]
            else:
                of_child.append([incarnation, run.first, run.messages])
            start = run.end
        if start < end:
            own.append([incarnation, start, end - start])
    return [(each, part) for each, part in ((group, own), (child, of_child)) if part]


def found(
    said: ConsumerWord, group: Group, handles: Handles, given_out: GivenOut, next_pull: int, now_ms: int
) -> NamedPulls:
    """Look up what the handles of a request name."""
    stale: list[StaleRow] = []
    asked_for: list[StaleRow] = []
    entries: list[PullEntry] = []
    # The merged ranges don't overlap, so they meet each run once, whatever the handles were.
    for incarnation, start, end in _merged(handles):
        others: list[StateRun] = []
        at = start
        follows = False  # Whether the run before belongs to this consumer too: then one entry covers both.
        for run in group.window.handles.within(start, end):
            if at < run.first:
                others += given_out.became(group, next_pull, incarnation, StateRun(at, run.first - at, Became.UNKNOWN))
                follows = False
            at = run[0] + run[1]
            if run[2] != HELD:
                others += given_out.became(group, next_pull, incarnation, run)
                follows = False
                continue
            if run[5] != incarnation:
                others.append(run)
                follows = False
                continue
            last = entries[-1] if follows else None
            if last is not None and at - last.pull_first <= COVERED_MAX:
                entries[-1] = last._replace(covered=at - last.pull_first)
            else:
                entries.append(PullEntry(said.op, 0, group.group_id, incarnation, run.first, 0, run.messages, now_ms))
            follows = True
        if at < end:
            others += given_out.became(group, next_pull, incarnation, StateRun(at, end - at, Became.UNKNOWN))
        if others and (rows := _stale(said, group, incarnation, others)):
            stale += rows
            asked_for.append([incarnation, start, end - start, rows[0][3]])
    return NamedPulls(entries, stale, asked_for)


def stale_all(handles: Handles) -> list[StaleRow]:
    """Handles of which nothing is known."""
    return [[*handle, Why.UNKNOWN] for handle in handles]


def _stale(said: ConsumerWord, group: Group, incarnation: int, others: Sequence[StateRun]) -> list[StaleRow]:
    """What a word can't change of pull sequences that its consumer does not hold, and why; neighbours together."""
    rows: list[StaleRow] = []
    fenced = incarnation in group.front.fenced
    for run in others:
        became = Became(run.state)
        if became is said.became:
            continue
        why = Why.FENCED if fenced and became in (Became.HELD, Became.LAPSED) else _WHY[became]
        if rows and rows[-1][1] + rows[-1][2] == run.first and rows[-1][3] == why:
            rows[-1][2] += run.messages
        else:
            rows.append([incarnation, run.first, run.messages, why])
    return rows


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


def _merged(handles: Handles) -> list[tuple[int, int, int]]:
    """The ranges that handles cover, as (incarnation, start, end): rising, neither overlapping nor touching."""
    if len(handles) == 1:
        ((incarnation, start, covered),) = handles
        return [(incarnation, start, start + covered)]
    merged: list[tuple[int, int, int]] = []
    for incarnation, start, covered in sorted(map(tuple, handles)):
        end = start + covered
        if merged and merged[-1][0] == incarnation and start <= merged[-1][2]:
            merged[-1] = (incarnation, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((incarnation, start, end))
    return merged
