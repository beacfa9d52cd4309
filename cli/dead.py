"""``delayd dead``: messages that no handler of their group could work on, and what an operator does with them.

A dead letter is a message of its group's retry subject that its delay server keeps for 725 days (docs/consuming.md,
Dead letters). So it is found, ended and moved as every pending message.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import NamedTuple

import click

from delayd.client.sending.producer import Producer
from delayd.disk import RealDisk
from delayd.errors import BadArgument
from delayd.headers import Headers, decode_headers
from delayd.life import ATTEMPT, DEAD_AT_MS, DEAD_KEPT_MS, DEAD_TAG, ERROR, ORIGIN, REASON
from delayd.reading.find import Finder, Search
from delayd.reading.matching import Wanted
from delayd.retry_subject import retry_subject

from . import ask
from .bulk import Wording, in_bulk, moment
from .find import in_processes, shown_body
from .groups import groups_of
from .hour_schedule import LeftOut
from .listing import show
from .offers import offer_groups, offer_subjects
from .options import (
    data_option,
    examples,
    format_option,
    limit_option,
    meta_option,
    subject_option,
    yes_option,
)
from .table import Cell, Column, Kind
from .times import check_order, instant

COLUMNS = (Column("subject"), Column("group"), Column("dead", Kind.NUMBER))
LETTERS = (
    Column("sequence", Kind.NAME),
    Column("dead_at_ms", Kind.INSTANT),
    Column("attempts", Kind.NUMBER),
    Column("reason"),
    Column("error"),
    Column("origin_sequence", Kind.NAME, spare=True),
    Column("delay_log_id", detail=True),
    Column("body"),
)
KEPT = timedelta(milliseconds=DEAD_KEPT_MS)

from_option = click.option(
    "--from", "from_ms", type=instant, metavar="INSTANT", help="Dead since this or later, such as -2h or ISO 8601."
)
to_option = click.option(
    "--to", "to_ms", type=instant, metavar="INSTANT", help="Dead before this, such as -30d or ISO 8601."
)


class DeadGroup(NamedTuple):
    """A group of consumers, and the subject under which its dead letters are kept."""

    subject: str
    group: str
    kept_as: str


@click.group(
    epilog=examples(
        "delayd dead list",
        "delayd dead show orders.cancel billing --data /var/lib/delayd",
        "delayd dead redrive orders.cancel billing --dry-run",
    )
)
def dead() -> None:
    """List dead letters of consumer groups, send them to their group again, or end them."""


@dead.command("list", epilog=examples("delayd dead list", "delayd dead list --subject orders.cancel --format json"))
@meta_option
@subject_option
@format_option
def list_(meta: str, subject: str | None, form: str) -> None:
    """Count the dead letters of each group that has any."""
    found: list[tuple[Cell, ...]] = []
    with Producer(meta) as producer:
        for each in _groups(meta, subject, None):
            walked = producer.cancel_where(each.kept_as, tag=DEAD_TAG, dry_run=True)
            if walked.found:
                found.append((each.subject, each.group, walked.found))
    show(COLUMNS, found, form)


@dead.command("show", epilog=examples("delayd dead show orders.cancel billing --data /var/lib/delayd --from -24h"))
@click.argument("subject", shell_complete=offer_subjects)
@click.argument("group", shell_complete=offer_groups)
@meta_option
@data_option
@from_option
@to_option
@click.option("--reason", metavar="TEXT", help="Only those whose reason has this text.")
@limit_option
@format_option
def show_(
    subject: str,
    group: str,
    meta: str,
    data: str,
    from_ms: int | None,
    to_ms: int | None,
    reason: str | None,
    limit: int,
    form: str,
) -> int:
    """Show the dead letters of a group: since when, why, what went wrong last, and the body.

    The letters are read from the files of the delay servers in --data, which may be running.

    Exit codes: 3 something is damaged; stderr names it, and everything else is shown.
    """
    check_order(from_ms, to_ms)
    (one,) = _groups(meta, subject, group)
    wanted = Wanted(_due(from_ms), _due(to_ms), one.kept_as.encode(), None, None, (DEAD_TAG,), None, ())
    finder, left_out = Finder(RealDisk(), data, Search(wanted, False), in_processes), LeftOut()
    letters: list[tuple[Cell, ...]] = []
    for found in finder.found():
        for error in found.damage:
            left_out.add(error)
        for row in found.rows:
            life = decode_headers(row.headers)
            why = _text(life, REASON)
            if reason is None or reason in why:
                body = shown_body(row.body, "text", form)
                at_ms, attempts = int(_text(life, DEAD_AT_MS) or 0), int(_text(life, ATTEMPT) or 0)
                told = (why, _text(life, ERROR) or None, int(_text(life, ORIGIN) or 0))
                letters.append((row.sequence, at_ms, attempts, *told, f"{row.log_id:016x}", body))
    show(LETTERS, letters, form, limit)
    return left_out.end()


@dead.command(
    epilog=examples("delayd dead redrive orders.cancel billing --dry-run", "delayd dead redrive mail g --yes")
)
@click.argument("subject", shell_complete=offer_subjects)
@click.argument("group", shell_complete=offer_groups)
@meta_option
@from_option
@to_option
@click.option("--dry-run", is_flag=True, help="Only say how many there are.")
@yes_option
def redrive(
    subject: str, group: str, meta: str, from_ms: int | None, to_ms: int | None, dry_run: bool, yes: bool
) -> int:
    """Send dead letters to their group again, as the first attempt.

    Letters that die while it runs are left.
    """
    check_order(from_ms, to_ms)
    (one,) = _groups(meta, subject, group)
    with Producer(meta) as producer:
        since, before = moment(_due(from_ms)), moment(_due(to_ms))
        move = partial(producer.reschedule_where, one.kept_as, shift=-KEPT, tag=DEAD_TAG)
        walk = partial(move, due_from=since, due_before=before)
        wording = Wording("sent again", f"come to the group {group} again.")
        return in_bulk(f"the dead letters of {subject}", walk, wording, dry_run=dry_run, yes=yes)


@dead.command(epilog=examples("delayd dead purge orders.cancel billing --to -30d --dry-run"))
@click.argument("subject", shell_complete=offer_subjects)
@click.argument("group", shell_complete=offer_groups)
@meta_option
@from_option
@to_option
@click.option("--dry-run", is_flag=True, help="Only say how many there are.")
@yes_option
def purge(subject: str, group: str, meta: str, from_ms: int | None, to_ms: int | None, dry_run: bool, yes: bool) -> int:
    """End dead letters for good: nobody gets them any more."""
    check_order(from_ms, to_ms)
    (one,) = _groups(meta, subject, group)
    with Producer(meta) as producer:
        since, before = moment(_due(from_ms)), moment(_due(to_ms))
        walk = partial(producer.cancel_where, one.kept_as, tag=DEAD_TAG, due_from=since, due_before=before)
        wording = Wording("purged", "are gone for good then.")
        return in_bulk(f"the dead letters of {subject}", walk, wording, dry_run=dry_run, yes=yes)


def _groups(meta: str, subject: str | None, group: str | None) -> list[DeadGroup]:
    """The groups of a subject, or of all, with the subjects of their dead letters; one, when its name is given."""

    async def found() -> list[DeadGroup]:
        async with ask.meta(meta) as connection:
            servers = await ask.known_servers(connection, "realtime")
        return [
            DeadGroup(info.subject, info.group, retry_subject(server.log_id, info.group_id))
            for server in servers
            for info in await groups_of(server, subject)
            if group is None or info.group == group
        ]

    groups = sorted(ask.run(found))
    if group is not None and len(groups) != 1:
        raise BadArgument(f"there is no group {group} of {subject}, or its server is away; see `delayd groups`")
    return groups


def _due(died_ms: int | None) -> int | None:
    """When a letter that died at an instant is due."""
    return None if died_ms is None else died_ms + DEAD_KEPT_MS


def _text(headers: Headers, name: str) -> str:
    value = headers.get(name, "")
    return value if isinstance(value, str) else ""
