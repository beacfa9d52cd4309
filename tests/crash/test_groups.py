"""The realtime server dies at each disk operation of what is told to groups: delete, with retries that no delay server
has taken, move and pause.

Promises: what was answered holds after the next start. A group is there with the group of what comes to it again, or
both are gone, and then nothing of theirs is sent again (rules Q2, Q5).
"""

from dataclasses import dataclass, field

from delayd.wire.requests import RequestType
from tests.crash.realtime_deaths import check_each_next, live
from tests.worlds.dispatch_batches import ORIGIN, bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World

OTHER = "audit"
BODIES = [b"a", b"b", b"c"]
SETTINGS = {"segment_bytes": 4096, "tail_bytes": 0, "lease_ms": 30_000, "free_bytes_all": 0}


@dataclass
class Told:
    """What was asked, and what of it was answered."""

    asked: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)

    def ask(self, world: World, peer: SimPeer, what: str, kind: RequestType, **head: object) -> None:
        self.asked.add(what)
        world.ask(peer, kind, {"subject": SUBJECT, **head})  # type: ignore[dict-item]
        self.answered.add(what)


def workload(world: World, told: Told) -> None:
    """One group is deleted with retries of two lives; the other one is moved and paused."""
    peer = SimPeer()
    world.hello(peer, 1)
    world.dispatch(peer, 1, dispatch_batch(1, BODIES))
    pulled, others = world.pull(peer), world.pull(peer, OTHER)
    world.ack(peer, others.handles, OTHER)
    told.answered.add("acknowledged")
    first = [*pulled.handles[0][:2], 1, 60_000, "no"]
    told.ask(world, peer, "retried", RequestType.RETRY, group=GROUP, retries=[first])
    (undone,) = world.core.retries.waiting(ORIGIN)
    again = bodies_of(world.core.retries.batch_of(undone))
    world.core.retries.accepted(undone)
    (child,) = world.core._pulls.roster.children(1)
    world.dispatch(peer, 1, dispatch_batch(2, again, subject=child.subject.name))
    world.core.checkpoint()
    handles = [world.pull(peer).handles[0], [*pulled.handles[0][:1], pulled.handles[0][1] + 1, 1]]
    rows = [[*handle, 60_000, "no"] for handle in handles]
    told.ask(world, peer, "retried again", RequestType.RETRY, group=GROUP, retries=rows)
    told.ask(world, peer, "moved", RequestType.MOVE_GROUP, group=OTHER, to="earliest")
    told.ask(world, peer, "paused", RequestType.PAUSE_GROUP, group=OTHER, paused=True)
    world.core.checkpoint()
    told.ask(world, peer, "deleted", RequestType.DELETE_GROUP, group=GROUP)
    world.core.checkpoint()
    told.ask(world, peer, "resumed", RequestType.PAUSE_GROUP, group=OTHER, paused=False)
    world.core.stop(lambda: None)


def check(world: World, told: Told) -> None:
    """Hold a restarted server to what its former life answered."""
    roster = world.core._pulls.roster
    groups = roster.groups
    assert all(group.parent is not None for (subject, _), group in groups.items() if subject.startswith("%")), (
        "a child is left whose group is gone"
    )
    undone = list(world.core.retries.waiting(ORIGIN))
    if (SUBJECT, GROUP) not in groups:
        assert not undone, "what a deleted group gave back is sent"
        assert "deleted" in told.asked or "retried" not in told.answered, "a group was forgotten"
    else:
        assert "deleted" not in told.answered, "a deleted group is back"
        if "retried again" in told.answered:
            assert len(undone) == 2, "a decision was forgotten"
    for each in undone:
        assert world.core.retries.batch_of(each)
    if "acknowledged" not in told.answered:
        return
    held_back = groups[SUBJECT, OTHER].held_back
    moved = groups[SUBJECT, OTHER].next == 0
    if "moved" in told.answered:
        assert moved, "a move was forgotten"
    elif "moved" not in told.asked:
        assert not moved, "nobody moved it"
    if "paused" in told.answered and "resumed" not in told.asked:
        assert held_back, "a pause was forgotten"
    elif "paused" not in told.asked or "resumed" in told.answered:
        assert not held_back, "nobody paused it, or it was resumed"


def test_rule_Q5_a_group_is_what_it_was_told_to_be_whichever_disk_operation_it_dies_at() -> None:
    whole = live(workload, Told(), SETTINGS)
    told = whole.told
    assert len(told.answered) == 7
    for crash_at in range(1, len(whole.disk.operations) + 1):
        check_each_next(live(workload, Told(), SETTINGS, crash_at), SETTINGS, check)
