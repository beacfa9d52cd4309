"""Every client has an engine of its own in each process: the same rule for all of them, in both forms."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

import delayd
from delayd import AlreadyClosed, AsyncConsumer, AsyncProducer, Consumer, Producer, WrongLoop
from delayd.client.engine import OwnEngine, OwnLoopEngine
from tests.unit.client.world import PAST_MS, World, add_messages, fork, world_aside

CHILD_S = 20  # A child that hangs is killed, and its test fails.

Client = Producer | AsyncProducer | Consumer | AsyncConsumer
Called = Awaitable[None] | None


def sends(producer: Producer) -> None:
    producer.send("a", b"x", deliver_at_ms=PAST_MS)


async def sends_on_loop(producer: AsyncProducer) -> None:
    await producer.send("a", b"x", deliver_at_ms=PAST_MS)


def sends_many(producer: Producer) -> None:
    producer.send_batch("a", [b"x"], PAST_MS)


async def sends_many_on_loop(producer: AsyncProducer) -> None:
    await producer.send_batch("a", [b"x"], PAST_MS)


def pulls(consumer: Consumer) -> None:
    batch = consumer.pull()
    assert len(batch) == 1
    batch.ack()


async def pulls_on_loop(consumer: AsyncConsumer) -> None:
    batch = await consumer.pull()
    assert len(batch) == 1
    await batch.ack()


def iterates(consumer: Consumer) -> None:
    try:
        next(consumer).ack()
    except StopIteration:
        raise AlreadyClosed("the iteration ended") from None


async def iterates_on_loop(consumer: AsyncConsumer) -> None:
    try:
        await (await anext(consumer)).ack()
    except StopAsyncIteration:
        raise AlreadyClosed("the iteration ended") from None


USES: list[tuple[type[Client], Callable[..., Called]]] = [
    (Producer, sends),
    (Producer, sends_many),
    (AsyncProducer, sends_on_loop),
    (AsyncProducer, sends_many_on_loop),
    (Consumer, pulls),
    (Consumer, iterates),
    (AsyncConsumer, pulls_on_loop),
    (AsyncConsumer, iterates_on_loop),
]
of_each_client = pytest.mark.parametrize(("kind", "use"), USES, ids=[use.__name__ for _, use in USES])


def call(function: Callable[[], Called]) -> None:
    """Call it on a loop of its own, as a child does that has inherited a client."""

    async def called() -> None:
        result = function()
        if inspect.isawaitable(result):
            await result

    asyncio.run(called())


@contextmanager
def used(kind: type[Client], use: Callable[..., Called], world: World) -> Iterator[tuple[Client, Callable[..., None]]]:
    """A client that was used once, and what calls a function on the client's own loop, if it has one."""
    with asyncio.Runner() as runner:

        async def on_own_loop(function: Callable[[], Called]) -> None:
            result = function()
            if inspect.isawaitable(result):
                await result

        async def made() -> Client:
            if issubclass(kind, Producer | AsyncProducer):
                return kind(world.address)
            return kind(world.address, "a", "g", prefetch=False)

        def do(function: Callable[[], Called]) -> None:
            if kind in (Producer, Consumer):
                function()
            else:
                runner.run(on_own_loop(function))

        client = runner.run(made())
        do(partial(use, client))
        yield client, do
        do(client.close)


def in_child(work: Callable[[], None]) -> int:
    """How a child ends that does this work."""
    child = fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(CHILD_S)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def connected(world: World) -> list[int]:
    return [server.connected_count for server in world.servers]


def test_rule_I2_no_client_is_left_out_here() -> None:
    offered = [getattr(delayd, name) for name in delayd.__all__]
    # A child can't go on with the servers of its parent, and is told so (tests/end_to_end/test_embedded.py).
    clients = {kind for kind in offered if hasattr(kind, "close")} - {delayd.Embedded}
    assert clients == {kind for kind, _ in USES} | {delayd.Admin, delayd.AsyncAdmin}


def test_rule_I2_an_admin_asks_in_a_child_too_and_a_closed_one_nowhere() -> None:
    """It connects anew for most questions, so connections can't be counted as those of the other clients."""
    with world_aside() as (world, on_servers):
        on_servers(partial(add_messages, world, 1))

        def asks(admin: delayd.Admin) -> None:
            # The stand-in for a realtime server lists no groups, so it is named once it was asked.
            assert len(admin.groups("a").missing) == 1

        def refused(admin: delayd.Admin) -> None:
            with pytest.raises(AlreadyClosed):
                admin.groups("a")

        with delayd.Admin(world.address) as admin:
            asks(admin)
            assert in_child(partial(asks, admin)) == 0

            def closes() -> None:
                admin.close()
                refused(admin)

            assert in_child(closes) == 0
            asks(admin)
        refused(admin)
        assert in_child(partial(refused, admin)) == 0


def test_an_asynchronous_admin_is_used_on_its_own_loop_until_it_is_closed() -> None:
    with world_aside() as (world, _), asyncio.Runner() as runner:

        async def made() -> delayd.AsyncAdmin:
            return delayd.AsyncAdmin(world.address)

        admin = runner.run(made())
        with pytest.raises(WrongLoop):
            asyncio.run(admin.groups("a"))
        runner.run(admin.close())
        with pytest.raises(AlreadyClosed):
            runner.run(admin.groups("a"))


@of_each_client
def test_rule_I2_after_a_fork_parent_and_child_have_connections_of_their_own(
    kind: type[Client], use: Callable[..., Called]
) -> None:
    with world_aside() as (world, on_servers):
        on_servers(partial(add_messages, world, 3))
        with used(kind, use, world) as (client, do):
            before = on_servers(partial(connected, world))

            assert in_child(lambda: call(partial(use, client))) == 0
            after = on_servers(partial(connected, world))
            assert after[0] == before[0] + 1 and sum(after) == sum(before) + 2
            do(partial(use, client))
            assert on_servers(partial(connected, world)) == after


@of_each_client
def test_rule_I2_a_child_that_closes_what_it_inherited_leaves_it_to_its_parent(
    kind: type[Client], use: Callable[..., Called]
) -> None:
    with world_aside() as (world, on_servers):
        on_servers(partial(add_messages, world, 2))
        with used(kind, use, world) as (client, do):
            before = on_servers(partial(connected, world))

            def work() -> None:
                call(client.close)
                with pytest.raises(AlreadyClosed):
                    call(partial(use, client))

            assert in_child(work) == 0
            do(partial(use, client))
            assert on_servers(partial(connected, world)) == before


@of_each_client
def test_a_client_that_was_closed_is_closed_in_a_child_too(kind: type[Client], use: Callable[..., Called]) -> None:
    with world_aside() as (world, on_servers):
        on_servers(partial(add_messages, world, 1))
        with used(kind, use, world) as (client, do):
            do(client.close)

            def work() -> None:
                with pytest.raises(AlreadyClosed):
                    call(partial(use, client))

            work()
            assert in_child(work) == 0


class Noted:
    """An engine that can say that another process made it."""

    def __init__(self) -> None:
        self.pid = os.getpid()


@pytest.mark.parametrize("call", ["standing", "close"])
def test_rule_I2_a_child_never_frees_the_engine_that_it_inherited(call: str) -> None:
    own = OwnEngine("client", Noted)
    inherited = weakref.ref(own.standing())
    own.standing().pid = os.getppid()
    assert getattr(own, call)() is not inherited()
    del own
    gc.collect()
    assert inherited() is not None


class Elsewhere(Noted):
    """An engine of a loop that is not the caller's."""

    def check_loop(self) -> None:
        raise WrongLoop("another loop")


def test_a_close_in_another_loop_leaves_the_client_open() -> None:
    own = OwnLoopEngine("client", Elsewhere)
    engine = own.standing()
    with pytest.raises(WrongLoop):
        own.close()
    assert own.standing() is engine
