"""Bugs to plant in the realtime server that more than one kind of test must find: the simulation, and groups' walks."""

from __future__ import annotations

from realtime import answers, pulls, words
from realtime.group_window import GroupWindow
from tests.worlds.patches import Patch, changed

ACKNOWLEDGE_FOR_ANYBODY = Patch(
    pulls,
    "found",
    changed(
        words.found,
        "in _merged(handles):",
        "in [(run.incarnation, run.first, run.end) for _, first, last in _merged(handles)"
        " for run in group.window.handles.within(first, last) if run.state == Became.HELD]:",
    ),
)
ENTRIES_ON_BOTH_SIDES_OF_NEXT = [
    Patch(pulls, "pulled", changed(answers.pulled, "and part.consume_first != group.next", "")),
    Patch(
        GroupWindow,
        "_pulled",
        changed(GroupWindow._pulled, "max(self.next, end)", "self.next if entry.consume_first < self.next else end"),
    ),
]
