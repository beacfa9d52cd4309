"""What can't be read is tried again, released or dropped; groups are deleted (rules L9, L10)."""

import errno
import logging

import pytest

from delayd.errors import BadArgument, DamagedValue, read_error
from delayd.log.log import Log
from delayd.log.proof import COPY_PREFIX, GROUP_PREFIX
from delayd.wire.frame import Head
from delayd.wire.heads import (
    need_bool,
    need_list,
    need_maps,
)
from delayd.wire.requests import RequestType
from delayd.wire.status import Quarantined, read_list
from realtime.quarantine import RETRY_MS
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head

from .rotten import BAD, FOLDER, flip, flip_value, pull_all, served


def listed(world: World) -> list[Quarantined]:
    head, _ = world.ask(SimPeer(), RequestType.MEND_LIST, {"after": "", "limit": 10})
    return read_list(head)[0]


def decide(world: World, decision: str, id_: str) -> bool:
    head, _ = world.ask(SimPeer(), RequestType.MEND, {"id": id_, "decision": decision})
    return need_bool(head, "done")


def group_names(world: World) -> list[object]:
    head, _ = world.ask(SimPeer(), RequestType.GROUPS, {"subject": None})
    return [row["group"] for row in need_maps(head, "groups")]


def test_rule_L10_a_file_that_was_restored_is_delivered_without_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    world, _ = served([b"good"], [BAD, b"beside"], [b"other"])
    flip(world.disk, BAD)
    assert pull_all(world) == [b"good", b"other"]
    world.pass_time(RETRY_MS)
    waiting = SimPeer()
    world.send(waiting, RequestType.PULL, pull_head(wait_ms=60_000, lease_ms=100_000))
    assert not waiting.answers and len(listed(world)) == 1
    flip(world.disk, BAD)
    with caplog.at_level(logging.INFO):
        world.pass_time(RETRY_MS)
        world.core.wake()
    assert len(waiting.answers) == 1 and "rows_released subject=orders rows=2" in caplog.text
    assert listed(world) == [] and pull_all(world) == []


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


def test_an_operator_has_it_tried_again_or_gives_it_up_for_good() -> None:
    world, _ = served([BAD], [b"other"], [b"bad too" * 50])
    flip(world.disk, BAD)
    flip(world.disk, b"bad too" * 50)
    assert pull_all(world) == [b"other"]
    first, second = sorted(listed(world), key=lambda entry: entry.position)
    with pytest.raises(BadArgument, match="can't be released; it can be taken or given up"):
        decide(world, "release", first.id)
    with pytest.raises(BadArgument, match="'drop' is no decision"):
        decide(world, "drop", first.id)
    assert not decide(world, "take", first.id)
    flip(world.disk, BAD)
    assert decide(world, "take", first.id)
    assert pull_all(world) == [BAD]
    assert decide(world, "give-up", second.id)
    assert listed(world) == []
    with pytest.raises(BadArgument, match="nothing is quarantined"):
        decide(world, "give-up", "rows/orders/5")
    flip(world.disk, b"bad too" * 50)
    for later in (World(world.disk.after_crash(), world.state.after_crash()), world.restarted()):
        assert pull_all(later) == [] and listed(later) == []


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("word", ["release", "give-up"])
def test_rule_L9_a_group_whose_progress_does_not_check_is_named_and_the_rest_is_served(
    word: str, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world, peer = served([b"a"], [b"b"])
    pull_all(world)
    pull_all(world, "other")
    world.core.checkpoint()
    pull_all(world)
    disk, state = world.disk.after_crash(), world.state.after_crash()
    (key, *_) = sorted(key for key in state._pairs if key.startswith(GROUP_PREFIX))
    flip_value(state, key)
    if not named:
        flip_value(state, b"name/" + key[len(GROUP_PREFIX) :])
    with caplog.at_level(logging.CRITICAL):
        world = World(disk, state)
    assert "group_progress_damaged id=group/00000001" in caplog.text
    world.hello(peer, 9)
    world.dispatch(peer, 9, dispatch_batch(3, [b"c"], w=(1, 2)))
    assert pull_all(world, "other") == [b"c"]
    (entry,) = listed(world)
    status, _ = world.ask(SimPeer(), RequestType.STATUS, {})
    assert any(entry.id in str(wait) for wait in need_list(status, "waits"))
    if named:
        with pytest.raises(DamagedValue):
            world.pull(SimPeer())
    elif word == "release":
        return
    later = world
    assert decide(world, word, entry.id)
    for later in (World(world.disk.after_crash(), world.state.after_crash()), world.restarted()):
        assert listed(later) == [] and not later.failures
        assert (GROUP in group_names(later)) == (word == "release")
    if word == "release":
        assert pull_all(later) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("prefix", [b"checkpoint", b"origin/", b"subject/", b"copy/checkpoint", b"copy/subject/"])
def test_rule_L9_a_small_value_that_does_not_check_is_taken_from_its_copy(
    prefix: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    world, _ = served([b"a"], [b"b"])
    assert pull_all(world) == [b"a", b"b"]
    world.core.checkpoint()
    disk, state = world.disk.after_crash(), world.state.after_crash()
    (key, *_) = [key for key in state._pairs if key.startswith(prefix)]
    flip_value(state, key)
    later = World(disk, state)
    assert pull_all(later) == [] and pull_all(later, "other") == [b"a", b"b"]
    assert ("value_damaged key=" in caplog.text) == (not prefix.startswith(COPY_PREFIX))


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


def test_a_deleted_group_is_gone_and_a_new_one_begins_at_the_earliest_message() -> None:
    world, _ = served([b"a"], [b"b"])
    pull_all(world)
    held = world.pull(SimPeer(), "other", most=1)
    world.core.checkpoint()
    waiting = SimPeer()
    world.send(waiting, RequestType.PULL, pull_head(wait_ms=50_000))
    names: Head = {"subject": SUBJECT, "group": GROUP}
    world.ask(SimPeer(), RequestType.DELETE_GROUP, names)
    # Who waits hears nothing of it: its consumer asks again, and makes the group anew.
    ((answer, _),) = waiting.answers[1]
    assert answer["parts"] == []
    with pytest.raises(BadArgument):
        world.ask(SimPeer(), RequestType.DELETE_GROUP, names)
    world.ask(SimPeer(), RequestType.DELETE_GROUP, {**names, "group": "other"})
    assert world.ack(SimPeer(), held.handles, "other") == held.handles
    world.pass_time(60_000)
    for later in (World(world.disk.after_crash(), world.state.after_crash()), world.restarted()):
        assert group_names(later) == []
        later.core.checkpoint()
        assert not any(key.startswith((GROUP_PREFIX, b"name/")) for key in later.state._pairs)
        assert pull_all(later) == [b"a", b"b"]
        again = World(later.disk.after_crash(), later.state.after_crash())
        assert group_names(again) == [GROUP] and pull_all(again) == []


def test_an_error_of_the_system_is_named_by_what_it_is() -> None:
    assert "EIO" in read_error("p", 1, OSError(errno.EIO, "x")).message
