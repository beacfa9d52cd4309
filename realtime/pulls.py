"""Pulls: messages to consumers, their acknowledgements, and leases (rule Q1, docs/formats/pull.md).

A pull's entry is in the pull log before its answer leaves. An acknowledgement is durable before it is answered.
Messages that are not acknowledged when their lease ends are offered again.

An example: group g is at consume sequence 40, and its lease is 30 s.

1. A PULL of at most 10 gets the messages 40 to 49 as attempt 1. They get the pull sequences 700 to 709, the entry is in
   the pull log, and g's ``next`` is 50.
2. The consumer acknowledges 700 to 706: once that is fsynced, it is answered, and 40 to 46 are done.
3. It gives 707 back (NACK): message 47 is offered again at once, as attempt 2. If attempt 2 comes back too, it pauses
   for 100 ms, then 200 ms, up to 10 s.
4. It says that 708 was given to no handler (RETURNED): message 48 is offered again, still as attempt 1 (rule Q4).
5. After 30 s the lease of 709 ends: message 49 is offered again as attempt 2, and a later acknowledgement of 709 is
   answered as stale.
6. It acknowledges 700 to 706 once more: the answer is "done", as the first time (rule Q5).
7. It has fetched 7 messages ahead of its handler and its next PULL waits. A PULL of another consumer with empty hands
   comes, and there are no messages: the first PULL is answered without messages, so that its consumer reads how many
   are wanted, and gives some back as in 4 (rule Q4; `realtime.polls` has the figures).

`realtime.group_records` creates and deletes the groups.
"""

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from delayd.batch.columns import Buffer
from delayd.errors import DelaydError, Rebuilding, RetryLater, ServerStopped, SlowDown
from delayd.log.pull import GroupDecision, PullEntry, PullOp
from delayd.machine.alarms import NEVER_MS, Alarms, DueHeap
from delayd.machine.histogram import Histogram
from delayd.machine.operating import LogLimit
from delayd.wire.consuming import StaleRow

from .answers import PARTS_MAX, PASSED, Part, Parts, Planned, passed_over, pulled
from .commit import PullCommit
from .group_window import HELD, GroupWindow, GroupWord, Offer, StateRun
from .groups import Group, Roster
from .handoff import Peer
from .kept import Life
from .leads import Leads
from .polls import RETRY_MS, Waiting, WaitingPulls
from .recovery import PullReplay, Recovered
from .subject_index import Subject
from .subscriptions import Subscription, Subscriptions
from .unreadable import UnreadableMessages
from .words import SAID, SECRET_BITS, ConsumerWord, GivenOut, Handles, NamedPulls, by_source, found, stale_all

T = TypeVar("T")

HANDLES_MAX = 32_768  # Handles of one ACK or NACK, and of its answer: at most 29 bytes each, so either fits a head.
HELD_MAX = 131_072  # Pulled runs that nobody has acknowledged, of all groups: 53 bytes each, 7 MiB.
GIVEN_BACK_MAX = 500_000  # Runs of pull sequences that were given back, of all groups: 53 bytes each, 25 MiB.
GIVEN_BACK_LEFT = 50  # Beyond GIVEN_BACK_MAX each group keeps this many of its newest runs only.
TURN_ANSWERS = 64  # Answers in one turn of the loop, some 100 us each. The others have the next turn.
TURN_BYTES = 4 << 20  # Bytes of these answers, and the rest of the last one: a megabyte takes 2 ms.
PARTS_AS_ANSWER = 16  # So many parts of one answer to a subscription count as an answer more.
TURN_LEASES = 1_024  # Leases looked at in one turn of the loop, a few microseconds each.

log = logging.getLogger(__name__)
limited = LogLimit(log)  # Lines that consumers can provoke.


class PutOff(NamedTuple):
    """Messages that are to be offered again so long from now."""

    handle: Sequence[int]
    delay_ms: int


class Pulls:
    """Serves the consumers of all groups; belongs to the loop."""

    def __init__(self, recovered: Recovered, pull_log: PullCommit, alarms: Alarms) -> None:
        clock = self.clock = alarms.clock
        log_id, epoch = recovered.identity.log_id, recovered.identity.epoch
        index, stored = recovered.index, recovered.stored
        self.roster = Roster(log_id)
        self.groups = self.roster.groups
        self.subscriptions = Subscriptions()
        self.given_out = GivenOut([Life(epoch, 0)], epoch)
        self.leads = Leads(clock, self.given_out.life, self._lapse_others, self._begin)
        self.next_pull = 0
        counted = ("pulled", "acked", "nacked", "returned", "lapsed", "redelivered", "extended", *PASSED[1:])
        self.counters = dict.fromkeys(counted, 0)
        self.delivered = Histogram()  # How late each message was when a consumer first got it, in ms.
        self.quarantine = UnreadableMessages(stored, alarms)
        self.quarantine.on_released = self._released
        self.log_id = log_id
        self._epoch = epoch
        self.index = index
        self._log = pull_log
        self._parts = Parts(index, stored, self.quarantine, clock, self._pass_over)
        self.waiting = WaitingPulls(log_id, clock)
        self._incarnations: dict[Peer, int] = {}
        # Of all groups together: pulled runs that nobody has acknowledged, and runs of pull sequences that were given
        # back.
        self._held = self._given_back = 0
        # Those to serve in the next turns of the loop.
        self._to_serve: OrderedDict[Group | Subscription, None] = OrderedDict()
        self._bytes_left = TURN_BYTES  # Bytes that answers of all groups may have until the next wake.
        self._ends = DueHeap(_is_armed)  # Groups of which a lease or a pause ends.

    def begin(self, replay: PullReplay) -> None:
        """Serve the groups that a replay of the pull log has rebuilt; nothing is asked of this object before."""
        groups = replay.groups.values()
        self.roster.begin(groups, replay.next_group)
        self.given_out = GivenOut(replay.lives, self._epoch)
        self.next_pull = replay.next_pull
        self._held = sum(group.window.handles.runs[HELD] for group in groups)
        self._given_back = sum(group.window.given_back for group in groups)
        self.lease_all()

    def lease_all(self) -> None:
        """Give every pull that survived a restart its whole lease again."""
        now_ms = self.clock.monotonic_ms()
        for group in self.groups.values():
            group.window.lease_all(now_ms)
            self._arm(group)

    def incarnation_of(self, peer: Peer) -> int:
        """The incarnation in handles of this connection's pulls: this life, and a random number that nobody else can
        guess.
        """
        found = self._incarnations.get(peer)
        if found is None:
            found = self._incarnations[peer] = self.given_out.life << SECRET_BITS | secrets.randbits(SECRET_BITS)
        return found

    def pull(self, waiting: Waiting) -> None:
        """Answer a PULL now, or when there are messages or its time is up."""
        group = waiting.group
        if isinstance(group, Group) and (waiting.window_ms or group.lead is not None) and not self._admits(waiting):
            return
        group.waiting.add(waiting)
        self.waiting.add(waiting)
        if group.has_messages:
            # Each connection's share of a turn already bounds how much it asks for, so one answer may always leave.
            self._bytes_left = max(self._bytes_left, 1)
            self._serve([group])
        # The first pull of a new group waits until the group's record is durable, even beyond its time.
        if group.ready and not waiting.answered:
            self.waiting.set_deadline(waiting, has_turn=group in self._to_serve)
            if group.waiting.ahead and not waiting.ahead and not waiting.answered:
                self.waiting.recall(group)

    def _admits(self, waiting: Waiting) -> bool:
        """Whether a PULL of an exclusive group is served; if not, it stands by."""
        group = waiting.group
        assert isinstance(group, Group), "a subscription has no lead"
        if self.leads.admits(waiting, group):
            return True
        self.waiting.add(waiting)
        self.waiting.deadlines.add(waiting.deadline_ms, waiting)
        return False

    def acknowledge(
        self,
        op: PullOp,
        wanted: Sequence[tuple[Group, Handles]],
        answer: Callable[[list[StaleRow]], None],
        others: int = 0,
    ) -> None:
        """Record an ACK, NACK or RETURNED of one group or several; ``answer`` gets the handles that are stale, when the
        others are durable. The request had ``others`` that are stale in any case.
        """
        now_ms = self.clock.now_ms()
        every = [
            (source, found(SAID[op], source, own, self.given_out, self.next_pull, now_ms))
            for group, of in wanted
            for source, own in by_source(group, of)
        ]
        self._say(op, every)
        stale = [handle for _, each in every for handle in each.stale]
        # Too many stale runs for one answer: name the ranges that were asked for instead. They fitted the request,
        # unless a group and its child divided them.
        if len(stale) + others > HANDLES_MAX:
            stale = [handle for _, each in every for handle in each.asked_for]
            if len(stale) + others > HANDLES_MAX:
                stale = [handle for _, of in wanted for handle in stale_all(of)]
        self._log.when_durable(partial(answer, stale))
        to_serve: list[Group] = []
        for group, _ in wanted:
            # What is acknowledged may have stood before other messages of its ordering key, or of the group.
            if op != PullOp.ACK or group.window.order is not None or group.in_flight_max or group.standby:
                to_serve.append(group)
        if to_serve:
            self._serve(to_serve)

    def put_off(self, group: Group, put_off: Sequence[PutOff], answer: Callable[[list[StaleRow]], None]) -> None:
        """Offer messages of an ordered group again later; until then they keep their place. A start offers them at
        once. ``answer`` gets the handles that are stale, when this is durable.
        """
        now_ms = self.clock.now_ms()
        stale: list[StaleRow] = []
        every: list[tuple[Group, NamedPulls]] = []
        for each in put_off:
            for source, handles in by_source(group, [each.handle]):
                known = found(ConsumerWord.NACK, source, handles, self.given_out, self.next_pull, now_ms)
                entries = [entry._replace(lease_ms=each.delay_ms) for entry in known.entries]
                every.append((source, known._replace(entries=entries)))
                stale += known.stale
        self._say(PullOp.NACK, every)
        self._log.when_durable(partial(answer, stale[:HANDLES_MAX]))
        self._serve([group])

    def _say(self, op: PullOp, every: Sequence[tuple[Group, NamedPulls]]) -> None:
        """Log what consumers say of messages that they hold, and change the groups."""
        if entries := [entry for _, each in every for entry in each.entries]:
            self._log.append(entries)
            for group, each in every:
                if op is PullOp.ACK:
                    self.counters["acked"] += sum([self._apply(group, entry) for entry in each.entries])
                else:
                    what = "nacked" if op is PullOp.NACK else "returned"
                    self.counters[what] += self._give_back_all(group, each.entries)

    def extend(self, group: Group, handles: Handles, lease_ms: int) -> list[StaleRow]:
        """Hold messages for ``lease_ms`` from now on; return the handles that are stale."""
        until_ms = self.clock.monotonic_ms() + lease_ms
        stale: list[StaleRow] = []
        for source, of_source in by_source(group, handles):
            held = found(ConsumerWord.EXTEND, source, of_source, self.given_out, self.next_pull, 0)
            runs = source.window.handles.runs
            before = runs[HELD]
            for entry in held.entries:
                end = entry.pull_first + entry.covered
                # No checkpoint stores this, so the group has not changed.
                source.window.extend(entry.pull_first, end, entry.incarnation, until_ms)
                self.counters["extended"] += entry.covered
            self._held += runs[HELD] - before
            self._arm(source)
            stale += held.stale if len(stale) + len(held.stale) <= HANDLES_MAX else held.asked_for
        return stale

    def serve(self, group: Group) -> None:
        """Serve the PULLs that wait for a group's messages."""
        self._serve([group])

    def leave(self, group: Group, decision: GroupDecision) -> None:
        """Let messages go that live on at their delay server, as the pull log says."""
        self._give_back(group, lambda window: window.leave(decision))

    def admit(self, group: Group) -> None:
        """Let PULLs wait for the messages of a new group; they are served from `open` on."""
        group.ready = False
        self.roster.add(group)

    def open(self, group: Group) -> None:
        """Serve a new group, because its record is durable."""
        group.ready = True
        self._serve([group])
        for waiting in list(group.waiting):
            self.waiting.set_deadline(waiting, has_turn=group in self._to_serve)

    def forget(self, group: Group) -> None:
        """Forget a group that was deleted. The PULLs that wait for its messages are answered without any, so their
        consumers ask again, and the first of them makes the group anew.
        """
        for waiting in [*group.waiting, *group.standby]:
            self.waiting.answer_empty(waiting)
        self.leads.forget(group)
        self.roster.strike(group)
        self.subscriptions.strike(group)
        self._to_serve.pop(group, None)
        self._held -= group.window.handles.runs[HELD]
        self._given_back -= group.window.given_back
        group.window = GroupWindow(0)
        self.quarantine.forget(group)

    def move(self, group: Group, to: int) -> None:
        """Let a group go on at a consume sequence, as the pull log says."""
        self._give_back(group, lambda window: group.move(to))
        self.quarantine.forget(group)
        self._serve([group])

    def join(self, subscription: Subscription, group: Group) -> bool:
        """Let a subscription take messages of a group; False when there is no room for that."""
        joined = self.subscriptions.join(subscription, group)
        if joined and group.ready:
            self._serve([group])
        return joined

    def pass_over(self, messages: int) -> None:
        """Go on behind pull sequences that an entry of the pull log has used for messages that nobody pulls."""
        self.next_pull += messages

    def messages_came(self, subjects: Iterable[Subject]) -> None:
        """Serve the PULLs that wait for messages of these subjects."""
        found = (group for subject in subjects for group in self.roster.of(subject.name) if group.is_awaited)
        self._serve(list(found))

    def rebuilt(self, subject: Subject) -> None:
        """The consume log of a subject is whole again: serve the PULLs that waited for it."""
        try:
            first = self.index.first(subject)
        except RetryLater:
            return  # It failed again, and is rebuilt again; or it can't be read now, and a pull finds that out.
        for group in self.roster.of(subject.name):
            group.begin_at(first)
            # They are served in the next turn, because this one may be in the middle of serving.
            self._serve_soon(group)

    def disconnected(self, peer: Peer) -> None:
        """Drop the waiting PULLs of a connection that has ended."""
        self._incarnations.pop(peer, None)
        self.subscriptions.disconnected(peer)
        self.waiting.disconnected(peer)
        if peer in self.leads.of_peer:
            self.leads.disconnected(peer)

    def end_waiting(self, peer: Peer, group: Group | Subscription) -> None:
        """Answer the PULLs of a connection that wait for these messages, without messages."""
        for waiting in self.waiting.of(peer, group):
            # Nobody has looked for it yet while the record of a new group waits for the disk.
            self.waiting.answer_empty(waiting, unfinished=group in self._to_serve or not group.ready)

    def refuse_waiting(self, error: DelaydError) -> None:
        """Answer every waiting PULL with an error."""
        self._to_serve.clear()
        self.waiting.refuse_all(error)

    def next_wake_ms(self, before_ms: int = NEVER_MS) -> int | None:
        """When `wake` is next needed, monotonic; an answer of ``before_ms`` or later says only that it is not needed
        before.
        """
        if self._to_serve:
            return self.clock.monotonic_ms()
        wake_ms = self.leads.due_ms
        for time_ms in (self._ends_ms(before_ms), self.waiting.deadlines.next_ms(before_ms)):
            if wake_ms is None or (time_ms is not None and time_ms < wake_ms):
                wake_ms = time_ms
        return wake_ms

    def next_offer_ms(self) -> int | None:
        """When a lease or a pause ends next, monotonic; None when there is none."""
        return self._ends_ms(NEVER_MS)

    def _ends_ms(self, before_ms: int) -> int | None:
        """As `next_wake_ms`, of leases and pauses."""
        while (ends_ms := self._ends.next_ms(before_ms)) is not None and ends_ms < before_ms:
            # What an alarm was set for may be settled, or held for longer.
            group = self._ends.first
            if group.window.next_end_ms() <= ends_ms:
                break
            group.armed_ms = NEVER_MS
            self._arm(group)
        return ends_ms

    def _arm(self, group: Group, not_before_ms: int = 0) -> None:
        """Set an alarm for when a lease or a pause of a group ends first, unless there is one."""
        ends_ms = max(group.window.ends_ms, not_before_ms)
        if ends_ms < group.armed_ms:
            group.armed_ms = ends_ms
            self._ends.add(ends_ms, group)

    def unheard(self, ms: int) -> None:
        """The server could hear nobody for so long, so that no lease grows shorter by it: what consumers said
        meanwhile is read only now.
        """
        for group in self.groups.values():
            group.window.stood_still(ms)

    def wake(self) -> None:
        """End leases and long polls whose time is up, as many as one turn may; the next wake goes on."""
        now_ms = self.clock.monotonic_ms()
        self._bytes_left = TURN_BYTES
        if self.leads.due_ms is not None and self.leads.due_ms <= now_ms:
            self.leads.wake()
        self._end_some(now_ms)
        if self._to_serve:
            self._serve(())
        for waiting in islice(self.waiting.deadlines.due(now_ms), TURN_ANSWERS):
            if waiting.group in self._to_serve:
                # There may be messages for it: only the turn was too short to serve it.
                self.waiting.deadlines.add(now_ms + 1, waiting)
            else:
                self.waiting.answer_empty(waiting)

    def _end_some(self, now_ms: int) -> None:
        """End leases and pauses, as many as one turn may."""
        left = TURN_LEASES
        for group in self._ends.due(now_ms):
            window = group.window
            if paused := window.others.ended(now_ms, left):
                group.changing()
                for run in paused:
                    window.tell(GroupWord.RESUMED, run.first, run.end)
                self._serve_soon(group)
            lapsed = window.handles.ended(now_ms, left - len(paused))
            left -= len(paused) + len(lapsed)
            retry_at_ms = self._lapse(group, lapsed) if lapsed else 0
            group.armed_ms = NEVER_MS
            window.next_end_ms()
            self._arm(group, retry_at_ms)
            if left <= 0:
                break

    def _released(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._serve_soon(group)

    def _serve_soon(self, source: Group | Subscription) -> None:
        if isinstance(source, Group):
            source = source.front
            if source.standby:
                self.leads.look_soon(source)
        if source.waiting.wanted:
            self._to_serve[source] = None
        if isinstance(source, Group):
            for subscription in source.subscriptions:
                subscription.offer(source)
                if subscription.waiting:
                    self._to_serve[subscription] = None
        # Consumers of this subject alone that fetch ahead come behind those with empty hands.
        if source.waiting:
            self._to_serve.setdefault(source)

    def _serve(self, sources: Iterable[Group | Subscription]) -> None:
        """Answer waiting PULLs in order of arrival, while there are messages: one append to the pull log a round.

        Answers beyond one turn of the loop are left to the next wake.
        """
        for source in sources:
            self._serve_soon(source)
        left = TURN_ANSWERS
        while self._to_serve and left > 0 and self._bytes_left > 0:
            planned: list[Planned] = []
            for source in list(islice(self._to_serve, left)):
                if isinstance(source, Subscription):
                    # It may have groups whose messages have just been planned for others.
                    self._answer_all(planned)
                    planned = []
                plan = self._planned(source) if isinstance(source, Group) else self._planned_of_many(source)
                left -= 1
                if plan is None:
                    self._to_serve.pop(source, None)
                    continue
                planned.append(plan)
                # The others have their turn before this one gets another answer.
                self._to_serve.move_to_end(source)
                parts = plan.parts
                self._bytes_left -= sum([len(part.batch) for part in parts])
                if isinstance(source, Subscription):
                    left -= len(parts) // PARTS_AS_ANSWER
                    self._answer_all(planned)
                    planned = []
                    source.served(group.front for group, _ in plan.picked)
                if self._bytes_left <= 0 or left <= 0:
                    break
            self._answer_all(planned)

    def _answer_all(self, planned: Sequence[Planned]) -> None:
        if planned:
            self._answer(planned)
            for plan in planned:
                if not plan.waiting.group.waiting:
                    self._to_serve.pop(plan.waiting.group, None)

    def _planned_of_many(self, subscription: Subscription) -> Planned | None:
        """As `_planned`, with messages of several groups."""
        while subscription.has_messages and (waiting := subscription.waiting.first) is not None:
            if not waiting.peer.is_open:
                self.waiting.end(waiting)
                continue
            try:
                picked = subscription.pick(waiting, self._parts_of)
            except ServerStopped:
                raise
            except DelaydError as error:
                self.waiting.refuse(waiting, error)
                continue
            if picked:
                return Planned(waiting, picked)
            if subscription.has_messages:
                self.waiting.answer_empty(waiting, unfinished=True)
        return None

    def _parts_of(self, group: Group, messages: int, size_bytes: int, parts_max: int = PARTS_MAX) -> list[Part]:
        self._check_held(group)
        if not group.settled:
            group.begin_at(self.index.first(group.subject))
        front = group.parent or group
        if front.in_flight_max:
            messages = min(messages, front.room)
        return self._parts.of(group, messages, size_bytes, parts_max)

    def _pass_over(self, group: Group, part: Part) -> None:
        """Count messages as acknowledged that nobody gets (rule Q7): one append, so that a crash keeps both entries or
        none. It needs no fsync: after a crash they are passed over again.
        """
        at = (self.given_out.life << SECRET_BITS, self.next_pull)
        entries = passed_over(group, Offer(part.consume_first, part.rows, part.attempt), at, self.clock.now_ms())
        self._log.append(entries)
        self.pass_over(part.rows)
        for entry in entries:
            self._apply(group, entry)
        self.counters[part.passed] += part.rows

    def _planned(self, group: Group) -> Planned | None:
        """Plan the answer to the first waiting PULL; None when there is no PULL or no message."""
        while group.ready and group.has_messages and (waiting := group.waiting.first) is not None:
            if not waiting.peer.is_open:
                # The end of this connection is about to be told. Nobody would work on messages that it got, for a whole
                # lease.
                self.waiting.end(waiting)
                continue
            source = group.source
            try:
                parts = self._parts_of(source, waiting.max_messages, waiting.max_bytes)
            except ServerStopped:
                raise
            except Rebuilding:
                # The PULL is served when the consume log is whole again, which may be already.
                if source.subject.damage is not None:
                    return None
                continue
            except DelaydError as error:
                self.waiting.refuse(waiting, error)
                continue
            if parts:
                return Planned(waiting, [(source, parts)])
            if source.offers_any:
                # Many batches could not be read, have expired or are not wanted, so other groups get their turn first;
                # this consumer asks again.
                self.waiting.answer_empty(waiting, unfinished=True)
        return None

    def _answer(self, planned: Sequence[Planned]) -> None:
        now_ms = self.clock.now_ms()
        nobody = self.given_out.life << SECRET_BITS
        entries = pulled(planned, self.next_pull, nobody, now_ms)
        try:
            self._log.append([entry for _, _, entry in entries])
        except RetryLater as error:
            # The disk is full; the consumers ask again.
            for plan in planned:
                self.waiting.refuse(plan.waiting, error)
            return
        answered_first = self.next_pull
        begun_ms = self.clock.monotonic_ms()
        for _, group, entry in entries:
            self._apply(group, entry, begun_ms)
            if entry.op == PullOp.ACK:
                continue
            self.next_pull += entry.covered
            if entry.incarnation == nobody:
                continue
            if entry.attempt > 1:
                self.counters["redelivered"] += entry.covered
        for plan in planned:
            rows: list[list[int]] = []
            batches: list[Buffer] = []
            for part in plan.parts:
                if not part.passed:
                    rows.append([answered_first, part.consume_first, part.rows, part.attempt])
                    batches.append(part.batch)
                    if part.attempt == 1:
                        self.delivered.late(part.due, now_ms)
                self.counters[part.passed or "pulled"] += part.rows
                answered_first += part.rows
            self._give(plan, rows, batches, now_ms)

    def _give(self, plan: Planned, rows: list[list[int]], batches: list[Buffer], now_ms: int) -> None:
        """Answer a PULL with messages; the pull log has their entries."""
        waiting = plan.waiting
        # Nobody begins with a message while a power cut could still undo what set it free (rules Q8, Q9).
        waits = waiting.window_ms > 0 or any(group.window.order is not None for group, _ in plan.picked)
        # What waits for the disk is the last answer, or another one could overtake it.
        stands = waiting.stands and not waits and self.waiting.goes_on(waiting, sum([row[2] for row in rows]), batches)
        peer = waiting.peer if stands else self.waiting.end(waiting)
        # Only now, for what this PULL wanted is not what others want.
        head = self.waiting.head(waiting, rows, now_ms)
        if isinstance(waiting.group, Subscription):
            head["subjects"] = [
                [group.front.subject.name, len([part for part in of_group if not part.passed])]
                for group, of_group in plan.picked
            ]
        if waits:
            self._log.when_durable(partial(peer.answer, waiting.request_id, head, batches))
        else:
            peer.answer(waiting.request_id, head, batches, more=stands)

    def _check_held(self, group: Group) -> None:
        # No group holds more than it leaves to others: the first that fills up takes a half, the next a quarter.
        held = group.window.handles.runs[HELD]
        if held >= HELD_MAX - self._held:
            what = f"{held} pulls of this group and {self._held} of all groups are not acknowledged yet"
            raise SlowDown(f"{what}; acknowledge them, or pull more messages at once", retry_after_ms=RETRY_MS)

    def _apply(self, group: Group, entry: PullEntry, now_ms: int | None = None) -> int:
        """Apply an entry; only one that begins a lease needs the time."""
        window = group.changing()
        runs = window.handles.runs
        before = runs[HELD]
        changed = window.apply(entry, now_ms)
        self._held += runs[HELD] - before
        if window.ends_ms < group.armed_ms:
            self._arm(group)
        return changed

    def _give_back(self, group: Group, change: Callable[[GroupWindow], T]) -> T:
        """Change a window so that messages are given back; bound what all groups remember of such messages."""
        window = group.changing()
        held, before = window.handles.runs[HELD], window.given_back
        changed = change(window)
        self._held += window.handles.runs[HELD] - held
        self._given_back += window.given_back - before
        if self._given_back > GIVEN_BACK_MAX:
            before = window.given_back
            window.forget_given_back(GIVEN_BACK_LEFT)
            self._given_back += window.given_back - before
        self._arm(group)
        return changed

    def _give_back_all(self, group: Group, entries: Sequence[PullEntry]) -> int:
        """Apply entries that give messages back; return how many messages."""
        now_ms = self.clock.monotonic_ms()
        return self._give_back(group, lambda window: sum([window.apply(entry, now_ms) for entry in entries]))

    def _lapse(self, group: Group, runs: Sequence[StateRun]) -> int:
        """End leases; return when to try again, 0 if they have ended."""
        at_ms = self.clock.now_ms()
        entries = [
            PullEntry(PullOp.LAPSED, 0, group.group_id, run.incarnation, run.first, 0, run.messages, at_ms)
            for run in runs
        ]
        try:
            self._log.append(entries)
        except RetryLater as error:
            limited.warning("lapse_put_off", "lapse_put_off subject=%s group=%s reason=%r", *group.names, error.message)
            return self.clock.monotonic_ms() + error.retry_after_ms
        self.counters["lapsed"] += self._give_back_all(group, entries)
        self._serve([group])
        return 0

    def _begin(self, waiting: Waiting) -> None:
        """Serve a PULL that stood by."""
        self.waiting.count -= 1
        self.pull(waiting)

    def _lapse_others(self, group: Group, own: frozenset[int]) -> None:
        """End the leases of what other incarnations hold, because another consumer takes over."""
        at_ms = self.clock.now_ms()
        for source in (group,) if group.child is None else (group, group.child):
            entries = [
                PullEntry(PullOp.LAPSED, 0, source.group_id, run.incarnation, run.first, 0, run.messages, at_ms)
                for run in source.window.held()
                if run.incarnation not in own
            ]
            if entries:
                self._log.append(entries)
                self.counters["lapsed"] += self._give_back_all(source, entries)


def _is_armed(ends_ms: int, group: Group) -> bool:
    return group.armed_ms == ends_ms
