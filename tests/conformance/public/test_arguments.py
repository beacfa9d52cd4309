"""What is wrong is refused by name, before anything happens."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

import delayd
from delayd import errors
from tests.conformance.public.desk import AT_ONCE, LATER, Desk

NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001 - what is refused

SENDS: list[tuple[type[errors.DelaydError], dict[str, Any]]] = [
    (errors.BadSubject, {"subject": ""}),
    (errors.BadSubject, {"subject": "with space"}),
    (errors.BadSubject, {"subject": "s" * 256}),
    (errors.BadSubject, {"subject": "orders.*"}),
    (errors.BadSubject, {"subject": "%retry/0000000000000001/1"}),
    (errors.BadSubject, {"subject": 42}),
    (errors.BadArgument, {"body": "text"}),
    (errors.BadArgument, {"body": None}),
    (errors.MessageTooLarge, {"body": bytes((4 << 20) + 1)}),
    (errors.BadArgument, {"delay": None}),
    (errors.BadArgument, {"deliver_at_ms": 1}),
    (errors.BadArgument, {"delay": timedelta(seconds=-1)}),
    (errors.BadArgument, {"delay": 5}),
    (errors.PastHorizon, {"delay": timedelta(days=4_000)}),
    (errors.NaiveDatetime, {"delay": None, "deliver_at": NAIVE}),
    (errors.BadArgument, {"delay": None, "deliver_at_ms": 1.5}),
    (errors.BadArgument, {"headers": {"a": 1}}),
    (errors.BadArgument, {"headers": {"delayd.attempt": "1"}}),
    (errors.MessageTooLarge, {"headers": {"a": "x" * 40_000}}),
    (errors.BadKey, {"key": ""}),
    (errors.BadKey, {"key": "k" * 201}),
    (errors.BadKey, {"key": 1}),
    (errors.BadArgument, {"on_conflict": "keep"}),
    (errors.BadArgument, {"key": "k", "on_conflict": "never"}),
    (errors.BadTags, {"tags": "text"}),
    (errors.BadTags, {"tags": ["a", "a"]}),
    (errors.BadTags, {"tags": ["%dead"]}),
    (errors.BadTags, {"tags": [str(number) for number in range(17)]}),
    (errors.BadTags, {"tags": ["t" * 65]}),
    (errors.DelaydError, {"ttl": timedelta(0)}),
]


@pytest.mark.parametrize("case", range(len(SENDS)), ids=lambda case: f"{SENDS[case][0].__name__}-{case}")
def test_a_send_that_is_wrong_is_refused_by_name(desk: Desk, case: int) -> None:
    error, wrong = SENDS[case]
    arguments: dict[str, Any] = {"subject": desk.subject, "body": b"1", "delay": AT_ONCE} | wrong
    with pytest.raises(error):
        desk.producer.send(arguments.pop("subject"), arguments.pop("body"), **arguments)


BATCHES: list[tuple[type[errors.DelaydError], dict[str, Any]]] = [
    (errors.BadArgument, {"bodies": b"one"}),
    (errors.BadArgument, {"bodies": [b"1", "2"]}),
    (errors.BadArgument, {"headers": [{}]}),
    (errors.BadArgument, {"keys": ["k"]}),
    (errors.BadArgument, {"delay": None, "deliver_at_ms": [1]}),
    (errors.BadArgument, {"delay": None}),
]


@pytest.mark.parametrize("case", range(len(BATCHES)))
def test_a_batch_that_is_wrong_is_refused_by_name(desk: Desk, case: int) -> None:
    error, wrong = BATCHES[case]
    arguments: dict[str, Any] = {"bodies": [b"1", b"2"], "delay": AT_ONCE} | wrong
    with pytest.raises(error):
        desk.producer.send_batch(desk.subject, arguments.pop("bodies"), **arguments)


CONSUMERS: list[tuple[type[errors.DelaydError], dict[str, Any]]] = [
    (errors.BadArgument, {"subject": ""}),
    (errors.BadArgument, {"group": ""}),
    (errors.BadSubject, {"subject": "with space"}),
    (errors.BadSubject, {"subject": "a.>.b"}),
    (errors.BadArgument, {"subject": []}),
    (errors.BadArgument, {"subject": ["a", "a"]}),
    (errors.BadArgument, {"subject": ["a.*", "b"]}),
    (errors.BadArgument, {"group": "g" * 256}),
    (errors.BadSetting, {"lease": timedelta(0)}),
    (errors.BadSetting, {"lease": 60}),
    (errors.BadSetting, {"max_messages": 0}),
    (errors.BadSetting, {"max_attempts": 0}),
    (errors.BadSetting, {"backoff": 5}),
    (errors.BadSetting, {"auto_extend": timedelta(seconds=1)}),
    (errors.BadSetting, {"max_in_flight": 0}),
    (errors.BadArgument, {"start": "yesterday"}),
    (errors.NaiveDatetime, {"start": NAIVE}),
    (errors.BadArgument, {"start": datetime.min.replace(tzinfo=UTC)}),
    (errors.BadSetting, {"ordered": "no"}),
    (errors.BadSetting, {"prefetch": "no"}),
    (errors.BadSetting, {"ephemeral": 1}),
    (errors.BadSetting, {"broadcast": "no"}),
    (errors.BadSetting, {"exclusive": 5}),
    (errors.BadSetting, {"exclusive": timedelta(0)}),
    (errors.BadSetting, {"exclusive": True, "subject": ["a", "b"]}),
    (errors.BadSetting, {"ordered": True, "backoff": delayd.Backoff(most=timedelta(days=2))}),
    (errors.BadTags, {"tags_any": "eu"}),
    (errors.BadTags, {"tags_all": [["eu"]]}),
    (errors.BadTags, {"tags_all": [str(number) for number in range(17)]}),
]


@pytest.mark.parametrize("case", range(len(CONSUMERS)), ids=lambda case: f"{CONSUMERS[case][0].__name__}-{case}")
def test_a_consumer_that_is_wrong_is_refused_by_name(desk: Desk, case: int) -> None:
    error, wrong = CONSUMERS[case]
    arguments: dict[str, Any] = {"subject": desk.subject, "group": "g"} | wrong
    for kind in (delayd.Consumer, delayd.AsyncConsumer):
        with pytest.raises(error) as raised:
            kind(desk.address, **arguments)
        # The argument at fault is the first of those that are not as usual.
        assert next(iter(wrong)) in raised.value.message or "subject" in wrong or "group" in wrong


WORDS: dict[str, Callable[[delayd.Message], None]] = {
    "negative": lambda message: message.nack(timedelta(seconds=-1)),
    "too long": lambda message: message.nack(timedelta(days=4_000)),
    "no lease": lambda message: message.extend(timedelta(0)),
    "too long in order": lambda message: message.nack(timedelta(days=2)),
    "no reason": lambda message: message.reject(5),  # type: ignore[arg-type]
    "no error": lambda message: message.nack(LATER, error=5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_is_wrong_is_refused_and_the_message_stays_held(desk: Desk, word: str) -> None:
    desk.send(b"1")
    message = desk.one(desk.consumer(ordered=True))
    with pytest.raises(errors.BadArgument):
        WORDS[word](message)
    message.ack()


@pytest.mark.parametrize("token", ["", "x", "a" * 48, "ä"])
def test_a_token_that_is_none_is_refused(token: str) -> None:
    with pytest.raises(errors.BadArgument):
        delayd.Receipt.of_token(token)


def test_a_question_names_its_message_once(desk: Desk) -> None:
    (receipt,) = desk.send(b"1", delay=LATER, key="k")
    for wrong in ({}, {"receipt": receipt, "key": "k"}):
        with pytest.raises(errors.BadArgument):
            desk.producer.get(desk.subject, **wrong)  # type: ignore[arg-type]
    assert datetime.now(UTC) < receipt.deliver_at


@pytest.mark.parametrize("unit", ["W", "D", "h", "m", "s", "ms", "us"])
@pytest.mark.parametrize("count", [2**62, 2**63 - 1, 18_446_744_073_710])
def test_a_length_of_time_that_numpy_can_not_count_in_our_unit_is_too_long(desk: Desk, unit: str, count: int) -> None:
    # The last of these counts comes to half a second and less when it is taken modulo 2**64.
    length = np.array([count], f"timedelta64[{unit}]")
    if unit == "us" and count < 2**62:
        return  # These are 213 days.
    with pytest.raises(errors.PastHorizon):
        desk.producer.send_batch(desk.subject, [b"1"], delay=length)
    with pytest.raises(errors.BadExpiry):
        desk.producer.send_batch(desk.subject, [b"1"], delay=AT_ONCE, ttl=length)
    with pytest.raises(errors.PastHorizon):
        desk.producer.send_batch(desk.subject, [b"1"], deliver_at=length.astype("i8").astype(f"datetime64[{unit}]"))
    instant = np.array([2**62], f"datetime64[{unit}]")
    with pytest.raises(errors.BadArgument, match="expires_at"):
        desk.producer.send_batch(desk.subject, [b"1"], delay=AT_ONCE, expires_at=instant)


@pytest.mark.parametrize("unit", ["Y", "M", "generic"])
def test_a_length_of_time_whose_unit_has_no_length_is_refused_by_name(desk: Desk, unit: str) -> None:
    length = np.array([1], f"timedelta64[{unit}]" if unit != "generic" else "timedelta64")
    for name in ("delay", "ttl"):
        given: dict[str, Any] = {"delay": AT_ONCE, name: length}
        with pytest.raises(errors.BadArgument, match=f"of {name} .* give them in days"):
            desk.producer.send_batch(desk.subject, [b"1"], **given)


@pytest.mark.parametrize("name", ["delay", "deliver_at", "ttl", "expires_at"])
def test_an_empty_column_of_times_needs_no_unit(desk: Desk, name: str) -> None:
    kind = "timedelta64" if name in ("delay", "ttl") else "datetime64"
    given: dict[str, Any] = {name: np.array([], kind)}
    if name in ("ttl", "expires_at"):
        given["delay"] = AT_ONCE
    assert len(desk.producer.send_batch(desk.subject, [], **given)) == 0


@pytest.mark.parametrize(("unit", "ms"), [("1500us", 1.5), ("7000000us", 7_000), ("90s", 90_000)])
def test_times_may_be_counted_in_several_of_a_unit(desk: Desk, unit: str, ms: float) -> None:
    count, longest = int(1_700_000_000_000 // ms) | 1, np.array([2**63 - 1], f"timedelta64[{unit}]")
    receipt = desk.producer.send_batch(desk.subject, [b"1"], deliver_at=np.array([count], f"datetime64[{unit}]"))
    assert receipt.deliver_at_ms.tolist() == [math.ceil(count * ms)]
    with pytest.raises(errors.PastHorizon):
        desk.producer.send_batch(desk.subject, [b"1"], delay=longest)
    with pytest.raises(errors.BadExpiry):
        desk.producer.send_batch(desk.subject, [b"1"], delay=AT_ONCE, ttl=longest)


def test_what_is_said_about_the_last_instant_of_all_is_true(desk: Desk) -> None:
    last = datetime.max.replace(tzinfo=UTC)
    with pytest.raises(errors.BadArgument, match=r"within 1970 and 9999-12-31T23:59:59\.999$"):
        desk.consumer(start=last)
    with pytest.raises(errors.BadExpiry, match="is later than any instant; None stands for never"):
        desk.producer.send(desk.subject, b"1", delay=AT_ONCE, expires_at=last)


@pytest.mark.parametrize("argument", ["deliver_at", "expires_at", "due_from", "due_before", "start"])
def test_the_advice_for_a_naive_instant_keeps_the_local_time(desk: Desk, argument: str) -> None:
    calls: dict[str, Callable[[datetime], object]] = {
        "deliver_at": lambda at: desk.producer.send(desk.subject, b"1", deliver_at=at),
        "expires_at": lambda at: desk.producer.send(desk.subject, b"1", delay=AT_ONCE, expires_at=at),
        "due_from": lambda at: desk.producer.cancel_where(desk.subject, due_from=at),
        "due_before": lambda at: desk.producer.cancel_where(desk.subject, due_before=at),
        "start": lambda at: desk.consumer(start=at),
    }
    with pytest.raises(errors.NaiveDatetime, match=argument) as raised:
        calls[argument](NAIVE)
    # Followed to the letter, the advice for a local time names the instant that the caller's clock will show.
    advice = raised.value.message.partition("give ")[2].partition(" if it is the local time")[0]
    advised: datetime = eval(advice, {"value": NAIVE})
    assert advised.replace(tzinfo=None) == NAIVE and advised == NAIVE.astimezone()


@pytest.mark.parametrize("wrong", [None, 5, b"data", []], ids=repr)
@pytest.mark.parametrize("opens", [delayd.open, delayd.open_data], ids=["open", "open_data"])
def test_a_path_that_is_none_is_refused_by_name(opens: Callable[[Any], object], wrong: object) -> None:
    with pytest.raises(errors.BadArgument, match="path is"):
        opens(wrong)


def test_a_row_that_a_batch_does_not_have_is_named(desk: Desk) -> None:
    with pytest.raises(IndexError, match="a batch of 0 messages has no row 3"):
        desk.consumer().pull(wait=AT_ONCE)[3]
