"""Leads: which consumer of an exclusive group gets its messages (rule Q9, docs/consuming.md, One at a time).

The first one that asks leads. The others stand by: their PULLs wait, and get nothing. When the lead's connection ends,
or says nothing for the window, the one that stands by longest takes over: what the old lead held counts as if its lease
had ended, and it is *fenced*: what it says of these messages later is refused by that name.

A consumer that comes back on another connection names the incarnations that it had before. It is the same lead then,
and keeps what it holds. Two ends of a connection say nothing about the consumer itself:

1. This server was started again. What survived of its pulls belongs to the consumer that has it, for a whole lease.
   Nobody else leads while it is held. An example: A holds message 7 under a lease of 5 minutes, and B stands by. The
   server is killed and back after 2 s. B asks first, and stands by. A acknowledges 7 after 14 s, on a new connection:
   nothing is held now, so B leads.
2. This server stood still for so long that clients gave it up. A lead that was not heard since is *away*: it has its
   window, from the end of its connection on, to come back.

Invariant: no answer has a message of the group while another consumer than its own holds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delayd.errors import ExclusiveConflict, RetryLater
from delayd.machine.clock import Clock

from .handoff import Peer
from .polls import RETRY_MS, Claim
from .words import SECRET_BITS

if TYPE_CHECKING:
    from .group_window import StateRun
    from .groups import Group
    from .polls import Waiting

FENCED_MAX = 64  # Of each group the newest incarnations are remembered, to name the reason.
# A client waits for so long for the first answer on a connection, and longer for any other, before it gives it up.
PATIENCE_MS = 5_000


@dataclass(slots=True, eq=False)
class Lead:
    """The consumer that leads a group."""

    peer: Peer
    incarnation: int
    window_ms: int
    heard_ms: int  # When its connection was heard last, monotonic.
    heard_since: bool = True  # Whether it was heard since this server stood still for longer than clients wait.


class Leads:
    """The leads of all groups; belongs to the loop."""

    def __init__(
        self,
        clock: Clock,
        life: int,
        lapse: Callable[[Group, frozenset[int]], None],
        begin: Callable[[Waiting], None],
    ) -> None:
        self.of_peer: dict[Peer, dict[Group, Lead]] = {}
        self.due_ms: int | None = None  # When a lead may have been silent for its window, monotonic.
        self._clock = clock
        self._lapse = lapse  # Ends the leases of a group's messages, but for those of some incarnations.
        self._begin = begin  # Serves a PULL that stood by.
        self._standing: dict[Group, None] = {}  # Groups for which somebody stands by.
        self._away: dict[Group, Lead] = {}  # Leads whose connection has ended, though they may live.
        self._life = life

    def admits(self, waiting: Waiting, group: Group) -> bool:
        """Whether a PULL of a group with a lead, or that asks to lead, is served; if not, it stands by.

        Raises:
            ExclusiveConflict: the group is shared by others, or is not to be shared.
            RetryLater: the disk is full.
        """
        if not waiting.window_ms:
            self.check_shared(group)
            return True
        lead = self._present(group)
        if lead is not None and lead.peer is waiting.peer:
            lead.window_ms = waiting.window_ms
            return True
        if lead is None and group.waiting:
            raise _conflict(group, "is shared by consumers that wait; close them, or name another group")
        if lead is None and group.subscriptions:
            raise _conflict(group, "is shared by consumers of several subjects; close them, or name another group")
        if self._may_lead(waiting.claim, group):
            self._lead(waiting.claim, group)
            return True
        group.standby[waiting] = None
        self._standing[group] = None
        if lead is not None:
            self._look_at(lead)
        else:
            self.look_soon(group)
        return False

    def came_back(self, claim: Claim, group: Group) -> None:
        """A consumer has another connection, and works on what it has pulled on an earlier one. It leads again, unless
        another one does.

        Raises:
            RetryLater: the disk is full.
        """
        lead = self._present(group)
        is_shared = lead is None and (group.waiting or group.subscriptions)
        if not is_shared and (lead is None or lead.peer is not claim.peer) and self._may_lead(claim, group):
            self._lead(claim, group)

    def check_shared(self, group: Group) -> None:
        """Refuse who would share a group that somebody leads, with ExclusiveConflict."""
        if self._present(group) is not None or group.standby:
            raise _conflict(group, "has an exclusive consumer; say exclusive, too, or name another group")

    def look_soon(self, group: Group) -> None:
        """Messages of a group are not held any more: who stands by may lead, when nobody does."""
        if group.standby and group.lead is None:
            self._set_due(self._clock.monotonic_ms())

    def heard(self, peer: Peer) -> None:
        """The connection of a lead has sent something."""
        now_ms = self._clock.monotonic_ms()
        for lead in self.of_peer[peer].values():
            lead.heard_ms, lead.heard_since = now_ms, True

    def stood_still(self, ms: int) -> None:
        """No lead could say anything for so long: this does not count as silence."""
        for lead in self._leads():
            lead.heard_ms += ms

    def unheard(self, ms: int) -> None:
        """This server stood still for so long, and clients may have given up connections because of that."""
        self.stood_still(ms)
        if ms >= PATIENCE_MS:
            for lead in self._leads():
                lead.heard_since = False

    def disconnected(self, peer: Peer) -> None:
        """The connection of a lead has ended: who stands by takes over."""
        for group, lead in self.of_peer.pop(peer, {}).items():
            if group.lead is not lead:
                continue
            if lead.heard_since:
                self._end(group, lead)
                self._hand_over(group)
            else:
                lead.heard_ms = self._clock.monotonic_ms()
                self._away[group] = lead
                if group.standby:
                    self._look_at(lead)

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
        if first is None or self._is_another_s(group, first.claim.own):
            return
        try:
            self._lead(first.claim, group)
        except RetryLater:
            self._set_due(self._clock.monotonic_ms() + RETRY_MS)
            return
        # The others ask again within half of the window, and look at this lead then.
        for waiting in [waiting for waiting in group.standby if waiting.peer is first.peer]:
            del group.standby[waiting]
            self._begin(waiting)

    def _may_lead(self, claim: Claim, group: Group) -> bool:
        """Whether a consumer may lead a group now that it does not lead on this connection."""
        lead = group.lead
        if lead is not None:
            # One that stands by takes over from a silent lead, in order of arrival.
            return lead.incarnation in claim.own or (not group.standby and self._is_silent(lead))
        if self._is_another_s(group, claim.own):
            return False
        return not group.standby or any(run.incarnation in claim.own for run in _held(group))

    def _is_another_s(self, group: Group, own: frozenset[int]) -> bool:
        """Whether another consumer than that of these incarnations has messages that it pulled in an earlier life of
        this server.
        """
        return any(run.incarnation >> SECRET_BITS != self._life and run.incarnation not in own for run in _held(group))

    def _present(self, group: Group) -> Lead | None:
        """The lead of a group; one that was away for its whole window is none."""
        lead = self._away.get(group)
        if lead is not None and self._is_silent(lead):
            self._end(group, lead)
        return group.lead

    def _end(self, group: Group, lead: Lead) -> None:
        self._remember(group, lead.incarnation)
        self._leave(group, lead)

    def _leads(self) -> Iterator[Lead]:
        for of_peer in self.of_peer.values():
            yield from of_peer.values()
        yield from self._away.values()

    def _lead(self, claim: Claim, group: Group) -> None:
        self._lapse(group, claim.own)
        if group.lead is not None:
            self._end(group, group.lead)
        # Who came back on another connection keeps what it holds.
        for incarnation in claim.own:
            group.fenced.pop(incarnation, None)
        lead = Lead(claim.peer, claim.incarnation, claim.window_ms, self._clock.monotonic_ms())
        group.lead = lead
        self.of_peer.setdefault(claim.peer, {})[group] = lead

    def _leave(self, group: Group, lead: Lead) -> None:
        group.lead = None
        self._away.pop(group, None)
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


def _held(group: Group) -> Iterator[StateRun]:
    """What consumers of a group hold, also of what came to it again."""
    yield from group.window.held()
    if group.child is not None:
        yield from group.child.window.held()


def _conflict(group: Group, what: str) -> ExclusiveConflict:
    subject, name = group.names
    return ExclusiveConflict(f"group {name} of {subject} {what}")
