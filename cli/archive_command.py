"""``delayd archive``: sealed hours as Parquet in a folder or an object store.

Invariant: the exit code is 0 when each sealed hour is in the archive and equals its seal, and 3 when one is not.
"""

from typing import TYPE_CHECKING

import click

from delayd.machine.operating import counted
from delayd.reading.archive.store import open_store

from .hour_commands import HourSteps, all_damage_named
from .listing import columns, progress
from .main import NOT_BALANCED, OK
from .shared_options import Command, Shown, data_option, shown_options

if TYPE_CHECKING:
    from delayd.reading.archive.archiver import ArchiveReport

WRITTEN_COLUMNS = columns("file rows:number bytes:size sha256:detail")


@click.command(cls=Command)
@data_option
@click.option(
    "--to",
    "uri",
    required=True,
    metavar="URI",
    help="The archive: a folder, or s3://BUCKET/PATH, gs://… or az://… with credentials from the environment.",
)
@click.option(
    "--with",
    "items",
    default="",
    metavar="COLUMNS",
    help="Columns that new schedules have, too: key, tags, headers, body, with commas between.",
)
@shown_options
def archive(data: str, uri: str, items: str, shown: Shown) -> int:
    """Put each sealed hour into an archive of Parquet files, unless it is there.

    The servers may run or not; a copy of their files will do, too. Each file is compared with the seal of its hour
    before it is written and is read back after that, and no file is ever written over. Run it again to add the hours
    that were sealed since. It needs the extra packages of `pip install 'delayd[archive]'`.

    Exit codes: 3 an hour is damaged, or the archive has another file in its place; stderr names it.

    $ delayd archive --data /var/lib/delayd --to /mnt/books
    $ delayd archive --data /var/lib/delayd --to s3://books/delayd --with key,body
    """
    store = open_store(uri)
    # Whoever asks for help need not have pyarrow; `open_store` has seen that it is there.
    from delayd.reading.archive.archiver import archive_directory

    with all_damage_named([data]), progress("files", None) as advance:
        report = archive_directory(data, store, items=[*filter(None, items.split(","))], progress=HourSteps(advance))
    files = [*report.written, *report.found]
    if files or shown.form != "table":
        shown.show(
            WRITTEN_COLUMNS, ((f"{store.uri}/{each.key.file}", each.rows, each.size, each.sha256) for each in files)
        )
    for line in _verdict(report):
        click.echo(line, err=shown.form != "table")
    for fault in report.faults:
        click.echo(f"delayd: {fault}", err=True)
    return NOT_BALANCED if report.faults else OK


def _verdict(report: "ArchiveReport") -> list[str]:
    lines = [f"{counted(len(report.written), 'file|files')} archived, {report.archived_before:,} were before"]
    if report.found:
        lines.append(f"{len(report.found):,} were there without a note, and are the same")
    if report.removed:
        lines.append(
            f"of {counted(len(report.removed), 'hour|hours')} only the seal is left: retention removed the rest"
        )
    if report.not_sealed:
        lines.append(f"{counted(report.not_sealed, 'hour is|hours are')} not sealed yet, and not archived")
    if report.not_consumed:
        lines.append(
            f"groups still work on {counted(report.not_consumed, 'hour|hours')}: their consumption is not archived yet"
        )
    if report.not_told:
        lines.append(
            f"the consumption of {counted(report.not_told, 'hour|hours')} can't be told any more: the logs have lost "
            "their beginning"
        )
    return lines
