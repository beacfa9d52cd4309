"""Bugs to plant in the delay server: each takes one rule out and leaves all else as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from delayd.delay import core, intake, recovery
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.filing.schedule_writer import ScheduleWriter
from delayd.delay.handoff.link import Link, Phase
from delayd.delay.handoff.sender import Sender
from delayd.delay.handoff.window import SentBatch
from delayd.delay.handoff.wire import Wire
from delayd.delay.intake import Mark, Written
from delayd.delay.producers import Producers
from delayd.delay.recovery import Recovered
from delayd.log.dispatch import NewPart, Outcome
from delayd.log.group import NewGroup
from delayd.log.log import Log


def _acknowledge_before_the_sync(log: Log, groups: list[NewGroup], now_ms: int) -> Written:
    offsets = log.append(groups, now_ms)
    return Written(offsets, Mark(log.end, log.crc32c))


def _decide_when_acknowledged(self: Sender, sent: SentBatch, offset: int, appended_at_ms: int) -> None:
    self.window.decide(sent.batch_id)
    part = NewPart(
        sent.rows["sequence"],
        sent.deliver_at_ms,
        Outcome.DISPATCHED,
        sent.claimed_at_ms,
        self._target,
        self._origin.epoch,
        sent.batch_id,
        appended_at_ms,
        offset,
    )
    self._outcomes.record(sent.hour, part, int)


def _say_durable_at_once(self: OutcomeLog, callback: Callable[[], None]) -> None:
    callback()


def _close_without_a_sync(self: ScheduleWriter) -> None:
    for segment in self._open:
        segment.close()
    self._open.clear()


def _forget_outcomes(
    *arguments: object,
) -> tuple[dict[int, object], dict[int, NDArray[np.uint64]], dict[int, int]]:
    return {}, {}, {}


def _ignore_this_epoch(
    self: Link, facts: list[int], *columns: *tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint64]]
) -> None:
    if facts[0] != self._origin.epoch:
        _arrived(self, facts, *columns)


def _send_at_once(self: Link, session: int, wire: Wire) -> None:
    _connected(self, session, wire)
    if session == self._session:
        self.phase = Phase.READY


def _forget_notes(*arguments: object) -> Recovered:
    found = _recover(*arguments)  # type: ignore[arg-type]
    found.targets_owed.clear()
    return found


def _forget_numbers(
    self: Producers, seen_before_ms: int, puts: dict[bytes, bytes], removes: set[bytes]
) -> Iterator[None]:
    self._changed.clear()
    return iter(())


_arrived = Link._arrived


_connected = Link._connected


_recover = recovery.recover


PLANTED: dict[str, tuple[object, str, object]] = {
    "L2: a send is answered before its fsync": (intake, "_write", _acknowledge_before_the_sync),
    "H1: W passes a batch whose outcome is not durable": (Sender, "acknowledge", _decide_when_acknowledged),
    "H4: a session sends before the answered rows are durable": (OutcomeLog, "when_durable", _say_durable_at_once),
    "H4: a session sends before the window is answered": (Link, "_connected", _send_at_once),
    "P2: a checkpoint counts schedule logs that are not durable": (ScheduleWriter, "_sync", _close_without_a_sync),
    "P4: recovery ignores the dispatch logs": (recovery, "_recover_outcomes", _forget_outcomes),
    "H6: rows are taken back though the window names them": (Link, "_arrived", _ignore_this_epoch),
    "H5: a checkpoint passes a note and does not keep it": (core, "recover", _forget_notes),
    "I1: a checkpoint passes batches and forgets their numbers": (Producers, "collect", _forget_numbers),
}
