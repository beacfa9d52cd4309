"""The realtime server dies at each disk operation while consumers have messages that it has not fsynced (rule L2).

Promises: what was told as done stays done, and what was not comes once more at most after each power cut; a handle
tells the truth in the next lives; the batches that the delay server was answered for are there. All this holds though
the delay server sends what a power cut took in another order, and though the power fails again.
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest

from delayd.errors import DataError
from delayd.testing.clock import SimClock
from delayd.testing.disk import Crash, Faults, MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_rows
from delayd.wire.requests import RequestType
from tests.crash.harness import Way
from tests.crash.realtime_deaths import Life, check_each_next, rebooted
from tests.unit.realtime.planted_offers import PLANTED
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, Pulled, SimPeer, World, pull_head

PARTS = 2  # The operations are dealt out to this many tests, which may run beside each other.
LEASE_MS = 30_000
SETTINGS = {"segment_bytes": 4096, "tail_bytes": 0, "lease_ms": LEASE_MS, "free_bytes_all": 0}
ORDERED, LATE = "ordered", "late"


@dataclass
class Told:
    """What was sent, what the delay server and the consumers were told, and the handles that were not answered."""

    sent: dict[int, list[bytes]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    w: int = 0  # The delay server has durable outcomes of the batches up to this one.
    done: dict[str, set[bytes]] = field(default_factory=dict)
    asked: list[tuple[str, list[list[int]], list[bytes]]] = field(default_factory=list)


def keyed(batch_id: int, bodies: list[bytes], w: int = 0) -> bytes:
    """A batch whose messages have one ordering key."""
    return dispatch_batch(batch_id, bodies, w=(1, w) if w else (0, 0), ordering=[7] * len(bodies))


class Stepped:
    """A server whose commits and fsyncs are made one by one."""

    def __init__(self, disk: MemoryDisk, state: MemoryState, clock: SimClock, told: Told) -> None:
        self.commits, self.fsyncs = StepExecutor(), StepExecutor()
        self.world = World(disk, state, clock, commit=self.commits, pulls=self.fsyncs, settings=SETTINGS)
        self.peer, self.told = SimPeer(), told
        self._waiting: list[tuple[int, int]] = []  # Request and batch of each frame without an answer.

    def greet(self, session: int) -> list[list[int]]:
        """Say hello, and be answered."""
        asked = self.world.hello_later(self.peer, session)
        self.commits.run_all()
        return self.world.window(self.peer, asked)

    def send(self, batch_id: int, bodies: list[bytes]) -> None:
        """Hand a batch over; it waits for the group under way."""
        told = self.told
        told.sent[batch_id], told.w = bodies, max(told.taken, default=0)
        head: Head = {"session": 1, "epoch": 1}
        asked = self.world.send(self.peer, RequestType.DISPATCH, head, keyed(batch_id, bodies, told.w))
        self._waiting.append((asked, batch_id))

    def write(self) -> None:
        """Write the group under way, and do not fsync it."""
        self.commits.step()
        self._hear()

    def sync(self) -> None:
        """Fsync the group under way, and no other."""
        self.commits.step()
        self._hear()

    def _hear(self) -> None:
        self.told.taken.update(batch_id for asked, batch_id in self._waiting if asked in self.peer.answers)

    def pull(self, group: str, most: int, **head: HeadValue) -> Pulled | None:
        """Pull what is offered now; None when the answer waits."""
        asked = self.world.send(self.peer, RequestType.PULL, pull_head(group, SUBJECT, most) | head)
        return self.pulled(asked)

    def pulled(self, asked: int) -> Pulled | None:
        """What a PULL was answered."""
        if asked not in self.peer.answers:
            return None
        ((answer, body),) = self.peer.answers[asked]
        incarnation = answer["incarnation"]
        assert isinstance(incarnation, int)
        return Pulled(incarnation, need_rows(answer, "parts", 4), bodies_of(body), body)

    def acknowledge(self, group: str, pulled: Pulled) -> None:
        """Acknowledge, and fsync the pull log; nothing is told before the message log is durable, too."""
        self.told.asked.append((group, pulled.handles, pulled.bodies))
        head: Head = {"subject": SUBJECT, "group": group, "handles": pulled.handles}
        asked = self.world.send(self.peer, RequestType.ACK, head)
        self.fsyncs.run_all()
        assert asked not in self.peer.answers, "an answer waits for the message log"
        self.sync()
        assert asked in self.peer.answers
        self.told.done.setdefault(group, set()).update(pulled.bodies)


def workload(disk: MemoryDisk, state: MemoryState, clock: SimClock, told: Told) -> None:
    """Batches of which each is pulled, acknowledged, counted by a checkpoint or moved to before its fsync."""
    server = Stepped(disk, state, clock, told)
    server.greet(1)
    server.pull(ORDERED, 1, ordered=True)
    server.pull(GROUP, 1)
    server.fsyncs.run_all()
    server.send(1, [b"1a", b"1b"])
    server.write()
    first = server.pull(GROUP, 10)
    assert first is not None and first.bodies == [b"1a", b"1b"], "what is written is offered"
    server.world.core.checkpoint()
    server.acknowledge(GROUP, Pulled(first.incarnation, [[*first.parts[0][:2], 1, 1]], first.bodies[:1], first.raw))
    server.send(2, [b"2"])
    server.write()
    # These come while the second batch is under way, so they are one group.
    server.send(3, [b"3a", b"3b"])
    server.send(4, [b"4"])
    server.pull(GROUP, 10)
    server.world.core.checkpoint()
    server.fsyncs.run_all()
    server.sync()
    server.write()
    # A group that begins behind what is written, and one that waits for the fsync.
    server.pull(LATE, 1, start="latest")
    assert server.pull(ORDERED, 10) is None
    third = server.pull(GROUP, 2)
    assert third is not None and third.bodies == [b"3a", b"3b"]
    server.acknowledge(GROUP, third)
    server.send(5, [b"5"])
    server.write()
    server.world.core.checkpoint()
    fourth = server.pull(GROUP, 10)
    assert fourth is not None
    handle = fourth.handles[0]
    retry: Head = {"subject": SUBJECT, "group": GROUP, "retries": [[*handle, 60_000, ""]]}
    server.world.send(server.peer, RequestType.RETRY, retry)
    server.fsyncs.run_all()
    server.sync()
    server.fsyncs.run_all()
    server.world.core.checkpoint()
    server.fsyncs.run_all()


def life_to(crash_at: int | None) -> Life[Told]:
    disk, told = MemoryDisk(Faults(crash_at=crash_at)), Told()
    state, clock = MemoryState(disk), SimClock()
    try:
        workload(disk, state, clock, told)
    except Crash:
        pass
    return Life(disk, state, clock, told)


def check(world: World, told: Told) -> None:
    """Hold a restarted server to what its former lives told, and again after a power cut."""
    for session in (5, 6):
        assert all(group.next <= group.subject.end for group in world.core._pulls.groups.values())
        peer = SimPeer()
        window = {row[1] for row in world.hello(peer, session)}
        missing = {batch_id for batch_id in told.sent if batch_id > told.w} - window
        assert not told.taken & missing, "the delay server was told that a batch is kept, and it is not"
        # The delay server sends the rest again, in another order, under new numbers.
        for batch_id in sorted(missing, reverse=True):
            bodies, again = told.sent.pop(batch_id), batch_id + 100 * session
            told.sent[again] = bodies
            world.dispatch(peer, session, keyed(again, bodies))
            told.taken.add(again)
        if session == 6:
            _ask_again(world, peer, told)
        for group, done in told.done.items():
            assert not done & _of_group(world).get(group, set()), f"{group} gets again what it was told is done"
        disk = Way(PowerLoss.ALL_LOST).die(world.disk)
        world = World(disk, world.state.after_crash(disk), rebooted(world.clock), settings=SETTINGS)
    _drain(world, told)


def _ask_again(world: World, peer: SimPeer, told: Told) -> None:
    """Repeat acknowledgements: one that is called done must be."""
    for group, handles, bodies in told.asked:
        stale = world.ack(peer, handles, group)
        comes_again = set(bodies) & _of_group(world).get(group, set())
        assert stale or not comes_again, f"{comes_again} come again, and {group} was told that they are done"
        if not stale:
            told.done.setdefault(group, set()).update(bodies)


def _of_group(world: World) -> dict[str, set[bytes]]:
    """What each group is going to get, or holds."""
    found: dict[str, set[bytes]] = {}
    for (subject, name), group in world.core._pulls.groups.items():
        if subject != SUBJECT:
            continue
        sequences = set(range(group.next, group.subject.end))
        for held in group.window.held():
            sequences |= set(range(held.consume_first, held.consume_first + held.messages))
        for other in group.window.others:
            sequences |= set(range(other.first, other.end))
        assert not [each for each in sequences if each >= group.subject.end], "a group is behind the message log"
        for sequence in sequences:
            run = world.core._index.locate(group.subject, sequence)
            found.setdefault(name, set()).add(bodies_of(bytes(world.core._stored.fetch(run.offset).buffer))[run.row])
    return found


def _drain(world: World, told: Told) -> None:
    """Everything comes that nobody was told is done."""
    peer = SimPeer()
    world.hello(peer, 9)
    world.pass_time(LEASE_MS)
    for group in (GROUP, ORDERED, "auditor"):
        came: Counter[bytes] = Counter()
        while (pulled := world.pull(peer, group)).bodies:
            came.update(pulled.bodies)
            assert world.ack(peer, pulled.handles, group) == []
        assert all(count == 1 for count in came.values()), f"{group} got {came}"
        done = told.done.get(group, set())
        assert not done & set(came)
        sent = {body for bodies in told.sent.values() for body in bodies}
        retried = {b"4", b"5"} if group == GROUP else set()
        assert sent - done - retried <= set(came), f"{group} never gets {sent - done - set(came)}"


def operations() -> int:
    disk, _, _, told = life_to(None)
    assert told.taken == {1, 2, 3, 4, 5}
    assert told.done == {GROUP: {b"1a", b"3a", b"3b"}}
    return len(disk.operations)


OPERATIONS = operations()


@pytest.mark.parametrize("name", PLANTED)
def test_a_rule_that_is_taken_out_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in PLANTED[name]:
        monkeypatch.setattr(*bug)
    with pytest.raises((AssertionError, DataError)):
        for crash_at in range(1, OPERATIONS + 1):
            check_each_next(life_to(crash_at), SETTINGS, check)


@pytest.mark.parametrize("part", range(PARTS))
def test_rule_L2_nothing_is_lost_or_told_wrongly_whichever_disk_operation_it_dies_at(part: int) -> None:
    for crash_at in range(1 + part, OPERATIONS + 1, PARTS):
        check_each_next(life_to(crash_at), SETTINGS, check)
