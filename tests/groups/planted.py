"""Bugs that the walks must find: each takes out one thing that a rule rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from delayd.batch.batch import Batch
from delayd.log import pull
from delayd.log.pull import PullEntry, PullOp
from realtime import pulls, recovery, words
from realtime.group_window import GIVEN_BACK, GroupWindow, Stage
from realtime.groups import Group, GroupCopy
from realtime.kept import Kept, Life
from realtime.order import Order
from realtime.pulls import Pulls
from realtime.recovery import PullReplay
from realtime.retries import Retries
from realtime.unfinished import UnfinishedSearch
from realtime.words import Handles
from tests.groups.run import walks
from tests.groups.walk import Kind
from tests.worlds import port_bugs
from tests.worlds.patches import Bugs, Patch, changed
from tests.worlds.realtime_bugs import ACKNOWLEDGE_FOR_ANYBODY, ENTRIES_ON_BOTH_SIDES_OF_NEXT


def walks_to_find(name: str, first: int, most: int) -> tuple[int | None, str]:
    """How many walks a planted bug takes to be found, and as what; None when so many do not find it."""
    with planted(name):
        report = walks(first, most, wrong_max=1, kind=KINDS.get(name.partition(":")[0], Kind.PLAIN))
    if not report.wrong:
        return None, ""
    ((_, told),) = report.wrong.items()
    return report.walks, told.splitlines()[-1]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Everything is as always, but for one bug."""
    with ExitStack() as stack:
        for where, attribute, what in PLANTED[name]:
            stack.enter_context(patch.object(where, attribute, what))
        yield


def _first_attempts(self: GroupWindow) -> GroupWindow:
    copied = _copy(self)
    for run in list(copied.others):
        copied.others.take(run.first, run.end, (run.state,))
        copied.others.add(run._replace(attempt=1))
    return copied


def _count_the_uncounted(self: GroupWindow, entry: PullEntry, now_ms: int | None) -> int:
    return _apply(self, entry._replace(op=PullOp.NACK) if entry.op is PullOp.RETURNED else entry, now_ms)


def _forget_what_was_given_back(self: GroupWindow) -> GroupWindow:
    copied = _copy(self)
    copied.handles.take(0, 1 << 63, GIVEN_BACK)
    return copied


def _live_for_ever(lives: Sequence[Life]) -> dict[int, tuple[int, int]]:
    return {life.epoch: (0, 1 << 62) for life in lives}


def _lease_a_minute(self: GroupWindow, now_ms: int) -> None:
    for run in list(self.held()):
        self.extend(run.first, run.end, run.incarnation, now_ms + 60_000)


def _forget_what_pauses(self: GroupWindow) -> GroupWindow:
    copied = _copy(self)
    copied.others.take(0, 1 << 63, (Stage.PAUSED,))
    return copied


def _forget_what_is_quarantined(self: GroupWindow) -> GroupWindow:
    copied = _copy(self)
    copied.others.take(0, 1 << 63, (Stage.UNREADABLE,))
    return copied


def _forget_what_leaves(self: GroupWindow) -> GroupWindow:
    copied = _copy(self)
    copied.leaving.clear()
    return copied


def _handles_are_of_the_group(group: Group, handles: Handles) -> list[tuple[Group, Handles]]:
    return [(group, handles)]


def _nothing_is_older(self: GroupWindow) -> int:
    return self.next


def _nacks_acknowledge(batch: Batch) -> list[PullEntry]:
    entries = pull.decode_entries(batch)
    return [entry._replace(op=PullOp.ACK) if entry.op is PullOp.NACK else entry for entry in entries]


def _forget_the_order(self: Group) -> GroupCopy:
    return _copy_group(self)._replace(ordered=False)


def _knows_no_life(self: Kept) -> list[Life]:
    return []


KINDS = {"Q8": Kind.ORDERED, "Q10": Kind.BOUNDED}  # Of the walks that find a bug of these rules; the others are plain.

_copy_group = Group.copy
_copy, _apply = GroupWindow.copy, GroupWindow.apply

PLANTED: Bugs = {
    "Q5: an entry has messages on both sides of next, and a replay takes them for old ones": (
        ENTRIES_ON_BOTH_SIDES_OF_NEXT
    ),
    "Q1: an acknowledgement of what another one holds counts": [ACKNOWLEDGE_FOR_ANYBODY],
    "Q1: the pull log is not synced": port_bugs.unsynced("/realtime/pull/"),
    "Q4: a checkpoint forgets attempts": [Patch(GroupWindow, "copy", _first_attempts)],
    "Q4: what no handler was given is an attempt": [Patch(GroupWindow, "apply", _count_the_uncounted)],
    "Q5: a checkpoint forgets what was given back": [Patch(GroupWindow, "copy", _forget_what_was_given_back)],
    "Q5: a pull that was lost counts as acknowledged": [Patch(words, "_kept_of", _live_for_ever)],
    "Q5: a life knows nothing of the ones before the checkpoint": [Patch(Kept, "lives", _knows_no_life)],
    "Q1: leases are a minute after a restart": [Patch(GroupWindow, "lease_all", _lease_a_minute)],
    "Q3: a checkpoint forgets what pauses": [Patch(GroupWindow, "copy", _forget_what_pauses)],
    "L5: a checkpoint forgets what is quarantined": [Patch(GroupWindow, "copy", _forget_what_is_quarantined)],
    "Q2: a batch is sent before its decision is durable": [
        Patch(
            Retries,
            "_keep",
            changed(Retries._keep, "self._count += 1", "self._count += 1; self._durable.add(decision.key)"),
        )
    ],
    "Q2: numbers of an earlier life are used again": [
        Patch(Retries, "__init__", changed(Retries.__init__, "secrets.randbits(64) | 1", "1"))
    ],
    "Q2: a checkpoint forgets what lives on": [Patch(GroupWindow, "copy", _forget_what_leaves)],
    "Q2: what the delay server has taken is offered again": [
        Patch(
            PullReplay,
            "_hear",
            changed(
                PullReplay._hear,
                "group.changing().leave(GroupDecision(*record[:-1], decode_rows(record.rows)))",
                "pass",
            ),
        )
    ],
    "Q2: an acknowledgement of what came again counts for the group": [
        Patch(pulls, "by_source", _handles_are_of_the_group)
    ],
    "Q6: who pulled before a move may acknowledge after it": [
        Patch(GroupWindow, "move", changed(GroupWindow.move, "(0, _NO_MESSAGE, (HELD,))", "(0, 0, (HELD,))"))
    ],
    "Q6: a start does not hear of moves": [
        Patch(PullReplay, "_hear", changed(PullReplay._hear, "group.move(record.next)", "pass"))
    ],
    "Q6: a move leaves what was to be offered again": [
        Patch(GroupWindow, "move", changed(GroupWindow.move, "self.others, self._turns =", "_, _ ="))
    ],
    "Q3: retention looks at new messages only": [Patch(GroupWindow, "oldest", property(_nothing_is_older))],
    "Q3: a schedule is finished while a consumer has its message": [
        Patch(UnfinishedSearch, "_open", changed(UnfinishedSearch._open, "in window.held()", "in ()"))
    ],
    "Q3: a schedule is finished while its message waits to come again": [
        Patch(UnfinishedSearch, "_open", changed(UnfinishedSearch._open, "in window.leaving.values()", "in ()"))
    ],
    "Q3: a schedule is finished while its message has come again": [
        Patch(
            UnfinishedSearch, "_ranges", changed(UnfinishedSearch._ranges, "for group_id in ids", "for group_id in ()")
        )
    ],
    "Q3: a schedule is finished while its message was given back": [
        Patch(UnfinishedSearch, "_open", changed(UnfinishedSearch._open, "in window.others", "in ()"))
    ],
    "Q3: a schedule is finished while its message is new": [
        Patch(UnfinishedSearch, "_open", changed(UnfinishedSearch._open, "if window.next <", "if window.next > 1 <"))
    ],
    "Q3: a schedule is unfinished while its dead letter leaves": [
        Patch(UnfinishedSearch, "_open", changed(UnfinishedSearch._open, "if not row.reason", "if True"))
    ],
    "Q3: a schedule is unfinished while its message is kept": [
        Patch(UnfinishedSearch, "_open", changed(UnfinishedSearch._open, "max(window.next, ", "min(window.next, "))
    ],
    "Q1: a replay takes what was given back for acknowledged": [Patch(recovery, "decode_entries", _nacks_acknowledge)],
    "Q8: an answer has several messages of one key": [
        Patch(Order, "_add", changed(Order._add, "if queue[0] != sequence:", "if queue[0] in self._out:"))
    ],
    "Q8: what is given back lets the next one go": [
        Patch(
            Order,
            "moved",
            changed(Order.moved, "attempt > 1", "self._settle(first, end) or attempt > 1"),
        )
    ],
    "Q8: what was gone by is not offered after a start": [
        Patch(
            GroupWindow,
            "_pulled",
            changed(GroupWindow._pulled, "if first > self.next:", "if first > self.next and now_ms is not None:"),
        )
    ],
    "Q8: a group that is loaded again forgets what pauses": [
        Patch(
            GroupWindow,
            "begin_order",
            changed(GroupWindow.begin_order, "for run in self.others.of(Stage.PAUSED)", "for run in ()"),
        )
    ],
    "Q8: a group that is loaded again takes what is held for settled": [
        Patch(GroupWindow, "begin_order", changed(GroupWindow.begin_order, "for run in self.held()", "for run in ()"))
    ],
    "Q8: a checkpoint forgets that a group keeps an order": [Patch(Group, "copy", _forget_the_order)],
    "Q8: a start does not hear that a group keeps an order": [
        Patch(PullReplay, "_hear", changed(PullReplay._hear, "group.keep_order()", "pass"))
    ],
    "Q8: an acknowledgement serves nobody": [
        Patch(
            Pulls,
            "acknowledge",
            changed(Pulls.acknowledge, "op != PullOp.ACK or group.window.order is not None", "op != PullOp.ACK"),
        )
    ],
    "Q8: a move leaves what was known of the order": [
        Patch(GroupWindow, "move", changed(GroupWindow.move, "self.forget_order()", "pass"))
    ],
    "Q8: what is put off comes at once": [
        Patch(GroupWindow, "apply", changed(GroupWindow.apply, "entry.lease_ms or pause_after", "pause_after"))
    ],
    "Q10: what came again does not count": [
        Patch(Group, "room", changed(vars(Group)["room"].fget, "self.child.outstanding", "0"))
    ],
    "Q10: an answer has more messages than there is room for": [
        Patch(Pulls, "_parts_of", changed(Pulls._parts_of, "if front.in_flight_max:", "if False:"))
    ],
    "Q10: an acknowledgement serves nobody": [
        Patch(Pulls, "acknowledge", changed(Pulls.acknowledge, " or group.in_flight_max", ""))
    ],
}
