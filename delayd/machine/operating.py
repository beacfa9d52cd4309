"""Operating: what a server tells its operator: what it waits for, why it may not serve, and log lines in bounds.

*Waits*: each state of a server that needs an operator, with the command that leads out of it. Invariant: whatever a
server says that it waits for is a kind of this table; docs/operations.md (States) has a row for each, and says what its
command costs.

*Fences*: the reasons why a server may not serve, as meta or another server has given them (rule H8). A copied, restored
or moved directory must not act before it is certain that it is the only one with its log_id. Invariant: while a reason
stands the server gives no receipts and hands nothing over; it answers requests with a named error.

*Log lines* whose rate a peer controls: the first few of a cause are written, then one line a minute counts the rest.
Invariant: lines that are left out are counted, and the count is logged a minute later, if `tell_left_out` is called
each second or so. Causes are constants of ours, never a peer's text, so memory is bounded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from delayd.errors import DelaydError, RetryLater, ServerFenced, ServerRetired


class Wait(NamedTuple):
    """One state; one in the list ``waits`` needs an operator to end, one in ``refuses`` ends by itself."""

    what: str  # The messages or actions that wait or are refused: `1,200 messages of orders.eu`.
    why: str  # A sentence without its full stop.
    command: str = ""  # The command or action for an operator; empty when there is nothing to do but wait.


CLOCK_UNCONFIRMED = "the wall clock jumped, or the machine was restarted, and no other clock has confirmed it yet"
_FREE_SPACE = "free space on its disk, or move --data to a larger one"
_TRUST = "compare it: delayd clock --role {role}; if it is right: delayd clock --role {role} --trust"
_FORGET = "delayd server forget {role} {log_id}"
_ACCEPT = "delayd target accept {target}"
_BACK = (
    "start realtime server {target}; gone for good: delayd target lost {target}, then "
    "delayd server forget realtime {target} --routes"
)
_NEWEST_ORIGIN = f"bring back the newest directory of this delay server; there is none: {_ACCEPT}"
_NEWEST_ORIGIN += ", and what was delivered since its copy comes a second time"
_NEWEST_TARGET = f"bring back the newest directory of realtime server {{target}}; there is none: {_ACCEPT}"
_NEWEST_TARGET += ", and what it has lost is not sent again; it is gone for good: delayd target lost {target}"
_FILE_BACK = "put {path} back from a copy, then: delayd mend take {id} --server {log_id}"
_RELEASE = "delayd mend release {id} --server {log_id}"
_GIVE_UP = "delayd mend give-up {id} --server {log_id}, and {cost}"
_FILE_OR_GIVE_UP = f"{_FILE_BACK}; there is no copy: {_GIVE_UP}"


class WaitKind(Enum):
    """What waits, and what an operator does; words in braces are filled in when a server tells of the state."""

    # Any server may not serve (rule H8).
    IN_ANOTHER_PLACE = "all of {server}", "start meta; if this is a copy, stop this server"
    PLACE_TAKEN = "all of {server}", "wait for the end of a lease; or stop the other server"
    FENCED_INSTANCE = "all of {server}", "stop this server; or the other one, then start this one again"
    RETIRED = "all of {server}", "stop this server; its directory is for audits"
    STALE_EPOCH = "all of {server}", f"stop this server; or, if it was restored on purpose, {_FORGET}"
    EPOCH_OUT_OF_RANGE = "all of {server}", f"stop this server; or, if its number is right, {_FORGET}"
    WRONG_CLUSTER = "all of {server}", "stop this server, and give it the address of its own meta server"
    TARGET_NOT_ASKED = "all of {server}", _BACK
    TARGET_REFUSES = "all of {server}", _NEWEST_ORIGIN
    TARGET_HAS_LOST = "all of {server}", _NEWEST_TARGET
    QUOTAS_NOT_KNOWN = "all of {server}", "start the other delay servers, or look at their logs"
    HELD = (
        "all of the {role} server: it could not start",
        "put the file back (copied beside it, then renamed): it is looked at each second",
    )
    DELAY_AWAY = (
        "sends to it, and messages that it holds",
        "start it, or look at its log; gone for good: delayd server forget delay {log_id}",
    )
    REALTIME_AWAY = (
        "messages of its subjects",
        "start it, or look at its log; gone for good: delayd server forget realtime {log_id} --routes",
    )
    NO_DELAY_SERVER = "all sends", "start one: delayd delay --data DIR --meta {meta}"
    NO_REALTIME_SERVER = "messages of all subjects", "start one: delayd realtime --data DIR --meta {meta}"

    # Any server, its disk and its clock.
    STATE_REPLACED = "the state of this server", "find out who did so, then restart this server"
    CLOCK = "what can't be undone: {held}", _TRUST
    DISK_FULL = "all sends", _FREE_SPACE
    DISK_NEARLY_FULL = "sends of messages due from {hour} on", _FREE_SPACE
    TARGET_DISK_FULL = "messages that delay servers hand over", _FREE_SPACE
    CLOCK_WAS_AHEAD = "sealing of hours, and what frees their space", "delayd clock --role delay --trust"

    # What a delay or a realtime server can't read, by what may be decided about it (delayd.wire.status).
    FILE_SET_ASIDE = "{what}", _FILE_BACK
    FILE_SET_ASIDE_OR_GIVEN_UP = "{what}", _FILE_OR_GIVE_UP
    SET_ASIDE = "{what}", _RELEASE
    GROUP_DAMAGED = "{what}", f"{_RELEASE}; or {_GIVE_UP}"
    GROUP_WITHOUT_NAME = "{what}", _GIVE_UP

    # A delay server, and where its messages go.
    OUTCOMES_WAIT = (
        "due messages for all realtime servers",
        f"{_FREE_SPACE}; if it lacks memory or open files, give it more",
    )
    NO_TARGET = "{due_messages}", "start a realtime server: delayd realtime --data DIR --meta ADDRESS"
    TARGET_GIVEN_UP = (
        "{due_messages}",
        "delayd server forget realtime {target} --routes; no other realtime server serves: start one: "
        "delayd realtime --data DIR --meta ADDRESS",
    )
    ROWS_TARGET_AWAY = "{due_messages} for realtime server {target}", _BACK
    ROWS_TARGET_REFUSES = "{due_messages} for realtime server {target}", _NEWEST_ORIGIN
    ROWS_TARGET_HAS_LOST = "{due_messages} for realtime server {target}", _NEWEST_TARGET
    DRAIN_REFUSED = "{messages} on their way to delay server {to}", "end what that delay server waits for"
    DRAINED_AWAY = "messages on their way to delay server {origin}", "start delay server {origin}, or look at its log"
    SLOTS_LEAVING = "keys of the slots {slots}", "delayd server drain {log_id}"

    SEALS_NOT_TOLD = "{seals} for the command of `seal_hook`", "run that command by hand, and mend it"

    # A realtime server.
    ORIGIN_RESTORED = (
        "what the delay server {origin} has to hand over",
        "bring back the newest directory of that delay server; there is none: "
        "delayd target accept {log_id} --server {origin}",
    )
    PULLS_UNREAD = "all pulls and acknowledgements, and retention", _FILE_OR_GIVE_UP
    RETRIES_REFUSED = "{batches} of messages that are to come again", "end what that delay server waits for"
    RETRIES_AWAY = (
        "messages that are to come again through delay server {origin}",
        "start delay server {origin}, or look at its log",
    )
    LEFT_BEHIND = (
        "{messages} of {subject} for group {group}",
        "delayd route move {subject} --to {log_id}, until its consumers have emptied it",
    )

    # Meta.
    ROUTE_DAMAGED = "messages of {subject}", "delayd route move {subject} --to {to}"
    SLOTS_DISPUTED = "keys of the slots {slots}", "delayd slots move {slots} --to {to}"
    SLOTS_WITHHELD = (
        "keys of the slots {slots}",
        "start the delay servers that are missing; or delayd slots settle, if they are gone for good",
    )
    SLOTS_UNKNOWN = (
        "keys that were not used before",
        "start delay server {log_id}; gone for good: delayd server forget delay {log_id}",
    )

    def wait(self, why: str, **words: object) -> Wait:
        """The state as a server tells of it."""
        what, command = self.value
        return Wait(what.format(**words), why, command.format(**words))


def counted(count: int, words: str) -> str:
    """A number and what it counts: ``words`` are one for one thing and one for several, as ``message|messages``, or one
    for both.
    """
    one, _, several = words.partition("|")
    return f"{count:,} {one if count == 1 or not several else several}"


log = logging.getLogger(__name__)

RETRY_AFTER_MS = 1_000  # The hint to clients: somebody has to decide, or a lease has to end.
META = "meta"


class Fence:
    """Reasons by who gave them: meta, or the log_id of a target. `role` and `log_id` are of this server."""

    def __init__(self, role: str, log_id: int) -> None:
        # Plain attributes, because they are read with each batch and each step.
        self.is_up = False  # This server may not serve.
        self.by_meta = False  # Meta has not taken this server, so it speaks to no other server either.
        self._role, self._log_id = role, f"{log_id:016x}"  # As commands name it.
        self._server = f"{role} server {log_id:016x}"
        self._reasons: dict[str, DelaydError] = {}
        self._waits: dict[str, Wait] = {}

    def put_up(self, by: str, reason: DelaydError, kind: WaitKind, target: str = "") -> None:
        """Stop serving because of a reason that `by` gave, `target` if it was one. Each reason is logged once."""
        known = self._reasons.get(by)
        why, role, log_id = f"{by} says {reason.code}: {reason.message}", self._role, self._log_id
        wait = kind.wait(why, server=self._server, role=role, log_id=log_id, target=target)
        self._reasons[by], self._waits[by] = reason, wait
        self._look()
        if isinstance(reason, ServerRetired):
            # It is where an operator wanted it to be, and nothing of it waits.
            log.warning("retired reason=%r then=%r", reason.message, wait.command)
        elif known is None or known.code != reason.code:
            # A moved directory is taken as soon as meta was asked, so only a lasting reason is an alarm.
            level = logging.WARNING if isinstance(reason, RetryLater) else logging.CRITICAL
            log.log(
                level,
                "fenced by=%s code=%s reason=%r nothing_is_served_until=%r",
                *(by, reason.code, reason.message, wait.command),
            )

    def take_down(self, by: str) -> None:
        """Remove the reason that `by` gave."""
        if self._reasons.pop(by, None) is not None:
            del self._waits[by]
            self._look()
            log.info("unfenced by=%s serves=%s", by, "no" if self._reasons else "yes")

    def is_up_by(self, by: str) -> bool:
        """Whether a reason of `by` stands."""
        return by in self._reasons

    def error(self) -> ServerFenced:
        """The error for requests; only while the fence is up."""
        by, reason = next(iter(self._reasons.items()))
        return ServerFenced(
            f"{self._server} may not serve, {by} says {reason.code}: {reason.message}", retry_after_ms=RETRY_AFTER_MS
        )

    def check(self) -> None:
        """Raise ServerFenced while the fence is up."""
        if self._reasons:
            raise self.error()

    def waits(self) -> list[Wait]:
        """The reasons for STATUS."""
        return list(self._waits.values())

    def _look(self) -> None:
        self.is_up, self.by_meta = bool(self._reasons), META in self._reasons


LINES_A_MINUTE = 10  # Lines of one cause: enough to see who and why. A flood of them would fill the disk.
MINUTE_S = 60.0

_limits: list[LogLimit] = []


@dataclass(slots=True)
class _Cause:
    began: float
    lines: int = 0
    left_out: int = 0


class LogLimit:
    """The lines of one logger that peers can provoke."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._causes: dict[str, _Cause] = {}
        _limits.append(self)

    def warning(self, cause: str, message: str, *values: object) -> None:
        """Log a line of a cause, unless it had its share of this minute."""
        self._log(logging.WARNING, cause, message, values)

    def critical(self, cause: str, message: str, *values: object) -> None:
        """As `warning`, for lines that an operator must see."""
        self._log(logging.CRITICAL, cause, message, values)

    def info(self, cause: str, message: str, *values: object) -> None:
        """As `warning`, for lines that report no fault."""
        self._log(logging.INFO, cause, message, values)

    def error(self, cause: str, message: str, *values: object) -> None:
        """As `warning`, for lines that ask for somebody to look."""
        self._log(logging.ERROR, cause, message, values)

    def tell(self) -> None:
        """Log how many lines were left out in minutes that are over."""
        now, log = self._clock(), self._logger
        for cause, found in list(self._causes.items()):
            if now - found.began >= MINUTE_S:
                del self._causes[cause]
                if found.left_out:
                    log.warning("lines_left_out cause=%s count=%d", cause, found.left_out)

    def forget(self) -> None:
        """Begin anew."""
        self._causes.clear()

    def _log(self, level: int, cause: str, message: str, values: tuple[object, ...]) -> None:
        found = self._causes.get(cause)
        if found is not None and self._clock() - found.began >= MINUTE_S:
            self.tell()
            found = None
        if found is None:
            found = self._causes[cause] = _Cause(self._clock())
        if found.lines < LINES_A_MINUTE:
            found.lines += 1
            self._logger.log(level, message, *values)
        else:
            found.left_out += 1


def forget_all() -> None:
    """Forget all counts, as tests need that look for a line."""
    for limit in _limits:
        limit.forget()


def tell_left_out() -> None:
    """Log, for every limit of this process, how many lines it left out; a server calls this each second."""
    for limit in _limits:
        limit.tell()
