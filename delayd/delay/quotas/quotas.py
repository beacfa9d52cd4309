"""Quotas: they judge batches before these are made durable, and count what is pending (docs/quotas.md).

Invariant: a quota counts from the moment at which it is durable, and a subject is judged only by counts that are whole.

     set ──▶ count ──▶ store ──▶ in force                          start ──▶ count ──▶ in force
             (worker)  (worker)  (loop)                                      (worker; sends are told to slow down)

For the loop alone. While a counting reads the logs, the loop goes on to count what comes and what ends: rows are told
apart by their sequences, so nothing counts twice.

An example, with a quota of 10 pending messages of which 6 are pending. Batch A has 3 rows: it is admitted, and 9 count
from now on. Batch B has 2 rows: its second row is over the quota, so all of B is refused, and nothing of it counts. The
disk is full, and A is refused after all: 6 count again. B is sent again, and 8 count.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import Int64s
from delayd.batch.validate import rows_detail
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.filing.checkpointer import Checkpointer
from delayd.delay.filing.hour_table import FiledHours
from delayd.delay.intake import Intake
from delayd.delay.quotas.counting import (
    DEAD_LETTERS,
    AllCounted,
    CountedRows,
    Counting,
    Found,
    Pending,
    Snapshot,
    make_rows,
    rows_of_subjects,
)
from delayd.delay.quotas.seconds import SECOND_MS, Chosen, Given, SpreadWindow, choose
from delayd.delay.rows import Stored
from delayd.errors import (
    BadArgument,
    DamagedValue,
    DataError,
    DelaydError,
    DiskFull,
    DiskReserve,
    QuotaReached,
    SlowDown,
    Stopping,
)
from delayd.log.control import (
    NO_LIMITS,
    QUOTA_PREFIX,
    QuotaLimits,
    decode_limits,
    encode_limits,
    quota_key,
)
from delayd.log.hour import HAD_DEAD_LETTERS, EndedRows
from delayd.log.log import Log
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site

QUOTAS_MAX = 1_000
WATCHED_MAX = 100  # Subjects without a quota that are counted because callers ask for places.
WATCHED_MS = 600_000  # So long after the last such request.
PLACES_MAX = 65_536  # Rows of a request for places that are all due in one second.
APART_MAX = 512  # Rows of one that are not: each is looked for alone.
SPREAD_MS_MAX = 7 * 86_400_000
APART_S_MAX = 86_400  # And these are due within so much time, which bounds what one request looks at.
ROW_SECONDS = 64  # Finding a place for one row takes about as long as a look at so many seconds.
AT_ONCE_S = 16_384  # A request that looks at more seconds, in about a millisecond, is done beside the loop.
GIVEN_MAX = 1_000_000  # Instants that were given out and count still: eight bytes and a part of a profile each.
WAITING_MAX = 1_000  # Callers that wait until a subject is counted.
BYTES_MAX = 512 << 20  # What all counts take.
RETRY_MS = 10_000  # Between two countings of which the first could not be done.
NEAR_S = 3_600  # Most often a free second is found within an hour.
SEARCH_S = 7 * (86_400,)  # So far ahead it is looked for besides.

NO_SECONDS = np.empty(0, np.int64)

log = logging.getLogger(__name__)

OnSet = Callable[[DelaydError | None], None]
OnPlaces = Callable[[Int64s | DelaydError], None]


class SubjectTally(Pending):
    """What is pending for one subject, and its quota."""

    __slots__ = ("counted", "given", "limits", "number", "subject", "used_ms", "waiting")

    def __init__(self, subject: bytes, number: int, now_ms: int) -> None:
        super().__init__()
        self.subject = subject
        self.number = number
        self.limits = NO_LIMITS
        self.counted = False  # Whether the rows that were there before the counting are in the counts.
        self.waiting: list[OnSet] = []  # Called when it is counted, or can't be.
        self.given = Given()
        self.used_ms = now_ms  # When it was last needed, monotonic.


class QuotaUse(NamedTuple):
    """A subject's quota, and how much of it is used."""

    subject: bytes
    limits: QuotaLimits
    counted: bool
    rows: int
    bytes: int
    highest_ms: int  # The most loaded second that is to come; 0 when nothing is due.
    highest: int  # How many messages are due in it.


@dataclass(frozen=True, slots=True)
class QuotaSources:
    """What the counts are derived from."""

    log: Log
    filed: FiledHours
    outcomes: OutcomeLog
    checkpointer: Checkpointer
    intake: Intake
    ended: Callable[[], list[EndedRows]]  # Rows that decisions have ended; other threads may read them.
    # The delay servers that may hold messages, as meta named them last; this server may be missing.
    peers: Callable[[], frozenset[int]] = frozenset


class _Ask(NamedTuple):
    """A request for places."""

    subject: bytes
    due_ms: Int64s
    spread_ms: int
    answer: OnPlaces


class _Wish(NamedTuple):
    """A quota that an operator wants."""

    subject: bytes
    limits: QuotaLimits
    done: OnSet


class _Share(NamedTuple):
    """Rows of a batch that count for one subject, before the batch is durable."""

    tally: SubjectTally
    rows: NDArray[np.intp]
    seconds: Int64s
    sizes: Int64s


class Quotas:
    """All quotas of a delay server."""

    def __init__(self, site: Site, books: QuotaSources, horizon_ms: int) -> None:
        self._site = site
        self._state = site.state
        self._clock = site.clock
        self._worker = site.worker
        self._books = books
        self._horizon_ms = horizon_ms
        self._limits: dict[bytes, QuotaLimits] = {}  # Durable ones, of the whole cluster.
        self._peers = frozenset({site.log_id})  # The servers that share them.
        self._tallies: dict[bytes, SubjectTally] = {}
        self._by_number: dict[int, SubjectTally] = {}
        self._numbers: dict[bytes, int] = {}
        self._next_number = 0
        self._rows = AllCounted()
        # By the identity of batches that are not durable yet, with the lowest number of subjects that came later.
        self._under_way: dict[int, tuple[int, list[_Share]]] = {}
        self._counting = False
        self._ended: list[NDArray[np.uint64]] = []  # Rows that ended while the logs are read.
        self._reads_from: int | None = None  # Where the message log is read from meanwhile.
        self._wishes: deque[_Wish] = deque()
        self._setting = False
        self._asks: deque[_Ask] = deque()
        self._choosing = False
        self._rest = site.alarms.alarm(self._count)  # While it is on, no counting begins.
        site.alarms.every(SECOND_MS, self._each_second)
        self._stopping = False
        self._letters_left_out = False  # Whether there are more dead letters than memory for their count.
        self._full = False  # Whether the counts take as much memory as they may.
        damaged: list[DamagedValue] = []
        for key, value in site.state.scan(QUOTA_PREFIX, damaged):
            subject = key[len(QUOTA_PREFIX) :]
            self._limits[subject] = decode_limits(value)
            self._tally(subject).limits = self._share(self._limits[subject])
        for error in damaged:
            log.critical("quota_lost subject=%s reason=%r", error.key[len(QUOTA_PREFIX) :].decode(), str(error))

    @property
    def uncounted(self) -> int:
        """How many subjects have a quota and are not counted, so that nothing can be sent to them."""
        return sum(not self._tallies[subject].counted for subject in self._limits)

    @property
    def dead_letters(self) -> int | None:
        """How many dead letters are kept here; None while they are not counted."""
        tally = self._tallies.get(DEAD_LETTERS)
        if tally is None:
            return None if self._letters_left_out else 0
        return tally.rows if tally.counted else None

    def count_dead_letters(self) -> None:
        """Some are here: count them from now on."""
        if not self._letters_left_out:
            self._tally(DEAD_LETTERS)

    @property
    def is_full(self) -> bool:
        """Whether the counts take as much memory as they may, so that nothing more can be sent to counted subjects."""
        return self._full

    def lowest_message_log_offset(self) -> int | None:
        """Lowest message log offset that a counting may still read."""
        return self._reads_from

    def _each_second(self) -> None:
        """Forget seconds that are over, and count what is not counted."""
        now_s = self._clock.now_ms() // SECOND_MS
        idle_ms = self._clock.monotonic_ms() - WATCHED_MS
        for tally in list(self._tallies.values()):
            tally.profile.forget_before(now_s)
            tally.given.expire(self._clock.monotonic_ms())
            if tally.used_ms <= idle_ms:
                self._drop_unused(tally)
        if self._held_bytes() > BYTES_MAX:
            self._leave_letters_out()
        self._full = self._held_bytes() > BYTES_MAX
        self._look_at_peers()
        self._count()

    def _leave_letters_out(self) -> None:
        """Count no dead letters until the next start: no send is to wait because they take the memory."""
        if (tally := self._tallies.get(DEAD_LETTERS)) is not None:
            log.warning("dead_letters_not_counted rows=%d", tally.rows)
            self._letters_left_out = True
            self._drop([tally])

    def _look_at_peers(self) -> None:
        """Take another share of each quota when delay servers came or went."""
        peers = self._books.peers() | {self._site.log_id}
        if peers == self._peers:
            return
        self._peers = peers
        for subject, limits in self._limits.items():
            self._tallies[subject].limits = self._share(limits)
        if self._limits:
            log.info("quotas_shared servers=%d", len(peers))

    def _share(self, limits: QuotaLimits) -> QuotaLimits:
        return limits.share(sorted(self._peers).index(self._site.log_id), len(self._peers))

    def stop(self) -> None:
        """Give up a counting that is under way: the server stops."""
        self._stopping = True

    # Requests.

    def set(self, subject: bytes, limits: QuotaLimits, done: OnSet) -> None:
        """Give a subject a quota, or take it away with `NO_LIMITS`; ``done`` is called when that is durable and in
        force.

        Raises:
            BadArgument, SlowDown, Stopping: nothing is done.
        """
        if self._stopping:
            raise Stopping("this server is stopping; set the quota again when it is back")
        if limits.any and subject not in self._limits and len(self._limits) >= QUOTAS_MAX:
            raise BadArgument(f"{QUOTAS_MAX} subjects have a quota, which is the most; lift another one first")
        if len(self._wishes) >= WAITING_MAX:
            raise SlowDown("this server has as many quotas to set as it can remember; set it again later")
        self._wishes.append(_Wish(subject, limits, done))
        self._go_on()

    def listing(self, after: bytes = b"", prefix: bytes = b"", most: int = QUOTAS_MAX) -> list[QuotaUse]:
        """The first ``most`` quotas of subjects that begin with ``prefix``, behind the subject ``after``, in the order
        of their names.
        """
        names = sorted(name for name in self._limits if name > after and name.startswith(prefix))
        return [self._use(name) for name in names[:most]]

    def _use(self, subject: bytes) -> QuotaUse:
        tally = self._tallies[subject]
        if not tally.counted:
            return QuotaUse(subject, self._limits[subject], False, 0, 0, 0, 0)
        second, highest = tally.profile.highest_from(self._clock.now_ms() // SECOND_MS)
        return QuotaUse(subject, self._limits[subject], True, tally.rows, tally.bytes, second * SECOND_MS, highest)

    def _go_on(self) -> None:
        """Set the oldest wanted quota: one at a time, so that the last one wins."""
        if self._setting or not self._wishes:
            return
        self._setting = True
        wish = self._wishes.popleft()
        if not wish.limits.any:
            self._store(wish, None)
        else:
            self._when_counted(self._tally(wish.subject), partial(self._store, wish))

    def _store(self, wish: _Wish, error: DelaydError | None) -> None:
        if error is not None:
            self._set(wish, error)
            return
        key = quota_key(wish.subject)
        puts = [(key, encode_limits(wish.limits))] if wish.limits.any else []
        removes = [] if wish.limits.any else [key]
        self._worker.submit(partial(self._state.commit, puts, removes), partial(self._stored, wish))

    def _stored(self, wish: _Wish, done: Done[None]) -> None:
        try:
            done.result()
        except DiskFull:
            self._set(wish, DiskReserve("this server's disk is full, and the quota is not set; free space there"))
            return
        subject, limits, servers = wish.subject.decode(), tuple(wish.limits), len(self._peers)
        log.warning("operator action=set_quota subject=%s limits=%r servers=%d", subject, limits, servers)
        if wish.limits.any:
            self._limits[wish.subject] = wish.limits
            # Files that were restored since make the server count anew; the quota is in force all the same.
            self._tally(wish.subject).limits = self._share(wish.limits)
        else:
            self._limits.pop(wish.subject, None)
            if wish.subject in self._tallies:
                self._tallies[wish.subject].limits = NO_LIMITS
                self._drop_unused(self._tallies[wish.subject])
        self._set(wish, None)

    def _set(self, wish: _Wish, error: DelaydError | None) -> None:
        self._setting = False
        if error is not None and wish.subject in self._tallies:
            self._drop_unused(self._tallies[wish.subject])
        wish.done(error)
        self._go_on()

    def places(self, subject: bytes, due_ms: Int64s, spread_ms: int, answer: OnPlaces) -> None:
        """Choose an instant for each of these messages, between its due instant and ``spread_ms`` after it; ``answer``
        is called with the instants, in the same order.

        Raises:
            BadArgument, SlowDown, Stopping: nothing is done.
        """
        if self._stopping:
            raise Stopping("this server is stopping; ask again when it is back")
        if spread_ms > SPREAD_MS_MAX:
            raise BadArgument(f"a spread of {spread_ms} ms is longer than 7 days")
        seconds = due_ms // SECOND_MS
        apart = int(seconds.max()) - int(seconds.min())
        if len(due_ms) > (APART_MAX if apart else PLACES_MAX):
            raise BadArgument(
                f"places for {len(due_ms)} messages; ask for {APART_MAX}, or for {PLACES_MAX} of one second, at a time"
            )
        if apart > APART_S_MAX:
            raise BadArgument("the messages are due more than a day apart; ask for the places of one day at a time")
        watched = len(self._tallies) - len(self._limits)
        if subject not in self._tallies and watched >= WATCHED_MAX:
            raise SlowDown("this server counts as many subjects as it can; send without spread, or ask again later")
        tally = self._tally(subject)
        given = sum(each.given.count for each in self._tallies.values()) + sum(len(ask.due_ms) for ask in self._asks)
        if len(tally.waiting) >= WAITING_MAX or len(self._asks) >= WAITING_MAX or given > GIVEN_MAX:
            raise SlowDown("so many instants were asked for that no more can be remembered; ask again later")

        def counted(error: DelaydError | None) -> None:
            if error is not None:
                answer(error)
                return
            self._asks.append(_Ask(subject, due_ms, spread_ms, answer))
            self._choose_next()

        self._when_counted(tally, counted)

    def _choose_next(self) -> None:
        """Choose for one request after the other, for each sees what was given to those before it. Large ones are done
        beside the loop.
        """
        while self._asks and not self._choosing:
            ask = self._asks.popleft()
            window = self._window(ask)
            self._choosing = True
            if len(window.loads) + ROW_SECONDS * len(ask.due_ms) <= AT_ONCE_S:
                self._chosen(ask, window, choose(window))
            else:
                self._worker.submit(partial(choose, window), partial(self._chosen_beside, ask, window), Priority.DUE)

    def _chosen_beside(self, ask: _Ask, window: SpreadWindow, done: Done[Chosen | None]) -> None:
        self._chosen(ask, window, done.result())
        self._choose_next()

    def _window(self, ask: _Ask) -> SpreadWindow:
        """The seconds from which a request gets its places, and how loaded they are now."""
        tally, now_ms, due_ms = self._tally(ask.subject), self._clock.now_ms(), ask.due_ms
        tally.used_ms = self._clock.monotonic_ms()
        tally.given.expire(tally.used_ms)
        first_ms = np.maximum(due_ms, now_ms)
        last_ms = np.maximum(first_ms, np.minimum(due_ms + ask.spread_ms, now_ms + self._horizon_ms))
        firsts, lasts = first_ms // SECOND_MS, last_ms // SECOND_MS
        begin, length = int(firsts.min()), int(lasts.max() - firsts.min()) + 1
        if firsts.min() == firsts.max():
            # Every row's window has a part of each of these seconds. Most often enough seconds are empty soon, and none
            # is better.
            length = int(lasts.min()) - begin + 1
            loads = _loads(tally, begin, min(length, NEAR_S + 2 * len(due_ms)))
            if len(loads) < length and len(loads) - int(np.count_nonzero(loads)) < len(due_ms):
                loads = _loads(tally, begin, length)
        else:
            loads = _loads(tally, begin, length)
        return SpreadWindow(begin, loads, first_ms, last_ms, tally.limits.per_second)

    def _chosen(self, ask: _Ask, window: SpreadWindow, chosen: Chosen | None) -> None:
        self._choosing = False
        tally = self._tally(ask.subject)
        if chosen is not None:
            tally.given.add(chosen.seconds, self._clock.monotonic_ms())
            ask.answer(chosen.instants)
            return
        ask.answer(
            QuotaReached(
                f"each second of the window has as many messages of {ask.subject.decode()} as its quota takes"
                f" (per_second {window.limit}); send with a longer spread, or later",
                next_free_ms=self._free_from_ms(tally, int(window.last_ms.max()) // SECOND_MS, NO_SECONDS),
            )
        )

    # Batches.

    def admit(self, batch: Batch) -> None:
        """Judge a batch that was not refused otherwise, and count its rows from now on.

        Raises:
            QuotaReached: with the rows at fault; nothing of the batch counts.
            SlowDown: with its rows: a subject is being counted, or there is no room for more counts.
        """
        accepted_ms = max(self._clock.now_ms(), self._books.intake.appended_at_ms)
        shares = self._shares(batch, accepted_ms)
        if not shares:
            return
        if self._full:
            raise SlowDown(
                "this server counts as many messages of subjects with a quota as it can; send again later",
                rows=rows_detail(np.sort(np.concatenate([share.rows for share in shares]))),
            )
        refused: list[NDArray[np.intp]] = []
        why: QuotaReached | None = None
        for share in shares:
            tally = share.tally
            if not tally.limits.any:
                continue
            if not tally.counted:
                raise SlowDown(
                    f"the messages of {tally.subject.decode()} are being counted for its quota; send again",
                    rows=rows_detail(share.rows),
                )
            if _fits(tally, share):
                continue
            taken, limit = _judge(tally, share)
            if not taken.all():
                over = np.flatnonzero(~taken)
                refused.append(share.rows.take(over))
                why = why or self._over(tally, share, taken, limit, accepted_ms)
        if why is not None:
            why.details["rows"] = rows_detail(np.sort(np.concatenate(refused)))
            raise why
        for share in shares:
            share.tally.add(share.seconds, share.sizes)
            share.tally.given.arrived(share.seconds)
        self._under_way[id(batch)] = self._next_number, shares

    def refused(self, batch: Batch) -> None:
        """A batch is refused; if `admit` took it, its rows do not count any more."""
        _, shares = self._under_way.pop(id(batch), (0, []))
        for tally, _, seconds, sizes in shares:
            tally.remove(seconds, sizes)

    def took(self, stored: Sequence[Stored], appended_at_ms: int) -> None:
        """Rows are durable. Those that `admit` did not see count from now on: the server's own batches, and batches
        that came before their subject was counted.
        """
        for entry in stored:
            later_than, admitted = self._under_way.pop(id(entry.batch), (0, []))
            shares = [share for share in admitted if self._by_number.get(share.tally.number) is share.tally]
            if later_than < self._next_number:
                new = [share for share in self._shares(entry.batch, appended_at_ms) if share.tally.number >= later_than]
                for share in new:
                    share.tally.add(share.seconds, share.sizes)
                shares += new
            for share in shares:
                sequences = share.rows.astype(np.uint64) + np.uint64(entry.base_sequence)
                self._rows.add(make_rows(sequences, share.tally.number, share.seconds, share.sizes))

    def ended(self, parts: Sequence[NDArray[np.uint64]]) -> None:
        """Rows have ended, durably; it may be said twice."""
        if not self._tallies or not parts:
            return
        sequences = np.sort(np.concatenate(parts), kind="stable")
        if self._counting:
            self._ended.append(sequences)
        self._take_off(self._rows.remove(sequences))

    def _take_off(self, rows: CountedRows) -> None:
        now_s = self._clock.now_ms() // SECOND_MS
        for number in np.unique(rows.subjects).tolist():
            tally = self._by_number.get(number)
            if tally is not None:
                own = rows.take(np.flatnonzero(rows.subjects == number))
                tally.remove(own.seconds.astype(np.int64), own.sizes, now_s)

    def _shares(self, batch: Batch, accepted_ms: int) -> list[_Share]:
        parts = rows_of_subjects(batch, self._numbers, accepted_ms)
        return [_Share(self._by_number[number], rows, seconds, sizes) for number, rows, seconds, sizes in parts]

    def _over(
        self, tally: SubjectTally, share: _Share, taken: NDArray[np.bool_], limit: str, now_ms: int
    ) -> QuotaReached:
        """The refusal of the rows of a subject that are not taken. Senders share batches, so it has no row's number."""
        next_free_ms = self._next_free_ms(tally, share, taken, limit, now_ms)
        first = int(share.seconds[np.flatnonzero(~taken)[0]])
        # What is due later would be due in the same full second when it is sent again.
        waits = limit == "per_second" and first <= now_ms // SECOND_MS and next_free_ms > now_ms
        what = "the next second with room begins" if limit == "per_second" else "the next pending message is due"
        hint = f"; {what} at {_instant_text(next_free_ms)}" if next_free_ms else ""
        return QuotaReached(
            f"the quota of {tally.subject.decode()} ({limit} {getattr(tally.limits, limit)}) takes no more{hint}",
            retry_after_ms=next_free_ms - now_ms if waits else None,
            next_free_ms=next_free_ms,
        )

    def _next_free_ms(
        self, tally: SubjectTally, share: _Share, taken: NDArray[np.bool_], limit: str, now_ms: int
    ) -> int:
        """When the first refused row would find a place; 0 when nobody knows."""
        if limit != "per_second":
            second = tally.profile.next_from(now_ms // SECOND_MS + 1)
            return 0 if second is None else second * SECOND_MS
        first = int(share.seconds[np.flatnonzero(~taken)[0]])
        return self._free_from_ms(tally, first, share.seconds.compress(taken))

    def _free_from_ms(self, tally: SubjectTally, first: int, others: Int64s) -> int:
        """The begin of the first second from ``first`` on that has a place, when ``others`` are counted too; else
        0.
        """
        most = tally.limits.per_second or 0
        # Most often the first hour has a place; the rest is looked at a day at a time.
        for length in (NEAR_S, *SEARCH_S) if most else ():
            counts = tally.profile.window(first, length)
            np.add.at(counts, others.compress((others >= first) & (others < first + length)) - first, 1)
            at = int((counts < most).argmax())
            if counts[at] < most:
                return (first + at) * SECOND_MS
            first += length
        return 0

    # Counting.

    def _when_counted(self, tally: SubjectTally, call: OnSet) -> None:
        if tally.counted:
            call(None)
            return
        tally.waiting.append(call)
        self._count()

    def _count(self) -> None:
        """Begin to count the subjects that are not counted yet, one reading at a time."""
        wanted = [tally for tally in self._tallies.values() if not tally.counted]
        if len(wanted) > 1:
            # Dead letters are counted last, and by themselves: that reads fewer hours, and nobody waits for it.
            wanted = [tally for tally in wanted if tally.subject != DEAD_LETTERS]
        if self._counting or not wanted or self._stopping or self._rest.at_ms is not None:
            return
        # What was counted until now is in the logs that are read; only rows that come from now on are not.
        wanted = self._begin_anew(wanted)
        books = self._books
        snapshot = Snapshot(
            {tally.subject: tally.number for tally in wanted},
            HAD_DEAD_LETTERS if wanted[0].subject == DEAD_LETTERS else 0,
            books.filed.hours.rows.copy(),
            books.filed.beside.rows.copy(),
            books.checkpointer.replay,
            books.intake.durable.offset,
            {hour: end.length for hour, end in books.outcomes.ends.items()},
            books.ended(),
            BYTES_MAX - self._held_bytes(),
        )
        self._counting, self._ended, self._reads_from = True, [], snapshot.replay.offset
        work = Counting(self._site, books.log, snapshot, self._give_way).run
        self._worker.submit(work, partial(self._counted, wanted), Priority.SPARE)

    def _give_way(self) -> None:
        """Called on the worker thread, between two pieces of a counting."""
        if self._stopping:
            raise Stopping("this server is stopping")
        self._worker.give_way()

    def _counted(self, tallies: list[SubjectTally], done: Done[Found]) -> None:
        self._reads_from = None
        try:
            found = done.result()
        except (SlowDown, Stopping, DataError) as error:
            if isinstance(error, SlowDown) and tallies[0].subject == DEAD_LETTERS:
                self._leave_letters_out()
            self._rest.after(RETRY_MS)
            log.warning("quotas_not_counted subjects=%d reason=%r", len(tallies), str(error))
            told = error if not isinstance(error, DataError) else SlowDown(f"nothing could be counted: {error}")
            self._counting, self._ended = False, []
            self._tell(tallies, told)
            return
        for tally in tallies:
            tally.merge(found.pending[tally.number])
        for rows in found.rows:
            self._rows.found(rows)
        self._counting = False
        for tally in tallies:
            if self._by_number.get(tally.number) is tally:
                tally.counted = True
            else:
                # Its quota was lifted meanwhile, or it is to be counted anew.
                self._rows.forget(tally.number)
        ended, self._ended = self._ended, []
        if ended:
            self._take_off(self._rows.remove(np.sort(np.concatenate(ended), kind="stable")))
        self._tell(tallies, None)
        self._count()

    def _tell(self, tallies: list[SubjectTally], error: DelaydError | None) -> None:
        """Call those who wait for these subjects; those of subjects that are to be counted anew wait on."""
        waiting: list[OnSet] = []
        for tally in tallies:
            if self._by_number.get(tally.number) is tally:
                waiting += tally.waiting
                tally.waiting = []
                if error is not None:
                    self._drop_unused(tally)
        # A call may ask for the same subject again, so what is told to the others is settled before.
        for call in waiting:
            call(error)

    def _tally(self, subject: bytes) -> SubjectTally:
        tally = self._tallies.get(subject)
        if tally is None:
            # A number is never given again: rows of an earlier tally may still be on their way.
            tally = self._tallies[subject] = SubjectTally(subject, self._next_number, self._clock.monotonic_ms())
            self._numbers[subject] = self._next_number
            self._by_number[self._next_number] = tally
            self._next_number += 1
            if subject != DEAD_LETTERS:
                # No batch of a client has dead letters, so none needs a look for them.
                self._books.intake.gate = self
        return tally

    def _begin_anew(self, tallies: list[SubjectTally]) -> list[SubjectTally]:
        """Count subjects from nothing on: a new number tells the rows of each from those that were counted before."""
        self._drop(tallies)
        begun = [self._tally(tally.subject) for tally in tallies]
        for again, tally in zip(begun, tallies, strict=True):
            again.limits, again.waiting, again.given = tally.limits, tally.waiting, tally.given
        return begun

    def _drop_unused(self, tally: SubjectTally) -> None:
        """Count a subject no more that has no quota, if nobody waits until it is counted; and dead letters when none
        is left.
        """
        if tally.subject == DEAD_LETTERS:
            needed = bool(tally.rows) or not tally.counted
        else:
            needed = tally.subject in self._limits or bool(tally.waiting)
        if not needed:
            self._drop([tally])

    def _drop(self, tallies: list[SubjectTally]) -> None:
        for tally in tallies:
            del self._tallies[tally.subject], self._numbers[tally.subject], self._by_number[tally.number]
        if not self._tallies.keys() - {DEAD_LETTERS}:
            # No batch needs a look, nor do those that are under way.
            self._books.intake.gate = None
            self._under_way.clear()
        if self._tallies:
            self._rows.forget(*(tally.number for tally in tallies))
        else:
            self._rows = AllCounted()

    def _held_bytes(self) -> int:
        return self._rows.held_bytes + sum(tally.profile.held_bytes for tally in self._tallies.values())


def _instant_text(instant_ms: int) -> str:
    return datetime.fromtimestamp(instant_ms / SECOND_MS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _loads(tally: SubjectTally, first: int, count: int) -> Int64s:
    """How many messages each of ``count`` seconds has, with those that were promised an instant in it."""
    loads = tally.profile.window(first, count)
    if tally.given.count:
        loads += tally.given.window(first, count)
    return loads


def _fits(tally: SubjectTally, share: _Share) -> bool:
    """Whether the quota surely takes all rows, as it nearly always does."""
    limits, count = tally.limits, len(share.rows)
    if limits.pending is not None and tally.rows + count > limits.pending:
        return False
    if limits.pending_bytes is not None and tally.bytes + int(share.sizes.sum()) > limits.pending_bytes:
        return False
    return limits.per_second is None or int(tally.profile.at(share.seconds).max()) + count <= limits.per_second


def _judge(tally: SubjectTally, share: _Share) -> tuple[NDArray[np.bool_], str]:
    """Which rows the quota takes, and the limit that refuses the first of the others.

    An example: at most 2 a second and 10 pending are allowed; 8 are pending, one of them in second 60. Of four rows in
    the seconds 60, 60, 70 and 71 the first is taken. The second would be the third of its second. The third row is
    taken and makes 10, so the fourth is over the pending ones. The answer names ``per_second``, which was first.
    """
    limits, count = tally.limits, len(share.rows)
    taken = np.ones(count, np.bool_)
    refused_by = np.zeros(count, np.uint8)
    if limits.per_second is not None:
        order = np.argsort(share.seconds, kind="stable")
        ordered = share.seconds.take(order)
        begins = np.searchsorted(ordered, ordered)
        places = tally.profile.at(ordered) + np.arange(count) - begins
        over = order.compress(places >= limits.per_second)
        taken[over], refused_by[over] = False, 1
    if limits.pending is not None:
        over = np.flatnonzero(taken)[max(0, limits.pending - tally.rows) :]
        taken[over], refused_by[over] = False, 2
    if limits.pending_bytes is not None:
        left = np.flatnonzero(taken)
        over = left.compress(np.cumsum(share.sizes.take(left)) > limits.pending_bytes - tally.bytes)
        taken[over], refused_by[over] = False, 3
    first = refused_by[np.flatnonzero(~taken)[0]] if not taken.all() else 0
    return taken, ("", *QuotaLimits._fields)[first]
