"""Pulls: messages to consumers, their acknowledgements, and leases (rule Q1, docs/formats/pull.md).

A pull's entry is in the pull log before its answer leaves, an acknowledgement is durable before it is answered, and
what is not acknowledged when its lease ends is offered again.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.batch import Batch, BatchKind, Buffer, ColumnId
from delayd.clock import Clock
from delayd.errors import BadArgument, DamagedData, DelaydError, RetryLater, ServerStopped
from delayd.gather import Pick, compose, gather, row_bytes
from delayd.log.control import Record
from delayd.log.pull import PullEntry, PullOp
from delayd.wire.frame import Head

from .alarms import Alarms
from .groups import Group, Offer, Pull, Waiting
from .index import Index, Subject
from .peer import Peer
from .pull_commit import PullCommit
from .quarantine import BATCHES_A_PULL, Quarantine, Rotten
from .ranges import Ranges
from .stored import StoredBatches

PARTS_MAX = 512  # Of one answer: each costs the loop some 20 us, and nobody else is served meanwhile.
OVERHEAD_BYTES = 512  # Header, directory and subject table of a batch, at most.
STALE_RUNS_MAX = 16_384  # Of one answer; with the handles of one request they stay below the limit of a head.
GROUPS_MAX = 100_000  # Each is some kilobytes of memory and a row of every checkpoint that it changed in.

log = logging.getLogger(__name__)


class Part(NamedTuple):
    """Neighbouring messages of one answer; ``batch`` holds exactly them."""

    consume_first: int
    rows: int
    attempt: int
    batch: Buffer


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
        self._stored = stored
        self._log = pull_log
        self._clock = clock
        self.quarantine = Quarantine(stored)
        self._next_group_id = max((group.group_id for group in self.groups.values()), default=0) + 1
        self._of_subject: dict[str, list[Group]] = {}
        self._of_peer: dict[Peer, set[Waiting]] = {}
        self._leases = Alarms(_is_held)
        self._deadlines = Alarms(_waits)
        for group in self.groups.values():
            self._of_subject.setdefault(group.subject.name, []).append(group)

    def lease_all(self, lease_ms: int) -> None:
        """Give every pull that survived a restart a whole lease."""
        for group in self.groups.values():
            for pull in group.held.values():
                self._lease(group, pull.pull_first, lease_ms)

    def group(self, subject_name: str, name: str) -> Group:
        """The group of a name, made when there is none; its record is durable before it is served."""
        found = self.groups.get((subject_name, name))
        return self._create(subject_name, name) if found is None else found

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
        self._serve(group)
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
            self._serve(group)

    def messages_came(self, subjects: Iterable[Subject]) -> None:
        """Serve who waits for messages of these subjects."""
        for subject in subjects:
            for group in self._of_subject.get(subject.name, ()):
                if group.waiting:
                    self._serve(group)

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
        times = (self._leases.next_ms(), self._deadlines.next_ms())
        return min((time for time in times if time is not None), default=None)

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

    def _create(self, subject_name: str, name: str) -> Group:
        if len(self.groups) >= GROUPS_MAX:
            raise BadArgument(f"there are {GROUPS_MAX} groups, no more can be made")
        subject = self._index.subject(subject_name)
        group = Group(self._next_group_id, subject, name, self._index.first(subject))
        group.ready = False
        record: Record = {"type": "group", "group_id": group.group_id, "subject": subject_name, "group": name}
        self._log.append_record(record)
        self._next_group_id += 1
        self.groups[subject_name, name] = group
        self._of_subject.setdefault(subject_name, []).append(group)
        self._log.when_durable(partial(self._created, group))
        log.info("group_created subject=%s group=%s start=%d", subject_name, name, group.next)
        return group

    def _created(self, group: Group) -> None:
        group.ready = True
        self._serve(group)
        for waiting in list(group.waiting):
            self._time(waiting)

    def _serve(self, group: Group) -> None:
        """Answer who waits, in order of arrival, while there are messages."""
        while group.ready and group.waiting and group.has_messages:
            waiting = group.waiting[0]
            try:
                parts = self._plan(group, waiting)
                if parts:
                    self._answer(group, waiting, parts)
                elif group.has_messages:
                    # So much could not be read that others get their turn first; who asked asks again.
                    self._expire(waiting)
            except ServerStopped:
                raise
            except DelaydError as error:
                # A full disk or a damaged consume log concerns who asked for it; all else goes on.
                log.warning("pull_failed subject=%s group=%s error=%r", group.subject.name, group.name, error.message)
                self._end(group.waiting.popleft()).answer_error(waiting.request_id, error)

    def _answer(self, group: Group, waiting: Waiting, parts: Sequence[Part]) -> None:
        now_ms = self._clock.now_ms()
        entries: list[PullEntry] = []
        rows_of_head: list[list[int]] = []
        pull_first = self.next_pull
        for part in parts:
            rows_of_head.append([pull_first, part.consume_first, part.rows, part.attempt])
            last = entries[-1] if entries else None
            if (
                last is not None
                and last.attempt == part.attempt
                and last.consume_first + last.covered == part.consume_first
            ):
                entries[-1] = last._replace(covered=last.covered + part.rows)
            else:
                at = (self.incarnation, pull_first, part.consume_first, part.rows, now_ms)
                entries.append(PullEntry(PullOp.PULL, part.attempt, group.group_id, *at))
            pull_first += part.rows
        self._log.append(entries)
        self.counters["pulled"] += pull_first - self.next_pull
        self.next_pull = pull_first
        for entry in entries:
            group.apply(entry)
            self._lease(group, entry.pull_first, waiting.lease_ms)
            if entry.attempt > 1:
                self.counters["redelivered"] += entry.covered
        answer = self._head(rows_of_head, now_ms)
        self._end(group.waiting.popleft()).answer(waiting.request_id, answer, [part.batch for part in parts])

    def _plan(self, group: Group, waiting: Waiting) -> list[Part]:
        """Choose what an answer holds; none when nothing that was looked at can be read."""
        parts: list[Part] = []
        rotten: list[Rotten] = []
        while group.has_messages and not parts and len(rotten) < BATCHES_A_PULL:
            try:
                for part in self._parts(group, waiting):
                    parts.append(part)
            except Rotten as found:
                # What lies before the damage is delivered; the next pull begins at it.
                if not parts:
                    self.quarantine.take(group, found)
                    rotten.append(found)
            except DamagedData:
                if not parts:
                    raise
        if rotten:
            self.quarantine.tell(group, rotten)
        return parts

    def _parts(self, group: Group, waiting: Waiting) -> Iterator[Part]:
        """Whole stored batches wherever they fit; one is split only at the start of an answer, or by its offer."""
        messages, size_bytes, parts = waiting.max_messages, waiting.max_bytes, 0
        for offer in group.offers():
            first, left = offer.consume_first, offer.count
            while left and messages and size_bytes > 0 and parts < PARTS_MAX:
                run = self._index.locate(group.subject, first)
                try:
                    batch = self._stored.fetch(run.offset)
                except DamagedData as error:
                    raise Rotten(Offer(first, min(run.rows, left), offer.attempt), run, error) from error
                available = min(run.rows, left)
                rows = min(available, messages)
                whole = rows == batch.count
                buffer: Buffer = batch.buffer
                if not whole or batch.total_bytes > size_bytes:
                    fitting = _rows_that_fit(batch, run.row, rows, size_bytes)
                    if parts and (whole or fitting < available):
                        return
                    rows = max(1, fitting)
                    buffer = batch.buffer if rows == batch.count else _cut_out(batch, run.row, rows, group.subject.name)
                yield Part(first, rows, offer.attempt, buffer)
                parts += 1
                first, left, messages = first + rows, left - rows, messages - rows
                size_bytes -= len(buffer)

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

    def _lease(self, group: Group, pull_first: int, lease_ms: int) -> None:
        ends_ms = self._clock.monotonic_ms() + lease_ms
        group.held[pull_first].lease_ends_ms = ends_ms
        self._leases.add(ends_ms, Lease(group, pull_first))

    def _lapse(self, group: Group, entries: Sequence[PullEntry]) -> None:
        try:
            self._log.append(entries)
        except RetryLater as error:
            log.warning("lapse_put_off subject=%s group=%s error=%r", group.subject.name, group.name, error.message)
            for entry in entries:
                self._lease(group, entry.pull_first, error.retry_after_ms)
            return
        self.counters["lapsed"] += sum(map(group.apply, entries))
        self._serve(group)

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
    if last and last.incarnation == entry.incarnation and last.pull_first + last.covered == entry.pull_first:
        entries[-1] = last._replace(covered=last.covered + entry.covered)
    else:
        entries.append(entry)


def _is_held(ends_ms: int, lease: Lease) -> bool:
    pull = lease.group.held.get(lease.pull_first)
    return pull is not None and pull.lease_ends_ms == ends_ms


def _waits(deadline_ms: int, waiting: Waiting) -> bool:
    return not waiting.answered


def _rows_that_fit(batch: Batch, row: int, rows: int, size_bytes: int) -> int:
    if batch.total_bytes <= size_bytes:
        return rows
    sizes = np.cumsum(row_bytes(batch)[row : row + rows])
    return int(np.searchsorted(sizes, np.int64(size_bytes - OVERHEAD_BYTES), side="right"))


def _cut_out(batch: Batch, row: int, rows: int, subject: str) -> bytes:
    picked = range(row, row + rows)
    gathered = gather([Pick(batch, picked)])
    accepted = None
    if ColumnId.ACCEPTED_AT_MS in batch:
        accepted = batch.int64s(ColumnId.ACCEPTED_AT_MS)[row : row + rows]
    sequences = batch.uint64s(ColumnId.SEQUENCE)[row : row + rows]
    part = batch.dispatch
    return compose(BatchKind.DISPATCH, part, gathered, sequences, [subject.encode()], accepted_at_ms=accepted)
