"""``delayd servers``, ``delayd server`` and ``delayd clock``: what each server that meta knows may do now, and an
operator's word on it; and draining, which moves the pending messages of a delay server to others (docs/drain.md).

Invariant: a server that can't be asked is called so, and nothing is guessed of it. A drain decides nothing that is lost
with it: each piece is durable at the server before it is counted, so the command may end at any moment and be given
again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple

import click
import numpy as np

from delayd.client.asking import ask
from delayd.client.asking.looking import CORDONED, FENCED, SERVES, look_at, silence
from delayd.errors import BadArgument, NoDelayServer, NotReady, RequestFailed, RetryLater, ServerInUse
from delayd.machine.operating import counted
from delayd.net.connection import Connection
from delayd.wire.asked import DrainOrder, DrainProgress, read_drain_progress
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_bool, need_int, need_map, need_str
from delayd.wire.meta import SlotOwners, SlotSet, read_slot_owners, slot_set, slots_bytes, versions_bytes
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import TargetInfo, read_targets

from .listing import Cell, columns, progress, show
from .main import OK, TRY_LATER
from .operate import Operator, all_pages, decision_options, of_each, operator_options, run
from .shared_options import (
    Command,
    CommandGroup,
    LogIdParam,
    format_option,
    meta_option,
    secret_data_option,
    secret_option,
)

SERVERS = columns("role log_id address alive state seen_ago_ms:duration epoch:name pid:name")
CLOCKS = columns("role log_id address ahead_ms:duration believed")
# What a delay server says of a realtime server, the weightier first.
LOST, REFUSED = "lost", "refused"
COSTS = {
    "delay": "messages that only it holds are lost for good unless it comes back",
    "realtime": "its subjects stay its own and wait for it; with --routes they get another server",
}
COSTS_WITH_ROUTES = (
    "its subjects get another server when they are next used, consumers that start from now on do not find the "
    "messages that lie at it, and delay servers that hold messages for it need `delayd target lost`"
)


WHICH = "ADDRESS|LOG_ID"

role_option = click.option("--role", type=click.Choice(["delay", "realtime"]), help="Servers of this role only.")


@click.command(cls=Command)
@meta_option
@role_option
@format_option
def servers(meta: str, role: str | None, form: str) -> None:
    """List the servers that meta knows.

    A server that meta has not heard from for a whole lease is not alive: it keeps its subjects and gets no new ones.

    States: `serves`; `cordoned` (a delay server that gets no new messages); `away` (meta has not heard from it);
    `silent` (it can't be reached); `fenced`, `held`, `lost` or `refused` (it waits for an operator, and `delayd status`
    says why).

    $ delayd servers
    $ delayd servers --meta 10.0.0.5:7400 --role delay --format json
    """
    show(SERVERS, run(lambda: _servers(meta, role)), form)


def known_servers(meta: str) -> list[ask.Known]:
    """The servers that a meta server knows. Raises ServerUnavailable."""

    async def asked() -> list[ask.Known]:
        async with ask.meta(meta) as connection:
            return await ask.known_servers(connection)

    return run(asked)


async def _servers(address: str, role: str | None) -> list[tuple[Cell, ...]]:
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection)
    states = await states_of(servers)
    return [_row(server, states[server.log_id]) for server in servers if role in (None, server.role)]


def _row(server: ask.Known, state: str) -> tuple[Cell, ...]:
    names = (server.role, f"{server.log_id:016x}", server.address)
    return (*names, server.alive, state, server.seen_ms_ago, server.epoch, server.pid)


@click.group(cls=CommandGroup)
def server() -> None:
    """Decide on a server that meta knows.

    $ delayd server drain 10.0.0.7:7401 --data /var/lib/delayd
    $ delayd server retire 10.0.0.7:7401 --data /var/lib/delayd
    $ delayd server forget delay 7c2f1a9e00b4d3f8
    """


@server.command()
@click.argument("role", type=click.Choice(["delay", "realtime"]))
@click.argument("log_id", type=LogIdParam(), metavar="LOG_ID")
@click.option("--routes", is_flag=True, help="Give the subjects of a realtime server to other servers.")
@decision_options
def forget(role: str, log_id: int, routes: bool, operator: Operator) -> None:
    """Make meta forget a server that is gone for good, or was restored from a backup.

    A server that was restored from a backup begins again at an older epoch. Meta refuses that, as long as it knows the
    server; it accepts any epoch of a server that it has forgotten. Meta does not forget a server that is alive.

    $ delayd server forget delay 7c2f1a9e00b4d3f8
    $ delayd server forget realtime c3d6a1cd20e12b0e --routes --yes --data /var/lib/delayd
    """
    costs = COSTS_WITH_ROUTES if role == "realtime" and routes else COSTS[role]
    operator.confirm(f"Meta forgets {role} server {log_id:016x}: {costs}.")
    operator.tell_meta(RequestType.FORGET_SERVER, {"role": role, "log_id": log_id, "routes": routes})


@server.command()
@click.argument("which", metavar=WHICH)
@operator_options
def cordon(which: str, operator: Operator) -> None:
    """Send no new messages to a delay server.

    What it holds stays there and is delivered. Messages with keys that it owns still go there; `delayd server drain`
    moves the keys, too. The cordon lasts until `delayd server uncordon`, also over restarts.

    $ delayd server cordon 10.0.0.7:7401 --data /var/lib/delayd
    """
    click.echo(run(lambda: _set_standing(operator, which, "cordoned")))


@server.command()
@click.argument("which", metavar=WHICH)
@operator_options
def uncordon(which: str, operator: Operator) -> None:
    """Send new messages to a delay server again.

    What a drain has moved away stays where it is. Keys that a drain has begun to move are served when it has ended:
    give `delayd server drain` first.

    $ delayd server uncordon 10.0.0.7:7401 --data /var/lib/delayd
    """
    click.echo(run(lambda: _set_standing(operator, which, "serving")))


@server.command()
@click.argument("which", metavar=WHICH)
@operator_options
def drain(which: str, operator: Operator) -> int:
    """Move the pending messages of a delay server to the others, and the keys that it owns.

    The server is cordoned first. Messages that are due within some seconds stay and are delivered there, so the command
    waits for them. It may be stopped at any moment and given again: what was moved is moved.

    Exit codes: 0 the server holds nothing any more, 4 a server can't be reached: give it again.

    $ delayd server drain 10.0.0.7:7401 --data /var/lib/delayd
    """
    began, last = time.monotonic(), DrainTold(0, 0)

    with progress("messages", None) as advance:

        def told(now: DrainTold) -> None:
            nonlocal last
            advance(now.drained - last.drained, now.drained + now.left)
            last = now

        try:
            run(lambda: drain_server(operator, which, told))
        except (RetryLater, RequestFailed) as error:
            click.echo(f"delayd: {_rate(last.drained, began)}; give the command again: {error.message}", err=True)
            return TRY_LATER
        except KeyboardInterrupt:
            click.echo(f"delayd: stopped; {_rate(last.drained, began)}; give the command again to go on", err=True)
            raise
    click.echo(f"{_rate(last.drained, began)}; the server holds nothing any more")
    return OK


@server.command()
@click.argument("which", metavar=WHICH)
@decision_options
def retire(which: str, operator: Operator) -> None:
    """Let a drained delay server leave the cluster for good.

    It is refused as long as the server holds anything, and says what. Afterwards meta does not know the server, and
    never takes it again. Stop its process; its directory stays as it is, for audits.

    $ delayd server retire 10.0.0.7:7401 --data /var/lib/delayd
    """
    operator.confirm(f"{which} leaves the cluster for good: receipts that it gave lead nowhere from then on.")
    said = run(lambda: retire_server(operator, which))
    click.echo(f"{which} is retired: {said}. Stop its process; keep its directory as long as you want to audit it.")


async def _set_standing(operator: Operator, which: str, standing: str) -> str:
    async with operator.at_meta() as connection:
        server = server_of(await ask.known_servers(connection, "delay"), which)
        return await set_standing(connection, server.log_id, standing)


def _rate(drained: int, began: float) -> str:
    seconds = max(0.001, time.monotonic() - began)
    return f"moved {counted(drained, 'message|messages')} in {seconds:.1f} s ({drained / seconds:,.0f}/s)"


@click.command(cls=Command)
@meta_option
@role_option
@click.option("--trust", is_flag=True, help="Tell the servers that their wall clocks are right.")
@secret_option
@secret_data_option
@format_option
def clock(meta: str, role: str | None, trust: bool, secret_file: str | None, data: str, form: str) -> int:
    """Compare the clocks of live servers with this machine's.

    When a wall clock jumps ahead by more than 5 s, its server believes it only after 30 s. After a reboot, a server
    believes its clock after 30 s, or as soon as meta's clock agrees. Until then a server counts the time that has
    passed.

    With --trust a server believes its clock at once, and hands out the messages that are due by it. A delay server
    whose log has instants ahead of a right clock, because its clock was wrong before, goes back to the right clock.
    --trust needs the cluster's secret.

    $ delayd clock
    $ delayd clock --role delay --trust --data /var/lib/delayd
    """
    operator = Operator.of(meta, secret_file, data) if trust else None
    rows, missing = run(lambda: _clocks(operator.meta if operator else meta, role, operator))
    show(CLOCKS, rows, form)
    for sentence in missing:
        click.echo(f"delayd: {sentence}", err=True)
    return TRY_LATER if missing else OK


async def _clocks(
    address: str, role: str | None, operator: Operator | None
) -> tuple[list[tuple[Cell, ...]], list[str]]:
    """The clocks of all live servers, and a sentence for each that was to trust its own and has not done so."""
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection, role)
    missing: list[str] = []
    for server in servers:
        if operator is not None and server.alive:
            try:
                await ask.decide(server, RequestType.TRUST_CLOCK, {}, operator.secret)
            except RetryLater as error:
                missing.append(
                    f"the {server.role} server at {server.address} does not follow its clock: {error.message}"
                )
    rows: list[tuple[Cell, ...]] = []
    for server, seen in zip(servers, await look_at(servers), strict=True):
        if seen.fault or not server.alive:
            why = seen.fault or silence(server)
            click.echo(f"delayd: the clock of the {server.role} server at {server.address} is missing: {why}", err=True)
        else:
            believed = need_bool(seen.status, "clock_confirmed")
            rows.append((server.role, f"{server.log_id:016x}", server.address, seen.clock_ahead_ms, believed))
    return rows, missing


async def states_of(servers: Sequence[ask.Known]) -> dict[int, str]:
    """By log_id: serves or cordoned; fenced, held, lost or refused, which waits for an operator; away or silent."""
    found = {seen.log_id: seen.state for seen in await look_at(servers)}
    asked = (SERVES, CORDONED, FENCED)
    reached = [server for server in servers if server.role == "delay" and found[server.log_id] in asked]
    seen = [info for _, info in await targets_of(reached)]
    for state in (REFUSED, LOST):
        found.update((info.log_id, state) for info in seen if info.state == state and info.log_id in found)
    return found


async def targets_of(servers: Sequence[ask.Known]) -> list[tuple[ask.Known, TargetInfo]]:
    """The targets of delay servers; stderr names those that can't be asked."""

    async def read(connection: Connection) -> list[TargetInfo]:
        pages = all_pages(connection, RequestType.TARGETS, read_targets, lambda info: info.log_id, {"after": 0})
        return [info async for page in pages for info in page]

    return [(server, info) for server, infos in await of_each(servers, "targets", read) for info in infos]


GROUPS_OF_SLOTS = 8  # While a group of slots moves, sends with its keys wait: the fewer rows a group has, the shorter.
LOOK_S = 0.5  # Between two walks, when what is left waits for its instant.
HEARD_S = 60.0  # Far above any heartbeat.
RETIRE_MS = 600_000  # A million messages take some ten seconds.


class DrainTold(NamedTuple):
    """How far a drain is."""

    drained: int  # By this command.
    left: int  # Messages that are still here: pending, in flight, and on their way.


OnTold = Callable[[DrainTold], None]


def server_of(servers: Sequence[ask.Known], which: str) -> ask.Known:
    """The delay server that an operator means, by its address or its log_id; BadArgument when there is none."""
    for server in servers:
        if which in (server.address, f"{server.log_id:016x}"):
            return server
    raise BadArgument(f"meta knows no delay server {which}; see `delayd servers --role delay`")


async def set_standing(meta: Connection, log_id: int, standing: str) -> str:
    """Have meta use a delay server otherwise from now on; what it says. The connection is trusted."""
    head: Head = {"log_id": log_id, "standing": standing}
    return need_str(await ask.patiently(meta, RequestType.CORDON_SERVER, head), "message")


async def drain_server(operator: Operator, which: str, told: OnTold) -> int:
    """Cordon a server, and move its pending messages and its keys to others until it has none: how many were moved."""
    async with operator.at_meta() as meta:
        servers = await ask.known_servers(meta, "delay")
        server = server_of(servers, which)
        if not server.cordoned:
            await set_standing(meta, server.log_id, "cordoned")
        takers = [each.log_id for each in servers if each.alive and not each.cordoned and each is not server]
        if not takers:
            raise NoDelayServer("no other delay server is alive and takes messages; start one")
        async with ask.reached(server) as connection:
            await ask.prove(connection, operator.secret)
            pending = await _until_cordoned(connection)
            return await _Drain(meta, connection, server.log_id, takers, told, pending).run()


async def _until_cordoned(server: Connection) -> int:
    """Wait until a server has heard of its cordon, with its next heartbeat: until then it takes new messages. Return
    how many are pending there.
    """
    for _ in range(int(HEARD_S / LOOK_S)):
        status = await ask.ask(server, RequestType.STATUS, {})
        if status.get("cordoned") is True:
            return need_int(need_map(status, "counters"), "pending")
        await asyncio.sleep(LOOK_S)
    raise NotReady("the server has not heard of its cordon from meta; see `delayd status`")


async def retire_server(operator: Operator, which: str) -> str:
    """Let a drained server leave the cluster for good; what it says. Raises ServerInUse, which says what it holds."""
    async with operator.at_meta() as meta:
        known = await ask.known_servers(meta)
        server = server_of([each for each in known if each.role == "delay"], which)
        async with ask.reached(server) as connection:
            await ask.prove(connection, operator.secret)
            # It looks at the outcome of each message that it has had and whose hour is not over.
            answer = await connection.request(RequestType.RETIRE, {}, timeout_ms=RETIRE_MS)
        said = need_str(answer.head, "message")
        for other in known:
            if other.role == "realtime" and (owed := await _retries_for(other, server.log_id)):
                raise ServerInUse(f"{owed} batches that come again through it wait at realtime server {other.address}")
        await set_standing(meta, server.log_id, "retired")
        return said


async def _retries_for(realtime: ask.Known, log_id: int) -> int:
    """How many batches of messages that come again a realtime server still has for a delay server."""
    async with ask.reached(realtime) as connection:
        counters = need_map(await ask.ask(connection, RequestType.STATUS, {}), "counters")
    found = counters.get(f"retries_for_{log_id:016x}", 0)
    return found if isinstance(found, int) else 0


async def slot_owners(meta: Connection) -> SlotOwners:
    """Ask meta which delay server owns which slots."""
    wanted = slots_bytes(slot_set(np.empty(0, np.intp)))
    return read_slot_owners(await ask.patiently(meta, RequestType.SLOTS, {"wanted": wanted}))


class _Drain:
    """One command, over connections that are trusted."""

    def __init__(
        self, meta: Connection, server: Connection, log_id: int, takers: Sequence[int], told: OnTold, left: int
    ) -> None:
        self._meta = meta
        self._server = server
        self._log_id = log_id
        self._takers = takers
        self._next_taker = cycle(takers)
        self._told = told
        self._drained = 0
        self._left = left

    async def run(self) -> int:
        """Go on until nothing is left here."""
        while True:
            moved = (await self._walk(None, None)).drained
            owned = (await slot_owners(self._meta)).of(self._log_id)
            if not moved and owned.any():
                await self._move_slots(owned)
            self._left = await self._count()
            self._told(DrainTold(self._drained, self._left))
            if not self._left and not owned.any():
                return self._drained
            if not moved:
                await asyncio.sleep(LOOK_S)

    async def _walk(self, slots: SlotSet | None, to: int | None) -> DrainProgress:
        """Let everything of one kind go that may: what the last piece said, with all that were drained."""
        order, drained = DrainOrder(0, slots), 0
        while True:
            taker = next(self._next_taker) if to is None else to
            piece = await self._piece(order._replace(to=taker))
            drained += piece.drained
            self._drained += piece.drained
            self._left = max(0, self._left - piece.drained)  # It was counted a moment ago; some may have come since.
            self._told(DrainTold(self._drained, self._left))
            if piece.place is None:
                return piece._replace(drained=drained)
            order = order._replace(place=piece.place, until_sequence=piece.until_sequence)

    async def _count(self) -> int:
        order, left = DrainOrder(0, None), 0
        while True:
            piece = await self._piece(order)
            left += piece.found + piece.in_flight
            if piece.place is None:
                return left + piece.leaving
            order = order._replace(place=piece.place, until_sequence=piece.until_sequence)

    async def _piece(self, order: DrainOrder) -> DrainProgress:
        return read_drain_progress(await ask.patiently(self._server, RequestType.DRAIN, order.to_head()))

    async def _move_slots(self, owned: SlotSet) -> None:
        """Move keys with their messages, a group of slots after the other, in turn to those who may own keys."""
        places = np.flatnonzero(owned)
        for number, group in enumerate(np.array_split(places, min(GROUPS_OF_SLOTS, len(places)))):
            owners = await slot_owners(self._meta)
            takers = [each for each in self._takers if each in owners.members] or list(self._takers)
            slots, to = slot_set(group), takers[number % len(takers)]
            while True:
                piece = await self._walk(slots, to)
                if not piece.left and not piece.leaving:
                    break
                await asyncio.sleep(LOOK_S)
            # The other server has all messages with these keys, so it judges the keys from now on.
            head: dict[str, HeadValue] = {
                "slots": slots_bytes(slots),
                "versions": versions_bytes((await slot_owners(self._meta)).versions),
                "to": to,
                "lost": True,
            }
            await ask.patiently(self._meta, RequestType.MOVE_SLOTS, head)
