"""Alarms: due in order, overtaken ones passed over and forgotten."""

from realtime.alarms import CLEAN_MIN, Alarms


def test_items_come_up_in_order_when_they_are_due() -> None:
    alarms = Alarms[str](lambda at_ms, item: True)
    for at_ms, item in ((30, "c"), (10, "a"), (20, "b"), (10, "a2")):
        alarms.add(at_ms, item)
    assert alarms.next_ms() == 10
    assert list(alarms.due(20)) == ["a", "a2", "b"]
    assert alarms.next_ms() == 30


def test_what_was_overtaken_never_comes_up_and_sets_no_time() -> None:
    alive = {"b"}
    alarms = Alarms[str](lambda at_ms, item: item in alive)
    alarms.add(10, "a")
    alarms.add(20, "b")
    assert alarms.next_ms() == 20
    assert list(alarms.due(100)) == ["b"]
    assert alarms.next_ms() is None


def test_memory_is_bounded_by_what_is_alive() -> None:
    alarms = Alarms[int](lambda at_ms, item: item % 1000 == 0)
    for item in range(20 * CLEAN_MIN):
        alarms.add(1_000_000 + item, item)
    assert len(alarms) <= CLEAN_MIN


def test_what_is_due_later_than_asked_for_is_not_looked_at() -> None:
    looked: list[str] = []

    def is_alive(at_ms: int, item: str) -> bool:
        looked.append(item)
        return item != "dead"

    alarms: Alarms[str] = Alarms(is_alive)
    for at_ms, item in ((10, "dead"), (20, "alive")):
        alarms.add(at_ms, item)
    assert alarms.next_ms(10) == 10 and not looked
    assert alarms.next_ms(11) == 20 and looked == ["dead"]
    assert alarms.next_ms() == 20
