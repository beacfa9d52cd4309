"""Homes: where messages may live. Each of them gives an address, and all clients take it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import delayd
from delayd.testing import InMemoryBroker
from tests.end_to_end.up_process import up


@contextmanager
def servers(folder: Path) -> Iterator[str]:
    """Three servers as processes."""
    with up(folder, "--port", "0") as running:
        yield running.meta


@contextmanager
def embedded(folder: Path) -> Iterator[str]:
    """A directory that is open in this process."""
    with delayd.open(folder / "data") as home:
        yield home.address


@contextmanager
def memory(folder: Path) -> Iterator[str]:
    """Servers in memory, whose clock goes on by itself here: the cases wait for what is due."""
    with InMemoryBroker(tick=True) as broker:
        yield broker.address


HOMES: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "servers": servers,
    "embedded": embedded,
    "memory": memory,
}
