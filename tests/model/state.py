"""State of the model: what a delay server D, its realtime servers T and the lines between them hold.

Every value is a tuple, so that equal situations are one state. A batch holds one row, and a row
is named by its sequence. Whatever the code derives from other fields is derived here too, and not kept.
"""

from typing import Literal, NamedTuple

W = tuple[int, int]
Key = tuple[int, int]
"""Epoch and id of a batch."""
Removed = frozenset[str]
"""Names of the rules that are not in force."""

# Phases of a link, as in delayd/delay/handoff/link.py. CONNECTING is left out: nothing is said in it.
CLOSED, ASKED, RECORDING, FLUSHING, READY = range(5)
# RECORDING waits for outcomes of which no byte is written yet, FLUSHING for those of the flush under way.

PHASES = ("CLOSED", "ASKED", "RECORDING", "RECORDING, flush under way", "READY")

# How far an outcome or a note has come.
MEMORY, WRITTEN, DURABLE = range(3)


class Line(NamedTuple):
    """A connection: who opened it. Both ends know it by identity, so this is more than the wire says."""

    epoch: int
    link: int
    session: int


class Batch(NamedTuple):
    """A batch in T's log: its number and its one row."""

    epoch: int
    id: int
    sequence: int

    @property
    def key(self) -> Key:
        return self.epoch, self.id


class Item(NamedTuple):
    """A request on its way to T, or taken by T and not durable: a hello if it has no batches, else a frame."""

    line: Line
    w: W
    batches: tuple[Batch, ...]


class Reply(NamedTuple):
    """An answer on its way to D: the window, or what became of a frame."""

    kind: Literal["window", "taken", "refused"]
    batches: tuple[Batch, ...]


class Outcome(NamedTuple):
    """A DISPATCHED row: how far it has come into D_h, and what it says."""

    level: int
    target: int
    key: Key


class Note(NamedTuple):
    """The target of a subject in M."""

    level: int
    target: int


class Link(NamedTuple):
    """D's memory of one target. ``sent``: id and sequence of what is undecided; with an outcome, it is acknowledged."""

    phase: int = CLOSED
    session: int = 0
    at: int = 0  # The server at the other end: another one than meant if D dialled an old address.
    last_id: int = 0
    sent: tuple[tuple[int, int], ...] = ()
    settled: bool = False  # Everything of earlier epochs is decided.
    replies: tuple[Reply, ...] = ()


class Target(NamedTuple):
    """One T. ``log`` is durable, ``under_way`` in the page cache, ``queue`` in memory, ``wires`` on their way to it."""

    log: tuple[Batch, ...] = ()
    w: W = (0, 0)
    heard: Key = (0, 0)  # Epoch and session.
    recorded: Key = (0, 0)  # The same as the log's hello records have it.
    current: Line | None = None  # The connection of the session heard, in this life of T.
    under_way: tuple[Item, ...] = ()
    queue: tuple[Item, ...] = ()
    wires: tuple[Item, ...] = ()  # In order on one line, in any order between lines.
    unsynced: int = 0  # Found at the end of the log after a restart and not fsynced; only without rule L1_target.


class Budget(NamedTuple):
    """How many faults of each kind may still happen."""

    delay_crashes: int = 0
    target_crashes: int = 0
    cuts: int = 0
    refusals: int = 0
    misdials: int = 0
    full_disks: int = 0


class State(NamedTuple):
    """Everything. ``wrong`` names a breach that a step met, such as a second outcome of one row."""

    epoch: int
    outcomes: tuple[Outcome | None, ...]
    notes: tuple[Note | None, ...]
    links: tuple[Link, ...]
    targets: tuple[Target, ...]
    budget: Budget
    unsynced: tuple[int, ...] = ()  # Rows that D found in D_h and took for durable; only without rule L1_outcomes.
    wrong: str = ""


class Configuration(NamedTuple):
    """The bounds of one search: the subject of each message, the target noted for each subject (None: not yet)."""

    subjects: tuple[int, ...]
    noted: tuple[int | None, ...]
    targets: int
    budget: Budget
    relay: bool = False  # Bytes under way survive a crash of T, as in a relay between the two.


def initial(configuration: Configuration) -> State:
    """All messages are accepted and due, and nothing was sent."""
    return State(
        1,
        (None,) * len(configuration.subjects),
        tuple(None if target is None else Note(DURABLE, target) for target in configuration.noted),
        (Link(),) * configuration.targets,
        (Target(),) * configuration.targets,
        configuration.budget,
    )


def with_link(state: State, number: int, link: Link) -> State:
    """Replace one link."""
    return state._replace(links=(*state.links[:number], link, *state.links[number + 1 :]))


def with_target(state: State, number: int, target: Target) -> State:
    """Replace one target."""
    return state._replace(targets=(*state.targets[:number], target, *state.targets[number + 1 :]))


def hears(state: State, line: Line) -> bool:
    """Whether D still has this connection."""
    link = state.links[line.link]
    return link.phase != CLOSED and (line.epoch, line.session) == (state.epoch, link.session)


def hang_up(state: State, line: Line | None, removed: Removed) -> State:
    """A connection ends, and with it the session, if D still had it; answers that D did not read are lost.

    D learns of it at once: all that it could do in between happens in another order of the same steps.
    """
    if line is None or not hears(state, line):
        return state
    link = state.links[line.link]._replace(phase=CLOSED, at=0, replies=())
    if "H5_wait" in removed:
        link = link._replace(sent=tuple(pair for pair in link.sent if state.outcomes[pair[1]] is not None))
    return with_link(state, line.link, link)


def tell(state: State, line: Line, reply: Reply) -> State:
    """T answers, if anybody listens."""
    if not hears(state, line):
        return state
    link = state.links[line.link]
    return with_link(state, line.link, link._replace(replies=(*link.replies, reply)))
