"""A backup and a restore that lose power at any disk operation go on, and are never taken for whole before they are."""

from collections.abc import Callable, Iterator

import pytest
from crc32c import crc32c

from delayd.backup import (
    FORMAT,
    NAME,
    STATE,
    BackupTerms,
    CopiedFile,
    Manifest,
    ServersCut,
    ServerSource,
    Stage,
    decode,
    encode,
    files_of,
    read_manifest,
    restore,
    take,
)
from delayd.errors import BadArgument, DamagedData, DiskFull, NewerFormat
from delayd.log.hour import HOUR_ROW, schedule_path
from delayd.machine.disk import Disk
from delayd.machine.state import LMDB_FILE, LmdbState
from delayd.net.cut import SIZES, pack_sizes, read_sizes
from delayd.testing.disk import Crash, Faults, MemoryDisk
from delayd.testing.tree import PowerLoss

HOUR = 500_000
HOME, FOLDER, DATA = "/data/delay", "/backup", "/restored"
FILES = {
    "message/00000000000000000000.log": b"m" * 3_000,
    "message/00000000000000002936.log": b"n" * 700,
    "dispatch/20270115/2027011508.log": b"d" * 300,
    "quarantine/2027011508.log": b"q" * 10,
    "seal/00000000000000000000.log": b"",
    "acceptances/2027011508.1.note": b"a" * 20,
    "proofs/2027011508.tree": b"t" * 30,
    "proofs/checkpoint": b"c" * 40,
}


def write(disk: Disk, path: str, data: bytes) -> None:
    disk.make_folder(path.rpartition("/")[0])
    if disk.exists(path):
        disk.remove(path)
    file = disk.open(path, create=True)
    file.pwritev([data], 0)
    file.sync()
    file.close()
    disk.sync_folder(path.rpartition("/")[0])


def content(disk: Disk, path: str) -> bytes:
    file = disk.open(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a state that counts 100 bytes of one schedule log."""
    folder = tmp_path_factory.mktemp("state")
    kept = LmdbState(str(folder))
    row = bytearray(HOUR_ROW.itemsize)
    row[0:4], row[8:16] = HOUR.to_bytes(4, "little"), (100).to_bytes(8, "little")
    kept.commit([(b"hour/" + HOUR.to_bytes(4, "big"), bytes(row)), (b"log_id", b"\x07"), (b"epoch", b"\x03")])
    kept.close()
    return (folder / LMDB_FILE).read_bytes()


def a_server(state: bytes, files: dict[str, bytes] | None = None) -> MemoryDisk:
    disk = MemoryDisk()
    for name, data in (FILES if files is None else files).items():
        write(disk, f"{HOME}/{name}", data)
    write(disk, f"{HOME}/{STATE}", state)
    return disk


def stopped(disk: Disk) -> Callable[[Stage], ServersCut]:
    def cut(stage: Stage) -> ServersCut:
        source = ServerSource("delay", HOME, 5, f"{HOME}/{STATE}", f"{HOME}/checkpoint", None)
        stage(source)
        return ServersCut([source], True)

    return cut


def terms(cut: Callable[[Stage], ServersCut]) -> BackupTerms:
    return BackupTerms(cut, lambda folder: [], lambda count: None, 1_700_000_000_000, "0.1.0")


def backed_up(source: Disk, target: Disk) -> Manifest:
    return take(source, target, FOLDER, ["delay"], terms(stopped(source)))


def restored(source: Disk, target: Disk, *, damaged_too: bool = False) -> list[str]:
    manifest = read_manifest(source, FOLDER)
    return restore(source, target, FOLDER, manifest, DATA, ["delay"], lambda count: None, damaged_too=damaged_too)


def check_whole(source: MemoryDisk, disk: MemoryDisk, home: str) -> None:
    """A folder that a server would start on holds all that the source held."""
    for name in (*files_of(source, ServerSource("delay", HOME, 0, "", "", None), source, ""), STATE):
        assert content(disk, f"{home}/{name}") == content(source, f"{HOME}/{name}"), name


def disks_after_each_operation(
    run: Callable[[MemoryDisk], object], fresh: Callable[[], MemoryDisk]
) -> Iterator[MemoryDisk]:
    """What is left of the work at each of its operations, in each way of losing power."""
    counted = fresh()
    before = len(counted.operations)
    run(counted)
    for number in range(before + 1, len(counted.operations) + 1):
        for way in PowerLoss:
            disk = fresh()
            disk.faults = Faults(crash_at=number)
            with pytest.raises(Crash):
                run(disk)
            yield disk.after_crash(way, seed=number)


@pytest.mark.parametrize("reports", [True, False])
def test_a_backup_that_dies_at_any_operation_is_never_whole_and_goes_on(state: bytes, reports: bool) -> None:
    source = a_server(state)
    deaths = 0
    for left in disks_after_each_operation(
        lambda disk: backed_up(source, disk), lambda: MemoryDisk(reports_sync_errors=reports)
    ):
        deaths += 1
        if left.exists(f"{FOLDER}/{NAME}") or left.exists(f"{FOLDER}/delay/{STATE}"):
            check_whole(source, left, f"{FOLDER}/delay")
        else:
            with pytest.raises(BadArgument):
                read_manifest(left, FOLDER)
        backed_up(source, left)
        assert len(read_manifest(left, FOLDER).entries) == len(FILES) + 1
        check_whole(source, left, f"{FOLDER}/delay")
    assert deaths > 40


def test_a_later_backup_that_dies_at_any_operation_leaves_no_half_of_each(state: bytes) -> None:
    first = a_server(state)
    grown = FILES | {"message/00000000000000002936.log": b"n" * 900, "message/00000000000000003772.log": b"o" * 50}
    del grown["message/00000000000000000000.log"]  # Retention has removed it.
    source = a_server(state)
    for name in set(FILES) - set(grown):
        source.remove(f"{HOME}/{name}")
    for name, data in grown.items():
        if data != FILES.get(name):
            file = source.open(f"{HOME}/{name}", write=True, create=name not in FILES)
            file.pwritev([data], 0)
            file.close()
    del first

    def with_a_backup() -> MemoryDisk:
        disk = MemoryDisk()
        backed_up(a_server(state), disk)
        return disk

    for left in disks_after_each_operation(lambda disk: backed_up(source, disk), with_a_backup):
        if left.exists(f"{FOLDER}/{NAME}"):
            manifest = read_manifest(left, FOLDER)
            old = "message/00000000000000000000.log" in {entry.path.partition("/")[2] for entry in manifest.entries}
            check_whole(a_server(state) if old else source, left, f"{FOLDER}/delay")
        backed_up(source, left)
        check_whole(source, left, f"{FOLDER}/delay")
        assert not left.exists(f"{FOLDER}/delay/message/00000000000000000000.log")


def test_a_restore_that_dies_at_any_operation_lets_no_server_start_and_goes_on(state: bytes) -> None:
    source, backup = a_server(state), MemoryDisk()
    backed_up(source, backup)
    for left in disks_after_each_operation(lambda disk: restored(backup, disk), MemoryDisk):
        if left.exists(f"{DATA}/delay/{STATE}"):
            check_whole(source, left, f"{DATA}/delay")
            if not left.exists(f"{DATA}/delay/backup.unfinished"):
                continue  # It is done, and nothing is put over it.
        assert restored(backup, left) == []
        check_whole(source, left, f"{DATA}/delay")


def test_of_a_running_server_the_bytes_of_the_cut_are_copied_and_no_more(state: bytes) -> None:
    source, target = a_server(state), MemoryDisk()
    path = schedule_path(HOME, HOUR)
    write(source, path, b"s" * 500)
    write(source, f"{HOME}/acceptances/2027011508.2.note.77.0badcafe", b"a crash has left it")
    write(source, f"{HOME}/proofs/2027011509.tree.77.0badcafe", b"a crash has left it")
    sizes = {"message/00000000000000002936.log": 640}

    def cut(stage: Stage) -> ServersCut:
        each = ServerSource("delay", HOME, 5, f"{HOME}/{STATE}", f"{HOME}/checkpoint", sizes)
        stage(each)
        return ServersCut([each], True)

    manifest = take(source, target, FOLDER, ["delay"], terms(cut))
    assert {entry.path.partition("/")[2]: entry.size_bytes for entry in manifest.entries} == {
        STATE: len(state),
        "message/00000000000000002936.log": 640,
        path.removeprefix(f"{HOME}/"): 64 + 100,
        # Its server does not know of these, so no cut has their sizes.
        "acceptances/2027011508.1.note": 20,
        "proofs/2027011508.tree": 30,
        "proofs/checkpoint": 40,
    }
    assert (manifest.servers[0].log_id, manifest.servers[0].epoch, manifest.servers[0].running) == (7, 3, True)


def test_a_file_that_retention_removes_after_the_cut_means_a_new_cut(state: bytes) -> None:
    source, target = a_server(state), MemoryDisk()
    write(source, schedule_path(HOME, HOUR), b"s" * 164)
    cuts = 0

    def cut(stage: Stage) -> ServersCut:
        nonlocal cuts
        cuts += 1
        names = list(FILES) if cuts == 1 else list(FILES)[1:]
        each = ServerSource(
            "delay", HOME, 5, f"{HOME}/{STATE}", f"{HOME}/checkpoint", {name: len(FILES[name]) for name in names}
        )
        stage(each)
        if cuts == 1:
            source.remove(f"{HOME}/{names[0]}")
        return ServersCut([each], True)

    manifest = take(source, target, FOLDER, ["delay"], terms(cut))
    assert cuts == 2 and manifest.damaged == ()
    assert len(manifest.entries) == len(FILES) + 1


def test_a_full_disk_ends_a_backup_and_a_later_call_goes_on(state: bytes) -> None:
    source, target = a_server(state), MemoryDisk(capacity_bytes=2_000)
    with pytest.raises(DiskFull):
        backed_up(source, target)
    with pytest.raises(BadArgument):
        read_manifest(target, FOLDER)
    target.capacity_bytes = 1 << 40
    backed_up(source, target)
    check_whole(source, target, f"{FOLDER}/delay")


def test_a_flipped_byte_of_a_backup_is_found_before_anything_is_in_its_place(state: bytes) -> None:
    source, backup, target = a_server(state), MemoryDisk(), MemoryDisk()
    backed_up(source, backup)
    write(backup, f"{FOLDER}/delay/message/00000000000000002936.log", b"n" * 699 + b"x")
    (sentence,) = restored(backup, target)
    assert "00000000000000002936.log" in sentence
    assert not target.exists(f"{DATA}/delay/{STATE}")
    assert restored(backup, target, damaged_too=True)
    assert target.exists(f"{DATA}/delay/{STATE}")


def test_a_manifest_that_does_not_check_or_is_newer_is_refused() -> None:
    manifest = Manifest(5, "0.1.0", True, (), (), (CopiedFile("a", 1, 2, 3),))
    data = encode(manifest)
    assert decode(NAME, data) == manifest
    for place in range(len(data) - 1):
        with pytest.raises(DamagedData):
            decode(NAME, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    for end in range(len(data) - 1):
        with pytest.raises(DamagedData):
            decode(NAME, data[:end])
    newer = data.replace(b'{"format": %d' % FORMAT, b'{"format": %d' % (FORMAT + 1))
    text = newer.rpartition(b"\ncrc32c ")[0]
    with pytest.raises(NewerFormat):
        decode(NAME, text + f"\ncrc32c {crc32c(text):08x}\n".encode())


def test_sizes_of_a_cut_that_do_not_check_are_refused() -> None:
    data = pack_sizes({"message/0.log": 6})
    for place in range(len(data)):
        with pytest.raises(DamagedData):
            read_sizes(SIZES, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
