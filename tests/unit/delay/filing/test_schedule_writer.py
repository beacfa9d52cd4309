"""What a checkpoint files: batches within their limits, in order, and all of it however it ends."""

from collections.abc import Sequence
from operator import itemgetter
from random import Random

import pytest

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import BatchKind, ColumnId, ProducerPart
from delayd.batch.validate import check_batch
from delayd.delay.filing import log_range, schedule_writer
from delayd.delay.filing.schedule_writer import BATCH_BYTES
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.machine.executor import Abandoned
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES, Crash
from delayd.testing.tree import PowerLoss
from tests.batches import bodies_of, messages
from tests.worlds.delay import FOLDER, PRODUCER_ID, World, wanted
from tests.worlds.files import read_schedule_log

FAR_MS = 2 * HOUR_MS  # Not loaded, so that nothing but the writer touches it.
FAR = hour_of_ms(START_MS + FAR_MS)


def filed(world: World, hour: int = FAR) -> list[Batch]:
    """The batches of an hour's schedule log as the checkpoint counts them."""
    stored, damage = read_schedule_log(
        world.disk, FOLDER, world.core.site.identity.log_id, hour, world.hours().get(hour)
    )
    assert damage is None, str(damage)
    for entry in stored:
        assert entry.batch.kind is BatchKind.SCHEDULE and entry.batch.schedule.hour == hour
        entry.batch.verify()
        check_batch(entry.batch)
    return [entry.batch for entry in stored]


def rows_of(batch: Batch) -> list[tuple[int, bytes, bytes]]:
    """Due instant, headers and body of each row."""
    headers = [b""] * batch.count
    if ColumnId.HEADERS_END in batch:
        headers = [bytes(batch.heap[start:end]) for start, end in zip(*batch.region(ColumnId.HEADERS_END), strict=True)]
    return list(zip(batch.int64s(ColumnId.DELIVER_AT_MS).tolist(), headers, bodies_of(batch), strict=True))


def test_a_batch_ends_at_its_limit_of_bytes_and_a_large_message_gets_one_of_its_own() -> None:
    world = World(segment_bytes=64 << 20)
    sizes = [400_000, 400_000, 400_000, 2_000_000, 10, 10]
    bodies = [bytes([index]) * size for index, size in enumerate(sizes)]
    data = messages(bodies, due=[START_MS + FAR_MS] * len(sizes), part=ProducerPart(PRODUCER_ID, 1, 0))
    world.core.send(parse(data), lambda what, duplicate: None)
    world.settle()
    world.checkpoint()
    batches = filed(world)
    assert [batch.count for batch in batches] == [2, 1, 1, 2]
    assert all(batch.total_bytes <= BATCH_BYTES + 1_024 or batch.count == 1 for batch in batches)
    assert [body for batch in batches for body in bodies_of(batch)] == bodies


def test_a_range_that_is_read_in_many_windows_and_written_in_many_parts_is_filed_whole_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_range, "WINDOW_BYTES", 600)
    monkeypatch.setattr(log_range, "PIECE_WORDS", 3)
    monkeypatch.setattr(log_range, "PIECE_BYTES", 200)
    monkeypatch.setattr(schedule_writer, "PART_BYTES", 300)
    world = World()
    draw = Random(5)
    expected: dict[int, list[tuple[int, bytes, bytes]]] = {}
    for number in range(1, 30):
        count = draw.randint(1, 5)
        due = [START_MS + FAR_MS + draw.choice((0, 1, 2, 40)) * HOUR_MS + draw.randint(0, 999) for _ in range(count)]
        bodies = [draw.randbytes(draw.choice((0, 1, 8, 90))) for _ in range(count)]
        headers = [draw.choice((b"", b"\x80", b"\x81\xa1a\xa1b")) for _ in range(count)] if number % 3 == 0 else None
        part = ProducerPart(PRODUCER_ID, number, 0)
        data = (
            messages(bodies, due=due, headers=headers, part=part) if headers else messages(bodies, due=due, part=part)
        )
        world.core.send(parse(data), lambda what, duplicate: None)
        world.settle()
        for instant, header, body in zip(due, headers or [b""] * count, bodies, strict=True):
            expected.setdefault(hour_of_ms(instant), []).append((instant, header, body))
    world.checkpoint()
    for hour, rows in expected.items():
        assert [row for batch in filed(world, hour) for row in rows_of(batch)] == sorted(rows, key=itemgetter(0))
    world.check_logs()


@pytest.mark.parametrize("way", [None, PowerLoss.ALL_LOST])
def test_a_checkpoint_that_a_stop_abandons_at_any_piece_loses_nothing(way: PowerLoss | None) -> None:
    pieces = 0
    while True:
        world, left = World(load_ahead_ms=1_000), [pieces]
        for number in range(3):
            world.send([row for hour in range(1, 12) for row in wanted(2, hour * HOUR_MS, f"{number}-{hour}")])
            world.settle()
            if number == 0:
                world.checkpoint()

        def give_way(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Abandoned("the thread is being closed")

        world.executors()[2].give_way = give_way  # type: ignore[method-assign]
        try:
            assert world.stop()
            abandoned = False
        except Abandoned:
            abandoned = True
        later = world.after_crash(way)
        later.checkpoint()
        later.drain(12 * HOUR_MS)
        later.check_books()
        later.check_sealing()
        if not abandoned:
            break
        pieces += 1
    assert pieces > 10


@pytest.mark.parametrize("dies", [False, True])
def test_rule_P2_a_checkpoint_that_could_not_be_published_counts_and_the_next_one_says_so(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    for name in ("a", "b"):
        world.send(wanted(2, FAR_MS, name))
        world.settle()
        if name == "a":
            world.checkpoint()
    commit = world.state.commit

    def commit_and_fill(puts: Sequence[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        commit(puts, removes)
        world.disk.capacity_bytes = world.disk.used_bytes

    answers: list[int] = []
    world.core.checkpoint(answers.append)
    with monkeypatch.context() as patched:
        patched.setattr(world.state, "commit", commit_and_fill)
        world.executors()[2].run_all()
    world.settle()
    assert not answers and world.hours().get(FAR).rows == 4
    world.disk.capacity_bytes = CAPACITY_BYTES
    if dies:
        # The next one dies when its rows are in the schedule log and not counted: what was counted is still there.
        world.clock.advance(1_100)
        world.send(wanted(1, FAR_MS, "c"))
        world.disk.faults.crash_on = "commit"
        with pytest.raises(Crash):
            world.settle()
        world = world.after_crash(PowerLoss.ALL_LOST)
    else:
        world.pass_ms(2_000)
        assert answers == [world.core.standing.counters()["replay_offset"]]
    world.drain(3 * HOUR_MS)
    world.check_books()
