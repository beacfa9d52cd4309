"""Checkpoints and retention (rules P2, L4, Q3) of the realtime server, against the core in memory."""

from delayd.testing.executor import StepExecutor
from delayd.wire.heads import (
    need_int,
    need_maps,
)
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer, World

FOLDER = "/data/realtime"
SMALL = {"segment_bytes": 4096, "retention_ms": 1_000, "tail_bytes": 0}


def segments(world: World) -> list[str]:
    return world.disk.list_folder(f"{FOLDER}/message")


def filled(batches: int = 20, **settings: int) -> tuple[World, SimPeer]:
    """A server with several segments, all decided by W but the last batch."""
    world, peer = World(settings={**SMALL, **settings}), SimPeer()
    world.hello(peer, 1)
    for batch_id in range(1, batches + 1):
        w = (1, batch_id - 1) if batch_id > 1 else (0, 0)
        world.dispatch(peer, 1, dispatch_batch(batch_id, [bytes(400)] * 2, w=w))
    return world, peer


def test_rule_Q3_a_group_that_comes_while_messages_are_being_removed_starts_behind_them() -> None:
    world, peer = World(settings=SMALL, work=(work := StepExecutor())), SimPeer()
    world.hello(peer, 1)
    for batch_id in range(1, 21):
        w = (1, batch_id - 1) if batch_id > 1 else (0, 0)
        world.dispatch(peer, 1, dispatch_batch(batch_id, [bytes(400)] * 2, w=w))
    work.run_all()
    world.pass_time(2_000)
    world.core.retain()
    # The server has decided which segments to remove, and has removed none of them yet.
    before = segments(world)
    pulled = world.pull(peer, "late", most=1).bodies
    work.run_all()
    assert len(segments(world)) < len(before)
    assert len(pulled) + len(pull_all(world, peer, "late")) == 40 - status_subject(world, peer)


def test_rule_T1_retention_waits_for_a_clock_that_is_believed() -> None:
    world, _ = filled()
    before = segments(world)
    world.clock.step_wall(3_600_000)
    world.core.retain()
    assert segments(world) == before


def status_subject(world: World, peer: SimPeer) -> int:
    head, _ = world.ask(peer, RequestType.SUBJECTS, {"prefix": "", "after": "", "limit": 1})
    (subject,) = need_maps(head, "subjects")
    return need_int(subject, "first")


def pull_all(world: World, peer: SimPeer, group: str, *, ack: bool = False) -> list[bytes]:
    found: list[bytes] = []
    while (pulled := world.pull(peer, group)).bodies:
        found.extend(pulled.bodies)
        if ack:
            world.ack(peer, pulled.handles, group)
    return found
