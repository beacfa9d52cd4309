"""Lives: which servers of a data directory are up, and between which instants they were, as far as files tell.

Invariant: an instant is named only when a file proves it, so that a row is called waiting for no longer than somebody
was away, and lost only when everybody who had to move it was up (docs/audit.md).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from delayd.disk import Disk
from delayd.holder import is_held
from delayd.hours import HOUR_MS
from delayd.log.checkpoint import read_checkpoint
from delayd.reading.directory import Directory
from delayd.reading.realtime import TargetIndex

META = "meta"
LOCK = "LOCK"


class State(StrEnum):
    """What a server is doing while the books are read."""

    UP = "up"
    STARTING = "starting"  # It holds its directory, and nothing that it wrote is dated after that yet.
    AWAY = "away"  # Stopped, dead, or this is a copy of its directory.


@dataclass(frozen=True, slots=True)
class Life:
    """One server's present or last life; ``since_ms`` is 0 when its start is not known."""

    path: str
    role: str
    state: State
    since_ms: int
    until_ms: int

    @property
    def sentence(self) -> str:
        """What keeps messages waiting, for people."""
        match self.state:
            case State.UP:
                return f"{self.path} is up since {_iso(self.since_ms)}"
            case State.STARTING:
                return f"{self.path} is starting: nothing in it is newer than its LOCK"
            case State.AWAY:
                last = f", the last that it wrote is of {_iso(self.until_ms)}" if self.until_ms else ""
                return f"{self.path} is away{last}"


@dataclass(frozen=True, slots=True)
class Span:
    """When the servers that a message needs were up together; the grace counts within it."""

    since_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class Spans:
    """The span of each subject: one for all, and those that differ."""

    common: Span
    of_subject: Mapping[str, Span] = field(default_factory=dict)

    def bounds(self, subjects: Sequence[str], index: NDArray[np.uint32]) -> tuple[NDArray[np.int64], ...]:
        """``since_ms`` and ``until_ms`` for each row; ``index`` is its place in ``subjects``."""
        if not self.of_subject:
            return np.full(len(index), self.common.since_ms), np.full(len(index), self.common.until_ms)
        spans = [self.of_subject.get(subject, self.common) for subject in subjects]
        since = np.array([span.since_ms for span in spans], np.int64)
        until = np.array([span.until_ms for span in spans], np.int64)
        return since[index], until[index]


def read_life(disk: Disk, directory: Directory, seen_ms: int, now_ms: int) -> Life:
    """How a server with logs is; ``seen_ms`` is the last instant that its logs name."""
    seen_ms = max(seen_ms, _checkpoint_ms(disk, directory))
    path, role = directory.path, directory.role
    lock_ms, held = _lock(directory.path)
    if held and seen_ms >= lock_ms:
        return Life(path, role, State.UP, lock_ms, now_ms)
    until_ms = min(now_ms, seen_ms)
    if held:
        return Life(path, role, State.STARTING, 0, until_ms)
    # A copy's LOCK is as old as the copy.
    return Life(path, role, State.AWAY, lock_ms if lock_ms <= until_ms else 0, until_ms)


def read_meta_life(data: str, now_ms: int) -> Life | None:
    """How meta is, which has no logs; None when it is not in this data directory."""
    path = f"{data}/{META}"
    lock_ms, held = _lock(path)
    if not lock_ms:
        return None
    return Life(path, META, State.UP, lock_ms, now_ms) if held else Life(path, META, State.AWAY, 0, 0)


def spans_of(
    origin: Life, log_id: int, targets: Sequence[Life], index: TargetIndex, meta: Life | None, grace_ms: int
) -> Spans:
    """For the rows of one delay server: when it and the target of each subject were up together, and not behind.

    Args:
        origin: of the delay server.
        log_id: of the delay server.
        targets: lives in order of the index's targets.
        index: what the targets hold.
        meta: None when it is not here.
        grace_ms: what came of an hour that had ended longer ago was held up, and more may be behind it.
    """
    if origin.state is not State.UP:
        meta = None  # Nobody asked it for anything, and a stopped one names no instants.
    held_up_ms = _last_held_up_ms(index, log_id, grace_ms)
    spans = [
        _span(origin, target, index.hellos.get((number, log_id), 0), held_up_ms.get(number, 0), meta)
        for number, target in enumerate(targets)
    ]
    alone = Span(origin.since_ms, origin.until_ms)
    # Nobody knows yet where a subject goes that no target has had.
    all_up = Span(
        max([alone.since_ms, *(span.since_ms for span in spans)]),
        min([alone.until_ms, *(span.until_ms for span in spans)]),
    )
    if meta is not None:
        all_up = Span(max(all_up.since_ms, meta.since_ms), min(all_up.until_ms, meta.until_ms))
    of_subject = {index.subjects[subject]: spans[target] for subject, target in _last_targets(index, log_id)}
    return Spans(all_up, {subject: span for subject, span in of_subject.items() if span != all_up})


def who_is_missed(lives: Sequence[Life], now_ms: int, grace_ms: int) -> tuple[Life, ...]:
    """The servers that keep messages waiting: not up, or not for the grace."""
    return tuple(life for life in lives if life.state is not State.UP or life.since_ms + grace_ms >= now_ms)


def _span(origin: Life, target: Life, hello_ms: int, held_up_ms: int, meta: Life | None) -> Span:
    since_ms = max(origin.since_ms, target.since_ms)
    until_ms = min(origin.until_ms, target.until_ms)
    if meta is not None and meta.state is not State.UP and hello_ms < since_ms:
        # They find each other through meta, and have not met in these lives.
        until_ms = 0
    return Span(max(since_ms, hello_ms, held_up_ms), until_ms)


def _last_held_up_ms(index: TargetIndex, log_id: int, grace_ms: int) -> dict[int, int]:
    """When each target, by number, last got a batch of an hour that had ended longer than the grace ago."""
    # A message that is accepted after its time is filed in the hour in which it is accepted (rule P5).
    ended_ms = (index.batches["hour"].astype(np.int64) + 1) * HOUR_MS
    held_up = (index.batches["origin_log_id"] == log_id) & (index.batches["claimed_at_ms"] - ended_ms > grace_ms)
    batches = index.batches[held_up]
    last_ms: dict[int, int] = {}
    for target in np.unique(batches["target"]).tolist():
        last_ms[target] = int(batches["appended_at_ms"][batches["target"] == target].max())
    return last_ms


def _last_targets(index: TargetIndex, log_id: int) -> list[tuple[int, int]]:
    """For each subject that came from a delay server the target that had it last; both as numbers."""
    batches = index.batches
    own = np.flatnonzero(batches["origin_log_id"] == log_id)
    # The youngest comes last, and stays.
    own = own[np.argsort(batches["appended_at_ms"][own], kind="stable")]
    last = np.full(len(index.subjects), -1, np.int64)
    last[batches["subject"][own]] = own
    subjects = np.flatnonzero(last >= 0)
    return list(zip(subjects.tolist(), batches["target"][last[subjects]].tolist(), strict=True))


def _checkpoint_ms(disk: Disk, directory: Directory) -> int:
    published = read_checkpoint(disk, directory.path, directory.log_id) or {}
    clock = published.get("clock")
    wall_ms = clock[2] if isinstance(clock, list) and len(clock) == 3 else 0
    return wall_ms if isinstance(wall_ms, int) else 0


def _lock(path: str) -> tuple[int, bool]:
    """When a directory's LOCK was written, 0 when there is none, and whether a server holds it."""
    try:
        lock = os.stat(f"{path}/{LOCK}")
    except (FileNotFoundError, NotADirectoryError):
        return 0, False
    return lock.st_mtime_ns // 1_000_000, is_held(lock)


def _iso(instant_ms: int) -> str:
    return datetime.fromtimestamp(instant_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
