"""Push targets, as operators and gateways ask meta for them and change them (docs/push.md).

Invariant: nobody changes a target that somebody else has changed meanwhile: a change names the version that it is for.
"""

from __future__ import annotations

from collections.abc import Callable

from delayd.client.asking import ask
from delayd.errors import BadArgument
from delayd.net.connection import Connection
from delayd.wire.frame import Head
from delayd.wire.heads import need_str
from delayd.wire.push import PushTarget, read_push_targets
from delayd.wire.requests import RequestType


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
    head: Head = {**target.to_head(), "was": 0}
    return need_str(await ask.patiently(connection, RequestType.SET_PUSH_TARGET, head), "message")


async def change_target(connection: Connection, name: str, change: Callable[[PushTarget], PushTarget]) -> PushTarget:
    """Keep a target in another form; returns that form.

    Raises:
        BadArgument, BadSubject: it can't be served so, there is none of that name, or it was changed meanwhile.
    """
    known = await find_target(connection, name)
    changed = change(known)
    await ask.patiently(connection, RequestType.SET_PUSH_TARGET, {**changed.to_head(), "was": known.version})
    return changed._replace(version=known.version + 1)


async def delete_target(connection: Connection, name: str) -> str:
    """Forget a target durably; a sentence says what was done. BadArgument when there is none of that name."""
    return need_str(await ask.patiently(connection, RequestType.DELETE_PUSH_TARGET, {"name": name}), "message")
