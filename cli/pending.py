"""``delayd pending``: the pending messages of a subject, asked of the running delay servers."""

from __future__ import annotations

import click

from delayd.client.sending.pending import PendingMessage
from delayd.client.sending.producer import Producer

from .bulk import moment, told_unread
from .find import shown_body
from .listing import show
from .offers import offer_subjects
from .options import Command, format_option, from_option, limit_option, meta_option, to_option
from .table import Cell, Column, Kind
from .times import check_order

COLUMNS = (
    Column("deliver_at_ms", Kind.INSTANT),
    Column("key"),
    Column("tags"),
    Column("size", Kind.SIZE),
    Column("receipt", Kind.NAME),
)
BODY = Column("body")


@click.command(cls=Command)
@click.argument("subject", shell_complete=offer_subjects)
@from_option
@to_option
@click.option("--key", metavar="KEY", help="The message with this key.")
@click.option("--tag", metavar="TAG", help="Messages with this tag.")
@click.option("--body", "with_body", is_flag=True, help="Show bodies, too.")
@meta_option
@limit_option
@format_option
def pending(
    subject: str,
    from_ms: int | None,
    to_ms: int | None,
    key: str | None,
    tag: str | None,
    with_body: bool,
    meta: str,
    limit: int,
    form: str,
) -> int:
    """List the pending messages of a subject, without the files of a server.

    They come from one delay server after another, hour by hour of the instant at which they are due. `receipt` is what
    `delayd get`, `cancel` and `reschedule` take. `delayd schedule find` searches bodies and headers, in the files.

    Exit codes: 3 files of a delay server can't be read, so messages may be missing; everything else is shown.

    $ delayd pending orders.cancel --to +1h
    $ delayd pending orders.cancel --tag vip --body
    $ delayd pending orders.cancel --key order-42 --body --format json
    """
    check_order(from_ms, to_ms)
    with Producer(meta) as producer:
        pages = producer.pending(
            subject, due_from=moment(from_ms), due_before=moment(to_ms), key=key, tag=tag, contents=with_body
        )
        rows = (_row(message, form) for page in pages for message in page)
        show((*COLUMNS, BODY) if with_body else COLUMNS, rows, form, limit)
        if pages.in_flight:
            click.echo(f"delayd: {pages.in_flight:,} messages are being handed over at this moment", err=True)
        return told_unread(pages.unread)


def _row(message: PendingMessage, form: str) -> tuple[Cell, ...]:
    receipt = message.receipt
    told = (receipt.deliver_at_ms, message.key, " ".join(message.tags) or None, message.size, receipt.token)
    return told if message.body is None else (*told, shown_body(message.body, "text", form))
