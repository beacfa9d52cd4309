"""``delayd slots``: which delay server owns which keys, and an operator's word on that (docs/keys.md, Owners)."""

from __future__ import annotations

import click
import numpy as np

from delayd.errors import NotReady, ServerUnavailable, UnknownServer
from delayd.secret import Secret
from delayd.wire.heads import need_str
from delayd.wire.meta import SlotSet, Versions, need_versions, slots_bytes, slots_of_text, slots_text, versions_bytes
from delayd.wire.requests import RequestType

from . import ask
from .listing import Cell, columns, show
from .operate import Operator, decision_options
from .options import Group, LogId, format_option, meta_option
from .servers import slot_owners, states_of

COLUMNS = columns("delay_log_id address:spare state count:number slots")


class Slots(click.ParamType[SlotSet]):
    """A set of slots, as `delayd slots list` shows it."""

    name = "slots"

    def convert(self, value: str | SlotSet, param: click.Parameter | None, ctx: click.Context | None) -> SlotSet:
        """See click."""
        if not isinstance(value, str):
            return value
        try:
            return slots_of_text(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.group(cls=Group)
def slots() -> None:
    """Show which delay server judges which keys, and give keys to another one.

    A subject and a key together fall into one of 1,024 slots. The delay server that owns the slot takes all messages
    with that key, so that no two of them can be pending.

    $ delayd slots list
    $ delayd slots move 0-511 --to da93bd41c4690cd6
    """


@slots.command("list")
@meta_option
@format_option
def list_(meta: str, form: str) -> None:
    """List the delay servers and the slots that they own.

    A slot gets its first owner when a message with a key of it is sent. `owner unknown`: meta began anew, or two
    servers claim these slots; `delayd status` says what it waits for.

    $ delayd slots list
    $ delayd slots list --format json
    """
    show(COLUMNS, ask.run(lambda: _listed(meta)), form)


@slots.command()
@click.argument("slots", type=Slots(), metavar="SLOTS")
@click.option("--to", "log_id", type=LogId(), required=True, metavar="LOG_ID", help="The delay server that gets them.")
@click.option("--lost", is_flag=True, help="Their owner is gone for good: do not ask it.")
@decision_options
def move(slots: SlotSet, log_id: int, lost: bool, operator: Operator) -> None:
    """Give slots to another delay server.

    The owner gives a slot up only when no message with a key of it is pending. While the slots move, sends with such
    keys wait.

    $ delayd slots move 0-511,600 --to da93bd41c4690cd6 --data /var/lib/delayd
    $ delayd slots move 7 --to da93bd41c4690cd6 --lost --yes
    """
    if lost:
        operator.confirm(
            "If the owner's directory ever serves again, two messages with one key may be pending: one there and one "
            f"at {log_id:016x}."
        )
    click.echo(ask.run(lambda: _move(operator, slots, log_id, lost)))


@slots.command()
@decision_options
def settle(operator: Operator) -> None:
    """Say that each delay server that owns keys has registered with a meta that began anew.

    Such a meta gives keys to nobody before it knows who owns them. It finds out by itself once all delay servers are
    back; say this when one of them is gone for good.

    $ delayd slots settle --data /var/lib/delayd
    $ delayd slots settle --yes
    """
    operator.confirm(
        "If a delay server that has not registered with this meta ever serves again, two messages with one key may be "
        "pending: one there and one elsewhere."
    )
    operator.tell_meta(RequestType.SETTLE_SLOTS, {})


async def _listed(address: str) -> list[tuple[Cell, ...]]:
    async with ask.meta(address) as connection:
        owners = await slot_owners(connection)
        servers = {server.log_id: server for server in await ask.known_servers(connection, "delay")}
    states = await states_of(list(servers.values()))
    rows: list[tuple[Cell, ...]] = []
    if owners.withheld.any():
        withheld = owners.withheld
        rows.append(("", "", "owner unknown", int(np.count_nonzero(withheld)), slots_text(withheld)))
    owning = set(np.unique(owners.log_ids).tolist()) - {0}
    for log_id in sorted(owning | servers.keys()):
        server = servers.get(log_id)
        own = owners.of(log_id)
        rows.append(
            (
                f"{log_id:016x}",
                "" if server is None else f"{server.host}:{server.port}",
                "forgotten" if server is None else states[log_id],
                int(np.count_nonzero(own)),
                slots_text(own),
            )
        )
    return rows


async def _move(operator: Operator, slots: SlotSet, log_id: int, lost: bool) -> str:
    async with operator.at_meta() as connection:
        owners = await slot_owners(connection)
        servers = {server.log_id: server for server in await ask.known_servers(connection, "delay")}
        if log_id not in servers:
            raise UnknownServer(f"meta knows no delay server {log_id:016x}; see `delayd servers`")
        if not lost:
            if owners.members and log_id not in owners.members:
                # Nothing may be released before meta will give it on.
                raise NotReady(f"the other delay servers have not heard of {log_id:016x} yet; say it again in a moment")
            for owner in sorted(set(owners.log_ids.compress(slots).tolist()) - {0, log_id}):
                own = slots & owners.of(owner)
                # What counts are the versions that the owner saw when it gave the slots up.
                owners.versions[own] = (await _released(servers.get(owner), owner, own, operator.secret)).compress(own)
        answer = await ask.ask(
            connection,
            RequestType.MOVE_SLOTS,
            {"slots": slots_bytes(slots), "versions": versions_bytes(owners.versions), "to": log_id, "lost": lost},
        )
        return need_str(answer, "message")


async def _released(server: ask.Known | None, log_id: int, slots: SlotSet, secret: Secret) -> Versions:
    """Have the owner give slots up; returns their versions."""
    if server is None:
        raise ServerUnavailable(
            f"{log_id:016x} owns the slots {slots_text(slots)}, and meta does not know it any more; "
            "when it is gone for good, say --lost"
        )
    try:
        answer = await ask.decide(server, RequestType.RELEASE_SLOTS, {"slots": slots_bytes(slots)}, secret)
    except ServerUnavailable as error:
        raise ServerUnavailable(f"{error.message}; when it is gone for good, say --lost") from error
    return need_versions(answer)
