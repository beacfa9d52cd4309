"""Progress of long work on stderr, only where a person sees it: a pipe or a log file gets nothing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Advance(Protocol):
    """Says that more is done; a total that was not known before may come with it."""

    def __call__(self, count: int, total: int | None = None) -> None: ...


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Advance]:
    """Show how much of ``total`` is done, as often as the yielded function says so; a total of None is not known."""
    if not sys.stderr.isatty():
        yield _unseen
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(count: int, total: int | None = None) -> None:
            bar.update(task, advance=count, total=total)

        yield advance


def _unseen(count: int, total: int | None = None) -> None:
    """Nobody watches."""
