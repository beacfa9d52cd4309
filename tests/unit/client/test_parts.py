"""The small parts of the clients: slots, room, back-off, a server's clock, and what is read from the caller."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

from delayd.client.instants import HORIZON_MS, Horizon, ServerClock, monotonic_us, wish, wish_column
from delayd.client.limits import check_subject, need_address, pack_headers
from delayd.client.producer import Producer
from delayd.client.pulling.consumer import AsyncConsumer, Consumer
from delayd.client.routing import LAST_MS, RetryWaits, spread_ms
from delayd.client.sending.options import ProducerSettings
from delayd.client.sending.outbox import Slots
from delayd.client.sending.receipts import BatchFailed, BatchReceipt, Failure, Receipt, SendFuture
from delayd.errors import BadArgument, BadInstant, BadSetting, CallerError, HourFull, LogId, PastHorizon
from delayd.hours import INSTANT_MS_MIN


def test_slots_go_to_who_waited_longest_and_never_beyond_the_limit() -> None:
    async def scenario() -> None:
        slots = Slots(lambda: 2)
        taken: list[int] = []

        async def take(number: int) -> None:
            await slots.take(asyncio.get_running_loop().time() + 10)
            taken.append(number)

        tasks = [asyncio.create_task(take(number)) for number in range(5)]
        await asyncio.sleep(0.01)
        assert taken == [0, 1] and slots.taken == 2 and not slots.free
        tasks[2].cancel()
        await asyncio.wait([tasks[2]])
        for expected in ([0, 1, 3], [0, 1, 3, 4]):
            slots.give()
            await asyncio.sleep(0.01)
            assert taken == expected and slots.taken == 2
        slots.give()
        slots.give()
        assert slots.taken == 0 and slots.free

    asyncio.run(scenario())


def test_a_slot_that_does_not_come_free_is_given_up_at_the_deadline() -> None:
    async def scenario() -> None:
        slots = Slots(lambda: 1)
        loop = asyncio.get_running_loop()
        await slots.take(loop.time() + 10)
        with pytest.raises(TimeoutError):
            await slots.take(loop.time() + 0.02)
        slots.give()
        assert slots.free and slots.taken == 0

    asyncio.run(scenario())


def test_waits_between_tries_grow_to_a_bound_and_differ() -> None:
    backoff = RetryWaits()
    waits = [backoff.next_ms() for _ in range(30)]
    assert waits[0] <= 25 and all(wait <= LAST_MS for wait in waits) and min(waits[-10:]) >= LAST_MS / 2
    assert len(set(waits)) == 30
    backoff.reset()
    assert backoff.next_ms() <= 25
    assert 100 <= spread_ms(100) <= 125 and spread_ms(0) >= 1


def test_the_sample_with_the_shortest_way_wins_until_the_servers_clock_was_set() -> None:
    clock = ServerClock("a server")
    assert not clock.known
    clock.sample(0, 1_000, 10_000, wall_us=10_000_000)
    assert clock.latest_ms(1_000) == 10_002 and clock.likely_ms(1_000) == 10_001
    # A way of 100 ms says less than one of 1 ms did.
    clock.sample(10_000, 110_000, 10_090, wall_us=10_090_000)
    assert clock.latest_ms(110_000) == 10_111
    # The clock went ahead by a minute: no error of either sample explains that.
    clock.sample(200_000, 300_000, 70_250, wall_us=70_250_000)
    assert 70_290 <= clock.latest_ms(300_000) <= 70_351


def test_instants_are_read_to_the_millisecond_and_rounded_up() -> None:
    now_ms = time.time_ns() // 1_000_000
    assert wish(None, None, now_ms).when == now_ms
    earliest = datetime(2001, 9, 9, 2, 46, 40, tzinfo=timezone(timedelta(hours=1)))
    assert wish(None, earliest, None).when == INSTANT_MS_MIN
    assert wish(None, datetime(2020, 1, 1, 0, 0, 0, 1, tzinfo=UTC), None).when == 1_577_836_800_001
    assert wish(None, None, np.int64(INSTANT_MS_MIN)).when == INSTANT_MS_MIN  # type: ignore[arg-type]
    before_us = monotonic_us()
    when, relative = wish(timedelta(microseconds=1_500), None, None)
    assert relative and before_us + 1_500 <= when <= monotonic_us() + 1_500


def test_the_horizon_itself_is_accepted_and_a_second_more_is_not() -> None:
    now_ms = time.time_ns() // 1_000_000
    wish(timedelta(milliseconds=HORIZON_MS), None, None)
    wish_column(None, None, [now_ms + HORIZON_MS], 1)
    with pytest.raises(PastHorizon):
        wish(timedelta(milliseconds=HORIZON_MS + 1), None, None)
    with pytest.raises(PastHorizon):
        wish_column(None, None, [now_ms, now_ms + HORIZON_MS + 1_000], 2)
    with pytest.raises(PastHorizon):
        wish(timedelta(hours=2), None, None, Horizon(3_600_000))


def test_one_instant_serves_a_whole_batch() -> None:
    assert wish_column(None, None, INSTANT_MS_MIN, 3)[0].tolist() == [INSTANT_MS_MIN] * 3
    assert wish_column(None, None, np.full(2, INSTANT_MS_MIN, np.uint64), 2)[0].dtype == np.int64
    assert wish_column(None, None, np.empty(0, np.int64), 0)[0].tolist() == []


def test_seconds_that_are_given_as_milliseconds_are_refused_with_that_guess() -> None:
    for seconds in (0, -1, int(time.time()), INSTANT_MS_MIN - 1):
        with pytest.raises(BadInstant, match="seconds, not milliseconds"):
            wish(None, None, seconds)
        with pytest.raises(BadInstant, match="seconds, not milliseconds"):
            wish_column(None, None, [time.time_ns() // 1_000_000, seconds], 2)


@pytest.mark.parametrize("make", [Consumer, AsyncConsumer])
def test_a_subject_in_the_place_of_metas_address_is_told_what_goes_there(
    make: Callable[[str, str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "'a.b' is no address; .* the first argument is where meta listens; .*DELAYD_META"
    with pytest.raises(BadArgument, match=f"{hint}, or of this machine, and name subject= and group=$"):
        make("a.b", "billing")
    with pytest.raises(BadArgument, match=f"{hint}, or of this machine$"):
        Producer("a.b")
    # What is nearly an address is told what is wrong with it, and no more.
    for text in ("a.b:x", "http://a.b", "::1"):
        with pytest.raises(BadArgument) as told:
            make(text, "billing")
        assert "first argument" not in told.value.message
    monkeypatch.setenv("DELAYD_META", "a.b")
    with pytest.raises(BadArgument, match="DELAYD_META: ") as told:
        make(None, "billing")  # type: ignore[arg-type]
    assert "first argument" not in told.value.message


def test_subjects_and_addresses_are_read_as_they_are_written() -> None:
    assert check_subject("a/../B_c%20.d-9") == b"a/../B_c%20.d-9"
    assert check_subject("x" * 255) == b"x" * 255
    assert need_address("example.org:7400") == ("example.org", 7400)
    assert need_address("[::1]:7400") == ("::1", 7400)
    assert pack_headers({}) == b"" and pack_headers(None) == b""


def test_settings_out_of_range_are_named() -> None:
    faulty: list[Callable[[], ProducerSettings]] = [
        lambda: ProducerSettings(linger_ms=-1),
        lambda: ProducerSettings(linger_ms=5_000),
        lambda: ProducerSettings(queue_bytes_max=1_000),
        lambda: ProducerSettings(timeout_ms=0),
        lambda: ProducerSettings(timeout_ms=float("nan")),
        lambda: ProducerSettings(timeout_ms=float("inf")),
        lambda: ProducerSettings(horizon=timedelta(0)),
        lambda: ProducerSettings(horizon=timedelta(days=1_000)),
    ]
    for settings in faulty:
        with pytest.raises(BadSetting):
            settings()


def test_a_failed_batch_says_how_many_failed_and_why() -> None:
    error = BatchFailed.of(BatchReceipt(()), [Failure(np.arange(3), HourFull("that hour is full"))])
    assert error.message == "3 of 3 messages failed, the first with: that hour is full"
    assert isinstance(error.__cause__, HourFull) and error.details == {"accepted": 0, "failed": 3}


def test_the_outcome_of_a_send_is_heard_by_every_thread_and_callback_once() -> None:
    future = SendFuture()
    receipt = Receipt(LogId(1), 2, 3, 4, True, False)
    heard: list[object] = []
    future.add_done_callback(lambda done: heard.append(done.result(timedelta(0))))
    threads = [threading.Thread(target=lambda: heard.append(future.result(timedelta(seconds=10)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    with pytest.raises(TimeoutError):
        future.result(timedelta(milliseconds=10))
    assert not future.done() and heard == []
    future.set_result(receipt)
    for thread in threads:
        thread.join(10)
    future.add_done_callback(lambda done: heard.append(done.exception()))
    assert heard == [receipt] * 4 + [None]


def test_the_error_of_a_send_is_raised_and_can_be_looked_at() -> None:
    future = SendFuture()
    future.set_exception(HourFull("that hour is full"))
    assert isinstance(future.exception(timedelta(0)), HourFull)
    with pytest.raises(HourFull):
        future.result()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Producer(timeout_ms=wrong("30")), "timeout_ms must be a number of milliseconds, not str"),
        (lambda: Producer(timeout_ms=wrong(timedelta(seconds=1))), r"timeout_ms must be a number .* not timedelta"),
        (lambda: Producer(linger_ms=wrong(None)), "linger_ms must be a number of milliseconds, not NoneType"),
        (lambda: Producer(queue_bytes_max=wrong(1e9)), "queue_bytes_max must be a whole number, not float"),
        (lambda: Producer(horizon=wrong(30)), r"horizon must be a timedelta, not int; write timedelta\(seconds=5\)"),
        (lambda: Consumer(None, "a", "g", lease=wrong(60)), "lease must be a timedelta, not int"),
        (lambda: Consumer(None, "a", "g", max_messages=wrong(2.5)), "max_messages must be a whole number, not float"),
        (lambda: Consumer(None, "a", "g", timeout_ms=wrong(True)), r"timeout_ms must be a number .* not bool"),
        (lambda: Consumer(None, "a", "g").pull(wrong("5")), "max_messages must be a whole number, not str"),
        (lambda: Producer().send("a", b"", delay=wrong(5)), "delay must be a timedelta, not int"),
        (lambda: Producer().send("a", b"", deliver_at=wrong(5)), "deliver_at must be a datetime, not int"),
        (lambda: Producer().send("a", wrong("text"), delay=timedelta(0)), "a body is bytes, not str"),
        (lambda: SendFuture().result(wrong("5")), "timeout is a number of seconds or a timedelta, not '5'"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named_with_the_type(make: Callable[[], object], named: str) -> None:
    with pytest.raises(CallerError, match=named):
        make()


def wrong(value: object) -> Any:
    """What a checker of types would not let through."""
    return value
