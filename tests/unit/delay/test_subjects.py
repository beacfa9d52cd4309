"""Names of subjects: bounded in bytes, given back when no row in memory has them, and never another row's (rule B1)."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest

from delayd.batch.batch import parse
from delayd.delay import subjects as module
from delayd.delay.rows import Rows, new_rows
from delayd.delay.subjects import TABLES_BYTES_MAX, Subjects
from delayd.errors import SlowDown
from tests.batches import messages
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000
FAR = [b"far.%04d" % index for index in range(300)]


def rows_of(*numbers: int) -> Rows:
    rows = new_rows(len(numbers))
    rows["subject"] = numbers
    return rows


def held(do: Callable[[], object]) -> int:
    """The bytes that a call leaves in memory."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        do()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_rule_B1_tables_are_remembered_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [b"customer-%06d.orders" % index for index in range(5_000)]
    subjects, draw = Subjects(), random.Random(1)
    subjects.numbers(names)
    tables = [
        parse(messages([b""] * count, subjects=draw.sample(names, count), subject_of=range(count)))
        for count in (3, 150, 2_000)
        for _ in range(3_000 // count)
    ]

    def look() -> None:
        for batch in tables * 5:
            assert [subjects.names[number] for number in subjects.of_batch(batch)[:3]] == batch.subjects()[:3]

    assert held(look) < TABLES_BYTES_MAX and subjects.known == 5_000
    monkeypatch.setattr(module, "TABLES_BYTES_MAX", 100_000)
    other = Subjects()

    def fill() -> None:
        for number in range(6_000):
            other.of_batch(parse(messages([b""] * 2, subjects=[b"a", b"%05d" % number], subject_of=[0, 1])))

    assert held(fill) < other.held_bytes + 200_000


def test_rule_B1_the_bytes_of_names_are_those_that_are_held_and_come_back() -> None:
    names = [b"customer-%06d." % index + b"n" * (index % 200) for index in range(30_000)]
    subjects = Subjects()
    taken = held(lambda: subjects.numbers([bytes(bytearray(name)) for name in names]))
    assert taken <= subjects.held_bytes <= 3 * taken
    assert subjects.sweep([rows_of(5, 7), rows_of(7, 29_999)]) == 29_997
    assert subjects.held_bytes < taken / 100 and subjects.known == 3
    assert [subjects.names[number] for number in (5, 7, 29_999)] == [names[5], names[7], names[29_999]]
    # A name that was given back gets a new number: rows that still had the old one would never be another subject's.
    assert subjects.number(names[5]) == 5 and subjects.number(names[6]) == 30_000


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which every checkpoint looks which names are used."""
    monkeypatch.setattr(module, "SWEEP_BYTES", 0)
    monkeypatch.setattr(module, "SWEEP_GROWTH", 0)
    return World()


def send(world: World, name: str, subjects: list[bytes], after_ms: int) -> bool:
    """Send a message to each; whether they were taken."""
    world.send([wanted(1, after_ms, f"{name} to {each.decode()}", each)[0] for each in subjects])
    world.settle()
    refused = world.outside.refused
    assert all(isinstance(error, SlowDown) for _, error in refused)
    taken = not refused
    refused.clear()
    return taken


def test_rule_B1_names_go_with_the_rows_that_a_checkpoint_files_and_come_back_with_them(swept: World) -> None:
    world, near = swept, [b"near.%d" % index for index in range(3)]
    assert send(world, "a", FAR, 5 * HOUR_MS) and send(world, "b", near, 1_000)
    assert world.status("subjects") == 303
    world.checkpoint()
    assert world.status("subjects") == 3
    world.pass_ms(130_000)  # Two checkpoints: one that looks, and one that writes what became of it.
    assert world.status("subjects") == 0 and not world.server.targets and not world.state.scan(b"target/")
    assert send(world, "c", [FAR[7], near[1]], 5 * HOUR_MS)
    world.clock.advance(5 * HOUR_MS - 10_000)
    world.pass_ms(60_000)
    world.check_books()
    kept = [(kept.subject, body) for kept in world.outside.targets[0x7001].log for body in kept.bodies]
    assert len(kept) == 305 and all(body.split(b" to ")[1].rpartition(b"-")[0] == subject for subject, body in kept)


def test_rule_B1_new_subjects_are_refused_while_no_more_fit_and_known_ones_are_taken(
    swept: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BYTES_MAX", 100 * (module.NAME_BYTES + 8))
    assert send(swept, "a", FAR[:200], 5 * HOUR_MS) and not send(swept, "b", [b"other"], 5 * HOUR_MS)
    swept.outside.unanswered.clear()
    assert send(swept, "c", FAR[:5], 5 * HOUR_MS)
    assert any("subjects" in wait.what for wait in swept.core.standing.refuses())
    swept.checkpoint()
    assert send(swept, "d", [b"other"], 5 * HOUR_MS)


def test_a_target_that_has_no_subject_any_more_is_not_away(swept: World) -> None:
    world, target = swept, swept.target_of(b"near")

    def away() -> int:
        world.crash_target(target)
        world.settle()
        return world.status("targets_away")

    assert send(world, "a", [b"near"], 1_000)
    world.pass_ms(5_000)
    assert away() == 1, "its subject is noted"
    world.outside.targets[target].restart()
    world.pass_ms(130_000)
    assert not world.server.targets and away() == 0
    assert send(world, "b", [b"near"], 0)
    world.pass_ms(5_000)
    assert world.status("targets_away") == 1, "a message waits for it"
