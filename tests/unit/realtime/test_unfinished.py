"""UNFINISHED: which recurring schedules have messages that no group is done with, against the core in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgpack
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import BatchKind
from delayd.batch.labels import OCCURRENCE_MS, SCHEDULE
from delayd.batch.names import retry_subject
from delayd.errors import BadRequest, DamagedData
from delayd.testing.executor import StepExecutor
from delayd.wire.frame import Head
from delayd.wire.recurring import AskedSchedule, Unfinished, read_unfinished, schedules_head
from delayd.wire.requests import RequestType
from realtime import unfinished
from tests.batches import messages
from tests.worlds.dispatch_batches import DUE_MS, ORIGIN, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head
from tests.worlds.rotten import OUT_OF_MEMORY, flip, flip_value

DAILY, HOURLY, OTHER = "daily", "hourly", "other"
ALL = (DAILY, HOURLY, OTHER)


class Row(NamedTuple):
    """A message: the schedule that it says it is of, and more."""

    name: str = ""
    tags: tuple[str, ...] = ()
    expires_ms: int = 0
    body: bytes = b"x"


def batch_of(batch_id: int, rows: Sequence[Row], subject: str = SUBJECT) -> bytes:
    headers = [msgpack.packb({SCHEDULE: row.name, OCCURRENCE_MS: "1"}) if row.name else b"" for row in rows]
    return messages(
        [row.body for row in rows],
        due=[DUE_MS] * len(rows),
        headers=headers,
        tags=[row.tags for row in rows] if any(row.tags for row in rows) else None,
        expires=[row.expires_ms for row in rows] if any(row.expires_ms for row in rows) else None,
        subjects=[subject.encode()],
        sequences=range(1_000 * batch_id, 1_000 * batch_id + len(rows)),
        kind=BatchKind.DISPATCH,
        part=parse(dispatch_batch(batch_id, [b""])).dispatch,
    )


def world_of(*batches: Sequence[Row], **settings: int) -> tuple[World, SimPeer]:
    world, peer = World(settings=settings), SimPeer()
    world.hello(peer, 1)
    for batch_id, rows in enumerate(batches, 1):
        world.dispatch(peer, 1, batch_of(batch_id, rows))
    return world, peer


def asked(world: World, *pairs: tuple[str, str]) -> Unfinished:
    wanted = [AskedSchedule(*pair) for pair in pairs]
    head, _ = world.ask(SimPeer(), RequestType.UNFINISHED, schedules_head(wanted))
    assert head["log_id"] == world.log_id
    return read_unfinished(head, len(wanted))


def busy(world: World, subject: str = SUBJECT) -> list[str]:
    """The schedules of a subject that have messages which are unacknowledged."""
    answer = asked(world, *((subject, name) for name in ALL))
    assert answer.unknown == []
    return [ALL[place] for place in sorted([*answer.unfinished, *answer.ungrouped])]


def pulled(world: World, peer: SimPeer, most: int = 1_000, group: str = GROUP, **terms: object) -> list[list[int]]:
    head, _ = world.ask(peer, RequestType.PULL, {**pull_head(group, most=most), **terms})  # type: ignore[dict-item]
    return [[head["incarnation"], part[0], part[2]] for part in head["parts"]]  # type: ignore[union-attr,list-item,index]


def said(world: World, peer: SimPeer, kind: RequestType, **head: object) -> Head:
    return world.ask(peer, kind, {"subject": SUBJECT, "group": GROUP, **head})[0]  # type: ignore[dict-item]


def test_a_message_is_unfinished_until_the_last_group_has_acknowledged_it() -> None:
    world, peer = world_of([Row(), Row(DAILY), Row()])
    assert busy(world) == [DAILY], "without any group it is while it is kept"
    handles = pulled(world, peer)
    assert busy(world) == [DAILY], "a consumer has it"
    assert pulled(world, peer, 1, "late")
    world.ack(peer, handles)
    assert busy(world) == [DAILY], "it is new for the other group"
    world.ack(peer, pulled(world, peer, group="late"), "late")
    assert busy(world) == []


def test_without_a_group_nobody_is_done_with_what_is_kept_and_that_is_told_apart() -> None:
    world, peer = world_of([Row(DAILY)])
    assert asked(world, (SUBJECT, DAILY)) == ([], [0], [], [])
    assert pulled(world, peer)
    assert asked(world, (SUBJECT, DAILY)) == ([0], [], [], [])
    said(world, peer, RequestType.DELETE_GROUP)
    assert asked(world, (SUBJECT, DAILY)) == ([], [0], [], [])


def test_rule_L2_the_answer_waits_until_what_it_rests_on_is_durable() -> None:
    before, peer = world_of([Row(DAILY)])
    handles = pulled(before, peer)
    before._end()
    pulls = StepExecutor()
    world = World(before.disk, before.state, before.clock.restarted(), pulls=pulls)
    world.send(peer, RequestType.ACK, {"subject": SUBJECT, "group": GROUP, "handles": handles})
    number = world.send(peer, RequestType.UNFINISHED, schedules_head([AskedSchedule(SUBJECT, DAILY)]))
    assert number not in peer.answers
    pulls.run_all()
    ((head, _),) = peer.answers[number]
    assert head["unfinished"] == []


def test_each_place_of_the_question_is_answered_and_other_subjects_and_names_are_not() -> None:
    world, peer = world_of([Row(DAILY), Row(HOURLY)])
    world.ack(peer, pulled(world, peer, 1))
    pairs = [("a", HOURLY), (SUBJECT, DAILY), (SUBJECT, HOURLY), ("", ""), (SUBJECT, HOURLY), (SUBJECT, "hour")]
    assert asked(world, *pairs) == ([2, 4], [], [], [])
    assert asked(world) == ([], [], [], [])


@pytest.mark.parametrize("name", ["a", "a" * 31, "a" * 32, "a" * 200, "ä" * 16, "ä" * 100, "a" * 15 + "ä" * 8 + "\n"])
def test_a_name_is_found_however_long_it_is(name: str) -> None:
    world, _ = world_of([Row(name)], [Row(name + "a")])
    wanted = [name, name[:-1], name + "b", name + "a"]
    assert asked(world, *((SUBJECT, each) for each in wanted)).ungrouped == [0, 3]


def test_what_was_given_back_waits_or_lapsed_is_unfinished() -> None:
    world, peer = world_of([Row(DAILY)])
    for _ in range(3):
        said(world, peer, RequestType.NACK, handles=pulled(world, peer))
        assert busy(world) == [DAILY]
        world.pass_time(20_000)
    pulled(world, peer)
    world.pass_time(60_000)
    assert busy(world) == [DAILY]
    world.ack(peer, pulled(world, peer))
    assert busy(world) == []


def test_what_leaves_to_come_again_is_unfinished_until_its_delay_server_has_it_and_again_names_its_group() -> None:
    world, peer = world_of([Row(DAILY), Row(HOURLY)])
    ((incarnation, first, _),) = pulled(world, peer)
    said(world, peer, RequestType.RETRY, retries=[[incarnation, first, 1, 5_000, "no"]])
    said(world, peer, RequestType.REJECT, rejects=[[incarnation, first + 1, 1, "bad", "no"]])
    assert busy(world) == [DAILY], "a dead letter on its way is not"
    (retry, _) = world.core.retries.waiting(ORIGIN)
    world.core.retries.accepted(retry)
    (group_id,) = asked(world, (SUBJECT, DAILY)).again
    assert asked(world, (SUBJECT, DAILY)) == ([], [], [], [group_id])
    again = retry_subject(world.log_id, group_id)
    world.dispatch(peer, 1, batch_of(2, [Row(DAILY)], again))
    assert busy(world) == [DAILY], "it has come again, and its subject is that of its schedule"
    assert busy(world, again) == [DAILY], "whoever asks for the subject of what comes again is told, too"
    world.ack(peer, pulled(world, peer))
    assert busy(world) == []


def test_a_group_that_an_operator_pauses_moves_or_deletes() -> None:
    world, peer = world_of([Row(DAILY)])
    world.ack(peer, pulled(world, peer))
    said(world, peer, RequestType.PAUSE_GROUP, paused=True)
    assert busy(world) == []
    said(world, peer, RequestType.MOVE_GROUP, to="earliest")
    assert busy(world) == [DAILY], "it comes again, once the pause is over"
    said(world, peer, RequestType.MOVE_GROUP, to="latest")
    assert busy(world) == []
    said(world, peer, RequestType.MOVE_GROUP, to="earliest")
    assert pulled(world, peer, group="late")
    world.dispatch(peer, 1, batch_of(2, [Row(HOURLY)]))
    said(world, peer, RequestType.MOVE_GROUP, to="latest")
    said(world, peer, RequestType.DELETE_GROUP, group="late")
    assert busy(world) == [], "what a deleted group held is ended"


def test_what_a_group_would_pass_over_is_not_unfinished() -> None:
    at_ms = World().clock.now_ms()
    world, peer = world_of(
        [Row(DAILY, ("red",)), Row(HOURLY, ("blue",)), Row(HOURLY), Row(OTHER, ("blue",), at_ms + 5)]
    )
    assert busy(world) == [DAILY, HOURLY, OTHER]
    pulled(world, peer, 1, tags_any=["blue"])
    assert busy(world) == [HOURLY, OTHER]
    said(world, peer, RequestType.NACK, handles=[[0, 0, 1]])
    world.pass_time(5)
    assert busy(world) == [HOURLY], "it has expired"


def test_a_message_that_a_consumer_holds_does_not_expire_and_without_a_group_it_does() -> None:
    at_ms = World().clock.now_ms()
    world, peer = world_of([Row(DAILY, (), at_ms + 5)])
    assert busy(world) == [DAILY]
    handles = pulled(world, peer)
    world.pass_time(5)
    assert busy(world) == [DAILY]
    said(world, peer, RequestType.NACK, handles=handles)
    assert busy(world) == []
    said(world, peer, RequestType.DELETE_GROUP)
    assert busy(world) == []


def test_a_group_that_begins_later_passes_over_what_came_before() -> None:
    world, peer = world_of([Row(DAILY)])
    pulled(world, peer, start={"instant_ms": DUE_MS + 1_000_000_000})
    assert busy(world) == []


def test_batches_that_are_read_from_disk_are_searched() -> None:
    world, peer = world_of(*[[Row(), Row(DAILY), Row()]] * 20, [Row(HOURLY)], **OUT_OF_MEMORY)
    world.core.checkpoint()
    assert busy(world) == [DAILY, HOURLY]
    for handle in pulled(world, peer)[:-1]:
        world.ack(peer, [handle])
    assert busy(world.restarted()) == [HOURLY]


@pytest.mark.parametrize("held", [False, True])
def test_a_batch_that_does_not_check_counts_only_while_a_consumer_holds_it(held: bool) -> None:
    world, peer = world_of([Row(DAILY, body=b"bad" * 100)], [Row(HOURLY)], **OUT_OF_MEMORY)
    world.core.checkpoint()
    handles = pulled(world, peer)
    if not held:
        said(world, peer, RequestType.NACK, handles=handles)
    world = world.restarted()
    flip(world.disk, b"bad" * 100)
    assert busy(world) == (list(ALL) if held else [HOURLY])


def test_a_group_whose_progress_is_lost_is_done_with_nothing_that_is_kept() -> None:
    world, peer = world_of([Row(DAILY)])
    world.ack(peer, pulled(world, peer))
    world.ack(peer, pulled(world, peer, group="other"), "other")
    assert busy(world) == []
    world._end()
    flip_value(world.state, min(key for key in world.state._pairs if key.startswith(b"group/")))
    world = World(world.disk, world.state, world.clock.restarted())
    assert len(world.core.groups.roster.lost) == 1
    assert busy(world) == [DAILY] and busy(world, "a") == []
    (entry,) = world.core.groups.roster.all_lost
    world.ask(peer, RequestType.MEND, {"id": entry.id, "decision": "give-up"})
    assert busy(world) == []


def test_a_subject_whose_consume_log_is_being_rebuilt_is_unknown_and_others_are_told() -> None:
    before, peer = world_of([Row(DAILY)])
    before.dispatch(peer, 1, batch_of(2, [Row(DAILY)], "sound"))
    before.restarted()._end()
    work = StepExecutor()
    world = World(before.disk, before.state, before.clock.restarted(), work=work)
    subject = world.core._index.subject(SUBJECT)
    world.core._index.damaged(subject, DamagedData("consume", 0, "flipped"))
    assert asked(world, (SUBJECT, DAILY), ("sound", DAILY)) == ([], [1], [0], [])
    work.run_all()
    world.core.wake()
    work.run_all()
    assert asked(world, (SUBJECT, DAILY), ("sound", DAILY)) == ([], [0, 1], [], [])


def test_rule_B2_a_search_ends_behind_so_many_bytes_and_what_is_not_searched_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, peer = world_of(*[[Row()]] * 4, [Row(DAILY)])
    world.dispatch(peer, 1, batch_of(9, [Row()], "sound"))
    monkeypatch.setattr(unfinished, "SEARCH_BYTES", 6 * unfinished.KEPT_BYTES_MIN)
    assert busy(world) == [DAILY]
    monkeypatch.setattr(unfinished, "SEARCH_BYTES", 3 * unfinished.KEPT_BYTES_MIN)
    assert busy(world) == list(ALL)
    assert asked(world, (SUBJECT, OTHER), ("sound", DAILY), (SUBJECT, DAILY)) == ([], [0], [1, 2], [])
    assert asked(world, ("sound", DAILY), (SUBJECT, DAILY)) == ([], [1], [], [])
    world.ack(peer, pulled(world, peer))
    assert busy(world) == [], "a group that is caught up costs nothing"


LEAST = unfinished.KEPT_BYTES_MIN


@pytest.mark.parametrize(
    ("rows", "spent"),
    [
        ([Row(body=bytes(200_000))], 200_000),
        ([Row("else", body=b"")] * 100, LEAST + 100 * unfinished.MARK_BYTES),
        ([Row(body=b"")] * 50, LEAST + 50 * unfinished.RUN_BYTES),
    ],
    ids=["large batches", "many marks", "many runs"],
)
def test_rule_B2_whatever_takes_time_counts(monkeypatch: pytest.MonkeyPatch, rows: list[Row], spent: int) -> None:
    world, peer = world_of(rows)
    for _ in rows:
        assert pulled(world, peer, 1)
    monkeypatch.setattr(unfinished, "SEARCH_BYTES", 2 * spent)
    assert busy(world) == []
    monkeypatch.setattr(unfinished, "SEARCH_BYTES", spent - 1)
    assert busy(world) == list(ALL)


def test_rule_B2_headers_that_are_decoded_count(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = msgpack.packb({"a": msgpack.packb({SCHEDULE: DAILY})})
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    world.dispatch(peer, 1, dispatch_batch(1, [b""] * 9, headers=[looks] * 9))
    most = LEAST + 9 * (unfinished.HEADERS_BYTES + unfinished.MARK_BYTES)
    monkeypatch.setattr(unfinished, "SEARCH_BYTES", most + unfinished.RUN_BYTES)
    assert busy(world) == []
    monkeypatch.setattr(unfinished, "SEARCH_BYTES", most - 1)
    assert busy(world) == list(ALL)


def test_rule_B2_batches_that_are_read_count_as_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = world_of([Row()], **OUT_OF_MEMORY)
    world.core.checkpoint()
    monkeypatch.setattr(unfinished, "SEARCH_BYTES", unfinished.READ_BYTES_MIN + unfinished.RUN_BYTES)
    assert busy(world) == []
    monkeypatch.setattr(unfinished, "SEARCH_BYTES", unfinished.READ_BYTES_MIN)
    assert busy(world) == list(ALL)


def test_rule_B2_groups_count_in_the_work_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    world, peer = world_of([Row()])
    for group in "abc":
        world.ack(peer, pulled(world, peer, group=group), group)
    monkeypatch.setattr(unfinished, "SEARCH_BYTES", 3 * unfinished.GROUP_BYTES)
    assert asked(world, (SUBJECT, DAILY), ("sound", DAILY)) == ([], [], [1], [])
    monkeypatch.setattr(unfinished, "SEARCH_BYTES", 3 * unfinished.GROUP_BYTES + 1)
    assert asked(world, (SUBJECT, DAILY), ("sound", DAILY)) == ([], [], [], [])


def test_what_retention_has_removed_is_not_unfinished() -> None:
    world, peer = world_of([Row(DAILY)], segment_bytes=4_096, retention_ms=1_000)
    world.dispatch(peer, 1, batch_of(2, [Row(body=bytes(5_000))]))
    assert busy(world) == [DAILY]
    world.hello(peer, 2, w=(1, 2))
    world.pass_time(3_600_000)
    world.core.retain()
    assert world.recovered.message_log.start
    world.dispatch(peer, 2, batch_of(3, [Row(HOURLY)]))
    assert busy(world) == [HOURLY]


def test_headers_that_only_look_like_those_of_a_schedule_are_none() -> None:
    rows = [
        msgpack.packb({"a": SCHEDULE, "b": DAILY}),
        msgpack.packb({SCHEDULE: DAILY.encode()}),
        msgpack.packb({"a": msgpack.packb({SCHEDULE: DAILY})}),
        msgpack.packb({SCHEDULE: HOURLY}),
    ]
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    world.dispatch(peer, 1, dispatch_batch(1, [b""] * 4, headers=rows))
    assert busy(world) == [HOURLY]


@pytest.mark.parametrize("rows", [[["a"]], [["a", 1]], [["a", "b", "c"]], ["ab"], [["a", "b"]] * 1_025])
def test_a_question_that_is_none_is_refused(rows: object) -> None:
    with pytest.raises(BadRequest):
        World().ask(SimPeer(), RequestType.UNFINISHED, {"schedules": rows})  # type: ignore[dict-item]


@pytest.mark.parametrize("field", ["unfinished", "ungrouped", "unknown"])
def test_an_answer_about_a_place_that_was_not_asked_for_is_refused(field: str) -> None:
    head: Head = {"log_id": 1, "unfinished": [], "ungrouped": [], "unknown": [], "again": [], field: [2]}
    assert read_unfinished(head, 3)
    with pytest.raises(BadRequest):
        read_unfinished(head, 2)
