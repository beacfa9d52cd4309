"""The realtime server as a process: killed, stopped, and started on directories that are not as they should be."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from crc32c import crc32c

from delayd.config import Value
from delayd.errors import DelaydError
from delayd.log.group import MAGIC_BYTES
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.net.connection import Connection
from delayd.net.server import run
from delayd.wire.frame import Frame
from delayd.wire.heads import need_maps, need_rows
from delayd.wire.requests import RequestType
from tests.end_to_end.dialogue import ask, greet, pull_head
from tests.end_to_end.processes import ServerProcess
from tests.trust import connect_trusted
from tests.unit.cli.runner import run as run_command
from tests.waiting import DEADLINE_S
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch

SETTINGS: dict[str, Value] = {"meta": "127.0.0.1:1", "lease_ms": 300}


def talk(server: ServerProcess, story: Callable[[Connection], Awaitable[None]]) -> None:
    """One connection to a server that runs."""

    async def talking() -> None:
        connection = await connect_trusted("127.0.0.1", server.port)
        try:
            await story(connection)
        finally:
            connection.close()

    run(talking)


async def dispatch(connection: Connection, session: int, *batches: bytes) -> Frame:
    return await ask(connection, RequestType.DISPATCH, {"session": session, "epoch": 1}, *batches)


def test_what_was_answered_survives_a_kill_and_is_served_once_more_to_none(tmp_path: Path) -> None:
    async def before(connection: Connection) -> None:
        await greet(connection, 1)
        await dispatch(connection, 1, dispatch_batch(1, [b"acked"]), dispatch_batch(2, [b"held"]))
        pulled = await ask(connection, RequestType.PULL, {**pull_head(), "max_messages": 1})
        (first,) = need_rows(pulled.head, "parts", 4)
        handle = [pulled.head["incarnation"], first[0], first[2]]
        await ask(connection, RequestType.PULL, pull_head(lease_ms=300))
        await ask(connection, RequestType.ACK, {"subject": "orders", "group": "billing", "handles": [handle]})

    async def after(connection: Connection) -> None:
        window = await greet(connection, 2)
        assert [row[:2] for row in need_rows(window.head, "batches", 7)] == [[1, 1], [1, 2]]
        pulled = await ask(connection, RequestType.PULL, pull_head(wait_ms=10_000))
        assert bodies_of(pulled.body) == [b"held"]
        assert [row[3] for row in need_rows(pulled.head, "parts", 4)] == [2]

    with ServerProcess("realtime", tmp_path, SETTINGS) as server:
        talk(server, before)
        server.kill()
        server.start()
        talk(server, after)
        assert server.terminate() == 0


def test_sigterm_ends_it_in_time_with_a_pull_waiting_and_nothing_left_to_replay(tmp_path: Path) -> None:
    with ServerProcess("realtime", tmp_path, SETTINGS) as server:

        async def story(connection: Connection) -> None:
            await greet(connection, 1)
            await dispatch(connection, 1, dispatch_batch(1, [b"a"]))
            await ask(connection, RequestType.PULL, pull_head())
            waiting = asyncio.ensure_future(ask(connection, RequestType.PULL, pull_head("other", wait_ms=60_000)))
            await ask(connection, RequestType.PING, {})
            # One that takes until its limit would end with 1.
            assert server.terminate() == 0
            with pytest.raises(DelaydError):
                await waiting

        talk(server, story)
        server.start()
        assert "tail_recovered" not in server.log
        assert server.terminate() == 0


def test_a_second_server_on_the_directory_says_who_holds_it(tmp_path: Path) -> None:
    with ServerProcess("realtime", tmp_path, SETTINGS) as server, _spawned(tmp_path) as second:
        assert second.wait() == 2
        assert f"is in use by pid {server.pid}" in second.log


@pytest.mark.parametrize("damage", ["flipped", "gone"])
@pytest.mark.parametrize("mended", ["put back", "given up"])
def test_rule_L5_a_damaged_last_group_of_which_a_message_was_pulled_is_not_cut(
    tmp_path: Path, mended: str, damage: str
) -> None:
    async def pulls(connection: Connection) -> None:
        pulled = await ask(connection, RequestType.PULL, {**pull_head(), "max_messages": 10})
        parts = need_rows(pulled.head, "parts", 4)
        handles = [[pulled.head["incarnation"], part[0], part[2]] for part in parts]
        assert sum(part[2] for part in parts) == 2
        await ask(connection, RequestType.ACK, {"subject": "orders", "group": "billing", "handles": handles})

    with ServerProcess("realtime", tmp_path, SETTINGS) as server:
        talk(server, _two_batches)
        talk(server, pulls)
        server.kill()
        path = tmp_path / "realtime/message/00000000000000000000.log"
        whole = path.read_bytes()
        last_group = whole.rindex(MAGIC_BYTES)
        bad = whole[:last_group] if damage == "gone" else whole[:-1] + bytes([whole[-1] ^ 1])
        path.write_bytes(bad)
        server.start_held()
        assert f"{path} is damaged at byte {last_group}" in server.log
        why = f"the pull log says that it was durable up to offset {len(whole) - FILE_HEADER_BYTES}"
        assert why in server.log
        assert path.read_bytes() == bad
        verified = run_command("log", "verify", "--data", str(tmp_path))
        assert verified.code == 3 and f"{path} is damaged at byte" in verified.out, verified
        assert why in verified.out, verified
        if mended == "put back":
            path.write_bytes(whole)
        else:
            log = "pull" if damage == "gone" else "message"
            given_up = run_command("mend", "give-up", "--yes", str(tmp_path / "realtime" / log))
            assert given_up.code == 0, given_up
            put_aside = [aside.read_bytes() for aside in (tmp_path / "realtime/quarantine").glob("message-*")]
            assert put_aside == ([] if damage == "gone" else [bad])
            # Groups that were made behind the checkpoint keep their ids, for both decisions cut the pull log.
            (pulled,) = (tmp_path / "realtime/pull").glob("*.log")
            assert pulled.read_bytes().count(b"group_ids_skipped") == 1
        server.until_ready()
        assert server.terminate() == 0
    verified = run_command("log", "verify", "--data", str(tmp_path))
    assert verified.code == 0, verified


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    with _served_and_killed(tmp_path) as server:
        path = tmp_path / "realtime/message/00000000000000000000.log"
        data = bytearray(path.read_bytes())
        data[8] = 9
        header = bytes(data[: FILE_HEADER_BYTES - 4])
        data[len(header) : FILE_HEADER_BYTES] = crc32c(header).to_bytes(4, "little")
        path.write_bytes(data)
        server.spawn()
        assert server.wait() == 2
        assert "format version 9" in server.log


def test_it_registers_with_meta_and_again_when_meta_comes_back(tmp_path: Path) -> None:
    with (
        ServerProcess("meta", tmp_path / "m", {"heartbeat_ms": 50, "lease_ms": 200}) as meta,
        ServerProcess("realtime", tmp_path, {"meta": meta.address}) as server,
    ):
        for _ in range(2):
            _wait_until_alive(meta, server.port)
            meta.kill()
            meta.start()
        _wait_until_alive(meta, server.port)
        assert server.terminate() == 0


def _wait_until_alive(meta: ServerProcess, port: int) -> None:
    async def story(connection: Connection) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            answer = await ask(connection, RequestType.SERVERS, {"role": "realtime"})
            if any(row["port"] == port and row["alive"] for row in need_maps(answer.head, "servers")):
                return
            assert time.monotonic() < deadline, answer.head

    talk(meta, story)


async def _two_batches(connection: Connection) -> None:
    await greet(connection, 1)
    await dispatch(connection, 1, dispatch_batch(1, [b"first"]))
    await dispatch(connection, 1, dispatch_batch(2, [b"second"]))


class _spawned(ServerProcess):
    """A server that is not expected to come up."""

    def __init__(self, data: Path) -> None:
        super().__init__("realtime", data, SETTINGS)

    def __enter__(self) -> ServerProcess:
        self.spawn()
        return self


class _served_and_killed(ServerProcess):
    """A server that took two batches and was killed."""

    def __init__(self, data: Path) -> None:
        super().__init__("realtime", data, SETTINGS)

    def __enter__(self) -> ServerProcess:
        self.start()
        talk(self, _two_batches)
        self.kill()
        return self
