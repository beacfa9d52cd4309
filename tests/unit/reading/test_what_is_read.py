"""What an audit reads: of one hour among many only what it needs, and each thing that it believes is proved."""

from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.directory import DELAY_ID, FIRST_HOUR, DirectoryWriter, Shape
from delayd.batch import Batch, BatchKind, ColumnId, ProducerPart
from delayd.disk import RealDisk, RealFile
from delayd.encode import encode, encode_subject_table
from delayd.errors import DamagedData
from delayd.log.group import Group, GroupKind, NewGroup
from delayd.log.log import LogPlace, open_log
from delayd.log.segment import FileKind
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.skim import Skimmed, skim_log

HOURS = 20
SHAPE = Shape(20_000, hours=HOURS, batch_rows=200, segment_bytes=1 << 20)
ASKED = FIRST_HOUR + 7
NOW_MS = 2_000_000_000_000


class Reads:
    """Counts what is read of files, by the folder of a log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size_bytes: Counter[str] = Counter()
        read = RealFile.pread

        def pread(file: RealFile, size: int, position: int) -> bytes:
            data = read(file, size, position)
            server, log = str(file._path).split("/")[-3:-1]
            self.size_bytes[f"{server}/{log}"] += len(data)
            return data

        monkeypatch.setattr(RealFile, "pread", pread)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written")
    DirectoryWriter(str(path), SHAPE).write()
    return path


def audit(path: Path, hour: int | None = None) -> AuditReport:
    return audit_directory(str(path), now_ms=NOW_MS, hours=None if hour is None else [hour])


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_one_hour_among_many_reads_a_part_of_the_message_log(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    report = audit(written, ASKED)
    assert report.balanced
    assert reads.size_bytes["delay/message"] < size_of(written / "delay" / "message") / 4


def test_one_hour_says_what_the_audit_of_all_says_of_it(written: Path) -> None:
    whole = audit(written)
    assert whole.balanced
    assert len(whole.hours) == HOURS
    assert audit(written, ASKED).hours == tuple(hour for hour in whole.hours if hour.hour == ASKED)


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


def batches_of(place: LogPlace) -> Generator[tuple[Group | Skimmed, int, Batch]]:
    """As a reader goes on: a group at a time."""
    for group in skim_log(RealDisk(), place, 0, end_of(place)):
        for offset, batch in group.batches():
            yield group, offset, batch


def test_large_batches_are_skimmed_and_small_ones_read_whole(place: LogPlace) -> None:
    assert [type(group) for group, _, _ in batches_of(place)] == [Skimmed, *[Group] * 4, *[Skimmed] * 3]
    assert len(list(Path(place.folder).iterdir())) > 1
    for group, offset, batch in batches_of(place):
        assert batch.int64s(ColumnId.DELIVER_AT_MS).tolist() == list(range(batch.count))
        if isinstance(group, Skimmed):
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
    assert isinstance(group, Skimmed)
    with pytest.raises(DamagedData, match="checksum of its heap differs"):
        group.whole(offset)
    groups.close()


def test_a_segment_whose_last_group_is_gone_is_named(place: LogPlace) -> None:
    path = min(Path(place.folder).iterdir())
    first = next(skim_log(RealDisk(), place, 0, end_of(place)))
    path.write_bytes(path.read_bytes()[: 64 + first.end])
    with pytest.raises(DamagedData) as error:
        list(batches_of(place))
    assert error.value.path == str(path)
