"""Own loop: an asynchronous client belongs to the event loop in which it was made, and is used only there."""

import asyncio

from delayd.errors import WrongLoop


def own_loop(what: str) -> asyncio.AbstractEventLoop:
    """The running loop; WrongLoop when ``what`` is made where none runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoop(f"{what} is made inside a running event loop; make it in an `async def`") from None


def check_loop(what: str, loop: asyncio.AbstractEventLoop) -> None:
    """WrongLoop when ``what`` is used outside of its loop."""
    if asyncio._get_running_loop() is not loop:
        raise WrongLoop(f"{what} belongs to the event loop that it was made in, and nothing was done; make one in each")
