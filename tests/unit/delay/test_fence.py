"""A delay server that is fenced gives no receipts and hands nothing over, until the fence comes down (rule H8)."""

import pytest

from delayd.delay.handoff.link import Phase
from delayd.errors import DelaydError, FencedInstance, NotReady, ServerFenced, StaleEpoch
from delayd.machine.operating import META, WaitKind
from tests.named_commands import check_commands
from tests.worlds.delay import TARGET_IDS, World, new_world, wanted

SUBJECTS = [b"s"]


def test_rule_H8_a_fenced_server_keeps_nothing_and_hands_nothing_over() -> None:
    world = World()
    world.send(wanted(3, 1_000, "before"))
    world.settle()
    world.core.fence.put_up(META, NotReady("not taken yet"), WaitKind.IN_ANOTHER_PLACE)
    refused = world.send(wanted(3, 1_000, "meanwhile"))
    world.pass_ms(5_000)
    assert [(number, type(error)) for number, error in world.outside.refused] == [(refused, ServerFenced)]
    assert not any(target.log for target in world.outside.targets.values())
    # It speaks to no target at all, or it would end the session of the right server.
    assert all(link.phase is Phase.CLOSED for link in world.core.handoff.dispatcher.links.values())
    assert not any(cable.up or not cable.ended for cable in world.cables)
    with pytest.raises(ServerFenced):
        world.core.outcome(1, 1)
    assert next(iter(world.core.standing.waits())).why == "meta says not_ready: not taken yet"
    world.core.fence.take_down(META)
    world.drain()
    world.check_books()


@pytest.mark.parametrize("kind", [StaleEpoch, FencedInstance])
def test_rule_H8_a_server_that_a_target_fences_off_gives_no_receipts(kind: type[DelaydError]) -> None:
    world = World()
    world.send(wanted(3, 1_000, "before"))
    world.pass_ms(3_000)
    epoch, instance = world.core.site.identity.epoch, 0xBAD
    for target in world.outside.targets.values():
        target.origin = (epoch + 1, instance) if kind is StaleEpoch else (epoch, instance)
    for log_id in TARGET_IDS:
        world.cut(log_id)
    world.pass_ms(3_000)
    refused = world.send(wanted(3, 1_000, "after"))
    world.settle()
    assert [(number, type(error)) for number, error in world.outside.refused] == [(refused, ServerFenced)]
    assert kind.code in world.core.fence.error().message
    # One advice for one trouble: whatever it holds up names the same command.
    commands = [wait.command for wait in world.core.standing.waits()]
    assert len(commands) > 1 and all("delayd target accept" in command for command in commands)
    for command in commands:
        check_commands(command)


def test_rule_H8_a_server_that_one_target_fences_off_hands_nothing_to_another() -> None:
    world = World(new_world(TARGET_IDS))
    subjects = {world.target_of(subject): subject for subject in (b"a", b"b")}
    assert len(subjects) == 2
    now_ms = world.clock.now_ms()
    world.send([(now_ms + 10_000, subject, subject) for subject in subjects.values()])
    world.settle()
    world.send([(now_ms, subject, b"first " + subject) for subject in subjects.values()])
    world.pass_ms(1_000)
    fencing, other = (world.outside.targets[log_id] for log_id in TARGET_IDS)
    assert len(other.log) == 1
    fencing.origin = (world.core.site.identity.epoch + 1, 0xBAD)
    world.cut(fencing.log_id)
    world.pass_ms(20_000)
    assert world.core.fence.is_up
    assert len(other.log) == 1, "what is due waits for whoever decides"
