"""State of the model: one subject, one key, few rows. A row is its sequence.

Every value is a tuple or a frozenset, so that equal situations are one state.
"""

from enum import Enum
from typing import NamedTuple

Rows = frozenset[int]
Removed = frozenset[str]
"""Names of the rules that are not in force."""
NONE: Rows = frozenset()

# How far an outcome has come.
WRITTEN, DURABLE = range(2)


class Ask(Enum):
    """What a caller may ask for; the row of a `CANCEL_FIRST` is named by its receipt, all others by the key."""

    SEND = "send, on conflict reject"
    REPLACE = "send, on conflict replace"
    CANCEL = "cancel by key"
    CANCEL_FIRST = "cancel by the receipt of row 1"
    MOVE = "reschedule by key"


class Answer(Enum):
    """What the caller is told."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    MOVED = "moved"
    ALREADY_DISPATCHED = "already dispatched"
    IN_FLIGHT = "in flight"
    UNKNOWN = "unknown"
    REFUSED = "refused, the disk is full"


class Reason(Enum):
    """Why a row ended."""

    CANCELLED = "cancelled"
    MOVED = "moved"
    REPLACED = "replaced"
    REJECTED = "rejected"
    IN_FLIGHT = "in flight"


REFUSED_ROWS = (Reason.REJECTED, Reason.IN_FLIGHT)


class Ended(NamedTuple):
    """A record: a row ends; ``other`` took its place, or is the one that it met."""

    row: int
    reason: Reason
    other: int = 0


class Group(NamedTuple):
    """What one commit appends: rows and decisions."""

    rows: tuple[int, ...] = ()
    ended: tuple[Ended, ...] = ()


class Told(NamedTuple):
    """An answer that a caller got: about ``row``, with the row that took its place."""

    ask: Ask
    answer: Answer
    row: int = 0
    other: int = 0


class Asked(NamedTuple):
    """A request in the queue, and the row that the look-up found: 0 for none."""

    ask: Ask
    looked: int


class Commit(NamedTuple):
    """Decided, and on its way to the disk; ``appended``: how many of its groups are in the page cache."""

    groups: tuple[Group, ...]
    told: tuple[Told, ...]
    claimed: Rows
    appended: int = 0


class Outcome(NamedTuple):
    """A row's outcome in D_h."""

    row: int
    dispatched: bool
    level: int


class Checkpoint(NamedTuple):
    """What the state counts: groups of M, decisions whose outcomes are owed, and runs of the index, oldest first."""

    groups: int
    ended: Rows
    runs: tuple[tuple[int, ...], ...]


class Budget(NamedTuple):
    """How often each of these may happen."""

    crashes: int = 0
    checkpoints: int = 0
    full_disks: int = 0
    merges: int = 0


class State(NamedTuple):
    """Everything."""

    todo: tuple[Ask, ...]  # What callers have not asked yet.
    budget: Budget
    queue: tuple[Asked, ...] = ()
    log: tuple[Group, ...] = (Group((1,)),)  # M.
    durable: int = 1  # How many groups of M are.
    commit: Commit | None = None
    late: Commit | None = None  # Durable, and not in effect yet.
    claimed: Rows = NONE
    loaded: Rows = frozenset((1,))  # Rows in memory that wait to be sent.
    sent: Rows = NONE  # In flight, in this life.
    doubt: Rows = NONE  # May be at the target since an earlier life.
    wire: tuple[int, ...] = ()
    target: tuple[int, ...] = ()  # What the target's log holds, in order.
    outcomes: frozenset[Outcome] = frozenset()
    owed: Rows = NONE  # Ended, without a durable outcome.
    entries: tuple[int, ...] = (1,)  # The index in memory.
    runs: tuple[tuple[int, ...], ...] = ()
    writing: Checkpoint | None = None  # A checkpoint under way.
    frozen: tuple[int, ...] = ()  # The entries that it writes.
    counted: Checkpoint = Checkpoint(0, NONE, ())
    told: frozenset[Told] = frozenset((Told(Ask.SEND, Answer.ACCEPTED, 1),))


def rows_of(groups: tuple[Group, ...]) -> Rows:
    """All rows of some groups."""
    return frozenset(row for group in groups for row in group.rows)


def ended_in(groups: tuple[Group, ...]) -> dict[int, Ended]:
    """The decisions of some groups by row."""
    return {ended.row: ended for group in groups for ended in group.ended}


def takers(groups: tuple[Group, ...]) -> tuple[int, ...]:
    """The rows of some groups that took the key, in order."""
    ended = ended_in(groups)
    return tuple(row for row in sorted(rows_of(groups)) if row not in ended or ended[row].reason not in REFUSED_ROWS)


def outcome_of(state: State, row: int) -> Outcome | None:
    """The outcome of a row, durable or not."""
    return next((outcome for outcome in state.outcomes if outcome.row == row), None)


def newest(state: State, removed: Removed) -> int:
    """The newest row in the index, 0 for none."""
    runs = [*state.runs, (*state.frozen, *state.entries)]
    if "index_newest" in removed:
        return next((max(run) for run in runs if run), 0)
    return max((row for run in runs for row in run), default=0)
