"""Alarms: due in order, overtaken ones passed over and forgotten."""

from delayd.machine.alarms import CLEAN_MIN, Alarms, DueHeap
from delayd.testing.clock import SimClock


def test_items_come_up_in_order_when_they_are_due() -> None:
    items = DueHeap[str](lambda at_ms, item: True)
    for at_ms, item in ((30, "c"), (10, "a"), (20, "b"), (10, "a2")):
        items.add(at_ms, item)
    assert items.next_ms() == 10
    assert list(items.due(20)) == ["a", "a2", "b"]
    assert items.next_ms() == 30


def test_what_was_overtaken_never_comes_up_and_sets_no_time() -> None:
    alive = {"b"}
    items = DueHeap[str](lambda at_ms, item: item in alive)
    items.add(10, "a")
    items.add(20, "b")
    assert items.next_ms() == 20
    assert list(items.due(100)) == ["b"]
    assert items.next_ms() is None


def test_memory_is_bounded_by_what_is_alive() -> None:
    items = DueHeap[int](lambda at_ms, item: item % 1000 == 0)
    for item in range(20 * CLEAN_MIN):
        items.add(1_000_000 + item, item)
    assert len(items) <= CLEAN_MIN


def test_what_is_due_later_than_asked_for_is_not_looked_at() -> None:
    looked: list[str] = []

    def is_alive(at_ms: int, item: str) -> bool:
        looked.append(item)
        return item != "dead"

    items: DueHeap[str] = DueHeap(is_alive)
    for at_ms, item in ((10, "dead"), (20, "alive")):
        items.add(at_ms, item)
    assert items.next_ms(10) == 10 and not looked
    assert items.next_ms(11) == 20 and looked == ["dead"]
    assert items.next_ms() == 20


def test_an_alarm_rings_once_at_the_instant_that_was_said_last() -> None:
    clock, rung = SimClock(), list[str]()
    alarms = Alarms(clock)
    early, late = alarms.alarm(lambda: rung.append("early")), alarms.alarm(lambda: rung.append("late"))
    early.after(10)
    late.after(5)
    late.after(20)
    now_ms = clock.monotonic_ms()
    assert (alarms.next_ms(), late.at_ms) == (now_ms + 10, now_ms + 20)
    clock.advance(10)
    alarms.ring()
    alarms.ring()
    assert (rung, alarms.next_ms(), early.at_ms) == (["early"], now_ms + 20, None)
    late.off()
    clock.advance(10)
    alarms.ring()
    assert rung == ["early"] and alarms.next_ms() is None


def test_what_an_alarm_sets_for_now_is_for_the_next_turn() -> None:
    clock, rung = SimClock(), list[int]()
    alarms = Alarms(clock)

    def ring() -> None:
        rung.append(clock.monotonic_ms())
        again.soon()

    again = alarms.alarm(ring)
    again.soon()
    for turns in (1, 2):
        alarms.ring()
        assert len(rung) == turns and alarms.next_ms() == clock.monotonic_ms()


def test_an_alarm_that_is_said_twice_for_one_instant_rings_once() -> None:
    alarms, rung = Alarms(SimClock()), list[int]()
    alarm = alarms.alarm(lambda: rung.append(1))
    alarm.after(0)
    alarm.after(5)
    alarm.after(0)
    alarms.ring()
    assert rung == [1]
