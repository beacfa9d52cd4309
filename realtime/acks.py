"""Acks: which entries of the pull log a consumer's word becomes, and which of its handles are stale (rules Q1, Q5)."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from delayd.log.pull import COVERED_MAX, PullEntry, PullOp
from delayd.wire.stale import StaleRow, Why

from .given_out import GivenOut
from .groups import Group
from .held import Run
from .ranges import Ranges

Handles = Sequence[Sequence[int]]
"""Each is (incarnation, first pull sequence, count)."""


class Said(Enum):
    """What a consumer says of messages."""

    ACK = "ack", PullOp.ACK
    NACK = "nack", PullOp.NACK
    RETURNED = "returned", PullOp.RETURNED  # No handler was given them.
    # These become no entries: the decisions about retries are records, and nobody logs an extension.
    RETRY = "retry", PullOp.NACK
    REJECT = "reject", PullOp.NACK
    EXTEND = "extend", PullOp.ACK

    def __init__(self, word: str, op: PullOp) -> None:
        self.word = word
        self.op = op


SAID = {said.op: said for said in (Said.ACK, Said.NACK, Said.RETURNED)}  # By the entries that words become.


class Found(NamedTuple):
    """What the handles of one group name."""

    entries: list[PullEntry]  # Of the messages that the consumer holds.
    stale: list[StaleRow]
    asked_for: list[StaleRow]  # The ranges with anything stale, as the request named them.


def by_source(group: Group, handles: Handles) -> list[tuple[Group, Handles]]:
    """Divide handles between a group and its child: pull sequences count up over both (rule Q2)."""
    child = group.child
    if child is None:
        return [(group, handles)]
    own: list[Sequence[int]] = []
    of_child: list[Sequence[int]] = []
    # Handles that name a message twice must not divide its range twice.
    for incarnation, start, end in _merged(handles):
        known = Ranges(child.given_back.within(start, end))
        for run in child.held.within(start, end):
            known.add(run.start, run.end)
        for first, stop in known:
            if start < first:
                own.append([incarnation, start, first - start])
            of_child.append([incarnation, first, stop - first])
            start = stop
        if start < end:
            own.append([incarnation, start, end - start])
    return [(each, part) for each, part in ((group, own), (child, of_child)) if part]


def found(said: Said, group: Group, handles: Handles, given_out: GivenOut, next_pull: int, now_ms: int) -> Found:
    """Look up what the handles of a request name."""
    stale: list[StaleRow] = []
    asked_for: list[StaleRow] = []
    entries: list[PullEntry] = []
    # The merged ranges don't overlap, so they meet each run once, whatever the handles were.
    for incarnation, start, end in _merged(handles):
        own: list[Run] = []
        others: list[Run] = []
        follows = False  # Whether the run before belongs to this consumer too: then one entry covers both.
        for run in group.held.within(start, end):
            if run.incarnation != incarnation:
                others.append(run)
                follows = False
                continue
            own.append(run)
            last = entries[-1] if follows else None
            if last is not None and run.end - last.pull_first <= COVERED_MAX:
                entries[-1] = last._replace(covered=run.end - last.pull_first)
            else:
                at = (incarnation, run.start, 0, run.end - run.start, now_ms)
                entries.append(PullEntry(said.op, 0, group.group_id, *at))
            follows = True
        left = _without(own, start, end)
        if not left:
            continue
        lost = given_out.lost(group.known_from, next_pull, incarnation, left)
        if rows := _stale(said, group, incarnation, left, others, lost):
            stale += rows
            asked_for.append([incarnation, start, end - start, rows[0][3]])
    return Found(entries, stale, asked_for)


def _without(own: Sequence[Run], start: int, end: int) -> Ranges | None:
    """What this consumer does not hold of [start, end); None when it holds all of it."""
    if sum([run.end - run.start for run in own]) == end - start:
        return None
    left = Ranges.of(start, end)
    for run in own:
        left.remove(run.start, run.end)
    return left


def stale_all(handles: Handles) -> list[StaleRow]:
    """Handles of which nothing is known."""
    return [[*handle, Why.UNKNOWN] for handle in handles]


def _stale(
    said: Said, group: Group, incarnation: int, left: Ranges, others: Sequence[Run], lost: Sequence[tuple[int, int]]
) -> list[StaleRow]:
    """What a word can't change of ``left``, pull sequences that its consumer does not hold, and why.

    A message gets one word. To repeat it is no error, because a client asks again when an answer was lost (rule Q5);
    another word about the same message would change nothing, and is told so.

    An example: of 700 to 704, 700 was acknowledged, 701 was given back, 702 is to come again later, the lease of 703
    has ended and another consumer holds 704. An ACK of all five is done for 700, and stale for 701 and 702
    (GIVEN_BACK), 703 (LEASE_ENDED) and 704 (ANOTHER_HOLDS). A RETRY of them is done for 702 only.
    """
    rows: list[StaleRow] = []
    fenced = incarnation in group.front.fenced

    def take(runs: Ranges, why: Why | None) -> None:
        for first, stop in list(left):
            for start, end in runs.within(first, stop):
                left.remove(start, end)
                if why is not None:
                    rows.append([incarnation, start, end - start, why])

    take(Ranges((run.start, run.end) for run in others), Why.FENCED if fenced else Why.ANOTHER_HOLDS)
    take(group.lapsed, Why.FENCED if fenced else Why.LEASE_ENDED)
    take(group.retried, None if said is Said.RETRY else Why.GIVEN_BACK)
    take(group.rejected, None if said is Said.REJECT else Why.GIVEN_BACK)
    take(group.given_back, None if said in (Said.NACK, Said.RETURNED) else Why.GIVEN_BACK)
    take(Ranges(lost), Why.UNKNOWN)
    if said is not Said.ACK:
        rows += [[incarnation, first, stop - first, Why.ACKNOWLEDGED] for first, stop in left]
    rows.sort()
    return rows


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
