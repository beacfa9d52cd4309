"""``delayd dead``: messages that no handler of their group could work on, and what an operator does with them.

A dead letter is a message of its group's retry subject that its delay server keeps for 725 days (docs/consuming.md,
Dead letters). So it is found, ended and moved as every pending message.
"""

from __future__ import annotations

from functools import partial

import click

from delayd.client.admin.admin import Admin
from delayd.client.admin.letters import Letter
from delayd.client.instants import instant_ms

from .bulk import Wording, in_bulk, moment, told_unread
from .exits import OK
from .find import shown_body
from .groups import tell_missing
from .listing import show
from .offers import offer_groups, offer_subjects
from .options import Group, format_option, limit_option, meta_option, subject_option, yes_option
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
    Column("receipt", detail=True),
    Column("body"),
)

from_option = click.option(
    "--from", "from_ms", type=instant, metavar="INSTANT", help="Dead since this or later, such as -2h or ISO 8601."
)
to_option = click.option(
    "--to", "to_ms", type=instant, metavar="INSTANT", help="Dead before this, such as -30d or ISO 8601."
)


@click.group(cls=Group)
def dead() -> None:
    """List dead letters of consumer groups, send them to their group again, or end them.

    $ delayd dead list
    $ delayd dead show orders.cancel billing
    $ delayd dead redrive orders.cancel billing --dry-run
    """


@dead.command("list")
@meta_option
@subject_option
@format_option
def list_(meta: str, subject: str | None, form: str) -> None:
    """Count the dead letters of each group that has any.

    $ delayd dead list
    $ delayd dead list --subject orders.cancel --format json
    """
    with Admin(meta) as admin:
        listed = admin.dead_groups(subject)
    tell_missing(listed)
    show(COLUMNS, list(listed), form)


@dead.command("show")
@click.argument("subject", shell_complete=offer_subjects)
@click.argument("group", shell_complete=offer_groups)
@meta_option
@from_option
@to_option
@click.option("--reason", metavar="TEXT", help="Only those whose reason has this text.")
@limit_option
@format_option
def show_(
    subject: str,
    group: str,
    meta: str,
    from_ms: int | None,
    to_ms: int | None,
    reason: str | None,
    limit: int,
    form: str,
) -> int:
    """Show the dead letters of a group: since when, why, what went wrong last, and the body.

    The letters are asked of the running delay servers.

    Exit codes: 3 files of a delay server can't be read, so letters may be missing; everything else is shown.

    $ delayd dead show orders.cancel billing --from -24h
    """
    check_order(from_ms, to_ms)
    with Admin(meta) as admin:
        pages = admin.dead_letters(subject, group, since=moment(from_ms), before=moment(to_ms))
        letters = (letter for page in pages for letter in page if reason is None or reason in letter.reason)
        show(LETTERS, (_row(letter, form) for letter in letters), form, limit)
        return told_unread(pages.unread)


@dead.command()
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

    $ delayd dead redrive orders.cancel billing --dry-run
    $ delayd dead redrive mail g --yes
    """
    check_order(from_ms, to_ms)
    with Admin(meta) as admin:
        walk = partial(admin.redrive, subject, group, since=moment(from_ms), before=moment(to_ms))
        wording = Wording("sent again", f"come to the group {group} again.")
        return in_bulk(f"the dead letters of {subject}", walk, wording, dry_run=dry_run, yes=yes)


@dead.command()
@click.argument("subject", shell_complete=offer_subjects)
@click.argument("group", shell_complete=offer_groups)
@meta_option
@from_option
@to_option
@click.option("--dry-run", is_flag=True, help="Only say how many there are.")
@yes_option
def purge(subject: str, group: str, meta: str, from_ms: int | None, to_ms: int | None, dry_run: bool, yes: bool) -> int:
    """End dead letters for good: nobody gets them any more.

    A group that has ended left none, so there is nothing to purge then, and stderr says so.

    $ delayd dead purge orders.cancel billing --to -30d --dry-run
    """
    check_order(from_ms, to_ms)
    with Admin(meta) as admin:
        listed = admin.groups(subject)
        if not listed.missing and group not in [each.group for each in listed]:
            click.echo(f"delayd: there is no group {group} of {subject}, so it has no dead letters", err=True)
            return OK
        walk = partial(admin.purge, subject, group, since=moment(from_ms), before=moment(to_ms))
        wording = Wording("purged", "are gone for good then.")
        return in_bulk(f"the dead letters of {subject}", walk, wording, dry_run=dry_run, yes=yes)


def _row(letter: Letter, form: str) -> tuple[Cell, ...]:
    receipt = letter.receipt
    dead_at_ms = None if letter.dead_at is None else instant_ms(letter.dead_at)
    told = (dead_at_ms, letter.attempts, letter.reason, letter.error or None, letter.origin)
    return (receipt.sequence, *told, f"{receipt.log_id:016x}", receipt.token, shown_body(letter.body, "text", form))
