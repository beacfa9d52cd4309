"""``delayd work``: calls the handlers of a worker for due messages, in this process or in several.

Invariant: with one process and no ``--reload`` the worker runs here; else each one runs in a process of its own, which
is started by exec with the same command line, and this process imports nothing of the user's.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable

import click

from delayd.net.program import configure_logging

from .app import load_worker, split
from .lines import LineWriter
from .options import Command
from .programs import Programs
from .sources import Sources
from .worker_processes import WorkerProcesses

PROCESSES_MAX = 1_000
LAST_LINES_S = 2.0
_STDIN = 0


@click.command(cls=Command)
@click.argument("target", metavar="MODULE:WORKER")
@click.option(
    "--processes",
    type=click.IntRange(1, PROCESSES_MAX),
    default=1,
    show_default=True,
    metavar="N",
    help="Run the worker in so many processes; one that dies is started again.",
)
@click.option("--reload", is_flag=True, help="Start again when a source file changes; for development.")
@click.option("--exit-with-stdin", is_flag=True, help="Stop also when stdin is closed; supervisors use it.")
@click.pass_obj
def work(programs: Programs, target: str, processes: int, reload: bool, exit_with_stdin: bool) -> int:
    """Call the handlers of a worker for due messages.

    MODULE:WORKER names a delayd.Worker, such as app:worker for the variable `worker` in app.py. The module is looked
    for in the current directory first.

    Ctrl-C or SIGTERM: nothing is pulled any more, and handlers that are at work have the worker's drain (30 s) to end.
    Then their messages go back, uncounted. A second signal ends everything at once.

    Exit codes: 0 stopped, 1 a bug, or a handler that kept a process from ending, 2 the module, the worker or a setting
    is wrong, 130 stopped at once by a second signal.

    $ delayd work app:worker
    $ delayd work shop.orders:worker --processes 4
    $ delayd work app:worker --reload
    """
    module, _ = split(target)
    if processes == 1 and not reload:
        return _work_here(target, exit_with_stdin)
    sources = Sources.of(module) if reload else None
    command = [*programs.command, "work", target, "--exit-with-stdin"]
    return asyncio.run(_work_in(command, processes, sources))


def _work_here(target: str, exit_with_stdin: bool) -> int:
    worker = load_worker(target)
    if not logging.getLogger().handlers:
        # The user's module has not said where its log goes.
        configure_logging()
    if exit_with_stdin:
        # A thread, because the worker's loop belongs to the worker.
        threading.Thread(target=_stop_with_stdin, args=(worker.stop,), name="stdin", daemon=True).start()
    worker.run()
    return 0


def _stop_with_stdin(stop: Callable[[], None]) -> None:
    while os.read(_STDIN, 4096):
        pass
    stop()


async def _work_in(command: list[str], processes: int, sources: Sources | None) -> int:
    errors = LineWriter(sys.stderr.fileno())
    try:
        return await WorkerProcesses(command, processes, sources, errors).run()
    finally:
        errors.close(LAST_LINES_S)
