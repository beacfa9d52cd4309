"""Deciding: which occurrences run, and why each other one is skipped.

Invariant: each occurrence between two decisions is in exactly one of `RunDecision.run` and `RunDecision.skipped`. So
a server that keeps `decided_ms` durably, together with what a decision says, runs each occurrence once or knows why
not. A decision that was lost in a crash is made again from the `decided_ms` before it.

An occurrence that is decided less than a minute late is on time and runs. Older ones were *missed*, because the server
was away or its clock was set forward. An example: the server of an hourly line was away from 02:30 to 08:30, so it
missed 03:00 to 08:00.

| policy | runs | skipped |
| --- | --- | --- |
| ``misfire="last"`` (default) | 08:00 | 5: superseded |
| ``misfire="skip"`` | none | 6: missed |
| ``misfire="all"`` | 03:00 to 08:00 | none |
| ``misfire="all", catchup=timedelta(hours=4)`` | 05:00 to 08:00 | 2: too_old |
| ``misfire="all", catchup_max=2`` | 07:00, 08:00 | 4: too_many |
| ``misfire="all", overlap="skip"`` | 08:00 | 5: overlap |
| any, while paused | none | 6: paused |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Literal, NamedTuple, Self, get_args

from delayd.errors import BadArgument, BadRequest
from delayd.recurrence.recurrence import Recurrence, is_whole

Misfire = Literal["last", "all", "skip"]
Overlap = Literal["all", "skip"]

ON_TIME_MS = 60_000  # A restart of a server takes seconds, and cron's finest step is a minute.
CATCHUP_MAX_DEFAULT = 100
CATCHUP_MAX_MOST = 10_000  # Each is a message, and all are made in one decision.
CATCHUP_LONGEST = timedelta(days=366 * 10)

_MS = timedelta(milliseconds=1)


class SkipReason(StrEnum):
    """Why an occurrence did not run."""

    PAUSED = "paused"  # Someone had paused the schedule.
    TOO_OLD = "too_old"  # It was missed longer ago than `catchup`.
    MISSED = "missed"  # It was missed, and the policy is to leave such ones out.
    SUPERSEDED = "superseded"  # A later one ran for all that were missed.
    TOO_MANY = "too_many"  # More than `catchup_max` were missed; this was one of the older ones.
    OVERLAP = "overlap"  # The message of another occurrence was not acknowledged yet.
    RESTORED = "restored"  # A life may have sent it of which the directory, restored from a copy, does not know.


@dataclass(frozen=True, slots=True)
class SkippedRun:
    """Occurrences that follow each other and were skipped for the same reason."""

    reason: SkipReason
    first_ms: int
    last_ms: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """What becomes of occurrences that were missed, or that meet one another.

    Attributes:
        misfire: of missed occurrences run the ``last`` one, unless a later one is on time; ``all``; or ``skip`` them.
        catchup: do not run one that was missed longer ago; None for no such limit.
        catchup_max: with ``misfire="all"`` run so many at most, the newest ones.
        overlap: ``all`` run; or ``skip`` an occurrence while a message of an earlier one is not acknowledged. Of
            several that are decided together the newest one runs.

    Raises:
        BadArgument: a value is out of range.
    """

    misfire: Misfire = "last"
    catchup: timedelta | None = None
    catchup_max: int = CATCHUP_MAX_DEFAULT
    overlap: Overlap = "all"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("misfire", self.misfire, get_args(Misfire)),
            ("overlap", self.overlap, get_args(Overlap)),
        ):
            if value not in choices:
                raise BadArgument(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        catchup, most = self.catchup, self.catchup_max
        if catchup is not None and not isinstance(catchup, timedelta):
            raise BadArgument(f"catchup must be a timedelta, not {type(catchup).__name__}; write timedelta(hours=6)")
        if catchup is not None and (not timedelta(0) <= catchup <= CATCHUP_LONGEST or catchup % _MS):
            raise BadArgument(f"catchup of {catchup} must be whole milliseconds, from 0 to {CATCHUP_LONGEST.days} days")
        if not is_whole(most) or not 1 <= most <= CATCHUP_MAX_MOST:
            raise BadArgument(f"catchup_max must be a whole number from 1 to {CATCHUP_MAX_MOST}, not {most!r}")

    def encoded(self) -> dict[str, int | str]:
        """A map for msgpack, with the fields that differ from their defaults."""
        encoded: dict[str, int | str] = {}
        if self.misfire != "last":
            encoded["m"] = self.misfire
        if self.catchup is not None:
            encoded["c"] = self.catchup // _MS
        if self.catchup_max != CATCHUP_MAX_DEFAULT:
            encoded["n"] = self.catchup_max
        if self.overlap != "all":
            encoded["o"] = self.overlap
        return encoded

    @classmethod
    def decoded(cls, encoded: Mapping[str, object]) -> Self:
        """The policy of a map that `encoded` made.

        Raises:
            BadRequest: it has a field that is not known, or a length of time of another type.
            BadArgument: a value that no policy has.
        """
        unknown = encoded.keys() - _FIELDS.keys()
        if unknown:
            raise BadRequest(f"a run policy has a field {min(unknown)!r}, which is not known here; upgrade this delayd")
        values = {_FIELDS[key]: value for key, value in encoded.items()}
        catchup_ms = values.get("catchup")
        if catchup_ms is not None:
            if not is_whole(catchup_ms):
                raise BadRequest(f"catchup of a run policy has a wrong type, {type(catchup_ms).__name__}", field="c")
            values["catchup"] = min(catchup_ms, 2 * (CATCHUP_LONGEST // _MS)) * _MS
        return cls(**values)  # type: ignore[arg-type]


_FIELDS = {"m": "misfire", "c": "catchup", "n": "catchup_max", "o": "overlap"}


class RunDecision(NamedTuple):
    """What is decided of the occurrences up to an instant."""

    run: tuple[int, ...]  # Their instants, in order; `Recurrence.due_ms` adds the jitter.
    skipped: tuple[SkippedRun, ...]  # In order: a few, whatever was missed.
    decided_ms: int  # The next decision begins behind this instant.
    next_ms: int | None  # When the next one is to be decided; None when the recurrence has ended.


def decide(
    recurrence: Recurrence,
    policy: RunPolicy,
    decided_ms: int,
    now_ms: int,
    *,
    ran: int = 0,
    paused: bool = False,
    busy: bool = False,
) -> RunDecision:
    """Decide all occurrences after ``decided_ms``, up to ``now_ms`` (included).

    Decide before an edit, a pause or its end becomes true: then the recurrence and the state that held until then are
    those by which its occurrences are judged. A clock that was set back decides nothing until it has caught up.

    An outage of two years costs some milliseconds, also of a line that fires each minute.

    Args:
        recurrence: when there are occurrences.
        policy: what becomes of missed and of overlapping ones.
        decided_ms: up to where earlier decisions went; of a new schedule the instant at which it was made.
        now_ms: the instant up to which to decide.
        ran: how many have run before, for `max_occurrences`.
        paused: whether the schedule is paused; then all are skipped.
        busy: whether a message of an earlier one is not acknowledged yet, for ``overlap="skip"``.
    """
    if not recurrence.left(1, ran):
        return RunDecision((), (), max(decided_ms, now_ms), None)
    if now_ms <= decided_ms:
        return RunDecision((), (), decided_ms, recurrence.next_after(decided_ms))
    skipped: list[SkippedRun] = []

    def skip(reason: SkipReason, after_ms: int, to_ms: int) -> None:
        count = recurrence.count(after_ms, to_ms)
        if count:
            first_ms = next(recurrence.between(after_ms, to_ms))
            last_ms = first_ms if count == 1 else recurrence.newest(1, after_ms, to_ms)[0]
            skipped.append(SkippedRun(reason, first_ms, last_ms, count))

    if paused:
        skip(SkipReason.PAUSED, decided_ms, now_ms)
        return RunDecision((), tuple(skipped), now_ms, recurrence.next_after(now_ms))
    missed_to_ms = max(decided_ms, now_ms - ON_TIME_MS)
    on_time = list(recurrence.between(missed_to_ms, now_ms))
    caught_up: list[int] = []
    if recurrence.count(decided_ms, missed_to_ms):
        young_after_ms = decided_ms
        if policy.misfire != "skip" and policy.catchup is not None:
            oldest_ms = now_ms - policy.catchup // _MS
            young_after_ms = min(max(decided_ms, oldest_ms - 1), missed_to_ms)
        skip(SkipReason.TOO_OLD, decided_ms, young_after_ms)
        most = {"skip": 0, "last": 0 if on_time else 1, "all": policy.catchup_max}[policy.misfire]
        caught_up = recurrence.newest(most, young_after_ms, missed_to_ms)
        skip(_LEFT_OUT[policy.misfire], young_after_ms, caught_up[0] - 1 if caught_up else missed_to_ms)
    chosen = caught_up + on_time
    if policy.overlap == "skip" and chosen:
        run = [] if busy else chosen[-1:]
        left_out = chosen[: len(chosen) - len(run)]
        if left_out:
            skipped.append(SkippedRun(SkipReason.OVERLAP, left_out[0], left_out[-1], len(left_out)))
    else:
        run = chosen
    run = run[: recurrence.left(len(run), ran)]
    has_more = recurrence.left(1, ran + len(run)) > 0
    next_ms = recurrence.next_after(now_ms) if has_more else None
    return RunDecision(tuple(run), tuple(skipped), now_ms, next_ms)


_LEFT_OUT = {"skip": SkipReason.MISSED, "last": SkipReason.SUPERSEDED, "all": SkipReason.TOO_MANY}
