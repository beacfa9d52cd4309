"""Operators: their requests about files and messages that can't be read, and about groups (docs/protocol.md, 6 to 8 and
45, 53, 54).

Invariant: an operator's decision is durable in the pull log before it is answered, and it is logged.
"""

import logging
from collections.abc import Iterator
from functools import partial

from delayd.errors import BadArgument
from delayd.waits import Wait, WaitKind
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import (
    need_bool,
    need_int,
    need_str,
)
from delayd.wire.positions import read_position
from delayd.wire.quarantine import PAGE_MAX, Quarantined, decided_head, list_head

from .group_records import GroupRecords
from .groups import Group
from .kept import LostGroup
from .log_files import WINDOW, LogFiles
from .peer import Peer
from .quarantine import Bad, Quarantine
from .rebuild import Rebuilder
from .unread_pulls import ID as PULL

log = logging.getLogger(__name__)


class Operators:
    """Reads the requests of operators."""

    def __init__(self, groups: GroupRecords, quarantine: Quarantine, rebuilder: Rebuilder, files: LogFiles) -> None:
        self._groups = groups
        self._quarantine = quarantine
        self._rebuilder = rebuilder
        self._files = files

    def list(self, peer: Peer, frame: Frame) -> None:
        """List the quarantined files and messages."""
        after, limit = need_str(frame.head, "after"), need_int(frame.head, "limit", 1)
        peer.answer(frame.request_id, list_head(self._entries(), after, min(limit, PAGE_MAX)))

    def release(self, peer: Peer, frame: Frame) -> None:
        """Try an entry again, or let a group begin anew."""
        id_ = need_str(frame.head, "id")
        lost = self._lost(id_)
        if lost is not None and lost.names is not None:
            log.warning("operator releases=%s", id_)
            answer = decided_head(id_, True, "it begins at the earliest message that is kept")
            self._groups.begin_anew(lost, partial(peer.answer, frame.request_id, answer))
            return
        if id_.startswith("consume/"):
            peer.answer(frame.request_id, decided_head(id_, False, "it is being rebuilt from the message log"))
            return
        if id_ in self._files:
            log.warning("operator releases=%s", id_)
            self._files.release(id_, lambda done, told: peer.answer(frame.request_id, decided_head(id_, done, told)))
            return
        bad = self._quarantine.find(id_)
        if bad is None:
            raise _not_found(id_)
        log.warning("operator releases=%s", id_)
        self._files.look_at_messages(lambda whole, told: self._try_again(peer, frame, bad))

    def _try_again(self, peer: Peer, frame: Frame, bad: Bad) -> None:
        done = self._quarantine.release(bad)
        message = "it is delivered again" if done else bad.damage.message
        peer.answer(frame.request_id, decided_head(bad.id, done, message))

    def drop(self, peer: Peer, frame: Frame) -> None:
        """Give an entry up for good."""
        id_ = need_str(frame.head, "id")
        answer = partial(peer.answer, frame.request_id, decided_head(id_, True, "it was given up"))
        if id_ in (WINDOW, PULL) and id_ in self._files:
            log.warning("operator drops=%s", id_)
            drop = self._files.drop_window if id_ == WINDOW else self._files.unread_pulls.drop
            drop(lambda done, told: peer.answer(frame.request_id, decided_head(id_, done, told)))
            return
        lost = self._lost(id_)
        bad = self._quarantine.find(id_)
        if lost is None and bad is None:
            raise _not_found(id_)
        log.warning("operator drops=%s", id_)
        if lost is not None:
            self._groups.delete(lost, answer)
        elif bad is not None:
            self._groups.give_up(bad, answer)

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
        dropped = group.outstanding + group.redeliver.messages + group.paused.messages + group.quarantined.messages
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

    def waits(self) -> Iterator[Wait]:
        """List the entries, each of which waits for a file or an operator."""
        yield from self._files.unread_pulls.waits()
        for entry in self._entries():
            if entry.id != PULL and not entry.id.startswith("consume/"):
                if not entry.id.startswith("group/"):
                    kind = WaitKind.LOG_FILE_SET_ASIDE_OR_DROPPED if entry.drop else WaitKind.LOG_FILE_SET_ASIDE
                else:
                    kind = WaitKind.GROUP_DAMAGED if entry.release else WaitKind.GROUP_WITHOUT_NAME
                yield kind.wait(entry.reason, path=entry.path, id=entry.id, cost=entry.drop)

    def _entries(self) -> Iterator[Quarantined]:
        yield from self._files
        yield from self._quarantine.listing()
        for subject in self._rebuilder.subjects:
            damage = subject.damage
            if damage is not None:
                what = (damage.path, damage.position, damage.what, 0, 0)
                yield Quarantined(f"consume/{subject.name}", *what, subject=subject.name, release=REBUILT)
        for lost in self._groups.roster.all_lost:
            subject_name = None if lost.names is None else lost.names[0]
            what = (lost.damage.path, lost.damage.position, f"{lost.damage.what}; {lost.names}", 0, 0)
            release = BEGINS_ANEW if lost.names is not None else ""
            yield Quarantined(lost.id, *what, subject=subject_name, release=release, drop=IS_GONE)

    def _lost(self, id_: str) -> LostGroup | None:
        return next((lost for lost in self._groups.roster.all_lost if lost.id == id_), None)


REBUILT = "it is being rebuilt from the message log, by itself"
BEGINS_ANEW = "the group begins at the earliest message that is kept: what it had acknowledged comes again"
IS_GONE = "the group is deleted: what it had not acknowledged is never delivered to it"


def _not_found(id_: str) -> BadArgument:
    return BadArgument(f"nothing is quarantined as {id_}; see `delayd quarantine list`")
