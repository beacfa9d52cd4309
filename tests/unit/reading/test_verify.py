"""Verification names damage with path and position, reports torn tails, and reads on."""

from pathlib import Path

import pytest

from delayd.errors import BadArgument
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.reading.verify import FileReport, VerifyReport, verify_directory
from tests.books import HOUR, HOUR_MS, REALTIME_ID, START_MS, Books


@pytest.fixture
def books(tmp_path: Path) -> Books:
    """Two hours: four files of groups in the delay server's directory, its checkpoint, and the target's log."""
    books = Books(str(tmp_path))
    for hour in range(2):
        rows = books.send([START_MS + hour * HOUR_MS + row for row in range(10)])
        books.checkpoint()
        books.hand_over(rows[:5])
        books.hand_over(rows[5:])
    books.close()
    return books


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


def message_log(books: Books) -> Path:
    return next(Path(f"{books.delay}/message").iterdir())


def report_on(report: VerifyReport, path: Path) -> FileReport:
    (found,) = [file for file in report.files if file.path == str(path)]
    return found


def test_sound_files_are_counted(books: Books) -> None:
    report = verify_directory(books.root)
    assert report.sound and not report.torn
    counted = [(file.kind, file.groups, file.batches, file.rows) for file in report.files]
    assert counted == [
        ("checkpoint", 0, 0, 0),
        ("message", 2, 2, 20),
        ("schedule", 1, 1, 10),
        ("schedule", 1, 1, 10),
        ("dispatch", 2, 2, 10),
        ("dispatch", 2, 2, 10),
        ("realtime", 4, 4, 20),
    ]


def test_a_flipped_bit_below_a_durable_offset_is_damage_at_its_group(books: Books) -> None:
    path = message_log(books)
    flip(path, FILE_HEADER_BYTES + 200)
    report = verify_directory(books.root)
    (damaged,) = report.damaged
    assert (damaged.path, damaged.position) == (str(path), FILE_HEADER_BYTES)
    assert damaged.damage == "the checksum of the batches differs"
    assert len(report.files) == 7 and not report.sound


def test_rule_L5_bytes_behind_the_last_group_that_checks_are_a_torn_tail(books: Books) -> None:
    path = books.path_of("dispatch")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-8])
    with message_log(books).open("ab") as file:
        file.write(b"GRUP and half a header")
    report = verify_directory(books.root)
    assert report.sound
    torn = {tail.path: tail for tail in report.torn}
    assert torn[str(path)].position < size - 8 and torn[str(path)].reason == "the batches are cut short"
    assert torn[str(message_log(books))].size_bytes == 22
    assert report_on(report, path).groups == 1


def test_a_schedule_log_that_is_shorter_than_its_checkpoint_is_damage(books: Books) -> None:
    path = books.path_of("schedule")
    path.write_bytes(path.read_bytes()[:FILE_HEADER_BYTES])
    (damaged,) = verify_directory(books.root).damaged
    assert damaged.path == str(path) and "more bytes are there" in damaged.damage


def test_a_schedule_log_of_a_checkpoint_that_did_not_finish_is_sound(books: Books) -> None:
    again = Books(books.root + "/again")
    again.send([START_MS])
    again.checkpoint(publish=False)
    again.close()
    assert verify_directory(again.root).sound


def test_a_file_under_the_name_of_another_hour_is_damage(books: Books) -> None:
    books.path_of("schedule", HOUR + 1).rename(books.path_of("schedule", HOUR))
    damaged = verify_directory(books.root).damaged
    assert "its header says that it is 2026112017.log" in damaged[0].damage


def test_a_file_of_another_directory_is_damage(books: Books) -> None:
    target = next(Path(f"{books.realtime}/message").iterdir())
    other = Path(f"{books.realtime}/message/{2**40:020}.log")
    header = bytearray(message_log(books).read_bytes()[:FILE_HEADER_BYTES])
    other.write_bytes(header)
    damaged = verify_directory(books.root).damaged
    assert [file.path for file in damaged] == [str(other)] and target.exists()


def test_segments_must_follow_one_another(tmp_path: Path) -> None:
    books = Books(str(tmp_path), segment_bytes=1_000)
    for _ in range(20):
        books.send([START_MS])
    books.close()
    first, second, *others = sorted(Path(f"{books.delay}/message").iterdir())
    assert verify_directory(books.root).sound and others
    second.unlink()
    (damaged,) = verify_directory(books.root).damaged
    assert damaged.path == str(others[0]) and "does not follow the file before it" in damaged.damage
    assert first.exists()


def test_a_file_of_a_newer_delayd_is_named(books: Books) -> None:
    path = books.path_of("dispatch")
    flip(path, 8)
    (damaged,) = verify_directory(books.root).damaged
    assert "format version" in damaged.damage or "checksum of the file header" in damaged.damage


def test_both_slots_of_a_checkpoint_damaged_are_damage(books: Books) -> None:
    path = Path(f"{books.delay}/checkpoint")
    flip(path, 20)
    assert verify_directory(books.root).sound
    flip(path, (4 << 20) + 20)
    assert [file.path for file in verify_directory(books.root).damaged] == [str(path)]


def test_one_servers_own_directory_can_be_verified(books: Books) -> None:
    report = verify_directory(books.realtime)
    assert [file.kind for file in report.files] == ["realtime"] and REALTIME_ID


def test_a_folder_without_servers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="holds no messages of delayd"):
        verify_directory(str(tmp_path))


def test_progress_names_files_read_and_all_files(books: Books) -> None:
    seen: list[tuple[int, int]] = []
    verify_directory(books.root, progress=lambda done, count: seen.append((done, count)))
    assert seen == [(done, 7) for done in range(1, 8)]
