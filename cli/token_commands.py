"""``delayd token``: what lets clients in, and what each of them may do (docs/security.md, Tokens).

Invariant: the text of a token is printed once, when it is made, and is all that stdout gets then; no listing has it.
"""

import time
from datetime import timedelta

import click

from delayd.client.asking.tokens import create_token, list_tokens, revoke_token, rotate_token
from delayd.wire.tokens import GRANTED, TokenRecord

from .listing import columns, show
from .operate import Operator, decision_options, operator_options, run
from .shared_options import CommandGroup, format_option
from .times import duration

COLUMNS = columns(
    "name rights expires_ms:instant used_ms:instant old_until_ms:instant,spare requests_per_s:number,spare "
    "bytes_per_s:number,spare connections:number,spare created_ms:instant,spare"
)
MS = timedelta(milliseconds=1)


@click.group(cls=CommandGroup)
def token() -> None:
    """Say which clients are let in, and what each may do.

    While there is no token, everybody who reaches a port may do all that clients can. When the first one is made,
    nothing is served without a token or the cluster's secret.

    $ delayd token create shop --allow 'send:orders.>'
    $ delayd token list
    """


@token.command()
@click.argument("name")
@click.option(
    "--allow",
    "rights",
    multiple=True,
    required=True,
    metavar="RIGHT:SUBJECTS",
    help=f"{', '.join(right.value for right in GRANTED)}, for a subject, a pattern, or > for all; may be repeated.",
)
@click.option("--expires", type=duration, metavar="DURATION", help="Valid for so long.  [default: until it is revoked]")
@click.option("--requests-per-s", type=click.IntRange(1), default=None, metavar="N", help="At each server.")
@click.option("--bytes-per-s", type=click.IntRange(1), default=None, metavar="N", help="At each server.")
@click.option("--connections", type=click.IntRange(1), default=None, metavar="N", help="At each server.")
@operator_options
def create(
    name: str,
    rights: tuple[str, ...],
    expires: timedelta | None,
    requests_per_s: int | None,
    bytes_per_s: int | None,
    connections: int | None,
    operator: Operator,
) -> None:
    """Make a token, and print it; nothing shows it again. Servers take it within seconds.

    $ delayd token create billing --allow 'consume:orders.>' --allow inspect:orders.eu --expires 90d
    $ delayd token create ci --allow 'send:>' --requests-per-s 100 --data /var/lib/delayd
    """
    now_ms = _now_ms()
    limits = (requests_per_s or 0, bytes_per_s or 0, connections or 0)
    until_ms = 0 if expires is None else now_ms + round(expires / MS)
    made = TokenRecord(name, b"", " ".join(rights), until_ms, b"", 0, *limits, created_ms=now_ms)

    async def created() -> str:
        async with operator.at_meta() as connection:
            return await create_token(connection, made)

    click.echo(run(created))
    click.echo(f"delayd: {name} may {made.rights}; clients give it as token= or in DELAYD_TOKEN", err=True)


@token.command("list")
@format_option
@operator_options
def list_all(form: str, operator: Operator) -> None:
    """List the tokens: what each may do, until when, and when a server has seen it last since meta's start.

    $ delayd token list
    """

    async def listed() -> list[TokenRecord]:
        async with operator.at_meta() as connection:
            return await list_tokens(connection)

    rows = [
        (
            *(each.name, each.rights, each.expires_ms or None, each.used_ms or None, each.old_until_ms or None),
            *(each.requests_per_s or None, each.bytes_per_s or None, each.connections or None, each.created_ms or None),
        )
        for each in run(listed)
    ]
    show(COLUMNS, rows, form)


@token.command()
@click.argument("name")
@click.option("--keep", type=duration, default="24h", show_default=True, help="So long the old one is valid, too.")
@operator_options
def rotate(name: str, keep: timedelta, operator: Operator) -> None:
    """Give a token another text, and print it; for a while both are valid.

    $ delayd token rotate billing --keep 3d
    """

    async def rotated() -> str:
        async with operator.at_meta() as connection:
            return await rotate_token(connection, name, _now_ms() + round(keep / MS))

    click.echo(run(rotated))


@token.command()
@click.argument("name")
@decision_options
def revoke(name: str, operator: Operator) -> None:
    """Take no token of this name any more. Its connections end within seconds.

    $ delayd token revoke billing
    """

    async def known() -> list[TokenRecord]:
        async with operator.at_meta() as connection:
            return await list_tokens(connection)

    last = [each.name for each in run(known)] == [name]
    opens = "; it is the last one: unless require_token is set, servers serve everybody then" if last else ""
    operator.confirm(f"{name} is refused from now on, and its connections end{opens}")

    async def revoked() -> None:
        async with operator.at_meta() as connection:
            await revoke_token(connection, name)

    run(revoked)
    click.echo(f"revoked {name}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
