"""Each read of a realtime server fails once, in each way; each of its files is each thing that it should not be.

The server lives, names what it met, and serves the rest; what failed once is delivered all the same, without a restart.
A start may refuse, by name, what nothing else holds; the next one serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from delayd.errors import DelaydError, HandoffRefused
from delayd.log.segment import FileHeader
from delayd.machine.alarms import LOOK_MS
from delayd.testing.disk import MemoryDisk
from delayd.testing.state import MemoryState
from delayd.wire.frame import Head
from delayd.wire.requests import RequestType
from delayd.wire.status import read_list
from realtime.unreadable import RETRY_MS
from tests.faults.disk import How, ReadFaultDisk
from tests.worlds.dispatch_batches import ORIGIN, dispatch_batch
from tests.worlds.realtime import Pulled, SimPeer, World

SETTINGS = {"tail_bytes": 0, "segment_bytes": 4096, "retention_ms": 3_600_000_000, "lease_ms": 5_000}
SUBJECTS = ("orders", "mail")
ROOT = "/data/realtime"
IDENTITY = (b"log_id", b"epoch", b"format", b"identity")  # Each of them is there twice, and tested elsewhere.


PLACES: list[int] = []  # Where each batch went.


def first_life() -> tuple[World, dict[str, list[bytes]], dict[str, set[bytes]]]:
    """Two subjects, half of each acknowledged, checkpoints in between, and more behind the last one."""
    world, peer = World(settings=SETTINGS), SimPeer()
    world.hello(peer, 1)
    sent: dict[str, list[bytes]] = {subject: [] for subject in SUBJECTS}
    acked: dict[str, set[bytes]] = {subject: set() for subject in SUBJECTS}

    def send(numbers: range) -> None:
        for number in numbers:
            subject = SUBJECTS[number % 2]
            bodies = [f"{number}-{row}".encode().ljust(300, b".") for row in range(1 + number % 3)]
            batch = dispatch_batch(number, bodies, subject=subject, w=(1, max(0, number - 2)))
            PLACES.extend(offset for _, offset in world.dispatch(peer, 1, batch)[1])
            sent[subject] += bodies

    send(range(1, 13))
    for subject in SUBJECTS:
        for _ in range(2):
            settle(world, world.pull(peer, subject=subject, most=4), subject, acked[subject])
    world.core.checkpoint()
    send(range(13, 19))
    for subject in SUBJECTS:
        settle(world, world.pull(peer, subject=subject, most=3), subject, acked[subject])
    return world, sent, acked


def settle(world: World, pulled: Pulled, subject: str, acked: set[bytes]) -> None:
    assert world.ack(SimPeer(), pulled.handles, subject=subject) == []
    acked.update(pulled.bodies)


def life(disk: MemoryDisk, state: MemoryState, sent: dict[str, list[bytes]], acked: dict[str, set[bytes]]) -> World:
    """A later life: starts, again if need be, and serves until everything was acknowledged by everybody."""
    return serve(started(disk, state), sent, acked)


def serve(
    world: World,
    sent: dict[str, list[bytes]],
    acked: dict[str, set[bytes]],
    late: dict[str, set[bytes]] | None = None,
    *,
    again: bool = False,
) -> World:
    """Serve until everything was acknowledged by everybody, without another start; ``again``: what was may come."""
    peer = SimPeer()
    world.hello(peer, 50)
    found: dict[str, set[bytes]] = {subject: set() for subject in SUBJECTS}
    late = late or {subject: set() for subject in SUBJECTS}
    for turn in range(14):
        for subject in SUBJECTS:
            take(world, subject, "billing", found[subject])
            take(world, subject, "late", late[subject])
        world.send(peer, RequestType.SUBJECTS, {"prefix": "", "after": "", "limit": 9})
        world.send(peer, RequestType.GROUPS, {"subject": None})
        world.core.checkpoint()
        if turn in (2, 6):
            world.core.retain()
        world.pass_time(RETRY_MS)
        world.core.wake()
    assert not world.failures, world.failures
    for subject in SUBJECTS:
        assert again or not found[subject] & acked[subject], "an acknowledged message came again"
        assert found[subject] | acked[subject] == set(sent[subject])
        assert late[subject] == set(sent[subject])
    return world


def started(disk: MemoryDisk, state: MemoryState) -> World:
    """Start, and start again where the first start refuses by name what it could not read."""
    try:
        return World(disk, state, settings=SETTINGS)
    except DelaydError as error:
        logging.getLogger("test").error("start refused: %s", error.message)
        assert error.message
    disk._locks.clear()
    return World(disk, state, settings=SETTINGS)


def take(world: World, subject: str, group: str, found: set[bytes]) -> None:
    peer = SimPeer()
    for _ in range(40):
        try:
            pulled = world.pull(peer, group, subject=subject, most=5)
        except DelaydError:
            return
        if not pulled.bodies:
            return
        assert not set(pulled.bodies) & found, "a message came twice"
        found.update(pulled.bodies)
        assert world.ack(peer, pulled.handles, group, subject=subject) == []


WORLD, SENT, ACKED = first_life()


def copy() -> tuple[ReadFaultDisk, MemoryState]:
    disk = ReadFaultDisk.of(WORLD.disk.after_crash())
    return disk, WORLD.state.after_crash(disk)


def reads() -> list[str]:
    disk, state = copy()
    life(disk, state, SENT, ACKED)
    return disk.reads


READS = reads()


@pytest.mark.parametrize("how", How)
def test_rule_L10_each_read_fails_once_and_everything_is_served(how: How, caplog: pytest.LogCaptureFixture) -> None:
    assert len(READS) > 50
    for number in range(1, len(READS) + 1):
        caplog.clear()
        disk, state = copy()
        disk.fail_at, disk.how = number, how
        try:
            life(disk, state, SENT, ACKED)
        except Exception as error:
            error.add_note(f"read {number} of {disk.failed} failed: {how}")
            raise
        if how in (How.ENOMEM, How.EMFILE):
            assert "is damaged" not in caplog.text, f"read {number} of {disk.failed}: {caplog.text}"


def files(kind: str) -> list[str]:
    disk, _ = copy()
    return [path for path in every_file(disk, ROOT) if f"/{kind}/" in path]


def every_file(disk: MemoryDisk, folder: str) -> Iterator[str]:
    for name in disk.list_folder(folder):
        path = f"{folder}/{name}"
        try:
            disk.list_folder(path)
        except (NotADirectoryError, FileNotFoundError):
            yield path
            continue
        yield from every_file(disk, path) if "." not in name and name != "LOCK" and name != "checkpoint" else [path]


def cut(disk: MemoryDisk, path: str, share: float, less: int = 0) -> None:
    file = MemoryDisk.open(disk, path, write=True)
    file.truncate(max(0, int(file.size() * share) - less))
    file.sync()
    file.close()


THINGS: dict[str, Callable[[MemoryDisk, str], None]] = {
    "missing": lambda disk, path: disk.remove(path),
    "empty": lambda disk, path: cut(disk, path, 0),
    "half": lambda disk, path: cut(disk, path, 0.5),
    "8 bytes short": lambda disk, path: cut(disk, path, 1, 8),
    "of another log": lambda disk, path: foreign(disk, path),
    "swapped with its neighbour": lambda disk, path: swap(disk, path),
}


def foreign(disk: MemoryDisk, path: str) -> None:
    """Give a file the header of one of another directory."""
    file = MemoryDisk.open(disk, path, write=True)
    file.pwritev([FileHeader(file.pread(12, 0)[10], 0xBAD, int(path[-24:-4])).encode()], 0)
    file.sync()


def swap(disk: MemoryDisk, path: str) -> None:
    """Have two files of a log change places, if there are two."""
    folder = path.rpartition("/")[0]
    others = [name for name in disk.list_folder(folder) if f"{folder}/{name}" != path]
    if others:
        other = f"{folder}/{others[-1]}"
        disk.rename(path, "/data/aside")
        disk.rename(other, path)
        disk.rename("/data/aside", other)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("thing", THINGS)
def test_rule_L9_a_consume_log_is_rebuilt_whatever_became_of_it(thing: str, live: bool) -> None:
    for path in files("consume"):
        disk, state = copy()
        if live:
            world = World(disk, state, settings=SETTINGS)
            THINGS[thing](disk, path)
            world.hello(SimPeer(), 50)
            found: set[bytes] = set()
            take(world, "orders", "late", found)
            assert found == set(SENT["orders"]) and not world.failures
        else:
            THINGS[thing](disk, path)
            life(disk, state, SENT, ACKED)


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("kind", ["message", "pull"])
def test_rule_L10_a_start_names_a_file_that_is_not_what_it_was_and_a_copy_mends_it_without_a_restart(
    kind: str, thing: str
) -> None:
    for path in files(kind):
        disk, state = copy()
        folder = path.rpartition("/")[0]
        whole = {name: contents(disk, f"{folder}/{name}") for name in disk.list_folder(folder)}
        THINGS[thing](disk, path)
        if {name: contents(disk, f"{folder}/{name}") for name in disk.list_folder(folder)} == whole:
            continue  # It has no neighbour to be swapped with.
        kept = state.after_crash(disk)
        try:
            world = World(disk, kept, settings=SETTINGS)
        except DelaydError as error:
            # The process holds its start (delayd.net.held_start), and opens the directory anew when it is mended.
            assert kind == "message" and ROOT in error.message, error.message
            put_back(disk, folder, whole)
            disk._locks.clear()
            life(disk, kept, SENT, ACKED)
            continue
        if not entries(world):
            # Nothing here tells the end of a log from one that a crash has torn, so it is cut.
            assert path == files(kind)[-1], path
            if kind == "pull":
                serve(world, SENT, ACKED, again=True)
                continue
            # The delay server knows: it hands nothing over until an operator decides (rule H7).
            hello: Head = {"log_id": ORIGIN, "target": world.core.log_id, "epoch": 1, "instance": 7, "session": 50}
            with pytest.raises(HandoffRefused, match="it has lost data"):
                world.ask(SimPeer(), RequestType.HELLO, {**hello, "w": [0, 0], "named_offset": PLACES[-1]})
            continue
        taken: dict[str, set[bytes]] = {subject: set() for subject in SUBJECTS}
        for subject in SUBJECTS:
            take(world, subject, "late", taken[subject])
        world.core.checkpoint()
        put_back(disk, folder, whole)
        for _ in range(4):
            world.pass_time(LOOK_MS)
        assert not entries(world), path
        serve(world, SENT, ACKED, late=taken)


def entries(world: World) -> list[str]:
    head, _ = world.ask(SimPeer(), RequestType.MEND_LIST, {"after": "", "limit": 100})
    return [entry.id for entry in read_list(head)[0]]


def put_back(disk: MemoryDisk, folder: str, whole: dict[str, bytes | None]) -> None:
    """Put what is not as it was in its place, each file at once."""
    for name, data in whole.items():
        path = f"{folder}/{name}"
        if data is not None and contents(disk, path) != data:
            if MemoryDisk.exists(disk, path):
                disk.remove(path)
            file = MemoryDisk.open(disk, path, write=True, create=True)
            file.pwritev([data], 0)
            file.sync()
            file.close()


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("kind", ["message", "pull"])
def test_rule_L10_a_log_file_that_changes_below_a_live_server_is_named_and_the_rest_is_served(
    kind: str, thing: str
) -> None:
    tried = 0
    for path in files(kind):
        disk, state = copy()
        world = World(disk, state, settings=SETTINGS)
        before = contents(disk, path)
        THINGS[thing](disk, path)
        if contents(disk, path) == before:
            continue  # It has no neighbour to be swapped with.
        tried += 1
        world.pass_time(LOOK_MS + 1)
        named = [wait.what for wait in world.core.waits()]
        # A header that was written over in place is read by nobody before the next start.
        rolled = kind == "pull"  # A checkpoint has passed it by then, and it is gone.
        assert rolled or thing == "of another log" or any(path[-24:-4] in what for what in named), (path, named)
        for subject in SUBJECTS:
            take(world, subject, "late", set())
        world.hello(SimPeer(), 90)
        assert not world.failures
    assert tried or thing == "swapped with its neighbour"


def contents(disk: MemoryDisk, path: str) -> bytes | None:
    if not MemoryDisk.exists(disk, path):
        return None
    file = MemoryDisk.open(disk, path)
    return file.pread(file.size(), 0)


def test_each_value_of_the_state_with_a_flipped_bit_is_named_or_restored(caplog: pytest.LogCaptureFixture) -> None:
    for key in list(WORLD.state._pairs):
        caplog.clear()
        disk, state = copy()
        stored = bytearray(state._pairs[key])
        stored[len(stored) // 2] ^= 0x10
        state._pairs[key] = bytes(stored)
        try:
            world = World(disk, state, settings=SETTINGS)
        except DelaydError as error:
            raise AssertionError(f"the value of {key!r} ended the start") from error
        found: set[bytes] = set()
        take(world, "orders", "late", found)
        assert found == set(SENT["orders"]) and not world.failures
        if not key.startswith((b"copy/", b"name/", *IDENTITY)):
            assert key.split(b"/")[0].decode() in caplog.text
