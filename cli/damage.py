"""Damage that ends a command which reads a whole directory: all of it is named, and not only what was met first.

Invariant: the exit code and the last sentence are those of the damage that ended the command.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from delayd.errors import DamagedData
from delayd.reading.verify import verify_directory

from .progress import progress

NAMED_MAX = 20  # A screen; a disk that went bad damages thousands.


@contextmanager
def all_damage_named(data: str) -> Iterator[None]:
    """Name the other damaged files of ``data`` on stderr when the block ends with DamagedData, which goes on."""
    try:
        yield
    except DamagedData as error:
        with progress("files", None) as advance:
            report = verify_directory(data, progress=lambda done, total: advance(1, total))
        others = [file.sentence for file in report.damaged if file.path != error.path]
        for sentence in others[:NAMED_MAX]:
            click.echo(f"delayd: {sentence}", err=True)
        if len(others) > NAMED_MAX:
            more = f"{len(others) - NAMED_MAX:,} more files are damaged"
            click.echo(f"delayd: {more}; `delayd log verify --data {data}` names all", err=True)
        raise
