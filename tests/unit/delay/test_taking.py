"""What producers are answered: each batch by itself, with the rows and the name of a refusal, and never half of one."""

from __future__ import annotations

from collections.abc import Callable

import msgpack
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import MOVED_PRODUCER_ID, ProducerPart
from delayd.batch.names import retry_subject
from delayd.batch.validate import check_expiry, refused_rows
from delayd.errors import BadExpiry, BatchMalformed, DelaydError, DiskReserve, SlowDown, Stopping
from delayd.hours import INSTANT_MS_MAX, INSTANT_MS_MIN
from delayd.log.group import GroupKind
from delayd.log.log import LogPlace, open_log
from delayd.log.segment import FileKind
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import BATCHES_MAX
from tests.batches import messages
from tests.worlds.delay import FOLDER, Asker, World, encode_wanted, wanted

HOUR_MS = 3_600_000
PIECE_BATCHES = 64  # Of one SEND in one turn of the loop.
SUBJECT = retry_subject(0xB0B, 3).encode()
PRODUCER_ID = 9


def sent(number: int, after_ms: int = HOUR_MS, rows: int = 2, low_water: int = 0) -> bytes:
    return encode_wanted(wanted(rows, after_ms, f"m{number}"), ProducerPart(PRODUCER_ID, number, low_water))


def one(**more: object) -> bytes:
    """A batch of one message."""
    return messages([b"a"], due=[START_MS + HOUR_MS], part=ProducerPart(7, 1, 1), **more)  # type: ignore[arg-type]


def damaged(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x40]) + data[position:][1:]


def results_of(world: World, body: bytes, kind: RequestType = RequestType.SEND) -> list[Head]:
    return need_maps(world.ask(kind, body=body)[0], "results")


def told(world: World, body: bytes, kind: RequestType = RequestType.SEND) -> object:
    """By which name a batch is refused; None when it is taken."""
    (result,) = results_of(world, body, kind)
    return result.get("error")


def is_known(world: World, number: int) -> bool:
    asked: Head = {"log_id": world.server.log_id, "producer_id": PRODUCER_ID, "producer_batch": number}
    return world.ask(RequestType.OUTCOME, asked)[0]["state"] == "accepted"


def test_rule_I1_numbers_below_the_low_water_mark_are_forgotten_and_refused() -> None:
    world = World()
    assert not told(world, sent(1)) and is_known(world, 1)
    assert results_of(world, sent(1))[0]["duplicate"] is True
    assert not told(world, sent(2, low_water=2)) and not is_known(world, 1)
    assert told(world, sent(1)) == "batch_number_reused" and world.status("next_sequence") == 5


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (one(subjects=[b"no spaces"]), "bad_subject"),
        (one(subjects=[SUBJECT]), "bad_subject"),
        (one(tags=[["eu", "%dead"]]), "bad_tags"),
        (one(headers=[msgpack.packb({"delayd.attempt": "9"})]), "bad_headers"),
        (damaged(one(), -1), "batch_malformed"),
        (messages([b"a"], due=[START_MS], part=ProducerPart(MOVED_PRODUCER_ID, 0, 0)), "batch_malformed"),
        (one(subjects=[b"a%retry/b"]), None),
        (one(tags=[["50%", "a%b"]]), None),
        (one(headers=[msgpack.packb({"x": "delayd.attempt", "my-delayd.x": "1"})]), None),
    ],
)
def test_a_client_can_not_send_what_only_servers_may_and_what_makes_no_sense(body: bytes, code: str | None) -> None:
    world = World()
    assert told(world, body) == code and world.status("next_sequence") == (1 if code else 2)
    assert told(World(), body, RequestType.SEND_AGAIN), "it is no batch of a realtime server that sends again"


@pytest.mark.parametrize("wrong", [-1, 0, START_MS // 1000, INSTANT_MS_MIN - 1])
def test_what_is_no_instant_is_refused_with_its_rows(wrong: int) -> None:
    (result,) = results_of(World(), messages([b"x", b"y"], due=[START_MS, wrong]))
    assert (result["error"], result["rows"]) == ("bad_instant", [1]) and "seconds" in str(result["message"])


@pytest.mark.parametrize("wrong", [START_MS, START_MS - 1, 1, -1, -(2**63), INSTANT_MS_MAX + 1, 2**63 - 1])
def test_rule_S8_an_expiry_before_the_due_instant_is_refused_with_its_rows(wrong: int) -> None:
    expires = [0, wrong, START_MS + 1, INSTANT_MS_MAX, wrong]
    data = messages([b"x"] * 5, due=[START_MS] * 5, expires=expires)
    (result,) = results_of(World(), data)
    assert (result["error"], result["rows"]) == ("bad_expiry", [1, 4])
    with pytest.raises(BadExpiry) as caught:
        check_expiry(parse(data), again=False)
    assert refused_rows(caught.value) == [1, 4]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        sent(1)[:-8],
        sent(1) + bytes(8),
        sent(1) + bytes(40),
        sent(1) + damaged(sent(2), 8),  # A length that leads nowhere.
        sent(1) + damaged(sent(2), 11),
        damaged(sent(1), 9) + sent(2),
        sent(1) * (BATCHES_MAX + 1),
    ],
)
def test_a_body_whose_lengths_do_not_chain_is_refused_whole(body: bytes) -> None:
    world = World()
    with pytest.raises(BatchMalformed):
        world.ask(RequestType.SEND, body=body)
    assert not is_known(world, 1) and world.status("next_sequence") == 1


def test_rule_B2_a_send_of_thousands_of_batches_is_taken_in_pieces_in_turn_with_others() -> None:
    world, turns = World(), list[Callable[[], None]]()
    requests = world.server.frames(soon=turns.append)
    many, few = Asker(), Asker()
    body = b"".join(sent(number, rows=1) for number in range(1, BATCHES_MAX + 1))
    requests.received(many, Frame(RequestType.SEND, 0, 1, {}, memoryview(body)))
    piece = world.server.queued_bytes
    assert 0 < piece <= PIECE_BATCHES * (len(sent(1)) + 1_024), "1,024 bytes are what a batch takes besides its own"
    requests.received(few, Frame(RequestType.SEND, 0, 1, {}, memoryview(sent(100_000) + sent(100_001))))
    count = 0
    while turns:
        before = world.server.queued_bytes
        turns.pop(0)()
        count += 1
        assert world.server.queued_bytes <= before + piece + 1_000
        world.settle()
        assert few.told or count < 3, "the small one waits for two pieces, and not for sixty-four"
    for asker, batches in ((few, 2), (many, BATCHES_MAX)):
        (answer,) = asker.told
        assert not isinstance(answer, DelaydError) and len(need_maps(answer[0], "results")) == batches
    requests.disconnected(many)
    requests.disconnected(few)
    assert not requests.allowances, "a connection that ends leaves nothing behind (rule B1)"


def test_rule_B2_a_group_holds_so_many_rows_and_batches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    place = LogPlace(f"{FOLDER}/message", FileKind.MESSAGE, world.server.log_id)
    for name, most, first in (("GROUP_ROWS_MAX", 10, 1), ("BATCHES_MAX", 4, 101)):
        monkeypatch.setattr(f"delayd.delay.intake.{name}", most)
        answers = [world.begin(RequestType.SEND, body=sent(number, rows=4)) for number in range(first, first + 11)]
        world.settle()
        assert all(isinstance(answer, tuple) for (answer,) in answers)
        monkeypatch.undo()
    log = open_log(world.disk, place, START_MS)
    sizes = [found.header.batch_count for found in log.scan(0, log.durable) if found.header.kind == GroupKind.DATA]
    assert sizes == [1, 2, 2, 2, 2, 2, 1, 4, 4, 2], "the first of each series was alone"


def test_rule_L8_far_messages_are_refused_before_near_ones_and_a_full_hour_with_the_rows_in_it() -> None:
    world = World(free_bytes_far=2_000_000, free_bytes_all=1_000_000, hour_rows_max=4)
    for free_bytes, far, near in ((1_500_000, True, False), (500_000, True, True), (3_000_000, False, False)):
        world.disk.capacity_bytes = world.disk.used_bytes + free_bytes
        world.pass_ms(1_000)  # It reads each second how much is free.
        assert told(world, sent(free_bytes, 7_200_000, rows=1)) == ("disk_reserve" if far else None)
        assert told(world, sent(free_bytes + 1, 1_000, rows=2)) == ("disk_reserve" if near else None)
        mixed = [*wanted(1, 1_000, f"n{free_bytes}"), *wanted(1, 7_200_000, f"f{free_bytes}")]
        (result,) = results_of(world, encode_wanted(mixed, ProducerPart(11, free_bytes, 0)))
        assert result.get("rows") == ([] if near else [1] if far else None), (
            "a near message need not wait for a far one"
        )
    world.server.sweep()
    (result,) = results_of(
        world, encode_wanted([*wanted(1, 7_200_000, "a"), *wanted(1, 5, "b")], ProducerPart(7, 1, 0))
    )
    assert (result["error"], result["rows"]) == ("hour_full", [1])
    assert not told(world, sent(1, 7_200_000))
    # It is full for messages that are filed in it after the clock was set back, too.
    world.clock.step_wall(-7_200_000)
    assert told(world, sent(2, -7_000_000)) == "hour_full"
    assert all(error.retry_after_ms > 0 for error in (DiskReserve("x"), SlowDown("x"), Stopping("x")))


def test_near_messages_are_taken_while_far_ones_wait_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(checkpoint_bytes=40_000, replay_lag_bytes_max=40_000)
    monkeypatch.setattr(world, "executors", lambda: (world.threads.commit, world.threads.outcomes))  # No checkpoints.

    def refused() -> str:
        return " ".join([wait.what for wait in world.core.standing.refuses()])

    def refused_after(first: int, after_ms: int) -> int:
        number = first
        while told(world, sent(number, after_ms, rows=20)) is None:
            number += 1
        return number

    number = refused_after(1, 7_200_000)
    assert "hour 2027011509 or later" in refused()
    (result,) = results_of(world, sent(number, 7_200_000, rows=5_000))
    assert (result["error"], result["rows"]) == ("slow_down", []), "a batch of far ones stays in one piece"
    mixed = [*wanted(1, 1_000, "near"), *wanted(1, 7_200_000, "far")]
    (result,) = results_of(world, encode_wanted(mixed, ProducerPart(11, 1, 0)))
    assert (result["error"], result["rows"]) == ("slow_down", [1]), "a near message need not wait for a far one"
    last = refused_after(number + 1, 1_000)
    assert last > number + 2, "an eighth more for near messages"
    assert refused() == "all sends"
    monkeypatch.undo()
    world.pass_ms(1_000)
    assert told(world, sent(last + 1, 7_200_000)) is None
    assert refused() == ""


def test_rule_B1_new_subjects_are_refused_with_their_rows_while_there_is_no_room_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()

    def told_rows(number: int, *subjects: bytes) -> object:
        names, count = list(dict.fromkeys(subjects)), len(subjects)
        body = messages(
            [b"x"] * count,
            due=[START_MS + HOUR_MS] * count,
            subjects=names,
            subject_of=[names.index(name) for name in subjects] if len(names) > 1 else None,
            part=ProducerPart(PRODUCER_ID, number, 0),
        )
        (result,) = results_of(world, body)
        return (result["error"], result["rows"]) if "error" in result else None

    assert told_rows(1, b"known") is None
    monkeypatch.setattr("delayd.delay.subjects.BYTES_MAX", 1)
    world.pass_ms(1_000)
    world.server.sweep()
    assert told_rows(2, b"known") is None
    assert told_rows(3, b"new") == ("slow_down", [0])
    assert told_rows(4, b"known", b"new", b"known", b"newer") == ("slow_down", [1, 3])


def test_a_stop_on_a_full_disk_ends_and_keeps_what_was_accepted() -> None:
    world = World()
    assert not told(world, sent(1))
    world.disk.capacity_bytes = world.disk.used_bytes
    world.begin(RequestType.SEND, body=sent(2))
    assert world.stop()
    after = world.after_crash(PowerLoss.ALL_LOST)
    assert is_known(after, 1) and not is_known(after, 2)
