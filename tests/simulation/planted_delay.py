"""Bugs to plant in the delay server and in what both servers share: each takes one rule out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ColumnId
from delayd.batch.validate import check_batch, check_headers
from delayd.delay import intake as delay_intake
from delayd.delay import recovery as delay_recovery
from delayd.delay.books import outcomes as delay_outcomes
from delayd.delay.books import retention as delay_retention
from delayd.delay.books.outcomes import OutcomeLog, read_outcomes
from delayd.delay.books.retention import Retention, SegmentRetention
from delayd.delay.books.sealing import compare
from delayd.delay.core import DelayCore
from delayd.delay.damage import mending
from delayd.delay.damage.mending import Mending
from delayd.delay.handoff import link as delay_link
from delayd.delay.handoff.dispatcher import Dispatcher
from delayd.delay.handoff.link import InDoubt, Link
from delayd.delay.handoff.sender import Sender
from delayd.delay.handoff.target_words import TargetEnds
from delayd.delay.handoff.window import SentBatch, Window
from delayd.delay.intake import Intake
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.producers import AcceptedBatch, Allowance, Producers, Waiter
from delayd.delay.requests import Entry, Requests
from delayd.delay.rows import Rows
from delayd.delay.timers.loading import Loading
from delayd.errors import DamagedData, DelaydError, SyncFailed
from delayd.hours import HOUR_MS
from delayd.log.hour import OutcomeRows, SealFacts
from delayd.log.segment import Segment
from delayd.net import trust
from delayd.testing.executor import StepExecutor
from delayd.wire.frame import Frame
from delayd.wire.requests import RequestType
from tests.worlds import port_bugs
from tests.worlds.bugs import PLANTED as PLANTED_IN_LIVES
from tests.worlds.bugs import SEAL_WITHOUT_A_SYNC
from tests.worlds.patches import Bugs, Patch, changed

SLOT_MS = 500
NEVER_MS = 1 << 50
_AT_ANOTHER_OFFSET = "self._checkpointer.replay.offset != replay_offset"


# Logs.


def _leave_what_was_written(self: Segment, cause: Exception) -> None:
    """The next write stands behind it, or on it."""


def _seal_an_hour_early(self: Retention, closed_before_ms: int, now_ms: int) -> None:
    _sweep(self, closed_before_ms + HOUR_MS, now_ms)


def _write_back_and_never_mind(self: Segment, start: int, end: int) -> None:
    with suppress(OSError, SyncFailed):
        _write_back(self, start, end)


def _name_no_damage(self: Mending, hour: int, error: DamagedData, loaded: int = 0) -> None:
    """Whatever of it is not loaded is left out."""


# Intake, checkpoint, retention.


def _take_what_is_under_way(
    self: Producers, batch: Batch, waiter: Waiter, allowance: Allowance | None = None, *, drained: bool = False
) -> bool:
    self._waiting.pop(batch.producer[:2], None)
    return _begin(self, batch, waiter, allowance)


def _stamp_by_the_clock_alone(self: Intake) -> object:
    appended_at_ms, self.appended_at_ms = self.appended_at_ms, 0
    group = _close(self)
    self.appended_at_ms = appended_at_ms
    return group


def _release_whatever_is_old(self: SegmentRetention, *lowest: int | None, decided_from_ms: int | None = None) -> None:
    _release(self)


def _compare_counts(
    hour: int, batches: Iterable[Batch], outcomes: OutcomeRows, give_way: Callable[[], None]
) -> SealFacts | None:
    stored = list(batches)
    scheduled = [batch.uint64s(ColumnId.SEQUENCE) for batch in stored]
    if sum(map(len, scheduled)) != len(outcomes.sequences):
        return None
    return compare(hour, stored, outcomes._replace(sequences=np.concatenate(scheduled)), give_way)


def _read_what_is_written(segment: Segment, until: int | None, give_way: Callable[[], None]) -> OutcomeRows:
    return read_outcomes(segment, None, give_way)


def _know_of_no_flush(self: OutcomeLog) -> set[int]:
    return set()


def _settle_nothing(self: Ledger) -> None:
    """What it decided leaves again."""


def _doubt_nothing(rows: Rows, word: object) -> NDArray[np.bool_]:
    return np.zeros(len(rows), np.bool_)


def _name_damaged_hours_alone(self: TargetEnds) -> set[int]:
    return set(self._damaged)


def _run_nothing_else(self: StepExecutor) -> None:
    """The job under way goes on to its end."""


# Strangers.


def _check_no_headers(batch: Batch) -> None:
    """Whoever reads them finds out."""


def _read_any_window(frame: Frame) -> list[InDoubt]:
    with patch.object(delay_link, "WINDOW_MOST", ()):
        return _read_window(frame)


def _refuse_all_for_one(
    self: Requests,
    sent: tuple[memoryview, Entry | None],
    places: Sequence[tuple[int, int]],
    answered: Callable[[int, AcceptedBatch | DelaydError, bool], None],
    allowance: Allowance,
    begin: int,
) -> int:
    for start, size in places:
        batch = parse(sent[0][start : start + size])
        batch.verify()
        check_batch(batch)
        check_headers(batch)
    return _take(self, sent, places, answered, allowance, begin)


# The handoff.


def _a_step_too_far(self: Window) -> tuple[int, int]:
    if not self.earlier_settled:
        return (0, 0)
    return (self._epoch, next(iter(self._undecided), self._last_id))


def _pass_what_is_unsettled(self: Window) -> tuple[int, int]:
    return (self._epoch, next(iter(self._undecided), self._last_id + 1) - 1)


def _note_nothing(self: Dispatcher, routes: dict[bytes, int], unrouted: list[bytes]) -> None:
    log_control, self._log_control = self._log_control, _heard_at_once
    _routed(self, routes, unrouted)
    self._log_control = log_control
    self.changed.clear()


def _heard_at_once(batch: bytes, on_durable: Callable[[], None]) -> None:
    on_durable()


def _note_and_go_on(self: Dispatcher, routes: dict[bytes, int], unrouted: list[bytes]) -> None:
    log_control = self._log_control

    def log_and_go_on(batch: bytes, on_durable: Callable[[], None]) -> None:
        log_control(batch, _nothing)
        on_durable()

    self._log_control = log_and_go_on
    _routed(self, routes, unrouted)
    self._log_control = log_control


def _take_nothing_back(self: Sender) -> list[SentBatch]:
    self.frames_in_flight = 0
    return []


def _doubt_this_life_alone(self: Sender, doubt_until_ms: int | None) -> int:
    return _give_up(self, None)


def _take_back_at_once(self: Link, retry_ms: int) -> None:
    _end_session(self, retry_ms)
    self.sender.take_back()


# Time.


def _nothing() -> None:
    """Nobody waits."""


_write_back = Segment._write_back
_sweep = Retention.sweep
_begin = Producers.begin
_close = Intake._close
_release = SegmentRetention.release
_read_window = delay_link._read_window
_take = Requests._take
_give_up = Sender.give_up
_end_session = Link._end_session
_routed = Dispatcher.routed

_reopen_nothing = changed(
    delay_outcomes.reopen_dispatch_log, 'raise DamagedData(path, 0, "the file is gone") from None', "return None"
)

_SYNC_AND_NEVER_MIND = (
    "        self.file.sync()\n",
    "        try:\n            self.file.sync()\n        except Exception:\n            pass\n",
)

IN_DELAY: Bugs = {
    **PLANTED_IN_LIVES,
    "L1: a server goes on after a failed fsync": port_bugs.FAILED_SYNCS_COUNT,
    "L1: recovery does not sync what it finds": port_bugs.FOUND_IS_NOT_SYNCED,
    "L2: D_h is not synced": port_bugs.unsynced("/delay/dispatch/"),
    "L3: a failed write is not cut back": [Patch(Segment, "_cut_back", _leave_what_was_written)],
    "P5: an hour seals before the checkpoint has passed it": [Patch(Retention, "sweep", _seal_an_hour_early)],
    "S4: a seal is counted before it is durable": SEAL_WITHOUT_A_SYNC,
    "L4: the name of a new segment is not synced": port_bugs.unsynced_names("/message"),
    "P5: appended_at goes back with the clock": [Patch(Intake, "_close", _stamp_by_the_clock_alone)],
    "P6: segments go though rows refer to them": [Patch(SegmentRetention, "release", _release_whatever_is_old)],
    "I1: a batch that is under way is taken again": [Patch(Producers, "begin", _take_what_is_under_way)],
    "S1: an hour is sealed by counts": [Patch(delay_retention, "compare", _compare_counts)],
    "S1: an hour is sealed on outcomes that are not durable": [
        Patch(delay_retention, "read_outcomes", _read_what_is_written),
        Patch(OutcomeLog, "unwritten_hours", _know_of_no_flush),
    ],
    "H1: W is a step too far": [Patch(Window, "w", property(_a_step_too_far))],
    "H1: W passes what earlier epochs left unsettled": [Patch(Window, "w", property(_pass_what_is_unsettled))],
    "H3: an epoch is used again": [port_bugs.kept_as_first(b"epoch", b"identity")],
    "H4: rows that may be at T are sent again before it is asked": [Patch(Link, "_end_session", _take_back_at_once)],
    "H4: rows that never arrived are not sent again": [Patch(Sender, "take_back", _take_nothing_back)],
    "H5: a note is not logged": [Patch(Dispatcher, "routed", _note_nothing)],
    "H5: a first row does not wait for its note": [Patch(Dispatcher, "routed", _note_and_go_on)],
    "H4: rows of a window's answer that were recorded before are recorded again": [
        Patch(Link, "_arrived", changed(Link._arrived, "new.any()", "len(new) and [new.fill(True)]"))
    ],
    "T1: rows leave by a clock that is in doubt after a boot": port_bugs.NOTHING_IS_DOUBTED,
    "T1: a jump of the clock is believed at once": port_bugs.JUMPS_ARE_BELIEVED,
    "L1: an error of the write back is not looked at": [
        Patch(Segment, "_write_back", _write_back_and_never_mind),
        Patch(Segment, "recover", changed(Segment.recover, *_SYNC_AND_NEVER_MIND)),
    ],
    "B2: a load that is due waits behind checkpoints": [Patch(StepExecutor, "give_way", _run_nothing_else)],
    "B1: sends are taken while more than may waits for the disk": [
        Patch(
            Intake, "_check", changed(Intake._check, "self.queued_bytes > self._config.intake_queue_bytes_max", "False")
        )
    ],
    "E1: a target's answer is taken as it comes": [Patch(delay_link, "_read_window", _read_any_window)],
    "E2: headers that nobody can read are taken": [Patch(delay_intake, "check_headers", _check_no_headers)],
    "E2: one bad batch spoils all of a send": [Patch(Requests, "_take", _refuse_all_for_one)],
    "H5: what an earlier life may have sent to a lost target goes elsewhere": [
        Patch(Sender, "give_up", _doubt_this_life_alone)
    ],
    "I5: sequences go on where a restored server stopped": [Patch(delay_intake, "RESTORED_STEP", 0)],
    "L5: what a start reads wrongly once counts as torn": [
        Patch(Segment, "recover", changed(Segment.recover, "end >= size or end == again", "True"))
    ],
    "S1: what stood beside a dispatch log is forgotten when the log is whole again": [
        Patch(delay_outcomes, "missing_parts", lambda outcomes, known: [])
    ],
    "L5: a dispatch log that is gone holds nothing": [
        Patch(delay_outcomes, "reopen_dispatch_log", _reopen_nothing),
        Patch(delay_recovery, "reopen_dispatch_log", _reopen_nothing),
    ],
    "L5: rows that a given up dispatch log may have named are sent": [
        Patch(delay_recovery, "doubtful", _doubt_nothing)
    ],
    "H8: what a given up dispatch log may have named is not told": [
        Patch(TargetEnds, "unread", property(_name_damaged_hours_alone))
    ],
    "E1: the checksum of a batch is not looked at": [
        Patch(Intake, "_check", changed(Intake._check, "batch.verify()", "pass"))
    ],
    "L9: damage of a schedule log is not named": [Patch(Mending, "schedule_damaged", _name_no_damage)],
    "C1: what consumers may have had of a target that lost it is claimed": [
        Patch(
            Link,
            "_greeted",
            changed(Link._greeted, "lost_epoch != (self._lost_epoch or 0)", "False"),
        )
    ],
    "L10: an hour that was set aside is never tried again": [Patch(mending, "DAMAGED_AGAIN_MS", NEVER_MS)],
    "P7: a checkpoint counts rows while they are loaded": [
        Patch(Loading, "_number", changed(Loading._number, _AT_ANOTHER_OFFSET, "False")),
        Patch(Loading, "_attach", changed(Loading._attach, _AT_ANOTHER_OFFSET, "False")),
        Patch(Loading, "_attach_run", changed(Loading._attach_run, _AT_ANOTHER_OFFSET, "False")),
    ],
    "P7: rows that a window's answer names stay in the wheel": [Patch(Ledger, "drop_named", _settle_nothing)],
    "P7: rows that stood beside a schedule log are lost when the log is whole again": [
        Patch(mending, "_append", lambda site, hour, file, groups: file)
    ],
    "T4: an unconfirmed clock stamps what is appended": port_bugs.STAMPS_ARE_NOT_JUDGED,
    "T4: hours are sealed and removed by an unconfirmed clock": [
        Patch(DelayCore, "sweep", changed(DelayCore.sweep, "self._clock.confirmed", "True"))
    ],
    "L8: outcomes that a full disk kept back are never tried again": [Patch(delay_outcomes, "FULL_AGAIN_MS", NEVER_MS)],
    "H7: a refused target is never asked again": [Patch(delay_link, "DAMAGED_AGAIN_MS", NEVER_MS)],
    "H8: strangers register at meta": [Patch(trust, "GUARDED", trust.GUARDED - {RequestType.REGISTER})],
    "H8: strangers move routes at meta": [Patch(trust, "GUARDED", trust.GUARDED - {RequestType.MOVE_ROUTE})],
    "H8: strangers have servers forgotten at meta": [
        Patch(trust, "GUARDED", trust.GUARDED - {RequestType.FORGET_SERVER})
    ],
    "H8: hours whose dispatch logs are damaged are not told": [
        Patch(Link, "_greet", changed(Link._greet, "if self._ends.unread:", "if False:"))
    ],
    "T2: rows leave a slot early": [port_bugs.ahead(SLOT_MS)],
}
