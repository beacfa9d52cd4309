"""The seal hook: a command of the operator that gets each new seal on its stdin (docs/formats/seal.md).

Invariant: each seal that is durable is told once or more, in the order of the seal log. A number in the file
``seal-hook`` says how many seals the command has taken; it is written after the command has ended well. So a server
that is killed in between tells the same seals again. An example: seals 0 to 4 are durable and the file says 3. The
command gets the lines of 3 and 4; when it ends with exit code 0, the file says 5.

The command runs beside the server and holds up nothing of it: one at a time, for RUN_S_MAX at most. One that fails is
run again, later and later, with all seals that wait by then.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Protocol

from delayd.config import DelayConfig
from delayd.errors import DelaydError
from delayd.hours import hour_name
from delayd.log.hour import Seal, SealMark
from delayd.machine.disk import replace_whole
from delayd.machine.operating import Wait, WaitKind, counted

LOOK_S = 1.0  # Hours seal every 30 s at most; a look compares two numbers.
RUN_S_MAX = 60.0  # A command that needs longer should put what it got aside, and end.
AGAIN_S, AGAIN_S_MAX = 5.0, 3_600.0  # After a failure, doubled each time.
SEALS_MAX = 1_000  # Lines that one run gets; a year's hours are nine runs.
TOLD_FILE = "seal-hook"
TOLD_BYTES_MAX = 32
MODE = 0o644

log = logging.getLogger(__name__)


class Seals(Protocol):
    """The seal log of a server, and what deletes its hours; see `Retention`."""

    waits: Callable[[], bool]

    def seal_end(self) -> SealMark | None:
        """Up to where the seal log is durable; None while it is damaged."""

    def seals_since(self, number: int, done: Callable[[Sequence[Seal]], None]) -> None:
        """Call back with the durable seals from a number on; with none while the seal log can't be read."""


class SealHook:
    """Runs the command; `run` is a task of the server's loop."""

    def __init__(self, config: DelayConfig, seals: Seals) -> None:
        self._command = config.seal_hook
        self._path = f"{config.folder}/{TOLD_FILE}"
        self._seals = seals
        told = _told(self._path)
        # The seal log of a restored directory may have fewer seals, and others: all are told again.
        self._told = told if told <= self._count() else 0
        self._why = ""  # Why the command failed last.
        if config.retention_waits:
            seals.waits = lambda: (end := seals.seal_end()) is None or self._told < end.seals

    async def run(self) -> None:
        """Tell seals as they come, until the task is cancelled."""
        again_s = AGAIN_S
        while True:
            if self._told >= self._count():
                await asyncio.sleep(LOOK_S)
                continue
            why = await self._tell()
            if why and why != self._why:
                log.error("seal_hook_failed seals=%d reason=%r", self._count() - self._told, why)
            elif self._why and not why:
                log.info("seal_hook_works seals=%d", self._told)
            self._why = why
            if why:
                await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_S_MAX) if why else AGAIN_S

    def waits(self) -> Iterator[Wait]:
        """For STATUS: the seals that the command has not taken."""
        if self._why:
            yield WaitKind.SEALS_NOT_TOLD.wait(self._why, seals=counted(self._count() - self._told, "seal|seals"))

    def _count(self) -> int:
        """How many seals are durable."""
        end = self._seals.seal_end()
        return 0 if end is None else end.seals

    async def _tell(self) -> str:
        """Run the command with the seals that it has not had; why it failed, or ""."""
        found: asyncio.Future[Sequence[Seal]] = asyncio.get_running_loop().create_future()
        self._seals.seals_since(self._told, lambda seals: None if found.done() else found.set_result(seals))
        seals = (await found)[:SEALS_MAX]
        if not seals:
            return "the seal log can't be read now"
        try:
            why = await _run(self._command, "".join(map(line_of, seals)).encode())
            if not why:
                replace_whole(self._path, b"%d\n" % (seals[-1].number + 1), MODE)
                self._told = seals[-1].number + 1
        except (OSError, DelaydError) as error:
            return f"{error}"
        return why


def line_of(seal: Seal) -> str:
    """What the command gets of one seal: its hour, server and number, and its SHA-256, which covers all before it."""
    return f"{hour_name(seal.facts.hour)} {seal.log_id:016x} {seal.number} {seal.sha256.hex()}\n"


def _told(path: str) -> int:
    """How many seals the command has taken; 0 when the file does not say it, and then all are told again."""
    try:
        with open(path, "rb") as file:
            return max(0, int(file.read(TOLD_BYTES_MAX)))
    except (OSError, ValueError):
        return 0


async def _run(command: str, lines: bytes) -> str:
    """Run a shell command with lines on its stdin; why it failed, or ""."""
    null = asyncio.subprocess.DEVNULL
    # It reads a file, so it may end before it has read all, and nobody waits until it reads.
    with TemporaryFile() as given:
        given.write(lines)
        given.seek(0)
        # A session of its own, so that all that the shell has started can be ended together.
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_shell(command, stdin=given, stdout=null, stderr=null, start_new_session=True)
        )
        try:
            process = await asyncio.shield(starting)
            await asyncio.wait_for(process.wait(), RUN_S_MAX)
        except TimeoutError:
            return f"it did not end within {RUN_S_MAX:g} s, and was ended"
        finally:
            # A stop may come while the command is being started; then it is ended as soon as it is there.
            process = await starting
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    return "" if process.returncode == 0 else f"it ended with exit code {process.returncode}"
