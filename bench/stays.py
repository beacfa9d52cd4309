"""Where one lone message stays on its way: the functions and files that it passes, from a send to a durable ack.

    python -m bench.stays [--list]

Meta, the delay server, the realtime server and a blocking producer run in this process, each on a thread of its own,
so that one profiler sees the whole way. One JSON line a part of the way: how many functions were called, and in how
many files they are; and, of all calls of one way, how often the next one is in another file. With ``--list`` it names
them. Comprehensions count as the function that they stand in.

    receipt   the message is due in a minute: from `Producer.send` to the receipt that it returns, and what a server
              does right behind its answer
    outcome   it is due at once: from `Producer.send` until the delay server has its outcome on the disk
    ack       as outcome; and a consumer pulls the message and acknowledges it, until its server has that on the disk
    cancel    the message has a key: from `Producer.cancel` by that key to the answer, and what follows

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
from collections.abc import Callable, Collection, Coroutine, Iterator
from datetime import timedelta
from functools import reduce
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple, TypeVar

import uvloop

import delayd
from delayd.client.producer import Producer
from delayd.client.pulling.consumer import Consumer
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
WAYS = ("receipt", "outcome", "ack", "cancel")

SETTLE_S = 0.1  # From an answer, or the bytes of an outcome in its file, until all that follows was done.
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
            return service, (await service.start()).port

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


class Way(NamedTuple):
    """What each of several messages has passed, and the fewest changes of file between the calls of one of them."""

    stays: set[Stay]
    changes: int

    @property
    def files(self) -> set[str]:
        """The files of the stays."""
        return {file for file, _ in self.stays}

    def common(self, other: Way) -> Way:
        """What these messages and others have passed."""
        return Way(self.stays & other.stays, min(self.changes, other.changes))


def count_stays(sends: int = SENDS, names: Collection[str] = WAYS) -> dict[str, Way]:
    """The stays of a lone message, of which each of so many has passed all, by the part of its way."""
    watch = Watch()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="delayd-stays-") as data,
            servers_here(data) as address,
            Producer(address) as producer,
            Consumer(address, "pulled", group="g") as consumer,
        ):
            files = Path(data, "delay", "dispatch")

            def due_now(subject: str) -> None:
                before = _dispatched_bytes(files)
                producer.send(subject, b"x" * 200, deliver_at_ms=_now_ms())
                if subject == "pulled":
                    consumer.pull(1, wait=timedelta(seconds=LIMIT_S)).ack()
                _until(lambda: _dispatched_bytes(files) > before)

            ways: dict[str, Callable[[], object]] = {
                "receipt": lambda: producer.send("stays", b"x" * 200, deliver_at_ms=_now_ms() + AHEAD_MS),
                "outcome": lambda: due_now("stays"),
                "ack": lambda: due_now("pulled"),
                "cancel": lambda: producer.cancel("keyed", key="k"),
            }

            def way(name: str) -> Way:
                if name == "cancel":
                    producer.send("keyed", b"x" * 200, key="k", deliver_at_ms=_now_ms() + AHEAD_MS)

                def whole() -> None:
                    ways[name]()
                    time.sleep(SETTLE_S)

                calls = watch.calls(whole)
                return Way(set(calls), sum(one[0] != next_one[0] for one, next_one in pairwise(calls)))

            found: dict[str, Way] = {}
            for name in names:
                for _ in range(WARM_SENDS):
                    way(name)
                found[name] = reduce(Way.common, [way(name) for _ in range(sends)])
            return found
    finally:
        watch.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


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
    parser = argparse.ArgumentParser(description="The functions and files that one lone message passes.")
    parser.add_argument("--list", action="store_true", help="name them")
    named = parser.parse_args().list
    for name, way in count_stays().items():
        line: dict[str, object] = {"case": f"stays until the {name}", "functions": len(way.stays)}
        line |= {"files": len(way.files), "changes of file": way.changes}
        if named:
            line["stays"] = {file: sorted(each for at, each in way.stays if at == file) for file in sorted(way.files)}
        print(json.dumps(line, indent=1 if named else None), flush=True)


if __name__ == "__main__":
    main()
