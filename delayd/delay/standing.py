"""What a delay server says of itself: figures for STATUS, what waits for an operator, and what it refuses for now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.damage.set_aside import HeldRows
from delayd.delay.ending.endings import Endings
from delayd.delay.filing.checkpoint import Checkpointer
from delayd.delay.handoff import lateness
from delayd.delay.handoff.dispatcher import Dispatcher
from delayd.delay.handoff.link import Phase
from delayd.delay.intake import Intake
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.producers import Producers
from delayd.delay.quarantine import Quarantine
from delayd.delay.quotas.quotas import Quotas
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.hour import SEALED
from delayd.machine.clock import Clock
from delayd.machine.operating import CLOCK_UNCONFIRMED, Fence, Wait, WaitKind
from delayd.machine.state import State
from delayd.wire.meta import slots_text


@dataclass(frozen=True, slots=True)
class Standing:
    """The parts that know how a server stands."""

    log_id: int
    clock: Clock
    state: State
    fence: Fence
    intake: Intake
    producers: Producers
    checkpointer: Checkpointer
    dispatcher: Dispatcher
    held: HeldRows
    quarantine: Quarantine
    quotas: Quotas
    endings: Endings
    ledger: Ledger
    outcomes: OutcomeLog

    def counters(self) -> dict[str, int]:
        """Figures for STATUS."""
        links = self.dispatcher.links.values()
        return {
            "next_sequence": self.intake.next_sequence,
            "message_log_end": self.intake.durable.offset,
            "replay_offset": self.checkpointer.replay.offset,
            "pending": self._pending(),
            "free_bytes": self.intake.reserve.free_bytes,
            "pending_rows": len(self.ledger.hours.pending),
            "loaded_rows": len(self.ledger.hours.wheel),
            "scheduled_rows": int(self.ledger.hours.filed.rows["rows"].sum()),
            "waiting_rows": sum(len(link.sender.waiting) for link in links) + self.dispatcher.unrouted_rows,
            "leaving_rows": self.endings.drain.rows,
            "undecided_batches": sum(len(link.sender.window) for link in links),
            "targets": len(links),
            "targets_away": sum(link.phase is not Phase.READY and not link.is_lost for link in links),
            "quarantined_rows": len(self.held),
            "quarantined_hours": self.quarantine.hours(),
            "quarantined": len(self.quarantine),
            "dead_rows": sum(link.sender.dead_rows for link in links),
            "expired_rows": sum(link.sender.expired_rows for link in links),
            "subjects": self.ledger.hours.subjects.known,
            "subjects_bytes": self.ledger.hours.subjects.held_bytes,
            "producers": len(self.producers),
            "producers_bytes": self.producers.held_bytes,
            "queued_bytes": self.intake.queued_bytes,
            "owed_rows": len(self.ledger.owed),
            **self.endings.held(),
            **lateness.figures(link.sender.lateness for link in links),
        }

    def _pending(self) -> int:
        """All messages without an outcome, loaded or not: those that are filed in unsealed hours and those that are
        not filed yet, without the outcomes of these hours. Outcomes of the last moment are not in it yet.
        """
        rows = self.ledger.hours.filed.rows
        filed = int(rows["rows"][(rows["flags"] & SEALED) == 0].sum())
        ended = sum(end.rows for end in self.outcomes.ends.values())
        return max(0, filed + len(self.ledger.hours.pending) - ended)

    def waits(self) -> Iterator[Wait]:
        """List the states that only an operator can end."""
        yield from [*self.fence.waits(), *self.state.waits()]
        reserve = self.intake.reserve
        if reserve.closed:
            yield WaitKind.DISK_FULL.wait("free disk space is at its reserve")
        elif reserve.far_from_ms is not None:
            later = hour_name(hour_of_ms(reserve.far_from_ms))
            yield WaitKind.DISK_NEARLY_FULL.wait("free disk space nears its reserve", hour=later)
        if not self.clock.confirmed:
            held = "deliveries after a restart of the machine, and sealing"
            yield WaitKind.CLOCK.wait(CLOCK_UNCONFIRMED, held=held, role="delay")
        elif self.intake.filed_from_ms - self.clock.now_ms() > HOUR_MS:
            until = hour_name(hour_of_ms(self.intake.filed_from_ms))
            why = (
                f"a clock that was ahead has stamped the message log until {until}; messages leave on time all the same"
            )
            yield WaitKind.CLOCK_WAS_AHEAD.wait(why)
        if self.dispatcher.unrouted_rows:
            rows = f"{self.dispatcher.unrouted_rows:,}"
            if not self.dispatcher.given_up:
                yield WaitKind.NO_TARGET.wait("their subjects have no realtime server", rows=rows)
            # Either no realtime server serves their subjects, or their subjects are routed to one that was given up.
            for target in self.dispatcher.given_up:
                why = f"their subjects have no realtime server, or {target:016x}, which was given up for good"
                yield WaitKind.TARGET_GIVEN_UP.wait(why, rows=rows, target=f"{target:016x}")
        for link in self.dispatcher.links.values():
            yield from link.waits()
        for entry in sorted(self.quarantine.listing(), key=lambda entry: entry.id):
            yield entry.wait(self.log_id)
        yield from self.endings.drain.waits()
        slots = self.endings.owned_slots
        if slots.leaving.any():
            why = f"their messages are on their way to delay server {slots.leaving_to:016x}, and a drain has to finish"
            text = slots_text(slots.leaving)
            yield WaitKind.SLOTS_LEAVING.wait(why, slots=text, log_id=f"{self.log_id:016x}")

    def refuses(self) -> Iterator[Wait]:
        """List what this server refuses for now; each of these states ends by itself."""
        reserve = self.intake.reserve
        if reserve.behind:
            yield Wait("all sends", "checkpoints are further behind the message log than a restart may replay")
        elif self.intake.is_full:
            yield Wait("all sends", "more waits for the message log's fsync than intake_queue_bytes_max")
        if self.intake.subjects_full:
            yield Wait("sends to subjects that are new here", "as many subjects are remembered as memory allows")
        if self.producers.is_full:
            yield Wait("sends of new producers", "as many producers are remembered as memory allows")
        if uncounted := self.quotas.uncounted:
            yield Wait(f"sends to {uncounted} subjects with a quota", "what is pending for them is not counted yet")
        if self.quotas.is_full:
            yield Wait("sends to subjects with a quota", "as many of their messages are counted as memory allows")
        for hour in sorted(reserve.full_hours):
            yield Wait(f"sends of messages due in hour {hour_name(hour)}", "it holds as many as hour_rows_max allows")
