"""Push targets, as operators and gateways ask meta for them and change them (docs/push.md).

Invariant: nobody changes a target that somebody else has changed meanwhile: a change names the version that it is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from delayd.client.asking import ask
from delayd.errors import BadArgument, SlowDown
from delayd.net.connection import Connection
from delayd.secret import Secret
from delayd.wire.frame import Head
from delayd.wire.heads import need_str
from delayd.wire.push import PushTarget, read_push_targets
from delayd.wire.requests import RequestType

BUSY_S = 10.0  # How long to repeat a change while meta stores another one.


@asynccontextmanager
async def trusted_meta(address: str, secret: Secret) -> AsyncIterator[Connection]:
    """Connect to meta, which knows then that an operator or a gateway asks."""
    async with ask.meta(address) as connection:
        await ask.prove(connection, secret)
        yield connection


async def list_targets(connection: Connection) -> list[PushTarget]:
    """All push targets, by name."""
    targets: list[PushTarget] = []
    more, after = True, ""
    while more:
        page = read_push_targets(await ask.ask(connection, RequestType.PUSH_TARGETS, {"after": after}))
        targets += page.targets
        more, after = page.more and bool(page.targets), targets[-1].name if targets else ""
    return targets


async def find_target(connection: Connection, name: str) -> PushTarget:
    """One push target; BadArgument when there is none of that name."""
    found = next((each for each in await list_targets(connection) if each.name == name), None)
    if found is None:
        raise BadArgument(f"there is no push target {name[:100]}; see `delayd push list`")
    return found


async def create_target(connection: Connection, target: PushTarget) -> str:
    """Keep a new target durably; a sentence says what was done.

    Raises:
        BadArgument, BadSubject: it can't be served, or there is one of that name.
    """
    return await _decided(connection, RequestType.SET_PUSH_TARGET, {**target.to_head(), "was": 0})


async def change_target(connection: Connection, name: str, change: Callable[[PushTarget], PushTarget]) -> PushTarget:
    """Keep a target in another form; returns that form.

    Raises:
        BadArgument, BadSubject: it can't be served so, there is none of that name, or it was changed meanwhile.
    """
    known = await find_target(connection, name)
    changed = change(known)
    await _decided(connection, RequestType.SET_PUSH_TARGET, {**changed.to_head(), "was": known.version})
    return changed._replace(version=known.version + 1)


async def delete_target(connection: Connection, name: str) -> str:
    """Forget a target durably; a sentence says what was done. BadArgument when there is none of that name."""
    return await _decided(connection, RequestType.DELETE_PUSH_TARGET, {"name": name})


async def _decided(connection: Connection, request: RequestType, head: Head) -> str:
    loop = asyncio.get_running_loop()
    until = loop.time() + BUSY_S
    while True:
        try:
            return need_str(await ask.ask(connection, request, head), "message")
        except SlowDown as error:
            if loop.time() >= until:
                raise
            await asyncio.sleep(max(0.02, (error.retry_after_ms or 0) / 1_000))
