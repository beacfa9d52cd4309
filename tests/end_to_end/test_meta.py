"""The meta server as a process: what it keeps over SIGKILL, whom it takes for alive, and what it refuses."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from delayd.address import Endpoint
from delayd.config import Value, parse_address
from delayd.errors import BadRequest, BadSubject, DelaydError, RequestFailed, UnknownRequest
from delayd.net.connection import Connection
from delayd.net.registration import Registration, RegistrationState
from delayd.wire.frame import Head
from delayd.wire.heads import (
    need_int,
    need_map,
    need_str,
)
from delayd.wire.meta import Registered, Routes, ServerInfo, read_routes, read_servers
from delayd.wire.requests import RequestType
from tests.trust import connect_trusted, membership
from tests.unit.net.loopback import error_of, on_loop
from tests.waiting import DEADLINE_S, until

from .processes import HOST, ServerProcess

LONG: dict[str, Value] = {"lease_ms": 60_000}  # For tests in which nobody's lease may end.
SHORT: dict[str, Value] = {
    "lease_ms": 1_500,
    "heartbeat_ms": 50,
}  # Its end is waited for; a server that stands still for so long is away for a moment.
ENDING: dict[str, Value] = {"lease_ms": 200, "heartbeat_ms": 50}  # For a life in which everybody's lease ends.


def delay(log_id: int, *, epoch: int = 1, pid: int = 1) -> Registered:
    return Registered("delay", log_id, Endpoint(HOST, 10_000 + log_id), epoch, pid)


def realtime(log_id: int, *, epoch: int = 1, pid: int = 1) -> Registered:
    return Registered("realtime", log_id, Endpoint(HOST, 20_000 + log_id), epoch, pid)


class Client:
    """A connection to meta that speaks its requests."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def ask(self, kind: RequestType, head: Head) -> Head:
        return (await self.connection.request(kind, head, (), 10_000)).head

    async def register(self, *servers: Registered) -> None:
        for server in servers:
            await self.ask(RequestType.REGISTER, server.to_head())

    async def servers(self, role: str | None = None) -> list[ServerInfo]:
        return read_servers(await self.ask(RequestType.SERVERS, {"role": role}))

    async def alive(self) -> dict[int, bool]:
        return {info.server.log_id: info.alive for info in await self.servers()}

    async def routes(self, *subjects: str, assign: bool = True) -> Routes:
        return read_routes(await self.ask(RequestType.ROUTES, {"subjects": [*subjects], "assign": assign}))


@asynccontextmanager
async def client_of(meta: ServerProcess) -> AsyncIterator[Client]:
    connection = await connect_trusted(HOST, meta.port)
    try:
        yield Client(connection)
    finally:
        connection.close()
        await connection.closed


@asynccontextmanager
async def client_of_next_life(meta: ServerProcess, settings: Mapping[str, Value]) -> AsyncIterator[Client]:
    """Kill meta and start it again with these settings."""
    meta.kill()
    meta.settings.update(settings)
    meta.start()
    async with client_of(meta) as client:
        yield client


@asynccontextmanager
async def line_to(meta: ServerProcess, server: Registered) -> AsyncIterator[Registration]:
    registration = Registration(parse_address(meta.address), lambda: server, membership())
    registration.start()
    try:
        yield registration
    finally:
        await registration.close()


def run(scenario: Callable[[], Coroutine[object, object, None]]) -> None:
    on_loop(lambda _: scenario())


def test_a_killed_meta_comes_back_with_servers_routes_and_a_whole_lease_for_each(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServerProcess("meta", tmp_path, LONG) as meta:
            async with client_of(meta) as client:
                await client.register(delay(1, epoch=4), realtime(7), realtime(8))
                before = await client.routes("orders.cancel", "mail")
                assert before.routes == {"orders.cancel": 7, "mail": 8}
                status = await client.ask(RequestType.STATUS, {})
            async with client_of_next_life(meta, ENDING) as client:
                await until_alive(client, {1: False, 7: False, 8: False})
            async with client_of_next_life(meta, LONG) as client:
                assert [info.server for info in await client.servers()] == [delay(1, epoch=4), realtime(7), realtime(8)]
                # Nobody has heard of them for longer than a lease: they are alive all the same.
                assert await client.alive() == {1: True, 7: True, 8: True}
            async with client_of_next_life(meta, ENDING) as client:
                # They are so for one lease only.
                await until_alive(client, {1: False, 7: False, 8: False})
                after = await client.routes("orders.cancel", "mail")
                assert after.routes == before.routes
                assert (await client.routes("new")).unrouted == ["new"]
                again = await client.ask(RequestType.STATUS, {})
            assert again["log_id"] == status["log_id"]
            assert need_int(again, "epoch") == need_int(status, "epoch") + 3
            assert need_int(need_map(again, "counters"), "routes") == 2

    run(scenario)


def test_a_move_is_told_to_delay_servers_that_have_seen_more_moves_than_this_meta_made(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServerProcess("meta", tmp_path, LONG) as meta:
            async with client_of(meta) as client:
                await client.register(realtime(7), realtime(8))
                # The meta before this one was lost; a number that no meta gives says nothing.
                seen = delay(1).to_head() | {"moves_seen": 41}
                for head in (seen, delay(2).to_head() | {"moves_seen": (1 << 64) - 1}):
                    assert (await client.ask(RequestType.REGISTER, head))["moves"] == []
                await client.ask(RequestType.MOVE_ROUTE, {"subject": "orders", "to": 8})
                assert (await client.ask(RequestType.REGISTER, seen))["moves"] == [[42, "orders", 8]]

    run(scenario)


def test_rule_L1_a_route_that_was_answered_is_the_same_after_any_kill(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)

    async def scenario() -> None:
        told: dict[str, int] = {}
        with ServerProcess("meta", tmp_path, LONG) as meta:
            for life in range(6):
                async with client_of(meta) as client:
                    await client.register(*(realtime(log_id) for log_id in range(1, 6)))
                    known = await client.routes(*told, assign=False)
                    assert known.routes == told, f"seed {seed}"
                    for number in range(10_000):
                        try:
                            answer = await client.routes(f"life.{life}.{number}", f"both.{number}")
                        except RequestFailed:
                            break
                        for subject, log_id in answer.routes.items():
                            assert told.setdefault(subject, log_id) == log_id, f"seed {seed}"
                        if number == 0:
                            # Each life answers once at least, however slow the machine is.
                            asyncio.get_running_loop().call_later(
                                chance.uniform(0.002, 0.04), meta.signal, signal.SIGKILL
                            )
                meta.wait()
                meta.start()
            assert len(told) > 6

    run(scenario)


def test_a_server_is_registered_under_the_host_that_it_advertises_and_never_under_a_wildcard(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings: dict[str, Value] = {"host": "0.0.0.0", "advertise_host": "localhost", "insecure": True}
        with ServerProcess("meta", tmp_path, LONG) as meta:
            settings["meta"] = meta.address
            with (
                ServerProcess("realtime", tmp_path, settings) as realtime_process,
                ServerProcess("delay", tmp_path, settings),
            ):
                async with client_of(meta) as client:
                    await until_count(client, 2)
                    found = {info.server.role: info.server for info in await client.servers()}
                    assert (found["delay"].endpoint.host, found["realtime"].endpoint.host) == ("localhost", "localhost")
                    assert found["realtime"].endpoint.port == realtime_process.port
                    everywhere = Registered("realtime", 77, Endpoint("0.0.0.0", 1), 1, 1)
                    assert isinstance(await error_of(client.register(everywhere)), BadRequest)

    run(scenario)


def test_a_bad_request_is_answered_alone_and_bad_framing_ends_only_its_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServerProcess("meta", tmp_path, LONG) as meta:
            async with client_of(meta) as client:
                await client.register(realtime(1))
                wrong: list[tuple[RequestType, Head, type[DelaydError]]] = [
                    (RequestType.REGISTER, {}, BadRequest),
                    (RequestType.REGISTER, {**delay(1).to_head(), "role": "meta"}, BadRequest),
                    (RequestType.REGISTER, {**delay(1).to_head(), "port": 0}, BadRequest),
                    (RequestType.REGISTER, {**delay(1).to_head(), "log_id": -1}, BadRequest),
                    (RequestType.ROUTES, {"subjects": "a", "assign": True}, BadRequest),
                    (RequestType.ROUTES, {"subjects": ["a b"], "assign": True}, BadSubject),
                    (RequestType.ROUTES, {"subjects": ["ä"], "assign": False}, BadSubject),
                    (RequestType.META_SUBJECTS, {"prefix": "", "after": "", "limit": 0}, BadRequest),
                    (RequestType.SERVERS, {"role": 1}, BadRequest),
                    (RequestType.PULL, {}, UnknownRequest),
                ]
                for kind, head, error in wrong:
                    assert type(await error_of(client.ask(kind, head))) is error, (kind, head)
                assert isinstance(await error_of(client.connection.request(99, {})), UnknownRequest)
                # A small batch that was meant for a delay server: refused by name, and the connection stands.
                misled = client.connection.request(RequestType.SEND, {}, [bytes(32 << 10)], 10_000)
                assert isinstance(await error_of(misled), UnknownRequest)
                with socket.create_connection((HOST, meta.port)) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    stranger.settimeout(10)
                    assert b"bad_magic" in await asyncio.to_thread(stranger.recv, 4096)
                assert (await client.routes("a")).routes == {"a": 1}
                status = await client.ask(RequestType.STATUS, {})
                assert need_str(status, "role") == "meta"
                assert need_int(status, "pid") == meta.pid
                ping = await client.ask(RequestType.PING, {})
                assert need_int(ping, "now_ms") >= need_int(status, "started_at_ms")

    run(scenario)


def test_a_registration_rides_over_the_death_of_meta_and_over_a_meta_that_hangs(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServerProcess("meta", tmp_path, SHORT) as meta:
            async with line_to(meta, realtime(3)) as registration:
                await registration.registered()
                assert (await until_routed(lambda: registration.routes(["a"]))).routes == {"a": 3}
                for _ in range(2):
                    meta.kill()
                    await until(lambda: registration.state is RegistrationState.AWAY, "the end of meta")
                    meta.start()
                    await until(lambda: registration.state is RegistrationState.REGISTERED, "the new registration")
                meta.signal(signal.SIGSTOP)
                await until(lambda: registration.state is RegistrationState.AWAY, "a heartbeat without an answer")
                meta.signal(signal.SIGCONT)
                await until(lambda: registration.state is RegistrationState.REGISTERED, "the answer")
                await until(lambda: "stood_still ms=" in meta.log, "meta says that it stood still")
                async with client_of(meta) as client:
                    await until_alive(client, {3: True})
                # More subjects than one request may name are asked for in parts.
                many = [f"s.{number}" for number in range(4_500)]
                assert (await until_routed(lambda: registration.routes(many))).routes == dict.fromkeys(many, 3)
            async with client_of(meta) as client:
                await until_alive(client, {3: False})

    run(scenario)


def test_both_kinds_of_servers_register_and_meta_routes_to_the_real_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        with (
            ServerProcess("meta", tmp_path, SHORT) as meta,
            ServerProcess("realtime", tmp_path, {"meta": meta.address}) as realtime_process,
            ServerProcess("delay", tmp_path, {"meta": meta.address}) as delay_process,
        ):
            async with client_of(meta) as client:
                await until_count(client, 2)
                servers = {info.server.role: info.server for info in await client.servers()}
                assert (servers["delay"].endpoint.port, servers["delay"].pid) == (delay_process.port, delay_process.pid)
                assert servers["realtime"].endpoint.port == realtime_process.port
                assert (await until_routed(lambda: client.routes("a"))).routes == {"a": servers["realtime"].log_id}
                realtime_process.kill()
                await until_count(client, 1)
                assert (await client.routes("b")).unrouted == ["b"]
                realtime_process.start()
                await until_count(client, 2)
                again = {info.server.role: info.server for info in await client.servers()}
                assert again["realtime"].log_id == servers["realtime"].log_id
                assert again["realtime"].epoch == servers["realtime"].epoch + 1
                assert (await until_routed(lambda: client.routes("b"))).routes == {"b": servers["realtime"].log_id}

    run(scenario)


def test_a_second_meta_on_the_directory_says_who_holds_it(tmp_path: Path) -> None:
    with ServerProcess("meta", tmp_path, LONG) as first:
        second = ServerProcess("meta", tmp_path, LONG)
        second.spawn()
        assert second.wait() == 2
        assert f"pid {first.pid} meta" in second.log
        assert "Traceback" not in second.log


def test_sigterm_ends_it_cleanly_and_what_was_answered_is_there_afterwards(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServerProcess("meta", tmp_path, LONG) as meta:
            async with client_of(meta) as client:
                await client.register(realtime(1))
                subjects = [f"s.{number}" for number in range(2_000)]
                assert (await client.routes(*subjects)).unrouted == []
                assert await asyncio.to_thread(meta.terminate) == 0
            meta.start()
            async with client_of(meta) as client:
                assert len((await client.routes(*subjects, assign=False)).routes) == 2_000
            assert meta.terminate() == 0
            assert "Traceback" not in meta.log

    run(scenario)


def test_a_port_that_is_taken_is_said_in_one_sentence(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        meta = ServerProcess("meta", tmp_path, LONG)
        meta.port = taken.getsockname()[1]
        meta.spawn()
        assert meta.wait() == 2
        assert f"{meta.address} can't be listened on" in meta.log


async def until_count(client: Client, count: int) -> None:
    """Poll meta until it takes so many servers for alive."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while sum((alive := await client.alive()).values()) != count:
        assert asyncio.get_running_loop().time() < deadline, alive
        await asyncio.sleep(0.01)


async def until_routed(ask: Callable[[], Awaitable[Routes]], alive: Iterable[int] = ()) -> Routes:
    """Ask until each subject has a server and these are alive: one that stands still for a lease is away meanwhile."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while (found := await ask()).unrouted or not set(alive) <= {s.server.log_id for s in found.servers if s.alive}:
        assert asyncio.get_running_loop().time() < deadline, found
        await asyncio.sleep(0.01)
    return found


async def until_alive(client: Client, expected: dict[int, bool]) -> None:
    """Poll meta until it takes exactly these for alive."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while (alive := await client.alive()) != expected:
        assert asyncio.get_running_loop().time() < deadline, alive
        await asyncio.sleep(0.01)
