"""Names of subjects: bounded in bytes, given back when no row in memory has them, and never another row's."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.delay import subjects as module
from delayd.delay.producers import AcceptedBatch
from delayd.delay.rows import ROW, new_rows
from delayd.delay.state_values import TARGET_PREFIX
from delayd.delay.subjects import TABLES_BYTES_MAX, Subjects
from delayd.errors import DelaydError, SlowDown
from delayd.testing.clock import START_MS
from tests.batches import messages
from tests.worlds.delay import World

HOUR_MS = 3_600_000


def rows_of(numbers: list[int]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    rows = new_rows(len(numbers)) if numbers else np.empty(0, ROW)
    rows["subject"] = numbers
    return rows


def test_rule_B1_tables_that_never_repeat_are_remembered_within_their_bytes() -> None:
    names = [b"customer-%06d.orders" % index for index in range(5_000)]
    subjects, draw = Subjects(), random.Random(1)
    subjects.numbers(names)
    tables = [
        parse(messages([b""] * count, subjects=picked, subject_of=range(count)))
        for count in (3, 150, 2_000)
        for picked in (draw.sample(names, count) for _ in range(3_000 // count))
    ]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            for batch in tables:
                found = subjects.of_batch(batch)
                assert [subjects.names[number] for number in found[:3]] == batch.subjects()[:3]
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < TABLES_BYTES_MAX and subjects.known == 5_000


def test_rule_B1_the_bytes_of_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLES_BYTES_MAX", 100_000)
    subjects = Subjects()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(6_000):
            subjects.of_batch(parse(messages([b""] * 2, subjects=[b"a", b"%05d" % number], subject_of=[0, 1])))
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < subjects.held_bytes + 200_000


def test_rule_B1_the_bytes_of_names_are_those_that_are_held_and_come_back() -> None:
    names = [b"customer-%06d." % index + b"n" * (index % 200) for index in range(30_000)]
    subjects = Subjects()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        subjects.numbers([bytes(bytearray(name)) for name in names])
        held = tracemalloc.get_traced_memory()[0] - before
        assert held <= subjects.held_bytes <= 3 * held
        assert subjects.sweep([rows_of([5, 7]), rows_of([7, 29_999])]) == 29_997
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert left < held / 2 and subjects.known == 3
    assert [subjects.names[number] for number in (5, 7, 29_999)] == [names[5], names[7], names[29_999]]
    # A name that was given back gets a new number: rows that still had the old one would never be another subject's.
    assert subjects.number(names[5]) == 5 and subjects.number(names[6]) == 30_000


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checkpoint looks which names are used."""
    monkeypatch.setattr(module, "SWEEP_BYTES", 0)
    monkeypatch.setattr(module, "SWEEP_GROWTH", 0)


def send(world: World, number: int, names: list[bytes], due_ms: int) -> list[AcceptedBatch | DelaydError]:
    data = messages(
        [b"%d to %s" % (number, name) for name in names],
        due=[due_ms] * len(names),
        subjects=names,
        subject_of=range(len(names)),
        part=ProducerPart(9, number, number),
    )
    heard: list[AcceptedBatch | DelaydError] = []
    world.core.send(parse(data), lambda what, duplicate: heard.append(what))
    world.settle()
    return heard


def delivered(world: World) -> dict[bytes, bytes]:
    """Bodies at the targets, with their subject."""
    found: dict[bytes, bytes] = {}
    for target in world.outside.targets.values():
        for kept in target.log:
            for body in kept.bodies:
                assert body not in found
                found[body] = kept.subject
    return found


def test_rule_B1_names_go_with_the_rows_that_a_checkpoint_files_and_come_back_with_them(swept: None) -> None:
    world = World()
    far = [b"far.%04d" % index for index in range(300)]
    near = [b"near.%d" % index for index in range(3)]
    send(world, 1, far, START_MS + 5 * HOUR_MS)
    send(world, 2, near, START_MS + 1_000)
    assert world.core.standing.counters()["subjects"] == 303
    world.checkpoint()
    assert world.core.standing.counters()["subjects"] == 3
    world.pass_ms(130_000)  # Two checkpoints: one that looks, and one that writes what became of it.
    assert world.core.standing.counters()["subjects"] == 0 and not world.core.handoff.dispatcher.targets
    assert not list(world.state.scan(TARGET_PREFIX))
    send(world, 3, [far[7], near[1]], START_MS + 5 * HOUR_MS)
    world.clock.advance(5 * HOUR_MS - 10_000)
    world.pass_ms(60_000)
    found = delivered(world)
    assert len(found) == 305
    assert all(body.split(b" to ")[1] == subject for body, subject in found.items())


def test_rule_B1_new_subjects_are_refused_while_no_more_fit_and_known_ones_are_taken(
    swept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BYTES_MAX", 100 * (module.NAME_BYTES + 8))
    world = World()
    far = [b"far.%04d" % index for index in range(200)]
    assert isinstance(send(world, 1, far, START_MS + 5 * HOUR_MS)[0], AcceptedBatch)
    assert isinstance(send(world, 2, [b"other"], START_MS + 5 * HOUR_MS)[0], SlowDown)
    assert isinstance(send(world, 2, far[:5], START_MS + 5 * HOUR_MS)[0], AcceptedBatch)
    assert any("subjects" in wait.what for wait in world.core.standing.refuses())
    world.checkpoint()
    assert isinstance(send(world, 3, [b"other"], START_MS + 5 * HOUR_MS)[0], AcceptedBatch)
