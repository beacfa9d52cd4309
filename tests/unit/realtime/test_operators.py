"""What can't be read is tried again, released or dropped; groups are deleted (rules L9, L10)."""

import errno

import pytest

from delayd.log.log import Log
from delayd.log.tail import COPY_PREFIX
from delayd.wire.requests import RequestType
from delayd.wire.status import Quarantined, read_list
from realtime.unreadable import RETRY_MS
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SUBJECT, SimPeer, World
from tests.worlds.rotten import BAD, FOLDER, flip_value, pull_all, served


def listed(world: World) -> list[Quarantined]:
    head, _ = world.ask(SimPeer(), RequestType.MEND_LIST, {"after": "", "limit": 10})
    return read_list(head)[0]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_rule_L10_a_read_that_fails_once_quarantines_its_rows_and_they_come_after_a_while(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = served([b"good"], [BAD], [b"other"])
    (run,) = [world.recovered.index.locate(world.recovered.index.by_name[SUBJECT], 1)]
    with monkeypatch.context() as patched:
        read = Log.read_some

        def fails(self: Log, offset: int, size: int) -> bytes:
            if self.place.folder == FOLDER and offset <= run.offset < offset + size:
                raise OSError(number, "no")
            return read(self, offset, size)

        def fails_too(self: Log, offset: int, size: int) -> bytes:
            if self.place.folder == FOLDER and offset == run.offset:
                raise OSError(number, "no")
            return read(self, offset, size)

        patched.setattr(Log, "read_some", fails)
        patched.setattr(Log, "read", fails_too)
        assert pull_all(world) == [b"good", b"other"]
        (entry,) = listed(world)
        assert errno.errorcode[number] in entry.reason and entry.path.startswith(FOLDER) and entry.rows == 1
    world.pass_time(RETRY_MS)
    assert pull_all(world) == [BAD]


@pytest.mark.parametrize("kept", ["all", "no files", "less"])
def test_rule_L9_what_a_subject_s_lost_value_said_is_found_in_its_files(
    kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"tail_bytes": 0, "segment_bytes": 4096, "retention_ms": 1_000}
    bodies = [f"{number}".encode().ljust(900, b".") for number in range(20)]
    world, peer = World(settings=settings), SimPeer()
    world.hello(peer, 1)
    for number, body in enumerate(bodies, 1):
        world.dispatch(peer, 1, dispatch_batch(number, [body, b"x"], w=(1, number - 1)))
    assert len(world.pull(peer, most=30).bodies) == 30
    world.ack(peer, world.pull(peer, most=1).handles)
    world.dispatch(peer, 1, dispatch_batch(50, [b"mail"], subject="mail", w=(1, 49)))
    world.core.checkpoint()
    if kept == "less":
        acked = pull_all(world)
        assert acked[-1] == b"x"
        world.pass_time(60_000)
        pull_all(world)
        world.core.retain()
        assert world.recovered.message_log.start > 0
    world.core.checkpoint()
    expected = pull_all(world, "before")
    disk, state = world.disk.after_crash(), world.state.after_crash()
    for key in (b"subject/orders", COPY_PREFIX + b"subject/orders"):
        flip_value(state, key)
    if kept == "no files":
        for name in disk.list_folder("/data/realtime/consume/00000000"):
            disk.remove(f"/data/realtime/consume/00000000/{name}")
    later = World(disk, state, settings=settings)
    assert "subject_found_again subject=orders" in caplog.text
    assert later.recovered.index.by_name[SUBJECT].end == 40
    assert pull_all(later, "after") == expected
    assert pull_all(later, "before") == []
    again = later.restarted()
    assert pull_all(again, "after") == [] and pull_all(again, "third") == expected
