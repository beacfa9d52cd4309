"""What a checkpoint files, and the seal of an hour that has ended: whole, in order, and true, however it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from random import Random

import pytest

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind, ColumnId, ProducerPart
from delayd.batch.validate import check_batch
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import (
    NewPart,
    decode_outcomes,
    decode_seals,
    dispatch_path,
    encode_outcomes,
    missing_parts,
    seal_place,
)
from delayd.log.log import open_log
from delayd.log.segment import FileKind, open_segment
from delayd.machine.executor import Abandoned
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES, Crash
from delayd.testing.tree import PowerLoss
from delayd.wire.requests import RequestType
from tests.batches import bodies_of, messages
from tests.worlds.delay import FOLDER, PRODUCER_ID, World, wanted
from tests.worlds.files import read_schedule_log

FAR_MS = 2 * HOUR_MS  # Not loaded, so that nothing but the writer touches it.
FAR, HOUR = hour_of_ms(START_MS + FAR_MS), hour_of_ms(START_MS)
BATCH_BYTES = 1 << 20


def send(world: World, number: int, bodies: Sequence[bytes], due: Sequence[int], headers: list[bytes] | None) -> None:
    part = ProducerPart(PRODUCER_ID, number, 0)
    world.ask(RequestType.SEND, body=messages(bodies, due=due, headers=headers, part=part))


def filed(world: World, hour: int = FAR) -> list[Batch]:
    """The batches of an hour's schedule log as the checkpoint counts them."""
    stored, damage = read_schedule_log(world.disk, FOLDER, world.server.log_id, hour, world.hours().get(hour))
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
    bodies = [bytes([index]) * size for index, size in enumerate((400_000, 400_000, 400_000, 2_000_000, 10, 10))]
    send(world, 1, bodies, [START_MS + FAR_MS] * 6, None)
    world.checkpoint()
    batches = filed(world)
    assert [batch.count for batch in batches] == [2, 1, 1, 2]
    assert all(batch.total_bytes <= BATCH_BYTES + 1_024 or batch.count == 1 for batch in batches)
    assert [body for batch in batches for body in bodies_of(batch)] == bodies


def test_a_range_that_is_read_in_many_windows_and_written_in_many_parts_is_filed_whole_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {"log_range.WINDOW_BYTES": 600, "log_range.PIECE_WORDS": 3, "log_range.PIECE_BYTES": 200}
    for name, value in (small | {"schedule_writer.PART_BYTES": 300}).items():
        monkeypatch.setattr(f"delayd.delay.filing.{name}", value)
    world, draw = World(), Random(5)
    expected: dict[int, list[tuple[int, bytes, bytes]]] = {}
    for number in range(1, 30):
        count = draw.randint(1, 5)
        due = [START_MS + FAR_MS + draw.choice((0, 1, 2, 40)) * HOUR_MS + draw.randint(0, 999) for _ in range(count)]
        bodies = [draw.randbytes(draw.choice((0, 1, 8, 90))) for _ in range(count)]
        headers = [draw.choice((b"", b"\x80", b"\x81\xa1a\xa1b")) for _ in range(count)] if number % 3 == 0 else None
        send(world, number, bodies, due, headers)
        for instant, header, body in zip(due, headers or [b""] * count, bodies, strict=True):
            expected.setdefault(hour_of_ms(instant), []).append((instant, header, body))
    world.checkpoint()
    for hour, rows in expected.items():
        assert [row for batch in filed(world, hour) for row in rows_of(batch)] == sorted(rows, key=itemgetter(0))


@pytest.mark.parametrize("way", [None, PowerLoss.ALL_LOST])
def test_a_checkpoint_that_a_stop_abandons_at_any_piece_loses_nothing(way: PowerLoss | None) -> None:
    pieces, abandoned = 0, True
    while abandoned:
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
            pieces += 1
        later = world.after_crash(way)
        later.checkpoint()
        later.drain(12 * HOUR_MS)
        later.check_books()
        later.check_sealing()
    assert pieces > 10


@pytest.mark.parametrize("dies", [False, True])
def test_rule_P2_a_checkpoint_that_could_not_be_published_counts_and_the_next_one_says_so(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.send(wanted(2, FAR_MS, "a"))
    world.settle()
    world.checkpoint()
    world.send(wanted(2, FAR_MS, "b"))
    world.settle()
    commit = world.state.commit

    def commit_and_fill(puts: Sequence[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        commit(puts, removes)
        world.disk.capacity_bytes = world.disk.used_bytes

    answers: list[int] = []
    world.server.checkpoint(answers.append)
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
        assert answers == [world.status("replay_offset")]
    world.drain(3 * HOUR_MS)
    world.check_books()


# Seals; examples/reference_reader.py computes them anew, and tests/tamper lies about each of their fields.


def over(world: World) -> None:
    """Let an hour go by, and a checkpoint see it."""
    world.clock.advance(HOUR_MS)
    world.pass_ms(2_000)
    world.checkpoint()


def ended(name: str = "a") -> World:
    """A world with an hour whose messages have all been dispatched."""
    world = World()
    world.send([*wanted(3, 1_000, name), *wanted(2, 5_000, "b", b"mail")])
    world.pass_ms(6_000)
    return world


def seals_of(world: World) -> list[int]:
    """The numbers of the seals in the log."""
    log = open_log(world.disk, seal_place(FOLDER, world.server.log_id), START_MS)
    groups = log.scan(0, log.durable)
    return [seal.number for group in groups for _, batch in group.batches() for seal in decode_seals(batch)]


def rewrite_outcomes(world: World, change: Callable[[NewPart], NewPart]) -> None:
    """Write the hour's dispatch log anew with changed parts, checksums and all."""
    path = dispatch_path(FOLDER, HOUR)
    segment = open_segment(world.disk, path, FileKind.DISPATCH, world.server.log_id, write=True)
    groups = [[batch for _, batch in group.batches()] for group in segment.scan(0, 0)]
    segment.file.truncate(64)
    for batches in groups:
        found = decode_outcomes(batches)
        parts = [change(part) for part in missing_parts(found, decode_outcomes([]))]
        # As long as it was, or its file would be damaged by what the state knows of it.
        segment.append([NewGroup(GroupKind.DATA, [encode_outcomes(HOUR, parts)], 1, START_MS, 0, len(found.sequences))])
    segment.flush()
    segment.close()


def swapped(part: NewPart) -> NewPart:
    return part if part.hashes is None else part._replace(hashes=part.hashes[::-1].copy())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda part: part._replace(claimed_at_ms=part.claimed_at_ms + 1), "seal_differs"),
        (swapped, "content_differs"),
    ],
)
def test_rules_S4_S6_an_hour_that_is_not_what_it_was_is_told_and_stays_and_others_seal(
    change: Callable[[NewPart], NewPart], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = ended()
    over(world)
    world.disk.faults.crash_on = "commit"  # The seal is durable, and the state does not count it.
    with pytest.raises(Crash):
        world.sweep()
    again = world.after_crash(PowerLoss.ALL_LOST)
    rewrite_outcomes(again, change)
    again = again.after_crash()
    over(again)
    for _ in range(3):
        again.sweep()
    assert not again.hours().get(HOUR).sealed and seals_of(again) == [0] and caplog.text.count(told) == 1
    # Others seal all the same, and a restart forgets nothing of it.
    again.send(wanted(1, again.clock.now_ms() - START_MS, "more"))
    again.pass_ms(1_000)
    over(again)
    again.sweep()
    last = again.after_crash(PowerLoss.ALL_LOST)
    over(last)
    last.sweep()
    assert not last.hours().get(HOUR).sealed and seals_of(last) == [0, 1]


def test_what_is_pending_is_told_when_hours_before_it_were_sealed_and_after_restarts() -> None:
    world = ended()
    world.send(wanted(2, 5 * HOUR_MS, "far"))
    world.settle()
    world.checkpoint()
    assert world.status("pending") == 2
    over(world)
    world.sweep()
    assert world.hours().get(HOUR).sealed and world.status("pending") == 2
    for _ in range(2):
        world = world.after_crash(PowerLoss.ALL_LOST)
        assert world.status("pending") == 2


def test_rule_L8_a_full_disk_seals_nothing_and_what_waits_seals_when_there_is_space() -> None:
    world = ended()
    over(world)
    world.disk.capacity_bytes = world.disk.used_bytes
    world.sweep()
    assert not world.hours().get(HOUR).sealed
    world.disk.capacity_bytes = CAPACITY_BYTES
    for _ in range(2):
        world.sweep()
    assert world.hours().get(HOUR).sealed and seals_of(world) == [0]
