"""A cluster of real servers with two delay servers, of which one is to be emptied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import delayd
from delayd.config import Value
from tests.end_to_end.processes import ServerProcess, started
from tests.unit.cli.runner import Ran, run
from tests.waiting import wait_until

META: dict[str, Value] = {"heartbeat_ms": 100, "lease_ms": 1_500}


class Fleet(NamedTuple):
    """A cluster with two delay servers, each on a directory of its own."""

    data: Path
    meta: ServerProcess
    old: ServerProcess
    old_data: Path
    new: ServerProcess
    new_data: Path
    realtime: ServerProcess

    def command(self, *words: str) -> Ran:
        """Run a `delayd server` command."""
        return run("server", *words, "--meta", self.meta.address, "--data", str(self.data))

    def state_of(self, server: ServerProcess) -> str:
        """What meta says of a server; `gone` when it does not know it."""
        rows = json.loads(run("servers", "--meta", self.meta.address, "--format", "json").out)
        return next((str(row["state"]) for row in rows if row["address"] == server.address), "gone")


@contextmanager
def open_fleet(folder: Path) -> Iterator[Fleet]:
    """Start the servers; the old delay server has taken one message with a key, which was due at once."""
    with ExitStack() as stack:
        data, old_data, new_data = (folder / name for name in ("first", "old", "new"))
        meta = stack.enter_context(ServerProcess("meta", data, META))
        own = {"meta": meta.address, "secret_file": str(data / "cluster.secret")}
        old = ServerProcess("delay", old_data, own)
        realtime = ServerProcess("realtime", data, own)
        stack.enter_context(started(old, realtime))
        with delayd.Producer(meta.address) as producer:
            # The first one owns keys, and the second one may own some once the first one knows it.
            producer.send("s", b"first", delay=timedelta(0), key="first")
        new = stack.enter_context(ServerProcess("delay", new_data, own))
        fleet = Fleet(data, meta, old, old_data, new, new_data, realtime)
        wait_until(lambda: fleet.state_of(new) == "serves", "both serve")
        yield fleet
