"""Tells a person who waits for a server which one that is, after a second of silence.

Invariant: what is told was asked for at that moment, the work itself is not touched, and nothing is told after its end.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click

from delayd.errors import DelaydError

from . import ask

TOLD_AFTER_S = 1.0  # A send takes milliseconds: by then somebody wonders.


@contextmanager
def told_whom(meta: str, given_up: str) -> Iterator[None]:
    """Say on stderr for whom the block waits if it does so for more than a second; ``given_up``: when it stops."""
    ended = threading.Event()

    def tell() -> None:
        if ended.wait(TOLD_AFTER_S):
            return
        whom = _whom(meta)
        if not ended.is_set():
            click.echo(f"delayd: waiting for {whom}; it is given up after {given_up}", err=True)

    # A daemon, so that the end of the program never waits for an answer that nobody reads any more.
    threading.Thread(target=tell, name="delayd-waiting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _whom(meta: str) -> str:
    try:
        servers = ask.run(lambda: _delay_servers(meta))
    except DelaydError as error:
        return f"the meta server at {meta}: {error.message}"
    if not servers:
        return f"a delay server: the meta server at {meta} knows none; start one with `delayd delay`"
    places = ", ".join(f"{server.host}:{server.port}" for server in servers)
    if not any(server.alive for server in servers):
        return f"the delay server at {places}: {ask.silence(servers[0])}"
    return f"the delay server at {places}, which is alive and has not answered; see `delayd status`"


async def _delay_servers(meta: str) -> list[ask.Known]:
    async with ask.meta(meta) as connection:
        return await ask.known_servers(connection, "delay")
