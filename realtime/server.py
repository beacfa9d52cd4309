"""The realtime server's shell: frames between connections and the core, and one timer.

The core is called on the loop's thread only, and its next wake-up is set again after every call.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from functools import partial

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from delayd.clock import ClockEvidence, SystemClock
from delayd.config import RealtimeConfig, describe
from delayd.disk import Lock, RealDisk
from delayd.errors import DelaydError
from delayd.executor import ThreadExecutor
from delayd.log.checkpoint import read_checkpoint
from delayd.net.connection import Connection
from delayd.net.program import Fail
from delayd.net.registration import Registration
from delayd.net.server import Server
from delayd.net.timer import Timer
from delayd.state import LmdbState
from delayd.wire.frame import Frame
from delayd.wire.meta import Registered

from .core import Core, Executors
from .recovery import recover

RETAIN_EVERY_S = 600
ROLE = "realtime"

log = logging.getLogger(__name__)


class RealtimeServer:
    """One realtime server on real files and sockets; a Service of delayd.net.program and the Handler of its Server."""

    def __init__(self, config: RealtimeConfig, fail: Fail) -> None:
        self._config = config
        self._fail = fail
        self._disk = RealDisk()
        self._executors: list[ThreadExecutor] = []
        self._lock: Lock | None = None
        self._state: LmdbState | None = None
        self._core: Core | None = None
        self._timer: Timer | None = None
        self._wake_set_ms: int | None = None
        self._server: Server | None = None
        self._scheduler: AsyncIOScheduler | None = None
        self._registration: Registration | None = None
        self._clock: SystemClock | None = None

    async def start(self) -> tuple[str, int]:
        """Recover, listen, register."""
        config, folder = self._config, self._config.folder
        log.info("starting %s", describe(config))
        loop = asyncio.get_running_loop()
        self._disk.make_folder(folder)
        self._lock = self._disk.lock(f"{folder}/LOCK", ROLE)
        state_path = f"{folder}/state.lmdb"
        state = self._state = LmdbState(state_path)
        clock = self._clock = SystemClock(_evidence(read_checkpoint(self._disk, folder)))
        draw: Callable[[], int] = partial(secrets.randbits, 64)
        recovered = recover(config, self._disk, state, clock, draw, state_path)
        post = loop.call_soon_threadsafe
        names = ("realtime-commit", "realtime-pull", "realtime-work")
        commit, pull, work = self._executors = [ThreadExecutor(name, self._posting(post)) for name in names]
        core = self._core = Core(config, self._disk, state, clock, Executors(commit, pull, work), recovered, self._fail)
        self._timer = Timer(loop, self._on_timer)
        self._server = Server(self)
        port = await self._server.listen(config.host, config.port)
        self._rearm()
        registered = Registered(ROLE, core.log_id, config.host, port, core.epoch, os.getpid())
        self._registration = Registration(config.meta, lambda: registered, on_now_ms=clock.reference)
        self._registration.start()
        self._schedule(core)
        return config.host, port

    async def stop(self) -> None:
        """See the port: a checkpoint is taken, so that the next start has nothing to replay."""
        core, server = self._core, self._server
        assert core is not None and server is not None
        if self._registration is not None:
            await self._registration.close()
        if self._scheduler is not None:
            self._scheduler.shutdown(wait=False)
        server.stop_accepting()
        stopped = asyncio.Event()
        core.stop(stopped.set)
        await stopped.wait()
        await server.close()
        if self._timer is not None:
            self._timer.close()
        for executor in self._executors:
            executor.close()
        core.close()
        if self._state is not None:
            self._state.close()
        if self._lock is not None:
            self._lock.release()
        self._disk.close()

    # Handler of the connections.

    def connected(self, connection: Connection) -> None:
        """Nothing is known of it before its first request."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """Give a request to the core."""
        assert self._core is not None
        try:
            self._core.received(connection, frame)
        finally:
            self._rearm()

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """Tell the core."""
        assert self._core is not None
        self._core.disconnected(connection)

    def crashed(self, error: Exception) -> None:
        """A bug: stop."""
        self._fail(error)

    def _posting(self, post: Callable[..., object]) -> Callable[[Callable[[], object]], object]:
        """Have what an executor finished called on the loop, and the timer set again."""

        def called(done: Callable[[], object]) -> None:
            done()
            self._rearm()

        return lambda done: post(called, done)

    def _on_timer(self) -> None:
        assert self._core is not None
        self._wake_set_ms = None
        self._core.wake()
        self._rearm()

    def _rearm(self) -> None:
        if self._core is None or self._timer is None or self._clock is None:
            return
        wake_ms = self._core.next_wake_ms()
        if wake_ms != self._wake_set_ms:
            self._wake_set_ms = wake_ms
            self._timer.set_after_ms(wake_ms - self._clock.monotonic_ms())

    def _schedule(self, core: Core) -> None:
        async def retain() -> None:
            core.retain()

        scheduler = self._scheduler = AsyncIOScheduler(
            job_defaults={"misfire_grace_time": None, "coalesce": True}, timezone="UTC"
        )
        scheduler.add_job(retain, "interval", seconds=RETAIN_EVERY_S)
        scheduler.start()


def _evidence(payload: object) -> ClockEvidence | None:
    if not isinstance(payload, dict):
        return None
    boot_id, boottime_ms, wall_ms = payload["clock"]
    return ClockEvidence(boot_id, boottime_ms, wall_ms)
