"""Messages are offered when they are written, and whatever is told as done waits for both fsyncs (rule L2)."""

from __future__ import annotations

import pytest

from delayd.errors import BatchMalformed, DamagedData, NotReady
from delayd.log.pull import decode_void, encode_void
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.machine.clock import BELIEVED_AFTER_MS
from delayd.testing.clock import SimClock
from delayd.testing.disk import CAPACITY_BYTES, MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.wire.frame import Head
from delayd.wire.heads import need_int, need_u64
from delayd.wire.requests import RequestType
from realtime.subject_index import Index, Subject
from realtime.unread import REST_MS
from tests.memory_files import content, files, put
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head

OTHER = 0xD31B  # Another delay server.


def stepped(**settings: int) -> tuple[World, SimPeer, StepExecutor, StepExecutor]:
    """A server with a greeted delay server, and its threads for commits and for fsyncs of the pull log."""
    commits, fsyncs = StepExecutor(), StepExecutor()
    world, peer = World(commit=commits, pulls=fsyncs, settings=settings), SimPeer()
    world.hello_later(peer, 1)
    commits.run_all()
    return world, peer, commits, fsyncs


def dispatch(world: World, peer: SimPeer, batch_id: int, *bodies: bytes, origin: int = 0xD31A) -> int:
    head: Head = {"session": 1, "epoch": 1}
    return world.send(peer, RequestType.DISPATCH, head, dispatch_batch(batch_id, bodies, origin=origin))


def waiting(world: World, fsyncs: StepExecutor, group: str = GROUP, most: int = 10) -> tuple[SimPeer, int]:
    """A consumer whose PULL waits."""
    peer = SimPeer()
    asked = world.send(peer, RequestType.PULL, pull_head(group, most=most, wait_ms=60_000))
    fsyncs.run_all()
    return peer, asked


def acknowledge(world: World, peer: SimPeer, pulled: int) -> int:
    head = peer.answers[pulled][0][0]
    parts = head["parts"]
    assert isinstance(parts, list)
    handles = [[head["incarnation"], part[0], part[2]] for part in parts]
    return world.send(peer, RequestType.ACK, {"subject": SUBJECT, "group": GROUP, "handles": handles})


def test_consumers_get_what_is_written_and_the_delay_server_hears_of_it_when_it_is_durable() -> None:
    world, delay, commits, fsyncs = stepped()
    consumers = [waiting(world, fsyncs, most=1) for _ in range(3)]
    frame = dispatch(world, delay, 1, b"a", b"b", b"c")
    assert not any(asked in peer.answers for peer, asked in consumers), "the append is the thread's"
    commits.step()
    assert [bodies_of(peer.answers[asked][0][1]) for peer, asked in consumers] == [[b"a"], [b"b"], [b"c"]]
    assert frame not in delay.answers
    commits.step()
    assert frame in delay.answers


def test_with_the_setting_consumers_get_only_what_is_durable() -> None:
    world, delay, commits, fsyncs = stepped(offer_durable_only=True)
    peer, asked = waiting(world, fsyncs)
    frame = dispatch(world, delay, 1, b"a")
    commits.step()
    assert asked not in peer.answers and frame not in delay.answers
    commits.step()
    assert asked in peer.answers and frame in delay.answers


@pytest.mark.parametrize("first", ["message log", "pull log"])
def test_an_acknowledgement_is_told_behind_both_fsyncs_whichever_ends_first(first: str) -> None:
    world, delay, commits, fsyncs = stepped()
    peer, asked = waiting(world, fsyncs)
    dispatch(world, delay, 1, b"a")
    commits.step()
    told = acknowledge(world, peer, asked)
    one, other = (commits, fsyncs) if first == "message log" else (fsyncs, commits)
    one.run_all()
    assert told not in peer.answers
    other.run_all()
    assert told in peer.answers


def test_an_acknowledgement_waits_for_no_message_that_was_written_after_it() -> None:
    world, delay, commits, fsyncs = stepped()
    peer, asked = waiting(world, fsyncs)
    dispatch(world, delay, 1, b"a")
    commits.run_all()
    told = acknowledge(world, peer, asked)
    dispatch(world, delay, 2, b"b")
    commits.step()
    fsyncs.run_all()
    assert told in peer.answers and commits.waiting


def test_a_checkpoint_counts_what_is_written_and_is_stored_when_that_is_durable() -> None:
    world, delay, commits, fsyncs = stepped()
    dispatch(world, delay, 1, b"a")
    commits.step()
    world.core.checkpoint()
    fsyncs.run_all()
    assert world.core._checkpoints.last.next_sequence == 0
    commits.step()
    assert world.core._checkpoints.last.next_sequence == 1


def test_messages_of_several_delay_servers_are_offered_as_they_are_written() -> None:
    world, delay, commits, fsyncs = stepped()
    other = SimPeer()
    world.hello_later(other, 1, origin=OTHER)
    commits.run_all()
    first, second = waiting(world, fsyncs, most=1), waiting(world, fsyncs, most=1)
    frames = dispatch(world, delay, 1, b"a"), dispatch(world, other, 1, b"b", origin=OTHER)
    commits.step()
    assert first[1] in first[0].answers and second[1] not in second[0].answers
    commits.step()
    assert frames[0] in delay.answers and frames[1] not in other.answers
    commits.step()
    assert second[1] in second[0].answers and frames[1] not in other.answers
    commits.step()
    assert frames[1] in other.answers


def test_rule_L8_nothing_is_offered_that_found_no_space_until_it_is_written() -> None:
    world, delay, commits, fsyncs = stepped(free_bytes_all=0)
    peer, asked = waiting(world, fsyncs)
    # The batch alone would fit, and not with the header of its group.
    world.disk.capacity_bytes = world.disk.used_bytes + len(dispatch_batch(1, [b"a"]))
    frame = dispatch(world, delay, 1, b"a")
    commits.run_all()
    assert asked not in peer.answers and not delay.errors and not world.failures
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_time(1_000)
    commits.run_all()
    assert asked in peer.answers and frame in delay.answers


def test_a_disk_on_which_a_write_takes_long_stops_nobody_who_needs_nothing_of_it() -> None:
    world, delay, commits, fsyncs = stepped()
    dispatch(world, delay, 1, b"a")
    commits.run_all()
    written = len(world.disk.operations)
    dispatch(world, delay, 2, b"b")
    assert len(world.disk.operations) == written, "the loop writes nothing to the message log"
    peer, asked = waiting(world, fsyncs)
    assert bodies_of(peer.answers[asked][0][1]) == [b"a"]
    assert world.ask(SimPeer(), RequestType.PING, {})


def named_by_the_pull_log(world: World) -> list[int]:
    """What each group of the pull log says of how far the message log was durable."""
    pull_log = world.recovered.pull_log
    assert pull_log is not None
    return [group.header.base_sequence for group in pull_log.scan(0, pull_log.end)]


def test_rule_L5_each_group_of_the_pull_log_names_how_far_the_message_log_was_durable() -> None:
    world, delay, commits, fsyncs = stepped()
    greeted = world.recovered.message_log.durable
    waiting(world, fsyncs)
    dispatch(world, delay, 1, b"a")
    commits.step()
    assert named_by_the_pull_log(world) == [greeted, greeted], "the group's record, and a pull before the fsync"
    commits.step()
    waiting(world, fsyncs, "other")
    assert max(named_by_the_pull_log(world)) == world.recovered.message_log.durable > greeted


@pytest.mark.parametrize("lost", ["pulled", "durable"])
def test_rule_L5_a_message_log_that_lost_its_end_is_cut_unless_the_pull_log_calls_that_durable(lost: str) -> None:
    world, delay, commits, fsyncs = stepped()
    before = world.recovered.message_log.end
    waiting(world, fsyncs)
    dispatch(world, delay, 1, b"a")
    commits.step()
    if lost == "durable":
        commits.step()
        waiting(world, fsyncs, "other")
    disk = world.disk.after_kill()
    (messages,) = files(disk, "/data/realtime/message")
    put(disk, messages, content(disk, messages)[: before - world.recovered.message_log.end])
    state = world.state.after_crash(disk)
    if lost == "durable":
        with pytest.raises(DamagedData, match="the pull log says that it was durable"):
            World(disk, state)
    else:
        again = World(disk, state)
        assert [group.next for group in again.core._pulls.groups.values()] == [0]


def cut_and_damaged(world: World, lost_bytes: int) -> tuple[MemoryDisk, MemoryState, str, bytes]:
    """A power cut took the end of the message log, and a bit of the pull log is flipped; its path, and what it was."""
    disk = world.disk.after_kill()
    (messages,), (path,) = files(disk, "/data/realtime/message"), files(disk, "/data/realtime/pull")
    put(disk, messages, content(disk, messages)[: -lost_bytes or None])
    whole = content(disk, path)
    at = FILE_HEADER_BYTES + world.core._checkpoints.last.pull_offset + 70
    put(disk, path, whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    return disk, world.state.after_crash(disk), path, whole


@pytest.mark.parametrize("restarts", [False, True])
def test_what_came_while_the_pull_log_was_unread_is_not_taken_for_what_a_power_cut_took(restarts: bool) -> None:
    world, delay, commits, fsyncs = stepped()
    peer, asked = waiting(world, fsyncs)
    dispatch(world, delay, 1, b"a")
    commits.run_all()
    acknowledge(world, peer, asked)
    fsyncs.run_all()
    before = world.recovered.message_log.end
    peer, asked = waiting(world, fsyncs)
    dispatch(world, delay, 2, b"b", b"c")
    commits.step()
    acknowledge(world, peer, asked)
    disk, state, path, whole = cut_and_damaged(world, world.recovered.message_log.end - before)
    world, delay = World(disk, state), SimPeer()
    world.hello(delay, 9)
    world.dispatch(delay, 9, dispatch_batch(7, [b"x", b"y", b"z"]))
    world.state.flip(b"unread_from")
    if restarts:
        world = world.restarted()
    put(disk, path, whole)
    for _ in range(3):
        world.pass_time(REST_MS)
    assert world.pull(SimPeer()).bodies == [b"x", b"y", b"z"]
    assert world.restarted().pull(SimPeer()).bodies == []


def test_a_checkpoint_waits_for_the_message_log_also_while_the_pull_log_is_unread() -> None:
    world, delay, commits, fsyncs = stepped()
    waiting(world, fsyncs)
    dispatch(world, delay, 1, b"a")
    commits.run_all()
    disk, state, _, _ = cut_and_damaged(world, 0)
    world, delay, commits = World(disk, state, commit=(steps := StepExecutor())), SimPeer(), steps
    world.hello_later(delay, 9)
    commits.run_all()
    world.core.checkpoint()
    world.send(delay, RequestType.DISPATCH, {"session": 9, "epoch": 1}, dispatch_batch(7, [b"x"]))
    commits.step()
    world.core.checkpoint()
    assert world.core._checkpoints.last.next_sequence == 1
    commits.step()
    assert world.core._checkpoints.last.next_sequence == 2


def test_void_pulls_are_read_as_they_were_written_and_nothing_else_is() -> None:
    assert decode_void(encode_void([(1, 3), (7, 8)])) == [(1, 3), (7, 8)]
    for bad in (b"\xc1", encode_void([(3, 3)]), b"\x01", b"\x91\x91\x01", b"\x91\x92\xff\x01", b"\x91\x92\xc3\x02"):
        with pytest.raises(BatchMalformed):
            decode_void(bad)


def told_lost_ms(world: World, session: int) -> int:
    """When a life began that may have lost what was offered, as the answer to a hello says; 0: there was none."""
    peer = SimPeer()
    ((head, _),) = peer.answers[world.hello_later(peer, session)]
    return world.clock.now_ms() - need_int(head, "lost_age_ms") if "lost_epoch" in head else 0


def told_lost_epoch(world: World, session: int) -> int:
    peer = SimPeer()
    ((head, _),) = peer.answers[world.hello_later(peer, session)]
    return need_int(head, "lost_epoch")


def killed(world: World, clock: SimClock | None = None, **settings: int) -> World:
    disk = world.disk.after_kill()
    return World(disk, world.state.after_crash(disk), clock or world.clock.restarted(), settings=settings)


def test_rule_C1_an_unclean_end_is_told_until_the_next_one_through_clean_stops() -> None:
    world = World()
    assert told_lost_ms(world, 1) == 0
    world = world.restarted()
    assert told_lost_ms(world, 2) == 0, "a clean stop takes nothing"
    world.clock.advance(60_000)
    world.core.checkpoint()
    world = killed(world)
    first_ms = world.clock.now_ms()
    world.clock.advance(7_000)
    assert told_lost_ms(world, 3) == first_ms
    for session in (4, 5):
        world.clock.advance(60_000)
        world.core.checkpoint()
        world = world.restarted()
        assert told_lost_ms(world, session) == first_ms
    world.state.flip(b"offers")
    world = world.restarted()
    assert told_lost_ms(world, 6) == first_ms, "it is stored twice"
    world.clock.advance(60_000)
    assert told_lost_epoch(world, 7) < world.server.epoch
    world = killed(killed(world))
    assert told_lost_ms(world, 8) == world.clock.now_ms() > first_ms
    assert told_lost_epoch(world, 9) == world.server.epoch


def test_rule_C1_a_start_that_finds_a_damaged_value_takes_its_last_life_for_one_that_ended_uncleanly() -> None:
    world = World().restarted()
    world.state.flip(b"offers")
    world.state.flip(b"copy/offers")
    world = killed(world)
    assert told_lost_ms(world, 1) == world.clock.now_ms()


def test_a_life_that_offers_what_is_durable_loses_nothing_and_tells_of_the_life_before() -> None:
    world = killed(World(settings={"offer_durable_only": True}), offer_durable_only=False)
    assert told_lost_ms(world, 1) == 0
    world = killed(world, offer_durable_only=True)
    at_ms = world.clock.now_ms()
    assert told_lost_ms(world, 2) == at_ms
    world.clock.advance(60_000)
    assert told_lost_ms(killed(world), 3) == at_ms


def test_rule_C1_after_a_reboot_the_next_life_tells_of_the_former_when_the_clock_is_confirmed() -> None:
    world = World()
    world = killed(world, world.clock.reboot(5_000))
    begun_ms = world.clock.now_ms()
    world.clock.advance(7_000)
    world.clock.step_wall(-3_600_000)
    assert told_lost_ms(world, 1) == begun_ms - 3_600_000, "its own age it knows in any case"
    again = world.restarted()
    again.clock.advance(7_000)
    assert told_lost_ms(again, 2) == again.clock.now_ms(), "nobody knows when the life before began"
    begun_ms = again.clock.now_ms() - 7_000
    again.clock.advance(BELIEVED_AFTER_MS)
    assert told_lost_ms(again, 3) == begun_ms
    again.clock.advance(60_000)
    assert told_lost_ms(again.restarted(), 4) == begun_ms


@pytest.mark.parametrize("word", [RequestType.NACK, RequestType.RETRY, RequestType.REJECT])
def test_rule_Q5_the_word_of_a_consumer_whose_pull_a_power_cut_took_is_not_taken_for_that_of_the_next(
    word: RequestType,
) -> None:
    world, delay, commits, fsyncs = stepped()
    waiting(world, fsyncs, most=1)
    dispatch(world, delay, 1, b"a")
    commits.run_all()
    fsyncs.run_all()
    peer, asked = waiting(world, fsyncs, most=1)
    (pulls,) = files(world.disk, "/data/realtime/pull")
    kept = content(world.disk, pulls)
    dispatch(world, delay, 2, b"b")
    commits.run_all()
    old = [need_u64(peer.answers[asked][0][0], "incarnation"), 1, 1]
    disk = world.disk.after_kill()
    put(disk, pulls, kept)
    world = World(disk, world.state.after_crash(disk))
    pulled = world.pull(SimPeer())
    (new,) = pulled.handles
    assert new[1:] == [1, 1] and pulled.bodies == [b"b"], "the number of the lost pull is given out again"

    def say(handle: list[int]) -> object:
        names: Head = {"subject": SUBJECT, "group": GROUP}
        said: Head = {"handles": [[*handle]], "retries": [[*handle, 1_000, ""]], "rejects": [[*handle, "bad", ""]]}
        return world.ask(SimPeer(), word, names | said)[0]["stale"]

    assert say(new) == []
    assert say(new) == [], "its answer may have been lost"
    assert say(old) == [old]


@pytest.mark.parametrize("word", [RequestType.ACK, RequestType.RETRY])
def test_a_power_cut_takes_back_what_was_said_before_an_operator_moved_the_group(word: RequestType) -> None:
    world, delay, commits, fsyncs = stepped()
    waiting(world, fsyncs)
    dispatch(world, delay, 1, b"a")
    commits.run_all()
    before = world.recovered.message_log.end
    peer, asked = waiting(world, fsyncs)
    dispatch(world, delay, 2, b"b", b"c")
    commits.step()
    incarnation = peer.answers[asked][0][0]["incarnation"]
    assert isinstance(incarnation, int)
    names: Head = {"subject": SUBJECT, "group": GROUP}
    handle = [incarnation, 1, 2]
    said: Head = {"handles": [[*handle]], "retries": [[*handle, 1_000, ""]]}
    world.send(peer, word, names | said)
    world.send(SimPeer(), RequestType.MOVE_GROUP, names | {"to": {"sequence": 0}})
    disk = world.disk.after_kill()
    (messages,) = files(disk, "/data/realtime/message")
    put(disk, messages, content(disk, messages)[: before - world.recovered.message_log.end])
    world, delay = World(disk, world.state.after_crash(disk)), SimPeer()
    world.hello(delay, 9)
    world.dispatch(delay, 9, dispatch_batch(7, [b"x", b"y"]))
    assert not world.core.retries.origins()
    assert world.ack(SimPeer(), [handle]) == [handle]
    assert world.pull(SimPeer()).bodies == [b"a", b"x", b"y"]


def test_rule_L8_a_start_on_a_full_disk_sets_groups_back_when_there_is_space() -> None:
    world, delay, commits, fsyncs = stepped(free_bytes_all=0)
    waiting(world, fsyncs)
    before = world.recovered.message_log.end
    dispatch(world, delay, 1, b"a", b"b")
    commits.step()
    disk = world.disk.after_kill()
    (messages,) = files(disk, "/data/realtime/message")
    put(disk, messages, content(disk, messages)[: before - world.recovered.message_log.end])
    disk.capacity_bytes = disk.used_bytes + 100  # The record does not fit in, and a checkpoint does.
    world, delay = World(disk, world.state.after_crash(disk)), SimPeer()
    for _ in range(30):
        with pytest.raises(NotReady, match="tried again by itself"):
            world.pull(SimPeer())
        world.pass_time(REST_MS)
    assert not world.begun_anew, "it waits in place"
    disk.capacity_bytes = CAPACITY_BYTES
    world.hello(delay, 9)
    world.dispatch(delay, 9, dispatch_batch(7, [b"x"]))
    for _ in range(10):
        world.pass_time(REST_MS)
    assert len(world.begun_anew) == 1
    assert world.pull(SimPeer()).bodies == [b"x"]
    assert world.restarted().pull(SimPeer()).bodies == []


def test_rule_L10_what_nobody_can_judge_now_waits_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    world, delay, commits, fsyncs = stepped()
    waiting(world, fsyncs)
    dispatch(world, delay, 1, b"a")
    commits.run_all()
    disk, state, path, whole = cut_and_damaged(world, 0)
    world = World(disk, state)
    put(disk, path, whole)
    with monkeypatch.context() as patched:
        patched.setattr(Index, "first_from", unknown)
        for _ in range(30):
            world.pass_time(REST_MS)
        assert not world.begun_anew
    for _ in range(10):
        world.pass_time(REST_MS)
    assert len(world.begun_anew) == 1


def unknown(self: Index, subject: Subject, offset: int) -> int:
    raise NotReady("its consume log is made again")
