"""Registration with meta: one heartbeat after another, for as long as the server runs.

A meta that is away changes nothing but that new subjects are not routed here: the server goes on and tries again.
"""

import asyncio
import logging
import os

from delayd.config import RealtimeConfig, parse_address
from delayd.errors import DelaydError
from delayd.net.connection import Connection, connect
from delayd.wire.frame import Head
from delayd.wire.requests import RequestType, need_int

RETRY_MS_MIN = 100
RETRY_MS_MAX = 5_000
ANSWER_MS_MAX = 5_000

log = logging.getLogger(__name__)


class Registration:
    """Keeps one server registered."""

    def __init__(self, config: RealtimeConfig, log_id: int, epoch: int, port: int) -> None:
        self._address = parse_address(config.meta)
        self._head: Head = {
            "role": config.role,
            "log_id": log_id,
            "host": config.host,
            "port": port,
            "epoch": epoch,
            "pid": os.getpid(),
        }
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End; the lease ends by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        retry_ms = RETRY_MS_MIN
        while True:
            connection: Connection | None = None
            try:
                connection = await connect(*self._address)
                while True:
                    heartbeat_ms = await self._register(connection)
                    if retry_ms != 0:
                        log.info("registered meta=%s:%d", *self._address)
                    retry_ms = 0
                    await asyncio.sleep(heartbeat_ms / 1000)
            except DelaydError as error:
                log.warning("not_registered meta=%s:%d error=%r", *self._address, error.message)
            finally:
                if connection is not None:
                    connection.close()
            retry_ms = min(max(2 * retry_ms, RETRY_MS_MIN), RETRY_MS_MAX)
            await asyncio.sleep(retry_ms / 1000)

    async def _register(self, connection: Connection) -> int:
        answer = await connection.request(RequestType.REGISTER, self._head, timeout_ms=ANSWER_MS_MAX)
        return need_int(answer.head, "heartbeat_ms", 1)
