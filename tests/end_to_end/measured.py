"""Servers that are measured, and what a scrape of them says."""

from __future__ import annotations

import http.client
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end.processes import HOST, ServerProcess
from tests.end_to_end.up_process import watched
from tests.waiting import DEADLINE_S, wait_until

Labels = dict[str, str]


class Scrape(NamedTuple):
    """All samples of a page."""

    samples: list[tuple[str, Labels, float]]

    def of(self, name: str, **labels: str) -> list[float]:
        """The values of a metric with these labels."""
        return [value for found, has, value in self.samples if found == name and labels.items() <= has.items()]

    def one(self, name: str, **labels: str) -> float:
        """The one value of a metric with these labels."""
        (value,) = self.of(name, **labels)
        return value

    @property
    def names(self) -> set[str]:
        """Metrics with a sample; a histogram has its own name."""
        return {re.sub(r"(_seconds)_(bucket|sum|count)$", r"\1", name) for name, _, _ in self.samples}


def admin_port(server: ServerProcess) -> int:
    """The port on which a server of these tests is measured, of its latest life."""
    found: list[str] = []

    def told() -> bool:
        found[:] = re.findall(r"admin_listening role=\w+ host=127\.0\.0\.1 port=(\d+)", server.log)
        return bool(found)

    wait_until(told, lambda: f"it says where it is measured\n{server.log}")
    return int(found[-1])


def asked(port: int, path: str) -> tuple[int, str]:
    """The status and the page."""
    line = http.client.HTTPConnection(HOST, port, timeout=DEADLINE_S)
    try:
        line.request("GET", path)
        answer = line.getresponse()
        return answer.status, answer.read().decode()
    finally:
        line.close()


def scrape(server: ServerProcess, path: str = "/metrics") -> Scrape:
    """Read a page of a server."""
    status, page = asked(admin_port(server), path)
    assert status == 200, page
    return read(page)


def read(page: str) -> Scrape:
    """The samples of a page, as another reader finds them."""
    families = text_string_to_metric_families(page)
    return Scrape([(each.name, each.labels, each.value) for family in families for each in family.samples])


class Measured(NamedTuple):
    """One server of each role."""

    meta: ServerProcess
    delay: ServerProcess
    realtime: ServerProcess


@contextmanager
def measured(folder: Path) -> Iterator[Measured]:
    """Run a server of each role that can be measured."""
    own = {"admin_port": 0}
    with (
        ServerProcess("meta", folder, own) as meta,
        ServerProcess("realtime", folder, {"meta": meta.address, **own}) as realtime,
        ServerProcess("delay", folder, {"meta": meta.address, **own}) as delay,
    ):
        yield Measured(meta, delay, realtime)


@contextmanager
def gateway(meta: str, folder: Path) -> Iterator[int]:
    """Run a gateway; its port."""
    command = [sys.executable, "-m", "delayd", "gateway", "--meta", meta, "--port", "0"]
    with watched(command, folder) as process:
        process.until(lambda: bool(process.ready("gateway")), "the gateway is ready")
        yield process.ready("gateway")[-1].endpoint.port


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until a scrape says something."""
    wait_until(holds, lambda: what)
