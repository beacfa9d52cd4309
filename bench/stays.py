"""Where one lone send stays on its way: the functions and files that it passes, from `Producer.send` to its outcome.

    python -m bench.stays [--list]

Meta, the delay server, the realtime server and a blocking producer run in this process, each on a thread of its own,
so that one profiler sees the whole way. One JSON line a part of the way: how many functions were called, and in how
many files they are. With ``--list`` it names them. Comprehensions count as the function that they stand in.

    receipt   the message is due in a minute: from `Producer.send` to the receipt that it returns
    outcome   it is due at once: from `Producer.send` until the delay server has its outcome on the disk

Invariant: what goes on by itself, such as heartbeats, is not counted: only what each of many sends has passed is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeVar

import uvloop

import delayd
from delayd.client.producer import Producer
from delayd.config import DelayConfig, MetaConfig, RealtimeConfig
from delayd.delay.server import DelayServer
from delayd.net.held_start import Service
from delayd.net.program import Fail
from meta.server import MetaService
from realtime.server import RealtimeServer

R = TypeVar("R")
SOURCES = Path(delayd.__file__).parent.parent
PACKAGES = ("delayd", "meta", "realtime")
SENDS = 20  # What each of them has passed is counted: an answer may come in two reads, and timers fire in between.
WARM_SENDS = 5
AHEAD_MS = 60_000
LIMIT_S = 30.0

SETTLE_S = 0.3  # From the bytes of an outcome in its file until all that follows from them was done.
LOOK_S = 0.001

Stay = tuple[str, str]  # A file, from the root of the sources, and a function in it.


class Watch:
    """Notes each call of a function while it is on, on every thread that begins after it was made."""

    def __init__(self) -> None:
        self._on = False
        self._seen: list[CodeType] = []
        threading.setprofile(self._called)

    def close(self) -> None:
        """Stop: threads that begin from now on are not watched."""
        threading.setprofile(None)

    def calls(self, do: Callable[[], object]) -> list[Stay]:
        """Each call of a function of this project on any watched thread, and on this one, while ``do`` runs."""
        self._seen = []
        self._on = True
        sys.setprofile(self._called)
        try:
            do()
        finally:
            sys.setprofile(None)
            self._on = False
        seen = self._seen.copy()
        stays = {code: stay for code in set(seen) if (stay := _stay(code)) is not None}
        return [stays[code] for code in seen if code in stays]

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if self._on and event == "call":
            self._seen.append(frame.f_code)


def _stay(code: CodeType) -> Stay | None:
    path = Path(code.co_filename)
    if not path.is_relative_to(SOURCES) or path.relative_to(SOURCES).parts[0] not in PACKAGES:
        return None
    name = code.co_qualname
    while name.rpartition(".")[2] in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
        name = name.rpartition(".<locals>.")[0]
    return str(path.relative_to(SOURCES)), name


class Aside:
    """A server on a loop and a thread of its own, as in a process."""

    def __init__(self, role: str, build: Callable[[Fail], Service]) -> None:
        self._failures: list[BaseException] = []
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=role, daemon=True)
        self._thread.start()

        async def started() -> tuple[Service, int]:
            service = build(self._failures.append)
            service.open()
            _, port = await service.start()
            return service, port

        self._service, self.port = self._run(started())

    def close(self) -> None:
        """Stop the server; RuntimeError if it has failed before."""
        self._run(self._service.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()
        if self._failures:
            raise RuntimeError("a server failed") from self._failures[0]

    def _run(self, coroutine: Coroutine[object, object, R]) -> R:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)


@contextlib.contextmanager
def servers_here(data: str) -> Iterator[str]:
    """Meta, a realtime and a delay server on threads of this process: meta's address."""
    with contextlib.ExitStack() as stack:
        meta = Aside("meta", lambda fail: MetaService(MetaConfig(data=data, port=0), fail))
        stack.callback(meta.close)
        address = f"127.0.0.1:{meta.port}"
        realtime = RealtimeConfig(data=data, port=0, meta=address)
        stack.callback(Aside("realtime", lambda fail: RealtimeServer(realtime, fail)).close)
        delay = DelayConfig(data=data, port=0, meta=address)
        stack.callback(Aside("delay", lambda fail: DelayServer(delay, fail)).close)
        yield address


def count_stays(sends: int = SENDS) -> dict[str, set[Stay]]:
    """The stays of a lone send, until its receipt and until its outcome, that each of so many sends has passed."""
    watch = Watch()
    try:
        with tempfile.TemporaryDirectory(prefix="delayd-stays-") as data, servers_here(data) as address:
            files = Path(data, "delay", "dispatch")
            with Producer(address) as producer:

                def receipt() -> None:
                    due_ms = time.time_ns() // 1_000_000 + AHEAD_MS
                    producer.send("stays", b"x" * 200, deliver_at_ms=due_ms)

                def outcome() -> None:
                    before = _dispatched_bytes(files)
                    producer.send("stays", b"x" * 200, deliver_at_ms=time.time_ns() // 1_000_000)
                    _until(lambda: _dispatched_bytes(files) > before)
                    time.sleep(SETTLE_S)

                ways: dict[str, set[Stay]] = {}
                for name, way in (("receipt", receipt), ("outcome", outcome)):
                    for _ in range(WARM_SENDS):
                        way()
                    ways[name] = set.intersection(*(set(watch.calls(way)) for _ in range(sends)))
                return ways
    finally:
        watch.close()


def _dispatched_bytes(files: Path) -> int:
    return sum(path.stat().st_size for path in files.glob("*/*.log"))


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(f"no outcome came within {LIMIT_S:g} s")
        time.sleep(LOOK_S)


def main() -> None:
    """Count, and print one line a part of the way."""
    parser = argparse.ArgumentParser(description="The functions and files that one lone send passes.")
    parser.add_argument("--list", action="store_true", help="name them")
    named = parser.parse_args().list
    for name, stays in count_stays().items():
        files = {file for file, _ in stays}
        line: dict[str, object] = {"case": f"stays until the {name}", "functions": len(stays), "files": len(files)}
        if named:
            line["stays"] = {file: sorted(each for at, each in stays if at == file) for file in sorted(files)}
        print(json.dumps(line, indent=1 if named else None), flush=True)


if __name__ == "__main__":
    main()
