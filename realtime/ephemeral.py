"""Ephemeral groups: they end when they have no consumers any more (docs/protocol.md, A group).

A group has consumers while a PULL waits for its messages, a subscription has it, or a consumer holds a message of it
under a lease. When it had none for GONE_MS, it is deleted as an operator would. A start gives each group this time
again.
"""

import logging
from collections.abc import Callable

from delayd.clock import Clock
from delayd.errors import RetryLater

from .groups import Group

GONE_MS = 30_000  # As long as a consumer may be away, for example while it connects anew.
LOOK_MS = 5_000  # Between two looks; each costs a microsecond a group.

log = logging.getLogger(__name__)


class Ephemeral:
    """The ephemeral groups of a server; ``delete`` ends one."""

    def __init__(self, clock: Clock, delete: Callable[[Group], None]) -> None:
        self.due_ms: int | None = None  # When `wake` is next needed, monotonic.
        self._clock = clock
        self._delete = delete
        self._seen_ms: dict[Group, int] = {}  # When each was last seen with a consumer.

    def watch(self, group: Group) -> None:
        """Look after a group from now on."""
        now_ms = self._clock.monotonic_ms()
        self._seen_ms[group] = now_ms
        if self.due_ms is None:
            self.due_ms = now_ms + LOOK_MS

    def stood_still(self, ms: int) -> None:
        """No consumer could come for so long: this does not count as time without one."""
        for group in self._seen_ms:
            self._seen_ms[group] += ms

    def forget(self, group: Group) -> None:
        """A group is gone."""
        self._seen_ms.pop(group, None)

    def wake(self) -> None:
        """Delete the groups whose consumers have been gone for long enough."""
        now_ms = self._clock.monotonic_ms()
        if self.due_ms is None or now_ms < self.due_ms:
            return
        for group, seen_ms in list(self._seen_ms.items()):
            if _has_consumers(group):
                self._seen_ms[group] = now_ms
            elif now_ms - seen_ms >= GONE_MS:
                self._end(group)
        self.due_ms = now_ms + LOOK_MS if self._seen_ms else None

    def _end(self, group: Group) -> None:
        try:
            self._delete(group)
        except RetryLater:
            return  # The disk is full; the next look tries again.
        log.info("group_ended subject=%s group=%s reason=no_consumers", *group.names)


def _has_consumers(group: Group) -> bool:
    child = group.child
    return group.is_awaited or group.outstanding > 0 or (child is not None and child.outstanding > 0)
