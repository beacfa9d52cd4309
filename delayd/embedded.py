"""Embedded: the servers in the program that uses them, with their real files and without sockets.

`delayd.open("path/to/dir")` starts meta, a realtime and a delay server on one thread of this process. Their directory
is that of `delayd up --data`: a program may use it today and servers tomorrow, and the other way round. Clients reach
them by connections inside of the process (`delayd.net.inside`), and are the same clients as ever.

Invariant: one process has the directory. What is acknowledged is durable, so a program may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from delayd.address import Endpoint
from delayd.client.admin import Admin
from delayd.client.engine import THREAD_S, LoopThread, forget, remember
from delayd.client.instants import monotonic_s
from delayd.client.producer import AsyncProducer, Producer
from delayd.client.pulling.consumer import AsyncConsumer, Consumer
from delayd.config import DelayConfig, MetaConfig, RealtimeConfig
from delayd.errors import AlreadyClosed, BadArgument, BadSetting, ServerStopped
from delayd.net import inside
from delayd.net.machine import REAL_MACHINE, Machine
from delayd.programs import find
from delayd.worker.worker import Worker

if TYPE_CHECKING:
    from delayd.net.held_start import Service

REGISTERED_S = 2.0  # For servers to register; those of a moved directory wait for a lease, and so do their clients.
STOP_S = 10.0  # For the servers to make durable what is under way and to release the directory.

log = logging.getLogger(__name__)


def open(path: str | os.PathLike[str], **settings: Any) -> Embedded:
    """Open a directory for messages within this process; it is made when it is missing.

    Example::

        with delayd.open("./data") as home:
            with home.producer() as producer, home.consumer("orders.cancel", group="billing") as consumer:
                producer.send("orders.cancel", b"42", delay=timedelta(minutes=30))
                for message in consumer:
                    message.ack()

    Args:
        path: the directory.
        settings: of the delay and the realtime server, by their names in docs/operations.md, such as ``retention_ms``.

    Raises:
        DirectoryInUse: another process has it; the message says which one.
        DamagedData, NewerFormat, NotWritable: why it can't be used.
        BadSetting: a setting is wrong.
    """
    return Embedded(path, settings)


class Embedded:
    """An open directory; made by `delayd.open`. Use it with ``with``, or close it.

    Any thread may use it. A program that ends without closing it loses nothing: the next open recovers.
    """

    def __init__(self, path: str | os.PathLike[str], settings: dict[str, Any], machine: Machine = REAL_MACHINE) -> None:
        if not isinstance(path, str | os.PathLike):
            raise BadArgument(f"path is that of a directory, such as './data', not {type(path).__name__}")
        text = os.fspath(path)
        if not text:
            raise BadArgument("path is empty; delayd.open takes that of a directory, such as './data'")
        self.path = str(Path(text).absolute())
        self._pid = os.getpid()
        self._machine = machine
        self._host = inside.new_host()
        self._meta = Endpoint(self._host, 0)  # Where its meta server listens.
        self._services: list[Service] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = LoopThread("delayd-embedded", machine.loop())
        try:
            self._thread.call(self._start(settings))
        except BaseException:
            self._thread.call(self._stop())
            self._thread.close()
            raise
        remember(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}{', closed' if self._closed else ''})"

    @property
    def address(self) -> str:
        """What a client in this process takes as the address of meta."""
        self.check()
        return str(self._meta)

    def producer(self, **settings: Any) -> Producer:
        """A `Producer` of this directory; ``settings`` are its own."""
        return Producer(self.address, **settings)

    def async_producer(self, **settings: Any) -> AsyncProducer:
        """An `AsyncProducer` of this directory, for the running loop."""
        return AsyncProducer(self.address, **settings)

    def consumer(self, subject: str | Sequence[str], group: str, **settings: Any) -> Consumer:
        """A `Consumer` of this directory; ``settings`` are its own."""
        return Consumer(self.address, subject, group, **settings)

    def async_consumer(self, subject: str | Sequence[str], group: str, **settings: Any) -> AsyncConsumer:
        """An `AsyncConsumer` of this directory, for the running loop."""
        return AsyncConsumer(self.address, subject, group, **settings)

    def admin(self) -> Admin:
        """An `Admin` of this directory, which may also decide what needs the secret."""
        return Admin(self.address, secret=self._secret)

    def worker(self, **settings: Any) -> Worker:
        """A `Worker` for this directory; ``settings`` are its own."""
        return Worker(self.address, **settings)

    def check(self) -> None:
        """Raise AlreadyClosed after the close or in another process, and ServerStopped when the servers had to stop."""
        if self._failure is not None:
            raise ServerStopped(f"{self.path} was closed by a failure ({self._failure}); mend it, then open it again")
        if self._closed:
            raise AlreadyClosed(f"{self.path} was closed")
        if os.getpid() != self._pid:
            raise AlreadyClosed(f"{self.path} is open in the process {self._pid}, from which this one was forked")

    def close(self) -> None:
        """Stop the servers and release the directory; close its clients before. A second close does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        forget(self)
        try:
            self._thread.call(self._stop())
        finally:
            inside.forget_host(self._host)
            self._thread.close()

    @property
    def pid(self) -> int:
        """The process that opened it; see `remember`."""
        return self._pid

    def end(self, until: float) -> None:
        """Stop the servers because the program ends; see `remember`."""
        self._closed = True
        self._thread.call_within(self._stop(), max(until - monotonic_s(), 0))
        self._thread.end(THREAD_S)

    async def _start(self, settings: dict[str, Any]) -> None:
        """Start the servers one after the other; each finds meta at its first try."""
        servers = {
            MetaConfig: find("meta.server").MetaService,
            RealtimeConfig: find("realtime.server").RealtimeServer,
            DelayConfig: import_module("delayd.delay.server").DelayServer,
        }
        asyncio.get_running_loop().set_exception_handler(self._on_bug)
        known = {each.name for config in (RealtimeConfig, DelayConfig) for each in fields(config)}
        if unknown := sorted({*settings} - known | {*settings} & {"data", "host", "port", "meta", "advertise_host"}):
            raise BadSetting(f"{unknown[0]} is no setting of an open directory; docs/operations.md lists them")
        places = {"data": self.path, "host": self._host, "port": 0}
        for config, server in servers.items():
            if config is not MetaConfig:
                places["meta"] = str(self._meta)
            names = set() if config is MetaConfig else {each.name for each in fields(config)}
            own = {name: value for name, value in settings.items() if name in names}
            made = config(**places, **own)
            if config is MetaConfig:
                self._secret = self._machine.secret(made)
            service: Service = server(made, self._fail, self._machine)
            try:
                service.open()
            except BaseException:
                service.abandon()
                raise
            self._services.append(service)
            endpoint = await service.start()
            if config is MetaConfig:
                self._meta = endpoint
        # A client that is opened at once is told of these servers by meta, at the addresses of this life.
        with suppress(TimeoutError):
            async with asyncio.timeout(REGISTERED_S):
                for service in self._services:
                    await service.registered()

    async def _stop(self) -> None:
        if self._failure is not None:
            return  # Nothing in memory is trusted: the next open recovers from the disk.
        while self._services:
            await self._services.pop().stop()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            log.critical("embedded_failed path=%s", self.path, exc_info=error)
            inside.abort(self._host)

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        self._fail(error if isinstance(error, BaseException) else RuntimeError(str(context.get("message"))))
