"""Seals: what one says of an hour, and the hour that has another one already (rules S1, S4, S6, L8)."""

import hashlib
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import BatchKind, ColumnId, SchedulePart
from delayd.batch.content import content_hash
from delayd.batch.gather import Pick, compose, gather
from delayd.delay.books.sealing import ContentDiffers, compare
from delayd.delay.core import DelayCore
from delayd.hours import hour_of_ms
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import NewPart, OutcomeRows, decode_outcomes, dispatch_path, encode_outcomes, missing_parts
from delayd.log.segment import FileKind, open_segment
from delayd.outcome import Outcome
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES, Crash
from delayd.testing.tree import PowerLoss
from tests.batches import messages
from tests.unit.delay.sealed import seals_of
from tests.worlds.delay import FOLDER, TARGET_IDS, World, wanted

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
    path, log_id = dispatch_path(FOLDER, HOUR), world.core.site.identity.log_id
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
