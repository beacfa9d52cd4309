"""Targets: what an operator sees of the realtime servers of a delay server, and decides about one that is lost or lost
data.

Invariant: an operator's decision counts when it is durable. Each step of giving a target up is durable before the next
one: the decision, then IN_DOUBT for each row that the target may hold, then that its subjects are free (rules H5, S2).
A start goes on where the last life ended.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgpack

from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.handoff.dispatcher import Dispatcher
from delayd.delay.handoff.link import ORIGIN_REFUSALS, Link
from delayd.delay.handoff.target_words import AcceptedTarget, Refusers, TargetCount, TargetEnds, TargetWords
from delayd.delay.intake import Intake
from delayd.delay.quarantine import Quarantine
from delayd.delay.state_values import RESTORED_KEY
from delayd.errors import BadArgument, DelaydError, DiskFull, DiskReserve, NotReady, UnknownServer
from delayd.machine.alarms import FULL_AGAIN_MS
from delayd.machine.executor import Done
from delayd.machine.identity import Site
from delayd.machine.operating import counted
from delayd.machine.state import Pairs
from delayd.wire.scheduling import TargetInfo

OnDone = Callable[[DelaydError | str], None]
"""Called with a sentence that says what an operator's decision has done, or with the error because of which nothing was
stored.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetBooks:
    """What the state says of targets."""

    words: TargetWords
    ends: TargetEnds
    refusers: Refusers


class Targets:
    """The decisions of operators, over the dispatcher's links."""

    def __init__(
        self,
        site: Site,
        books: TargetBooks,
        dispatcher: Dispatcher,
        outcomes: OutcomeLog,
        quarantine: Quarantine,
        intake: Intake,
    ) -> None:
        words = books.words
        self._state = site.state
        self._words = words
        self._dispatcher = dispatcher
        self._outcomes = outcomes
        self._ends = books.ends
        self._quarantine = quarantine
        self._refusers = books.refusers
        self._intake = intake
        self._clock = site.clock
        self._worker = site.worker
        self._epoch = site.epoch
        self.on_restored: Callable[[int], None] = _nobody_asks  # Called with the instant of such a decision.
        # Earlier lives sent no row that was due later than this (rule H5).
        self._doubt_until_ms = max(self._clock.now_ms(), intake.appended_at_ms)
        # Lost targets whose subjects are free, but a full disk could not store that; and how many of their rows are in
        # doubt.
        self._unstored: list[tuple[int, int]] = []
        self._finishing = site.alarms.alarm(self._finish)
        # Targets that an operator gave up in an earlier life, which ended before that was completed.
        self._unfreed = [log_id for log_id in words.unfreed() if log_id in dispatcher.links]
        for log_id in self._unfreed:
            dispatcher.links[log_id].lose()
        if self._unfreed:
            self._finishing.soon()

    def _finish(self) -> None:
        """Finish what the last life or a full disk has left undone, once due rows have left the wheel."""
        unstored, self._unstored = self._unstored, []
        for log_id, rows in unstored:
            self._free(log_id, rows, _nobody_hears)
        if self._unfreed and not self._dispatcher.takes_due_rows:
            self._finishing.after(FULL_AGAIN_MS)
            return
        unfreed, self._unfreed = self._unfreed, []
        for log_id in unfreed:
            self._give_up(log_id, self._words.lost[log_id].until_ms, _nobody_hears)

    def listing(self) -> list[TargetInfo]:
        """All targets, by log_id."""
        links, lost = self._dispatcher.links, self._words.lost
        subjects = Counter(self._dispatcher.targets.values())
        return [_info(log_id, links.get(log_id), subjects[log_id]) for log_id in sorted(links.keys() | lost.keys())]

    def lose(self, log_id: int, done: OnDone) -> None:
        """Give a target up for good: rows that it may hold become IN_DOUBT, and another target may get its subjects.

        Raises:
            UnknownServer: no subject is noted for it.
            NotReady: rows that are due still wait for the clock, or for a quarantined hour.
        """
        link = self._link(log_id)
        if not self._dispatcher.takes_due_rows:
            raise NotReady("the clock is not confirmed yet, so what is due can't be told; see `delayd clock`")
        if any(entry.hour is not None for entry in self._quarantine):
            raise NotReady("hours are quarantined that may have rows at it; decide on them: `delayd mend list`")
        # Each row that may be at the target is at the link from now on.
        self._dispatcher.step()
        until_ms = None if link.sender.window.earlier_settled else self._doubt_until_ms
        now_ms = self._clock.now_ms()
        link.hold()
        # After a crash nobody would know which of the due rows had left.
        pairs = self._words.lose(log_id, max(now_ms, self._doubt_until_ms), now_ms)
        pairs.removes.append(self._refusers.losing(log_id))

        def said(refused: DelaydError | None) -> None:
            if refused is not None:
                self._words.take_back(log_id)
                link.go_on()
                done(refused)
                return
            link.lose()
            self._refusers.lose(log_id)
            log.critical("target_lost target=%016x", log_id)
            self._give_up(log_id, until_ms, done)

        self._commit(pairs, said)

    def accept(self, log_id: int, done: OnDone) -> None:
        """Go on with a target that lost data, or that refuses this server as a restored one.

        Raises UnknownServer, and BadArgument when it has no alarm.
        """
        link = self._link(log_id)
        if not link.alarm:
            raise BadArgument(f"target {log_id:016x} has no alarm, so there is nothing to accept")
        restored = isinstance(link.refusal, ORIGIN_REFUSALS)
        log.critical("target_accepted target=%016x reason=%r", log_id, link.alarm)

        def store() -> None:
            # The end is reset before the decision is durable: a checkpoint right after it would otherwise write back
            # the end that the decision removes.
            before = self._ends.reset(log_id)
            last = AcceptedTarget(self._epoch, link.sender.window.last_id)
            pairs = self._words.accept(log_id, last, self._clock.now_ms())
            if restored:
                pairs.puts.append(self._refusers.accepting(log_id))
                restored_ms = self._clock.now_ms()
                pairs.puts.append((RESTORED_KEY, msgpack.packb(restored_ms)))
                # Before it is durable nothing is decided: the target that refuses this server keeps the fence up.
                self.on_restored(restored_ms)
            self._commit(pairs, partial(said, before))

        def said(before: TargetCount, refused: DelaydError | None) -> None:
            if restored:
                link.go_on()
            if refused is not None:
                self._ends.take_back(log_id, before)
                done(refused)
                return
            if restored:
                self._refusers.accept(log_id)
            elif link.is_lost:
                done(_not_noted(log_id))
                return
            link.accept(restored=restored)
            done(f"target {log_id:016x} is accepted as it is and spoken to again")

        def has_no_space(error: DiskFull) -> None:
            link.go_on()
            done(_not_stored(error))

        if restored:
            # Nothing is said to the target until the decision is stored: the next start would make the target forget
            # this server again, which must not happen once batches are in doubt there.
            link.hold()
            # Sequences that were given after the backup was made may be at the target: none of them is given twice
            # (I5).
            self._intake.jump(store, has_no_space)
        else:
            store()

    def _link(self, log_id: int) -> Link:
        link = self._dispatcher.links.get(log_id)
        if link is None or link.is_lost:
            raise _not_noted(log_id)
        return link

    def _give_up(self, log_id: int, until_ms: int | None, done: OnDone) -> None:
        rows = self._dispatcher.links[log_id].sender.give_up(until_ms)

        def full(why: str) -> None:
            self._outcomes.when_durable(partial(self._free, log_id, rows, _nobody_hears))
            done(DiskReserve(f"target {log_id:016x} is given up, and its subjects are free when there is space: {why}"))

        self._outcomes.when_durable(partial(self._free, log_id, rows, done), full)
        self._outcomes.commit()

    def _free(self, log_id: int, rows: int, done: OnDone) -> None:
        """All rows that the target may hold are in doubt, durably: store that its subjects are free."""

        def freed(refused: DelaydError | None) -> None:
            if refused is not None:
                # This is tried again until there is space; the next start does the same.
                self._unstored.append((log_id, rows))
                self._finishing.after(FULL_AGAIN_MS)
                done(refused)
                return
            self._words.freed(log_id)
            self._dispatcher.links[log_id].sender.window.earlier_settled = True
            self._dispatcher.free(log_id)
            log.warning("target_freed target=%016x in_doubt=%d", log_id, rows)
            doubted = counted(rows, "message that it may hold is|messages that it may hold are")
            done(f"target {log_id:016x} is given up; {doubted} in doubt")

        self._commit(self._words.free(log_id), freed)

    def _commit(self, pairs: Pairs, done: Callable[[DelaydError | None], None]) -> None:
        def written(ended: Done[None]) -> None:
            try:
                ended.result()
            except DiskFull as error:
                done(_not_stored(error))
            else:
                done(None)

        self._worker.submit(partial(self._state.commit, pairs.puts, pairs.removes), written)


def _info(log_id: int, link: Link | None, subjects: int) -> TargetInfo:
    if link is None or link.is_lost:
        return TargetInfo(log_id, "", "lost", subjects, 0, 0, "")
    address = str(link.endpoint or "")
    state = "refused" if link.alarm else link.phase.value
    waiting, undecided = link.sender.waiting_rows, len(link.sender.window)
    return TargetInfo(log_id, address, state, subjects, waiting, undecided, link.alarm)


def _not_noted(log_id: int) -> UnknownServer:
    return UnknownServer(f"no subject is noted for target {log_id:016x}; see `delayd target list`")


def _not_stored(error: DiskFull) -> DiskReserve:
    return DiskReserve(f"nothing was stored: {error.message}")


def _nobody_hears(told: DelaydError | str) -> None:
    """The operator's connection has gone with the life in which the decision was made."""


def _nobody_asks(restored_ms: int) -> None:
    """Until the part that decides about recurring schedules is made."""
