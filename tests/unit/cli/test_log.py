"""Log files on the command line: whether they check, and what they hold."""

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest

from delayd.log.consume import ConsumeTail, append_entries, consume_place, entries_of
from delayd.log.control import Ended, encode_known
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import ENDED
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.machine.disk import File, RealDisk
from delayd.machine.state import LmdbState
from delayd.outcome import Reason
from tests.batches import messages
from tests.books import HOUR, START_MS, Books

from .runner import Ran, run


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Three messages, filed and handed over, in logs of several segments."""
    books = Books(str(tmp_path), segment_bytes=1)
    books.send([START_MS, START_MS + 1], subjects=("orders", "bills"))
    books.send([START_MS + 2])
    books.tick(START_MS)
    books.checkpoint()
    books.hand_over([1, 2, 3])
    books.hello(3)
    yield books
    books.close()


def _message_files(books: Books) -> list[Path]:
    return sorted(Path(books.messages.place.folder).iterdir())


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _verify(books: Books) -> Ran:
    return run("log", "verify", "--data", books.root)


def _dump(path: Path, level: str) -> list[dict[str, object]]:
    ran = run("log", "dump", str(path), "--level", level, "--format", "json")
    assert ran.code == 0, ran.err
    rows: list[dict[str, object]] = json.loads(ran.out)
    return rows


def test_whole_logs_check_and_nothing_is_listed(books: Books) -> None:
    ran = _verify(books)
    assert ran.code == 0
    assert ran.out.endswith(": none is damaged, 0 with an unfinished end\n")
    assert ran.out.count("\n") == 1


@pytest.mark.parametrize("log", ["schedule", "dispatch"])
def test_a_flipped_bit_is_damage_with_path_and_position(books: Books, log: str) -> None:
    path = books.path_of(log)
    _flip(path, FILE_HEADER_BYTES + 100)
    ran = _verify(books)
    assert ran.code == 3
    assert f"{path} is damaged at byte {FILE_HEADER_BYTES}: " in ran.out
    assert "1 damaged" in ran.out


def test_an_unfinished_end_of_the_last_segment_is_no_damage(books: Books) -> None:
    with _message_files(books)[-1].open("ab") as file:
        file.write(b"\0" * 40)
    ran = _verify(books)
    assert ran.code == 0
    assert "ends with 40 bytes that are no whole group" in ran.out
    assert ran.out.endswith(": none is damaged, 1 with an unfinished end\n")


def test_groups_are_dumped_with_what_the_log_stamped(books: Books) -> None:
    first, second, tick = (_dump(path, "groups")[0] for path in _message_files(books))
    assert (first["kind"], first["batches"], first["rows"], first["base_sequence"]) == ("data", 1, 2, 1)
    assert first["appended_at_ms"] == START_MS - 1000
    assert second["offset"] == first["size_bytes"]
    assert second["durable_offset"] == first["size_bytes"]
    assert tick["kind"] == "tick"


def test_messages_are_dumped_with_their_bodies(books: Books) -> None:
    rows = _dump(_message_files(books)[0], "messages")
    assert [(row["sequence"], row["subject"], row["content"]) for row in rows] == [
        (1, "orders", "body 1"),
        (2, "bills", "body 2"),
    ]


def test_decisions_before_the_rows_of_their_group_check_and_are_dumped(books: Books) -> None:
    ended = np.zeros(2, ENDED)
    ended["sequence"], ended["deliver_at_ms"], ended["hour"] = [2, 4], [START_MS + 1, START_MS + 9], HOUR
    ended["reason"], ended["other"], ended["other_at_ms"] = [Reason.CANCELLED, Reason.KEPT], [0, 3], [0, START_MS + 2]
    batch = messages([b"body 4"], due=[START_MS + 9])
    group = NewGroup(GroupKind.DATA, [encode_known([Ended(ended.tobytes())]), batch], 1, START_MS, 4, 1)
    books.messages.append([group], START_MS)
    books.messages.flush()
    path = _message_files(books)[-1]
    kind = "type=ended reason"
    assert [(row["sequence"], row["content"]) for row in _dump(path, "messages")] == [
        (2, f"{kind}=cancelled hour=2026112016"),
        (4, f"{kind}=kept hour=2026112016 other=3 other_at_ms={START_MS + 2}"),
        (4, "body 4"),
    ]
    assert run("log", "verify", str(path)).code == 0
    ended["reason"] = 99
    wrong = NewGroup(GroupKind.DATA, [encode_known([Ended(ended.tobytes())]), batch], 1, START_MS, 5, 1)
    books.messages.append([wrong], START_MS)
    books.messages.flush()
    ran = run("log", "verify", str(_message_files(books)[-1]))
    assert ran.code == 3
    assert "unknown reason" in ran.out


def test_a_damaged_file_is_dumped_up_to_the_damage(books: Books) -> None:
    path = books.path_of("dispatch")
    hour = int(START_MS // 3_600_000)
    books.record([(hour, books.part([1])), (hour, books.part([2]))])
    third = FILE_HEADER_BYTES + int(str(_dump(path, "groups")[2]["offset"]))
    _flip(path, third + 100)
    ran = run("log", "dump", str(path), "--format", "csv")
    assert ran.code == 3
    assert len(ran.out.splitlines()) == 3, "the heading and every group before it are shown"
    assert f"{path} is damaged at byte {third}" in ran.err


def _values(path: str) -> dict[str, str]:
    ran = run("log", "dump", path, "--format", "json")
    assert ran.code == 0, ran.err
    return {str(row.get("name", row.get("key"))): str(row["value"]) for row in json.loads(ran.out)}


def test_a_checkpoint_is_verified_and_dumped_with_its_hours(books: Books, tmp_path: Path) -> None:
    path = f"{books.delay}/checkpoint"
    assert run("log", "verify", path).code == 0
    values = _values(path)
    assert values["log_id"] == "000000000000de1a" and values["replay_offset"] == str(books.replay_offset)
    assert values["hour 2026112016"].startswith("length=") and " last_crc32c=" in values["hour 2026112016"]
    copy = tmp_path / "copy"
    copy.write_bytes(Path(path).read_bytes())
    assert _values(str(copy)) == values
    ran = run("log", "dump", path, "--level", "batches")
    assert ran.code == 2 and f"--level is for logs of groups, and {path} has none; leave it out" in ran.err


def test_the_state_of_a_stopped_server_is_dumped_key_by_key(tmp_path: Path) -> None:
    state = LmdbState(str(tmp_path / "delay/state.lmdb"))
    hour = (START_MS // 3_600_000).to_bytes(4, "big")
    state.commit([(b"log_id", msgpack.packb(0xA1)), (b"hour/" + hour, b"\1\2"), (b"seal", msgpack.packb([1, b"\7"]))])
    state.commit([(b"end/" + (0xA2).to_bytes(8, "big"), msgpack.packb(88)), (b"target/a", msgpack.packb(0xA2))])
    state.close()
    path = tmp_path / "delay/state.lmdb/data.mdb"
    assert _values(str(path)) == {
        "log_id": "00000000000000a1",
        "hour/2026112016": "0102",
        "seal": "[1 07]",
        "end/00000000000000a2": "88",
        "target/a": "00000000000000a2",
    }
    lock = tmp_path / "delay/LOCK"
    with open(lock, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ran = run("log", "dump", str(path))
        assert ran.code == 2 and "is in use by its server; stop it first" in ran.err
    data = bytearray(path.read_bytes())
    data[data.index(b"end/") + 12] ^= 1
    path.write_bytes(data)
    ran = run("log", "dump", str(path))
    assert ran.code == 3 and "target/a" in ran.out and "end/" not in ran.out
    assert f"the value of end/00000000000000a2 in {path} does not check" in ran.err


def test_a_consume_log_is_dumped_entry_by_entry(tmp_path: Path) -> None:
    disk, place = RealDisk(), consume_place(str(tmp_path), 7, 3)
    disk.make_folder(place.folder)
    entries = entries_of(np.array([88, 304], np.uint64), np.array([2, 600], np.int64))
    unsynced: list[File] = []
    append_entries(disk, place, ConsumeTail(), entries, START_MS, unsynced)
    for file in unsynced:
        file.close()
    ran = run("log", "dump", place.path(0), "--format", "json", "--limit", "0")
    listed = [(row["consume_sequence"], row["batch_offset"], row["row"]) for row in json.loads(ran.out)]
    assert listed[:3] == [(0, 88, 0), (1, 88, 1), (2, 304, 0)] and listed[-1] == (601, 304, 599)
    path = Path(place.path(0))
    _flip(path, FILE_HEADER_BYTES + 9)
    ran = run("log", "dump", str(path))
    assert ran.code == 3 and f"{path} is damaged at byte {FILE_HEADER_BYTES}" in ran.err


def test_a_copy_of_a_log_is_known_by_its_bytes_whatever_its_name(books: Books, tmp_path: Path) -> None:
    copy = tmp_path / "evidence.bin"
    copy.write_bytes(_message_files(books)[0].read_bytes())
    assert run("log", "verify", str(copy)).code == 0
    assert len(_dump(copy, "messages")) == 2
