"""Answers: they turn what the core knows into heads and bodies of frames (docs/protocol.md)."""

from collections.abc import Iterable, Iterator, Sequence

from delayd.batch.columns import Buffer
from delayd.batch.names import is_reserved
from delayd.errors import DamagedData, RetryLater, Shortage
from delayd.wire import consuming
from delayd.wire.consuming import GroupInfo, SubjectInfo
from delayd.wire.frame import Head
from delayd.wire.heads import WINDOW_ROW_BYTES

from .filters import OPEN
from .groups import Group
from .handoff import InDoubt
from .index import Index, Subject
from .pulls import Pulls
from .stored import StoredBatches
from .window import Stage

WINDOW_BODY_BYTES = 8 << 20  # One frame of a window's answer has no more; a batch of 65,536 rows needs 1.5 MiB.
WINDOW_BATCHES = 4_096  # Seven numbers for each: a third of the room in a head.
SUBJECTS_MAX = 100  # Rows of one listing of subjects: each may cost some reads of its consume log.
AGED_MAX = 100  # The same of groups with the age of their oldest message.
LIST_MAX = 1_000  # Rows of one listing, some milliseconds of work; the next listing goes on behind its last name.


def window_frames(
    log_id: int, end: int, highest_sequence: int, decided_offset: int, held: Sequence[InDoubt]
) -> Iterator[tuple[Head, list[Buffer], bool]]:
    """The frames of a window's answer: head, body, and whether more follow; one frame when the window is empty."""
    at = 0
    while True:
        rows: list[list[int]] = []
        body: list[Buffer] = []
        size = 0
        while at < len(held) and len(rows) < WINDOW_BATCHES and size < WINDOW_BODY_BYTES:
            one = held[at]
            rows.append(
                [one.epoch, one.batch_id, one.hour, one.offset, one.appended_at_ms, one.claimed_at_ms, one.rows]
            )
            body.extend((one.sequences, one.deliver_at_ms, one.hashes))
            size += WINDOW_ROW_BYTES * one.rows
            at += 1
        more = at < len(held)
        head: Head = {"log_id": log_id, "end_offset": end, "highest_sequence": highest_sequence}
        head |= {"decided_offset": decided_offset, "batches": [*rows]}
        yield head, body, more
        if not more:
            return


def groups_head(groups: Iterable[Group], limit: int) -> Head:
    """How far each group is, up to as many groups as one head holds, and whether there are more."""
    return consuming.groups_head(map(_group_info, groups), min(limit, LIST_MAX))


def aged_groups_head(index: Index, stored: StoredBatches, now_ms: int, groups: Iterable[Group], limit: int) -> Head:
    """The same, with the age of each group's oldest message that is not acknowledged."""

    def info(group: Group) -> GroupInfo:
        oldest_ms = _oldest_of_group_ms(index, stored, group)
        return _group_info(group)._replace(oldest_ms_ago=None if oldest_ms is None else max(0, now_ms - oldest_ms))

    return consuming.groups_head(map(info, groups), min(limit, AGED_MAX))


def _oldest_of_group_ms(index: Index, stored: StoredBatches, group: Group) -> int | None:
    """When the oldest message that a group has not acknowledged was handed over; None when there is none, or it can't
    be read.
    """
    oldest = group.oldest
    if oldest == group.subject.end:
        return None
    if group.oldest_at[0] != oldest:
        try:
            group.oldest_at = (oldest, stored.claimed_at_ms(index.locate(group.subject, oldest).offset))
        except (DamagedData, Shortage, RetryLater):
            return None
    return group.oldest_at[1]


def _group_info(group: Group) -> GroupInfo:
    """A group together with its child, whose messages all came back."""
    both = [group] if group.child is None else [group, group.child]
    came_again = 0 if group.child is None else group.child.subject.end - group.child.next
    return GroupInfo(
        subject=group.subject.name,
        group=group.name,
        end=group.subject.end,
        next=group.next,
        outstanding=sum([each.outstanding for each in both]),
        redelivering=came_again + sum([_waiting(each, Stage.OFFERED) + _waiting(each, Stage.PAUSED) for each in both]),
        quarantined=sum([_waiting(each, Stage.UNREADABLE) for each in both]),
        oldest_unacked=group.oldest,
        group_id=group.group_id,
        leaving=sum([decision.messages for each in both for decision in each.window.leaving.values()]),
        paused=group.held_back,
        ephemeral=group.ephemeral,
        filter="" if group.filter is OPEN else str(group.filter),
        ordered=group.order is not None,
        exclusive=group.lead is not None,
        standbys=len(group.standby),
        in_flight_max=group.in_flight_max,
        oldest_ms_ago=None,
    )


def _waiting(group: Group, state: Stage) -> int:
    return group.window.others.messages[state]


def subjects_head(
    index: Index, stored: StoredBatches, pulls: Pulls, now_ms: int, prefix: str, after: str, limit: int
) -> Head:
    """Subjects by name, and whether there are more."""

    def info(subject: Subject) -> SubjectInfo:
        first = _first(index, subject)
        oldest_ms = _oldest_ms(index, stored, subject, first)
        return SubjectInfo(
            name=subject.name,
            messages=subject.end - first,
            first=first,
            end=subject.end,
            quarantined=pulls.quarantine.rows_of(subject),
            groups=len(pulls.roster.of(subject.name)),
            oldest_ms_ago=None if oldest_ms is None else max(0, now_ms - oldest_ms),
        )

    # What comes again counts with the group that it belongs to.
    own = (subject for subject in index.listed(prefix, after) if not is_reserved(subject.name))
    return consuming.subjects_head(map(info, own), min(limit, SUBJECTS_MAX))


def _first(index: Index, subject: Subject) -> int:
    """The first kept message; while the consume log is being rebuilt, the last answer."""
    try:
        return index.first(subject)
    except RetryLater:
        return min(subject.kept_from[1], subject.end)


def _oldest_ms(index: Index, stored: StoredBatches, subject: Subject, first: int) -> int | None:
    """When the first kept message was claimed; None when there is no message, or it can't be read."""
    if first == subject.end:
        return None
    if subject.oldest[0] != first:
        try:
            subject.oldest = (first, stored.claimed_at_ms(index.locate(subject, first).offset))
        except (DamagedData, Shortage, RetryLater):
            return None
    return subject.oldest[1]
