"""Window: what became of each message of one group, and of each pull of it (rules Q1, Q4, Q5; docs/architecture.md,
What becomes of a message).

Two numbers name a message of a group: its *consume sequence*, and the *pull sequence* of each time that it was given
out. So there are two tables of runs, both rising and disjoint:

- ``handles``, by pull sequence: pulls that a consumer holds, and which word gave the others back. What is in it nowhere
  was acknowledged, or nobody knows (`realtime.words`).
- ``others``, by consume sequence: messages that are to be pulled again, wait out a pause, or can't be read.

Messages from ``next`` on are new. What lies below ``next``, and neither table nor ``leaving`` has it, is settled.
`MOVES` says which word moves a message from where to where; a word that it does not have moves nothing.

An example: group g is at 40, and its consumer pulls three messages, as the pull sequences 700 to 702.

1. ``next`` is 43, and ``handles`` has one run: 700, 3 messages from 40 on, attempt 1, until 30,000.
2. It acknowledges 700: the run begins at 701 now, and 40 is settled.
3. It gives 701 back. ``handles`` has 701 as GIVEN_BACK and 702 as HELD; ``others`` has 41 as OFFERED, attempt 2.
4. At 30,000 the lease of 702 ends: it is LAPSED, and 42 is offered behind 41, in the same run.

Each run is 47 bytes in two arrays, and not an object: a message that is pulled alone takes some 53 bytes.
"""

from __future__ import annotations

import bisect
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import Enum, IntEnum, auto
from itertools import chain
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delayd.log.pull import ATTEMPT_MAX, GroupDecision, PullEntry, PullOp
from delayd.machine.alarms import NEVER_MS

if TYPE_CHECKING:
    from .order import Order

PIECE_RUNS = 512  # A piece is searched by bisection and moved in memory as a whole; both take less than a microsecond.
# Beyond this the oldest runs are forgotten: nobody knows what became of these pulls, so their handles are stale.
GIVEN_BACK_RUNS_MAX = 10_000
PAUSE_MS = 100  # Pause before a message that was given back a second time is offered again; doubled each further time.
PAUSE_MS_MAX = 10_000


class Stage(IntEnum):
    """Where a message of a group is."""

    NEW = 0  # From ``next`` on.
    OFFERED = auto()  # It came back, and is pulled before new ones.
    HELD = auto()
    PAUSED = auto()  # It was given back again and again, or is to wait; then it is offered.
    UNREADABLE = auto()  # Its batch can't be read; it is offered when that has changed (rule L10).
    LEAVING = auto()  # It lives on at its delay server, which has not taken it yet (rule Q2).
    SETTLED = auto()  # The group is done with it.


class GroupWord(Enum):
    """What moves a message; `MOVES` says why."""

    PULLED = auto()
    PASSED_BY = auto()
    ACK = auto()
    NACK = auto()
    PUT_OFF = auto()
    RETURNED = auto()
    LAPSED = auto()
    RETRY = auto()
    REJECT = auto()
    TAKEN = auto()
    RESUMED = auto()
    UNREADABLE = auto()
    READABLE = auto()
    GIVEN_UP = auto()
    GONE = auto()


class Became(IntEnum):
    """What became of a pull sequence."""

    HELD = Stage.HELD
    GIVEN_BACK = 16
    LAPSED = auto()
    RETRIED = auto()
    REJECTED = auto()
    ACKNOWLEDGED = auto()  # These two are in no table.
    UNKNOWN = auto()


MOVES = {
    (Stage.NEW, GroupWord.PULLED): Stage.HELD,  # A consumer gets it.
    (Stage.NEW, GroupWord.PASSED_BY): Stage.OFFERED,  # A later one was pulled before it (Q8, or L5 in an earlier life).
    (Stage.NEW, GroupWord.UNREADABLE): Stage.UNREADABLE,  # Its stored batch does not check.
    (Stage.NEW, GroupWord.GONE): Stage.SETTLED,  # It is not kept any more.
    (Stage.OFFERED, GroupWord.PULLED): Stage.HELD,  # A consumer gets it, before new ones.
    (Stage.OFFERED, GroupWord.UNREADABLE): Stage.UNREADABLE,  # Its stored batch does not check any more.
    (Stage.OFFERED, GroupWord.GONE): Stage.SETTLED,  # It is not kept any more.
    (Stage.HELD, GroupWord.ACK): Stage.SETTLED,  # The consumer is done with it; also a message that nobody gets (Q7).
    (Stage.HELD, GroupWord.NACK): Stage.OFFERED,  # A handler gave it back the first time.
    (Stage.HELD, GroupWord.PUT_OFF): Stage.PAUSED,  # It was given back again, or is wanted later in an ordered group.
    (Stage.HELD, GroupWord.RETURNED): Stage.OFFERED,  # No handler was given it: this was no attempt (Q4).
    (Stage.HELD, GroupWord.LAPSED): Stage.OFFERED,  # Its lease ended, or another consumer leads the group (Q9).
    (Stage.HELD, GroupWord.RETRY): Stage.LEAVING,  # It is to come again through its delay server (Q2).
    (Stage.HELD, GroupWord.REJECT): Stage.LEAVING,  # It becomes a dead letter there.
    (Stage.PAUSED, GroupWord.RESUMED): Stage.OFFERED,  # Its pause is over.
    (Stage.UNREADABLE, GroupWord.READABLE): Stage.OFFERED,  # Its batch checks again (L10).
    (Stage.UNREADABLE, GroupWord.GIVEN_UP): Stage.SETTLED,  # An operator dropped it.
    (Stage.LEAVING, GroupWord.TAKEN): Stage.SETTLED,  # Its delay server has it.
}
BECAME = {
    GroupWord.NACK: Became.GIVEN_BACK,
    GroupWord.PUT_OFF: Became.GIVEN_BACK,
    GroupWord.RETURNED: Became.GIVEN_BACK,
    GroupWord.LAPSED: Became.LAPSED,
    GroupWord.RETRY: Became.RETRIED,
    GroupWord.REJECT: Became.REJECTED,
}  # Of the pull whose message was moved by that word.
GIVEN_BACK = (Became.GIVEN_BACK, Became.LAPSED, Became.RETRIED, Became.REJECTED)
HELD = int(Stage.HELD)
_PULL, _ACK = PullOp.PULL, PullOp.ACK  # To look a member of an enum up takes as long as to find a run.
_FROM = {word: tuple(state for state, by in MOVES if by is word) for word in GroupWord}
_WORDS = {
    PullOp.ACK: GroupWord.ACK,
    PullOp.NACK: GroupWord.NACK,
    PullOp.LAPSED: GroupWord.LAPSED,
    PullOp.RETURNED: GroupWord.RETURNED,
}

_ROW = Struct("<QBHQQIq")  # A run but for its first number.
_ROW_TYPE = np.dtype(
    [("messages", "<u8"), ("state", "u1"), ("attempt", "<u2"), ("consume_first", "<u8"), ("incarnation", "<u8"),
     ("lease_ms", "<u4"), ("until_ms", "<i8")]
)  # fmt: skip
_NO_MESSAGE = (1 << 64) - 1  # Stands for the consume sequence of a pull that nobody holds.
_STATES = max(Became) + 1


class Offer(NamedTuple):
    """Neighbouring messages that may be pulled, and as which attempt."""

    consume_first: int
    messages: int
    attempt: int


class StateRun(NamedTuple):
    """Neighbours of one state. Of a run of pulls ``consume_first`` is the first message, and ``until_ms`` the end of
    its lease, which was given for ``lease_ms``; of a pause ``until_ms`` is its end. All other runs never end.
    """

    first: int
    messages: int
    state: int
    attempt: int = 0
    consume_first: int = _NO_MESSAGE
    incarnation: int = 0
    lease_ms: int = 0
    until_ms: int = NEVER_MS

    @property
    def end(self) -> int:
        """Just behind its last number."""
        return self.first + self.messages

    def cut(self, first: int, end: int) -> StateRun:
        """The part of the run within [first, end)."""
        first, end = max(self.first, first), min(self.first + self.messages, end)
        consume_first = self.consume_first
        if consume_first != _NO_MESSAGE:
            consume_first += first - self.first
        return StateRun(first, end - first, self.state, self.attempt, consume_first, *self[5:])


class _WindowPiece:
    """Some neighbouring runs; ``oldest`` and ``until_ms`` are the lowest of them, None when nobody has looked."""

    __slots__ = ("firsts", "oldest", "rows", "until_ms")

    def __init__(self, firsts: array[int], rows: bytearray) -> None:
        self.firsts = firsts
        self.rows = rows
        self.oldest: int | None = None
        self.until_ms: int | None = None

    def run(self, index: int) -> StateRun:
        # Each pull and each acknowledgement comes here; this takes half of what a call of the class takes.
        return tuple.__new__(StateRun, (self.firsts[index], *_ROW.unpack_from(self.rows, index * _ROW.size)))

    def lowest(self, column: str) -> int:
        return int(np.frombuffer(self.rows, _ROW_TYPE)[column].min())

    def replace(self, start: int, stop: int, runs: list[StateRun]) -> None:
        self.firsts[start:stop] = array("Q", [run[0] for run in runs])
        self.rows[start * _ROW.size : stop * _ROW.size] = b"".join([_ROW.pack(*run[1:]) for run in runs])
        self.oldest = self.until_ms = None


class Runs:
    """Disjoint runs, rising, in pieces of bounded length; a change costs the logarithm of the runs and one piece.

    ``messages`` and ``runs`` count them by state.
    """

    __slots__ = ("_pieces", "_starts", "messages", "runs")

    def __init__(self) -> None:
        self.messages = [0] * _STATES
        self.runs = [0] * _STATES
        self._pieces: list[_WindowPiece] = []
        self._starts: list[int] = []  # For each piece: where its first run starts.

    def __len__(self) -> int:
        return sum([len(piece.firsts) for piece in self._pieces])

    def __iter__(self) -> Iterator[StateRun]:
        for piece in self._pieces:
            for index in range(len(piece.firsts)):
                yield piece.run(index)

    def of(self, state: int) -> Iterator[StateRun]:
        """The runs of one state."""
        if self.runs[state]:
            for piece in self._pieces:
                # Pulls that were given back long ago fill whole pieces.
                if state != HELD or self._oldest(piece) != _NO_MESSAGE:
                    yield from [run for run in map(piece.run, range(len(piece.firsts))) if run.state == state]

    @property
    def oldest(self) -> int:
        """The lowest consume sequence of a pull that is held; a number beyond all of them when nothing is held."""
        return min(map(self._oldest, self._pieces), default=_NO_MESSAGE)

    @property
    def until_ms(self) -> int:
        """When the first run ends; NEVER_MS when none does."""
        return min(map(self._until_ms, self._pieces), default=NEVER_MS)

    def ended(self, now_ms: int, most: int) -> list[StateRun]:
        """Up to ``most`` runs that have ended by now."""
        found: list[StateRun] = []
        for piece in self._pieces:
            if self._until_ms(piece) <= now_ms:
                rows = np.flatnonzero(np.frombuffer(piece.rows, _ROW_TYPE)["until_ms"] <= now_ms)
                found += map(piece.run, rows[: most - len(found)].tolist())
                if len(found) >= most:
                    break
        return found

    def copy(self) -> Runs:
        """The same runs as a table of its own; a nanosecond a run."""
        made = Runs()
        made.messages, made.runs = self.messages.copy(), self.runs.copy()
        made._pieces = [_WindowPiece(piece.firsts[:], piece.rows[:]) for piece in self._pieces]
        made._starts = self._starts.copy()
        return made

    def at(self, number: int) -> StateRun | None:
        """The run that has this number."""
        at, index = self._find(number)
        run = self._pieces[at].run(index) if at < len(self._pieces) else None
        return run if run is not None and run.first <= number else None

    def within(self, first: int, end: int) -> list[StateRun]:
        """The parts of runs in [first, end), rising."""
        found: list[StateRun] = []
        at, index = self._find(first)
        while at < len(self._pieces):
            piece = self._pieces[at]
            stop = bisect.bisect_left(piece.firsts, end, index)
            for each in range(index, stop):
                run = piece.run(each)
                found.append(run if first <= run[0] and run[0] + run[1] <= end else run.cut(first, end))
            if stop < len(piece.firsts):
                break
            at, index = at + 1, 0
        return found

    def add(self, run: StateRun) -> None:
        """Add a run; no part of it may be there already."""
        first = run[0]
        self.messages[run[2]] += run[1]
        self.runs[run[2]] += 1
        if not self._pieces or (first > self._pieces[-1].firsts[-1] and len(self._pieces[-1].firsts) >= PIECE_RUNS):
            self._pieces.append(_WindowPiece(array("Q", [first]), bytearray(_ROW.pack(*run[1:]))))
            self._starts.append(first)
            return
        at = max(0, bisect.bisect_right(self._starts, first) - 1)
        piece = self._pieces[at]
        if first > piece.firsts[-1]:
            piece.firsts.append(first)
            piece.rows += _ROW.pack(*run[1:])
            if piece.oldest is not None:
                piece.oldest = min(piece.oldest, run.consume_first)
            if piece.until_ms is not None:
                piece.until_ms = min(piece.until_ms, run.until_ms)
            return
        index = bisect.bisect_left(piece.firsts, first)
        piece.replace(index, index, [run])
        self._tidy(at, at + 1)

    def join(self, run: StateRun) -> None:
        """Add a run; it becomes one with neighbours that are alike but for their numbers."""
        before, behind = self.at(run.first - 1), self.at(run.end)
        for other in (before, behind):
            if other is not None and other[2:] == run[2:]:
                self.take(other.first, other.end, (run.state,))
                run = run._replace(first=min(run.first, other.first), messages=run.messages + other.messages)
        self.add(run)

    def take(self, first: int, end: int, states: tuple[int, ...], incarnation: int | None = None) -> list[StateRun]:
        """Take out the parts of [first, end) that are in one of these states; of pulls those of one incarnation, unless
        it is None. Rising.
        """
        at, index = self._find(first)
        if at < len(self._pieces):
            piece = self._pieces[at]
            run = piece.run(index)
            is_whole = run[0] == first and run[0] + run[1] == end
            if is_whole and run[2] in states and (incarnation is None or incarnation == run[5]):
                # Nearly every consumer acknowledges a whole run at once.
                self.messages[run[2]] -= run[1]
                self.runs[run[2]] -= 1
                del piece.firsts[index]
                del piece.rows[index * _ROW.size : (index + 1) * _ROW.size]
                if run[4] == piece.oldest:
                    piece.oldest = None
                if run[7] == piece.until_ms:
                    piece.until_ms = None
                if not piece.firsts:
                    del self._pieces[at], self._starts[at]
                elif not index:
                    self._starts[at] = piece.firsts[0]
                return [run]
        taken: list[StateRun] = []
        begin, is_last = at, False
        while at < len(self._pieces) and not is_last:
            piece = self._pieces[at]
            stop = bisect.bisect_left(piece.firsts, end, index)
            is_last = stop < len(piece.firsts)
            left: list[StateRun] = []
            before = len(taken)
            for run in map(piece.run, range(index, stop)):
                if run.state not in states or incarnation not in (None, run.incarnation):
                    left.append(run)
                    continue
                parts = [run.cut(*part) for part in ((run.first, first), (end, run.end)) if part[0] < part[1]]
                self._count(run, -1)
                for each in parts:
                    self._count(each, 1)
                left += parts
                taken.append(run.cut(first, end) if parts else run)
            if len(taken) > before:
                piece.replace(index, stop, left)
            at, index = at + 1, 0
        self._tidy(begin, at)
        return taken

    def shift(self, ms: int) -> None:
        """Let all runs that end do so later."""
        for piece in self._pieces:
            ends = np.frombuffer(piece.rows, _ROW_TYPE)["until_ms"]
            ends[ends != NEVER_MS] += ms
            piece.until_ms = None

    def _count(self, run: StateRun, sign: int) -> None:
        state = run[2]
        self.messages[state] += sign * run[1]
        self.runs[state] += sign

    def _tidy(self, begin: int, end: int) -> None:
        """Remove empty pieces, and cut those that have grown long."""
        pieces: list[_WindowPiece] = []
        for piece in self._pieces[begin:end]:
            if len(piece.firsts) <= 2 * PIECE_RUNS:
                pieces += [piece] if piece.firsts else []
                continue
            for first in range(0, len(piece.firsts), PIECE_RUNS):
                part = slice(first, first + PIECE_RUNS)
                rows = piece.rows[part.start * _ROW.size : part.stop * _ROW.size]
                pieces.append(_WindowPiece(piece.firsts[part], rows))
        self._pieces[begin:end] = pieces
        self._starts[begin:end] = [piece.firsts[0] for piece in pieces]

    def _find(self, first: int) -> tuple[int, int]:
        """The piece, and the place in it, of the first run that ends behind ``first``; behind all pieces if there is
        none.
        """
        at = max(0, bisect.bisect_right(self._starts, first) - 1)
        if at >= len(self._pieces):
            return at, 0
        piece = self._pieces[at]
        index = bisect.bisect_right(piece.firsts, first)
        if index:
            count: int = _ROW.unpack_from(piece.rows, (index - 1) * _ROW.size)[0]
            if piece.firsts[index - 1] + count > first:
                return at, index - 1
        return (at, index) if index < len(piece.firsts) else (at + 1, 0)

    @staticmethod
    def _oldest(piece: _WindowPiece) -> int:
        if piece.oldest is None:
            piece.oldest = piece.lowest("consume_first")
        return piece.oldest

    @staticmethod
    def _until_ms(piece: _WindowPiece) -> int:
        if piece.until_ms is None:
            piece.until_ms = piece.lowest("until_ms")
        return piece.until_ms


class GroupWindow:
    """The messages of one group. ``order`` hears of each move, if the group keeps an order."""

    __slots__ = ("_turns", "ends_ms", "handles", "known_from", "leaving", "next", "order", "others")

    def __init__(self, start: int, known_from: int = 0) -> None:
        self.next = start
        self.known_from = known_from  # Nobody knows what became of pull sequences below this that are in no table.
        self.handles = Runs()
        self.others = Runs()
        self.leaving: dict[tuple[int, int], GroupDecision] = {}
        self.order: Order | None = None
        self.ends_ms = NEVER_MS  # No lease and no pause ends before this; `next_end_ms` makes it exact.
        # Where each run of OFFERED begins, in the order in which they came back. An order has no use for that.
        self._turns: OrderedDict[int, None] = OrderedDict()

    @property
    def outstanding(self) -> int:
        """Messages that consumers hold."""
        return self.handles.messages[HELD]

    @property
    def offered(self) -> int:
        """Messages that came back, and are pulled before new ones."""
        return self.others.messages[Stage.OFFERED]

    @property
    def given_back(self) -> int:
        """Runs of pull sequences that were given back."""
        return sum([self.handles.runs[became] for became in GIVEN_BACK])

    @property
    def oldest(self) -> int:
        """The lowest consume sequence that is not settled, or not pulled yet."""
        first = next(iter(self.others), None)
        leaving = [decision.oldest for decision in self.leaving.values()]
        return min([self.next, self.handles.oldest, *leaving, *([] if first is None else [first.first])])

    def held(self) -> Iterator[StateRun]:
        """What consumers hold, by pull sequence."""
        return self.handles.of(HELD)

    def offers(self, end: int) -> Iterator[Offer]:
        """What may be pulled of the messages before ``end``, in order: first those that came back, then new ones."""
        if self.order is not None:
            yield from self.order.offers()
            return
        yield from self.came_back()
        if self.next < end:
            yield Offer(self.next, end - self.next, 1)

    def came_back(self) -> Iterator[Offer]:
        """The messages that are OFFERED, in order."""
        if not self._turns:
            yield from [Offer(run.first, run.messages, run.attempt) for run in self.others.of(Stage.OFFERED)]
            return
        for first in self._turns:
            run = self.others.at(first)
            assert run is not None, "each turn begins a run"
            yield Offer(first, run.messages, run.attempt)

    def copy(self) -> GroupWindow:
        """The same as it is now, without an order, for a checkpoint."""
        made = GroupWindow(self.next, self.known_from)
        made.handles, made.others = self.handles.copy(), self.others.copy()
        made.leaving = self.leaving.copy()
        made._turns = self._turns.copy()
        return made

    def apply(self, entry: PullEntry, now_ms: int | None) -> int:
        """Change as an entry of the pull log says; return how many messages that concerned. Times are monotonic; None
        in a replay, which begins no lease and no pause.
        """
        op = entry.op
        if op is _PULL:
            self._pulled(entry, now_ms)
            return entry.covered
        runs = self.handles.take(entry.pull_first, entry.pull_first + entry.covered, (HELD,), entry.incarnation)
        if op is _ACK and self.order is None:
            return runs[0].messages if len(runs) == 1 else sum([run.messages for run in runs])
        word = _WORDS[op]
        for run in runs:
            # A start offers at once what was to wait.
            pause_ms = (
                (entry.lease_ms or pause_after(run.attempt)) if word is GroupWord.NACK and now_ms is not None else 0
            )
            if pause_ms and now_ms is not None:
                self._move(run, GroupWord.PUT_OFF, now_ms + pause_ms)
            else:
                self._move(run, word)
        return sum([run.messages for run in runs])

    def leave(self, decision: GroupDecision) -> None:
        """Let messages go that live on at their delay server."""
        for row in decision.rows:
            word = GroupWord.REJECT if row.reason else GroupWord.RETRY
            for run in self.handles.take(row.pull_first, row.pull_first + row.covered, (HELD,), row.incarnation):
                self._move(run, word)
        self.leaving[decision.key] = decision

    def extend(self, first: int, end: int, incarnation: int, until_ms: int) -> None:
        """Let the lease of pulls end then, and neither before nor later. A start gives them the first one again."""
        joined: list[StateRun] = []
        for run in self.handles.take(first, end, (HELD,), incarnation):
            run = run._replace(until_ms=until_ms)
            # What was extended piece by piece becomes one run again: memory follows what was pulled.
            whole = joined[-1]._replace(messages=run.end - joined[-1].first) if joined else run
            # A gap between two runs is what was acknowledged meanwhile, and that nobody may hold again.
            if joined and joined[-1].end == run.first and whole.cut(run.first, run.end) == run:
                joined[-1] = whole
            else:
                joined.append(run)
        for run in joined:
            self._hold(run)

    def lease_all(self, now_ms: int) -> None:
        """Give each pull that survived a start its whole lease again."""
        for run in list(self.held()):
            self.extend(run.first, run.end, run.incarnation, now_ms + run.lease_ms)

    def stood_still(self, ms: int) -> None:
        """Nobody could be heard for so long, so each lease ends so much later."""
        if self.handles.runs[HELD]:
            self.handles.shift(ms)

    def next_end_ms(self) -> int:
        """When the first lease or pause ends; NEVER_MS when there is none."""
        self.ends_ms = NEVER_MS
        if self.handles.runs[HELD]:
            self.ends_ms = self.handles.until_ms
        if self.others.runs[Stage.PAUSED]:
            self.ends_ms = min(self.ends_ms, self.others.until_ms)
        return self.ends_ms

    def move(self, to: int) -> None:
        """Go on at ``to``. What is held counts as if its lease had ended, and comes again only from ``to`` on; what is
        LEAVING is not concerned.
        """
        for run in self.handles.take(0, _NO_MESSAGE, (HELD,)):
            self._keep(run, Became.LAPSED)
        self.others, self._turns = Runs(), OrderedDict()
        self.next = to
        self.forget_order()

    def set_back(self, to: int, void: Sequence[tuple[int, int]]) -> None:
        """Go on at ``to``, because a power cut took the messages from there on. The pull sequences ``void`` gave out
        some of them: they count as if their leases had ended, whatever was said of them.
        """
        for first, end in void:
            self.handles.take(first, end, (HELD, *GIVEN_BACK))
            self._keep(StateRun(first, end - first, HELD), Became.LAPSED)
        self._take(to, _NO_MESSAGE, (Stage.OFFERED, Stage.PAUSED, Stage.UNREADABLE))
        for key, decision in list(self.leaving.items()):
            rows = tuple([row for row in decision.rows if row.consume_first < to])
            if rows:
                self.leaving[key] = decision._replace(rows=rows)
            else:
                del self.leaving[key]
        self.next = min(self.next, to)
        self.forget_order()

    def tell(self, word: GroupWord, first: int, end: int) -> list[StateRun]:
        """Say something of messages that nobody holds; return those that it moved, but for new ones."""
        if first < self.next < end:
            raise ValueError("one word concerns new messages, or others, and not both")
        if (Stage.NEW, word) in MOVES and first >= self.next:
            self._pass_by(first)
            self.next = end
            runs = [StateRun(first, end - first, Stage.NEW, 1)]
        else:
            runs = self._take(first, end, _FROM[word])
        for run in runs:
            self._put(run.first, run.messages, MOVES[Stage(run.state), word], run.attempt)
        return runs

    def forget_given_back(self, most: int) -> None:
        """Remember only the newest ``most`` runs of what was given back; older handles are stale from now on."""
        surplus = self.given_back - most
        if surplus <= 0:
            return
        for run in self.handles:
            surplus -= run.state != HELD
            if not surplus:
                self.known_from = max(self.known_from, run.end)
                self.handles.take(0, run.end, GIVEN_BACK)
                return

    def remember(self, first: int, end: int, became: Became) -> None:
        """Note what became of pulls that nobody holds, as a checkpoint says it."""
        self.handles.take(first, end, GIVEN_BACK)
        self._keep(StateRun(first, end - first, HELD), became)

    def offer(self, offer: Offer) -> None:
        """Offer messages again, as a checkpoint says it."""
        self._put(offer.consume_first, offer.messages, Stage.OFFERED, offer.attempt)

    def hold(self, run: StateRun) -> None:
        """Let a consumer hold what a checkpoint says."""
        self._hold(run)

    def begin_order(self) -> None:
        """Let the order learn what is not settled; the keys of that are loaded next."""
        assert self.order is not None, "it is asked of ordered groups"
        out = [range(run.consume_first, run.consume_first + run.messages) for run in self.held()]
        waiting = [Offer(run.first, run.messages, run.attempt) for run in self.others if run.state != Stage.UNREADABLE]
        out += [range(run.first, run.end) for run in self.others.of(Stage.PAUSED)]
        self.order.begin(self.next, out, waiting)

    def forget_order(self) -> None:
        """Have the keys loaded again, because the group changed in a rare way."""
        if self.order is not None:
            self.order.forget()

    def _pulled(self, entry: PullEntry, now_ms: int | None) -> None:
        first, end = entry.consume_first, entry.consume_first + entry.covered
        # An earlier life passed over the messages in between because it could not read them (rule L5); its next start
        # offers them again. Or they wait for others before them (rule Q8).
        if first > self.next:
            self._pass_by(first)
        elif first < self.next:
            self._take(first, min(end, self.next), _FROM[GroupWord.PULLED])
        # Both conditions may hold: a replay may begin with a lower ``next`` than the group had when the entry was
        # written (rule Q5).
        self.next = max(self.next, end)
        until_ms = NEVER_MS if now_ms is None else now_ms + entry.lease_ms
        at = (first, entry.incarnation, entry.lease_ms, until_ms)
        self._hold(StateRun(entry.pull_first, entry.covered, HELD, entry.attempt, *at))
        if self.order is not None:
            self.order.moved(first, end, Stage.HELD, entry.attempt)

    def _hold(self, run: StateRun) -> None:
        self.handles.add(run)
        self.ends_ms = min(self.ends_ms, run.until_ms)

    def _move(self, run: StateRun, word: GroupWord, until_ms: int = NEVER_MS) -> None:
        """Move messages whose pull was taken out of ``handles``."""
        state = MOVES[Stage.HELD, word]
        if word is not GroupWord.ACK:
            self._keep(run, BECAME[word])
        # Messages that were given to no handler had no attempt (rule Q4).
        attempt = run.attempt if word is GroupWord.RETURNED else min(run.attempt + 1, ATTEMPT_MAX)
        self._put(run.consume_first, run.messages, state, attempt, until_ms)

    def _keep(self, run: StateRun, became: Became) -> None:
        self.handles.join(StateRun(run.first, run.messages, became))
        if self.given_back > GIVEN_BACK_RUNS_MAX:
            self.forget_given_back(GIVEN_BACK_RUNS_MAX)

    def _put(self, first: int, count: int, state: Stage, attempt: int, until_ms: int = NEVER_MS) -> None:
        """Let messages be in a state, which they were taken out of another one for."""
        if state is Stage.OFFERED:
            self._offer_last(first, count, attempt)
        elif state in (Stage.PAUSED, Stage.UNREADABLE):
            self.others.add(StateRun(first, count, state, attempt, until_ms=until_ms))
            self.ends_ms = min(self.ends_ms, until_ms)
        if self.order is not None:
            self.order.moved(first, first + count, state, attempt)

    def _offer_last(self, first: int, count: int, attempt: int) -> None:
        """Offer messages behind all others; they join the last run if they continue it."""
        if self.order is None:
            last = self.others.at(first - 1) if self._turns else None
            if last is not None and last.first == next(reversed(self._turns)) and last.attempt == attempt:
                self.others.take(last.first, first, (Stage.OFFERED,))
                first, count = last.first, last.messages + count
            self._turns[first] = None
        self.others.add(StateRun(first, count, Stage.OFFERED, attempt))

    def _take(self, first: int, end: int, states: tuple[int, ...]) -> list[StateRun]:
        """Take messages out of ``others``; the rest of a run keeps its turn."""
        turns = self._turns
        owner = self.others.at(end - 1) if turns else None
        runs = self.others.take(first, end, states)
        if owner is not None and runs:
            rest = self.others.at(end)
            if rest is not None and rest.state == Stage.OFFERED and rest.first == end and end not in turns:
                if next(iter(turns)) == owner.first:
                    # As with a pull, which takes the first turn: nothing is copied.
                    turns[end] = None
                    turns.move_to_end(end, last=False)
                    turns.move_to_end(owner.first, last=False)
                else:
                    behind = ((key, end) if key == owner.first else (key,) for key in turns)
                    turns = self._turns = OrderedDict.fromkeys(chain.from_iterable(behind))
        if turns:
            for run in runs:
                turns.pop(run.first, None)
        return runs

    def _pass_by(self, to: int) -> None:
        """Go on at ``to``; the messages before it are offered again."""
        if to > self.next:
            first, self.next = self.next, to
            self._put(first, to - first, MOVES[Stage.NEW, GroupWord.PASSED_BY], 1)


def pause_after(attempt: int) -> int:
    """How long a message that a handler gave back waits, in ms; 0 the first time."""
    return 0 if attempt < 2 else min(PAUSE_MS << min(attempt - 2, 16), PAUSE_MS_MAX)
