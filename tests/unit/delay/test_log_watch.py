"""Files of the message log that go while the server runs: told, and nothing is lost (rule L10)."""

from __future__ import annotations

from delayd.delay.log_watch import LOOK_MS
from delayd.hours import HOUR_MS
from delayd.log.log import segment_name
from tests.delay_harness import FOLDER, World, wanted

FIRST = f"{FOLDER}/message/{segment_name(0)}"
ID = f"log/{segment_name(0).removesuffix('.log')}"


def test_rule_L10_a_message_log_that_is_removed_under_the_server_is_told_and_loses_nothing() -> None:
    world = World()
    world.send(wanted(3, 5 * HOUR_MS, "before"))
    world.settle()
    world.disk.remove(FIRST)
    world.pass_ms(LOOK_MS + 2_000)
    assert [entry.id for entry in world.core.quarantine] == [ID]
    assert any(ID in wait.what and "was removed" in wait.why for wait in world.core.waits())
    world.send(wanted(2, 5 * HOUR_MS, "after"))
    world.settle()
    again = world.after_crash(None)
    again.clock.advance(5 * HOUR_MS - 10_000)
    again.pass_ms(15_000)
    again.drain()
    again.check_books()


def test_a_message_log_that_is_cut_under_the_server_is_told_and_released_when_it_is_whole_again() -> None:
    world = World()
    world.send(wanted(3, 5 * HOUR_MS, "m"))
    world.settle()
    world.checkpoint()
    file = world.disk.open(FIRST, write=True)
    whole = file.pread(file.size(), 0)
    file.truncate(len(whole) - 8)
    told: list[tuple[bool, str]] = []
    world.pass_ms(LOOK_MS + 2_000)
    assert [entry.id for entry in world.core.quarantine] == [ID]
    world.core.release(ID, lambda done, text: told.append((done, text)))
    world.settle()
    file.pwritev([whole[-8:]], len(whole) - 8)
    world.core.release(ID, lambda done, text: told.append((done, text)))
    world.settle()
    assert [done for done, _ in told] == [False, True] and "8 bytes were cut" in told[0][1]
    assert not len(world.core.quarantine)
