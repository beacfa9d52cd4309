"""No call of a client outlives its time limit, whatever the servers do: it returns, or raises an error of delayd.

The calls are found by their signatures, so a new one is tried without a line here. With each fault all of them are made
at once, by clients that had spoken to the servers before and by new ones. Witnesses beside them only sleep for that
time: they tell how slow the machine is just then, and the calls may be slower by as much.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import uvloop

import delayd
from delayd.client.asking import ask
from delayd.client.asking.walking import BlockingPages, Pages
from delayd.client.pulling.message import MessageColumns
from delayd.secret import SECRET_FILE
from tests.conformance.public.faulty_line import FaultyLine
from tests.conformance.public.surface import methods_of, parameters_of
from tests.end_to_end.up_process import up
from tests.unit.client.servers import SmallMeta
from tests.waiting import DEADLINE_S, wait_until

LIMIT = timedelta(milliseconds=600)
LIMIT_MS = LIMIT / timedelta(milliseconds=1)
# A second, and what all calls at once take. Waits of 5 s and more are inside, which nobody may hear of.
SLACK_S = 3.0
WITNESSED_EVERY = 20  # Calls; then a witness begins.
DELAY = timedelta(hours=1)
SUBJECT, GROUP = "a", "g"
SUBJECTS: dict[str, Any] = {"one": SUBJECT, "list": [SUBJECT, "b"], "pattern": "a.*"}
WORDS = 20  # More messages than there are calls about one.

# What calls are given that need it.
VALUES: dict[str, Any] = {
    "subject": SUBJECT,
    "name": "each hour",
    "group": GROUP,
    "body": b"1",
    "bodies": [b"1", b"2"],
    "delay": DELAY,
    "reason": "why",
    "lease": timedelta(seconds=30),
    "shift": DELAY,
    "to": "latest",
    "messages": [],
    "callback": lambda _: None,
}
# What calls may be given beside that, and what is left out then.
ELSE: dict[str, tuple[Any, str]] = {
    "key": ("k", "receipt"),
    "keys": (["k", "l"], "receipt"),
    "group": (GROUP, ""),
    "spread": (timedelta(minutes=1), ""),
    "dry_run": (False, ""),
}
NEEDED = {"receipt", "delay", "wait", "timeout"}  # They have defaults, and calls are given them all the same.

R = TypeVar("R")


class Call(NamedTuple):
    """One call that is to be tried; ``before`` gives it something to wait for, once the fault has begun."""

    name: str  # The class and the method, and what it is given beside what it needs.
    call: Callable[..., Any]
    given: dict[str, Any]
    before: Callable[[], Any] | None = None


class Network:
    """Real servers behind lines that fail, each line for a meta of its own; on a thread of its own."""

    def __init__(self, servers: list[ask.Known]) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="network")
        self._servers = servers
        self._lines: list[FaultyLine] = []
        self._metas: list[SmallMeta] = []

    def __enter__(self) -> Network:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ask(self._stop()).result(DEADLINE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def ask(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def way(self, *, at_meta: bool) -> tuple[str, list[FaultyLine]]:
        """A way to the servers: the address of a meta that tells it, and the lines that are to fail."""
        meta = SmallMeta()
        await meta.start()
        self._metas.append(meta)
        behind = {server.role: FaultyLine(server.endpoint.port, server.log_id) for server in self._servers}
        to_meta = FaultyLine(meta.port, 1)
        lines = [to_meta, *behind.values()]
        for line in lines:
            await line.start()
        self._lines += lines
        meta.delay, meta.realtime = [behind["delay"]], [behind["realtime"]]  # type: ignore[list-item]
        return f"127.0.0.1:{to_meta.port}", [to_meta] if at_meta else list(behind.values())

    async def begin(self, fault: str, lines: list[FaultyLine]) -> None:
        """Let lines fail."""
        for line in lines:
            line.begin(fault)

    async def _stop(self) -> None:
        for line in self._lines:
            line.stop()
        for meta in self._metas:
            await meta.stop()


def calls_of(owner: Any, values: dict[str, Any], before: Callable[[], Any] | None = None) -> Iterator[Call]:
    """Each public method of an object, with what it needs, and with each thing that it may be given."""
    kind = type(owner).__name__
    for name, method in methods_of(type(owner)):
        call = getattr(owner, name)
        parameters = parameters_of(method)
        needed = {each.name for each in parameters if each.default is each.empty} | NEEDED
        given = {each.name: values[each.name] for each in parameters if each.name in needed & values.keys()}
        if name == "recurring":
            given["every"] = DELAY
        if "receipt" in given and name.endswith("_batch"):
            given["receipt"] = values["receipt of a batch"]
        yield Call(f"{kind}.{name}", call, given, before if name in ("flush", "close") else None)
        for each in parameters:
            if each.name in ELSE and each.name not in given:
                value, instead = ELSE[each.name]
                other = {key: found for key, found in given.items() if key != instead} | {each.name: value}
                yield Call(f"{kind}.{name}({each.name}=)", call, other)


async def settled(result: Any) -> Any:
    """The result of a call of either kind of client."""
    return await result if inspect.isawaitable(result) else result


async def warmed(call: Callable[[], Any]) -> Any:
    """The result of a call before any fault: on a busy machine it may need more time than its limit."""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            result = await settled(call())
        except (delayd.RetryLater, delayd.RequestTimedOut):
            assert time.monotonic() < end
            continue
        if not isinstance(result, MessageColumns) or len(result):
            return result
        assert time.monotonic() < end


class Clients:
    """Clients of one kind at one way to the servers; ``warm`` ones have spoken to them before."""

    def __init__(self, kind: str, address: str, secret: Path, values: dict[str, Any], *, warm: bool) -> None:
        self._kind, self._address, self._secret, self._values, self._warm = kind, address, secret, values, warm
        self.calls: list[Call] = []
        self._closing: list[Callable[[], Any]] = []

    async def make(self) -> None:
        """Make the clients, and find their calls."""
        # What ends a client is called on one of its own, because all calls are made at once.
        for ends in (False, True):
            await self._produce(ends)
            await self._administer(ends)
            for subject in SUBJECTS:
                await self._consume(subject, ends)

    async def close(self, threads: ThreadPoolExecutor) -> None:
        """Close all of them."""
        closing = [Call(f"{self._kind}Client.close", close, {}) for close in self._closing]
        await asyncio.gather(*(tried(close, threads) for close in closing))

    def _client(self, name: str, *args: Any, **settings: Any) -> Any:
        made = getattr(delayd, f"{self._kind}{name}")(self._address, *args, timeout_ms=LIMIT_MS, **settings)
        self._closing.append(made.close)
        return made

    def _add(self, ends: bool, client: Any, before: Callable[[], Any] | None = None, **more: Any) -> None:
        for call in calls_of(client, self._values | more, before):
            if call.name.endswith((".close", ".step_down")) == ends:
                self.calls.append(call)

    async def _produce(self, ends: bool) -> None:
        producer = self._client("Producer")
        if self._warm:
            await warmed(partial(producer.send, SUBJECT, b"1", delay=DELAY))
        self._add(ends, producer, partial(producer.send_nowait, SUBJECT, b"1", delay=DELAY))

    async def _administer(self, ends: bool) -> None:
        admin = self._client("Admin", secret=self._secret)
        if self._warm:
            await warmed(admin.groups)
        self._add(ends, admin)

    async def _consume(self, subject: str, ends: bool) -> None:
        group = f"g-{id(self)}-{subject}-{ends}"
        consumer = self._client("Consumer", SUBJECTS[subject], group)
        wait = timedelta(seconds=DEADLINE_S)
        batch = await warmed(partial(consumer.pull, WORDS, wait=wait)) if self._warm else []
        self._add(ends, consumer, partial(batch[-1].ack, wait=False) if self._warm else None, wait=LIMIT)
        row = 0
        for words in (slice(0, 1), slice(0, 2)) if self._warm and not ends else ():
            for call in calls_of(batch[words] if words.stop > 1 else batch[0], self._values):
                # Each word is about a message of its own.
                own = batch[row : row + 2] if words.stop > 1 else batch[row]
                row += words.stop
                self.calls.append(call._replace(call=getattr(own, call.call.__name__)))


class Tried(NamedTuple):
    """How long a call took, how it ended, and what is wrong with it, whatever it took."""

    took_s: float
    ended: str
    wrong: str | None


def witness(begun: float) -> float:
    """Do nothing but sleep for the time limit of a call; how many times as long it took."""
    time.sleep(LIMIT.total_seconds())
    return (time.monotonic() - begun) / LIMIT.total_seconds()


async def tried(call: Call, threads: ThreadPoolExecutor) -> Tried:
    """Make a call."""
    if call.before is not None:
        begun = call.before()
        if inspect.iscoroutine(begun):
            await begun
    loop, result, error = asyncio.get_running_loop(), None, None
    begun = time.monotonic()
    try:
        if call.name.startswith("Async"):
            result = await _all_of(call.call(**call.given))
        else:
            result = await loop.run_in_executor(threads, lambda: _whole(call.call(**call.given)))
    except Exception as failed:  # noqa: BLE001 - what a call raises is what is looked at.
        error = failed
    took_s, wrong = time.monotonic() - begun, None
    if error is not None and not isinstance(error, delayd.DelaydError):
        wrong = f"raised {error!r}"
    elif isinstance(result, MessageColumns) and not len(result) and result.outage is None:
        wrong = "says that there are no messages"
    return Tried(took_s, f"{error!r:.90}", wrong)


def _whole(result: Any) -> Any:
    """Read all pages, where a call gives pages, and wait for the outcome of a send."""
    if isinstance(result, BlockingPages):
        return list(result)
    return result.result() if isinstance(result, delayd.SendFuture) else result


async def _all_of(result: Any) -> Any:
    result = await settled(result)
    return [page async for page in result] if isinstance(result, Pages) else result


# Faults, and whether meta has them or the servers behind it.
WAYS = [("silent", False), ("stopped", False), ("slow", False), ("away", True), ("silent", True), ("slow", True)]


async def _wrong(network: Network, fault: str, at_meta: bool, secret: Path, values: dict[str, Any]) -> list[str]:
    """What is wrong with any call while servers, or meta, have a fault."""
    way, lines = await asyncio.wrap_future(network.ask(network.way(at_meta=at_meta)))
    clients: dict[str, Clients] = {}
    for kind, warm in product(("", "Async"), (False, True)):
        name = f"{'meta' if at_meta else 'servers'} {fault}, {'known' if warm else 'new'}: {kind}"
        made = clients[name] = Clients(kind, way, secret, values, warm=warm)
        await made.make()
    asked = [(name, call) for name, made in clients.items() for call in made.calls]
    assert len(asked) > len(clients) * len(VALUES), "the calls are found"
    with ThreadPoolExecutor(2 * len(asked)) as threads:
        await asyncio.wrap_future(network.ask(network.begin(fault, lines)))
        calls: list[asyncio.Task[Tried]] = []
        witnesses: list[Future[float]] = []
        for number, (_, call) in enumerate(asked):
            calls.append(asyncio.create_task(tried(call, threads)))
            if number % WITNESSED_EVERY == 0:
                witnesses.append(threads.submit(witness, time.monotonic()))
        found = await asyncio.gather(*calls)
        slowness = max(slow.result() for slow in witnesses)
        await asyncio.gather(*(made.close(threads) for made in clients.values()))
    most_s = (LIMIT.total_seconds() + SLACK_S) * slowness
    told = [(f"{name}{call.name}", each) for (name, call), each in zip(asked, found, strict=True)]
    return [f"{name} {each.wrong}" for name, each in told if each.wrong is not None] + [
        f"{name} took {each.took_s:.1f} s of {most_s:.1f}: {each.ended}" for name, each in told if each.took_s > most_s
    ]


def test_a_call_ends_within_its_time_whatever_the_servers_do(tmp_path: Path) -> None:
    with up(tmp_path, "--port", "0") as running:
        servers = wait_until(lambda: _known(running.meta))
        assert servers is not None
        with delayd.Producer(running.meta) as producer, delayd.Consumer(running.meta, SUBJECT, GROUP) as consumer:
            receipt = producer.send(SUBJECT, b"1", delay=DELAY)
            batch = producer.send_batch(SUBJECT, [b"1", b"2"], delay=DELAY)
            for subject in (SUBJECT, "a.b"):
                due = producer.send_batch(subject, [b"1"] * 2 * WORDS, delay=timedelta(0))
                wait_until(partial(_all_are_due, producer, subject, due))
            assert consumer.pull(), "the group is there"
        values = VALUES | {"receipt": receipt, "receipt of a batch": batch}
        values["handle"] = delayd.SendHandle(receipt.log_id, 1, 1)

        with Network(servers) as network:
            secret = running.data / SECRET_FILE
            ways = [asyncio.run(_wrong(network, fault, at_meta, secret, values)) for fault, at_meta in WAYS]
        wrong = [line for way in ways for line in way]
        assert not wrong, "\n".join(wrong)


def _known(meta: str) -> list[ask.Known] | None:
    """The servers, once all of them have registered."""

    async def known() -> list[ask.Known]:
        async with ask.meta(meta) as connection:
            return await ask.known_servers(connection)

    found = asyncio.run(known())
    return found if {"delay", "realtime"} <= {server.role for server in found} else None


def _all_are_due(producer: delayd.Producer, subject: str, sent: delayd.BatchReceipt) -> bool:
    return bool((producer.get_batch(subject, receipt=sent)["state"] == delayd.MessageState.DISPATCHED).all())
