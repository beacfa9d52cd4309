"""A simulated consumer of one subject and group, and the group's books: what it was given, what it acknowledged.

Invariant: a message whose acknowledgement was answered as counted is never in a later pull of its group (rule Q1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import NamedTuple

from delayd.batch.batch import parse
from delayd.batch.columns import ColumnId
from delayd.errors import DelaydError, ServerUnavailable
from delayd.wire.frame import MORE, Frame, Head
from delayd.wire.heads import (
    need_int,
    need_rows,
    need_u64,
)
from delayd.wire.requests import RequestType
from tests.batches import bodies_of
from tests.simulation.network import Line, Network
from tests.simulation.realtime_side import RealtimeSide
from tests.worlds.realtime_adapter import life_of

Name = tuple[int, int, int]
"""A message as a handle names it: the life of the server, the pull sequence, and the whole incarnation."""


@dataclass(slots=True, eq=False)
class GroupBooks:
    """What the consumers of one group know together; ``log_id`` is the realtime server's."""

    log_id: int
    subject: bytes
    group: str
    given: dict[int, bytes] = field(default_factory=dict)  # By consume sequence.
    bodies: set[bytes] = field(default_factory=set)  # The bodies of all that was given.
    rows: set[int] = field(default_factory=set)  # The delay server's numbers of all that was given.
    older: set[bytes] | None = None  # What was there when the group was answered first; None: there is no group yet.
    tried: set[int] = field(default_factory=set)  # Consume sequences for which an acknowledgement was sent.
    acknowledged: dict[int, Name] = field(default_factory=dict)  # The pull whose acknowledgement counted.
    lost: dict[int, int] = field(default_factory=dict)  # From where on power cuts took messages, by the life after it.

    def owed(self, bodies: Iterable[bytes], *, removed: bool) -> set[bytes]:
        """Which of these must yet be given: retention may have decided on some before there was a group."""
        owed = set(bodies) - self.bodies
        if removed:
            return set() if self.older is None else owed - self.older
        return owed

    def lose(self, end: int, life: int) -> None:
        """A power cut before a life took what was given from this consume sequence on: nobody heard that it was
        acknowledged.
        """
        self.lost[life] = end
        told = {sequence for sequence in self.acknowledged if sequence >= end}
        assert not told, f"acknowledged, and a power cut took it: consume sequences {sorted(told)[:5]}"
        lost = [sequence for sequence in self.given if sequence >= end]
        self.bodies -= {self.given.pop(sequence) for sequence in lost}
        self.tried.difference_update(lost)

    def is_lost(self, sequence: int, name: Name) -> bool:
        """Whether a power cut took a message after it had left for its consumer."""
        return any(name[0] < life and sequence >= end for life, end in self.lost.items())

    def give(self, sequence: int, body: bytes, name: Name) -> None:
        """A message has come; an answer from before a power cut may come after it, with what the cut has taken."""
        if self.is_lost(sequence, name):
            return
        self.bodies.add(body)
        known = self.given.setdefault(sequence, body)
        assert known == body, f"consume sequence {sequence} was {known!r}, then {body!r}"
        counted = self.acknowledged.get(sequence)
        assert counted is None or name <= counted, (
            f"{body!r} (consume sequence {sequence}) came again as {name}, acknowledged as {counted}"
        )


class Held(NamedTuple):
    """A message that a consumer has and has not given away."""

    name: Name
    consume_sequence: int
    attempt: int


class Consumer:
    """One consumer; each of its steps is a call."""

    def __init__(self, name: str, side: RealtimeSide, books: GroupBooks, network: Network, random: Random) -> None:
        self.name = name
        self.held: list[Held] = []
        self.pulling = False
        self.returned: set[Held] = set()  # What it gave back uncounted, and the server has said so.
        self.wanted = 0  # What others want of it, as the last answer to a pull said.
        self.ended = True  # Whether the last PULL_END was answered.
        self._unanswered: set[int] = set()  # Pulls of this connection; another one has a set of its own.
        self._last_pull = 0
        self._side = side
        self._names: Head = {"subject": books.subject.decode(), "group": books.group}
        self.books = books
        self._network = network
        self._random = random
        self._line: Line | None = None
        self._dialling = False

    def step(self) -> None:
        """Connect, pull, acknowledge or give back, as chance has it."""
        if self._connect() is None:
            return
        kind = self._random.random()
        if self.pulling and kind < 0.1:
            self.end_pull()
        elif not self.held or kind < 0.35:
            ahead = self._random.choice((0, len(self.held)))
            self.pull(self._random.choice((1, 3, 100)), self._random.choice((0, 400)), ahead)
        else:
            some = self._random.sample(self.held, self._random.randint(1, len(self.held)))
            if kind < 0.8:
                self.settle(RequestType.ACK, some)
            else:
                self.settle(RequestType.NACK, some, uncounted=kind < 0.9)

    def drain(self) -> None:
        """Acknowledge what is held and ask for more."""
        if self._connect() is None:
            return
        if self.held:
            self.settle(RequestType.ACK, list(self.held))
        if not self.pulling:
            self.pull(1_000, 0)

    def die(self) -> None:
        """Die with all that it holds, and with answers under way; another one begins in its place."""
        self._network.process_died(self)
        self.held.clear()
        self._dialling = False
        self._forget_line()

    def pull_if_connected(self) -> None:
        """Ask for what there is, or connect."""
        if self._connect() is not None and not self.pulling:
            self.pull(100, 0)

    def pull(self, most: int, wait_ms: int, ahead: int = 0) -> None:
        """Ask for messages; ``ahead`` of those that it has were given to no handler yet."""
        head: Head = {
            "ahead": ahead,
            "max_messages": most,
            "max_bytes": 1 << 20,
            "wait_ms": wait_ms,
            "lease_ms": self._random.choice((300, 2_000)),
            "consumer": self.name,
            "stands": True,
        }
        self.pulling = True
        self._last_pull += 1
        self._unanswered.add(self._last_pull)
        self._call(RequestType.PULL, self._names | head, self._pulled, self._last_pull)

    def settle(self, kind: RequestType, some: list[Held], *, uncounted: bool = False) -> None:
        """Acknowledge or give back messages; ``uncounted``: no handler was given them."""
        self.held = [each for each in self.held if each not in some]
        handles = [[each.name[2], each.name[1], 1] for each in sorted(some)]
        head: Head = {"handles": handles}
        if kind == RequestType.ACK:
            here = [each for each in some if not self.books.is_lost(each.consume_sequence, each.name)]
            self.books.tried.update(each.consume_sequence for each in here)
        elif uncounted:
            head["uncounted"] = True
        self._call(kind, self._names | head, partial(self._settled, kind, some, uncounted))

    def end_pull(self) -> None:
        """Wait no more: whatever pull of this connection waits is answered first (rule Q4)."""
        unanswered, self.ended = self._unanswered, False
        before = frozenset(unanswered)

        def ended(answer: Frame) -> None:
            self.ended = True
            assert not before & unanswered, f"a pull of {self.name} waits behind the answer to its PULL_END"

        self._call(RequestType.PULL_END, self._names, ended)

    def close(self) -> None:
        """Close the connection, as a program does that ends."""
        if self._line is not None:
            self._line.end()

    def is_connected(self) -> bool:
        """Whether it has a connection; without one it begins to have one."""
        return self._connect() is not None

    def _connect(self) -> Line | None:
        if self._line is not None and self._line.open:
            return self._line
        if not self._dialling:
            self._dialling = True
            self._network.dial(self._side.place, self._connected, self._lost, self)
        return None

    def _connected(self, line: Line) -> None:
        self._dialling = False
        if line.listener is self._side.life:
            # The end of the connection before may be heard of only later.
            self._forget_line()
            self._line = line
        else:
            # Another server listens there now, and handles of one mean nothing to the other.
            line.close()

    def _lost(self, error: DelaydError) -> None:
        if isinstance(error, ServerUnavailable):
            self._dialling = False
        elif self._line is not None and not self._line.open:
            self._forget_line()

    def _forget_line(self) -> None:
        self._line, self.pulling, self.wanted = None, False, 0
        self._unanswered = set()

    def _call(self, kind: RequestType, head: Head, heard: Callable[[Frame], None], pull: int | None = None) -> None:
        line, unanswered = self._line, self._unanswered
        assert line is not None

        def answered(answer: Frame | DelaydError) -> None:
            if pull is not None and not (isinstance(answer, Frame) and answer.flags & MORE):
                unanswered.discard(pull)
                if line is self._line:
                    self.pulling = False
            if isinstance(answer, Frame):
                heard(answer)

        line.call(kind, head, (), answered)

    def _pulled(self, answer: Frame) -> None:
        if self.books.older is None:
            subject = self.books.subject
            self.books.older = {body for kept in self._side.log() if kept.subject == subject for body in kept.bodies}
        incarnation = need_u64(answer.head, "incarnation")
        self.wanted = need_int(answer.head, "wanted")
        position = 0
        for pull_first, consume_first, rows, attempt in need_rows(answer.head, "parts", 4):
            batch = parse(answer.body, position)
            batch.verify()
            position += batch.total_bytes
            self.books.rows.update(batch.uint64s(ColumnId.SEQUENCE).tolist())
            bodies = bodies_of(batch)
            assert len(bodies) == rows, f"a part of {rows} messages has {len(bodies)}"
            for index, body in enumerate(bodies):
                name = (life_of(incarnation), pull_first + index, incarnation)
                held = Held(name, consume_first + index, attempt)
                self.books.give(held.consume_sequence, body, held.name)
                self.held.append(held)

    def _settled(self, kind: RequestType, some: list[Held], uncounted: bool, answer: Frame) -> None:
        stale = {
            (life_of(incarnation), first + index, incarnation)
            for incarnation, first, count in need_rows(answer.head, "stale", 3)
            for index in range(count)
        }
        if kind == RequestType.ACK:
            for each in some:
                if each.name not in stale:
                    self.books.acknowledged[each.consume_sequence] = each.name
        elif uncounted:
            self.returned.update(each for each in some if each.name not in stale)
