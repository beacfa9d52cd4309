"""What can't be read is set aside, decided on or taken back, and never guessed (rules L5, L8, L10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from delayd.errors import BadArgument, DamagedData
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.group import MAGIC_BYTES
from delayd.log.hour import dispatch_path, schedule_beside_path, schedule_path
from delayd.log.log import segment_name
from delayd.machine.alarms import DAMAGED_AGAIN_MS, LOOK_MS
from delayd.outcome import MessageState
from delayd.reading.data import Data
from delayd.reading.verify import verify_files
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES
from delayd.testing.tree import PowerLoss
from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from tests.memory_files import content, put
from tests.worlds.delay import FOLDER, Remains, World, wanted

HOUR = hour_of_ms(START_MS)
FAR, FAR_MS = HOUR + 5, 5 * HOUR_MS
PATH, BESIDE, DISPATCH = schedule_path(FOLDER, FAR), schedule_beside_path(FOLDER, FAR), dispatch_path(FOLDER, HOUR)
LOG = f"{FOLDER}/message/{segment_name(0)}"
LOG_ID = f"log/{segment_name(0).removesuffix('.log')}"
AWAY = f"{FOLDER}/away.log"
SCHEDULE_ID, DISPATCH_ID = f"schedule/{hour_name(FAR)}", f"dispatch/{hour_name(HOUR)}"


def filed(world: World, count: int, name: str) -> None:
    world.send(wanted(count, FAR_MS, name))
    world.settle()
    world.checkpoint()


def aside() -> World:
    """A life with five rows of a far hour: three in a file that is away, two in the file beside it."""
    world = World()
    filed(world, 3, "filed")
    world.disk.rename(PATH, AWAY)
    filed(world, 2, "beside")
    assert world.disk.exists(BESIDE) and ids(world) == [SCHEDULE_ID]
    return world


def ids(world: World) -> list[str]:
    return [entry.id for entry in world.server.set_aside]


def mend(world: World, id_: str, decision: str = "take") -> str:
    """Have an operator decide; what was said when it was not done."""
    try:
        head, _ = world.ask(RequestType.MEND, {"id": id_, "decision": decision})
    except BadArgument as error:
        return str(error)
    return "" if head["done"] is True else str(head)


def delivered(world: World) -> None:
    world.drain(2 * FAR_MS)
    world.check_books()
    world.check_sealing()


# A file of a far hour, and the one beside it.


def test_a_file_beside_an_hour_is_not_taken_for_an_earlier_one_that_joined_it() -> None:
    world = aside()
    world.disk.rename(AWAY, PATH)
    assert not mend(world, SCHEDULE_ID) and not world.disk.exists(BESIDE)
    world.disk.rename(PATH, AWAY)
    filed(world, 2, "second")
    world.clock.advance(FAR_MS - 10_000)
    world.pass_ms(12_000)
    (entry,) = need_maps(world.ask(RequestType.MEND_LIST, {"after": "", "limit": 9})[0], "entries")
    assert entry["rows"] == 5, "the two rows beside them were read"
    assert world.missing() == {b"filed-0", b"filed-1", b"filed-2", b"beside-0", b"beside-1"}
    world.disk.rename(AWAY, PATH)
    assert not mend(world, SCHEDULE_ID)
    delivered(world)


def test_rule_L8_a_start_that_finds_no_space_to_join_files_goes_on_with_both_and_joins_them_later() -> None:
    world = aside()
    world.disk.rename(AWAY, PATH)
    world.disk.capacity_bytes = world.disk.used_bytes + len(content(world.disk, BESIDE)) // 2
    for _ in range(2):
        world = world.after_crash()
        assert ids(world) == [SCHEDULE_ID] and world.disk.exists(BESIDE)
        epoch = world.server.epoch
        world.pass_ms(DAMAGED_AGAIN_MS + 1_000)
        assert ids(world) == [SCHEDULE_ID] and world.server.epoch == epoch, "no start finds space either"
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(DAMAGED_AGAIN_MS + 1_000)
    assert not ids(world) and not world.disk.exists(BESIDE) and world.hours().get(FAR).rows == 5
    delivered(world)


@pytest.mark.parametrize("decision", ["take", "give-up"])
def test_a_decision_on_a_full_disk_is_answered_at_once_and_is_not_carried_out_later(decision: str) -> None:
    world = aside()
    world.disk.capacity_bytes = world.disk.used_bytes
    told = mend(world, SCHEDULE_ID, decision)
    assert "nothing is done, for the decision can't be stored: no space is left for " in told, told
    assert mend(world, SCHEDULE_ID, decision) == told
    world.disk.capacity_bytes = CAPACITY_BYTES
    epoch = world.server.epoch
    world.pass_ms(5_000)
    assert ids(world) == [SCHEDULE_ID] and world.server.epoch == epoch
    world.disk.rename(AWAY, PATH)
    assert not mend(world, SCHEDULE_ID) and not ids(world)
    delivered(world)


def test_what_still_checks_of_a_given_up_file_is_kept_in_front_of_what_stands_beside_it() -> None:
    world = World()
    for number in range(5):
        filed(world, 2, f"filed-{number}")
    world.disk.rename(PATH, AWAY)
    filed(world, 2, "beside")
    world.disk.rename(AWAY, PATH)
    file = world.disk.open(PATH, write=True)
    file.pwritev([b"?"], file.size() - 1)
    assert not mend(world, SCHEDULE_ID, "give-up") and not ids(world)
    # Readers find the new file whole without waiting for the next checkpoint, a minute later.
    world.settle()
    data = Data(FOLDER, world.disk)
    assert len(data.schedule(hour_name(FAR))) == 10 and not data.damage
    world.checkpoint()
    assert world.hours().get(FAR).rows == 10 and verify_files([PATH], disk=world.disk).sound
    world.drain(FAR_MS + HOUR_MS)
    assert world.missing() == {b"filed-4-0", b"filed-4-1"}


def test_outcomes_of_messages_that_were_lost_with_their_file_are_not_taken_off_what_is_pending() -> None:
    world = World()
    for name, ahead_ms in (("kept", 40 * 60_000), ("lost", 4 * HOUR_MS)):
        for due_ms in (500, ahead_ms, FAR_MS):
            world.send(wanted(2, world.clock.now_ms() - START_MS + due_ms, f"{name}{due_ms}"))
        world.pass_ms(1_000)
        world.cancel(world.receipts(f"{name}{FAR_MS}"))
        world.pass_ms(100)
        world.checkpoint()
    assert world.status("pending") == 4
    put(world.disk, PATH, content(world.disk, PATH)[:-1] + b"?")
    world.disk.rename(PATH, AWAY)
    filed(world, 1, "beside")
    world.disk.rename(AWAY, PATH)
    path = schedule_path(FOLDER, HOUR)
    put(world.disk, path, content(world.disk, path)[:-1] + b"?")
    world = world.after_crash()
    for each in ids(world):
        assert not mend(world, each, "give-up")
    # Of each of the two hours the second group is lost, and two messages in it have outcomes.
    assert not ids(world) and world.hours().get(HOUR).rows == 4 and world.hours().get(FAR).rows == 3
    for _ in range(2):
        assert world.status("pending") == 5
        world = world.after_crash(PowerLoss.ALL_LOST)
    world.clock.advance(50 * 60_000)
    world.pass_ms(2_000)
    assert world.status("pending") == 3
    world.clock.advance(6 * HOUR_MS)
    world.pass_ms(2_000)
    assert world.status("pending") == 0


def test_a_file_that_is_whole_again_waits_for_a_message_log_without_which_a_start_is_held() -> None:
    world = aside()
    whole = content(world.disk, LOG)
    world.disk.remove(LOG)
    world.pass_ms(LOOK_MS + 2_000)
    world.disk.rename(AWAY, PATH)
    epoch = world.server.epoch
    for decision in ("take", "give-up"):
        assert f"when {LOG_ID} is whole, too" in mend(world, SCHEDULE_ID, decision)
    world.pass_ms(DAMAGED_AGAIN_MS + 1_000)
    assert world.server.epoch == epoch, "a start would be held, and this life goes on"
    put(world.disk, LOG, whole)
    world.pass_ms(LOOK_MS + DAMAGED_AGAIN_MS + 2_000)
    assert not ids(world) and world.server.epoch == epoch + 1
    delivered(world)


def test_a_file_that_only_looks_whole_has_the_server_begin_anew_once_in_thirty_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = aside()
    monkeypatch.setattr("delayd.delay.damage.mending.check_schedule", lambda *args: None)
    begun = [world.clock.monotonic_ms()]
    while len(begun) < 4:
        epoch = world.server.epoch
        world.pass_ms(500)
        if world.server.epoch > epoch:
            begun.append(world.clock.monotonic_ms())
    assert all(later - earlier >= DAMAGED_AGAIN_MS for earlier, later in pairwise(begun[1:]))


# Dispatch logs, and the files beside them.


def beside(number: int) -> str:
    """The file that stands in for the hour's dispatch log, and for those before this one."""
    return f"{FOLDER}/quarantine/{hour_name(HOUR)}{f'.{number}' if number > 1 else ''}.log"


def rotten_in_a_row(world: World, count: int) -> dict[str, bytes]:
    """Damage an hour's dispatch log, then each file that stands in for it, with an outcome in each: what they held."""
    held: dict[str, bytes] = {}
    for number, path in enumerate([DISPATCH, *map(beside, range(1, count))]):
        world.send([*wanted(1, 500, f"now{number}"), *wanted(1, HOUR_MS, f"next{number}")])
        world.pass_ms(1_000)
        held[path] = content(world.disk, path)
        put(world.disk, path, b"rotten" + held[path][6:])
        world.pass_ms(31_000)
    world.send(wanted(1, 500, "last"))
    world.pass_ms(1_000)
    assert world.disk.exists(beside(count)) and ids(world) == [DISPATCH_ID]
    return held


@pytest.mark.parametrize("restart", [False, True])
def test_rule_L10_however_many_files_beside_a_dispatch_log_are_damaged_all_hours_are_delivered(restart: bool) -> None:
    world = World()
    held = rotten_in_a_row(world, 3)
    held[beside(3)] = content(world.disk, beside(3))
    if restart:
        put(world.disk, beside(3), b"rotten" + held[beside(3)][6:])
        world = world.after_crash(PowerLoss.ALL_LOST)
    world.clock.advance(HOUR_MS)
    world.pass_ms(2_000)
    assert not world.missing()
    for path, whole in list(held.items())[: 4 if restart else 3]:
        assert ids(world) == [DISPATCH_ID]
        put(world.disk, path, whole)
        world.pass_ms(31_000)
    assert not ids(world) and not world.disk.list_folder(f"{FOLDER}/quarantine")
    delivered(world)


def test_an_operator_gives_up_only_those_files_of_an_hour_that_are_damaged() -> None:
    world = World()
    held = rotten_in_a_row(world, 3)
    for path in held.keys() - {beside(2)}:
        put(world.disk, path, held[path])
    assert not mend(world, DISPATCH_ID, "give-up") and not ids(world)
    assert world.disk.list_folder(f"{FOLDER}/quarantine") == [f"{hour_name(HOUR)}.2.dispatch.dropped"]
    assert content(world.disk, DISPATCH).startswith(held[DISPATCH])


@pytest.mark.parametrize("moved", [False, True])
def test_rule_C1_a_message_that_was_cancelled_stays_so_when_the_dispatch_log_that_says_it_is_given_up(
    moved: bool,
) -> None:
    world = World()
    world.send([*wanted(2, 40 * 60_000, "kept"), *wanted(2, 40 * 60_000, "ended"), *wanted(2, 500, "sent")])
    world.pass_ms(2_000)
    if moved:
        world.reschedule(world.receipts("ended"), START_MS + FAR_MS)
    else:
        world.cancel(world.receipts("ended"))
    world.pass_ms(2_000)
    world.checkpoint()
    put(world.disk, DISPATCH, b"rotten" + content(world.disk, DISPATCH)[6:])
    world.pass_ms(LOOK_MS + 1_000)
    assert ids(world) == [DISPATCH_ID] and not mend(world, DISPATCH_ID, "give-up") and not ids(world)
    world.clock.advance(50 * 60_000)
    world.pass_ms(2_000)
    assert world.bodies() == [b"sent-0", b"sent-1", b"kept-0", b"kept-1"]
    world.clock.advance(HOUR_MS)
    world.pass_ms(2_000)
    world.checkpoint()
    world.sweep()
    assert world.hours().get(HOUR).sealed, "each of its rows has an outcome, also those that were handed over unfiled"
    assert world.status("pending") == (2 if moved else 0)


def test_rule_H8_a_damaged_dispatch_log_makes_nobody_a_restored_delay_server_also_when_it_is_given_up() -> None:
    world = World()
    world.send(wanted(3, 500, "m"))
    world.pass_ms(2_000)
    world.checkpoint()
    remains = world.remains(PowerLoss.ALL_LOST)
    put(remains.disk, DISPATCH, content(remains.disk, DISPATCH)[:-8])
    world = World(remains)
    for target in world.outside.targets.values():
        target.crash(world.random)  # It forgets W, so its answer names what only the damaged log has.
        target.restart()
    for _ in range(2):
        world.pass_ms(31_000)
        assert not world.server.is_fenced and not (ids(world) and mend(world, DISPATCH_ID, "give-up"))
    world.checkpoint()
    again = world.after_crash(PowerLoss.ALL_LOST)
    again.pass_ms(31_000)
    assert not again.server.is_fenced


def test_rule_L10_a_server_that_stops_writes_removed_files_again() -> None:
    world = World()
    world.send([*wanted(3, 500, "m"), *wanted(3, FAR_MS, "n")])
    world.pass_ms(2_000)
    for path in (LOG, DISPATCH):
        world.disk.remove(path)
    assert world.stop()
    world.server.close()
    again = world.after_crash(None)
    assert not ids(again) and again.disk.exists(DISPATCH)
    delivered(again)


def test_bodies_that_can_not_be_read_are_given_up_with_the_outcome_dead() -> None:
    world = World(tail_bytes=0, source_cache_bytes=1 << 20)
    filed(world, 3, "rotten")
    whole = content(world.disk, PATH)
    world.disk.open(PATH, write=True).pwritev([b"ROTTEN-1"], whole.index(b"rotten-1"))
    world.clock.advance(FAR_MS - 10_000)
    world.pass_ms(15_000)
    id_ = f"rows/{hour_name(FAR)}"
    assert ids(world) == [id_] and mend(world, id_)
    assert not mend(world, id_, "give-up") and not ids(world)
    assert world.states(world.receipts("rotten")) == [MessageState.DEAD] * 3


# The last group of the message log does not check: what names a message of it proves that it was durable (rule L5).


def two_groups(*, counted: bool = False) -> World:
    world = World()
    world.send(wanted(1, HOUR_MS, "first"))
    world.settle()
    if counted:
        world.checkpoint()
    return world


def left(world: World) -> Remains:
    world.pass_ms(1_000)
    return world.remains(PowerLoss.ALL_LOST)


def handed_over() -> tuple[Remains, str]:
    world = two_groups()
    world.send(wanted(1, 500, "last"))
    return left(world), r"message 2 from there on was durable.*give-up"


def moved() -> tuple[Remains, str]:
    """The outcome of the row that was moved names the row that took its place, which has no outcome yet."""
    world = two_groups(counted=True)
    world.reschedule(world.receipts("first"), START_MS + 2 * HOUR_MS)
    return left(world), "message 2 from there on was durable: an outcome in .* names it"


def filed_too(published: bool) -> tuple[Remains, str]:
    """A checkpoint died before the state counted it, or the state is an older one than the checkpoint file."""
    world = two_groups(counted=True)
    world.send(wanted(1, 2 * HOUR_MS, "last"))
    before = left(world)
    world.checkpoint()
    after = replace(world.remains(PowerLoss.ALL_LOST), state=before.state)
    if published:
        return after, "the checkpoint file counts the log up to"
    put(after.disk, f"{FOLDER}/checkpoint", content(before.disk, f"{FOLDER}/checkpoint"))
    return after, "message 2 from there on was durable: it is filed"


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("named", [handed_over, moved, lambda: filed_too(False), lambda: filed_too(True)])
def test_rule_L5_a_last_group_that_is_named_elsewhere_is_damage_and_is_not_cut(
    named: Callable[[], tuple[Remains, str]], flipped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    remains, why = named()
    whole = content(remains.disk, LOG)
    bad = whole[:-1] + bytes([whole[-1] ^ 1]) if flipped else whole[:-8]
    put(remains.disk, LOG, bad)
    for _ in range(2):
        with pytest.raises(DamagedData, match=why) as raised:
            World(remains)
        assert raised.value.path == LOG and content(remains.disk, LOG) == bad
    put(remains.disk, LOG, whole)
    again = World(remains)
    again.drain(3 * HOUR_MS)
    again.check_books()
    if named in (handed_over, moved):
        remains, _ = named()
        put(remains.disk, LOG, whole[: whole.rindex(MAGIC_BYTES)])
        assert World(remains).status("next_sequence") == 3, "a sequence that an outcome names is given to nobody (I5)"
        assert "log_end_lost" in caplog.text and "outcomes_up_to=2" in caplog.text


@pytest.mark.parametrize("counted", [False, True])
def test_rule_L5_a_last_group_that_nothing_names_is_cut_as_torn(counted: bool) -> None:
    world = two_groups(counted=counted)  # Rows that a checkpoint has counted prove nothing of what is behind them.
    world.send(wanted(1, 2 * HOUR_MS, "last"))
    remains = left(world)
    put(remains.disk, LOG, content(remains.disk, LOG)[:-8])
    assert World(remains).status("next_sequence") == 2


def with_room_for_the_word_alone(world: World, said: Callable[[], str]) -> str:
    """Say an operator's word on a disk that has space for it, and for nothing that comes of it; the answer."""
    for room in range(0, 4_096, 8):
        world.disk.capacity_bytes = world.disk.used_bytes + room
        told = said()
        if "nothing is done" not in told and "nothing was stored" not in told:
            return told
    raise AssertionError("it is never stored")


def test_a_word_about_rows_whose_outcome_finds_no_space_is_answered_at_once() -> None:
    world = World(tail_bytes=0, source_cache_bytes=1 << 20)
    filed(world, 3, "rotten")
    whole = content(world.disk, PATH)
    world.disk.open(PATH, write=True).pwritev([b"ROTTEN-1"], whole.index(b"rotten-1"))
    world.clock.advance(FAR_MS - 10_000)
    world.pass_ms(15_000)
    id_ = f"rows/{hour_name(FAR)}"
    told = with_room_for_the_word_alone(world, lambda: mend(world, id_, "give-up"))
    assert "no space is left for " in told and "it is stored when there is space" in told, told
    assert world.states(world.receipts("rotten")) != [MessageState.DEAD] * 3
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(3_000)
    assert world.states(world.receipts("rotten")) == [MessageState.DEAD] * 3
    assert not ids(world.after_crash())
