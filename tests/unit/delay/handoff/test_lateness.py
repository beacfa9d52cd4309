"""How late messages reached their target in the last seconds, as STATUS says."""

from delayd.testing.clock import START_MS
from tests.unit.delay.handoff import cable_of, put_on_cable, ready_world, run_threads
from tests.worlds.delay import World, wanted

NAMES = ("late_ms_p50", "late_ms_p99", "late_ms_max")


def answer(world: World) -> None:
    """Let the target append what is on the cable, and answer."""
    cable_of(world).carry_up()
    cable_of(world).target.sync()
    cable_of(world).carry_down()


def test_the_last_ten_seconds_count_and_no_second_before() -> None:
    world = ready_world()
    world.clock.advance(10_000)
    world.core.wake()
    assert world.core.standing.counters()["taken_rows_10s"] == 0 and not set(NAMES) & set(
        world.core.standing.counters()
    )
    put_on_cable(world, 7)
    answer(world)
    first = world.core.standing.counters()
    assert first["taken_rows_10s"] == 7 and [first[name] for name in NAMES] == [0, 0, 0]
    put_on_cable(world, 1)
    world.clock.advance(6_000)
    answer(world)
    both = world.core.standing.counters()
    assert both["taken_rows_10s"] == 8 and both["late_ms_p50"] == 0
    assert both["late_ms_max"] == 6_000 and 5_800 <= both["late_ms_p99"] <= 6_000
    run_threads(world)
    world.clock.advance(5_000)
    last = world.core.standing.counters()
    assert last["taken_rows_10s"] == 1 and all(5_800 <= last[name] <= 6_000 for name in NAMES)


def test_messages_of_several_subjects_and_batches_count_one_by_one() -> None:
    world = ready_world(frame_rows_max=100)
    due_ms = world.clock.now_ms() - START_MS + 500
    world.send([row for number in range(5) for row in wanted(50, due_ms, f"m{number}", b"subject.%d" % number)])
    world.pass_ms(2_000)
    assert world.core.standing.counters()["taken_rows_10s"] == 1 + 5 * 50
    world.check_books()
