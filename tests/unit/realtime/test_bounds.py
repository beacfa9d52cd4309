"""What a client may say, and how much it may make the server keep: named errors at entry (rules E1, B1)."""

import pytest

from delayd.batch.batch import Batch
from delayd.batch.columns import Int64s
from delayd.batch.gather import row_bytes
from delayd.errors import SlowDown
from delayd.wire.requests import RequestType
from realtime import answers as parts_module
from realtime import group_records
from realtime import groups as realtime_groups
from realtime import handoff as handoff_module
from realtime import polls as polls_module
from realtime import pulls as pulls_module
from realtime import subject_index as index_module
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer, World, pull_head


def served(*bodies: bytes) -> tuple[World, SimPeer]:
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    for number, body in enumerate(bodies, 1):
        world.dispatch(peer, 1, dispatch_batch(number, [body]))
    return world, peer


def test_rule_B1_groups_of_subjects_that_never_had_a_message_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    world, peer = served(b"kept")
    monkeypatch.setattr(realtime_groups, "GROUPS_MAX", 4)
    monkeypatch.setattr(realtime_groups, "GROUPS_OF_SUBJECT_MAX", 2)
    world.pull(peer, most=1)
    waiting = SimPeer()
    world.send(waiting, RequestType.PULL, pull_head(subject="waited-for", wait_ms=50_000))
    for number in range(20):
        world.pass_time(group_records.ROOM_EVERY_MS)
        world.pull(peer, subject=f"made-up-{number}")
        world.pass_time(group_records.ROOM_EVERY_MS)
        world.pull(peer, f"group-{number}", subject="one")
    with pytest.raises(SlowDown):
        world.pull(peer, subject="too-soon")
    assert set(world.core._index.by_name) == {"orders", "waited-for", "made-up-19", "one"}
    names = {("orders", "billing"), ("waited-for", "billing"), ("made-up-19", "billing"), ("one", "group-19")}
    for later in (world, World(world.disk.after_crash(), world.state.after_crash())):
        assert set(later.core._pulls.groups) == names
    assert waiting.answers == {} and waiting.errors == {}
    # One that has had a message makes no room: what it has not acknowledged is its own.
    world.dispatch(peer, 1, dispatch_batch(9, [b"a"], subject="made-up-19"), dispatch_batch(10, [b"b"], subject="one"))
    world.pass_time(group_records.ROOM_EVERY_MS)
    with pytest.raises(SlowDown):
        world.pull(peer, subject="another")


def test_rule_B1_long_polls_groups_and_unacknowledged_pulls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    world, peer = served(*(b"%d" % number for number in range(9)))
    monkeypatch.setattr(polls_module, "WAITING_MAX", 3)
    monkeypatch.setattr(realtime_groups, "GROUPS_MAX", 4)
    monkeypatch.setattr(realtime_groups, "GROUPS_OF_SUBJECT_MAX", 2)
    monkeypatch.setattr(pulls_module, "HELD_MAX", 6)

    def fails(do: object) -> None:
        assert callable(do)
        with pytest.raises(SlowDown):
            do()

    pulled = [world.pull(peer, most=1) for _ in range(3)]
    fails(lambda: world.pull(peer, most=1))
    # The other group has room, though not as much.
    assert [len(world.pull(peer, "mail", most=1).bodies) for _ in range(2)] == [1, 1]
    fails(lambda: world.pull(peer, "mail", most=1))
    fails(lambda: world.pull(peer, "third"))
    world.pull(peer, subject="a")
    world.pull(peer, subject="b")
    waiting = SimPeer()
    for subject in "ab":
        world.send(waiting, RequestType.PULL, pull_head(subject=subject, wait_ms=50_000))
    fails(lambda: world.pull(peer, subject="c"))
    world.send(waiting, RequestType.PULL, pull_head(subject="a", wait_ms=50_000))
    fails(lambda: world.pull(peer, subject="b"))
    # Given back when the connection ends, and with the acknowledgement.
    world.core.disconnected(waiting)
    assert world.ack(peer, pulled[0].handles) == world.ack(peer, pulled[1].handles) == []
    assert len(world.pull(peer, most=1).bodies) == 1


def test_what_is_stale_fits_one_answer_or_is_named_by_the_ranges_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls_module, "HANDLES_MAX", 5)
    world, peer = served(*(b"%d" % number for number in range(20)))
    pulls = [world.pull(peer, most=1) for _ in range(20)]
    for pulled in pulls[::2]:
        world.ack(peer, pulled.handles, kind=RequestType.NACK)
    incarnation = pulls[0].incarnation
    assert world.ack(peer, [[incarnation, 0, 20]]) == [[incarnation, 0, 20]]
    assert world.ack(peer, [[incarnation, 0, 8]]) == [[incarnation, at, 1] for at in (0, 2, 4, 6)]


def turns_of(world: World, waiting: SimPeer) -> list[int]:
    """How many answers each turn of the loop adds, until none is due at once."""
    added: list[int] = []
    while world.core.next_wake_ms() <= world.clock.monotonic_ms():
        before = len(waiting.answers)
        world.core.wake()
        added.append(len(waiting.answers) - before)
    return added


def test_rule_B2_large_answers_are_bounded_by_their_bytes_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls_module, "TURN_BYTES", 30_000)
    world, peer = served()
    subjects = [f"s{number}" for number in range(12)]
    waiting = SimPeer()
    for subject in subjects:
        world.pull(peer, subject=subject)
        world.send(waiting, RequestType.PULL, pull_head(subject=subject, wait_ms=50_000))
    batches = [dispatch_batch(number, [bytes(10_000)], subject=subject) for number, subject in enumerate(subjects, 1)]
    world.dispatch(peer, 1, *batches)
    assert len(waiting.answers) == 3
    added = turns_of(world, waiting)
    assert len(waiting.answers) == 12 and max(added) == 3


@pytest.mark.parametrize(("most", "max_bytes"), [(1, 1), (1, 100_000), (1_000_000, 1), (1_000_000, 3_200)])
def test_rule_B2_a_message_of_a_large_batch_costs_what_the_answer_holds(
    most: int, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def counted(batch: Batch, first: int, rows: int) -> Int64s:
        looked.append(rows)
        return row_bytes(batch, first, rows)

    monkeypatch.setattr(parts_module, "row_bytes", counted)
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    world.dispatch(peer, 1, dispatch_batch(1, [bytes(100)] * 5_000))
    for _ in range(5):
        world.ask(peer, RequestType.PULL, {**pull_head(), "max_messages": most, "max_bytes": max_bytes})
    assert 5 <= len(looked) <= 10 and max(looked) <= max(1, max_bytes // 32)


def test_rule_B1_delay_servers_their_windows_and_subjects_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_module, "ORIGINS_MAX", 2)
    monkeypatch.setattr(handoff_module, "WINDOW_BATCHES_MAX", 3)
    monkeypatch.setattr(index_module, "SUBJECTS_MAX", 2)
    world, peer = served(b"a", b"b")
    assert _refused(world, 7) is None
    assert isinstance(_refused(world, 8), SlowDown)
    end = world.recovered.message_log.end
    with pytest.raises(SlowDown):
        world.dispatch(peer, 1, dispatch_batch(3, [b"c"]), dispatch_batch(4, [b"d"]))
    assert world.recovered.message_log.end == end
    # Its W gives room, and known subjects stay served when there is none for new ones.
    world.hello(peer, 2, w=(1, 2))
    world.dispatch(peer, 2, dispatch_batch(5, [b"e"], subject="second"), dispatch_batch(6, [b"f"]))
    with pytest.raises(SlowDown):
        world.dispatch(peer, 2, dispatch_batch(7, [b"g"], subject="third"))
    world.dispatch(peer, 2, dispatch_batch(8, [b"h"], subject="second"))
    assert world.pull(peer, subject="second").bodies == [b"e", b"h"]


def _refused(world: World, origin: int) -> Exception | None:
    peer = SimPeer()
    return peer.errors.get(world.hello_later(peer, 5, origin=origin))
