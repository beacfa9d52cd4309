"""Home clock: the clocks that a client reads for one home of messages.

These are the clocks of this machine, or those of a home in this process whose clock a test moves
(`delayd.testing.InMemoryBroker`).

Invariant: how long a call waits is always counted by this machine's clock, so no call hangs because a clock stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from delayd.client.instants import ServerClock, monotonic_s, monotonic_us, wall_ms
from delayd.client.limits import need_address

C = TypeVar("C")


class HomeClock:
    """The clocks of one home: those of this machine, where the home is anywhere."""

    def delay_us(self) -> int:
        """The clock from which `delay=` counts, in us."""
        return monotonic_us()

    def wall_ms(self) -> int:
        """The clock by which an instant is near or far, in ms since the epoch."""
        return wall_ms()

    def lease_s(self) -> float:
        """The clock by which leases are counted, in s."""
        return monotonic_s()

    def server_clock(self, name: str) -> ServerClock:
        """What a client knows of the clock of one of the home's servers."""
        return ServerClock(name)

    def core_of(self, kind: type[C]) -> Callable[..., C]:
        """What makes the core of a consumer: ``kind``, or one below it, by which a clock that is moved follows what
        callers have in hand.
        """
        return kind


MACHINE_CLOCK = HomeClock()

_moved: dict[str, HomeClock] = {}


def clock_of(host: str) -> HomeClock:
    """The clocks of the home whose servers listen on a host."""
    return _moved.get(host, MACHINE_CLOCK)


def clock_at(address: str) -> HomeClock:
    """The same for an address of meta."""
    return clock_of(need_address(address).host) if _moved else MACHINE_CLOCK


def set_clock(host: str, clock: HomeClock) -> Callable[[], None]:
    """Let the clients of a host read this clock; returns a function that ends this."""
    _moved[host] = clock

    def end() -> None:
        _moved.pop(host, None)

    return end
