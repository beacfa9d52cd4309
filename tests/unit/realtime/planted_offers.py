"""Bugs in what a realtime server offers before its fsync, which its deaths must show (rule L2)."""

from __future__ import annotations

from collections.abc import Callable

from realtime import recovery
from realtime.commit import Commit, GroupCommit, PullCommit
from realtime.core import Core
from realtime.pulls import Pulls
from realtime.recovery import PullReplay
from realtime.subject_index import Index
from tests.worlds.patches import Bugs, Patch, changed


def _wait_for_the_pull_log_alone(self: PullCommit, group: list[tuple[int, Callable[[], None]]], written: None) -> None:
    for _, callback in group:
        callback()


def _answer_at_once(self: GroupCommit, group: Commit) -> None:
    _tell_written(self, group)
    self.on_durable(group)


def _count_at_once(self: Core) -> None:
    log, self._pull_log = self._pull_log, _WaitsForNothing()  # type: ignore[assignment]
    _go_on_copying(self)
    self._pull_log = log


class _WaitsForNothing:
    def when_durable(self, callback: Callable[[], None]) -> None:
        callback()


def _nothing_is_behind(replay: PullReplay, index: Index, unread_from: int | None) -> dict[int, int]:
    return {}


_go_on_copying = Core._go_on_copying
_tell_written = GroupCommit._tell_written

PLANTED: Bugs = {
    "L2: an acknowledgement waits for the pull log alone": [
        Patch(PullCommit, "_durable", _wait_for_the_pull_log_alone)
    ],
    "L2: a delay server is answered for what is offered": [
        Patch(GroupCommit, "_tell_written", _answer_at_once),
        Patch(GroupCommit, "_durable", changed(GroupCommit._durable, "self.on_durable(group)", "pass")),
    ],
    "L2: a checkpoint counts what is written and waits for nothing": [Patch(Core, "_go_on_copying", _count_at_once)],
    "L2: a checkpoint counts what is written, and its window what is durable": [
        Patch(
            Core,
            "_written",
            changed(Core._written, "origin.remember(batch, part, offset, group_offset, commit.appended_at_ms)", "pass"),
        ),
        Patch(
            Core,
            "_durable",
            changed(
                Core._durable,
                "frame = landed.frame",
                "frame = landed.frame\n"
                "        for each in zip(frame.batches, frame.parts, landed.offsets, landed.group_offsets):\n"
                "            frame.origin.remember(*each, commit.appended_at_ms)",
            ),
        ),
    ],
    "L2: a start drops no pull behind the message log": [Patch(recovery, "groups_behind", _nothing_is_behind)],
    "L2: a start that drops pulls does not say so": [
        Patch(recovery, "set_back", changed(recovery.set_back, "pull_log.append(", "(lambda *_: None)("))
    ],
    "L2: a start takes messages before it is durable which pulls it dropped": [
        Patch(recovery, "set_back", changed(recovery.set_back, "    pull_log.flush()\n", ""))
    ],
    "L2: handles of dropped pulls count as acknowledged": [
        Patch(recovery, "set_back", changed(recovery.set_back, "own.append(", "len("))
    ],
    "L2: an ordered group gets what is not durable": [
        Patch(Pulls, "_give", changed(Pulls._give, "group.window.order is not None", "False"))
    ],
}
