"""The index of a realtime log: every batch with its subject, however many share a group, and no batch that lies."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from delayd.batch.batch import encode, encode_bare, encode_subject_table
from delayd.batch.columns import BatchKind, ColumnId, DispatchPart
from delayd.errors import DamagedData
from delayd.log.group import GroupKind, NewGroup
from delayd.machine.disk import RealDisk
from delayd.reading.files import target_index
from delayd.reading.files.directory import Directory, Role
from delayd.reading.files.target_index import TargetIndexer, read_target_rows
from tests.books import DELAY_ID, HOUR, REALTIME_ID, START_MS, Books

PART = DispatchPart(DELAY_ID, 1, 1, 0, 0, START_MS, HOUR)


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    books = Books(str(tmp_path))
    yield books
    books.close()


def append(books: Books, batches: list[bytes]) -> None:
    books.target.append([NewGroup(GroupKind.DATA, batches, 1, START_MS, 1, len(batches))], START_MS)
    books.target.flush()


def scan(books: Books) -> TargetIndexer:
    directories = [Directory(books.realtime, Role.REALTIME, REALTIME_ID)]
    indexer = TargetIndexer(RealDisk(), directories, [])
    indexer.scan(newer=False)
    return indexer


@pytest.mark.parametrize("mixed", [True, False])
def test_batches_of_many_subjects_keep_their_names_and_rows(
    books: Books, monkeypatch: pytest.MonkeyPatch, mixed: bool
) -> None:
    if not mixed:
        # Names that give the same word are compared as they are.
        monkeypatch.setattr(target_index, "MIXERS", np.zeros(32, np.uint64))
    names = [name * times for times in (1, 3, 9, 60) for name in ("a", "b", "a.b", "b.a")]
    expected: list[str] = []
    for group in range(3):
        batches = [
            encode_bare(
                PART._replace(batch_id=100 * group + number),
                (START_MS + number, 1_000 * group + number, 1),
                name.encode(),
                b"body" * number + bytes(-4 * number % 8),
                4 * number,
            )
            for number, name in enumerate(names)
        ]
        append(books, batches)
        expected += names
    index = scan(books).index()
    assert [index.subjects[number] for number in index.batches["subject"]] == expected
    rows = read_target_rows(RealDisk(), index, index.batches)
    assert rows.sequence.tolist() == [1_000 * group + number for group in range(3) for number in range(len(names))]
    assert (rows.deliver_at_ms % 1_000).tolist() == 3 * list(range(len(names)))
    part = read_target_rows(RealDisk(), index, index.batches, range(1_002, 1_005))
    assert part.sequence.tolist() == [1_002, 1_003, 1_004]
    assert [index.subjects[index.batches["subject"][batch]] for batch in part.batch_of] == names[2:5]


def hand_over(batch_id: int, rows: int, *, hour: int = HOUR, hashed: bool = True) -> bytes:
    """A batch whose rows say by their numbers which batch they are of."""
    sequences = np.arange(rows, dtype=np.uint64) + np.uint64(1_000 * batch_id)
    table = encode_subject_table([b"a"])
    columns: list[tuple[ColumnId, np.ndarray]] = [
        (ColumnId.DELIVER_AT_MS, sequences.astype(np.int64) + START_MS),
        (ColumnId.SEQUENCE, sequences),
        (ColumnId.BODY_END, np.full(rows, len(table), np.uint32)),
    ]
    columns += [(ColumnId.CONTENT_HASH, sequences + np.uint64(7))] if hashed else []
    part = PART._replace(batch_id=batch_id, hour=hour)
    return encode(BatchKind.DISPATCH, part, rows, columns, [table], 1)


def test_batches_that_state_no_hash_stand_beside_others(books: Books) -> None:
    append(books, [hand_over(n, 1 + n % 5, hour=HOUR + n % 2, hashed=n % 3 > 0) for n in range(1, 30)])
    index = scan(books).index()
    of_hour = index.batches["hour"] == HOUR
    for chosen in (np.ones(len(of_hour), np.bool_), of_hour, ~of_hour):
        rows = read_target_rows(RealDisk(), index, index.batches[chosen])
        numbers = rows.sequence // np.uint64(1_000)
        assert (rows.deliver_at_ms - START_MS).tolist() == rows.sequence.tolist()
        stated = np.where(numbers % np.uint64(3) > 0, rows.sequence + np.uint64(7), np.uint64(0))
        assert rows.hashes().tolist() == stated.tolist() and len(numbers)


def test_columns_are_proved_by_their_own_checksum(books: Books) -> None:
    batch = bytearray(hand_over(2, 3))
    last = int.from_bytes(batch[16:20], "little") - 8
    batch[last] ^= 1  # A content hash, which the group's checksum then covers as it is.
    append(books, [hand_over(1, 3), bytes(batch)])
    index = scan(books).index()
    with pytest.raises(DamagedData, match="the checksum of a batch's columns differs"):
        read_target_rows(RealDisk(), index, index.batches)


@pytest.mark.parametrize("lie", ["no sequences", "two subjects", "no subject", "long subject"])
def test_a_batch_that_no_delay_server_hands_over_is_damage(books: Books, lie: str) -> None:
    names = {"two subjects": [b"a", b"b"], "no subject": [], "long subject": [b"a" * 300]}.get(lie, [b"a"])
    due, sequence = np.array([START_MS], np.int64), np.array([1], np.uint64)
    table = encode_subject_table(names)
    columns = [(ColumnId.DELIVER_AT_MS, due), (ColumnId.SEQUENCE, sequence)]
    columns = columns[:1] if lie == "no sequences" else columns
    ends = [(ColumnId.BODY_END, np.array([len(table)], np.uint32))]
    append(books, [encode(BatchKind.DISPATCH, PART, 1, [*columns, *ends], [table], len(names))])
    with pytest.raises(DamagedData, match="no batch as a delay server hands it over"):
        scan(books)
