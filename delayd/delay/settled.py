"""Settled: the instant before which everything that fell due has an outcome, by this server's own word (rule S7).

A checkpoint publishes this instant and what holds it up. With it the audit can tell a message that still waits from one
that was forgotten: a row that is held anywhere in this server keeps the instant below the row's due time, but a
forgotten row does not.
"""

from collections.abc import Iterable

from delayd.delay.damage.set_aside import HeldRows
from delayd.delay.handoff.dispatcher import Dispatcher
from delayd.delay.intake import Intake
from delayd.delay.quarantine import Quarantine
from delayd.delay.rows import Rows, due_at_ms
from delayd.delay.timers.wheel import Wheel
from delayd.hours import hour_start_ms
from delayd.log.checkpoint import Value
from delayd.machine.clock import Clock

WAITS_FOR_CLOCK = "the clock of the delay server is not confirmed; see `delayd clock`"


def settled(
    clock: Clock,
    wheel: Wheel,
    intake: Intake,
    dispatcher: Dispatcher,
    held: HeldRows,
    quarantine: Quarantine,
    loaded_until: int,
    owed_ms: int | None,
) -> tuple[int, str, list[Value]]:
    """Return the instant for all subjects, what holds it up, and ``[log_id, instant, what holds it up]`` for each
    target. ``owed_ms``: when the first row was due that a decision has ended and that has no outcome yet.
    """
    if not dispatcher.takes_due_rows:
        return 0, WAITS_FOR_CLOCK, []
    now_ms = clock.now_ms()
    # Bounds for rows of hours that are not loaded yet, and for rows on their way into the wheel.
    instants = [now_ms, hour_start_ms(loaded_until + 1)]
    if not intake.idle:
        instants.append(intake.appended_at_ms)
    wheel_ms = wheel.next_due_ms(0)
    if wheel_ms is not None:
        instants.append(wheel_ms)
    if owed_ms is not None:
        instants.append(owed_ms)
    waits = {
        "messages have no realtime server yet: meta names none for their subjects": _lowest_ms(dispatcher.unrouted()),
        "messages can't be read; see `delayd mend list`": _lowest_ms(held.waiting()),
        "hours are quarantined; see `delayd mend list`": min(
            (hour_start_ms(entry.hour) for entry in quarantine if entry.hour is not None), default=None
        ),
    }
    reasons = [(instant, why) for why, instant in waits.items() if instant is not None]
    lowest, why = min(reasons, default=(now_ms, ""))
    links: list[Value] = []
    for link in dispatcher.links.values():
        if not link.is_lost:
            waits_ms = _lowest_ms(link.sender.parts())
            links.append([link.target, now_ms if waits_ms is None else min(now_ms, waits_ms), link.holds_up])
    return min(*instants, lowest), why, links


def _lowest_ms(parts: Iterable[Rows]) -> int | None:
    return min((int(due_at_ms(rows).min()) for rows in parts if len(rows)), default=None)
