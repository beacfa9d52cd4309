"""Verification names damage with path and position, reports torn tails, and reads on."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from delayd.batch.content import Hasher
from delayd.delay.keys.run import write_run
from delayd.errors import BadArgument, Unreadable
from delayd.log.checkpoint import CheckpointFile
from delayd.log.consume import ENTRY_BYTES, SEGMENT_ENTRIES, ConsumeTail, append_entries, consume_place
from delayd.log.group import MAGIC_BYTES
from delayd.log.key_run import STATE_KEY, KnownRuns, run_path
from delayd.log.segment import FILE_HEADER_BYTES, FileHeader, FileKind
from delayd.machine.disk import File, RealDisk
from delayd.machine.state import LmdbState
from delayd.reading.files.directory import find_directories
from delayd.reading.verify import FileReport, FileState, VerifyReport, verify_directory, verify_files
from tests.books import DELAY_ID, HOUR, HOUR_MS, REALTIME_ID, START_MS, Books
from tests.worlds.keys import KeyRow, entries_of


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


def flip(path: Path, position: int) -> Path:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)
    return path


def message_log(books: Books) -> Path:
    return next(Path(f"{books.delay}/message").iterdir())


def report_on(report: VerifyReport, path: Path) -> FileReport:
    (found,) = [file for file in report.files if file.path == str(path)]
    return found


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def counted_and_cut(books: Books) -> Path:
    books.see_realtime(START_MS)
    Path(f"{books.realtime}/pull").mkdir()
    return cut(next(Path(f"{books.realtime}/message").iterdir()), FILE_HEADER_BYTES - 1)


def without_a_group(books: Books) -> Path:
    """The end of a message log that an outcome names is gone."""
    Path(f"{books.delay}/checkpoint").unlink()
    path = message_log(books)
    return cut(path, path.read_bytes().rindex(MAGIC_BYTES))


def without_a_segment(books: Books) -> Path:
    *_, second, third = segments(Path(books.root))
    for path in Path(books.root).glob("delay*"):
        if path.name == "delay":
            shutil.rmtree(path)
    Path(f"{books.root}/segmented/delay").rename(books.delay)
    Path(books.delay, "message", second.name).unlink()
    return Path(books.delay, "message", third.name)


def empty_state(books: Books) -> Path:
    LmdbState(f"{books.delay}/state.lmdb").close()
    return Path(f"{books.delay}/state.lmdb/data.mdb")


def value_of_a_state(books: Books) -> Path:
    state = LmdbState(f"{books.delay}/state.lmdb")
    state.commit([(b"target/mails", b"1"), (b"epoch", b"2")])
    state.close()
    assert verify_directory(books.root).sound
    path = Path(f"{books.delay}/state.lmdb/data.mdb")
    return flip(path, path.read_bytes().rindex(b"target/mails") + len(b"target/mails"))


def both_slots(books: Books) -> Path:
    path = Path(f"{books.delay}/checkpoint")
    flip(path, 20)
    assert verify_directory(books.root).sound
    return flip(path, (4 << 20) + 20)


def page_of_entries(books: Books) -> Path:
    first, second = consume_files(books, SEGMENT_ENTRIES + 5)
    report = verify_directory(books.root)
    assert report.sound and [report_on(report, path).rows for path in (first, second)] == [SEGMENT_ENTRIES, 5]
    return flip(first, FILE_HEADER_BYTES + 5_000)


def entry_in_two(books: Books) -> Path:
    first, second = consume_files(books, SEGMENT_ENTRIES + 5)
    cut(second, second.stat().st_size - 3)
    torn = report_on(verify_directory(books.root), second)
    assert (torn.state, torn.rows) == (FileState.TORN, 4) and "ends within an entry" in torn.sentence
    return cut(first, first.stat().st_size - ENTRY_BYTES)


def run_of_keys(books: Books, fault: str) -> Path:
    path = write_key_run(books)
    assert verify_directory(books.root).sound
    if fault == "gone":
        path.unlink()
    elif fault == "another":
        header = FileHeader(FileKind.KEYS, DELAY_ID, 0, 1, START_MS)
        rows = [KeyRow((b"orders", b"other"), 1)]
        write_run(RealDisk(), books.delay, header, 7, entries_of(rows, Hasher(7)), lambda: None)
    else:
        path.write_bytes(bytes(128) + path.read_bytes()[128:])
    return path


HARM: dict[str, tuple[Callable[[Books], Path], str]] = {
    "a flipped bit": (lambda books: flip(message_log(books), FILE_HEADER_BYTES + 200), "checksum of the batches"),
    "a group that an outcome names": (without_a_group, "the log ends there, and message "),
    "a file of a newer delayd": (lambda books: flip(books.path_of("dispatch"), 8), ""),
    "a short file": (lambda books: cut(books.path_of("schedule"), FILE_HEADER_BYTES), "more bytes are there"),
    "no header": (counted_and_cut, "a checkpoint counts what is in it"),
    "a segment in between": (without_a_segment, "does not follow the file before it"),
    "both slots of a checkpoint": (both_slots, ""),
    "a page of a consume log": (page_of_entries, "the checksum of the page differs"),
    "an entry in two": (entry_in_two, "a later segment exists"),
    "a value of a state": (value_of_a_state, "the value of target/mails in "),
    "a block of a run of keys": (lambda books: flip(write_key_run(books), 1428), ""),
    "an empty state": (empty_state, "it holds nothing, and this server has lived"),
    **{
        f"a run of keys: {fault}": (partial(run_of_keys, fault=fault), "the state names")
        for fault in ("gone", "another", "unfinished")
    },
}


@pytest.mark.parametrize("harm", HARM)
def test_damage_is_named_with_its_file_and_nothing_else_is(books: Books, harm: str) -> None:
    act, said = HARM[harm]
    path = act(books)
    damaged = {file.path: file.sentence for file in verify_directory(books.root).damaged}
    assert said in damaged.pop(str(path)), damaged
    # What is not where its checkpoint counts it is named too.
    assert all("gone" in sentence for sentence in damaged.values()), damaged


def test_rule_L5_bytes_behind_the_last_group_that_checks_are_a_torn_tail(books: Books) -> None:
    path = books.path_of("dispatch")
    size = path.stat().st_size
    cut(path, size - 8)
    with message_log(books).open("ab") as file:
        file.write(b"GRUP and half a header")
    report = verify_directory(books.root)
    torn = {tail.path: tail for tail in report.torn}
    assert (
        report.sound and torn[str(path)].position < size - 8 and torn[str(path)].reason == "the batches are cut short"
    )
    assert torn[str(message_log(books))].size_bytes == 22
    assert report_on(report, path).groups == 1 and report_on(report, path).state is FileState.TORN
    assert report_on(report, path).sentence == torn[str(path)].sentence


def test_a_file_whose_creation_did_not_finish_is_no_damage_in_the_last_place_only(tmp_path: Path) -> None:
    first, _, last = segments(tmp_path)
    cut(last, 10)
    report = verify_directory(str(tmp_path / "segmented"))
    assert report.sound and "creation" in report_on(report, last).sentence
    first.write_bytes(b"")
    (damaged,) = verify_directory(str(tmp_path / "segmented")).damaged
    assert damaged.path == str(first) and "the file header is missing" in damaged.damage


def test_a_single_file_is_what_the_directory_around_it_says(books: Books, tmp_path: Path) -> None:
    path, log = books.path_of("schedule"), tmp_path / "copy.log"
    shutil.copy(cut(path, FILE_HEADER_BYTES), log)
    (damaged,) = verify_files([str(path)]).files
    assert "more bytes are there" in damaged.damage
    assert verify_files([str(log)]).sound, "nothing around the copy says how long it was"
    renamed = books.path_of("dispatch", HOUR + 9)
    renamed.parent.mkdir(exist_ok=True)
    shutil.copy(books.path_of("dispatch"), renamed)
    (report,) = verify_files([str(renamed)]).files
    assert "its header says that it is 2026112016.log" in report.damage
    strange, notes = tmp_path / f"{0:020}.log", tmp_path / "notes.log"
    for each in (strange, notes):
        each.write_bytes(b"x" * 100)
    assert "this is not a file of delayd" in verify_files([str(strange)]).files[0].damage
    with pytest.raises(BadArgument, match=r"notes.log is not a log file; it is a file that delayd did not write; give"):
        verify_files([str(notes)])
    CheckpointFile(books.disk, str(tmp_path), DELAY_ID).close()
    (report,) = verify_files([f"{tmp_path}/checkpoint"]).files
    assert (report.kind, report.state) == ("checkpoint", FileState.EMPTY)


class AppendedMeanwhile(RealDisk):
    """A disk on which a running server finishes an append between a reader's look at the end of its message log and
    that at its outcomes.
    """

    def __init__(self, path: Path, whole: bytes) -> None:
        super().__init__()
        self._path, self._whole, self._read = path, whole, False

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        self._read = self._read or "/dispatch/" in path
        return super().open(path, write=write, create=create)

    def list_folder(self, path: str) -> list[str]:
        if self._read and path.endswith("/dispatch"):
            self._path.write_bytes(self._whole)
        return super().list_folder(path)


def test_rule_L5_a_group_that_a_running_server_finishes_before_its_outcome_is_no_damage(books: Books) -> None:
    Path(f"{books.delay}/checkpoint").unlink()
    path = message_log(books)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    report = verify_directory(books.root, disk=AppendedMeanwhile(path, whole))
    assert path.read_bytes() == whole and report.sound
    path.write_bytes(whole[:-8])
    assert not verify_directory(books.root).sound


def consume_files(books: Books, count: int) -> list[Path]:
    """A consume log of ``count`` entries beside the target's message log."""
    place = consume_place(books.realtime, REALTIME_ID, 1)
    unsynced: list[File] = []
    append_entries(RealDisk(), place, ConsumeTail(), np.arange(count, dtype=np.uint64), START_MS, unsynced)
    for file in unsynced:
        file.sync()
        file.close()
    return sorted(Path(place.folder).iterdir())


def write_key_run(books: Books, entries: int = 200) -> Path:
    """A run in the delay server's directory."""
    rows = [KeyRow((b"orders", b"key %d" % number), number + 1) for number in range(entries)]
    header = FileHeader(FileKind.KEYS, DELAY_ID, 0, 1, START_MS)
    name = write_run(RealDisk(), books.delay, header, 7, entries_of(rows, Hasher(7)), lambda: None)
    state = LmdbState(f"{books.delay}/state.lmdb")
    state.commit([(STATE_KEY, KnownRuns(7, 2, (name,)).encode())])
    state.close()
    return Path(run_path(books.delay, 1))


def test_a_run_of_keys_that_is_being_written_is_no_damage(books: Books) -> None:
    path = write_key_run(books)
    beside = Path(run_path(books.delay, 2))
    beside.write_bytes(bytes(128) + path.read_bytes()[128:4096])
    report = verify_directory(books.root)
    assert report.sound and report_on(report, beside).state is FileState.TORN


def test_a_copy_without_the_folder_of_the_index_of_keys_is_sound(books: Books) -> None:
    shutil.rmtree(write_key_run(books).parent)
    assert verify_directory(books.root).sound


def segments(tmp_path: Path) -> list[Path]:
    """The files of a message log of several segments, alone in its directory."""
    books = Books(str(tmp_path / "segmented"), segment_bytes=1)
    for _ in range(3):
        books.send([START_MS])
    books.close()
    return sorted(Path(f"{books.delay}/message").iterdir())


def test_rule_L10_a_first_file_that_cannot_be_read_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    first, second, _ = segments(tmp_path)
    first.unlink()
    first.mkdir()  # The system opens it and reads nothing of it, as with EIO.
    report = verify_directory(str(tmp_path / "segmented"))
    assert report_on(report, first).state is FileState.DAMAGED
    assert "EISDIR" in str(report_on(report, first).damage)
    assert report_on(report, second).state is FileState.OK
    with pytest.raises(Unreadable, match=first.name):
        find_directories(RealDisk(), str(tmp_path / "segmented"))
