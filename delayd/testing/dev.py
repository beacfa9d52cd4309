"""Servers in memory behind a gateway, as a process: HTTP for the tests of programs in any language, with a clock that
they move (docs/gateway.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from delayd.client.instants import utc
from delayd.gateway.app import Gateway
from delayd.gateway.callers import Callers
from delayd.gateway.program import check_host, serve
from delayd.gateway.push import Push
from delayd.net.program import configure_logging
from delayd.testing.broker import InMemoryBroker


def run(host: str, port: int, names: Sequence[str], *, insecure: bool, start_ms: int | None, stands: bool) -> int:
    """Serve until a signal comes, and forget everything then; returns the exit code.

    Args:
        host, port: where to listen.
        names: under which clients ask it, beside addresses and ``localhost``.
        insecure: whether other machines may reach it.
        start_ms: what the clock shows at first, in ms since the epoch; without it this machine's time.
        stands: whether the clock goes on only when it is moved.

    Raises:
        BadSetting: the address can't be used, or others could reach it and nobody has said that they may.
    """
    check_host(host, lets_in=insecure, options="or --insecure")
    configure_logging()
    start = None if start_ms is None else utc(start_ms)
    with InMemoryBroker(start=start, tick=not stands) as broker:
        push = Push(broker.address, broker.secret, allow_private=True)  # Receivers of a test are on this machine.
        callers = Callers(broker.address, None, required=False)
        return serve(Gateway(broker.address, names, push, callers, broker.clock), "dev", host, port)
