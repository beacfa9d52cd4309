"""``delayd export``: the logs of a data directory as Parquet or CSV, for engines that know nothing of delayd."""

import time

import click

from delayd.reading.export import FORMATS, export_directory

from .hours import HourRange, Hours, hours_options
from .listing import columns, progress, show
from .options import Command, data_option, subject_option

COLUMNS = columns("table rows:number")


@click.command(cls=Command)
@data_option
@click.option("--out", type=click.Path(file_okay=False), required=True, metavar="FOLDER", help="A new or empty folder.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default=FORMATS[0],
    show_default=True,
    help="Parquet needs pyarrow: pip install 'delayd[spark]'.",
)
@hours_options
@subject_option
def export(data: str, out: str, form: str, hours: HourRange, subject: str | None) -> None:
    """Write the logs as tables, one file each: schedule, dispatch, message, and what an audit of them needs.

    The servers may run or not; a copy of their files will do, too. Bodies are not written.

    $ delayd export --data /var/lib/delayd --out books --from -24h
    $ delayd export --data /var/lib/delayd --out books --format csv --subject orders.cancel
    """
    with progress("hours", None) as advance:
        counts = export_directory(
            data,
            out,
            now_ms=time.time_ns() // 1_000_000,
            form=form,
            hours=hours,
            subject=subject,
            progress=Hours(advance),
        )
    show(COLUMNS, ((f"{out}/{name}.{form}", count) for name, count in counts.items()), "table")
