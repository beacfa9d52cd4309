"""Messages with keys and tags: what travels, what a receipt says, and which arguments are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import delayd
from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ColumnId
from delayd.batch.content import Names, slots_of_names
from delayd.client.asking import messages as questions
from delayd.client.asking.messages import asked_of
from delayd.client.producer import AsyncProducer
from delayd.client.sending import sender
from delayd.client.sending.receipts import Accepted, SendVerdict, Verdicts, receipts
from delayd.errors import (
    BadArgument,
    BadKey,
    BadTags,
    BatchMalformed,
    CallerError,
    DelaydError,
    InFlight,
    KeyPending,
    LogId,
    NotOwner,
    OutcomeUnknown,
    RetryLater,
    SlowDown,
)
from delayd.log.hour import ENDED, EndedRows, Reason
from delayd.net.connection import Connection
from delayd.wire.asked import ANSWER, Asked, CancelAnswer, MessageState, read_asked_keys
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import RequestType
from tests.batches import tags_of
from tests.unit.client.servers import SmallDelay, drop_after, hold, refuse
from tests.unit.client.world import LIMIT_S, PAST_MS, World, on_loop, on_steady_loop, world_aside
from tests.unit.net.loopback import error_of, skip
from tests.waiting import until

EARLIER_AT_MS = 1_900_000_000_000


def ended(*rows: tuple[Reason, int, int]) -> EndedRows:
    """Decisions about new rows: the reason, the new row's sequence, and the earlier row's."""
    made = np.zeros(len(rows), ENDED)
    for at, (reason, new, earlier) in enumerate(rows):
        replaced = reason is Reason.REPLACED
        made["sequence"][at], made["other"][at] = (earlier, new) if replaced else (new, earlier)
        made["deliver_at_ms" if replaced else "other_at_ms"][at] = EARLIER_AT_MS + earlier
        made["reason"][at] = reason
    return made[np.argsort(made["sequence"])]


def keys_of(batch: Batch) -> list[bytes]:
    if ColumnId.KEY_END not in batch:
        return [b""] * batch.count
    bounds = zip(*(side.tolist() for side in batch.region(ColumnId.KEY_END)), strict=True)
    return [bytes(batch.heap[start:end]) for start, end in bounds]


def flags_of(batch: Batch) -> list[int]:
    flags: list[int] = batch.column(ColumnId.ROW_FLAGS).tolist() if ColumnId.ROW_FLAGS in batch else [0] * batch.count
    return flags


def test_single_sends_with_keys_have_a_batch_of_their_own() -> None:
    """A server looks their keys up, and nobody else waits for that."""

    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await asyncio.gather(
                producer.send("a", b"1", deliver_at_ms=PAST_MS),
                producer.send("a", b"2", deliver_at_ms=PAST_MS, key="größe"),
                producer.send("b", b"3", deliver_at_ms=PAST_MS, key=b"k", on_conflict="keep", tags=["eu", "urgent"]),
                producer.send("b", b"4", deliver_at_ms=PAST_MS, key="k2", on_conflict="replace"),
                producer.send("b", b"5", deliver_at_ms=PAST_MS, tags=("eu",)),
                producer.send("b", b"6", deliver_at_ms=PAST_MS, tags=[]),
            )
        plain, keyed = sorted((kept.batch for kept in world.delay.kept), key=lambda batch: keys_of(batch)[0])
        assert keys_of(keyed) == ["größe".encode(), b"k", b"k2"] and flags_of(keyed) == [0, 1, 2]
        assert tags_of(keyed) == [(), ("eu", "urgent"), ()]
        assert ColumnId.KEY_END not in plain and tags_of(plain) == [(), ("eu",), ()]

    on_loop(scenario)


def test_while_keys_can_t_be_looked_up_only_sends_with_keys_wait() -> None:
    async def scenario(world: World) -> None:
        def later(connection: Connection, frame: Frame) -> bool:
            if not any(keys_of(parse(frame.body))):
                return False
            return refuse(world.delay, SlowDown("the index is being made", retry_after_ms=5), [])(connection, frame)

        world.delay.script.extend([later] * 4)
        async with AsyncProducer(world.address) as producer:
            outcomes: list[bytes] = []

            async def send(body: bytes, key: str | None) -> None:
                await producer.send("s", body, deliver_at_ms=PAST_MS, key=key)
                outcomes.append(body)

            await asyncio.gather(send(b"1", None), send(b"2", "k"), send(b"3", None))
        assert outcomes == [b"1", b"3", b"2"]

    on_loop(scenario)


def test_sends_with_keys_that_wait_take_no_place_from_other_sends() -> None:
    async def scenario(world: World) -> None:
        async def held(count: int) -> None:
            await until(lambda: len(world.delay.held) == count)

        async with AsyncProducer(world.address, linger_ms=0) as producer:
            world.delay.script.extend([hold(world.delay)] * 2)
            waiting = []
            for row in range(4):
                waiting.append(producer.send("s", b"keyed", deliver_at_ms=PAST_MS, key=f"k{row}"))
                await held(min(row + 1, 2))
            # Two batches with keys are under way, and two more sends with keys wait for a place.
            for _ in range(3):
                await producer.send("s", b"plain", deliver_at_ms=PAST_MS)
            world.delay.release()
            await asyncio.gather(*waiting)
        assert sorted(key for kept in world.delay.kept for key in keys_of(kept.batch)) == [b""] * 3 + [
            b"k%d" % row for row in range(4)
        ]

    on_loop(scenario)


def test_a_batch_takes_keys_and_tags_as_columns() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            bodies = [b"%d" % row for row in range(4)]
            keys: list[str | bytes | None] = ["a", b"b", None, "d"]
            await producer.send_batch("s", bodies, PAST_MS, keys=keys, on_conflict="replace", tags=["x", "y"])
            await producer.send_batch("s", bodies, PAST_MS, tags=[["x"], None, [], ("y", "z")])
            await producer.send_batch("s", bodies, PAST_MS, keys=[None] * 4, tags=[[]] * 4)
        first, second, third = (kept.batch for kept in world.delay.kept)
        assert keys_of(first) == [b"a", b"b", b"", b"d"] and flags_of(first) == [2, 2, 0, 2]
        assert tags_of(first) == [("x", "y")] * 4
        assert ColumnId.KEY_END not in second and tags_of(second) == [("x",), (), (), ("y", "z")]
        assert third.layout.regions == (ColumnId.BODY_END,) and len(third.layout.columns) == 2

    on_loop(scenario)


def test_a_single_send_hears_what_its_key_met() -> None:
    async def scenario(world: World) -> None:
        reasons = [None, Reason.REPLACED, Reason.REJECTED, Reason.KEPT, Reason.IN_FLIGHT]
        world.delay.next_sequence = 100
        world.delay.decide = lambda batch, base: ended(
            *((reason, base + row, 90 - row) for row, reason in enumerate(reasons) if reason is not None)
        )
        async with AsyncProducer(world.address) as producer:
            sends = [producer.send("s", b"", deliver_at_ms=PAST_MS, key=f"k{row}") for row in range(5)]
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
        accepted, replaced, rejected, kept, in_flight = outcomes
        assert isinstance(accepted, delayd.Receipt) and isinstance(replaced, delayd.Receipt)
        assert (accepted.sequence, accepted.kept, accepted.replaced, accepted.was_due) == (100, False, None, True)
        assert (replaced.sequence, replaced.kept, replaced.replaced) == (101, False, 89)
        assert isinstance(rejected, KeyPending)
        assert (rejected.sequence, rejected.deliver_at_ms, rejected.log_id) == (88, EARLIER_AT_MS + 88, 101)
        assert isinstance(kept, delayd.Receipt) and kept.kept and kept.replaced is None
        assert (kept.sequence, kept.deliver_at_ms, kept.was_due) == (87, EARLIER_AT_MS + 87, False)
        assert isinstance(in_flight, InFlight) and in_flight.retry_after_ms > 0

    on_loop(scenario)


def test_the_receipt_of_a_batch_has_one_verdict_a_row() -> None:
    async def scenario(world: World) -> None:
        world.delay.decide = lambda batch, base: ended(
            (Reason.KEPT, base + 1, 7), (Reason.REPLACED, base + 3, 8), (Reason.REJECTED, base + 4, base + 3)
        )
        world.delay.next_sequence = 1_000
        async with AsyncProducer(world.address) as producer:
            receipt = await producer.send_batch("s", [b""] * 6, PAST_MS, keys=list("abcdef"))
        met = SendVerdict
        expected = [met.ACCEPTED, met.KEPT, met.ACCEPTED, met.REPLACED, met.REJECTED, met.ACCEPTED]
        assert receipt.verdicts.tolist() == expected
        assert receipt.others.tolist() == [0, 7, 0, 8, 1_003, 0]
        assert receipt.others_at_ms.tolist() == [0, EARLIER_AT_MS + 7, 0, EARLIER_AT_MS + 8, EARLIER_AT_MS + 1_003, 0]
        assert receipt.sequences.tolist() == list(range(1_000, 1_006))
        assert delayd.BatchReceipt(()).verdicts.tolist() == []

    on_loop(scenario)


def test_rule_I1_a_repeated_batch_gets_the_same_verdicts() -> None:
    async def scenario(world: World) -> None:
        decisions: list[int] = []

        def decide(batch: Batch, base: int) -> EndedRows:
            decisions.append(base)
            return ended((Reason.REJECTED, base, 5))

        world.delay.next_sequence, world.delay.decide = 50, decide
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(drop_after(world.delay))
            error = await error_of(producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k"))
            assert isinstance(error, KeyPending) and error.sequence == 5 and decisions == [50]

    on_loop(scenario)


def test_an_unknown_outcome_tells_the_verdicts_too() -> None:
    async def scenario(world: World) -> None:
        world.delay.next_sequence = 50
        world.delay.decide = lambda batch, base: ended((Reason.KEPT, base, 5))
        async with AsyncProducer(world.address) as producer:
            world.delay.holding = True
            sending = producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
            await until(lambda: bool(world.delay.held))
            await skip(LIMIT_S)
            error = await error_of(sending)
            assert isinstance(error, OutcomeUnknown)
            world.delay.release()
            accepted = await producer.outcome(error.handle)
            assert accepted is not None
            verdicts = Verdicts.of(accepted)
            assert verdicts.verdict.tolist() == [SendVerdict.KEPT] and verdicts.other.tolist() == [5]

    on_steady_loop(scenario)


@pytest.mark.parametrize(
    "rows",
    [
        [(Reason.KEPT, 9, 5)],
        [(Reason.KEPT, 12, 5)],
        [(Reason.REPLACED, 12, 5)],
        [(Reason.CANCELLED, 10, 5)],
        [(Reason.MOVED, 10, 5)],
        [(Reason.REPLACED, 10, 5), (Reason.KEPT, 10, 6)],
    ],
)
def test_decisions_that_do_not_fit_their_batch_are_no_answer(rows: list[tuple[Reason, int, int]]) -> None:
    with pytest.raises(BatchMalformed):
        Verdicts.of(Accepted(LogId(1), 10, 2, PAST_MS, False, ended(*rows).tobytes()))


def test_an_answer_whose_decisions_can_t_be_read_leaves_the_outcome_unknown() -> None:
    async def scenario(world: World) -> None:
        world.delay.decide = lambda batch, base: ended((Reason.KEPT, base + 77, 5))
        async with AsyncProducer(world.address) as producer:
            sending = producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
            await until(lambda: len(world.delay.numbers) > 1)
            await skip(LIMIT_S)
            error = await error_of(sending)
            assert isinstance(error, OutcomeUnknown)
        assert len(world.delay.kept) == 1

    on_steady_loop(scenario)


def slot_of(subject: bytes, key: bytes) -> int:
    return int(slots_of_names(Names.of_lists([subject], [key]))[0])


def test_rule_I4_with_several_delay_servers_a_key_goes_to_its_owner_only() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        world.meta.owners = {slot_of(b"s", b"b"): other.log_id}
        async with AsyncProducer(world.address) as producer:
            sends = [producer.send("s", b"x", deliver_at_ms=PAST_MS, key=key) for key in ("a", "b", "c")]
            plain = producer.send("s", b"plain", deliver_at_ms=PAST_MS)
            receipts = await asyncio.gather(*sends, plain)
            assert [receipt.log_id for receipt in receipts[:3]] == [
                world.delay.log_id,
                other.log_id,
                world.delay.log_id,
            ]
            batch = await producer.send_batch("s", [b"x"] * 4, PAST_MS, keys=["a", "b", None, "b"])
            assert batch.log_ids[[0, 1, 3]].tolist() == [world.delay.log_id, other.log_id, other.log_id]
            assert len(batch) == 4
        keys = {
            delay.log_id: {key for kept in delay.kept for key in keys_of(kept.batch)} for delay in (world.delay, other)
        }
        assert b"b" not in keys[world.delay.log_id] and not keys[other.log_id] & {b"a", b"c"}
        assert world.meta.asked_for_owners <= 2

    on_loop(scenario)


def test_rule_I4_a_key_that_has_moved_is_sent_to_its_new_owner() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        async with AsyncProducer(world.address) as producer:
            first = await producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
            assert first.log_id == world.delay.log_id
            world.meta.owners = {slot_of(b"s", b"k"): other.log_id}

            world.delay.script.append(refuse(world.delay, NotOwner("it has moved", retry_after_ms=5), []))
            second = await producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
            assert second.log_id == other.log_id

    on_loop(scenario)


def test_rule_I4_a_key_waits_for_its_owner_and_goes_to_no_other() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        world.meta.owners = {slot_of(b"s", b"k"): other.log_id}
        await other.stop()
        world.servers.remove(other)
        async with AsyncProducer(world.address) as producer:
            sending = producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
            # After each try that fails, meta is asked where the server is.
            await until(lambda: len(world.meta.seen) > 4)
            await skip(LIMIT_S)
            error = await error_of(sending)
            assert isinstance(error, RetryLater)
        assert not world.delay.kept

    on_steady_loop(scenario)


class Waits:
    """Takes the place of `spread_ms`: a client that was refused waits for so long, and this is noted."""

    def __init__(self, wait_s: float) -> None:
        self.count = 0
        self._wait_s = wait_s

    def __call__(self, retry_after_ms: int) -> float:
        self.count += 1
        return self._wait_s * 1_000


def test_an_owner_that_meta_does_not_know_is_waited_for_at_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(LIMIT_S / 2)
    monkeypatch.setattr(sender, "spread_ms", waits)

    async def scenario(world: World) -> None:
        await world.second_delay()
        world.meta.owners = {slot_of(b"s", b"k"): 999}
        async with AsyncProducer(world.address) as producer:
            sending = producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
            await until(lambda: waits.count == 1)
            await skip(LIMIT_S / 2)
            await until(lambda: waits.count == 2)
            await skip(LIMIT_S / 2)
            error = await error_of(sending)
            assert isinstance(error, RetryLater) and "00000000000003e7 owns these keys" in error.message
        assert world.meta.asked_for_owners == 2

    on_steady_loop(scenario)


def test_a_producer_hears_that_the_keys_of_a_lost_server_have_moved() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        world.meta.owners = {slot_of(b"s", b"k"): other.log_id}
        async with AsyncProducer(world.address) as producer:
            first = await producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
            assert first.log_id == other.log_id
            await other.stop()
            world.servers.remove(other)
            world.meta.owners = {}
            second = await producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
            assert second.log_id == world.delay.log_id

    on_loop(scenario)


WRONG: list[tuple[dict[str, Any], type[DelaydError], str]] = [
    ({"key": ""}, BadKey, "0 bytes"),
    ({"key": b""}, BadKey, "0 bytes"),
    ({"key": "k" * 201}, BadKey, "201 bytes"),
    ({"key": "ä" * 101}, BadKey, "202 bytes"),
    ({"key": b"\xff"}, BadKey, "UTF-8"),
    ({"key": "\ud800"}, BadKey, "UTF-8"),
    ({"key": 7}, BadKey, "int"),
    ({"key": "k", "on_conflict": "ignore"}, BadArgument, "ignore"),
    ({"key": "k", "on_conflict": None}, BadArgument, "on_conflict"),
    ({"key": "k", "on_conflict": ["keep"]}, BadArgument, "on_conflict"),
    ({"on_conflict": "keep"}, BadArgument, "none was given"),
    ({"tags": "eu"}, BadTags, "str"),
    ({"tags": ["eu", "eu"]}, BadTags, "twice"),
    ({"tags": [""]}, BadTags, "0 bytes"),
    ({"tags": ["t" * 65]}, BadTags, "65 bytes"),
    ({"tags": [str(n) for n in range(17)]}, BadTags, "17"),
    ({"tags": [b"eu"]}, BadTags, "bytes"),
    ({"tags": ["\ud800"]}, BadTags, "UTF-8"),
    ({"tags": 7}, BadTags, "int"),
]


@pytest.mark.parametrize(("given", "kind", "said"), WRONG, ids=str)
def test_wrong_keys_and_tags_are_refused_before_anything_is_sent(
    given: dict[str, Any], kind: type[DelaydError], said: str
) -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            with pytest.raises(kind, match=said) as caught:
                producer.send("s", b"x", deliver_at_ms=PAST_MS, **given)
            assert isinstance(caught.value, CallerError)
            columns = {"keys" if name == "key" else name: value for name, value in given.items()}
            if "keys" in columns:
                columns["keys"] = ["good", columns["keys"]]
            elif "tags" in columns and isinstance(columns["tags"], list):
                columns["tags"] = [["good"], columns["tags"]]
            with pytest.raises(CallerError, match=said):
                await producer.send_batch("s", [b"x", b"y"], PAST_MS, **columns)
        assert not world.delay.numbers

    on_loop(scenario)


@pytest.mark.parametrize(
    "given", [{"keys": "ab"}, {"keys": ["a"]}, {"keys": ["a", "b", "c"]}, {"tags": [["a"]]}, {"keys": 3}], ids=str
)
def test_columns_of_another_length_are_refused(given: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            with pytest.raises(BadArgument):
                await producer.send_batch("s", [b"x", b"y"], PAST_MS, **given)

    on_loop(scenario)


def test_blocking_producers_send_keys_too() -> None:
    with world_aside() as (world, do):
        with delayd.Producer(world.address) as producer:
            receipt = producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k", on_conflict="keep", tags=["t"])
            assert receipt.sequence == 1 and not receipt.kept
            assert producer.send_nowait("s", b"x", deliver_at_ms=PAST_MS, key="k2").result().sequence == 2
            batch = producer.send_batch("s", [b"x"], PAST_MS, keys=["k3"], on_conflict="replace", tags=["u"])
            assert batch.verdicts.tolist() == [SendVerdict.ACCEPTED]
        kept = do(
            lambda: [(keys_of(kept.batch), flags_of(kept.batch), tags_of(kept.batch)) for kept in world.delay.kept]
        )
    assert kept == [([b"k"], [1], [("t",)]), ([b"k2"], [0], [()]), ([b"k3"], [2], [("u",)])]


class Pending:
    """Answers questions by key as a delay server does; it knows the keys of one subject."""

    def __init__(self, world: World, subject: bytes, keys: list[bytes]) -> None:
        self.world = world
        self.known = {(subject, key) for key in keys}
        self.requests: list[int] = []
        self.refusals: list[DelaydError] = []
        world.delay.serve = self.serve  # type: ignore[method-assign]

    def serve(self, connection: Connection, frame: Frame) -> None:
        if self.refusals:
            connection.answer_error(frame.request_id, self.refusals.pop())
            return
        batch = read_asked_keys(bytes(frame.body))
        assert batch is not None
        self.requests.append(batch.count)
        answers = np.zeros(batch.count, ANSWER)
        for row, name in enumerate(Names.of_batch(batch, np.arange(batch.count)).texts()):
            known = name in self.known
            if frame.type == RequestType.CANCEL:
                answers["answer"][row] = CancelAnswer.CANCELLED if known else CancelAnswer.UNKNOWN
            answers["state"][row] = MessageState.PENDING if known else MessageState.UNKNOWN
        head: Head = {"log_id": self.world.delay.log_id, "now_ms": self.world.delay.now_ms(), "retry_after_ms": 100}
        connection.answer(frame.request_id, head, [answers.tobytes()])


def test_messages_are_cancelled_and_asked_for_by_their_keys() -> None:
    async def scenario(world: World) -> None:
        pending = Pending(world, b"s", [b"k1", "ä".encode()])
        async with AsyncProducer(world.address) as producer:
            assert await producer.cancel("s", key="k1") is CancelAnswer.CANCELLED
            assert await producer.cancel("s", key="ä") is CancelAnswer.CANCELLED
            assert await producer.cancel("s", key=b"k2") is CancelAnswer.UNKNOWN
            assert await producer.cancel("t", key=b"k1") is CancelAnswer.UNKNOWN
            assert (await producer.get("s", key="k1")).state is MessageState.PENDING
            answers = await producer.cancel_batch("s", keys=["k2", b"k1", "ä", "k1"])
            assert answers.tolist() == [4, 1, 1, 1]
            states = await producer.get_batch("s", keys=("k1", "k2"))
            assert states["state"].tolist() == [MessageState.PENDING, MessageState.UNKNOWN]
            assert len(await producer.get_batch("s", keys=[])) == 0
        assert pending.requests == [1, 1, 1, 1, 1, 4, 2]

    on_loop(scenario)


def test_a_question_about_many_keys_travels_in_several_requests() -> None:
    async def scenario(world: World) -> None:
        keys = [b"%0200d" % row for row in range(20_000)]
        pending = Pending(world, b"s", keys[::3])
        async with AsyncProducer(world.address) as producer:
            answers = await producer.cancel_batch("s", keys=keys)
        assert answers.tolist() == [4 if row % 3 else 1 for row in range(20_000)]
        assert sorted(pending.requests) == [3_616, 8_192, 8_192]

    on_loop(scenario)


def test_a_question_by_key_is_asked_again_when_the_server_says_later() -> None:
    async def scenario(world: World) -> None:
        pending = Pending(world, b"s", [b"k"])
        pending.refusals.append(SlowDown("the index of keys is being made", retry_after_ms=5))
        async with AsyncProducer(world.address) as producer:
            assert await producer.cancel("s", key="k") is CancelAnswer.CANCELLED
        assert pending.requests == [1]

    on_loop(scenario)


def test_rule_I4_with_several_delay_servers_the_owner_is_asked_about_a_key() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        pending = Pending(world, b"s", [b"a", b"c"])
        world.meta.owners = {slot_of(b"s", b"b"): other.log_id}
        asked: list[bytes] = []

        def serve(connection: Connection, frame: Frame) -> None:
            asked.append(bytes(frame.body))
            if len(asked) == 1:
                connection.answer_error(frame.request_id, NotOwner("it has moved", retry_after_ms=5))
                return
            rows = np.zeros(1, ANSWER)
            rows["state"] = MessageState.DISPATCHED
            head: Head = {"log_id": other.log_id, "now_ms": other.now_ms(), "retry_after_ms": 100}
            connection.answer(frame.request_id, head, [rows.tobytes()])

        other.serve = serve  # type: ignore[method-assign]
        async with AsyncProducer(world.address) as producer:
            states = (await producer.get_batch("s", keys=["a", "b", "c"]))["state"].tolist()
            assert states == [MessageState.PENDING, MessageState.DISPATCHED, MessageState.PENDING]
        assert len(asked) == 2 and pending.requests[-1] == 2

    on_loop(scenario)


async def asked_after_the_owner_changed(world: World, change: Callable[[SmallDelay], Awaitable[None]]) -> None:
    """A producer learns that another server owns a key; then something happens to that server."""
    other = await world.second_delay()
    Pending(world, b"s", [b"k"])
    world.meta.owners = {slot_of(b"s", b"k"): other.log_id}
    async with AsyncProducer(world.address) as producer:
        await producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
        await change(other)
        assert (await producer.get("s", key="k")).state is MessageState.PENDING
        assert await producer.cancel("s", key="k") is CancelAnswer.CANCELLED


def test_a_question_by_key_goes_to_the_new_owner_when_the_old_one_is_lost() -> None:
    async def stop(world: World, other: SmallDelay) -> None:
        await other.stop()
        world.servers.remove(other)
        world.meta.owners = {}

    on_loop(lambda world: asked_after_the_owner_changed(world, partial(stop, world)))


def test_a_question_by_key_goes_to_the_new_owner_when_the_old_one_is_lost_meanwhile() -> None:
    async def break_off(world: World, other: SmallDelay) -> None:
        def serve(connection: Connection, frame: Frame) -> None:
            connection.abort()
            world.meta.owners = {}

        other.serve = serve  # type: ignore[method-assign]

    on_loop(lambda world: asked_after_the_owner_changed(world, partial(break_off, world)))


def test_a_question_by_key_waits_for_an_owner_that_meta_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(LIMIT_S * 2 / 3)

    async def scenario(world: World) -> None:
        await world.second_delay()
        pending = Pending(world, b"s", [b"k"])
        world.meta.owners = {slot_of(b"s", b"k"): 999}
        with monkeypatch.context() as patched:
            patched.setattr(questions, "spread_ms", waits)
            async with AsyncProducer(world.address) as producer:
                asking = asyncio.ensure_future(producer.cancel("s", key="k"))
                await until(lambda: waits.count == 1)
                await skip(LIMIT_S * 2 / 3)
                error = await error_of(asking)
                assert isinstance(error, RetryLater) and "00000000000003e7 owns these keys" in error.message
        assert not pending.requests
        assert world.meta.asked_for_owners == 2
        async with AsyncProducer(world.address) as producer:
            asking = asyncio.ensure_future(producer.cancel("s", key="k"))
            before = world.meta.asked_for_owners
            await until(lambda: world.meta.asked_for_owners > before)
            world.meta.owners = {}
            assert await asking is CancelAnswer.CANCELLED

    on_steady_loop(scenario)


def test_without_a_delay_server_a_question_by_key_ends_at_the_time_limit() -> None:
    async def scenario(world: World) -> None:
        world.meta.delay.clear()
        async with AsyncProducer(world.address) as producer:
            asking = asyncio.ensure_future(producer.cancel("s", key="k"))
            asked = len(world.meta.seen)
            await until(lambda: len(world.meta.seen) > asked + 1)
            await skip(LIMIT_S)
            with pytest.raises(RetryLater):
                await asking

    on_steady_loop(scenario)


def test_a_question_names_its_message_by_receipt_or_by_key() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            single = await producer.send("s", b"x", deliver_at_ms=PAST_MS)
            many = await producer.send_batch("s", [b"x"], PAST_MS)
            wrong: list[tuple[Any, dict[str, Any], type[DelaydError]]] = [
                (producer.cancel, {}, BadArgument),
                (producer.get, {}, BadArgument),
                (producer.cancel_batch, {}, BadArgument),
                (producer.get_batch, {}, BadArgument),
                (producer.cancel, {"receipt": single, "key": "k"}, BadArgument),
                (producer.get_batch, {"receipt": many, "keys": ["k"]}, BadArgument),
                (producer.get, {"receipt": many}, BadArgument),
                (producer.cancel_batch, {"receipt": single}, BadArgument),
                (producer.cancel, {"key": ""}, BadKey),
                (producer.get, {"key": "k" * 201}, BadKey),
                (producer.get, {"key": 5}, BadKey),
                (producer.cancel_batch, {"keys": ["k", ""]}, BadKey),
                (producer.cancel_batch, {"keys": ["k", None]}, BadKey),
                (producer.cancel_batch, {"keys": "k"}, BadArgument),
            ]
            seen = len(world.delay.seen)
            for call, given, kind in wrong:
                with pytest.raises(kind):
                    await call("s", **given)
            assert len(world.delay.seen) == seen

    on_loop(scenario)


def test_blocking_producers_ask_by_key_too() -> None:
    with world_aside() as (world, do):
        do(lambda: Pending(world, b"s", [b"k"]))
        with delayd.Producer(world.address) as producer:
            assert producer.cancel("s", key="k") is CancelAnswer.CANCELLED
            assert producer.get("s", key="k2").state is MessageState.UNKNOWN
            assert producer.cancel_batch("s", keys=["k", "k2"]).tolist() == [1, 4]
            assert producer.get_batch("s", keys=["k"])["state"].tolist() == [MessageState.PENDING]
            with pytest.raises(BadArgument):
                producer.cancel("s")


def test_the_receipt_of_a_kept_send_asks_for_the_earlier_message() -> None:
    """It does not say when that message was accepted, and an instant in the message's filing hour does as well."""
    for other_at_ms, accepted_at_ms in ((PAST_MS - 5, PAST_MS - 5), (PAST_MS + 5, PAST_MS)):
        decided = ended((Reason.KEPT, 7, 3))
        decided["other_at_ms"] = other_at_ms
        (receipt,) = receipts(Accepted(LogId(1), 7, 1, PAST_MS, False, decided.tobytes()), [PAST_MS + 9])
        assert isinstance(receipt, delayd.Receipt) and receipt.kept
        assert receipt.was_due == (other_at_ms < PAST_MS)
        for known in (receipt, delayd.Receipt.of_token(receipt.token)):
            asked = asked_of("s", known).rows().asked
            assert isinstance(asked, Asked)
            assert (asked.sequences.tolist(), asked.deliver_at_ms.tolist()) == ([3], [other_at_ms])
            assert asked.accepted_at_ms.tolist() == [accepted_at_ms]
