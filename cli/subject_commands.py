"""``delayd subjects``: each subject, the realtime server that serves it, what is kept there, and quotas at the delay
servers (docs/quotas.md).

Invariant: the list is meta's, complete and in order of the names; numbers of a realtime server that can't be asked are
missing, never guessed.
"""

from collections.abc import Sequence

import click

from delayd.client.asking import ask
from delayd.client.asking.ask import list_quotas, set_quota
from delayd.client.asking.subjects import list_subjects
from delayd.client.limits import check_subject
from delayd.errors import BadArgument
from delayd.wire.consuming import SubjectInfo
from delayd.wire.frame import Head
from delayd.wire.heads import INT_MAX
from delayd.wire.meta import read_subject_page
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import LIMITS, QuotaInfo

from .listing import Cell, columns, show
from .main import OK, TRY_LATER
from .operate import Operator, operator_options, run
from .servers import states_of
from .shared_options import CommandGroup, Shown, format_option, meta_option, offer_subjects, shown_options

LIMIT = click.IntRange(0, INT_MAX)
COLUMNS = columns(
    "subject realtime_log_id:spare address:spare state messages:number first:number,spare end:number,spare "
    "quarantined:number groups:number oldest_ago_ms:duration"
)

QUOTAS = columns(
    "subject delay_log_id:spare state per_second:number highest:number highest_at_ms:instant,spare pending:number "
    "pending_now:number pending_bytes:number bytes_now:number"
)


prefix_option = click.option("--prefix", default="", metavar="TEXT", help="Subjects that begin with this only.")


@click.group(invoke_without_command=True, cls=CommandGroup)
@meta_option
@prefix_option
@shown_options
@click.pass_context
def subjects(context: click.Context, meta: str, prefix: str, shown: Shown) -> None:
    """List subjects and the servers that serve them; set and show their quotas.

    The list has each subject from its first send on. `messages`, `first` and `end` count the messages that were
    delivered and are still kept. `state` is that of the realtime server, as in `delayd servers`.

    `quarantined` messages can't be read; the server counts them once a consumer came to them, and its log names them.
    When a subject has no groups, its messages are removed unseen once they are older than the retention: `oldest ago`
    is the age of the oldest one.

    $ delayd subjects --prefix orders.
    $ delayd subjects set mails --per-second 500 --data /var/lib/delayd
    $ delayd subjects show
    """
    if context.invoked_subcommand is None:
        shown.show(COLUMNS, run(lambda: _rows(meta, prefix, shown.limit)))


@subjects.command("set")
@click.argument("subject", shell_complete=offer_subjects)
@click.option("--per-second", type=LIMIT, metavar="N", help="Messages that may be due in one second.")
@click.option("--pending", type=LIMIT, metavar="N", help="Messages that may be pending.")
@click.option("--pending-bytes", type=LIMIT, metavar="N", help="Bytes that bodies and headers of them may have.")
@click.option("--none", "lift", is_flag=True, help="Lift the quota.")
@operator_options
def set_quotas(
    subject: str, per_second: int | None, pending: int | None, pending_bytes: int | None, lift: bool, operator: Operator
) -> int:
    """Set the quota of a subject at all delay servers.

    Each delay server counts for itself, and refuses messages that are over the quota by name (quota_reached). The new
    quota replaces the earlier one as a whole: a limit that you leave out is no limit. Messages that are pending already
    stay. With 0 nothing more may be sent.

    $ delayd subjects set mails --per-second 500 --pending 10000000 --data /var/lib/delayd
    $ delayd subjects set mails --none --data /var/lib/delayd
    """
    limits = dict(zip(LIMITS, (per_second, pending, pending_bytes), strict=True))
    named = any(limit is not None for limit in limits.values())
    if named == lift:
        raise BadArgument("name at least one limit, or --none to lift the quota; not both")
    check_subject(subject)
    return run(lambda: _set(operator, subject, limits))


async def _set(operator: Operator, subject: str, limits: dict[str, int | None]) -> int:
    if not await _is_known(operator.meta, subject):
        # A quota may come before the first message; but the name may also be mistyped.
        click.echo(f"delayd: nobody has sent to {subject} yet; a quota holds from its first message on", err=True)
    set_at = await set_quota(operator.meta, subject, limits, operator.secret)
    for sentence in set_at.missing:
        click.echo(f"delayd: {sentence}", err=True)
    for server in set_at:
        click.echo(f"{server.log_id:016x}: {limits_sentence(subject, list(limits.values()))}")
    return TRY_LATER if set_at.missing else OK


@subjects.command("show")
@prefix_option
@meta_option
@format_option
def show_quotas(prefix: str, meta: str, form: str) -> int:
    """Show the quotas of subjects, and how much of them is used.

    `highest` is the number of messages that are due in the fullest second to come, at `highest at`. A server that is
    still counting after a start has the state `counting`, and no numbers.

    $ delayd subjects show
    $ delayd subjects show --prefix mails --format json
    """
    listed = run(lambda: list_quotas(meta, prefix))
    for sentence in listed.missing:
        click.echo(f"delayd: {sentence}", err=True)
    show(QUOTAS, [_quota_row(each.server.log_id, each.info) for each in listed], form)
    return TRY_LATER if listed.missing else OK


def limits_sentence(subject: str, limits: Sequence[int | None]) -> str:
    """What a subject may have."""
    text = ", ".join(f"{name} {limit}" for name, limit in zip(LIMITS, limits, strict=True) if limit is not None)
    return f"{subject} {f'may have {text}' if text else 'has no quota'}"


def _quota_row(log_id: int, info: QuotaInfo) -> tuple[Cell, ...]:
    known = info.counted
    return (
        *(info.subject, f"{log_id:016x}", "counted" if known else "counting", info.per_second),
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


async def _rows(address: str, prefix: str, limit: int) -> list[tuple[Cell, ...]]:
    listed = await list_subjects(address, prefix, limit=limit)
    for sentence in listed.missing:
        click.echo(f"delayd: {sentence}", err=True)
    states = await states_of(listed.servers)
    return [
        (
            *(each.subject, f"{each.log_id:016x}", each.server.address if each.server else None),
            *(states.get(each.log_id, "unknown"), *_figures(each.info)),
        )
        for each in listed.subjects
    ]


def _figures(info: SubjectInfo | None) -> tuple[Cell, ...]:
    if info is None:
        return (None,) * (len(SubjectInfo._fields) - 1)
    return (info.messages, info.first, info.end, info.quarantined, info.groups, info.oldest_ms_ago)
