"""``delayd work``: calls the handlers of a worker for due messages, in this process or in several.

Invariant: with one process and no ``--reload`` the worker runs here; else each one runs in a process of its own, which
is started by exec with the same command line, and this process imports nothing of the user's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Self

import click

from delayd.errors import BadArgument
from delayd.net.program import configure_logging
from delayd.worker.worker import Worker

from .child import SERVED_WELL_S, KeptProcess, LineWriter
from .main import INTERRUPTED, OK, USAGE, Programs
from .shared_options import Command

DEFAULT = "worker"


def split(target: str) -> tuple[str, str]:
    """Module and variable of ``module:worker``; BadArgument when it is none."""
    module, _, name = target.partition(":")
    name = name or DEFAULT
    if module.endswith(".py") or not all(word.isidentifier() for word in (*module.split("."), *name.split("."))):
        raise BadArgument(f"{target} names no worker; write MODULE:WORKER, such as app:worker for app.py")
    return module, name


def load_worker(target: str) -> Worker:
    """Import the module and return its worker; BadArgument says what keeps it."""
    module, name = split(target)
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: object = import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too.
        if isinstance(error, ModuleNotFoundError) and _is_itself(error.name, module):
            raise BadArgument(f"there is no module {error.name!r} in {folder} or on Python's path") from error
        raise BadArgument(f"{module} can't be imported: {_told(error)}{_place(error)}") from error
    for word in name.split("."):
        found = getattr(found, word, None)
        if found is None:
            raise BadArgument(f"{module} has no {name!r}; name the variable that holds the delayd.Worker")
    if not isinstance(found, Worker):
        raise BadArgument(f"{target} is a {type(found).__name__} and no delayd.Worker")
    if not found.handlers:
        raise BadArgument(f"{target} has no handler; register one with @{name}.on(subject, group=...)")
    return found


def _is_itself(missing: str | None, module: str) -> bool:
    return missing is not None and (module == missing or module.startswith(f"{missing}."))


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: BaseException) -> str:
    """Where it was raised: the innermost line of the user's own code."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return ""  # Its text has the file and the line.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if os.path.isfile(frame.filename)]
    own = [frame for frame in frames if _is_own(frame.filename)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _is_own(path: str) -> bool:
    return "site-packages" not in path and not path.startswith(
        (os.path.dirname(os.__file__), os.path.dirname(__file__))
    )


Stamp = tuple[int, int]

_PASSED_OVER = {"__pycache__", "site-packages", "node_modules"}
_ENVIRONMENT = "pyvenv.cfg"  # A folder with this is an environment, whose thousands of files nobody edits.


class WatchedSources:
    """Python files below a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._stamps = dict(self._scan())

    @classmethod
    def of(cls, module: str) -> Self:
        """The files beside a module, and below; of a package, those below it. Nothing is imported."""
        top = module.partition(".")[0]
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        spec = find_spec(top)
        if spec is not None and spec.submodule_search_locations:
            return cls(next(iter(spec.submodule_search_locations)))
        if spec is not None and spec.origin is not None and os.path.isfile(spec.origin):
            return cls(os.path.dirname(spec.origin))
        return cls(os.getcwd())

    def changed(self) -> list[str]:
        """The files that are new, gone or different since the last look, as paths below the folder."""
        before, now = self._stamps, dict(self._scan())
        self._stamps = now
        changed = [path for path in before.keys() | now.keys() if before.get(path) != now.get(path)]
        return sorted(os.path.relpath(path, self.folder) for path in changed)

    def _scan(self) -> Iterator[tuple[str, Stamp]]:
        for folder, folders, files in os.walk(self.folder):
            if _ENVIRONMENT in files:
                folders.clear()
                continue
            folders[:] = [name for name in folders if name not in _PASSED_OVER and not name.startswith(".")]
            for name in files:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    try:
                        found = os.stat(path)
                    except OSError:
                        continue  # An editor has just put another file in its place: the next look sees that one.
                    yield path, (found.st_mtime_ns, found.st_size)


LOOK_S = 0.5  # Between looks at the source files: soon enough for somebody who has just saved one.
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class WorkerProcesses:
    """Keeps some processes of one worker running. ``sources`` is None unless they start again when a file changes."""

    def __init__(self, command: Sequence[str], count: int, sources: WatchedSources | None, errors: LineWriter) -> None:
        self._sources = sources
        self._errors = errors
        self._stop = asyncio.Event()
        self._at_once = False
        self._workers = [_WorkerProcess(number, command, self) for number in range(1, count + 1)]

    @property
    def reloads(self) -> bool:
        """Whether they start again when a source file changes."""
        return self._sources is not None

    async def run(self) -> int:
        """Keep them running until a signal comes. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        count = len(self._workers)
        self.say(f"{count} worker process{'es' * (count > 1)}; Ctrl-C here or `kill {os.getpid()}` stops all")
        watch = loop.create_task(self._watch())
        try:
            codes = await asyncio.gather(*(worker.keep() for worker in self._workers))
        finally:
            watch.cancel()
        return INTERRUPTED if self._at_once else max(codes)

    def stop_all(self) -> None:
        """Have all of them drain and end."""
        self._stop.set()
        for worker in self._workers:
            worker.stop()

    def say(self, sentence: str) -> None:
        """Tell whoever has started this."""
        self._errors.write(f"delayd: {sentence}\n".encode())

    async def _watch(self) -> None:
        """Start all again when a source file changes, until cancelled."""
        while self._sources is not None:
            await asyncio.sleep(LOOK_S)
            changed = await asyncio.to_thread(self._sources.changed)
            if changed:
                self.say(f"{', '.join(changed)} changed; the worker starts again")
                for worker in self._workers:
                    worker.replace()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._at_once = True
            for worker in self._workers:
                worker.kill()
        else:
            self.stop_all()


class _WorkerProcess(KeptProcess):
    """One process of a worker."""

    def __init__(self, number: int, command: Sequence[str], of: WorkerProcesses) -> None:
        super().__init__(f"worker process {number}", of.say)
        self._command = command
        self._of = of
        self._changed = asyncio.Event()  # A source file has changed, so another process takes the place of this one.

    def replace(self) -> None:
        """Start again because a source file has changed."""
        self._changed.set()
        self.terminate()

    async def keep(self) -> int:
        """Run the process again and again. Returns its last exit code."""
        loop, failures = asyncio.get_running_loop(), 0
        while not self._stopping.is_set():
            began = loop.time()
            self._changed.clear()
            process = await self._start(self._command, None)
            code = await process.wait()
            self._process = None
            if self._stopping.is_set():
                return OK if code in (OK, -signal.SIGTERM) else abs(code) and 1
            if self._changed.is_set():
                failures = 0
            elif code == USAGE and self._of.reloads:
                self._say("it is started again when a source file changes")
                await _first_of(self._stopping, self._changed)
            elif code in (OK, USAGE):
                if code == USAGE:
                    self._of.stop_all()
                return code
            else:
                failures = 1 if loop.time() - began >= SERVED_WELL_S else failures + 1
                await self._pause(code, failures)
        return OK


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


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
    sources = WatchedSources.of(module) if reload else None
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


async def _work_in(command: list[str], processes: int, sources: WatchedSources | None) -> int:
    errors = LineWriter(sys.stderr.fileno())
    try:
        return await WorkerProcesses(command, processes, sources, errors).run()
    finally:
        errors.close(LAST_LINES_S)
