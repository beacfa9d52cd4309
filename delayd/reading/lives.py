"""Lives: which servers of a data directory are up, and up to when a delay server has settled what fell due (rule S7).

Invariant: a message without an outcome is called lost only if its delay server says so: each checkpoint publishes the
instant before which the server holds nothing any more that fell due. So a server that is away, full or fenced makes no
message lost. A message that the server forgot is found all the same, whoever starts, stops or touches files
(docs/audit.md).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from delayd.disk import Disk
from delayd.holder import LOCK
from delayd.log.checkpoint import read_checkpoint
from delayd.reading.directory import Directory, server_runs
from delayd.reading.realtime import TargetIndex
from delayd.reading.word import Word

META = "meta"


class State(StrEnum):
    """The state of a server while the books are read."""

    UP = "up"
    AWAY = "away"  # Stopped, dead, or this is a copy of its directory.


@dataclass(frozen=True, slots=True)
class Life:
    """One server's present or last life; ``until_ms`` is the last instant that its own files name, 0 if they name
    none.
    """

    path: str
    role: str
    state: State
    until_ms: int

    @property
    def sentence(self) -> str:
        """What keeps messages waiting, for people."""
        last = f", the last that it wrote is of {_iso(self.until_ms)}" if self.until_ms else ""
        return f"{self.path} is {self.state}{last}"


@dataclass(frozen=True, slots=True)
class Span:
    """A time during which no server held up due messages; the grace counts within it."""

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
    """Read the life of a server with logs; ``seen_ms`` is the last instant that its logs name."""
    until_ms = min(now_ms, max(seen_ms, _checkpoint_ms(disk, directory)))
    state = State.UP if server_runs(directory.path) else State.AWAY
    return Life(directory.path, directory.role, state, until_ms)


def read_meta_life(data: str) -> Life | None:
    """Read the life of meta, which has no logs; None when it is not in this data directory."""
    path = f"{data}/{META}"
    if not os.path.exists(f"{path}/{LOCK}"):
        return None
    return Life(path, META, State.UP if server_runs(path) else State.AWAY, 0)


def spans_of(word: Word, log_id: int, index: TargetIndex) -> Spans:
    """The spans for the rows of one delay server: up to when the rows of each subject were settled, as it has
    published.

    Args:
        word: what its checkpoint says.
        log_id: of the delay server.
        index: what the targets hold.
    """
    here = {target.log_id for target in index.targets}
    # If a target's log is not here, nobody can prove which rows it holds.
    settled_ms = {link.log_id: link.settled_ms if link.log_id in here else 0 for link in word.links}
    until_ms = {log_id: min(word.settled_ms, instant) for log_id, instant in settled_ms.items()}
    # Nobody knows yet to which target a new subject goes.
    common = Span(0, min([word.settled_ms, *until_ms.values()]) if here else 0)
    ids = [target.log_id for target in index.targets]
    of_subject: dict[str, Span] = {}
    for subject, target in _last_targets(index, log_id):
        until = until_ms.get(ids[target])
        if until is not None and until != common.until_ms:
            of_subject[index.subjects[subject]] = Span(0, until)
    return Spans(common, of_subject)


def what_holds_up(word: Word) -> list[str]:
    """Why messages wait, as the delay server itself says."""
    found = [word.waits] if word.waits else []
    found += [f"realtime server {link.log_id:016x}: {link.waits}" for link in word.links if link.waits]
    return found


def who_is_missed(lives: Sequence[Life]) -> tuple[Life, ...]:
    """The servers that keep messages waiting: those that are not up."""
    return tuple(life for life in lives if life.state is not State.UP)


def _last_targets(index: TargetIndex, log_id: int) -> list[tuple[int, int]]:
    """For each subject of a delay server, the target that had it last; both as numbers."""
    batches = index.batches
    own = np.flatnonzero(batches["origin_log_id"] == log_id)
    # The youngest batch is written last, and stays.
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


def _iso(instant_ms: int) -> str:
    return datetime.fromtimestamp(instant_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
