"""The realtime server dies at each of its disk operations, in each way, and keeps what it promised.

Promises: a dispatched batch that was answered is in the log, once, and in the window until W passes it; what was
acknowledged never comes back; what was not does; the epoch that was heard counts.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count

import pytest

from delayd.errors import StaleEpoch
from delayd.testing.disk import Crash
from delayd.testing.tree import PowerLoss
from delayd.wire.requests import RequestType
from tests.crash.harness import Way, look_of
from tests.crash.realtime_deaths import Life, check_each_next, live, rebooted
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer, World

PARTS = 2  # The operations are dealt out to this many tests, which may run beside each other.
EPOCH = 3
LEASE_MS = 30_000  # The pulls ask for this lease; what survives a restart keeps it.
# Small segments, so that logs roll; a checkpoint only where the workload asks for one.
SETTINGS = {"segment_bytes": 4096, "tail_bytes": 0, "lease_ms": LEASE_MS, "free_bytes_all": 0}
SUBJECTS = ("orders", "mail")


@dataclass
class Promises:
    """What the server has answered so far."""

    begun: dict[int, tuple[str, list[bytes]]] = field(default_factory=dict)  # Batch id to subject and bodies.
    answered: dict[int, tuple[int, int]] = field(default_factory=dict)  # Batch id to offset and appended_at_ms.
    w: int = 0  # Highest batch id that the server may have forgotten.
    acked: dict[str, set[bytes]] = field(default_factory=dict)
    maybe_acked: dict[str, set[bytes]] = field(default_factory=dict)
    heard: bool = False


def workload(world: World, promises: Promises) -> None:
    """Handoff, pulls, acknowledgements, checkpoints, retention and a second hello, in one life."""
    peer = SimPeer()
    world.hello(peer, 1, epoch=EPOCH)
    promises.heard = True
    for batch_id in range(1, 5):
        send(world, peer, promises, 1, batch_id, w=max(0, batch_id - 3))
    pull_and_ack(world, peer, promises, "orders")
    world.core.checkpoint()
    for batch_id in range(5, 9):
        send(world, peer, promises, 1, batch_id, w=batch_id - 2)
    pull_and_ack(world, peer, promises, "mail")
    nacked = world.pull(peer, subject="orders", most=1)
    world.ack(peer, nacked.handles, subject="orders", kind=RequestType.NACK)
    later = SimPeer()
    promises.w = 7
    world.hello(later, 2, epoch=EPOCH, w=(EPOCH, 7))
    for batch_id in range(9, 11):
        send(world, later, promises, 2, batch_id, w=7)
    # The messages without an acknowledgement come again, so that retention has something to remove.
    world.pass_time(LEASE_MS * 10)
    for subject in SUBJECTS:
        pull_and_ack(world, later, promises, subject)
    world.core.retain()
    send(world, later, promises, 2, 11, w=7)
    world.core.stop(lambda: None)


def send(world: World, peer: SimPeer, promises: Promises, session: int, batch_id: int, w: int) -> None:
    subject = SUBJECTS[batch_id % 2]
    # A kilobyte a batch, so that the message log rolls and retention finds something to remove.
    bodies = [f"{batch_id}-{row}".encode().ljust(500, b".") for row in range(1 + batch_id % 3)]
    promises.begun[batch_id] = (subject, bodies)
    promises.w = max(promises.w, w)
    batch = dispatch_batch(batch_id, bodies, subject=subject, epoch=EPOCH, w=(EPOCH, w) if w else (0, 0))
    appended_at_ms, ((_, offset),) = world.dispatch(peer, session, batch, epoch=EPOCH)
    promises.answered[batch_id] = (offset, appended_at_ms)


def pull_and_ack(world: World, peer: SimPeer, promises: Promises, subject: str) -> None:
    """Take all that there is, acknowledge all but the last answer."""
    answers = []
    while (pulled := world.pull(peer, subject=subject, most=2)).bodies:
        answers.append(pulled)
    for pulled in answers[:-1]:
        promises.maybe_acked.setdefault(subject, set()).update(pulled.bodies)
        assert world.ack(peer, pulled.handles, subject=subject) == []
        promises.acked.setdefault(subject, set()).update(pulled.bodies)


def check(world: World, promises: Promises) -> None:
    """Hold a restarted server to what its former life answered."""
    peer = SimPeer()
    if promises.heard:
        with pytest.raises(StaleEpoch):
            world.hello(SimPeer(), 9, epoch=EPOCH - 1)
    window = {row[1]: (row[3], row[4]) for row in world.hello(peer, 9, epoch=EPOCH)}
    for batch_id, said in promises.answered.items():
        assert batch_id <= promises.w or window[batch_id] == said, f"batch {batch_id} is not in the window"
    assert set(window) <= set(promises.begun)
    world.clock.advance(LEASE_MS)
    world.core.wake()
    for subject in SUBJECTS:
        found = pull_all(world, peer, subject, "auditor")
        assert len(found) == len(set(found)), f"{subject} has a message twice"
        sent = [body for name, bodies in promises.begun.values() if name == subject for body in bodies]
        assert set(found) <= set(sent)
        # Retention may have removed what everybody had acknowledged and W had passed.
        must = {body for batch_id in promises.answered for body in promises.begun[batch_id][1]}
        must = {body for body in must if body in sent}
        assert must - promises.maybe_acked.get(subject, set()) <= set(found)
        redelivered = set(pull_all(world, peer, subject, "billing"))
        assert not redelivered & promises.acked.get(subject, set())
        assert must - promises.maybe_acked.get(subject, set()) <= redelivered
    # It goes on.
    send(world, peer, promises, 9, 100, w=99)


def pull_all(world: World, peer: SimPeer, subject: str, group: str) -> list[bytes]:
    found: list[bytes] = []
    while bodies := world.pull(peer, group, subject, most=3).bodies:
        found.extend(bodies)
    return found


def life_to(crash_at: int | None) -> Life[Promises]:
    return live(workload, Promises(), SETTINGS | {"retention_ms": 1_000}, crash_at)


def operations() -> int:
    disk, _, _, promises = life_to(None)
    assert len(promises.answered) == 11
    assert not disk.closed_unsynced
    assert any(operation.startswith("remove /data/realtime/message/") for operation in disk.operations)
    return len(disk.operations)


OPERATIONS = operations()


@pytest.mark.parametrize("part", range(PARTS))
def test_it_keeps_its_promises_whichever_disk_operation_it_dies_at_and_however(part: int) -> None:
    for crash_at in range(1 + part, OPERATIONS + 1, PARTS):
        check_each_next(life_to(crash_at), SETTINGS, check)


@pytest.mark.parametrize("way", [Way(None), Way(PowerLoss.ALL_LOST), Way(PowerLoss.REORDERED)], ids=str)
def test_it_keeps_its_promises_when_it_dies_again_while_it_recovers(way: Way) -> None:
    for crash_at in range(1, OPERATIONS + 1, 4):
        disk, state, clock, promises = life_to(crash_at)
        seen: set[object] = set()
        for again_at in count(1):
            first = way.die(disk)
            first_state = state.after_crash(first)
            first.faults.crash_at = again_at
            try:
                World(first, first_state, rebooted(clock), settings=SETTINGS)
                break
            except Crash:
                second = Way(PowerLoss.ALL_LOST).die(first)
                second_state = first_state.after_crash(second)
            look = look_of(second), tuple(second_state.scan(b""))
            if look not in seen:
                seen.add(look)
                check(World(second, second_state, rebooted(clock), settings=SETTINGS), deepcopy(promises))
