"""Damage in the message log that is found while serving: its rows are named and kept, all else goes on (rule L5)."""

import errno
import logging

import pytest

from delayd.log.log import Log
from delayd.wire.heads import (
    need_bool,
    need_int,
    need_maps,
)
from delayd.wire.requests import RequestType
from realtime.quarantine import BATCHES_A_PULL, RETRY_MS
from tests.memory_files import content, put
from tests.unit.realtime.rotten import BAD, FOLDER, OUT_OF_MEMORY, flip, pull_all, served
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head


def quarantined(world: World, group: str = GROUP) -> int:
    head, _ = world.ask(SimPeer(), RequestType.GROUPS, {"subject": SUBJECT})
    (found,) = [need_int(row, "quarantined") for row in need_maps(head, "groups") if row["group"] == group]
    return found


def test_rows_before_and_behind_a_rotten_batch_are_served_and_its_rows_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, _ = served([b"good"], [BAD, b"beside it"], [b"other"])
    flip(world.disk, BAD)
    with caplog.at_level(logging.CRITICAL):
        assert pull_all(world) == [b"good", b"other"]
    (line,) = [record.getMessage() for record in caplog.records]
    for said in ("rows_quarantined", "subject=orders", "rows=2", "[(1, 3)]", "[2000, 2001]", f"path={FOLDER}/0000"):
        assert said in line
    assert quarantined(world) == 2
    head, _ = world.ask(SimPeer(), RequestType.SUBJECTS, {"prefix": "", "after": "", "limit": 5})
    assert need_int(need_maps(head, "subjects")[0], "quarantined") == 2
    assert not world.failures


def test_a_consumer_that_waits_gets_what_comes_after_a_rotten_batch_at_the_end() -> None:
    world, peer = served([BAD])
    flip(world.disk, BAD)
    waiting = SimPeer()
    world.send(waiting, RequestType.PULL, pull_head(wait_ms=5_000))
    assert not waiting.answers and quarantined(world) == 1
    world.dispatch(peer, 1, dispatch_batch(2, [b"next"]))
    assert bodies_of(waiting.answers[1][0][1]) == [b"next"]


def test_every_group_passes_over_it_by_itself() -> None:
    world, _ = served([BAD], [b"other"])
    assert pull_all(world, "early") == [BAD, b"other"]
    flip(world.disk, BAD)
    world.recovered.stored._read.clear()
    assert pull_all(world, "late") == [b"other"]
    assert (quarantined(world, "early"), quarantined(world, "late")) == (0, 1)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("clean", [False, True])
def test_a_restart_offers_what_was_passed_over_again_and_delivers_it_when_the_file_was_restored(
    checkpoint: bool, clean: bool
) -> None:
    world, _ = served([b"good"], [BAD], [b"other"])
    flip(world.disk, BAD)
    assert pull_all(world) == [b"good", b"other"]
    if checkpoint:
        world.core.checkpoint()
    flip(world.disk, BAD)
    after = world.restarted() if clean else World(world.disk.after_crash(), world.state.after_crash())
    assert pull_all(after) == [BAD]
    assert quarantined(after) == 0 and pull_all(after) == []


def test_a_restart_finds_it_again_while_the_file_is_not_restored() -> None:
    world, peer = served([b"good"], [BAD], [b"other"])
    # A start verifies what no checkpoint covers, or what is in doubt, and would refuse to serve.
    world.hello(peer, 2, w=(1, 3))
    world.core.checkpoint()
    flip(world.disk, BAD)
    assert pull_all(world) == [b"good", b"other"]
    for _ in range(2):
        world = World(world.disk.after_crash(), world.state.after_crash(), settings=OUT_OF_MEMORY)
        assert quarantined(world) == 0
        assert pull_all(world) == []
        assert quarantined(world) == 1


def test_what_was_given_back_and_is_rotten_by_then_keeps_its_attempt() -> None:
    world, peer = served([BAD], [b"other"])
    pulled = world.pull(peer)
    flip(world.disk, BAD)
    world.recovered.stored._read.clear()
    world.ack(peer, pulled.handles, kind=RequestType.NACK)
    again = world.pull(peer)
    assert (again.bodies, again.attempts) == ([b"other"], [2])
    world.ack(peer, again.handles)
    flip(world.disk, BAD)
    after = world.restarted()
    restored = after.pull(SimPeer())
    assert (restored.bodies, restored.attempts) == ([BAD], [2])


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


def test_many_rotten_batches_let_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [b"%04d" % number + BAD for number in range(BATCHES_A_PULL + 10)]
    world, peer = served(*([body] for body in bodies), [b"good"])
    for body in bodies:
        flip(world.disk, body)
    first = world.pull(peer)
    assert first.bodies == [] and quarantined(world) == BATCHES_A_PULL
    assert world.pull(peer).bodies == [b"good"] and quarantined(world) == len(bodies)


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


def test_rule_Q5_what_is_offered_again_is_no_part_of_a_pull_of_new_messages() -> None:
    world, peer = served([b"a", b"b"])
    world.disk.faults.fail_reads["/message/"] = 1 << 20
    assert world.pull(peer).bodies == []
    world.disk.faults.fail_reads.clear()
    world.pass_time(31_000)
    world.dispatch(peer, 1, dispatch_batch(2, [b"c"], w=(1, 1)))
    pulled = world.pull(peer)
    assert sorted(pulled.bodies) == [b"a", b"b", b"c"]
    assert world.pull(SimPeer()).bodies == []
    assert world.ack(peer, pulled.handles) == []
    assert world.pull(peer).bodies == []


def test_a_file_that_was_restored_before_its_rows_were_passed_over_is_read_again() -> None:
    # With so much behind it one read serves several batches.
    world, peer = served([b"good"], [BAD], [bytes(20_000)])
    flip(world.disk, BAD)
    # The first answer ends before the rotten batch, which was read by then.
    assert world.pull(peer).bodies == [b"good"]
    flip(world.disk, BAD)
    assert world.pull(peer).bodies == [BAD, bytes(20_000)]


def test_rule_Q5_what_was_given_back_and_what_was_passed_over_come_once_though_they_are_one_pull() -> None:
    # That a life passed over messages is not in the pull log. A replay begins below them, and then meets one entry with
    # messages that it has offered again and with others that are new to it.
    world, peer = served([b"good"], [BAD])
    first = world.pull(peer, most=1)
    flip(world.disk, BAD)
    assert world.pull(peer).bodies == []
    world.give_back(peer, first.handles)
    flip(world.disk, BAD)
    world.pass_time(RETRY_MS)
    again = world.pull(peer)
    assert (again.bodies, again.attempts) == ([b"good", BAD], [1, 1])
    assert len(list(world.core._pulls.groups[SUBJECT, GROUP].window.held())) == 1
    assert world.ack(peer, again.handles) == []
    later = World(world.disk.after_kill(), world.state.after_crash(), world.clock.restarted())
    assert pull_all(later) == []


def test_two_words_that_release_one_entry_release_it_once() -> None:
    """The second word waited for a look at the files while the first one was carried out."""
    world, _ = served([b"good"], [BAD], [b"other"])
    flip(world.disk, BAD)
    assert pull_all(world) == [b"good", b"other"]
    held = world.core._pulls.quarantine
    (entry,) = held.listing()
    bad = held.find(entry.id)
    assert bad is not None
    flip(world.disk, BAD)
    assert held.release(bad) and held.release(bad)
    assert pull_all(world) == [BAD]


@pytest.mark.parametrize("by", ["the next try", "an operator"])
def test_a_file_that_is_put_back_by_a_rename_is_read(by: str) -> None:
    # Groups go to another file behind this one.
    world, _ = served(
        [b"good"], [BAD], [b"other" * 1_000], [b"last"], settings={**OUT_OF_MEMORY, "segment_bytes": 4096}
    )
    path = f"{FOLDER}/{world.disk.list_folder(FOLDER)[0]}"
    good = content(world.disk, path)
    assert BAD in good
    flip(world.disk, BAD)
    assert pull_all(world) == [b"good", b"other" * 1_000, b"last"]
    (entry,) = world.core._pulls.quarantine.listing()
    put(world.disk, f"{path}.tmp", good)
    world.disk.rename(f"{path}.tmp", path)
    if by == "an operator":
        head, _ = world.ask(SimPeer(), RequestType.MEND, {"id": entry.id, "decision": "take"})
        assert need_bool(head, "done"), head
    else:
        for _ in range(3):
            world.pass_time(RETRY_MS)
            world.core.wake()
    assert quarantined(world) == 0 and pull_all(world) == [BAD]
