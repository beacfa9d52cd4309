"""What an audit reads: of one hour among many only what it needs, and each thing that it believes is proved."""

import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.directory import DELAY_ID, FIRST_HOUR, DirectoryWriter, Shape
from delayd.batch.batch import Batch, encode, encode_subject_table
from delayd.batch.columns import BatchKind, ColumnId, ProducerPart
from delayd.errors import DamagedData
from delayd.log.group import CommitGroup, GroupKind, NewGroup
from delayd.log.log import LogPlace, open_log
from delayd.log.segment import FileKind
from delayd.machine.disk import RealDisk
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.files.stored_groups import StoredGroup, read_known

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


def test_an_audit_of_one_hour_says_of_it_what_that_of_all_says(written: Path) -> None:
    (asked,) = audit(written, ASKED).hours
    assert asked == next(hour for hour in audit(written).hours if hour.hour == ASKED)


def test_rule_L5_a_flipped_bit_in_a_realtime_log_is_named_whichever_hour_is_asked_for(
    written: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(written, tmp_path / "copied")
    path = min((copied / "realtime" / "message").iterdir())
    data = bytearray(path.read_bytes())
    data[-2_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData) as error:
        audit(copied, ASKED)
    assert error.value.path == str(path)


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
