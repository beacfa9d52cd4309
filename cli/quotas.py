"""``delayd subjects set`` and ``delayd subjects show``: quotas of subjects at the delay servers (docs/quotas.md)."""

from collections.abc import AsyncIterator, Sequence

import click

from delayd.client.limits import check_subject
from delayd.errors import BadArgument, DelaydError, NoDelayServer
from delayd.net.connection import Connection
from delayd.secret import Secret
from delayd.wire.frame import Head
from delayd.wire.meta import read_subject_page
from delayd.wire.quotas import LIMITS, QuotaInfo, read_quotas
from delayd.wire.requests import INT_MAX, RequestType

from . import ask
from .exits import OK, TRY_LATER
from .listing import show as show_rows
from .offers import offer_subjects
from .options import examples, format_option, meta_option, secret_data_option, secret_of, secret_option
from .table import Cell, Column, Kind

COLUMNS = (
    Column("subject"),
    Column("delay_log_id", spare=True),
    Column("state"),
    Column("per_second", Kind.NUMBER),
    Column("highest", Kind.NUMBER),
    Column("highest_at_ms", Kind.INSTANT, spare=True),
    Column("pending", Kind.NUMBER),
    Column("pending_now", Kind.NUMBER),
    Column("pending_bytes", Kind.NUMBER),
    Column("bytes_now", Kind.NUMBER),
)
LIMIT = click.IntRange(0, INT_MAX)


@click.command(
    "set",
    epilog=examples(
        "delayd subjects set mails --per-second 500 --pending 10000000 --data /var/lib/delayd",
        "delayd subjects set mails --none --data /var/lib/delayd",
    ),
)
@click.argument("subject", shell_complete=offer_subjects)
@click.option("--per-second", type=LIMIT, metavar="N", help="Messages that may be due in one second.")
@click.option("--pending", type=LIMIT, metavar="N", help="Messages that may be pending.")
@click.option("--pending-bytes", type=LIMIT, metavar="N", help="Bytes that bodies and headers of them may have.")
@click.option("--none", "lift", is_flag=True, help="Lift the quota.")
@meta_option
@secret_option
@secret_data_option
def set_(
    subject: str,
    per_second: int | None,
    pending: int | None,
    pending_bytes: int | None,
    lift: bool,
    meta: str,
    secret_file: str | None,
    data: str,
) -> int:
    """Set the quota of a subject at all delay servers.

    Each delay server counts for itself, and refuses messages that are over the quota by name (quota_reached). The new
    quota replaces the earlier one as a whole: a limit that you leave out is no limit. Messages that are pending already
    stay. With 0 nothing more may be sent.
    """
    limits = dict(zip(LIMITS, (per_second, pending, pending_bytes), strict=True))
    named = any(limit is not None for limit in limits.values())
    if named == lift:
        raise BadArgument("name at least one limit, or --none to lift the quota; not both")
    check_subject(subject)
    secret = secret_of(secret_file, data)
    return ask.run(lambda: _set(meta, secret, subject, limits))


async def _set(address: str, secret: Secret, subject: str, limits: dict[str, int | None]) -> int:
    failed = 0
    if not await _is_known(address, subject):
        # A quota may come before the first message; but the name may also be mistyped.
        click.echo(f"delayd: nobody has sent to {subject} yet; a quota holds from its first message on", err=True)
    for server in await _delay_servers(address):
        try:
            await ask.decide(server, RequestType.SET_QUOTA, {"subject": subject, **limits}, secret)
        except DelaydError as error:
            failed += 1
            click.echo(f"delayd: the quota is not set at {server.log_id:016x}: {error.message}", err=True)
        else:
            click.echo(f"{server.log_id:016x}: {limits_sentence(subject, list(limits.values()))}")
    return TRY_LATER if failed else OK


@click.command("show", epilog=examples("delayd subjects show", "delayd subjects show --prefix mails --format json"))
@click.option("--prefix", default="", metavar="TEXT", help="Subjects that begin with this only.")
@meta_option
@format_option
def show(prefix: str, meta: str, form: str) -> int:
    """Show the quotas of subjects, and how much of them is used.

    `highest` is the number of messages that are due in the fullest second to come, at `highest at`. A server that is
    still counting after a start has the state `counting`, and no numbers.
    """
    rows, failed = ask.run(lambda: _rows(meta, prefix))
    show_rows(COLUMNS, rows, form)
    return TRY_LATER if failed else OK


async def _rows(address: str, prefix: str) -> tuple[list[tuple[Cell, ...]], int]:
    rows: list[tuple[Cell, ...]] = []
    failed = 0
    for server in await _delay_servers(address):
        try:
            async with ask.reached(server) as connection:
                rows += [_row(server.log_id, info) async for info in quotas_of(connection, prefix)]
        except DelaydError as error:
            failed += 1
            click.echo(f"delayd: quotas of {server.host}:{server.port} are missing: {error.message}", err=True)
    return sorted(rows, key=lambda row: (str(row[0]), str(row[1]))), failed


def limits_sentence(subject: str, limits: Sequence[int | None]) -> str:
    """What a subject may have."""
    text = ", ".join(f"{name} {limit}" for name, limit in zip(LIMITS, limits, strict=True) if limit is not None)
    return f"{subject} {f'may have {text}' if text else 'has no quota'}"


async def quotas_of(connection: Connection, prefix: str) -> AsyncIterator[QuotaInfo]:
    """The quotas that a delay server has for subjects with this prefix, and how much of them is used."""
    after, more = "", True
    while more:
        head = {"after": after, "prefix": prefix}
        page, more = read_quotas(await ask.ask(connection, RequestType.QUOTAS, head))
        for info in page:
            yield info
        more = more and bool(page)
        after = page[-1].subject if page else after


def _row(log_id: int, info: QuotaInfo) -> tuple[Cell, ...]:
    known = info.counted
    return (
        info.subject,
        f"{log_id:016x}",
        "counted" if known else "counting",
        info.per_second,
        info.highest if known else None,
        info.highest_ms or None,
        info.pending,
        info.pending_now if known else None,
        info.pending_bytes,
        info.bytes_now if known else None,
    )


async def _is_known(address: str, subject: str) -> bool:
    async with ask.meta(address) as connection:
        head: Head = {"prefix": subject, "after": "", "limit": 1}
        subjects, _ = read_subject_page(await ask.ask(connection, RequestType.META_SUBJECTS, head))
    return any(name == subject for name, _ in subjects)


async def _delay_servers(address: str) -> list[ask.Known]:
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection, "delay")
    if not servers:
        raise NoDelayServer("meta knows no delay server; start one with `delayd up`")
    return servers
