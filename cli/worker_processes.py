"""The processes of one worker: started, watched, and started again when they die or when a source file changes.

Invariant: no process outlives this one: told to stop, it has them drain, and kills them at a second signal; and if it
is killed itself, their stdin closes and they drain by themselves. Each is in a process group of its own, so that Ctrl-C
reaches this process alone.

     starting ──▶ working ──died──▶ waiting ──back-off──▶ starting
                     ├──exit 0: a handler stopped it──▶ ended
                     ├──exit 2: the module or a setting is wrong──▶ all stop; with --reload: waits for a change
                     └──a source file changed: SIGTERM, drained──▶ starting
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from .child import RESTART_FIRST_S, RESTART_LAST_S, SERVED_WELL_S, how_it_ended
from .exits import INTERRUPTED, OK, USAGE
from .lines import LineWriter
from .sources import Sources

LOOK_S = 0.5  # Between looks at the source files: soon enough for somebody who has just saved one.
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class WorkerProcesses:
    """Keeps some processes of one worker running. ``sources`` is None unless they start again when a file changes."""

    def __init__(self, command: Sequence[str], count: int, sources: Sources | None, errors: LineWriter) -> None:
        self._command = command
        self._sources = sources
        self._errors = errors
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()  # Set while processes that are to wait for a change should start again.
        self._at_once = False
        self._slots = [_Slot(number) for number in range(1, count + 1)]

    async def run(self) -> int:
        """Keep them running until a signal comes. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        count = len(self._slots)
        self._say(f"{count} worker process{'es' * (count > 1)}; Ctrl-C here or `kill {os.getpid()}` stops all")
        keeps = [loop.create_task(self._keep(slot)) for slot in self._slots]
        watch = loop.create_task(self._watch())
        try:
            codes = await asyncio.gather(*keeps)
        finally:
            watch.cancel()
        if self._at_once:
            return INTERRUPTED
        return max(codes)

    async def _keep(self, slot: _Slot) -> int:
        """Run one process again and again. Returns its last exit code."""
        loop, failures = asyncio.get_running_loop(), 0
        while not self._stop.is_set():
            began = loop.time()
            slot.replaced = False
            code = await self._run_once(slot)
            if self._stop.is_set():
                return OK if code in (OK, -signal.SIGTERM) else abs(code) and 1
            if slot.replaced:
                failures = 0
                continue
            if code == USAGE and self._sources is not None:
                self._changed.clear()
                self._say("it is started again when a source file changes")
                await _first_of(self._stop, self._changed)
                continue
            if code in (OK, USAGE):
                if code == USAGE:
                    self._on_usage()
                return code
            failures = 1 if loop.time() - began >= SERVED_WELL_S else failures + 1
            wait_s = min(RESTART_LAST_S, RESTART_FIRST_S * 2 ** (failures - 1))
            self._say(f"worker process {slot.number} {how_it_ended(code)}; it is started again in {wait_s:g} s")
            try:
                await asyncio.wait_for(self._stop.wait(), wait_s)
            except TimeoutError:
                pass  # The pause is over, and nobody has told it to stop.
        return OK

    async def _run_once(self, slot: _Slot) -> int:
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, process_group=0)
        slot.process = process
        # The signal may have come while the process was being made.
        if self._at_once:
            slot.send(signal.SIGKILL)
        elif self._stop.is_set():
            slot.send(signal.SIGTERM)
        code = await process.wait()
        slot.process = None
        return code

    async def _watch(self) -> None:
        """Start all again when a source file changes, until cancelled."""
        while self._sources is not None:
            await asyncio.sleep(LOOK_S)
            changed = await asyncio.to_thread(self._sources.changed)
            if changed:
                self._say(f"{', '.join(changed)} changed; the worker starts again")
                self._changed.set()
                for slot in self._slots:
                    slot.replaced = True
                    slot.send(signal.SIGTERM)

    def _on_usage(self) -> None:
        if not self._stop.is_set():
            self._begin_stop()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._at_once = True
            for slot in self._slots:
                slot.send(signal.SIGKILL)
        else:
            self._begin_stop()

    def _begin_stop(self) -> None:
        self._stop.set()
        for slot in self._slots:
            slot.send(signal.SIGTERM)

    def _say(self, sentence: str) -> None:
        self._errors.write(f"delayd: {sentence}\n".encode())


class _Slot:
    """One process, and its number for people."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: Process | None = None  # While it runs.
        self.replaced = False  # It was told to end because another one is to take its place.

    def send(self, number: signal.Signals) -> None:
        """Signal the process if it runs."""
        if self.process is not None and self.process.returncode is None:
            try:
                self.process.send_signal(number)
            except ProcessLookupError:
                pass  # It ended by itself a moment ago.


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
