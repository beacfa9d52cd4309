"""Sealing and deleting hours (rules P2, P3, P5, S1, S2, S4, T1), against the core in memory."""

import hashlib
import logging
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from delayd.batch import Batch, BatchKind, ColumnId, SchedulePart, parse
from delayd.content import content_hash
from delayd.delay.books import retention
from delayd.delay.books.sealing import ContentDiffers, compare
from delayd.delay.core import DelayCore
from delayd.delay.filing.hour_table import load_hours
from delayd.delay.quarantine import missing_parts
from delayd.disk import Disk
from delayd.errors import DispatchRefused
from delayd.executor import Priority
from delayd.gather import Pick, compose, gather
from delayd.hours import hour_of_ms
from delayd.log.checkpoint import Payload, read_checkpoint
from delayd.log.dispatch import NewPart, Outcome, OutcomeRows, decode_outcomes, encode_outcomes
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import LogPlace, open_log
from delayd.log.schedule import REMOVED, decode_hours, dispatch_path, schedule_path
from delayd.log.seal import NO_SEAL
from delayd.log.segment import FileKind, Segment, open_segment
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES, Crash, MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.testing.tree import PowerLoss
from tests.batches import messages
from tests.unit.delay.sealed import seals_of
from tests.worlds.delay import FOLDER, TARGET_IDS, World, new_world, wanted

HOUR_MS = 3_600_000
HOUR = hour_of_ms(START_MS)
TARGET = TARGET_IDS[0]
AWAY = b"mails"  # Its target is another one than that of orders.eu.
SUBJECTS = [b"mail", b"orders", b"orders.eu"]


def over(world: World, hours: int = 1) -> None:
    """Let hours go by, and a checkpoint see it."""
    world.clock.advance(hours * HOUR_MS)
    world.pass_ms(2_000)
    world.checkpoint()


def ready_world(**settings: int) -> World:
    """A world with an hour whose messages have all been dispatched."""
    world = World(None, core=DelayCore, seed=0, **settings)
    world.send([*wanted(3, 1_000, "a"), *wanted(2, 5_000, "b", b"mail")])
    world.pass_ms(6_000)
    return world


# The contents of a seal.


def rows(count: int) -> tuple[list[int], list[int], list[bytes]]:
    """Instants, subjects by number, and bodies; the subjects appear in another order than their names have."""
    draw = np.random.default_rng(count)
    return (
        draw.integers(START_MS, START_MS + HOUR_MS, count).tolist(),
        draw.permutation(np.arange(count) % 3).tolist(),
        [b"x" * int(size) for size in draw.integers(0, 40, count)],
    )


def schedule_batches(count: int, cuts: list[int]) -> Iterator[Batch]:
    """The same rows in batches that end at ``cuts``, each with a subject table of its own."""
    due, subjects, bodies = rows(count)
    for low, high in zip([0, *cuts], [*cuts, count], strict=True):
        part = slice(low, high)
        made = parse(messages(bodies[part], due=due[part], subjects=SUBJECTS, subject_of=subjects[part]))
        used = sorted(set(subjects[part]), reverse=low % 2 == 0)
        yield parse(
            compose(
                kind=BatchKind.SCHEDULE,
                part=SchedulePart(0, 1, HOUR),
                gathered=gather([Pick(made, np.arange(high - low))]),
                sequences=np.arange(low + 1, high + 1, dtype=np.uint64),
                subjects=[SUBJECTS[number] for number in used],
                others={ColumnId.SUBJECT: np.array([used.index(number) for number in subjects[part]], np.uint32)},
            ).joined()
        )


def hash_of(count: int, row: int) -> int:
    """The content hash of a row."""
    _, subjects, bodies = rows(count)
    return content_hash(SUBJECTS[subjects[row]], b"", bodies[row])


def outcomes_of(count: int, order: list[int], cut: int) -> OutcomeRows:
    """The outcomes of all rows, in an order, in two batches; the part of a row is the same in every order."""
    due, _, _ = rows(count)
    parts = [
        NewPart(
            *(np.array([row + 1], np.uint64), np.array([due[row]]), Outcome(1 + row % 5), 1_000 + row, 7, 1, row),
            # A row that was handed over has a hash, because its body was read; a cancelled row has none.
            hashes=np.array([hash_of(count, row)], np.uint64) if row % 5 == 0 else None,
        )
        for row in order
    ]
    return decode_outcomes([parse(encode_outcomes(HOUR, parts[:cut])), parse(encode_outcomes(HOUR, parts[cut:]))])


def test_rule_S4_a_seal_does_not_depend_on_how_rows_lie_in_batches() -> None:
    one = compare(HOUR, schedule_batches(40, []), outcomes_of(40, list(range(40)), 20))
    other = compare(HOUR, schedule_batches(40, [3, 4, 31]), outcomes_of(40, list(reversed(range(40))), 7))
    assert one is not None and one == other


def test_rule_S4_a_seal_is_what_the_page_of_the_format_says() -> None:
    due, subjects, bodies = rows(40)
    facts = compare(HOUR, schedule_batches(40, [9]), outcomes_of(40, list(range(40)), 1))
    assert facts is not None
    first_seen = list(dict.fromkeys(subjects))
    scheduled, decided = b"", b""
    for row in range(40):
        number = first_seen.index(subjects[row])
        own = hash_of(40, row)
        stated = own if row % 5 == 0 else 0
        scheduled += struct.pack("<QqIIQ", row + 1, due[row], number, len(bodies[row]), own)
        told = (1_000 + row, 7, 1, row, 0, 0, 1 + row % 5, 0, 1, 0, stated)
        decided += struct.pack("<QqqQQQqQBBHIQ", row + 1, due[row], *told)
    for number in first_seen:
        scheduled += struct.pack("<I", len(SUBJECTS[number])) + SUBJECTS[number]
    assert facts.schedule_sha256 == hashlib.sha256(scheduled).digest()
    assert facts.outcomes_sha256 == hashlib.sha256(decided).digest()
    assert (facts.rows, facts.body_bytes) == (40, sum(map(len, bodies)))
    assert (facts.dispatched, facts.cancelled, facts.dead, facts.expired, facts.in_doubt) == (8, 8, 8, 8, 8)
    assert (facts.due_min_ms, facts.due_max_ms) == (min(due), max(due))


def test_rule_S6_an_hour_whose_content_was_changed_on_the_way_does_not_seal() -> None:
    outcomes = outcomes_of(40, list(range(40)), 20)
    outcomes.content_hash[[5, 10]] = outcomes.content_hash[[10, 5]]
    with pytest.raises(ContentDiffers, match=r"2 rows .* \[6, 11\]"):
        compare(HOUR, schedule_batches(40, []), outcomes)


@pytest.mark.parametrize("order", [[*range(39)], [*range(40), 5], [*range(39), 5]])
def test_rule_S1_no_seal_without_exactly_one_outcome_for_each_row(order: list[int]) -> None:
    assert compare(HOUR, schedule_batches(40, []), outcomes_of(40, order, 20)) is None


def test_rule_S1_rows_that_do_not_rise_seal_nothing() -> None:
    (batch,) = schedule_batches(5, [])
    again = outcomes_of(5, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4], 5)
    assert compare(HOUR, iter([batch, batch]), again) is None


# The seal log.


def test_rule_S4_each_hour_gets_one_seal_and_the_seals_form_a_chain() -> None:
    world = ready_world()
    for number in range(3):
        over(world)
        world.sweep()
        world.sweep()
        world.send(wanted(2, world.clock.now_ms() - START_MS, f"m{number}"))
        world.pass_ms(1_000)
        world = world.after_crash(PowerLoss.ALL_LOST)
        world.drain()
    seals = seals_of(world)
    assert [seal.number for seal in seals] == [0, 1, 2]
    assert [seal.facts.rows for seal in seals] == [5, 2, 2]
    assert [seal.previous_sha256 for seal in seals] == [NO_SEAL, seals[0].sha256, seals[1].sha256]
    assert len({seal.facts.hour for seal in seals}) == 3


def test_an_hour_without_messages_gets_no_seal() -> None:
    world = ready_world()
    over(world, 5)
    world.sweep()
    assert [seal.facts.hour for seal in seals_of(world)] == [HOUR]


def compared_within_a_flush(monkeypatch: pytest.MonkeyPatch) -> World:
    """An hour that is compared while its last outcomes are written and not fsynced; power is lost before they are."""
    world = World(new_world(TARGET_IDS))
    world.send([*wanted(3, 1_000, "a"), *wanted(3, 1_000, "b", AWAY)])
    away = world.target_of(AWAY)
    world.settle()
    world.crash_target(away)
    world.pass_ms(2_000)
    over(world)
    world.outside.targets[away].restart()
    worker, flush, path = world.threads.worker, Segment.flush, dispatch_path(FOLDER, HOUR)
    assert isinstance(worker, StepExecutor)
    compared: list[int] = []

    def compare_within(segment: Segment) -> None:
        if segment.path == path and worker.waiting and not compared:
            compared.append(worker.waiting)
            worker.run_one()
            raise Crash
        flush(segment)

    monkeypatch.setattr(Segment, "flush", compare_within)
    with pytest.raises(Crash):
        for _ in range(200):
            # All but the worker goes on, so that a comparison that was asked for waits until outcomes are written.
            moves = [move for move in world.moves() if getattr(move, "__self__", None) is not worker]
            if moves:
                moves[0]()
            else:
                world.clock.advance(20)
                world.look_around()
                world.core.wake()
            world.core.sweep()
    monkeypatch.undo()
    return world


def test_rule_S1_an_hour_is_compared_on_durable_outcomes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = compared_within_a_flush(monkeypatch)
    assert not world.hours().get(HOUR).sealed
    again = world.after_crash(PowerLoss.ALL_LOST)
    assert not again.hours().get(HOUR).sealed
    again.drain()
    again.check_books()
    again.check_sealing()


def test_rule_S1_no_hour_is_compared_while_an_outcome_of_it_is_under_way() -> None:
    world = ready_world()
    world.clock.advance(HOUR_MS)
    world.pass_ms(2_000)
    world.checkpoint()
    assert not world.core._outcomes.unwritten_hours()
    part = NewPart(np.array([1], np.uint64), np.array([START_MS], np.int64), Outcome.DISPATCHED, START_MS, TARGET)
    world.core._outcomes.record(HOUR, part, lambda: None)
    worker = world.threads.worker
    assert isinstance(worker, StepExecutor)
    for _ in range(2):  # While it waits, and while it is being written.
        assert world.core._outcomes.unwritten_hours() == {HOUR}
        world.core.sweep()
        assert not worker.waiting
        world.core._outcomes.commit()


def test_rule_S4_the_seal_is_durable_before_the_state_calls_the_hour_sealed() -> None:
    world = ready_world()
    over(world)
    world.disk.faults.crash_on = "commit"
    with pytest.raises(Crash):
        world.sweep()
    for loss in (None, PowerLoss.ALL_LOST):
        again = world.after_crash(loss)
        assert not again.hours().get(HOUR).sealed and len(seals_of(again)) == 1
        again.pass_ms(61_000)
        again.sweep()
        assert again.hours().get(HOUR).sealed
        assert len(seals_of(again)) == 1, "the same seal is found again, not a second one"
        over(again)
        again.send(wanted(1, again.clock.now_ms() - START_MS, "more"))
        again.pass_ms(1_000)
        over(again)
        again.sweep()
        assert [seal.number for seal in seals_of(again)] == [0, 1]


def test_rule_S4_an_hour_that_gives_another_seal_than_a_crash_left_is_told_and_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = ready_world()
    over(world)
    world.disk.faults.crash_on = "commit"
    with pytest.raises(Crash):
        world.sweep()
    again = world.after_crash(PowerLoss.ALL_LOST)
    rewrite_outcomes(again, lambda part: part._replace(claimed_at_ms=part.claimed_at_ms + 1))
    again = again.after_crash()
    over(again)
    for _ in range(3):
        again.sweep()
    assert not again.hours().get(HOUR).sealed and len(seals_of(again)) == 1
    assert caplog.text.count("seal_differs") == 1
    # Others seal all the same, and a restart forgets nothing of it.
    again.send(wanted(1, again.clock.now_ms() - START_MS, "more"))
    again.pass_ms(1_000)
    over(again)
    again.sweep()
    last = again.after_crash(PowerLoss.ALL_LOST)
    over(last)
    last.sweep()
    assert not last.hours().get(HOUR).sealed and [seal.number for seal in seals_of(last)] == [0, 1]


def rewrite_outcomes(world: World, change: Callable[[NewPart], NewPart]) -> None:
    """Write the hour's dispatch log anew with changed parts, checksums and all."""
    path, log_id = dispatch_path(FOLDER, HOUR), world.core.identity.log_id
    segment = open_segment(world.disk, path, FileKind.DISPATCH, log_id, write=True)
    groups = [[batch for _, batch in group.batches()] for group in segment.scan(0, 0)]
    segment.file.truncate(64)
    for batches in groups:
        found = decode_outcomes(batches)
        parts = [change(part) for part in missing_parts(found, decode_outcomes([]))]
        # As long as it was, or its file would be damaged by what the state knows of it.
        segment.append([NewGroup(GroupKind.DATA, [encode_outcomes(HOUR, parts)], 1, START_MS, 0, len(found.sequences))])
    segment.flush()
    segment.close()


def test_rule_L8_a_full_disk_seals_nothing_and_what_waits_seals_when_there_is_space() -> None:
    world = ready_world()
    over(world)
    world.disk.capacity_bytes = world.disk.used_bytes
    world.sweep()
    assert not world.hours().get(HOUR).sealed
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.sweep()
    world.sweep()
    assert world.hours().get(HOUR).sealed and len(seals_of(world)) == 1


def test_a_damaged_seal_log_stops_sealing_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    world = ready_world()
    over(world)
    world.sweep()
    remains = world.remains(PowerLoss.ALL_LOST)
    file = remains.disk.open(f"{FOLDER}/seal/{0:020}.log", write=True)
    file.truncate(100)
    file.sync()
    again = World(remains)
    assert "found_damaged" in caplog.text and "seal/" in caplog.text
    again.send(wanted(2, again.clock.now_ms() - START_MS, "later"))
    again.drain()
    over(again)
    again.sweep()
    assert again.hours().unsealed(10**6)
    again.check_books()


# When an hour may seal.


def test_rule_T1_nothing_seals_or_is_deleted_on_a_clock_that_is_not_confirmed() -> None:
    world = ready_world(retention_hours=1)
    over(world)
    world.clock.step_wall(HOUR_MS)
    assert not world.clock.confirmed
    world.sweep()
    assert not seals_of(world)
    world.clock.step_wall(-HOUR_MS)
    world.sweep()
    assert world.hours().get(HOUR).sealed
    # A day ahead by mistake: nothing may be thrown away for it.
    world.clock.step_wall(24 * HOUR_MS)
    world.sweep()
    assert not world.hours().get(HOUR).removed
    world.clock.step_wall(-24 * HOUR_MS)
    world.delete_hours()
    assert world.disk.exists(schedule_path(FOLDER, HOUR))


def test_rule_P5_an_hour_seals_only_when_a_checkpoint_has_passed_a_group_from_behind_its_end() -> None:
    world = ready_world(checkpoint_every_ms=HOUR_MS)
    world.checkpoint()
    world.clock.advance(HOUR_MS - 10_000)
    world.sweep()
    assert not seals_of(world)
    world.clock.advance(10_000)
    world.sweep()
    assert not seals_of(world), "the log says nothing of the new hour yet"
    world.pass_ms(2_000)
    world.sweep()
    assert not seals_of(world), "an idle server's tick is durable, no checkpoint has passed it"
    world.checkpoint()
    world.sweep()
    assert world.hours().get(HOUR).sealed


def test_an_hour_that_is_closed_and_does_not_seal_is_told_once_and_read_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.send(wanted(3, 1_000, "a"))
    world.settle()
    world.crash_target(TARGET)
    over(world)
    read: list[int] = []
    monkeypatch.setattr(retention, "compare", lambda hour, *rest: read.append(hour))
    for _ in range(3 * retention.SWEEPS_UNTOLD):
        world.sweep()
    assert caplog.text.count("hour_waits") == 1
    assert "rows=3 without_outcome=3" in caplog.text
    assert read == [HOUR], "what did not change needs no second look"
    monkeypatch.undo()
    world.outside.targets[TARGET].restart()
    with caplog.at_level(logging.INFO):
        world.pass_ms(3_000)
        world.sweep()
    assert "hour_sealed" in caplog.text and world.hours().get(HOUR).sealed


def test_hours_that_can_not_seal_do_not_hold_up_the_others() -> None:
    world = World(new_world(TARGET_IDS))
    held = retention.HOURS_A_SWEEP + 2
    for number in range(held):
        world.send(wanted(1, number * HOUR_MS + 1_000, f"held{number}", AWAY))
    world.send(wanted(1, held * HOUR_MS + 1_000, "free"))
    world.settle()
    away = world.target_of(AWAY)
    assert away != world.target_of(b"orders.eu")
    world.crash_target(away)
    for _ in range(held):
        world.clock.advance(HOUR_MS)
        world.pass_ms(1_500)
    world.pass_ms(2_000)
    over(world)
    for _ in range(3):
        world.sweep()
    assert [seal.facts.hour for seal in seals_of(world)] == [HOUR + held]


# Deleting.


def sealed_world() -> World:
    world = ready_world(retention_hours=1)
    over(world)
    world.sweep()
    assert world.hours().get(HOUR).sealed
    return world


def removed_in_table(world: World) -> bool:
    published = read_checkpoint(world.disk, FOLDER)
    assert published is not None and isinstance(published["hours"], bytes)
    return any(row["flags"] & REMOVED for row in decode_hours(published["hours"]))


def test_rule_S2_only_sealed_hours_are_deleted() -> None:
    world = World(None, core=DelayCore, seed=0, retention_hours=1)
    world.send([*wanted(3, 1_000, "a"), *wanted(1, HOUR_MS + 1_000, "b", b"mail")])
    world.settle()
    world.crash_target(TARGET)
    for _ in range(4):
        over(world)
        world.delete_hours()
    names = [
        name
        for day in world.disk.list_folder(f"{FOLDER}/schedule")
        for name in world.disk.list_folder(f"{FOLDER}/schedule/{day}")
    ]
    unsealed = world.hours().unsealed(10**6)
    assert unsealed and len(names) == len(unsealed) == len(world.hours())
    world.drain()
    world.check_books()


def test_rule_S2_an_hour_with_dead_rows_stays() -> None:
    world = World(None, core=DelayCore, seed=0, dispatch_give_up_after_ms=1_000, retention_hours=1)
    target = world.outside.targets[TARGET]
    target.refused_bodies, target.refuse_with = {b"a-0"}, DispatchRefused("no")
    world.send(wanted(1, 1_000, "a"))
    world.pass_ms(2_000)
    world.send(wanted(2, 3_000, "b"))
    world.pass_ms(6_000)
    over(world)
    world.sweep()
    (seal,) = seals_of(world)
    assert (seal.facts.dispatched, seal.facts.dead) == (2, 1)
    for _ in range(3):
        over(world)
        world.delete_hours()
    assert world.hours().get(HOUR).dead and world.disk.exists(schedule_path(FOLDER, HOUR))


def test_rule_P3_files_go_only_when_the_published_table_says_that_they_do() -> None:
    world = sealed_world()
    world.clock.advance(HOUR_MS)
    world.pass_ms(2_000)
    world.sweep()
    assert world.hours().get(HOUR).removed and not removed_in_table(world)
    for _ in range(3):
        world.sweep()
    assert world.disk.exists(schedule_path(FOLDER, HOUR)) and world.disk.exists(dispatch_path(FOLDER, HOUR))
    world.pass_ms(61_000)
    assert removed_in_table(world)
    world.sweep()
    assert not world.disk.exists(schedule_path(FOLDER, HOUR)) and not world.disk.exists(dispatch_path(FOLDER, HOUR))
    assert not world.hours() and len(seals_of(world)) == 1, "the seal stays"
    assert not [key for key, _ in world.state.scan(b"outcomes/")]


def test_rule_L5_a_checkpoint_file_that_was_damaged_meanwhile_puts_off_deleting_until_the_next_one() -> None:
    world = sealed_world()
    world.clock.advance(2 * HOUR_MS)
    world.pass_ms(2_000)
    file = world.disk.open(f"{FOLDER}/checkpoint", write=True)
    file.pwritev([bytes([0xA5]) * file.size()], 0)
    world.sweep()
    assert HOUR in world.hours()
    world.pass_ms(61_000)
    world.delete_hours()
    assert HOUR not in world.hours()


def test_rule_S4_the_seal_of_a_deleted_hour_outlives_restarts() -> None:
    world = sealed_world()
    world.clock.advance(HOUR_MS)
    world.delete_hours()
    for _ in range(2):
        world = world.after_crash(PowerLoss.ALL_LOST)
        world.drain()
    assert [seal.facts.rows for seal in seals_of(world)] == [5]
    assert not load_hours(world.state.scan(b"hour/"))


def test_rule_B2_a_load_that_falls_due_while_hours_are_deleted_waits_for_one_file_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = ready_world(retention_hours=10)
    for _ in range(4):
        world.send(wanted(1, world.clock.now_ms() - START_MS, f"m-{world.clock.now_ms()}"))
        over(world)
        world.sweep()
    world.clock.advance(20 * HOUR_MS)
    world.pass_ms(1_000)
    world.sweep()
    world.pass_ms(61_000)
    done: list[str] = []
    _, _, worker = world.executors()
    remove = world.disk.remove

    def removing(path: str) -> None:
        if not done:
            worker.submit(lambda: done.append("load"), lambda ended: None, Priority.DUE)
        done.append(path)
        remove(path)

    monkeypatch.setattr(world.disk, "remove", removing)
    world.sweep()
    assert len(done) >= 2 * 2 + 1, "hours have two files each"
    assert done.index("load") == 1, done


def test_rule_B2_a_load_that_falls_due_while_the_published_table_is_read_does_not_wait_for_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = ready_world(retention_hours=10)
    world.send(wanted(1, world.clock.now_ms() - START_MS, "m"))
    over(world)
    world.sweep()
    world.clock.advance(20 * HOUR_MS)
    world.pass_ms(1_000)
    world.sweep()
    world.pass_ms(61_000)
    done: list[str] = []
    _, _, worker = world.executors()
    remove = world.disk.remove

    def reading(disk: Disk, folder: str, log_id: int | None = None) -> Payload | None:
        worker.submit(lambda: done.append("load"), lambda ended: None, Priority.DUE)
        return read_checkpoint(disk, folder, log_id)

    def removing(path: str) -> None:
        done.append(path)
        remove(path)

    monkeypatch.setattr("delayd.delay.books.retention.read_checkpoint", reading)
    monkeypatch.setattr(world.disk, "remove", removing)
    world.sweep()
    assert len(done) >= 3 and done[0] == "load", done


def test_rule_B2_a_load_that_falls_due_while_segments_are_removed_waits_for_one_at_most() -> None:
    disk = MemoryDisk()
    disk.make_folder("/log")
    log = open_log(disk, LogPlace("/log", FileKind.MESSAGE, 7, 200), 0)
    for number in range(4):
        log.append([NewGroup(GroupKind.DATA, [messages([b"x" * 200])], 1, number, number, 1)], number)
        log.flush()
    left: list[int] = []
    detached = log.detach_below(log.end)
    log.remove(detached, lambda: left.append(len(disk.list_folder("/log"))))
    assert len(detached) >= 3 and left == sorted(left, reverse=True) and len(left) == len(detached)
