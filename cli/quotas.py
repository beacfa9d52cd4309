"""``delayd subjects set`` and ``delayd subjects show``: quotas of subjects at the delay servers (docs/quotas.md)."""

from collections.abc import Sequence

import click

from delayd.client.admin.quotas import list_quotas, set_quota
from delayd.client.limits import check_subject
from delayd.errors import BadArgument
from delayd.secret import Secret
from delayd.wire.frame import Head
from delayd.wire.heads import INT_MAX
from delayd.wire.meta import read_subject_page
from delayd.wire.quotas import LIMITS, QuotaInfo
from delayd.wire.requests import RequestType

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
    if not await _is_known(address, subject):
        # A quota may come before the first message; but the name may also be mistyped.
        click.echo(f"delayd: nobody has sent to {subject} yet; a quota holds from its first message on", err=True)
    set_at = await set_quota(address, subject, limits, secret)
    for sentence in set_at.missing:
        click.echo(f"delayd: {sentence}", err=True)
    for server in set_at:
        click.echo(f"{server.log_id:016x}: {limits_sentence(subject, list(limits.values()))}")
    return TRY_LATER if set_at.missing else OK


@click.command("show", epilog=examples("delayd subjects show", "delayd subjects show --prefix mails --format json"))
@click.option("--prefix", default="", metavar="TEXT", help="Subjects that begin with this only.")
@meta_option
@format_option
def show(prefix: str, meta: str, form: str) -> int:
    """Show the quotas of subjects, and how much of them is used.

    `highest` is the number of messages that are due in the fullest second to come, at `highest at`. A server that is
    still counting after a start has the state `counting`, and no numbers.
    """
    listed = ask.run(lambda: list_quotas(meta, prefix))
    for sentence in listed.missing:
        click.echo(f"delayd: {sentence}", err=True)
    show_rows(COLUMNS, [_row(each.server.log_id, each.info) for each in listed], form)
    return TRY_LATER if listed.missing else OK


def limits_sentence(subject: str, limits: Sequence[int | None]) -> str:
    """What a subject may have."""
    text = ", ".join(f"{name} {limit}" for name, limit in zip(LIMITS, limits, strict=True) if limit is not None)
    return f"{subject} {f'may have {text}' if text else 'has no quota'}"


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
