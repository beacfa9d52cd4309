"""Operators: their requests about files and messages that can't be read, and about groups (docs/protocol.md, 6, 7 and
45, 53, 54).

Invariant: an operator's decision is durable in the pull log before it is answered, and it is logged.
"""

import logging
from collections.abc import Iterator
from functools import partial

from delayd.errors import BadArgument
from delayd.machine.operating import Wait, WaitKind
from delayd.wire.consuming import read_position
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import need_bool, need_int, need_str
from delayd.wire.status import ENTRIES_MAX, Decision, Quarantined, decided_head, list_head, read_decision

from .group_records import GroupRecords
from .groups import Group, LostGroup
from .handoff import Peer
from .rebuild import Rebuilder
from .unread import PULL, WINDOW, LogFiles, Unread
from .unreadable import Bad, UnreadableMessages

log = logging.getLogger(__name__)


class Operators:
    """Reads the requests of operators."""

    def __init__(
        self,
        groups: GroupRecords,
        quarantine: UnreadableMessages,
        rebuilder: Rebuilder,
        files: LogFiles,
        unread: Unread,
    ) -> None:
        self._groups = groups
        self._quarantine = quarantine
        self._rebuilder = rebuilder
        self._files = files
        self._unread = unread

    def list(self, peer: Peer, frame: Frame) -> None:
        """List the quarantined files and messages."""
        after, limit = need_str(frame.head, "after"), need_int(frame.head, "limit")
        peer.answer(frame.request_id, list_head(self._entries(), after, min(limit, ENTRIES_MAX)))

    def mend(self, peer: Peer, frame: Frame) -> None:
        """Take an entry that can be read again, let a group begin anew, or give an entry up for good."""
        id_, decision = read_decision(frame.head, self._entries())
        if decision is Decision.GIVE_UP:
            log.warning("operator drops=%s", id_)
            self._give_up(peer, frame, id_)
        else:
            log.warning("operator releases=%s", id_)
            self._release(peer, frame, id_)

    def _release(self, peer: Peer, frame: Frame, id_: str) -> None:
        lost, bad = self._lost(id_), self._quarantine.find(id_)
        if lost is not None:
            answer = decided_head(id_, True, "it begins at the earliest message that is kept")
            self._groups.begin_anew(lost, partial(peer.answer, frame.request_id, answer))
        elif bad is not None:
            self._files.look_at_messages(lambda whole, told: self._try_again(peer, frame, bad))
        elif id_ in (PULL, WINDOW):
            self._unread.decide(id_, partial(_tell, peer, frame, id_), drops=False)
        else:
            self._files.release(id_, partial(_tell, peer, frame, id_))

    def _try_again(self, peer: Peer, frame: Frame, bad: Bad) -> None:
        done = self._quarantine.release(bad)
        message = "it is delivered again" if done else bad.damage.message
        peer.answer(frame.request_id, decided_head(bad.id, done, message))

    def _give_up(self, peer: Peer, frame: Frame, id_: str) -> None:
        answer = partial(peer.answer, frame.request_id, decided_head(id_, True, "it was given up"))
        lost, bad = self._lost(id_), self._quarantine.find(id_)
        if lost is not None:
            self._groups.delete(lost, answer)
        elif bad is not None:
            self._groups.give_up(bad, answer)
        else:
            self._unread.decide(id_, partial(_tell, peer, frame, id_), drops=True)

    def delete_group(self, peer: Peer, frame: Frame) -> None:
        """Delete a group; no other group gets the messages that it had not acknowledged."""
        subject, name = need_str(frame.head, "subject"), need_str(frame.head, "group")
        roster = self._groups.roster
        group = roster.lost.get((subject, name)) or self._group(frame)
        log.warning("operator deletes=group subject=%s group=%s id=%d", subject, name, group.group_id)
        self._groups.delete(group, partial(peer.answer, frame.request_id, {"subject": subject, "group": name}))

    def move_group(self, peer: Peer, frame: Frame) -> None:
        """Let a group go on at another message: earlier ones come again, or later ones come at once."""
        group, head = self._group(frame), frame.head
        to = self._groups.find(group, read_position(head, "to"))
        dropped = group.outstanding + sum(group.window.others.messages)
        answer: Head = {"subject": group.subject.name, "group": group.name, "before": group.next, "next": to}
        answer["dropped"] = dropped
        if "dry_run" in head and need_bool(head, "dry_run"):
            peer.answer(frame.request_id, answer)
            return
        log.warning("operator moves=group subject=%s group=%s from=%d to=%d", *group.names, group.next, to)
        self._groups.move(group, to, partial(peer.answer, frame.request_id, answer))

    def pause_group(self, peer: Peer, frame: Frame) -> None:
        """Give nobody messages of a group until an operator says so."""
        group, paused = self._group(frame), need_bool(frame.head, "paused")
        if paused:
            log.warning("operator pauses=group subject=%s group=%s", *group.names)
        else:
            log.warning("operator resumes=group subject=%s group=%s", *group.names)
        answer: Head = {"subject": group.subject.name, "group": group.name, "paused": paused}
        self._groups.hold_back(group, paused, partial(peer.answer, frame.request_id, answer))

    def _group(self, frame: Frame) -> Group:
        subject, name = need_str(frame.head, "subject"), need_str(frame.head, "group")
        group = self._groups.roster.groups.get((subject, name))
        if group is None or group.parent is not None:
            raise BadArgument(f"there is no group {name} of {subject}")
        return group

    def waits(self, log_id: int) -> Iterator[Wait]:
        """List the entries of this server, each of which waits for a file or an operator."""
        for entry in self._entries():
            if entry.costs:
                yield entry.wait(log_id, WaitKind.PULLS_UNREAD if entry.id == PULL else None)

    def _entries(self) -> Iterator[Quarantined]:
        yield from self._files
        yield from self._unread
        yield from self._quarantine.listing()
        for subject in self._rebuilder.subjects:
            damage = subject.damage
            if damage is not None:
                what = (damage.path, damage.position, f"{damage.what}; {REBUILT}", 0, 0)
                yield Quarantined(f"consume/{subject.name}", *what, subject=subject.name)
        for lost in self._groups.roster.all_lost:
            subject_name = None if lost.names is None else lost.names[0]
            what = (lost.damage.path, lost.damage.position, f"{lost.damage.what}; {lost.names}", 0, 0)
            costs = {Decision.GIVE_UP: IS_GONE}
            if lost.names is not None:
                costs = {Decision.RELEASE: BEGINS_ANEW, **costs}
            yield Quarantined(lost.id, *what, subject=subject_name, costs=costs)

    def _lost(self, id_: str) -> LostGroup | None:
        return next((lost for lost in self._groups.roster.all_lost if lost.id == id_), None)


def _tell(peer: Peer, frame: Frame, id_: str, done: bool, what: str) -> None:
    peer.answer(frame.request_id, decided_head(id_, done, what))


REBUILT = "it is being rebuilt from the message log, by itself"
BEGINS_ANEW = "the group begins at the earliest message that is kept: what it had acknowledged comes again"
IS_GONE = "the group is deleted: what it had not acknowledged is never delivered to it"
