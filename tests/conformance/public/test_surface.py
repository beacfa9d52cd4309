"""Every public call, with every argument wrong in turn: what is refused is refused by an error of delayd that names it.

The calls are found by their signatures, so a new argument is tried without a line here.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, date, datetime, timedelta, timezone
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import delayd
from delayd.testing import InMemoryBroker
from tests.conformance.public.surface import methods_of, parameters_of

EAST, WEST = timezone(timedelta(hours=14)), timezone(-timedelta(hours=14))
WRONG: dict[str, Any] = {
    "None": None,
    "True": True,
    "0": 0,
    "5": 5,
    "-1": -1,
    "2**70": 2**70,
    "-2**70": -(2**70),
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "text": "text",
    "no text": "",
    "long text": "x" * 5_000,
    "half a pair": "\ud800",
    "bytes": b"bytes",
    "bytearray": bytearray(b"bytes"),
    "no bytes": b"",
    "list": [],
    "list of None": [None],
    "list of lists": [["a"]],
    "list of numbers": [1, 2**70],
    "list of bytes": [b"1"],
    "list of NaN": [float("nan")],
    "tuple": (1, 2, 3),
    "mapping": {},
    "mapping of numbers": {1: 2},
    "object": object(),
    "function": lambda *_: None,
    "path": Path("x"),
    "longest": timedelta.max,
    "shortest": timedelta.min,
    "no time": timedelta(0),
    "a list of lengths": [timedelta.max],
    "last instant": datetime.max.replace(tzinfo=UTC),
    "last instant, west": datetime.max.replace(tzinfo=WEST),
    "first instant, east": datetime.min.replace(tzinfo=EAST),
    "naive": datetime(2030, 1, 1),  # noqa: DTZ001 - what is refused
    "naive list": [datetime(2030, 1, 1)],  # noqa: DTZ001 - as above
    "date": date(2030, 1, 1),
    "NaT": np.datetime64("NaT"),
    "numpy instants": np.array(["9999-01-01", "NaT"], "M8[s]"),
    "numpy lengths": np.array([1 << 62], "m8[D]"),
    "numpy numbers": np.array([[1.5]]),
    "numpy number": np.uint64((1 << 64) - 1),
    "receipt": delayd.Receipt(delayd.LogId(1), -5, 2**80, None, False, False),  # type: ignore[arg-type]
    "receipt of texts": delayd.Receipt("a", "b", "c", "d", False, False),  # type: ignore[arg-type]
    "no receipts": delayd.BatchReceipt(()),
}

MAKERS: dict[str, type] = {
    "Producer": delayd.Producer,
    "AsyncProducer": delayd.AsyncProducer,
    "Consumer": delayd.Consumer,
    "AsyncConsumer": delayd.AsyncConsumer,
    "Worker": delayd.Worker,
    "Backoff": delayd.Backoff,
    "Retry": delayd.Retry,
    "Reject": delayd.Reject,
}
GIVEN = ("Message", "AsyncMessage", "MessageBatch", "AsyncMessageBatch", "SendFuture")
numbers = count(1)


def _parameters(call: Callable[..., Any]) -> list[str]:
    return [each.name for each in parameters_of(call)]


def _calls() -> Iterator[tuple[str, str]]:
    """Each public call that takes something: the class, and the method ("" for making one)."""
    for name, made in MAKERS.items():
        yield name, ""
        assert _parameters(made)
    for name in (*MAKERS, *GIVEN):
        for method, call in methods_of(getattr(delayd, name)):
            if _parameters(call):
                yield name, method
    yield "Receipt", "of_token"


@pytest.fixture(scope="module")
def home() -> Iterator[InMemoryBroker]:
    with InMemoryBroker(tick=True) as broker:
        yield broker


RIGHT: dict[str, Callable[[str], Any]] = {
    "subject": lambda subject: subject,
    "name": lambda subject: f"every hour of {subject}",
    "body": lambda _: b"1",
    "bodies": lambda _: [b"1"],
    "group": lambda _: "g",
    "reason": lambda _: "why",
    "lease": lambda _: timedelta(seconds=30),
    "callback": lambda _: lambda future: None,
}
ENDLESS = "wait=longest"  # It is right, and waits for a message for ever.


def _call_of(name: str, method: str) -> Callable[..., Any]:
    owner = getattr(delayd, name)
    found: Callable[..., Any] = getattr(owner, method) if method else owner
    return found


def _right(home: InMemoryBroker, subject: str, name: str, method: str, argument: str) -> dict[str, Any]:
    """Arguments with which the call works, without the one that is to be wrong."""
    names = _parameters(_call_of(name, method))
    found = {each: RIGHT[each](subject) for each in names if each in RIGHT and each != argument}
    if "address" in names and argument != "address":
        found["address"] = home.address
    if method and name in ("Producer", "AsyncProducer"):
        if "delay" in names and argument not in ("delay", "deliver_at", "deliver_at_ms"):
            found["delay"] = timedelta(hours=1)
        if "receipt" in names and argument not in ("receipt", "key", "keys"):
            found["keys" if "keys" in names else "key"] = ["k"] if "keys" in names else "k"
        if "shift" in names and argument != "shift":
            found["shift"] = timedelta(hours=1)
    if method == "recurring":
        found["every"] = timedelta(hours=1)
    if method == "pull" and argument != "wait":
        found["wait"] = timedelta(0)
    if argument == "on_conflict":
        found |= {"keys": ["k"]} if "bodies" in found else {"key": f"k{next(numbers)}"}
    return found


@contextmanager
def _owner(home: InMemoryBroker, subject: str, name: str) -> Iterator[Any]:
    """What has the methods of a class that blocks."""
    if name in ("Receipt", "Worker", "Backoff"):
        yield {"Receipt": delayd.Receipt, "Worker": home.worker()}.get(name, delayd.Backoff())
        return
    with home.producer() as producer, home.consumer(subject, "g", prefetch=False) as consumer:
        future = producer.send_nowait(subject, b"1", delay=timedelta(0))
        future.result()
        batch: Any = consumer.pull() if name.startswith("Message") else consumer
        owners = {"Producer": producer, "Consumer": consumer, "SendFuture": future, "MessageBatch": batch}
        yield owners[name] if name in owners else batch[0]


@asynccontextmanager
async def _async_owner(home: InMemoryBroker, subject: str, name: str) -> AsyncIterator[Any]:
    async with home.async_producer() as producer, home.async_consumer(subject, "g") as consumer:
        await producer.send(subject, b"1", delay=timedelta(0))
        batch: Any = await consumer.pull() if name.startswith("AsyncMessage") else consumer
        owners = {"AsyncProducer": producer, "AsyncConsumer": consumer, "AsyncMessageBatch": batch}
        yield owners[name] if name in owners else batch[0]


def _wrongs(home: InMemoryBroker, name: str, method: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for argument in _parameters(_call_of(name, method)):
        for label, value in WRONG.items():
            right = _right(home, f"s{next(numbers)}", name, method, argument)
            if f"{argument}={label}" != ENDLESS:
                yield argument, f"{argument}={label}", right | {argument: value}


def _fault(argument: str, what: str, error: Exception) -> str | None:
    """What is wrong with what a call raised."""
    if isinstance(error, delayd.StaleHandle):
        return None  # The message was settled by a value that is right.
    if isinstance(error, delayd.NoRecurring | delayd.RecurringConflict):
        return None  # The value is right, and there is no such schedule, or no such version of it.
    if isinstance(error, TimeoutError) and argument == "timeout":
        return None
    if not isinstance(error, delayd.DelaydError):
        return f"{what}: a raw {type(error).__name__}: {error}"
    named = argument in error.message or argument.removesuffix("s") in error.message
    return None if named else f"{what}: {type(error).__name__} does not name {argument}: {error.message}"


def _tried(home: InMemoryBroker, name: str, method: str) -> Iterator[str | None]:
    """What is wrong with each call of a class that blocks, or of making a client of any class."""
    with _owner(home, f"s{next(numbers)}", name if method else "Backoff") as owner:
        for argument, what, arguments in _wrongs(home, name, method):
            try:
                made = (getattr(owner, method) if method else MAKERS[name])(**arguments)
                if not method and name in ("Producer", "Consumer"):
                    made.close()
            except Exception as error:  # noqa: BLE001 - what a call raises is what is looked at.
                yield _fault(argument, what, error)


async def _tried_in_asyncio(home: InMemoryBroker, name: str, method: str) -> list[str | None]:
    found = []
    async with _async_owner(home, f"s{next(numbers)}", name) as owner:
        for argument, what, arguments in _wrongs(home, name, method):
            try:
                result = (getattr(owner, method) if method else MAKERS[name])(**arguments)
                if not method:
                    await result.close()
                elif inspect.isawaitable(result):
                    await result
            except Exception as error:  # noqa: BLE001 - as above
                found.append(_fault(argument, what, error))
    return found


@pytest.mark.parametrize(("name", "method"), list(_calls()), ids=str)
def test_a_wrong_argument_is_refused_by_an_error_that_names_it(home: InMemoryBroker, name: str, method: str) -> None:
    found = (
        asyncio.run(_tried_in_asyncio(home, name, method)) if name.startswith("Async") else _tried(home, name, method)
    )
    faults = [fault for fault in found if fault is not None]
    assert not faults, "\n".join(faults)
