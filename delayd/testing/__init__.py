"""For tests here and elsewhere: an in-memory broker, what clients promise, and fakes of what a server stands on.

A map.

    broker              servers in memory for the tests of a program that uses delayd (docs/testing.md), and what they
                        run on
    broker_clock        their clock, which the test moves
    dev                 the same behind a gateway, as the process of `delayd dev`
    plugin              the fixtures of pytest
    conformance         what the public clients promise, as tests that run against any home (docs/testing.md)

    disk, tree          a disk in memory that loses power, fails syncs and fills up; the files in it
    clock               a clock that a test moves, and its machine
    executor            runs jobs when the test says so
    state               the key-value state, in memory
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delayd.testing.broker import InMemoryBroker as InMemoryBroker

__all__ = ["InMemoryBroker"]


def __getattr__(name: str) -> object:
    # The broker brings all servers with it; the plugin must not, where nobody uses it.
    if name == "InMemoryBroker":
        from delayd.testing.broker import InMemoryBroker

        return InMemoryBroker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
