"""Cutting: has several running servers fix what their files hold, so that their copies fit each other (docs/backup.md).

Invariant: from its own cut on until all servers are cut, a delay server tells no other server anything. So what one
server of the copies says of another one, the copy of the other one holds, too.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from delayd.net.connection import Connection
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_bool, need_u64
from delayd.wire.requests import RequestType

from . import ask

# A hold ends once all servers are cut, after some milliseconds; this ends that of a dead command. Each try may take
# longer than the one before, because the machines may be busy.
HOLDS_MS = (2_000, 3_500, 5_000)
ROLES = ("delay", "realtime", "meta")  # Servers of one role are cut together, and each role behind the one before.


class Running(NamedTuple):
    """A running server, which has heard the secret of its cluster."""

    role: str
    name: str
    connection: Connection


class Fixed(NamedTuple):
    """How servers were cut: the answers to CUT, and whether the copies fit each other."""

    answers: Sequence[Head]  # In the order of the servers.
    held: bool


async def cut(servers: Sequence[Running], wishes: Mapping[str, HeadValue]) -> Fixed:
    """Cut these servers, and wait until the files of their cuts are written.

    ``wishes`` are more fields of each CUT. Raises what the servers answer, and ServerUnavailable.
    """
    held, cuts = False, dict[int, Head]()
    for hold_ms in HOLDS_MS:
        for role in ROLES:
            own = [place for place, server in enumerate(servers) if server.role == role]
            head = {"hold_ms": hold_ms if role == "delay" else 0, **wishes}
            answers = await asyncio.gather(
                *(ask.ask(servers[place].connection, RequestType.CUT, head) for place in own)
            )
            cuts.update(zip(own, answers, strict=True))
        ready = await asyncio.gather(
            *(
                ask.ask(server.connection, RequestType.CUT_READY, {"cut": need_u64(cuts[place], "cut")})
                for place, server in enumerate(servers)
            )
        )
        held = all(need_bool(answer, "held") for answer in ready)
        if held:
            break
    return Fixed([cuts[place] for place in range(len(servers))], held)
