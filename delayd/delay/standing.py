"""Standing: what a delay server says of itself: figures for STATUS, what waits for an operator, what it refuses for
now, since when everything has an outcome, and whether it holds nothing any more.

Two of these words others rely on. A checkpoint publishes the *settled* instant, before which everything that fell due
has an outcome (rule S7), and what holds it up. With it the audit can tell a message that still waits from one that was
forgotten: a row that is held anywhere in this server keeps the instant below the row's due time, but a forgotten row
does not. An example: it is 10:00:10. Messages due at 10:00:03 and 10:00:05 wait for the targets A and B, and the
wheel's next one is due at 10:00:12. The settled instant is 10:00:10; that of A is 10:00:03, that of B 10:00:05. A
message due at 10:00:04 whose subject has no target yet takes that of the server back to 10:00:04.

The other word: a server that has said that it holds nothing may leave the cluster for good (docs/drain.md): it takes
nothing new until an operator takes it back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from delayd.delay.handoff import lateness
from delayd.delay.parts import Asked, Handoff, Logs, Memory, Upkeep
from delayd.delay.rows import Rows, due_at_ms
from delayd.errors import BadArgument, DelaydError, ServerInUse
from delayd.hours import HOUR_MS, hour_name, hour_of_ms, hour_start_ms
from delayd.log.checkpoint import Value
from delayd.log.hour import SEALED
from delayd.machine.identity import Site
from delayd.machine.operating import CLOCK_UNCONFIRMED, Wait, WaitKind, counted
from delayd.wire.asked import DrainOrder, DrainProgress
from delayd.wire.meta import slots_text

log = logging.getLogger(__name__)

WAITS_FOR_CLOCK = "the clock of the delay server is not confirmed; see `delayd clock`"
RETRY_AFTER_MS = 1_000  # The hint to an operator who asks whether a server may leave while it holds something.
MINUTE_MS = 60_000
DAY_HOURS = 23  # Behind the hour that counts as near.
OnRetired = Callable[[str | DelaydError], None]


class Standing:
    """Looks at everything that may hold a message; belongs to the loop."""

    def __init__(self, site: Site, logs: Logs, memory: Memory, handoff: Handoff, upkeep: Upkeep, asked: Asked) -> None:
        self._site = site
        self._logs, self._intake = logs, logs.intake
        self._memory = memory
        self._dispatcher = handoff.dispatcher
        self._upkeep = upkeep
        self._asked = asked

    def counters(self) -> dict[str, int]:
        """Figures for STATUS."""
        links = self._dispatcher.links.values()
        return {
            "next_sequence": self._intake.next_sequence,
            "accepted_rows": self._intake.durable_sequence - 1 - sum([count for _, count in self._intake.skipped]),
            "message_log_end": self._intake.durable.offset,
            "replay_offset": self._upkeep.checkpointer.replay.offset,
            "pending": self.pending,
            "free_bytes": self._intake.reserve.free_bytes,
            "pending_rows": len(self._memory.hours.pending),
            "loaded_rows": len(self._memory.hours.wheel),
            "scheduled_rows": self._memory.filed.count(0, 0),
            "waiting_rows": sum(link.sender.waiting_rows for link in links) + self._dispatcher.unrouted_rows,
            "leaving_rows": self._asked.endings.drain.rows,
            "undecided_batches": sum(len(link.sender.window) for link in links),
            "targets": len(links),
            "targets_away": self._dispatcher.targets_away,
            "quarantined_rows": len(self._memory.held),
            "quarantined_hours": self._memory.quarantine.hours(),
            "quarantined": len(self._memory.quarantine),
            "dead_rows": sum([end.dead for _, end in self._logs.outcomes.counted()]),
            **self._letters(),
            **{f"ended_{ending}": rows for ending, rows in self._logs.outcomes.ended().items()},
            **self._horizons(),
            "oldest_overdue_ms": self._oldest_overdue_ms(),
            "subjects": self._memory.hours.subjects.known,
            "subjects_bytes": self._memory.hours.subjects.held_bytes,
            "producers": len(self._logs.producers),
            "producers_bytes": self._logs.producers.held_bytes,
            "queued_bytes": self._intake.queued_bytes,
            "owed_rows": len(self._memory.ledger.owed),
            **self._asked.endings.held(),
            **{f"occurrences_{end}": count for end, count in self._asked.endings.carriers.occurrences.items()},
            **lateness.figures(link.sender.lateness for link in links),
        }

    def _letters(self) -> dict[str, int]:
        letters = self._asked.quotas.dead_letters
        return {} if letters is None else {"dead_letters": letters}

    @property
    def pending(self) -> int:
        """All messages without an outcome, loaded or not: those that are filed in unsealed hours and those that are
        not filed yet, without the outcomes of these hours. Outcomes of the last moment are not in it yet, nor are
        those that only a dispatch log has which was damaged before this life.
        """
        memory = self._memory
        sealed = set(memory.hours.filed.sealed())
        ended = sum([end.rows for hour, end in self._logs.outcomes.counted() if hour not in sealed])
        return memory.filed.count(SEALED, 0) + len(memory.hours.pending) - ended

    def _horizons(self) -> dict[str, int]:
        """How many pending messages are due when, each counted once, and until when the furthest is due.

        An example: it is 10:20. Messages that are due by 10:21 count as ``pending_minute``, by half-second slots of the
        wheel. All other messages count by the hour in which they are filed: those of 10:00 and 11:00 as
        ``pending_hour``, the 23 hours behind as ``pending_day``, later ones as ``pending_further``. Messages that have
        left the wheel and have no outcome yet are ``pending_overdue``.
        """
        memory, now_ms = self._memory, self._site.clock.now_ms()
        hours = self.pending_by_hour()
        wheel, last_near = memory.hours.wheel, hour_of_ms(now_ms) + 1
        later = sum([rows for hour, rows in hours.items() if hour > last_near])
        day = sum([rows for hour, rows in hours.items() if last_near < hour <= last_near + DAY_HOURS])
        near = sum(hours.values()) - later
        unloaded = sum([rows for hour, rows in hours.items() if memory.hours.loaded_until < hour <= last_near])
        minute = wheel.count_until(now_ms + MINUTE_MS)
        waits = sum([wheel.len_of(hour) for hour in wheel.hours() if hour <= last_near]) + unloaded
        furthest = max((hour for hour, rows in hours.items() if rows > 0), default=None)
        return {
            "pending_overdue": max(0, near - waits),
            "pending_minute": minute,
            "pending_hour": max(0, min(near, waits) - minute),
            "pending_day": day,
            "pending_further": later - day,
            "furthest_due_ms": 0 if furthest is None else hour_start_ms(furthest + 1),
        }

    def pending_by_hour(self) -> Counter[int]:
        """How many messages of each unsealed hour have no outcome, filed or not. Those that were due when they were
        accepted count in the hour of that. As of `pending`, outcomes of the last moment are not in it.
        """
        memory = self._memory
        hours = Counter(memory.hours.pending.count_by_hour())
        for table in (memory.filed.hours.rows, memory.filed.beside.rows):
            unsealed = table[table["flags"] & np.uint64(SEALED) == 0]
            hours.update(dict(zip(unsealed["hour"].tolist(), unsealed["rows"].tolist(), strict=True)))
        sealed = set(memory.hours.filed.sealed())
        for hour, end in self._logs.outcomes.counted():
            if hour not in sealed:
                hours[hour] -= end.rows
        return hours

    def _oldest_overdue_ms(self) -> int:
        """For how long the message has been due that has waited longest, and has no durable outcome; 0: none has."""
        lowest = [_lowest_ms(link.sender.parts()) for link in self._dispatcher.links.values()]
        lowest += [_lowest_ms(self._dispatcher.unrouted()), _lowest_ms(self._memory.held.waiting())]
        lowest.append(self._memory.hours.wheel.next_due_ms(0))
        now_ms = self._site.clock.now_ms()
        return max(0, now_ms - min((each for each in lowest if each is not None), default=now_ms))

    def waits(self) -> Iterator[Wait]:
        """List the states that only an operator can end."""
        yield from [*self._asked.fence.waits(), *self._site.state.waits()]
        reserve = self._intake.reserve
        if reserve.closed:
            yield WaitKind.DISK_FULL.wait("free disk space is at its reserve")
        elif reserve.far_from_ms is not None:
            later = hour_name(hour_of_ms(reserve.far_from_ms))
            yield WaitKind.DISK_NEARLY_FULL.wait("free disk space nears its reserve", hour=later)
        if blocked := self._logs.outcomes.blocked:
            yield WaitKind.OUTCOMES_WAIT.wait(f"outcomes can't be written: {blocked}")
        if not self._site.clock.confirmed:
            held = "deliveries after a restart of the machine, and sealing"
            yield WaitKind.CLOCK.wait(CLOCK_UNCONFIRMED, held=held, role="delay")
        elif self._intake.filed_from_ms - self._site.clock.now_ms() > HOUR_MS:
            until = hour_name(hour_of_ms(self._intake.filed_from_ms))
            why = (
                f"a clock that was ahead has stamped the message log until {until}; messages leave on time all the same"
            )
            yield WaitKind.CLOCK_WAS_AHEAD.wait(why)
        if self._dispatcher.unrouted_rows:
            rows = counted(self._dispatcher.unrouted_rows, "due message|due messages")
            if not self._dispatcher.given_up:
                yield WaitKind.NO_TARGET.wait("their subjects have no realtime server", due_messages=rows)
            # Either no realtime server serves their subjects, or their subjects are routed to one that was given up.
            for target in self._dispatcher.given_up:
                why = f"their subjects have no realtime server, or {target:016x}, which was given up for good"
                yield WaitKind.TARGET_GIVEN_UP.wait(why, due_messages=rows, target=f"{target:016x}")
        for link in self._dispatcher.links.values():
            yield from link.waits()
        for entry in sorted(self._memory.quarantine.listing(), key=lambda entry: entry.id):
            yield entry.wait(self._site.log_id)
        yield from self._asked.endings.drain.waits()
        slots = self._asked.endings.owned_slots
        if slots.leaving.any():
            why = f"their messages are on their way to delay server {slots.leaving_to:016x}, and a drain has to finish"
            text = slots_text(slots.leaving)
            yield WaitKind.SLOTS_LEAVING.wait(why, slots=text, log_id=f"{self._site.log_id:016x}")

    def refuses(self) -> Iterator[Wait]:
        """List what this server refuses for now; each of these states ends by itself."""
        reserve = self._intake.reserve
        if reserve.behind or reserve.behind_from_ms is not None:
            later = "" if reserve.behind_from_ms is None else hour_name(hour_of_ms(reserve.behind_from_ms))
            what = "all sends" if reserve.behind else f"sends of messages due in hour {later} or later"
            yield Wait(what, "checkpoints are further behind the message log than a restart may replay")
        if not reserve.behind and self._intake.is_full:
            yield Wait("all sends", "more waits for the message log's fsync than intake_queue_bytes_max")
        if self._intake.subjects_full:
            yield Wait("sends to subjects that are new here", "as many subjects are remembered as memory allows")
        if self._logs.producers.is_full:
            yield Wait("sends of new producers", "as many producers are remembered as memory allows")
        if uncounted := self._asked.quotas.uncounted:
            subjects = counted(uncounted, "subject|subjects")
            yield Wait(f"sends to {subjects} with a quota", "what is pending for them is not counted yet")
        if self._asked.quotas.is_full:
            yield Wait("sends to subjects with a quota", "as many of their messages are counted as memory allows")
        for hour in sorted(reserve.full_hours):
            yield Wait(f"sends of messages due in hour {hour_name(hour)}", "it holds as many as hour_rows_max allows")

    # Settled.

    def settled(self) -> tuple[int, str, list[Value]]:
        """Return the instant for all subjects, what holds it up, and ``[log_id, instant, what holds it up]`` for each
        target.
        """
        if not self._dispatcher.takes_due_rows:
            return 0, WAITS_FOR_CLOCK, []
        now_ms = self._site.clock.now_ms()
        # Bounds for rows of hours that are not loaded yet, and for rows on their way into the wheel.
        instants = [now_ms, hour_start_ms(self._memory.hours.loaded_until + 1)]
        if not self._intake.idle:
            instants.append(self._intake.appended_at_ms)
        wheel_ms = self._memory.hours.wheel.next_due_ms(0)
        if wheel_ms is not None:
            instants.append(wheel_ms)
        if (owed_ms := self._memory.ledger.owed.lowest_ms()) is not None:
            instants.append(owed_ms)
        waits = {
            "messages have no realtime server yet: meta names none for their subjects": _lowest_ms(
                self._dispatcher.unrouted()
            ),
            "messages can't be read; see `delayd mend list`": _lowest_ms(self._memory.held.waiting()),
            "hours are quarantined; see `delayd mend list`": min(
                (hour_start_ms(entry.hour) for entry in self._memory.quarantine if entry.hour is not None), default=None
            ),
        }
        reasons = [(instant, why) for why, instant in waits.items() if instant is not None]
        lowest, why = min(reasons, default=(now_ms, ""))
        links: list[Value] = []
        for link in self._dispatcher.links.values():
            if not link.is_lost:
                waits_ms = _lowest_ms(link.sender.parts())
                links.append([link.target, now_ms if waits_ms is None else min(now_ms, waits_ms), link.holds_up])
        return min(*instants, lowest), why, links

    # Retiring.

    def retire(self, done: OnRetired) -> None:
        """Call back when this server holds nothing, or with ServerInUse, which says what it holds.

        Raises:
            BadArgument: it is not cordoned, so it may get new messages.
        """
        if not self._intake.cordoned:
            raise BadArgument("this server takes new messages; cordon and drain it first, see `delayd server drain`")
        self._count(DrainOrder(0, None), 0, done)

    def _count(self, order: DrainOrder, found: int, done: OnRetired) -> None:
        self._asked.endings.drain.piece(order, partial(self._counted, found, done))

    def _counted(self, found: int, done: OnRetired, piece: DrainProgress | DelaydError) -> None:
        if isinstance(piece, DelaydError):
            done(piece)
            return
        found += piece.found + piece.in_flight
        if piece.unread:
            done(_in_use(f"{piece.unread} schedule logs can't be read; see `delayd mend list`"))
        elif piece.place is not None:
            try:
                self._count(DrainOrder(0, None, piece.place, piece.until_sequence), found, done)
            except DelaydError as error:
                done(error)
        elif (held := self._held(found)) is not None:
            done(_in_use(held))
        else:
            log.warning("operator action=retire next_sequence=%d", self._intake.next_sequence)
            done(f"it holds nothing any more; its last message had the sequence {self._intake.next_sequence - 1}")

    def _held(self, pending: int) -> str | None:
        """What the server still holds; None: nothing."""
        links = self._dispatcher.links.values()
        undecided = sum(len(link.sender.window) for link in links)
        unsealed = self._unsealed()
        if pending:
            count = counted(pending, "message is|messages are")
            return f"{count} pending; drain it, or wait for those that are due soon"
        if leaving := self._asked.endings.drain.rows:
            return f"{counted(leaving, 'message is|messages are')} on the way to other servers"
        if undecided or self._dispatcher.unrouted_rows:
            count = counted(undecided, "batch is|batches are")
            return f"{count} undecided at realtime servers; see `delayd target list`"
        if self._asked.endings.owned_slots.owned.any():
            return "it owns slots of keys; drain it, which moves them"
        if len(self._memory.ledger.owed) or not self._intake.idle:
            return "outcomes of its messages are being written"
        if len(self._memory.quarantine):
            return "something of it is quarantined; see `delayd mend list`"
        if unsealed is not None:
            return f"hour {hour_name(unsealed)} has ended and is not sealed yet; it will be within a minute"
        return None

    def _unsealed(self) -> int | None:
        """The first hour that has ended, has messages and is not sealed."""
        filed = self._memory.ledger.hours.filed
        this_hour = hour_of_ms(self._site.clock.now_ms())
        ended = sorted(hour for hour in filed.rows["hour"].tolist() if hour < this_hour)
        return next((hour for hour in ended if not filed.get(hour).sealed), None)


def _in_use(what: str) -> ServerInUse:
    return ServerInUse(what, retry_after_ms=RETRY_AFTER_MS)


def _lowest_ms(parts: Iterable[Rows]) -> int | None:
    return min((int(due_at_ms(rows).min()) for rows in parts if len(rows)), default=None)
