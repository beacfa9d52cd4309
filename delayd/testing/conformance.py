"""Conformance: what the public clients promise, as tests that run against any home of delayd (docs/testing.md).

Whoever builds on delayd, or puts another service behind its clients, imports the tests and says where they run:

    from delayd.testing.conformance import *

    @pytest.fixture(scope="module")
    def delayd_address(tmp_path_factory):
        with delayd.open(tmp_path_factory.mktemp("home")) as home:
            yield home.address

Each test has a subject of its own, so all of them may share one home. Delays are short, and no test relies on how fast
the home is: what must happen is waited for, and what must not happen is looked for after something later has happened.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any
from uuid import uuid4

import pytest

import delayd
from delayd import errors

NOW = timedelta(0)
SOON = timedelta(milliseconds=50)
LATER = timedelta(hours=3)
WAIT = timedelta(milliseconds=500)
SHORT_LEASE = timedelta(milliseconds=300)
WITHIN_S = 30.0
QUICK = delayd.Backoff(first=timedelta(milliseconds=10), most=timedelta(milliseconds=50))
HORIZON = timedelta(days=732)

__all__ = ["subject"]  # The tests are added at the end.


@pytest.fixture
def subject() -> str:
    """A subject that no other test has."""
    return f"c{uuid4().hex}"


@contextmanager
def _clients(address: str, subject: str, **settings: Any) -> Iterator[tuple[delayd.Producer, delayd.Consumer]]:
    """A producer, and a consumer of the group g of a subject."""
    with delayd.Producer(address) as producer, delayd.Consumer(address, subject, "g", **settings) as consumer:
        yield producer, consumer


def _take(consumer: delayd.Consumer, messages: int, *, ack: bool = True) -> list[delayd.Message]:
    """So many messages in the order in which they came."""
    found: list[delayd.Message] = []
    until = time.monotonic() + WITHIN_S
    while len(found) < messages:
        assert time.monotonic() < until, f"{len(found)} of {messages} messages came within {WITHIN_S:g} s"
        batch = consumer.pull(messages - len(found), wait=WAIT)
        found += list(batch)
        if ack:
            batch.ack()
    return found


def _bodies(consumer: delayd.Consumer, messages: int) -> list[bytes]:
    return sorted(message.body for message in _take(consumer, messages))


def _until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < until, f"within {WITHIN_S:g} s {what}"
        time.sleep(0.01)


# Sending.


@pytest.mark.parametrize(
    "body", [b"", b"42", bytes(range(256)), bytes(100_000)], ids=["empty", "short", "bytes", "long"]
)
def test_a_body_comes_as_it_was_sent(delayd_address: str, subject: str, body: bytes) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        producer.send(subject, body, delay=NOW)
        (message,) = _take(consumer, 1)
        assert (message.body, message.subject, message.attempt) == (body, subject, 1)


@pytest.mark.parametrize(
    "headers", [{"trace": "a1"}, {"a": "", "ü": "€"}, {f"h{number}": str(number) for number in range(50)}]
)
def test_headers_come_as_they_were_sent(delayd_address: str, subject: str, headers: dict[str, str]) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        producer.send(subject, b"x", delay=NOW, headers=headers)
        assert _take(consumer, 1)[0].headers == headers


@pytest.mark.parametrize("how", ["delay", "deliver_at", "deliver_at_ms"])
def test_a_message_comes_when_it_is_due_and_never_before(delayd_address: str, subject: str, how: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        due = datetime.now(UTC) + timedelta(milliseconds=300)
        due_ms = round(due.timestamp() * 1000)
        when: dict[str, Any] = {"delay": timedelta(milliseconds=300), "deliver_at": due, "deliver_at_ms": due_ms}
        producer.send(subject, b"x", **{how: when[how]})
        (message,) = _take(consumer, 1)
        assert time.time() * 1000 >= message.deliver_at_ms >= due_ms - 100
        assert message.late_ms >= 0


def test_messages_come_in_the_order_of_their_instants(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        delays = [timedelta(milliseconds=ms) for ms in (1_900, 100, 1_000)]
        producer.send_batch(subject, [b"third", b"first", b"second"], delay=delays)
        assert [message.body for message in _take(consumer, 3)] == [b"first", b"second", b"third"]


def test_what_was_due_in_the_past_comes_at_once(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        producer.send(subject, b"x", deliver_at=datetime(2020, 1, 1, tzinfo=UTC))
        assert _bodies(consumer, 1) == [b"x"]


@pytest.mark.parametrize("messages", [1, 1_000])
def test_a_batch_comes_whole(delayd_address: str, subject: str, messages: int) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        bodies = [b"%d" % number for number in range(messages)]
        receipt = producer.send_batch(subject, bodies, delay=NOW)
        assert len(receipt) == messages
        assert _bodies(consumer, messages) == sorted(bodies)


def test_a_receipt_names_the_message(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        receipt = producer.send(subject, b"x", delay=NOW)
        (message,) = _take(consumer, 1)
        assert (message.log_id, message.sequence) == (receipt.log_id, receipt.sequence)
        assert message.origin_sequence == receipt.sequence
        assert delayd.Receipt.of_token(receipt.token) == receipt


def test_what_is_sent_without_waiting_is_kept_at_the_flush(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        futures = [producer.send_nowait(subject, b"%d" % number, delay=NOW) for number in range(200)]
        producer.flush()
        assert len({future.result().sequence for future in futures}) == 200
        assert len(_bodies(consumer, 200)) == 200


def test_what_is_sent_without_waiting_is_kept_at_the_close(delayd_address: str, subject: str) -> None:
    with delayd.Producer(delayd_address) as producer:
        producer.send_nowait(subject, b"x", delay=NOW)
    with delayd.Consumer(delayd_address, subject, "g") as consumer:
        assert _bodies(consumer, 1) == [b"x"]


def test_several_threads_share_a_producer(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):

        def send(name: int) -> None:
            for number in range(20):
                producer.send(subject, b"%d-%d" % (name, number), delay=NOW)

        threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(_bodies(consumer, 80))) == 80


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, errors.BadArgument),
        ({"delay": NOW, "deliver_at_ms": 1_800_000_000_000}, errors.BadArgument),
        ({"delay": timedelta(seconds=-1)}, errors.BadArgument),
        ({"delay": 5}, errors.BadArgument),
        ({"deliver_at": datetime(2030, 1, 1)}, errors.NaiveDatetime),  # noqa: DTZ001
        ({"delay": HORIZON + timedelta(days=2)}, errors.PastHorizon),
        ({"delay": NOW, "headers": {"a": 1}}, errors.BadArgument),
        ({"delay": NOW, "headers": {"delayd.attempt": "9"}}, errors.BadArgument),
        ({"delay": NOW, "tags": ["%dead"]}, errors.BadTags),
        ({"delay": NOW, "tags": "red"}, errors.BadTags),
    ],
)
def test_a_send_with_a_wrong_argument_is_refused_by_name(
    delayd_address: str, subject: str, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with delayd.Producer(delayd_address) as producer, pytest.raises(error):
        producer.send(subject, b"x", **arguments)


@pytest.mark.parametrize("name", ["", "a b", "%retry/1", "orders.*", "x" * 300])
def test_a_subject_that_no_message_may_have_is_refused(delayd_address: str, name: str) -> None:
    with delayd.Producer(delayd_address) as producer, pytest.raises(errors.CallerError):
        producer.send(name, b"x", delay=NOW)


def test_a_body_that_is_no_bytes_or_too_large_is_refused(delayd_address: str, subject: str) -> None:
    with delayd.Producer(delayd_address) as producer:
        with pytest.raises(errors.BadArgument):
            producer.send(subject, "text", delay=NOW)  # type: ignore[arg-type]
        with pytest.raises(errors.CallerError):
            producer.send(subject, bytes(64 << 20), delay=NOW)


def test_a_closed_client_says_so(delayd_address: str, subject: str) -> None:
    producer, consumer = delayd.Producer(delayd_address), delayd.Consumer(delayd_address, subject, "g")
    for client in (producer, consumer):
        client.close()
        client.close()
    with pytest.raises(errors.AlreadyClosed):
        producer.send(subject, b"x", delay=NOW)
    with pytest.raises(errors.AlreadyClosed):
        consumer.pull(wait=NOW)


# Cancel, move, ask.


def test_a_cancelled_message_never_comes(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        receipt = producer.send(subject, b"never", delay=timedelta(seconds=1))
        assert producer.cancel(subject, receipt=receipt) is delayd.CancelAnswer.CANCELLED
        assert producer.cancel(subject, receipt=receipt) is delayd.CancelAnswer.CANCELLED
        producer.send(subject, b"after", delay=timedelta(seconds=1.5))
        assert _bodies(consumer, 1) == [b"after"]
        assert producer.get(subject, receipt=receipt).state is delayd.MessageState.CANCELLED


def test_a_cancel_that_comes_too_late_says_so(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        receipt = producer.send(subject, b"x", delay=NOW)
        _take(consumer, 1)
        _until(
            lambda: producer.cancel(subject, receipt=receipt) is delayd.CancelAnswer.ALREADY_DISPATCHED,
            "a cancel says ALREADY_DISPATCHED",
        )
        assert producer.get(subject, receipt=receipt).state is delayd.MessageState.DISPATCHED


def test_a_message_that_is_moved_comes_at_its_new_instant_once(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        receipt = producer.send(subject, b"x", delay=LATER)
        moved = producer.reschedule(subject, receipt=receipt, delay=SOON)
        assert moved.answer is delayd.RescheduleAnswer.MOVED
        assert _take(consumer, 1)[0].body == b"x"
        assert len(consumer.pull(1, wait=WAIT)) == 0


@pytest.mark.parametrize("by", ["receipt", "key"])
def test_a_pending_message_is_known_by_receipt_and_by_key(delayd_address: str, subject: str, by: str) -> None:
    with delayd.Producer(delayd_address) as producer:
        receipt = producer.send(subject, b"x", delay=LATER, key="order-42")
        which: dict[str, Any] = {"receipt": receipt} if by == "receipt" else {"key": "order-42"}
        found = producer.get(subject, **which)
        assert found.state is delayd.MessageState.PENDING
        assert producer.cancel(subject, **which) is delayd.CancelAnswer.CANCELLED


def test_a_key_is_unique_while_its_message_is_pending(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        producer.send(subject, b"first", delay=timedelta(seconds=1), key="k")
        with pytest.raises(errors.KeyPending):
            producer.send(subject, b"second", delay=timedelta(seconds=1), key="k")
        assert _bodies(consumer, 1) == [b"first"]

        def is_free() -> bool:
            # The message may be on its way for a moment yet, as far as its delay server knows.
            try:
                producer.send(subject, b"third", delay=NOW, key="k")
            except errors.KeyPending:
                return False
            return True

        _until(is_free, "the key is free")
        assert _bodies(consumer, 1) == [b"third"]


@pytest.mark.parametrize(("conflict", "comes"), [("keep", b"first"), ("replace", b"second")])
def test_a_key_that_is_taken_keeps_or_is_replaced(
    delayd_address: str, subject: str, conflict: Any, comes: bytes
) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        producer.send(subject, b"first", delay=timedelta(seconds=1), key="k")
        producer.send(subject, b"second", delay=timedelta(seconds=1), key="k", on_conflict=conflict)
        producer.send(subject, b"end", delay=timedelta(seconds=2))
        assert [message.body for message in _take(consumer, 2)] == [comes, b"end"]


def test_a_receipt_of_another_subject_is_refused_and_its_message_stays(delayd_address: str, subject: str) -> None:
    other = f"{subject}.other"
    with delayd.Producer(delayd_address) as producer:
        receipt = producer.send(subject, b"x", delay=LATER)
        batch = producer.send_batch(subject, [b"y", b"z"], delay=LATER)
        known = delayd.Receipt.of_token(receipt.token)
        for ask in (
            lambda: producer.cancel(other, receipt=receipt),
            lambda: producer.get(other, receipt=known),
            lambda: producer.reschedule(other, receipt=known, delay=SOON),
            lambda: producer.cancel_batch(other, receipt=batch),
            lambda: producer.get_batch(other, receipt=batch),
            lambda: producer.reschedule_batch(other, receipt=batch, delay=SOON),
        ):
            with pytest.raises(errors.BadArgument, match="another subject"):
                ask()
        assert producer.get(subject, receipt=receipt).deliver_at_ms == receipt.deliver_at_ms
        assert set(producer.cancel_batch(subject, receipt=batch).tolist()) == {delayd.CancelAnswer.CANCELLED}


@pytest.mark.parametrize("which", [{}, {"receipt": "none"}, {"key": 7}])
def test_who_names_no_message_is_refused(delayd_address: str, subject: str, which: dict[str, Any]) -> None:
    with delayd.Producer(delayd_address) as producer:
        for ask in (producer.cancel, producer.get):
            with pytest.raises(errors.CallerError):
                ask(subject, **which)


def test_a_message_that_nobody_sent_is_unknown(delayd_address: str, subject: str) -> None:
    with delayd.Producer(delayd_address) as producer:
        assert producer.get(subject, key="nobody").state is delayd.MessageState.UNKNOWN
        assert producer.cancel(subject, key="nobody") is delayd.CancelAnswer.UNKNOWN
        moved = producer.reschedule(subject, key="nobody", delay=SOON)
        assert moved.answer is delayd.RescheduleAnswer.UNKNOWN


@pytest.mark.parametrize(
    "columns",
    [{"delay": [NOW]}, {"delay": NOW, "keys": ["k"]}, {"delay": NOW, "headers": [{}]}, {"deliver_at_ms": [1]}],
)
def test_columns_of_another_length_are_refused_and_nothing_is_sent(
    delayd_address: str, subject: str, columns: dict[str, Any]
) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        with pytest.raises(errors.CallerError):
            producer.send_batch(subject, [b"1", b"2"], **columns)
        producer.send(subject, b"end", delay=NOW)
        assert _bodies(consumer, 1) == [b"end"]


def test_a_walk_cancels_what_is_due_in_a_window(delayd_address: str, subject: str) -> None:
    with delayd.Producer(delayd_address) as producer:
        for hours in (2, 3, 30):
            producer.send(subject, b"%d" % hours, delay=timedelta(hours=hours))
        before = datetime.now(UTC) + timedelta(hours=24)
        assert producer.cancel_where(subject, due_before=before).found == 2
        assert producer.cancel_where(subject, due_before=before, dry_run=False).done == 2
        assert producer.cancel_where(subject).found == 1


def test_a_walk_takes_only_messages_with_a_tag(delayd_address: str, subject: str) -> None:
    with delayd.Producer(delayd_address) as producer:
        producer.send(subject, b"a", delay=LATER, tags=["red"])
        producer.send(subject, b"b", delay=LATER, tags=["blue", "red"])
        producer.send(subject, b"c", delay=LATER)
        assert producer.cancel_where(subject, tag="red").found == 2
        assert producer.cancel_where(subject, tag="green").found == 0


# Consuming.


def test_each_group_gets_each_message_and_the_consumers_of_a_group_share_them(
    delayd_address: str, subject: str
) -> None:
    with (
        delayd.Producer(delayd_address) as producer,
        delayd.Consumer(delayd_address, subject, "a", prefetch=False) as one,
        delayd.Consumer(delayd_address, subject, "a", prefetch=False) as two,
        delayd.Consumer(delayd_address, subject, "b") as other,
    ):
        bodies = [b"%d" % number for number in range(20)]
        producer.send_batch(subject, bodies, delay=NOW)
        shared: list[bytes] = []

        def all_came() -> bool:
            for consumer in (one, two):
                batch = consumer.pull(3, wait=SOON)
                shared.extend(batch.bodies)
                batch.ack()
            return len(shared) >= 20

        _until(all_came, "all messages come to the group")
        assert sorted(shared) == sorted(bodies)
        assert _bodies(other, 20) == sorted(bodies)


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_acknowledged_does_not_come_again(delayd_address: str, subject: str, wait: bool) -> None:
    with _clients(delayd_address, subject, lease=SHORT_LEASE, prefetch=False) as (producer, consumer):
        producer.send(subject, b"x", delay=NOW)
        (message,) = _take(consumer, 1, ack=False)
        message.ack(wait=wait)
        consumer.flush()
        message.ack()  # To say it twice is to say it once.
        assert len(consumer.pull(1, wait=2 * SHORT_LEASE)) == 0


def test_a_message_whose_lease_ends_comes_again_as_the_next_attempt(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject, lease=SHORT_LEASE, prefetch=False) as (producer, consumer):
        producer.send(subject, b"x", delay=NOW)
        (first,) = _take(consumer, 1, ack=False)
        (again,) = _take(consumer, 1, ack=False)
        assert (first.attempt, again.attempt) == (1, 2)
        again.ack()
        with pytest.raises(errors.StaleHandle) as stale:
            first.ack()
        assert stale.value.reason == "lease_ended"


@pytest.mark.parametrize("whole", [True, False])
def test_a_lease_that_is_extended_lasts_longer(delayd_address: str, subject: str, whole: bool) -> None:
    with _clients(delayd_address, subject, lease=SHORT_LEASE, prefetch=False) as (producer, consumer):
        producer.send(subject, b"x", delay=NOW)
        batch = _pulled(consumer)
        (batch if whole else batch[0]).extend(timedelta(minutes=1))
        assert len(consumer.pull(1, wait=3 * SHORT_LEASE)) == 0
        batch.ack()


def test_a_consumer_keeps_the_leases_of_its_handlers_alive(delayd_address: str, subject: str) -> None:
    settings = {"lease": SHORT_LEASE, "prefetch": False, "auto_extend": timedelta(minutes=1)}
    with _clients(delayd_address, subject, **settings) as (producer, consumer):
        producer.send(subject, b"x", delay=NOW)
        batch = _pulled(consumer)
        assert len(consumer.pull(1, wait=4 * SHORT_LEASE)) == 0
        batch.ack()


def _pulled(consumer: delayd.Consumer) -> delayd.MessageBatch:
    until = time.monotonic() + WITHIN_S
    while not len(batch := consumer.pull(1, wait=WAIT)):
        assert time.monotonic() < until, f"a message comes within {WITHIN_S:g} s"
    return batch


@pytest.mark.parametrize("lease", [NOW, timedelta(seconds=-1), timedelta(milliseconds=1)])
def test_a_lease_that_makes_no_sense_is_refused(delayd_address: str, subject: str, lease: timedelta) -> None:
    with pytest.raises(errors.BadSetting):
        delayd.Consumer(delayd_address, subject, "g", lease=lease)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_attempts": 0},
        {"max_messages": 0},
        {"timeout_ms": -1},
        {"backoff": 5},
        {"auto_extend": timedelta(seconds=1)},
        {"max_in_flight": 0},
        {"start": "first"},
    ],
)
def test_a_consumer_with_a_wrong_setting_is_refused_by_name(
    delayd_address: str, subject: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(errors.CallerError):
        delayd.Consumer(delayd_address, subject, "g", **settings)


def test_no_more_messages_are_in_flight_than_that(delayd_address: str, subject: str) -> None:
    with (
        delayd.Producer(delayd_address) as producer,
        delayd.Consumer(delayd_address, subject, "g", max_in_flight=2) as consumer,
    ):
        producer.send_batch(subject, [b"1", b"2", b"3"], delay=NOW)
        had = [consumer.pull(1), consumer.pull(1)]
        assert len(consumer.pull(wait=NOW)) == 0
        had[0].ack()
        had.append(consumer.pull())
        assert sorted(body for batch in had for body in batch.bodies) == [b"1", b"2", b"3"]


def test_an_iteration_gives_messages_until_it_is_closed(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        producer.send_batch(subject, [b"1", b"2", b"3"], delay=NOW)
        seen: list[bytes] = []
        for message in consumer:
            seen.append(message.body)
            message.ack()
            if len(seen) == 3:
                consumer.close()
        assert sorted(seen) == [b"1", b"2", b"3"]


def test_a_pull_without_messages_is_empty_after_its_wait(delayd_address: str, subject: str) -> None:
    with delayd.Consumer(delayd_address, subject, "g") as consumer:
        began = time.monotonic()
        assert consumer.pull(wait=timedelta(milliseconds=200)).bodies == []
        assert time.monotonic() - began >= 0.19


@pytest.mark.parametrize("most", [0, -1, "many"])
def test_a_pull_of_no_number_of_messages_is_refused(delayd_address: str, subject: str, most: Any) -> None:
    with delayd.Consumer(delayd_address, subject, "g") as consumer, pytest.raises(errors.BadArgument):
        consumer.pull(most, wait=NOW)


@pytest.mark.parametrize("group", ["", "x" * 300])
def test_a_group_that_has_no_name_is_refused(delayd_address: str, subject: str, group: str) -> None:
    with pytest.raises(errors.BadArgument):
        delayd.Consumer(delayd_address, subject, group)


def test_bodies_are_read_as_text_and_json(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        producer.send(subject, json.dumps({"order": 42}).encode(), delay=NOW)
        (message,) = _take(consumer, 1)
        assert message.json() == {"order": 42} and message.text() == '{"order": 42}'
        producer.send(subject, b"\xff", delay=NOW)
        (message,) = _take(consumer, 1)
        with pytest.raises(errors.BadBody):
            message.text()


# Giving back.


def test_a_message_that_is_given_back_at_once_comes_as_the_next_attempt(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject, prefetch=False) as (producer, consumer):
        producer.send(subject, b"x", delay=NOW)
        _take(consumer, 1, ack=False)[0].nack(NOW)
        (again,) = _take(consumer, 1)
        assert (again.body, again.attempt) == (b"x", 2)


@pytest.mark.parametrize("how", ["delay", "back-off"])
def test_a_message_that_is_given_back_comes_later_with_its_error(delayd_address: str, subject: str, how: str) -> None:
    with _clients(delayd_address, subject, prefetch=False, backoff=QUICK) as (producer, consumer):
        receipt = producer.send(subject, b"x", delay=NOW, headers={"h": "1"}, tags=["t"])
        (first,) = _take(consumer, 1, ack=False)
        began = time.time()
        first.nack(timedelta(milliseconds=200) if how == "delay" else None, error="it broke")
        (again,) = _take(consumer, 1)
        assert (again.body, again.attempt, again.last_error, again.headers) == (b"x", 2, "it broke", {"h": "1"})
        assert (again.subject, again.origin_sequence) == (subject, receipt.sequence)
        assert how != "delay" or time.time() - began >= 0.2


def test_other_groups_do_not_see_what_a_group_gives_back(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject, prefetch=False) as (producer, consumer):
        producer.send(subject, b"x", delay=NOW)
        with delayd.Consumer(delayd_address, subject, "other", prefetch=False) as other:
            assert _bodies(other, 1) == [b"x"]
            _take(consumer, 1, ack=False)[0].nack(SOON)
            _take(consumer, 1)
            assert len(other.pull(1, wait=WAIT)) == 0


@pytest.mark.parametrize("attempts", [1, 3])
def test_no_handler_gets_more_attempts_than_there_are(delayd_address: str, subject: str, attempts: int) -> None:
    settings = {"prefetch": False, "backoff": QUICK, "max_attempts": attempts}
    with _clients(delayd_address, subject, **settings) as (producer, consumer):
        producer.send(subject, b"x", delay=NOW)
        for attempt in range(1, attempts + 1):
            (message,) = _take(consumer, 1, ack=False)
            assert message.attempt == attempt
            message.nack(error=f"attempt {attempt}")
        assert len(consumer.pull(1, wait=WAIT)) == 0


def test_a_rejected_message_does_not_come_again(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject, prefetch=False, lease=SHORT_LEASE) as (producer, consumer):
        producer.send(subject, b"x", delay=NOW)
        _take(consumer, 1, ack=False)[0].reject("it makes no sense", error="no order 42")
        assert len(consumer.pull(1, wait=3 * SHORT_LEASE)) == 0


def test_a_rejection_needs_a_reason(delayd_address: str, subject: str) -> None:
    with _clients(delayd_address, subject, prefetch=False) as (producer, consumer):
        producer.send(subject, b"x", delay=NOW)
        (message,) = _take(consumer, 1, ack=False)
        with pytest.raises(errors.BadArgument):
            message.reject("")
        message.ack()


@pytest.mark.parametrize("delay", [timedelta(seconds=-1), timedelta(days=800), 5])
def test_a_wait_that_makes_no_sense_is_refused(delayd_address: str, subject: str, delay: Any) -> None:
    with _clients(delayd_address, subject, prefetch=False) as (producer, consumer):
        producer.send(subject, b"x", delay=NOW)
        (message,) = _take(consumer, 1, ack=False)
        with pytest.raises(errors.BadArgument):
            message.nack(delay)
        message.ack()


def test_what_was_fetched_and_not_handed_out_is_no_attempt(delayd_address: str, subject: str) -> None:
    with delayd.Producer(delayd_address) as producer:
        producer.send_batch(subject, [b"%d" % number for number in range(20)], delay=NOW)
    with delayd.Consumer(delayd_address, subject, "g") as consumer:
        (first,) = _take(consumer, 1)
    with delayd.Consumer(delayd_address, subject, "g") as consumer:
        rest = _take(consumer, 19)
    assert first.body not in [message.body for message in rest]
    assert {message.attempt for message in rest} == {1}


# Groups and many subjects.


@pytest.mark.parametrize(
    ("start", "comes"), [(None, [b"new", b"old"]), ("earliest", [b"new", b"old"]), ("latest", [b"new"])]
)
def test_a_group_begins_where_its_consumer_says(
    delayd_address: str, subject: str, start: Any, comes: Sequence[bytes]
) -> None:
    with _clients(delayd_address, subject) as (producer, consumer):
        producer.send(subject, b"old", delay=NOW)
        _take(consumer, 1)
        with delayd.Consumer(delayd_address, subject, "late", start=start) as late:
            found = list(late.pull(1, wait=SOON))
            producer.send(subject, b"new", delay=NOW)
            while len(found) < len(comes):
                found += _take(late, 1, ack=False)
            assert sorted(message.body for message in found) == list(comes)


def test_each_consumer_of_a_broadcast_gets_each_message(delayd_address: str, subject: str) -> None:
    with (
        delayd.Producer(delayd_address) as producer,
        delayd.Consumer(delayd_address, subject, "b", broadcast=True) as one,
        delayd.Consumer(delayd_address, subject, "b", broadcast=True) as two,
    ):
        for consumer in (one, two):
            consumer.pull(1, wait=NOW)
        producer.send(subject, b"x", delay=NOW)
        assert _bodies(one, 1) == _bodies(two, 1) == [b"x"]


@pytest.mark.parametrize("how", ["list", "one word", "more words"])
def test_one_consumer_takes_many_subjects(delayd_address: str, subject: str, how: str) -> None:
    names = [f"{subject}.a", f"{subject}.b"]
    what: Any = {"list": names, "one word": f"{subject}.*", "more words": f"{subject}.>"}[how]
    with _clients(delayd_address, what) as (producer, consumer):
        for name in names:
            producer.send(name, name.encode(), delay=NOW)
        found = _take(consumer, 2)
        assert sorted((message.subject, message.body) for message in found) == [(name, name.encode()) for name in names]


@pytest.mark.parametrize("what", [[], ["a", "a"], "a.>.b", "a*", ["a.*"]])
def test_subjects_that_make_no_sense_are_refused(delayd_address: str, what: Any) -> None:
    with pytest.raises(errors.CallerError):
        delayd.Consumer(delayd_address, what, "g")


# The same for asyncio.


def test_the_clients_of_asyncio_do_the_same(delayd_address: str, subject: str) -> None:
    async def run() -> None:
        async with (
            delayd.AsyncProducer(delayd_address) as producer,
            delayd.AsyncConsumer(delayd_address, subject, "g", backoff=QUICK) as consumer,
        ):
            await asyncio.gather(*(producer.send(subject, b"%d" % number, delay=NOW) for number in range(50)))
            receipt = await producer.send(subject, b"never", delay=LATER)
            assert await producer.cancel(subject, receipt=receipt) is delayd.CancelAnswer.CANCELLED
            seen: list[tuple[bytes, int]] = []
            async for message in consumer:
                seen.append((message.body, message.attempt))
                if message.attempt == 1:
                    await message.nack(error="again")
                else:
                    await message.ack()
                if len(seen) == 100:
                    break
            assert sorted(seen) == sorted((b"%d" % number, attempt) for number in range(50) for attempt in (1, 2))

    asyncio.run(asyncio.wait_for(run(), 2 * WITHIN_S))


# Workers.


@contextmanager
def _working(worker: delayd.Worker) -> Iterator[None]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join()


@pytest.mark.parametrize("kind", ["function", "coroutine"])
@pytest.mark.parametrize("decode", ["bytes", "json"])
def test_a_worker_calls_its_handler_for_each_message(delayd_address: str, subject: str, kind: str, decode: Any) -> None:
    seen: list[object] = []
    worker = delayd.Worker(delayd_address)

    async def handle(body: object) -> None:
        seen.append(body)

    worker.on(subject, group="g", decode=decode)(seen.append if kind == "function" else handle)
    with delayd.Producer(delayd_address) as producer, _working(worker):
        for number in range(10):
            producer.send(subject, b"%d" % number, delay=NOW)
        _until(lambda: len(seen) == 10, "all messages are handled")
    expected = [number if decode == "json" else b"%d" % number for number in range(10)]
    assert sorted(seen, key=str) == expected


def test_a_worker_gives_back_what_fails_and_rejects_what_is_over(delayd_address: str, subject: str) -> None:
    tries, numbers = list[tuple[bytes, int]](), count()
    worker = delayd.Worker(delayd_address)

    @worker.on(subject, group="g", max_attempts=3, backoff=QUICK)
    def handle(body: bytes, message: delayd.AsyncMessage) -> None:
        tries.append((body, message.attempt))
        next(numbers)
        if body == b"reject":
            raise delayd.Reject("no")
        if body == b"retry" and message.attempt == 1:
            raise delayd.Retry(after=SOON)
        if body == b"fails":
            raise ValueError("always")

    with delayd.Producer(delayd_address) as producer, _working(worker):
        producer.send_batch(subject, [b"reject", b"retry", b"fails"], delay=NOW)
        _until(lambda: len(tries) == 6, "six tries are made")
    assert sorted(tries) == [
        *((b"fails", attempt) for attempt in (1, 2, 3)),
        (b"reject", 1),
        *((b"retry", attempt) for attempt in (1, 2)),
    ]


@pytest.mark.parametrize("conflict", ["reject", "keep", "replace"])
def test_a_handler_arms_its_next_run_under_the_key_of_its_message(
    delayd_address: str, subject: str, conflict: Any
) -> None:
    runs: list[tuple[int, int]] = []
    kept: list[bool] = []
    worker = delayd.Worker(delayd_address)
    with delayd.Producer(delayd_address) as producer:

        @worker.on(subject, group="g", backoff=QUICK, max_attempts=3, decode="json")
        def run(number: int, message: delayd.Message) -> None:
            runs.append((number, message.attempt))
            if number == 4 and message.attempt == 1:
                raise delayd.Retry(after=SOON)
            if number < 8:
                next_one = json.dumps(number + 1).encode()
                kept.append(producer.send(subject, next_one, delay=SOON, key="job", on_conflict=conflict).kept)

        with _working(worker):
            producer.send(subject, b"1", delay=SOON, key="job")
            _until(lambda: bool(runs) and runs[-1][0] == 8, "eight runs are made")
    assert runs == [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1)]
    assert kept == [False] * 7


__all__ += [name for name in dir() if name.startswith("test_")]
