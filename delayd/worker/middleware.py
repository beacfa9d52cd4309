"""Middleware: objects of the user's that are called before and after a handler, and when it failed.

    before(message)              in the order in which they were given
    after(message, result)       in reverse order, when the handler has returned
    error(message, exception)    in reverse order, when the handler or a ``before`` has raised

Each method may be missing, and may be a function or a coroutine function. ``error`` is called for those whose
``before`` had ended. An exception of a ``before`` counts as the handler's; those of ``after`` and ``error`` are logged
and change nothing, because the handler's work is done by then.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from delayd.client.limits import need_listed
from delayd.client.pulling.message import MessageView
from delayd.errors import BadArgument
from delayd.machine.operating import LogLimit

Finish = Callable[[Coroutine[Any, Any, object]], Awaitable[object]]
"""Has a coroutine of a middleware run to its end on the loop: awaited there, or waited for in a handler's thread."""

HOOKS = ("before", "after", "error")

limited = LogLimit(logging.getLogger(__name__))


class Hooks(NamedTuple):
    """The methods of one middleware; None where it has none."""

    name: str
    before: Callable[..., object] | None
    after: Callable[..., object] | None
    error: Callable[..., object] | None


class Chain:
    """All middleware of a worker."""

    def __init__(self, middleware: Sequence[object]) -> None:
        self._hooks = [_hooks_of(each) for each in need_listed("middleware", middleware, "objects")]

    def __len__(self) -> int:
        return len(self._hooks)

    async def before(self, message: MessageView, begun: list[Hooks], finish: Finish) -> None:
        """Call each ``before``; ``begun`` gets those that have ended."""
        for each in self._hooks:
            if each.before is not None:
                await _called(each.before(message), finish)
            begun.append(each)

    async def after(self, message: MessageView, result: object, begun: list[Hooks], finish: Finish) -> None:
        """Call each ``after``."""
        for each in reversed(begun):
            if each.after is not None:
                try:
                    await _called(each.after(message, result), finish)
                except BaseException as failure:  # noqa: BLE001 - the message is handled, whatever a middleware does.
                    _failed(each, "after", failure)

    async def error(self, message: MessageView, error: BaseException, begun: list[Hooks], finish: Finish) -> None:
        """Call ``error`` of those that have begun."""
        for each in reversed(begun):
            if each.error is not None:
                try:
                    await _called(each.error(message, error), finish)
                except BaseException as failure:  # noqa: BLE001 - as above
                    _failed(each, "error", failure)


def _hooks_of(middleware: object) -> Hooks:
    before, after, error = (getattr(middleware, hook, None) for hook in HOOKS)
    if before is None and after is None and error is None:
        raise BadArgument(f"{middleware!r:.200} is no middleware: it has none of before, after and error")
    return Hooks(type(middleware).__name__, before, after, error)


async def _called(result: object, finish: Finish) -> None:
    if inspect.iscoroutine(result):
        await finish(result)


def _failed(hooks: Hooks, hook: str, error: BaseException) -> None:
    limited.error("middleware_failed", "middleware_failed middleware=%s hook=%s error=%r", hooks.name, hook, error)
