"""Segments that get no more groups are tallied beside the loop, before retention may take them (rules S5, S6)."""

from delayd.hours import hour_of_ms
from delayd.testing.executor import StepExecutor
from delayd.wire.heads import need_int
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import DUE_MS, ORIGIN, hashed_batch
from tests.worlds.realtime import SimPeer, World

SMALL = {"segment_bytes": 4096, "retention_ms": 1_000, "tail_bytes": 0}
HOUR = hour_of_ms(DUE_MS)
BODY = bytes(400)


def filled(work: StepExecutor | None = None, wrong: int = -1) -> tuple[World, SimPeer]:
    """A server with several segments of two messages a batch; the batch ``wrong`` states another hash."""
    world, peer = World(settings=SMALL, work=work), SimPeer()
    world.hello(peer, 1)
    for batch_id in range(1, 21):
        rows = [(10 * batch_id + row, DUE_MS, b"", BODY, 7 if batch_id == wrong else -1) for row in range(2)]
        w = (1, batch_id - 1) if batch_id > 1 else (0, 0)
        world.dispatch(peer, 1, hashed_batch(b"orders", rows, ORIGIN, HOUR, batch_id=batch_id, w=w))
    return world, peer


def settle(world: World) -> None:
    for _ in range(50):
        world.pass_time(100)


def test_rule_S5_retention_waits_for_the_tally_of_what_it_removes() -> None:
    world, _ = filled(work := StepExecutor())
    world.pass_time(2_000)
    tallied = 0
    for _ in range(4):
        world.core.retain()
        while work.step():
            tallied = max(tallied, world.core._closed.kept_from)
            assert world.recovered.message_log.start <= tallied
    assert world.recovered.message_log.start > 0


def test_rule_S6_a_row_whose_bytes_do_not_give_its_hash_is_named_and_shown() -> None:
    world, peer = filled(wrong=3)
    settle(world)
    answer, _ = world.ask(peer, RequestType.STATUS, {})
    assert need_int(answer, "differing") == 2
    (wait,) = [each for each in world.core.waits() if "content hash" in each.why]
    assert "/data/realtime/message/" in wait.why and f"message 30 of {ORIGIN:016x}" in wait.why
    # It is still known by the next life, and delivered: nobody can say which of both is right.
    later = world.restarted()
    answer, _ = later.ask(peer, RequestType.STATUS, {})
    assert need_int(answer, "differing") == 2
    assert [len(body) for body in later.pull(peer).bodies] == [400] * 40
