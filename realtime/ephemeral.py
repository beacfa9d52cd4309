"""Ephemeral groups: they end when they have no consumers any more (docs/protocol.md, A group).

A consumer is a connection: from its first PULL or PULL_END that names the group, or with a subscription that has the
group, until the connection ends, however rarely it pulls. A group that has had none for GONE_MS, and of which nobody
holds a message, ends: what it left at the delay servers ends with it (`realtime.farewell`). A start gives each group
this time again.

Invariant: what connections make the server remember here is bounded over all of them (rule B1).
"""

import logging
from collections.abc import Callable

from delayd.errors import RetryLater, SlowDown

from .alarms import Alarms
from .groups import Group
from .peer import Peer
from .roster import RETRY_MS

GONE_MS = 30_000  # As long as a consumer may be away, for example while it connects anew.
LOOK_MS = 5_000  # Between two looks; each costs a microsecond a group.
CONSUMERS_MAX = 131_072  # Pairs of a connection and a group: 0.2 KB each, 26 MiB.

log = logging.getLogger(__name__)


class Ephemeral:
    """The ephemeral groups of a server; ``delete`` ends one."""

    def __init__(self, alarms: Alarms, delete: Callable[[Group], None]) -> None:
        self._clock = alarms.clock
        self._look = alarms.alarm(self._look_at_all)
        self._delete = delete
        self._seen_ms: dict[Group, int] = {}  # When each was last seen with a consumer.
        self._peers: dict[Group, set[Peer]] = {}
        self._groups: dict[Peer, set[Group]] = {}
        self._consumers = 0

    def watch(self, group: Group) -> None:
        """Look after a group from now on."""
        self._seen_ms[group] = self._clock.monotonic_ms()
        if self._look.at_ms is None:
            self._look.after(LOOK_MS)

    def check_room(self) -> None:
        """Refuse a further consumer when there are too many, with SlowDown."""
        if self._consumers >= CONSUMERS_MAX:
            what = f"{self._consumers} consumers have groups that end with their connections"
            raise SlowDown(f"{what}, and there is no room for one more", retry_after_ms=RETRY_MS)

    def came(self, peer: Peer, group: Group) -> None:
        """The connection of a consumer of an ephemeral group, which lives as long as this connection from now on.

        Raises:
            SlowDown: there is no room for one more.
        """
        peers = self._peers.get(group)
        if peers is not None and peer in peers:
            return
        self.check_room()
        self._peers.setdefault(group, set()).add(peer)
        self._groups.setdefault(peer, set()).add(group)
        self._consumers += 1

    def disconnected(self, peer: Peer) -> None:
        """A connection has ended."""
        for group in self._groups.pop(peer, ()):
            self._peers[group].discard(peer)
            self._consumers -= 1
            self._seen_ms[group] = self._clock.monotonic_ms()

    def stood_still(self, ms: int) -> None:
        """No consumer could come for so long: this does not count as time without one."""
        for group in self._seen_ms:
            self._seen_ms[group] += ms

    def forget(self, group: Group) -> None:
        """A group is gone."""
        self._seen_ms.pop(group, None)
        for peer in self._peers.pop(group, ()):
            self._consumers -= 1
            of_peer = self._groups[peer]
            of_peer.discard(group)
            if not of_peer:
                del self._groups[peer]

    def _look_at_all(self) -> None:
        """Delete the groups whose consumers have been gone for long enough."""
        now_ms = self._clock.monotonic_ms()
        for group, seen_ms in list(self._seen_ms.items()):
            if self._has_consumers(group):
                self._seen_ms[group] = now_ms
            # A subscription may have ended right after the last look.
            elif now_ms - seen_ms >= GONE_MS + LOOK_MS:
                self._end(group)
        if self._seen_ms:
            self._look.after(LOOK_MS)

    def _has_consumers(self, group: Group) -> bool:
        child = group.child
        # What is on its way to a delay server could not be ended there.
        both = (group,) if child is None else (group, child)
        holds = any(each.outstanding or each.window.leaving for each in both)
        return bool(self._peers.get(group)) or bool(group.subscriptions) or holds

    def _end(self, group: Group) -> None:
        try:
            self._delete(group)
        except RetryLater:
            return  # The disk is full; the next look tries again.
        log.info("group_ended subject=%s group=%s reason=no_consumers", *group.names)
