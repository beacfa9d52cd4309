"""Bugs to plant in the realtime server that more than one kind of test must find: the simulation, and groups' walks."""

from __future__ import annotations

from realtime.groups import Group
from realtime.pulls import Pulls
from tests.worlds.patches import Patch, changed

ACKNOWLEDGE_FOR_ANYBODY = Patch(
    Pulls,
    "acknowledge",
    changed(
        Pulls.acknowledge,
        "in _merged(handles):",
        "in [(run.incarnation, run.start, run.end)"
        " for _, first, last in _merged(handles) for run in group.held.within(first, last)]:",
    ),
)
ENTRIES_ON_BOTH_SIDES_OF_NEXT = [
    Patch(Pulls, "_answer", changed(Pulls._answer, "and part.consume_first != plan.group.next", "")),
    Patch(
        Group,
        "_pulled",
        changed(Group._pulled, "max(self.next, end)", "self.next if entry.consume_first < self.next else end"),
    ),
]
