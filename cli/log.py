"""``delayd log``: whether log files check, and what is in one, of a running server too."""

import os
import sys
from collections.abc import Sequence

import click

from delayd.config import DATA_DEFAULT
from delayd.disk import RealDisk
from delayd.reading.verify import VerifyReport, verify_directory, verify_files
from delayd.reading.verify_file import FileReport, State

from .dump import BATCH_COLUMNS, GROUP_COLUMNS, MESSAGE_COLUMNS, batch_rows, group_rows, message_rows
from .dump_other import (
    CHECKPOINT_COLUMNS,
    CONSUME_COLUMNS,
    STATE_COLUMNS,
    FileForm,
    checkpoint_rows,
    consume_rows,
    file_kind,
    state_rows,
)
from .exits import NOT_BALANCED, OK
from .listing import show
from .options import DATA_VARIABLE, DataFolder, Group, format_option, limit_option
from .progress import progress
from .table import Cell, Column, Kind, size_text

COLUMNS = (
    Column("path"),
    Column("kind"),
    Column("state"),
    Column("groups", Kind.NUMBER, spare=True),
    Column("batches", Kind.NUMBER, spare=True),
    Column("rows", Kind.NUMBER),
    Column("size_bytes", Kind.SIZE),
    Column("detail"),
)
_OTHERS = {
    FileForm.CONSUME: (CONSUME_COLUMNS, consume_rows),
    FileForm.CHECKPOINT: (CHECKPOINT_COLUMNS, checkpoint_rows),
    FileForm.STATE: (STATE_COLUMNS, state_rows),
}
_LEVELS = {
    "groups": (GROUP_COLUMNS, group_rows),
    "batches": (BATCH_COLUMNS, batch_rows),
    "messages": (MESSAGE_COLUMNS, message_rows),
}


@click.group(no_args_is_help=True, cls=Group)
def log() -> None:
    """Verify or dump log files.

    $ delayd log verify --data /var/lib/delayd
    """


@log.command("verify")
@click.argument("paths", nargs=-1, type=click.Path(exists=True, dir_okay=False), metavar="[FILE]...")
@click.option(
    "--data",
    type=DataFolder(),
    metavar="DIR",
    help=f"Check every file of a data directory.  [default without FILE: {DATA_VARIABLE} or {DATA_DEFAULT}]",
)
@click.option("--all", "everything", is_flag=True, help="List files that check, too.")
@format_option
def verify_logs(paths: Sequence[str], data: str | None, everything: bool, form: str) -> int:
    """Check every checksum, length and chain of log files; nothing is changed.

    A FILE is a .log file or a checkpoint. Each FILE is checked on its own; only --data also checks that the files of a
    log follow one another.

    The command lists files that do not check. `damaged` is an error with path and position. `torn` is an unfinished
    end: an append is under way, or a crash cut one short. The server cuts a torn end off at its next start.

    Exit codes: 0 no file is damaged, 3 one is.

    $ delayd log verify --data /var/lib/delayd --all
    $ delayd log verify delayd-data/delay/message/00000000000000000000.log
    """
    reports: list[VerifyReport] = []
    if paths:
        with progress("files", len(paths)) as advance:
            reports.append(verify_files(paths, progress=lambda done, total: advance(1, total)))
    if data is not None or not paths:
        # Read here and not by the option: FILE alone means this file alone, whatever the environment says.
        folder = data or DataFolder().convert(os.environ.get(DATA_VARIABLE) or DATA_DEFAULT, None, None)
        with progress("files", None) as advance:
            reports.append(verify_directory(folder, progress=lambda done, total: advance(1, total)))
    files = [file for report in reports for file in report.files]
    listed = [_row(file) for file in files if everything or file.state in (State.TORN, State.DAMAGED)]
    if listed or form != "table":
        show(COLUMNS, listed, form)
    states = [file.state for file in files]
    damaged = states.count(State.DAMAGED)
    if form == "table":
        size_bytes = sum(file.size_bytes for file in files)
        verdict = f"{damaged} damaged" if damaged else "none is damaged"
        torn = f"{states.count(State.TORN)} with an unfinished end"
        count = f"{len(files):,} file{'s' * (len(files) != 1)}"
        click.echo(f"{count}, {size_text(size_bytes)}: {verdict}, {torn}")
    return NOT_BALANCED if damaged else OK


@log.command("dump")
@click.argument("path", type=click.Path(exists=True, dir_okay=False), metavar="FILE")
@click.option(
    "--level",
    type=click.Choice(list(_LEVELS)),
    help="One line a group, a batch or a message.  [default: groups]",
)
@limit_option
@format_option
def dump(path: str, level: str | None, limit: int, form: str) -> None:
    """List what a file holds, up to where its checksums hold and its bytes are known to be on disk.

    FILE is a .log file below message, schedule, dispatch, pull, seal or consume in a server's directory, a checkpoint,
    or the state of a stopped server (state.lmdb/data.mdb). It may be a copy under any name.

    Exit codes: 2 FILE is not a file of this kind, 3 FILE is damaged; what stands before the damage is listed.

    $ delayd log dump delayd-data/delay/message/00000000000000000000.log --level messages
    $ delayd log dump delayd-data/delay/dispatch/20261121/2026112116.log --level messages --limit 0 --format csv
    """
    disk = RealDisk()
    other = _OTHERS.get(file_kind(disk, path))
    if other is not None:
        if level is not None:
            raise click.UsageError(f"--level is for logs of groups, and {path} has none; leave it out")
        others, read_other = other
        show(others, read_other(disk, path), form, limit)
        return
    columns, read = _LEVELS[level or "groups"]
    torn: list[str] = []
    show(columns, read(disk, path, torn), form, limit)
    for sentence in torn:
        sys.stdout.flush()
        click.echo(f"delayd: {sentence}", err=True)


def _row(file: FileReport) -> tuple[Cell, ...]:
    counts = (file.groups, file.batches, file.rows, file.size_bytes)
    return (file.path, file.kind, file.state.value, *counts, file.sentence)
