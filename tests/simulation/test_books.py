"""The books of the simulation: what they let pass after damage and after power cuts, and what they do not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from delayd.hours import hour_of_ms
from delayd.log.hour import dispatch_path
from delayd.testing.clock import START_MS, SimMachine
from delayd.testing.disk import MemoryDisk
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import RequestType
from tests.memory_files import content, put
from tests.simulation.consumer import Consumer, GroupBooks, Held
from tests.simulation.damage import Damage, Damages, Flipped, Gone
from tests.simulation.network import Network
from tests.simulation.realtime_side import RealtimeSide
from tests.worlds.delay import FOLDER, World, wanted
from tests.worlds.key_books import KEEP, REJECT, KeyBooks

HOUR = hour_of_ms(START_MS)
PATH = dispatch_path(FOLDER, HOUR)


@pytest.mark.parametrize(("hidden", "policy"), [(HOUR, REJECT), (HOUR, KEEP), (HOUR + 1, REJECT), (HOUR + 1, KEEP)])
def test_rule_C3_only_a_cancelled_row_of_a_damaged_hour_may_keep_its_key(hidden: int, policy: int) -> None:
    world, hours = World(), set[int]()
    keys = KeyBooks(lambda: hours)

    def send(name: str, policy: int) -> None:
        keys.sent(world.outside.last_number + 1, [b"a"], [policy], world.outside)
        world.send_keyed(wanted(1, 50_000, name), [b"a"], policy)
        world.pass_ms(6_000)
        keys.look(world.outside)

    send("first", REJECT)
    world.cancel(world.receipts("first"))
    world.pass_ms(1_000)
    world.checkpoint()
    remains = world.remains(None)
    put(remains.disk, PATH, content(remains.disk, PATH)[:-1] + b"?")
    hours.add(hidden)
    world = World(remains)
    send("second", policy)
    if hidden == HOUR:
        keys.check(world.outside, {})
    else:
        with pytest.raises(AssertionError, match="of row 1, the key is that of 1, which was cancelled before"):
            keys.check(world.outside, {})


def _flip(disk: MemoryDisk) -> Damage:
    return Flipped(disk, PATH, 70, 1)


def _remove(disk: MemoryDisk) -> Damage:
    return Gone(disk, PATH)


@pytest.mark.parametrize("damage", [_flip, _remove])
def test_an_hour_stays_hidden_when_its_log_is_put_back(damage: Callable[[MemoryDisk], Damage]) -> None:
    disk, damages = _with_outcomes(), Damages()
    assert not damages.hidden_hours(disk)
    damages.add(damage(disk))
    damages.mend(disk)
    assert damages.hidden_hours(disk) == {HOUR}


def test_hours_are_hidden_whose_logs_can_not_be_read() -> None:
    disk, damages = _with_outcomes(), Damages()
    damages.fail_reads(disk, "/message/", 1)
    assert not damages.hidden_hours(disk)
    damages.fail_reads(disk, "/dispatch/", 1)
    damages.mend(disk)
    assert damages.hidden_hours(disk) == {HOUR}


def test_rule_L2_an_answer_from_before_a_power_cut_may_come_after_it_and_another_message_take_its_place() -> None:
    books = GroupBooks(1, b"mail", "group")
    books.give(3, b"kept", (6, 1, 1))
    books.lose(4, life=7)
    books.give(4, b"lost", (6, 2, 1))
    assert b"lost" not in books.bodies, "it is to be given yet"
    books.give(4, b"next", (7, 3, 2))
    for sequence, name in ((3, (6, 4, 1)), (4, (7, 4, 2))):
        with pytest.raises(AssertionError, match=f"consume sequence {sequence} was "):
            books.give(sequence, b"another", name)


def test_rule_L2_a_message_that_is_held_at_two_attempts_is_returned_at_the_one_that_the_server_knows() -> None:
    random, line = Random(0), _Line()
    network = Network(random)
    consumer = Consumer("a", RealtimeSide(1, SimMachine(), network, random), GroupBooks(1, b"s", "g"), network, random)
    consumer._line = line  # type: ignore[assignment]
    # The pull of the second attempt was taken by a power cut, so the server offers the first one again.
    known, taken = Held((1, 6, 1 << 48), 0, 1), Held((1, 14, 1 << 48), 0, 2)
    consumer.held = [known, taken]
    consumer.settle(RequestType.NACK, list(consumer.held), uncounted=True)
    line.answers[0](Frame(RequestType.NACK, 0, 1, {"stale": [[taken.name[2], 14, 1]]}, memoryview(b"")))
    assert consumer.returned == {known}


class _Line:
    """A connection whose answers are chosen."""

    open = True

    def __init__(self) -> None:
        self.answers: list[Callable[[Frame], None]] = []

    def call(self, kind: int, head: Head, body: object, answered: Callable[[Frame], None]) -> None:
        self.answers.append(answered)


def _with_outcomes() -> MemoryDisk:
    world = World()
    world.send(wanted(1, 500, "sent"))
    world.pass_ms(2_000)
    world.checkpoint()
    return world.disk
