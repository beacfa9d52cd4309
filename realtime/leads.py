"""Leads: which consumer of an exclusive group gets its messages (rule Q9, docs/consuming.md, One at a time).

The first one that asks leads. The others stand by: their PULLs wait, and get nothing. When the lead's connection ends,
or says nothing for the window, the one that stands by longest takes over: what the old lead held counts as if its lease
had ended, and it is *fenced*: what it says of these messages later is refused by that name.

Invariant: no answer has a message of the group while another consumer than its own holds one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delayd.clock import Clock
from delayd.errors import ExclusiveConflict, RetryLater

from .peer import Peer
from .roster import RETRY_MS

if TYPE_CHECKING:
    from .groups import Group
    from .polls import Waiting

FENCED_MAX = 64  # Of each group the newest incarnations are remembered, to name the reason.


@dataclass(slots=True, eq=False)
class Lead:
    """The consumer that leads a group."""

    peer: Peer
    incarnation: int
    window_ms: int
    heard_ms: int  # When its connection was heard last, monotonic.


class Leads:
    """The leads of all groups; belongs to the loop."""

    def __init__(
        self, clock: Clock, lapse: Callable[[Group, int, int], None], begin: Callable[[Waiting], None]
    ) -> None:
        self.of_peer: dict[Peer, dict[Group, Lead]] = {}
        self.due_ms: int | None = None  # When a lead may have been silent for its window, monotonic.
        self._clock = clock
        self._lapse = lapse  # Ends the leases of a group's messages, but for those of two incarnations.
        self._begin = begin  # Serves a PULL that stood by.
        self._standing: dict[Group, None] = {}  # Groups for which somebody stands by.

    def admits(self, waiting: Waiting, group: Group) -> bool:
        """Whether a PULL of a group with a lead, or that asks to lead, is served; if not, it stands by.

        Raises:
            ExclusiveConflict: the group is shared by others, or is not to be shared.
            RetryLater: the disk is full.
        """
        lead = group.lead
        if not waiting.window_ms:
            self.check_shared(group)
        if lead is not None and lead.peer is waiting.peer:
            lead.window_ms = waiting.window_ms
            return True
        if lead is None and group.waiting:
            raise _conflict(group, "is shared by consumers that wait; close them, or name another group")
        if lead is None and group.subscriptions:
            raise _conflict(group, "is shared by consumers of several subjects; close them, or name another group")
        if lead is None or (not group.standby and self._is_silent(lead)):
            self._lead(waiting, group)
            return True
        group.standby[waiting] = None
        self._standing[group] = None
        self._look_at(lead)
        return False

    def check_shared(self, group: Group) -> None:
        """Refuse who would share a group that somebody leads, with ExclusiveConflict."""
        if group.lead is not None or group.standby:
            raise _conflict(group, "has an exclusive consumer; say exclusive, too, or name another group")

    def heard(self, peer: Peer) -> None:
        """The connection of a lead has sent something."""
        now_ms = self._clock.monotonic_ms()
        for lead in self.of_peer[peer].values():
            lead.heard_ms = now_ms

    def stood_still(self, ms: int) -> None:
        """No lead could say anything for so long: this does not count as silence."""
        for leads in self.of_peer.values():
            for lead in leads.values():
                lead.heard_ms += ms

    def disconnected(self, peer: Peer) -> None:
        """The connection of a lead has ended: who stands by takes over."""
        for group, lead in self.of_peer.pop(peer, {}).items():
            if group.lead is lead:
                group.lead = None
                self._remember(group, lead.incarnation)
                self._hand_over(group)

    def forget(self, group: Group) -> None:
        """The group is gone."""
        self._standing.pop(group, None)
        if group.lead is not None:
            self._leave(group, group.lead)

    def wake(self) -> None:
        """Let others take over from leads that have been silent for their window."""
        self.due_ms = None
        for group in list(self._standing):
            lead = group.lead
            if not group.standby:
                del self._standing[group]
            elif lead is None or self._is_silent(lead):
                self._hand_over(group)
            else:
                self._look_at(lead)

    def _hand_over(self, group: Group) -> None:
        """Let the one lead that stands by longest, and serve it; the others stand by again."""
        # A connection that has ended takes its PULLs with it, as soon as its end is told.
        first = next((waiting for waiting in group.standby if waiting.peer.is_open), None)
        if first is None:
            return
        try:
            self._lead(first, group)
        except RetryLater:
            self._set_due(self._clock.monotonic_ms() + RETRY_MS)
            return
        # The others ask again within half of the window, and look at this lead then.
        for waiting in [waiting for waiting in group.standby if waiting.peer is first.peer]:
            del group.standby[waiting]
            self._begin(waiting)

    def _lead(self, waiting: Waiting, group: Group) -> None:
        self._lapse(group, waiting.incarnation, waiting.was)
        if group.lead is not None:
            self._remember(group, group.lead.incarnation)
            self._leave(group, group.lead)
        # Who came back on another connection keeps what it holds.
        group.fenced.pop(waiting.was, None)
        lead = Lead(waiting.peer, waiting.incarnation, waiting.window_ms, self._clock.monotonic_ms())
        group.lead = lead
        self.of_peer.setdefault(waiting.peer, {})[group] = lead

    def _leave(self, group: Group, lead: Lead) -> None:
        group.lead = None
        of_peer = self.of_peer.get(lead.peer)
        if of_peer is not None and of_peer.pop(group, None) is not None and not of_peer:
            del self.of_peer[lead.peer]

    def _remember(self, group: Group, incarnation: int) -> None:
        group.fenced[incarnation] = None
        while len(group.fenced) > FENCED_MAX:
            del group.fenced[next(iter(group.fenced))]

    def _is_silent(self, lead: Lead) -> bool:
        return self._clock.monotonic_ms() - lead.heard_ms >= lead.window_ms

    def _look_at(self, lead: Lead) -> None:
        self._set_due(lead.heard_ms + lead.window_ms)

    def _set_due(self, due_ms: int) -> None:
        if self.due_ms is None or due_ms < self.due_ms:
            self.due_ms = due_ms


def _conflict(group: Group, what: str) -> ExclusiveConflict:
    subject, name = group.names
    return ExclusiveConflict(f"group {name} of {subject} {what}")
