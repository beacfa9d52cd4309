"""A server program with a service that behaves as its argument says; run by test_program as a process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from delayd.address import Endpoint
from delayd.errors import BadSetting, DamagedData, DirectoryInUse, SyncFailed
from delayd.net import held_start
from delayd.net.held_start import HeldServer
from delayd.net.program import Fail, run_program
from delayd.net.server import Server
from delayd.wire.exposition import Family
from tests.trust import SECRET

from .loopback import HOST, Echo

SERVING_ERRORS = {
    "sync_fails": SyncFailed("/data", "input/output error"),
    "damage": DamagedData("/data/x.log", 64, "the checksum differs"),
    "bug": ZeroDivisionError("a bug"),
}
STARTING_ERRORS = {
    "memory": MemoryError(),
    "bad_setting": BadSetting("port must be at most 65535"),
    "in_use": DirectoryInUse("/data", "pid 7, delay"),
}


def hang() -> None:
    """Hold the loop for longer than any test lasts."""
    time.sleep(3600)


class Service:
    """Serves echoes until it is told to stop."""

    def __init__(self, behaviour: str, fail: Fail) -> None:
        self._behaviour = behaviour
        self._path = Path(behaviour) if behaviour.startswith("/") else None  # It needs this file.
        self._fail = fail
        self._server = Server(Echo())

    def open(self) -> None:
        if self._behaviour in STARTING_ERRORS:
            raise STARTING_ERRORS[self._behaviour]
        if self._path:
            try:
                self._path.stat()
            except FileNotFoundError:
                raise DamagedData(str(self._path), 0, "the file is gone") from None

    def abandon(self) -> HeldServer:
        return HeldServer("sample", Endpoint(HOST, 0), SECRET)

    def not_ready(self) -> str:
        return ""

    def families(self) -> Iterable[Family]:
        return ()

    @property
    def tokens(self) -> None:
        """It asks nobody for one."""

    def families_by_subject(self, pattern: str) -> Iterable[Family]:
        return ()

    async def registered(self) -> None:
        """See the port."""

    async def start(self) -> Endpoint:
        loop = asyncio.get_running_loop()
        endpoint = await self._server.listen(Endpoint(HOST, 0))
        if self._behaviour in SERVING_ERRORS:
            loop.call_later(0.01, self._fail, SERVING_ERRORS[self._behaviour])
        if self._behaviour == "bug_in_callback":
            loop.call_later(0.01, lambda: 1 // 0)
        return endpoint

    async def stop(self) -> None:
        print("stopping", flush=True)
        if self._behaviour == "hangs_in_await":
            await asyncio.Event().wait()
        if self._behaviour == "hangs_in_loop":
            hang()
        await self._server.close()
        print("stop called", flush=True)


if __name__ == "__main__":
    behaviour, *options = sys.argv[1:]
    # A start that is held looks ten times as often; tests/end_to_end has the real times.
    held_start.LOOK_S, held_start.RESTED_S, held_start.AGAIN_S = 0.1, 0.5, 3.0
    sys.exit(run_program("sample", lambda fail: Service(behaviour, fail), exit_with_stdin="stdin" in options))
