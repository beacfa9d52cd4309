"""Acks: which entries of the pull log an acknowledgement becomes, and which of its handles are stale (rules Q1, Q5)."""

from collections.abc import Sequence
from typing import NamedTuple

from delayd.log.pull import COVERED_MAX, PullEntry, PullOp
from delayd.wire.stale import StaleRow, Why

from .given_out import GivenOut
from .groups import Group
from .held import Run
from .ranges import Ranges

Handles = Sequence[Sequence[int]]
"""Each is (incarnation, first pull sequence, count)."""


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


def found(op: PullOp, group: Group, handles: Handles, given_out: GivenOut, next_pull: int, now_ms: int) -> Found:
    """Look up what the handles of an ACK, NACK or RETURNED name."""
    stale: list[StaleRow] = []
    asked_for: list[StaleRow] = []
    entries: list[PullEntry] = []
    # The merged ranges don't overlap, so they meet each run once, whatever the handles were.
    for incarnation, start, end in _merged(handles):
        own, others = [], []
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
                entries.append(PullEntry(op, 0, group.group_id, incarnation, run.start, 0, run.end - run.start, now_ms))
            follows = True
        # A consumer that gives messages back a second time has what it wants; only if their lease ended it is told
        # "stale".
        gone = group.given_back if op == PullOp.ACK else group.lapsed
        if lost := given_out.lost((group.known_from, next_pull), gone, incarnation, start, end, own, others):
            is_fenced = incarnation in group.front.fenced
            rows = [
                [incarnation, first, stop - first, _why(group, others, first, stop, is_fenced)] for first, stop in lost
            ]
            stale += rows
            asked_for.append([incarnation, start, end - start, rows[0][3]])
    return Found(entries, stale, asked_for)


def stale_all(handles: Handles) -> list[StaleRow]:
    """Handles of which nothing is known."""
    return [[*handle, Why.UNKNOWN] for handle in handles]


def _why(group: Group, others: Sequence[Run], first: int, stop: int, is_fenced: bool) -> Why:
    """Why a stale range is that; the first that fits, where its messages differ."""
    if is_fenced and (group.lapsed.overlaps(first, stop) or others):
        return Why.FENCED
    if group.lapsed.overlaps(first, stop):
        return Why.LEASE_ENDED
    if group.given_back.overlaps(first, stop):
        return Why.GIVEN_BACK
    if any(run.start < stop and first < run.end for run in others):
        return Why.ANOTHER_HOLDS
    return Why.UNKNOWN


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
