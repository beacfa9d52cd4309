"""An hour's dispatch log is read once, however often rows of it are looked up, and anew when it is another file."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.delay.ledger.files import HourOutcomes
from delayd.errors import DamagedData
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import NewPart, encode_outcomes
from delayd.log.segment import FileHeader, FileKind, Segment, create_segment
from delayd.outcome import Outcome
from delayd.testing.disk import MemoryDisk, MemoryFile

HOUR = 500_000
ROWS = 50  # Of a group.
PATH = "dispatch.log"


@pytest.fixture
def segment() -> Segment:
    return new_segment(MemoryDisk())


def new_segment(disk: MemoryDisk) -> Segment:
    return create_segment(disk, PATH, FileHeader(FileKind.DISPATCH, 1))


def append(segment: Segment, first: int, groups: int, appended_at_ms: int = 1_000) -> None:
    """Append groups of outcomes of rows that follow one another."""
    for number in range(groups):
        sequences = np.arange(ROWS, dtype=np.uint64) + np.uint64(first + number * ROWS)
        part = NewPart(sequences, np.full(ROWS, 7, np.int64), Outcome.DISPATCHED, target_offset=number)
        data = encode_outcomes(HOUR, [part])
        segment.append([NewGroup(GroupKind.DATA, [data], 1, appended_at_ms, 0, ROWS)])
    segment.flush()


def read_on(known: HourOutcomes, segment: Segment) -> None:
    known.read_on(segment, segment.end, lambda: None)


def found(known: HourOutcomes, segment: Segment, *sequences: int) -> set[int]:
    """Which of these rows have an outcome."""
    wanted = np.array(sequences, np.uint64)
    return set(known.find(segment, wanted).sequences.tolist()) & set(sequences)


def test_rows_are_found_wherever_their_outcomes_stand(segment: Segment) -> None:
    known = HourOutcomes()
    for piece in range(7):
        append(segment, 1 + 1_000 * piece, 3 + piece)
        read_on(known, segment)
        assert known.size_bytes == 12 * ROWS * sum(3 + each for each in range(piece + 1))
    assert found(known, segment, 1, 150, 151, 1_001, 6_450, 6_451) == {1, 150, 1_001, 6_450}
    assert len(known.find(segment, np.array([999], np.uint64)).sequences) == 0


def test_a_look_up_reads_what_is_new_and_what_it_wants(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    known = HourOutcomes()
    append(segment, 1, 400)
    read_on(known, segment)
    append(segment, 100_001, 1)
    read: list[int] = []
    pread = MemoryFile.pread

    def counted(file: MemoryFile, length: int, position: int) -> bytes:
        data = pread(file, length, position)
        read.append(len(data))
        return data

    monkeypatch.setattr(MemoryFile, "pread", counted)
    read_on(known, segment)
    assert found(known, segment, 7, 100_001) == {7, 100_001}
    assert sum(read) < 100_000 < segment.end


@pytest.mark.parametrize("more", [0, 1])
def test_another_file_is_noticed_also_when_it_is_as_long(more: int) -> None:
    disk, known = MemoryDisk(), HourOutcomes()
    segment = new_segment(disk)
    append(segment, 1, 3)
    read_on(known, segment)
    disk.remove(PATH)
    other = new_segment(disk)
    append(other, 1_001, 3 + more, appended_at_ms=2_000)
    with pytest.raises(DamagedData):
        read_on(known, other)


def test_damage_is_named_and_changes_nothing_of_what_is_known(segment: Segment) -> None:
    known = HourOutcomes()
    append(segment, 1, 3)
    read_on(known, segment)
    end = segment.end
    append(segment, 1_001, 1)
    segment.file.pwritev([b"xxxx"], segment.position(end) + 100)
    with pytest.raises(DamagedData):
        read_on(known, segment)
    assert known.end == end
    assert found(known, segment, 1, 1_001) == {1}
