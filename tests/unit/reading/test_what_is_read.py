"""What an audit reads: of one hour among many only what it needs, and each thing that it believes is proved."""

import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from numpy.typing import NDArray

from bench.directory import DELAY_ID, FIRST_HOUR, REALTIME_ID, DirectoryWriter, Shape
from delayd.batch.batch import Batch, encode, encode_subject_table
from delayd.batch.columns import BatchKind, ColumnId, ProducerPart
from delayd.errors import DamagedData
from delayd.log.group import CommitGroup, GroupKind, NewGroup, content_position
from delayd.log.log import LogPlace, open_log
from delayd.log.segment import FileKind, create_segment, open_segment
from delayd.log.segment_index import IndexedGroup
from delayd.machine.disk import RealDisk
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.files.directory import Directory, Role
from delayd.reading.files.stored_groups import StoredGroup, read_by_index, read_known
from delayd.reading.files.target_index import TargetIndexer
from delayd.reading.verify import verify_directory

HOURS = 20
SHAPE = Shape(20_000, hours=HOURS, batch_rows=200, segment_bytes=1 << 20)
ASKED = FIRST_HOUR + 7
NOW_MS = 2_000_000_000_000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written")
    DirectoryWriter(str(path), SHAPE).write()
    return path


def audit(path: Path, hour: int | None = None) -> AuditReport:
    return audit_directory(str(path), now_ms=NOW_MS, hours=None if hour is None else [hour])


Records = list[bytearray]


def in_front(position: int, change: int) -> Callable[[Records], None]:
    """A lie in the front of each batch of each group, under a header's checksum that holds."""

    def lie(records: Records) -> None:
        for record in records:
            count = int.from_bytes(record[20:24], "little")
            for number in range(count if record[:4] == bytes(4) else 0):
                begin = 8 + content_position(count) + 112 * number
                record[begin + position] ^= change
                crc = crc32c(record[begin + 40 : begin + 96], crc32c(record[begin : begin + 36]))
                record[begin + 36 : begin + 40] = crc.to_bytes(4, "little")

    return lie


def a_group_left_out(records: Records) -> None:
    del records[1]


LIES = {
    "hour": in_front(88, 1),
    "origin": in_front(40, 1),
    "rows": in_front(12, 1),
    "batch id": in_front(56, 1),
    "claimed": in_front(80, 1),
    "watermark": in_front(72, 1),
    "columns checksum": in_front(28, 1),
    "group": a_group_left_out,
}


def tell(path: Path, lie: Callable[[Records], None]) -> None:
    """Write an index anew with a lie in it, under checksums of the file that hold."""
    segment = open_segment(RealDisk(), str(path), FileKind.INDEX, None, write=False)
    header, groups = segment.header, list(segment.scan(segment.header.base_offset, None))
    (batch,) = [batch for group in groups for _, batch in group.batches()]
    segment.close()
    records, position = [], 0
    while position < len(batch.heap):
        size = int.from_bytes(batch.heap[position + 4 : position + 8], "little")
        records.append(bytearray(batch.heap[position : position + size]))
        position += size
    lie(records)
    path.unlink()
    file = create_segment(RealDisk(), str(path), header)
    told = encode(BatchKind.INDEX, None, 1, [], [bytes(record) for record in records])
    file.append([NewGroup(GroupKind.DATA, [told], 1, 1, 0, 1), NewGroup(GroupKind.TICK, [], 1, 1)])
    file.flush()
    file.close()


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "copied")
    return tmp_path / "copied"


def sources(path: Path) -> list[type]:
    """How each group of the realtime log is read."""
    place = LogPlace(f"{path}/realtime/message", FileKind.REALTIME, REALTIME_ID)
    return [type(group) for group in read_by_index(RealDisk(), place, (0, end_of(place), end_of(place)), [])]


def test_an_index_gives_what_its_segment_gives(written: Path) -> None:
    disk, stop = RealDisk(), end_of(LogPlace(f"{written}/realtime/message", FileKind.REALTIME, REALTIME_ID))
    assert set(sources(written)) == {IndexedGroup, CommitGroup}
    directory = [Directory(f"{written}/realtime", Role.REALTIME, REALTIME_ID)]
    indexes = []
    for by_index in (True, False):
        indexer = TargetIndexer(disk, directory, [], by_index=by_index)
        indexer.scan(newer=False)
        indexes.append(indexer.index())
    assert stop > 0
    assert indexes[0].batches.tobytes() == indexes[1].batches.tobytes()
    assert indexes[0].subjects == indexes[1].subjects
    assert not indexes[0].faults


@pytest.mark.parametrize("lie", LIES)
def test_rule_L9_an_index_that_lies_hides_nothing(written: Path, copied: Path, lie: str) -> None:
    before = sources(copied)
    paths = sorted((copied / "realtime" / "index").iterdir())
    for path in paths:
        tell(path, LIES[lie])
    after = sources(copied)
    assert len(after) == len(before)
    assert IndexedGroup not in after
    assert audit(copied, ASKED).hours == audit(written, ASKED).hours
    damaged = verify_directory(str(copied)).damaged
    assert sorted(file.path for file in damaged) == [str(path) for path in paths]


@pytest.mark.parametrize("how", ["gone", "torn", "flipped", "another segment's", "empty"])
def test_rule_L9_without_a_whole_index_the_segment_is_read(written: Path, copied: Path, how: str) -> None:
    first, second, *_ = sorted((copied / "realtime" / "index").iterdir())
    data = bytearray(first.read_bytes())
    if how == "gone":
        first.unlink()
    elif how == "flipped":
        data[300] ^= 1
        first.write_bytes(data)
    else:
        first.write_bytes({"torn": bytes(data[:-80]), "empty": b""}.get(how, second.read_bytes()))
    assert sources(copied)[0] is CommitGroup
    assert audit(copied, ASKED).hours == audit(written, ASKED).hours


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LogPlace]:
    """A log of groups that are skimmed: one large batch each, and one of small batches."""
    place = LogPlace(f"{tmp_path}/message", FileKind.MESSAGE, DELAY_ID, 200_000)
    log = open_log(RealDisk(), place, 0)
    sequence = 1
    for rows in (400, 3, 400, 400, 400):
        batches = [message_batch(rows)] * (1 if rows > 3 else 4)
        count = rows * len(batches)
        log.append([NewGroup(GroupKind.DATA, batches, 1, 1, sequence, count)], 1)
        log.flush()
        sequence += count
    log.close()
    yield place


def message_batch(rows: int) -> bytes:
    table = encode_subject_table([b"orders"])
    ends = np.arange(1, rows + 1, dtype=np.uint32) * 200 + len(table)
    columns: list[tuple[ColumnId, NDArray[np.generic]]] = [
        (ColumnId.DELIVER_AT_MS, np.arange(rows, dtype=np.int64)),
        (ColumnId.BODY_END, ends),
    ]
    return encode(BatchKind.PRODUCER, ProducerPart(1, 1, 0), rows, columns, [table, bytes(200 * rows)], 1)


def end_of(place: LogPlace) -> int:
    last = sorted(Path(place.folder).iterdir())[-1]
    return int(last.stem) + last.stat().st_size - 64


def batches_of(place: LogPlace) -> Generator[tuple[CommitGroup | StoredGroup, int, Batch]]:
    """As a reader goes on: a group at a time."""
    for group in read_known(RealDisk(), place, (0, end_of(place), end_of(place)), [], whole=False):
        for offset, batch in group.batches():
            yield group, offset, batch


def test_large_batches_are_skimmed_and_small_ones_read_whole(place: LogPlace) -> None:
    assert [type(group) for group, _, _ in batches_of(place)] == [StoredGroup, *[CommitGroup] * 4, *[StoredGroup] * 3]
    assert len(list(Path(place.folder).iterdir())) > 1
    for group, offset, batch in batches_of(place):
        assert batch.int64s(ColumnId.DELIVER_AT_MS).tolist() == list(range(batch.count))
        if isinstance(group, StoredGroup):
            assert bytes(group.whole(offset).buffer) == message_batch(400)


@pytest.mark.parametrize("where", ["group header", "batch header", "columns", "table", "file header"])
def test_rule_L5_damage_in_what_is_skimmed_is_named(place: LogPlace, where: str) -> None:
    position = {"group header": 64 + 40, "table": 64 + 80, "batch header": 64 + 88 + 12, "columns": 64 + 88 + 400}
    path = sorted(Path(place.folder).iterdir())[1 if where == "file header" else 0]
    data = bytearray(path.read_bytes())
    data[position.get(where, 20)] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData) as error:
        list(batches_of(place))
    assert error.value.path == str(path)


def test_rule_L5_damage_in_a_body_is_named_where_it_is_asked_for(place: LogPlace) -> None:
    path = min(Path(place.folder).iterdir())
    data = bytearray(path.read_bytes())
    data[60_000] ^= 1
    path.write_bytes(data)
    assert len(list(batches_of(place))) == 8
    group, offset, _ = next(groups := batches_of(place))
    assert isinstance(group, StoredGroup)
    with pytest.raises(DamagedData, match="checksum of its heap differs"):
        group.whole(offset)
    groups.close()
