"""``delayd log``: whether log files check, and what is in one, of a running server too."""

import sys
from collections.abc import Iterator, Sequence

import click

from delayd.config import DATA_DEFAULT
from delayd.disk import RealDisk

from .dump import BATCH_COLUMNS, GROUP_COLUMNS, MESSAGE_COLUMNS, batch_rows, group_rows, message_rows
from .exits import NOT_BALANCED, OK
from .listing import Cell, Column, Kind, show, size_text
from .options import format_option, limit_option
from .progress import progress
from .verify import Checked, State, files_below, verify

COLUMNS = (
    Column("path"),
    Column("kind"),
    Column("state"),
    Column("groups", Kind.NUMBER),
    Column("batches", Kind.NUMBER),
    Column("rows", Kind.NUMBER),
    Column("size_bytes", Kind.SIZE),
    Column("detail"),
)
_LEVELS = {
    "groups": (GROUP_COLUMNS, group_rows),
    "batches": (BATCH_COLUMNS, batch_rows),
    "messages": (MESSAGE_COLUMNS, message_rows),
}


@click.group(no_args_is_help=True)
def log() -> None:
    """Verify or dump log files.

    Example: delayd log verify --data /var/lib/delayd
    """


@log.command("verify")
@click.argument("paths", nargs=-1, type=click.Path(exists=True, dir_okay=False), metavar="[FILE]...")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help=f"Check every file of a data directory.  [default: {DATA_DEFAULT} without FILE]",
)
@click.option("--all", "everything", is_flag=True, help="List files that check, too.")
@format_option
def verify_logs(paths: Sequence[str], data: str | None, everything: bool, form: str) -> int:
    """Check every checksum, length and chain of log files; nothing is changed.

    Lists what does not check: `damaged` is an error with path and position; `torn` is an unfinished end, an append
    under way or one that a crash cut short, which the server takes off at its next start.

    Exit codes: 0 no file is damaged, 3 one is.

    Example: delayd log verify --data /var/lib/delayd --all
    """
    disk = RealDisk()
    data = DATA_DEFAULT if data is None and not paths else data
    wanted = [*paths, *([] if data is None else files_below(disk, data))]
    checked: list[Checked] = []

    def rows() -> Iterator[tuple[Cell, ...]]:
        with progress("files", len(wanted)) as advance:
            for path in wanted:
                found = verify(disk, path)
                advance(1)
                if found is None:
                    continue
                checked.append(found)
                if everything or found.state in (State.TORN, State.DAMAGED):
                    yield (found.path, found.kind, found.state.value, *found.counts, found.detail)

    listed = list(rows())
    if listed or form != "table":
        show(COLUMNS, listed, form)
    damaged = sum(found.state is State.DAMAGED for found in checked)
    if form == "table":
        size = sum(found.counts[-1] for found in checked)
        torn = sum(found.state is State.TORN for found in checked)
        verdict = f"{damaged} damaged" if damaged else "none is damaged"
        click.echo(f"{len(checked):,} files, {size_text(size)}: {verdict}, {torn} with an unfinished end")
    return NOT_BALANCED if damaged else OK


@log.command("dump")
@click.argument("path", type=click.Path(exists=True, dir_okay=False), metavar="FILE")
@click.option(
    "--level",
    type=click.Choice(list(_LEVELS)),
    default="groups",
    show_default=True,
    help="One line a group, a batch or a message.",
)
@limit_option
@format_option
def dump(path: str, level: str, limit: int, form: str) -> None:
    """List what a log file holds, as far as it checks and is durable.

    Example: delayd log dump delayd-data/delay/message/00000000000000000000.log --level messages
    """
    columns, read = _LEVELS[level]
    torn: list[str] = []
    show(columns, read(RealDisk(), path, torn), form, limit)
    for sentence in torn:
        sys.stdout.flush()
        click.echo(f"delayd: {sentence}", err=True)
