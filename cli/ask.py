"""Asks servers for a command; the questions are those of `delayd.client.asking.ask`.

Invariant: every wait has a limit, and a server that is not there is named with its address.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from delayd.client.asking.ask import Known as Known
from delayd.client.asking.ask import ask as ask
from delayd.client.asking.ask import connected as connected
from delayd.client.asking.ask import decide as decide
from delayd.client.asking.ask import held_status as held_status
from delayd.client.asking.ask import is_fenced as is_fenced
from delayd.client.asking.ask import is_held as is_held
from delayd.client.asking.ask import known_servers as known_servers
from delayd.client.asking.ask import meta as meta
from delayd.client.asking.ask import prove as prove
from delayd.client.asking.ask import reached as reached

from .times import duration_text

R = TypeVar("R")


def run(main: Callable[[], Coroutine[object, object, R]]) -> R:
    """Run a coroutine that asks, and return what it found."""
    return asyncio.run(main())


def silence(server: Known) -> str:
    """A sentence that says why a server that is not alive is not asked."""
    return f"meta has not heard of it for {duration_text(server.seen_ms_ago)}; see `delayd servers`"
