"""A group's id is never given to another group (rule Q2): the retries and dead letters of a group that is gone are kept
under the id.
"""

import random
from collections.abc import Callable

import msgpack
import pytest

from delayd.batch.names import retry_subject
from delayd.errors import BadArgument
from delayd.log.tail import CHECKPOINT_KEY, COPY_PREFIX
from delayd.wire.frame import HeadValue
from delayd.wire.heads import U32_MAX
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SUBJECT, SimPeer, World, ready_world

SETTINGS = {"segment_bytes": 4096}


def killed(world: World) -> World:
    """What comes after a SIGKILL, on the same disk."""
    disk = world.disk.after_kill()
    return World(disk, world.state.after_crash(disk), world.clock.restarted(), settings=world.settings)


def made(world: World, name: str, subject: str = SUBJECT) -> int:
    """Make a group, by a pull; its id."""
    world.pull(SimPeer(), name, subject)
    return world.core.groups.roster.groups[subject, name].group_id


def deleted(world: World, name: str, subject: str = SUBJECT) -> None:
    world.ask(SimPeer(), RequestType.DELETE_GROUP, {"subject": subject, "group": name})


def forget_next_id(world: World) -> None:
    """Have the checkpoint look like one of a version that did not store the next id."""
    for key in (CHECKPOINT_KEY, COPY_PREFIX + CHECKPOINT_KEY):
        row = msgpack.unpackb(world.state.get(key))
        del row["next_group"]
        world.state.commit([(key, msgpack.packb(row))])


@pytest.mark.parametrize("seed", range(4))
def test_rule_Q2_no_id_is_given_twice_in_any_life(seed: int) -> None:
    drawn, world, names = random.Random(seed), World(settings=SETTINGS), dict[str, int]()
    given: list[int] = []
    for number in range(300):
        match drawn.choice(["make", "make", "delete", "delete", "delete", "checkpoint", "restart", "kill"]):
            case "make":
                names[f"g{number}"] = made(world, f"g{number}")
                given.append(names[f"g{number}"])
            case "delete" if names:
                # The newest one as a rule: its id is the one that a server may believe to be free.
                name = max(names, key=lambda each: names[each]) if drawn.random() < 0.8 else drawn.choice([*names])
                deleted(world, name)
                del names[name]
            case "checkpoint":
                world.core.checkpoint()
            case "restart":
                world = world.restarted()
            case "kill":
                world = killed(world)
    assert len(given) == len(set(given)) > 50
    assert not world.failures


def give_back(world: World, peer: SimPeer, name: str, subject: str) -> None:
    """Pull a message, and have it come again in a minute."""
    rows: list[HeadValue] = [[*handle, 60_000, "no"] for handle in world.pull(peer, name, subject).handles]
    world.ask(peer, RequestType.RETRY, {"subject": subject, "group": name, "retries": rows})


@pytest.mark.parametrize("stop", [World.restarted, killed])
def test_rule_Q2_a_new_group_gets_nothing_that_a_deleted_one_gave_back(stop: Callable[[World], World]) -> None:
    world, peer = ready_world([b"a"])
    give_back(world, peer, "old", SUBJECT)
    kept_as = retry_subject(world.server.log_id, world.core.groups.roster.groups[SUBJECT, "old"].group_id)
    deleted(world, "old")
    world.core.checkpoint()
    world = stop(world)
    world.hello(peer, 2)
    world.dispatch(peer, 2, dispatch_batch(2, [b"b"], subject="other"))
    give_back(world, peer, "new", "other")
    world.dispatch(peer, 2, dispatch_batch(3, [b"a"], subject=kept_as))
    assert world.pull(peer, "new", "other").bodies == []


def test_a_start_from_a_checkpoint_of_an_earlier_version_looks_for_former_ids() -> None:
    world = World(settings={"segment_bytes": 1 << 20})
    ids = [made(world, f"g{number}") for number in range(5)]
    for number in range(5):
        deleted(world, f"g{number}")
    world.core.checkpoint()
    forget_next_id(world)
    assert made(killed(world), "new") > max(ids)


def test_a_start_from_a_checkpoint_of_an_earlier_version_knows_the_ids_of_retry_subjects() -> None:
    world, peer = ready_world()
    kept_as = retry_subject(world.server.log_id, 77)
    world.dispatch(peer, 1, dispatch_batch(1, [b"again"], subject=kept_as))
    world.core.checkpoint()
    forget_next_id(world)
    assert made(killed(world), "new") == 78


def test_rule_Q2_a_restored_directory_gives_no_id_that_the_lost_one_gave() -> None:
    world = World()
    given = [made(world, "before")]
    copies = [killed(world), killed(world)]
    given += [made(world, f"lost-{number}") for number in range(5)]
    for copy in copies:
        world.clock.advance(60_000)
        copy.clock.advance(world.clock.now_ms() - copy.clock.now_ms())
        # Meta says it again with each heartbeat.
        copy.core.may_be_a_copy()
        copy.core.may_be_a_copy()
        copy = killed(copy)  # The ids stay unused when nobody had one in this life.
        given += [made(copy, f"restored-{number}") for number in range(5)]
        assert max(given) < 1 << 23, "once in a life"
    assert len(set(given)) == len(given) == 16


def test_a_server_without_ids_says_who_must_act() -> None:
    world = World()
    world.core.groups.roster.next_id = U32_MAX
    assert made(world, "last") == U32_MAX
    with pytest.raises(BadArgument, match="delayd route move orders"):
        world.pull(SimPeer(), "one-more")
    assert world.pull(SimPeer(), "last").bodies == []
