"""The gateway as a process: it listens, says that it is ready, and stops within seconds at SIGTERM.

Invariant: without tokens whoever reaches it may send, take and cancel, so it listens on this machine alone unless its
user says otherwise in so many words.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from delayd.address import Endpoint, Tls
from delayd.client.asking import ask
from delayd.errors import BadSetting
from delayd.gateway.app import Gateway, app_of
from delayd.gateway.callers import Callers
from delayd.gateway.connection import HttpConnection, HttpsConnection, Lobby, look_after
from delayd.gateway.console.audit_folder import AuditFolder
from delayd.gateway.push import Push
from delayd.net.budget import connections_max, raise_file_limit
from delayd.net.program import QuietCollector, configure_logging
from delayd.net.timer import Ticks
from delayd.net.tls import TlsGate
from delayd.secret import Secret

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_S = 3  # Requests that are under way may end.
STDIN = 0
DAY_S = 86_400  # uvicorn would end idle connections later than `HttpConnection.look` does.
LOOK_S = 1.0  # How often a new certificate is looked for.


def run(
    meta: str,
    host: str,
    port: int,
    names: Sequence[str],
    *,
    insecure: bool,
    require_token: bool = False,
    tls: Tls | None = None,
    find_secret: Callable[[], Secret | None] = lambda: None,
    allow_private: bool = False,
    audits: str | None = None,
    exit_with_stdin: bool = False,
) -> int:
    """Serve until a signal comes, or stdin closes if that is asked for; returns the exit code.

    ``find_secret`` finds the cluster's secret, for which it may wait; without one no push targets are served. The
    console shows the audits of the folder ``audits``.

    Raises:
        BadSetting: the address can't be used, or others could reach it and nobody has said that they may; or
            ``audits`` is no folder.
    """
    check_host(
        host, lets_in=insecure or require_token, options="--require-token (with the cluster's secret), or --insecure"
    )
    secret = find_secret()
    if require_token and secret is None:
        raise BadSetting("require_token: only with the cluster's secret a gateway knows tokens; give --secret-file")
    configure_logging()
    # Whoever proves the secret may do everything, so its callers are asked for tokens wherever servers ask for them.
    meta = ask.as_operator(meta, secret)
    push, callers = Push(meta, secret, allow_private=allow_private), Callers(meta, secret, required=require_token)
    gate = None if tls is None else TlsGate(tls)
    gateway = Gateway(meta, names, push, callers, audits=audit_folder(audits))
    return serve(gateway, "gateway", host, port, gate, exit_with_stdin=exit_with_stdin)


def audit_folder(path: str | None) -> AuditFolder | None:
    """The folder of audits. Raises BadSetting when it is none."""
    if path is None:
        return None
    if not os.path.isdir(path):
        raise BadSetting(f"audits: {path} is no folder; make it, or give the one that audits are in", setting="audits")
    return AuditFolder(path)


def check_host(host: str, *, lets_in: bool, options: str) -> None:
    """Raise BadSetting when others could reach this address, and nobody has said by an option that they may."""
    if not lets_in and not _is_local(host):
        what = f"{host} lets other machines in, and the gateway need not ask anybody who they are"
        raise BadSetting(f"{what}; give an address of this machine only, {options}", setting="host")


def serve(
    gateway: Gateway, role: str, host: str, port: int, gate: TlsGate | None = None, *, exit_with_stdin: bool = False
) -> int:
    """Serve until a signal comes, or stdin closes if that is asked for; returns the exit code. ``role`` is what the
    ready line says; ``gate`` has the certificate for HTTPS.

    Raises:
        BadSetting: the address can't be used.
    """
    # What it says of each stop and start is said here, and callers fill no log with what they get wrong.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    raise_file_limit()
    listening, lobby = _listen(host, port), Lobby(connections_max())

    def accepted(**given: Any) -> asyncio.BaseProtocol:
        return HttpConnection(lobby, **given) if gate is None else gate.accept(HttpsConnection(lobby, **given))

    config = uvicorn.Config(
        app_of(gateway),
        http=accepted,  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=STOP_S,
        timeout_keep_alive=DAY_S,
    )

    server = _Server(config, listening, gateway, role, exit_with_stdin=exit_with_stdin)

    async def main() -> None:
        looks = None if gate is None else Ticks(asyncio.get_running_loop(), LOOK_S, gate.look)
        try:
            await server.serve([listening])
        finally:
            if looks is not None and gate is not None:
                looks.close()
                gate.close()

    uvloop.run(main())
    return 0


class _Server(uvicorn.Server):
    """Says that it is ready when it serves, and ends with 0 when it was told to stop."""

    def __init__(
        self, config: uvicorn.Config, listening: socket.socket, gateway: Gateway, role: str, *, exit_with_stdin: bool
    ) -> None:
        super().__init__(config)
        self._role = role
        self._exit_with_stdin = exit_with_stdin
        self._gateway = gateway
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._exit_with_stdin:
            asyncio.get_running_loop().add_reader(STDIN, self._on_stdin)
        await super().startup(sockets)
        self._collector = QuietCollector(asyncio.get_running_loop())
        connections: set[HttpConnection] = self.server_state.connections  # type: ignore[assignment]
        looking = look_after(connections, self._gateway.callers.look)
        self._looking = asyncio.get_running_loop().create_task(looking)
        host, port = self._listening.getsockname()[:2]
        log.info("listening host=%s port=%d", host, port)
        print(f"ready {self._role} {Endpoint(host, port)} pid={os.getpid()}", flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn; there, the process dies of the signal behind the clean stop."""
        before = {number: signal.signal(number, self._stop) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.stop()
        await super().shutdown(sockets)
        self._collector.close()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        log.info("stopping role=%s signal=%s", self._role, signal.Signals(number).name)
        self.handle_exit(number, frame)

    def _on_stdin(self) -> None:
        if not os.read(STDIN, 4_096):
            asyncio.get_running_loop().remove_reader(STDIN)
            log.info("stopping role=%s stdin=closed", self._role)
            self.should_exit = True


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1_024)
    except OSError as error:
        listening.close()
        raise BadSetting(
            f"{host}:{port} can't be listened on ({error.strerror}); choose another one", setting="port"
        ) from error
    listening.setblocking(False)
    return listening
