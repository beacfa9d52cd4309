"""Home clock: the clocks that a client reads for one home of messages.

These are the clocks of this machine, or those of a home in this process whose clock a test moves
(`delayd.testing.InMemoryBroker`).

Invariant: how long a call waits is always counted by this machine's clock, so no call hangs because a clock stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from delayd.client.instants import ServerClock, monotonic_s, monotonic_us, wall_ms
from delayd.client.limits import need_address

if TYPE_CHECKING:
    from delayd.client.pulling.acks import Handles


class Watcher(Protocol):
    """Is told what the callers of one consumer do; from any thread."""

    def lease_s(self) -> float:
        """`HomeClock.lease_s`, for calls of this consumer."""

    def came_back(self) -> None:
        """This thread or task asks for its next message: it is done with what it got before."""

    def waits(self) -> None:
        """A caller waits for a message from now on."""

    def leaves(self) -> None:
        """That caller has given up."""

    def handed_out(self, handles: Handles) -> None:
        """This thread or task has these messages."""

    def let_go(self, handles: Handles) -> None:
        """Something was said of these, or no caller has got them."""

    def close(self) -> None:
        """The consumer is closed."""


class Watched(Protocol):
    """A consumer, for its watcher; called on the consumer's loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it belongs to."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing that callers said is still on its way, and the server knows who waits."""

    def hurry(self) -> None:
        """Send what they said now, though more of it may come soon."""

    @property
    def keeps_leases(self) -> bool:
        """Whether it extends the leases of messages that its callers have."""

    def keep(self, ahead_s: float) -> None:
        """Extend these leases so that they last while the clock is moved by so much, as far as the consumer may."""

    @property
    def has_next(self) -> bool:
        """Whether a message is here that a caller who waits, or iterates, will take without asking for it."""


class HomeClock(Protocol):
    """The clocks of one home."""

    def delay_us(self) -> int:
        """The clock from which `delay=` counts, in us."""

    def wall_ms(self) -> int:
        """The clock by which an instant is near or far, in ms since the epoch."""

    def lease_s(self) -> float:
        """The clock by which leases are counted, in s."""

    def server_clock(self, name: str) -> ServerClock:
        """What a client knows of the clock of one of the home's servers."""

    def watcher(self, watched: Watched) -> Watcher | None:
        """Who is told what callers do; None where nobody asks."""


class MachineClock:
    """The clocks of this machine: the home is anywhere."""

    def delay_us(self) -> int:
        """See HomeClock."""
        return monotonic_us()

    def wall_ms(self) -> int:
        """See HomeClock."""
        return wall_ms()

    def lease_s(self) -> float:
        """See HomeClock."""
        return monotonic_s()

    def server_clock(self, name: str) -> ServerClock:
        """See HomeClock."""
        return ServerClock(name)

    def watcher(self, watched: Watched) -> None:
        """See HomeClock."""


MACHINE_CLOCK: HomeClock = MachineClock()

handles_messages: ContextVar[bool] = ContextVar("handles_messages", default=False)
"""Set in the threads of workers: a clock that is moved may wait for them, so they never wait for the clock."""

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
