"""``delayd trace``: one message through all logs, read from files.

Invariant: what is listed was read from the named byte of the named file; what could not be seen is said on stderr.
"""

import click

from delayd.machine.disk import RealDisk
from delayd.reading.trace import trace as follow

from .listing import Cell, columns, show
from .options import Command, LogId, data_option, format_option, offer_subjects
from .times import instant_text

COLUMNS = columns("step at_ms:instant detail byte:name,spare file:spare log_id:detail")


@click.command(cls=Command)
@click.argument("subject", shell_complete=offer_subjects)
@click.argument("which", metavar="SEQUENCE|KEY")
@click.option("--key", "is_key", is_flag=True, help="What is given is a key, also when it has only digits.")
@click.option("--server", type=LogId(), metavar="LOG_ID", help="The delay server that gave the sequence.")
@data_option
@format_option
def trace(subject: str, which: str, is_key: bool, server: int | None, data: str, form: str) -> None:
    """Follow one message through all logs.

    A receipt names the SEQUENCE. With a KEY the newest message that took it is followed. The steps are `accepted`,
    `filed`, `claimed` (the message was due and is handed over), `appended` by the realtime server, `indexed`, and for
    each group `pulled` and then `acknowledged`, `given back`, `returned` or `lapsed`. In place of `claimed` there may
    be `cancelled`, `dead`, `expired` or `in doubt`; or `moved` or `replaced`, and then the steps of the message in its
    place; or `drained`, and then the steps of the message at the delay server that took it, when its directory is in
    DIR. A message that a group gave back is `retried` (it comes again later) or `rejected` (it is a dead letter), and
    then come the steps of its next life. Each step has the file and the byte where it stands. The last row says what
    the message waits for. stderr says what could not be seen.

    $ delayd trace orders.cancel 4711 --data /var/lib/delayd
    $ delayd trace orders.cancel order-42
    """
    found = follow(RealDisk(), data, subject, which if is_key or not which.isdecimal() else int(which), server)
    rows: list[tuple[Cell, ...]] = []
    for each in found:
        rows += [
            (step.what, step.at_ms, step.detail, step.position, step.path, f"{step.log_id or each.log_id:016x}")
            for step in each.steps
        ]
        if each.waits_for:
            due = f"due {instant_text(each.deliver_at_ms)}; waits for {each.waits_for}"
            rows.append(("next", None, due, None, None, f"{each.log_id:016x}"))
    show(COLUMNS, rows, form)
    for each in found:
        if each.earlier:
            click.echo(f"delayd: {each.earlier:,} earlier messages had this key; the newest is followed", err=True)
        for sentence in each.unseen:
            click.echo(f"delayd: not seen: {sentence}", err=True)
