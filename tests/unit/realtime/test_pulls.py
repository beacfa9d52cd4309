"""Pulls, acknowledgements and leases (rule Q1), against the core in memory."""

from delayd.batch.batch import parse
from delayd.batch.columns import BatchKind, ColumnId
from delayd.batch.labels import bloom_of
from delayd.batch.validate import check_batch
from delayd.testing.executor import StepExecutor
from delayd.wire.heads import need_int, need_rows
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


def standing(world: World, peer: SimPeer, most: int = 100, wait_ms: int = 1_000, max_bytes: int = 1 << 20) -> int:
    """Ask as a consumer that fetches ahead; returns the id of the request."""
    head = pull_head(most=most, wait_ms=wait_ms, max_bytes=max_bytes, ahead=1, stands=True)
    return world.send(peer, RequestType.PULL, head)


def given(peer: SimPeer, request_id: int) -> list[list[bytes]]:
    """The bodies in each answer to a request."""
    return [bodies_of(body) for _, body in peer.answers.get(request_id, ())]


def test_a_pull_that_stands_is_answered_until_it_has_what_it_asked_for() -> None:
    world, peer = ready_world()
    reader = SimPeer()
    asked = standing(world, reader, most=3)
    for batch_id, bodies in enumerate(([b"a"], [b"b"], [b"c", b"d"]), 1):
        assert asked in reader.going_on or batch_id == 1
        world.dispatch(peer, 1, dispatch_batch(batch_id, bodies))
    assert given(reader, asked) == [[b"a"], [b"b"], [b"c"]]
    assert asked not in reader.going_on
    assert world.pull(reader).bodies == [b"d"]


def test_a_pull_that_stands_ends_at_its_time_and_at_its_bytes() -> None:
    world, peer = ready_world()
    reader = SimPeer()
    timed = standing(world, reader, wait_ms=1_000)
    world.dispatch(peer, 1, dispatch_batch(1, [b"a"]))
    world.pass_time(999)
    assert (given(reader, timed), timed in reader.going_on) == ([[b"a"]], True)
    world.pass_time(1)
    assert (given(reader, timed), timed in reader.going_on) == ([[b"a"], []], False)
    full = standing(world, reader, max_bytes=3_000)
    for batch_id in (2, 3, 4):
        world.dispatch(peer, 1, dispatch_batch(batch_id, [bytes(1_500)]))
    assert ([len(each) for each in given(reader, full)], full in reader.going_on) == ([1, 1], False)


def test_empty_hands_and_a_pull_that_does_not_wait_get_one_answer() -> None:
    world, peer = ready_world([b"a"])
    reader = SimPeer()
    at_once = standing(world, reader, wait_ms=0)
    empty = world.send(reader, RequestType.PULL, pull_head(most=9, wait_ms=1_000, ahead=0, stands=True))
    world.dispatch(peer, 1, dispatch_batch(2, [b"b"]))
    world.dispatch(peer, 1, dispatch_batch(3, [b"c"]))
    assert [given(reader, asked) for asked in (at_once, empty)] == [[[b"a"]], [[b"b"]]]
    assert not reader.going_on


def test_rule_Q4_a_pull_that_stands_comes_behind_empty_hands_and_takes_turns_with_others() -> None:
    world, peer = ready_world()
    first, second, idle = SimPeer(), SimPeer(), SimPeer()
    asked = [standing(world, each) for each in (first, second)]
    for batch_id, body in enumerate((b"a", b"b", b"c"), 1):
        world.dispatch(peer, 1, dispatch_batch(batch_id, [body]))
    assert [given(first, asked[0]), given(second, asked[1])] == [[[b"a"], [b"c"]], [[b"b"]]]
    waiting = world.send(idle, RequestType.PULL, pull_head(most=1, wait_ms=5_000))
    # One of those that fetch ahead hears at once that another one has nothing.
    told = [
        need_int(head, "wanted")
        for of, each in zip(asked, (first, second), strict=True)
        for head, _ in each.answers[of]
    ]
    assert max(told) == 1
    world.dispatch(peer, 1, dispatch_batch(4, [b"d"]))
    assert given(idle, waiting) == [[b"d"]]


def test_rule_Q4_what_a_pull_asked_for_itself_is_not_told_to_it_as_the_wish_of_others() -> None:
    world, peer = ready_world([b"a"])
    first, second = SimPeer(), SimPeer()
    at_once = world.send(first, RequestType.PULL, pull_head(most=4, wait_ms=5_000))
    ((head, _),) = first.answers[at_once]
    assert need_int(head, "wanted") == 0
    waited = world.send(first, RequestType.PULL, pull_head(most=4, wait_ms=5_000))
    world.send(second, RequestType.PULL, pull_head(most=3, wait_ms=5_000))
    world.dispatch(peer, 1, dispatch_batch(2, [b"b"]))
    ((head, _),) = first.answers[waited]
    assert need_int(head, "wanted") == 3


def test_what_ends_a_pull_that_waits_ends_one_that_stands() -> None:
    world, peer = ready_world()
    reader, gone = SimPeer(), SimPeer()
    names = {"subject": SUBJECT, "group": GROUP}
    ended, dropped = standing(world, reader), standing(world, gone)
    world.dispatch(peer, 1, dispatch_batch(1, [b"a"]))
    world.dispatch(peer, 1, dispatch_batch(2, [b"b"]))
    gone.closed = True
    world.server.disconnected(gone)
    world.ask(reader, RequestType.PULL_END, names)
    assert (given(reader, ended), reader.going_on) == ([[b"a"], []], set())
    deleted = standing(world, reader)
    world.dispatch(peer, 1, dispatch_batch(3, [b"c"]))
    world.ask(reader, RequestType.DELETE_GROUP, names)
    assert (given(reader, deleted), reader.going_on) == ([[b"c"], []], set())
    stopped = standing(world, reader)
    world.dispatch(peer, 1, dispatch_batch(4, [b"d"]))
    world.server.stop(lambda: None)
    assert given(reader, stopped)[-1] == [b"d"]
    assert reader.errors[stopped].code == "stopping"
    assert given(gone, dropped) == [[b"b"]]


def test_rule_Q8_what_waits_for_the_disk_is_the_last_answer() -> None:
    world, peer = ready_world()
    reader = SimPeer()
    head = pull_head(most=9, wait_ms=1_000, ahead=1, stands=True) | {"ordered": True}
    asked = world.send(reader, RequestType.PULL, head)
    world.dispatch(peer, 1, dispatch_batch(1, [b"a"]))
    world.dispatch(peer, 1, dispatch_batch(2, [b"b"]))
    assert (given(reader, asked), reader.going_on) == ([[b"a"]], set())


def test_rule_B1_a_thousand_pulls_that_stand_cost_one_answer_a_message() -> None:
    world, peer = ready_world()
    greedy = SimPeer()
    asked = [standing(world, greedy, most=(1 << 63) - 1) for _ in range(1_000)]
    for batch_id in range(1, 11):
        world.dispatch(peer, 1, dispatch_batch(batch_id, [b"%d" % batch_id]))
    assert [len(greedy.answers.get(each, ())) for each in asked[:11]] == [1] * 10 + [0]
    world.server.disconnected(greedy)
    assert world.core._pulls.waiting.count == 0
