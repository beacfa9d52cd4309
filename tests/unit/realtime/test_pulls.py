"""Pulls, acknowledgements and leases (rule Q1), against the core in memory."""

from delayd.batch.batch import parse
from delayd.batch.columns import BatchKind, ColumnId
from delayd.batch.labels import bloom_of
from delayd.batch.validate import check_batch
from delayd.testing.executor import StepExecutor
from delayd.wire.heads import need_rows
from delayd.wire.requests import RequestType
from tests.batches import messages, tags_of
from tests.worlds.dispatch_batches import DUE_MS, bodies_of, dispatch_batch, split
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head, ready_world


def test_max_bytes_bounds_an_answer_but_one_message_is_always_given() -> None:
    world, peer = ready_world([bytes(2_000)] * 4, [bytes(2_000)])
    pulled = world.pull(peer, max_bytes=5_000)
    assert len(pulled.bodies) == 2
    assert len(pulled.raw) <= 5_000
    assert len(world.pull(peer, max_bytes=100).bodies) == 1
    assert len(world.pull(peer, max_bytes=1 << 20).bodies) == 2


def test_rows_that_are_cut_out_of_a_batch_keep_their_tags() -> None:
    world, peer = ready_world()
    tags = [["eu"], [], ["eu", "urgent"], ["x" * 64, "y" * 64], []]
    part = parse(dispatch_batch(1, [b"a"])).dispatch
    whole = {"subjects": [SUBJECT.encode()], "sequences": range(5), "kind": BatchKind.DISPATCH, "part": part}
    world.dispatch(peer, 1, messages([b"a"] * 5, due=[DUE_MS] * 5, tags=tags, **whole))  # type: ignore[arg-type]
    found: list[tuple[str, ...]] = []
    for max_bytes in (400, 400, 400, 400, 1 << 20):
        pulled = world.pull(peer, most=2, max_bytes=max_bytes)
        assert len(pulled.raw) <= max_bytes
        for cut in split(pulled.raw):
            check_batch(cut)
            assert cut.uint64s(ColumnId.TAG_BLOOM).tolist() == [bloom_of(own) for own in tags_of(cut)]
            found += tags_of(cut)
    assert found == list(map(tuple, tags))


def test_a_waiting_pull_is_answered_when_a_message_comes_in_order_of_arrival() -> None:
    world, peer = ready_world()
    first, second = SimPeer(), SimPeer()
    world.send(first, RequestType.PULL, pull_head(most=1, wait_ms=5_000))
    world.send(second, RequestType.PULL, pull_head(most=1, wait_ms=5_000))
    world.dispatch(peer, 1, dispatch_batch(1, [b"a", b"b"]))
    assert [bodies_of(first.answers[1][0][1]), bodies_of(second.answers[1][0][1])] == [[b"a"], [b"b"]]


def test_rule_Q1_an_acknowledgement_is_answered_after_its_fsync_and_holds_up_no_pull() -> None:
    sync = StepExecutor()
    world, peer = World(pulls=sync), SimPeer()
    world.hello(peer, 1)
    world.dispatch(peer, 1, dispatch_batch(1, [b"a"]), dispatch_batch(2, [b"b"]))
    created = world.send(peer, RequestType.PULL, pull_head(most=1))
    sync.run_all()
    ((head, _),) = peer.answers[created]
    ((pull_first, _, count, _),) = need_rows(head, "parts", 4)
    names = {"subject": SUBJECT, "group": GROUP}
    acked = world.send(peer, RequestType.ACK, {**names, "handles": [[head["incarnation"], pull_first, count]]})
    assert acked not in peer.answers
    assert world.pull(peer).bodies == [b"b"]
    sync.run_all()
    assert acked in peer.answers


def test_messages_below_the_checkpoint_and_out_of_memory_are_found_again() -> None:
    bodies = [[f"{batch}-{row}".encode() for row in range(3)] for batch in range(50)]
    world, _ = ready_world(*bodies, tail_bytes=2_000)
    world.core.checkpoint()
    later = world.restarted()
    reader = SimPeer()
    found: list[bytes] = []
    while pulled := later.pull(reader, most=7).bodies:
        found.extend(pulled)
    assert found == [body for of_batch in bodies for body in of_batch]
