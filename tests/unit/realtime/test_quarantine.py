"""Damage in the message log that is found while serving: its rows are named and kept, all else goes on (rule L5)."""

import errno

import pytest

from delayd.log.log import Log
from delayd.wire.heads import (
    need_int,
    need_maps,
)
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World
from tests.worlds.rotten import BAD, FOLDER, flip, pull_all, served


def quarantined(world: World, group: str = GROUP) -> int:
    head, _ = world.ask(SimPeer(), RequestType.GROUPS, {"subject": SUBJECT})
    (found,) = [need_int(row, "quarantined") for row in need_maps(head, "groups") if row["group"] == group]
    return found


def test_rule_Q3_retention_keeps_what_could_not_be_read() -> None:
    settings = {"tail_bytes": 0, "segment_bytes": 4096, "retention_ms": 1_000}
    world, peer = served([BAD], settings=settings)
    flip(world.disk, BAD)
    for batch_id in range(2, 8):
        world.dispatch(peer, 1, dispatch_batch(batch_id, [bytes(2_000)], w=(1, batch_id - 1)))
    assert len(pull_all(world)) == 6
    first = world.disk.list_folder(FOLDER)[0]
    for _ in range(3):
        world.pass_time(60_000)
        world.core.retain()
    assert world.disk.list_folder(FOLDER)[0] == first and len(world.disk.list_folder(FOLDER)) > 1


def test_a_batch_on_a_sector_that_can_not_be_read_is_rotten_and_one_before_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, _ = served([b"good"], [BAD], [b"other"])
    (run,) = [world.recovered.index.locate(world.recovered.index.by_name[SUBJECT], 1)]
    read, read_some = Log.read, Log.read_some

    def broken(self: Log, offset: int, size: int) -> bytes:
        if offset <= run.offset + 64 < offset + size and self.place.folder == FOLDER:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, offset, size)

    def broken_some(self: Log, offset: int, size: int) -> bytes:
        if offset <= run.offset + 64 < offset + size and self.place.folder == FOLDER:
            raise OSError(errno.EIO, "Input/output error")
        return read_some(self, offset, size)

    monkeypatch.setattr(Log, "read", broken)
    monkeypatch.setattr(Log, "read_some", broken_some)
    assert pull_all(world) == [b"good", b"other"]
    assert quarantined(world) == 1 and not world.failures
