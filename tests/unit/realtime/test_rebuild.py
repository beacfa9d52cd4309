"""Consume logs that are not what they were: found, named, and rebuilt from the message log while all else is served."""

import pytest

from delayd.log.consume import ENTRY_BYTES
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.testing.disk import MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.wire.requests import RequestType
from realtime import rebuild as rebuild_module
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import SimPeer, World, pull_head

FOLDER = "/data/realtime/consume"
SETTINGS = {"tail_bytes": 0, "segment_bytes": 4096, "retention_ms": 1_000}
SUBJECTS = ("orders", "mail")
PATH = f"{FOLDER}/00000000/{0:020}.log"


def filled(rows: int = 40, work: StepExecutor | None = None) -> tuple[World, dict[str, list[bytes]]]:
    """Two subjects in turn, batches of one to three rows, all of it below a checkpoint and out of memory."""
    world, peer = World(settings=SETTINGS, work=work), SimPeer()
    world.hello(peer, 1)
    sent: dict[str, list[bytes]] = {subject: [] for subject in SUBJECTS}
    for number in range(1, rows + 1):
        subject = SUBJECTS[number % 2]
        bodies = [f"{number}-{row}".encode().ljust(120, b".") for row in range(1 + number % 3)]
        world.dispatch(peer, 1, dispatch_batch(number, bodies, subject=subject, w=(1, number - 1)))
        sent[subject] += bodies
    world.core.checkpoint()
    if work is not None:
        work.run_all()
    return world, sent


def pull_all(world: World, subject: str, group: str = "billing") -> list[bytes]:
    peer, found = SimPeer(), list[bytes]()
    while (pulled := world.pull(peer, group, subject=subject, most=7)).bodies:
        found += pulled.bodies
        assert world.ack(peer, pulled.handles, group, subject=subject) == []
    return found


def write(disk: MemoryDisk, path: str, position: int, data: bytes) -> None:
    file = disk.open(path, write=True)
    file.pwritev([data], position)
    file.sync()
    file.close()


def flip(disk: MemoryDisk, path: str, position: int, mask: int = 1) -> None:
    file = disk.open(path)
    (before,) = file.pread(1, position)
    file.close()
    write(disk, path, position, bytes([before ^ mask]))


def test_rule_L9_a_log_that_has_lost_its_oldest_messages_to_retention_is_rebuilt_from_the_first_kept() -> None:
    world, sent = filled(120)
    for name in SUBJECTS:
        pull_all(world, name)
    world.pass_time(60_000)
    world.core.retain()
    subject = world.recovered.index.by_name["mail"]
    first = world.recovered.index.first(subject)
    assert 0 < first < subject.end
    for again in (False, True):
        world.pass_time(rebuild_module.QUIET_MS)
        if again:
            flip(world.disk, PATH, FILE_HEADER_BYTES + first * ENTRY_BYTES)
        else:
            world.disk.remove(PATH)
        subject._page = None
        subject.kept_from = (0, 0)
        assert pull_all(world, "mail", f"late-{again}") == sent["mail"][first:]
        assert subject.tail.first == first
    assert pull_all(world.restarted(), "mail", "later") == sent["mail"][first:]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_rule_L9_a_group_that_is_made_again_without_its_consume_log_begins_at_the_first_kept(checkpoint: bool) -> None:
    world, sent = filled(120)
    for name in SUBJECTS:
        pull_all(world, name)
    world.pass_time(60_000)
    world.core.retain()
    first = world.recovered.index.first(world.recovered.index.by_name["mail"])
    pulled = world.pull(SimPeer(), "late", subject="mail", most=3)
    assert world.ack(SimPeer(), pulled.handles, "late", subject="mail") == []
    disk, state = world.disk.after_crash(), world.state.after_crash()
    disk.remove(f"{FOLDER}/00000000/{0:020}.log")
    work = StepExecutor()
    world = World(disk, state, settings=SETTINGS, work=work)
    if checkpoint:
        # The checkpoint comes before the rebuild has ended, and so does the next life.
        world.core.checkpoint()
        work.run_all()
        world = World(disk.after_crash(), state.after_crash(), settings=SETTINGS)
    else:
        work.run_all()
        world.core.wake()
    world.pass_time(60_000)
    assert first > 0 and pulled.bodies + pull_all(world, "mail", "late") == sent["mail"][first:]
    assert not world.failures


@pytest.mark.parametrize("found_while", ["it waits for the pull log", "it waits for its thread", "it is written"])
def test_rule_L9_a_rebuild_beside_a_checkpoint_loses_nothing_of_what_the_checkpoint_wrote(found_while: str) -> None:
    work, pulls = StepExecutor(), StepExecutor()
    world, peer = World(settings=SETTINGS, work=work, pulls=pulls), SimPeer()
    world.hello(peer, 1)
    bodies = [f"{number}".encode().ljust(120, b".") for number in range(1, 61)]
    for number, body in enumerate(bodies, 1):
        world.dispatch(peer, 1, dispatch_batch(number, [body], w=(1, number - 1)))
        if number == 20:
            first = world.send(peer, RequestType.PULL, pull_head(most=1))
            world.core.checkpoint()
            pulls.run_all()
            work.run_all()
            assert bodies_of(peer.answers[first][0][1]) == bodies[:1]
    pulled = world.pull(peer, most=4)
    assert pulled.bodies == bodies[1:5]
    subject = world.recovered.index.by_name["orders"]
    world.core.checkpoint()
    if found_while != "it waits for the pull log":
        pulls.run_all()
    if found_while == "it is written":
        work.run_one()
    flip(world.disk, PATH, FILE_HEADER_BYTES + 8 * ENTRY_BYTES)
    subject._page = None
    waiting = SimPeer()
    world.send(waiting, RequestType.PULL, pull_head(wait_ms=5_000, most=100))
    assert subject.damage is not None and not waiting.answers
    while work.step():
        pass
    pulls.run_all()
    work.run_all()
    world.core.wake()
    assert bodies_of(waiting.answers[1][0][1]) == bodies[5:]
    for _ in range(2):
        # Two checkpoints and another life change nothing of it.
        world.core.checkpoint()
        pulls.run_all()
        work.run_all()
    later = World(world.disk.after_crash(), world.state.after_crash(), settings=SETTINGS)
    assert pull_all(later, "orders", "other") == bodies
    assert not world.failures and not later.failures
