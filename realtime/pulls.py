"""Pulls: messages to consumers, their acknowledgements, and leases (rule Q1, docs/formats/pull.md).

A pull's entry is in the pull log before its answer leaves, an acknowledgement is durable before it is answered, and
what is not acknowledged when its lease ends is offered again.
"""

import logging
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from delayd.clock import Clock
from delayd.errors import BadArgument, DelaydError, RetryLater, ServerStopped
from delayd.log.control import Record
from delayd.log.pull import COVERED_MAX, PullEntry, PullOp
from delayd.wire.frame import Head

from .alarms import Alarms
from .groups import Group, Pull, Waiting
from .index import Index, Subject
from .parts import Part, Parts
from .peer import Peer
from .pull_commit import PullCommit
from .quarantine import Quarantine
from .ranges import Ranges
from .stored import StoredBatches

STALE_RUNS_MAX = 16_384  # Of one answer; with the handles of one request they stay below the limit of a head.
GROUPS_MAX = 100_000  # Each is some kilobytes of memory and a row of every checkpoint that it changed in.

log = logging.getLogger(__name__)


class Planned(NamedTuple):
    """What the first who waits of a group is about to get."""

    group: Group
    waiting: Waiting
    parts: list[Part]


class Lease(NamedTuple):
    """Names a pull that is to lapse."""

    group: Group
    pull_first: int


class Pulls:
    """Serves the consumers of all groups; belongs to the loop."""

    def __init__(
        self,
        log_id: int,
        incarnation: int,
        next_pull: int,
        groups: Iterable[Group],
        index: Index,
        stored: StoredBatches,
        pull_log: PullCommit,
        clock: Clock,
    ) -> None:
        self.groups: dict[tuple[str, str], Group] = {(group.subject.name, group.name): group for group in groups}
        self.incarnation = incarnation
        self.next_pull = next_pull
        self.counters = dict.fromkeys(("pulled", "acked", "nacked", "lapsed", "redelivered"), 0)
        self._log_id = log_id
        self._index = index
        self._log = pull_log
        self._clock = clock
        self.quarantine = Quarantine(stored)
        self._parts = Parts(index, stored, self.quarantine)
        self._next_group_id = max((group.group_id for group in self.groups.values()), default=0) + 1
        self._of_subject: dict[str, list[Group]] = {}
        self._names = sorted(self.groups)  # For listings, which go on behind a name.
        self._of_peer: dict[Peer, set[Waiting]] = {}
        self._leases = Alarms(_is_held)
        self._deadlines = Alarms(_waits)
        for group in self.groups.values():
            self._of_subject.setdefault(group.subject.name, []).append(group)

    def lease_all(self, lease_ms: int) -> None:
        """Give every pull that survived a restart a whole lease."""
        ends_ms = self._clock.monotonic_ms() + lease_ms
        for group in self.groups.values():
            for pull in group.held.values():
                self._lease(group, pull.pull_first, ends_ms)

    def listed(self, subject: str | None, after: tuple[str, str]) -> Iterator[Group]:
        """Groups of a subject, or of all, behind a name, in order of subject and name."""
        names = self._names
        first = after if subject is None else max(after, (subject, ""))
        for at in range(bisect_right(names, first), len(names)):
            if subject is not None and names[at][0] != subject:
                return
            yield self.groups[names[at]]

    def groups_of(self, subject_name: str) -> int:
        """How many groups a subject has."""
        return len(self._of_subject.get(subject_name, ()))

    def has_group(self, subject_name: str) -> bool:
        """Whether messages of a subject are kept for anybody."""
        return subject_name in self._of_subject

    def pull(self, waiting: Waiting) -> None:
        """Answer a PULL now, or when there is something or its time is up."""
        group = waiting.group
        group.waiting.append(waiting)
        self._of_peer.setdefault(waiting.peer, set()).add(waiting)
        self._serve([group])
        # The first pull of a new group waits for the group's record, whatever its time.
        if group.ready and not waiting.answered:
            self._time(waiting)

    def acknowledge(
        self, op: PullOp, group: Group, handles: Sequence[Sequence[int]], answer: Callable[[list[list[int]]], None]
    ) -> None:
        """Record an ACK or NACK; ``answer`` gets the handles that are stale, when the others are durable."""
        stale: list[list[int]] = []
        entries: list[PullEntry] = []
        now_ms = self._clock.now_ms()
        for incarnation, pull_first, covered in handles:
            held = [pull for pull in group.held_within(pull_first, covered) if pull.incarnation == incarnation]
            if held:
                _add_handle(entries, PullEntry(op, 0, group.group_id, incarnation, pull_first, 0, covered, now_ms))
            lost = self._lost(group, incarnation, pull_first, pull_first + covered, held)
            # What can't be told run by run is told as it was asked, which fits an answer as it fitted the request.
            runs = lost if len(stale) + len(lost) <= STALE_RUNS_MAX else [(pull_first, pull_first + covered)]
            stale += [[incarnation, start, end - start] for start, end in runs]
        if entries:
            self._log.append(entries)
            self.counters["acked" if op == PullOp.ACK else "nacked"] += sum(map(group.apply, entries))
        self._log.when_durable(partial(answer, stale))
        if op == PullOp.NACK:
            self._serve([group])

    def messages_came(self, subjects: Iterable[Subject]) -> None:
        """Serve who waits for messages of these subjects."""
        found = (group for subject in subjects for group in self._of_subject.get(subject.name, ()) if group.waiting)
        self._serve(list(found))

    def disconnected(self, peer: Peer) -> None:
        """Nothing is delivered for the waiting PULLs of a connection that is gone."""
        for waiting in self._of_peer.pop(peer, ()):
            waiting.answered = True
            waiting.group.waiting.remove(waiting)

    def refuse_waiting(self, error: DelaydError) -> None:
        """Answer every waiting PULL with an error."""
        for group in self.groups.values():
            while group.waiting:
                waiting = group.waiting.popleft()
                self._end(waiting).answer_error(waiting.request_id, error)

    def next_wake_ms(self) -> int | None:
        """When `wake` is next needed, monotonic."""
        lease_ms, deadline_ms = self._leases.next_ms(), self._deadlines.next_ms()
        if lease_ms is None or deadline_ms is None:
            return deadline_ms if lease_ms is None else lease_ms
        return lease_ms if lease_ms < deadline_ms else deadline_ms

    def wake(self) -> None:
        """End leases and long polls whose time is up."""
        now_ms = self._clock.monotonic_ms()
        lapsed: dict[Group, list[PullEntry]] = {}
        for lease in self._leases.due(now_ms):
            pull = lease.group.held[lease.pull_first]
            at = (pull.incarnation, pull.pull_first, 0, pull.count, self._clock.now_ms())
            entry = PullEntry(PullOp.LAPSED, pull.attempt, lease.group.group_id, *at)
            lapsed.setdefault(lease.group, []).append(entry)
        for group, entries in lapsed.items():
            self._lapse(group, entries)
        for waiting in self._deadlines.due(now_ms):
            self._expire(waiting)

    def create(self, subject_name: str, name: str) -> Group:
        """Make a group that there is none of; its record is durable before it is served."""
        if len(self.groups) >= GROUPS_MAX:
            raise BadArgument(f"there are {GROUPS_MAX} groups, no more can be made")
        subject = self._index.subject(subject_name)
        group = Group(self._next_group_id, subject, name, self._index.first(subject))
        group.ready = False
        record: Record = {"type": "group", "group_id": group.group_id, "subject": subject_name, "group": name}
        self._log.append_record(record)
        self._next_group_id += 1
        self.groups[subject_name, name] = group
        insort(self._names, (subject_name, name))
        self._of_subject.setdefault(subject_name, []).append(group)
        self._log.when_durable(partial(self._created, group))
        log.info("group_created subject=%s group=%s start=%d", subject_name, name, group.next)
        return group

    def _created(self, group: Group) -> None:
        group.ready = True
        self._serve([group])
        for waiting in list(group.waiting):
            self._time(waiting)

    def _serve(self, groups: Iterable[Group]) -> None:
        """Answer who waits, in order of arrival, while there are messages: one append of the pull log a round."""
        while planned := [plan for group in groups if (plan := self._planned(group)) is not None]:
            self._answer(planned)
            groups = [plan.group for plan in planned]

    def _planned(self, group: Group) -> Planned | None:
        """What the first who waits is to get; None when nobody does, or there is nothing."""
        while group.ready and group.waiting and group.has_messages:
            waiting = group.waiting[0]
            try:
                parts = self._parts.of(group, waiting)
            except ServerStopped:
                raise
            except DelaydError as error:
                # A damaged consume log concerns who asked for it; all else goes on.
                self._refuse(group, error)
                continue
            if parts:
                return Planned(group, waiting, parts)
            if group.has_messages:
                # So much could not be read that others get their turn first; who asked asks again.
                self._expire(waiting)
        return None

    def _answer(self, planned: Sequence[Planned]) -> None:
        now_ms = self._clock.now_ms()
        entries: list[tuple[Planned, PullEntry]] = []
        pull_first = self.next_pull
        for plan in planned:
            group_id, last = plan.group.group_id, None
            for part in plan.parts:
                if (
                    last is not None
                    and last.attempt == part.attempt
                    and last.consume_first + last.covered == part.consume_first
                ):
                    last = last._replace(covered=last.covered + part.rows)
                    entries[-1] = plan, last
                else:
                    at = (self.incarnation, pull_first, part.consume_first, part.rows, now_ms)
                    last = PullEntry(PullOp.PULL, part.attempt, group_id, *at)
                    entries.append((plan, last))
                pull_first += part.rows
        try:
            self._log.append([entry for _, entry in entries])
        except RetryLater as error:
            # A full disk; whoever asked asks again.
            for plan in planned:
                self._refuse(plan.group, error)
            return
        answered_first, self.next_pull = self.next_pull, pull_first
        self.counters["pulled"] += pull_first - answered_first
        monotonic_ms = self._clock.monotonic_ms()
        for plan, entry in entries:
            plan.group.apply(entry)
            self._lease(plan.group, entry.pull_first, monotonic_ms + plan.waiting.lease_ms)
            if entry.attempt > 1:
                self.counters["redelivered"] += entry.covered
        for plan in planned:
            rows: list[list[int]] = []
            for part in plan.parts:
                rows.append([answered_first, part.consume_first, part.rows, part.attempt])
                answered_first += part.rows
            waiting = plan.group.waiting.popleft()
            self._end(waiting).answer(waiting.request_id, self._head(rows, now_ms), [part.batch for part in plan.parts])

    def _refuse(self, group: Group, error: DelaydError) -> None:
        """Answer the first who waits with an error."""
        log.warning("pull_failed subject=%s group=%s error=%r", group.subject.name, group.name, error.message)
        waiting = group.waiting.popleft()
        self._end(waiting).answer_error(waiting.request_id, error)

    def _lost(self, group: Group, incarnation: int, start: int, end: int, held: Sequence[Pull]) -> Ranges:
        """What an acknowledgement names in vain, which may be a part of it: clients merge neighbouring handles."""
        if incarnation == self.incarnation:
            lost = Ranges(group.given_back.within(start, end))
            if end > self.next_pull:
                lost.add(max(start, self.next_pull), end)
            return lost
        # Of an older life only what its pull log kept is known; what was acknowledged since is not.
        lost = Ranges([(start, end)])
        for pull in held:
            for run in pull.pending.within(start, end):
                lost.remove(*run)
        return lost

    def _lease(self, group: Group, pull_first: int, ends_ms: int) -> None:
        group.held[pull_first].lease_ends_ms = ends_ms
        self._leases.add(ends_ms, Lease(group, pull_first))

    def _lapse(self, group: Group, entries: Sequence[PullEntry]) -> None:
        try:
            self._log.append(entries)
        except RetryLater as error:
            log.warning("lapse_put_off subject=%s group=%s error=%r", group.subject.name, group.name, error.message)
            retry_at_ms = self._clock.monotonic_ms() + error.retry_after_ms
            for entry in entries:
                self._lease(group, entry.pull_first, retry_at_ms)
            return
        self.counters["lapsed"] += sum(map(group.apply, entries))
        self._serve([group])

    def _time(self, waiting: Waiting) -> None:
        if waiting.deadline_ms <= self._clock.monotonic_ms():
            self._expire(waiting)
        else:
            self._deadlines.add(waiting.deadline_ms, waiting)

    def _expire(self, waiting: Waiting) -> None:
        waiting.group.waiting.remove(waiting)
        self._end(waiting).answer(waiting.request_id, self._head([], self._clock.now_ms()))

    def _head(self, parts: list[list[int]], now_ms: int) -> Head:
        return {"log_id": self._log_id, "incarnation": self.incarnation, "parts": parts, "now_ms": now_ms}

    def _end(self, waiting: Waiting) -> Peer:
        waiting.answered = True
        of_peer = self._of_peer.get(waiting.peer)
        if of_peer is not None:
            of_peer.discard(waiting)
            if not of_peer:
                del self._of_peer[waiting.peer]
        return waiting.peer


def _add_handle(entries: list[PullEntry], entry: PullEntry) -> None:
    """Messages that are acknowledged one by one are mostly neighbours: one entry covers them."""
    last = entries[-1] if entries else None
    if (
        last
        and last.incarnation == entry.incarnation
        and last.pull_first + last.covered == entry.pull_first
        and last.covered + entry.covered <= COVERED_MAX
    ):
        entries[-1] = last._replace(covered=last.covered + entry.covered)
    else:
        entries.append(entry)


def _is_held(ends_ms: int, lease: Lease) -> bool:
    pull = lease.group.held.get(lease.pull_first)
    return pull is not None and pull.lease_ends_ms == ends_ms


def _waits(deadline_ms: int, waiting: Waiting) -> bool:
    return not waiting.answered
