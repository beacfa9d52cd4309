"""Admin: the blocking form of AsyncAdmin, on a background thread.

Invariant: each method is made from that of AsyncAdmin, so both have the same arguments, answers and errors. Any thread
may call it, and after a fork the child gets connections of its own (rule I2).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sized
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from delayd.client.admin.async_admin import AsyncAdmin, SecretFile
from delayd.client.at_exit import THREAD_S, forget, remember
from delayd.client.engine import OwnEngine
from delayd.client.limits import need_meta
from delayd.client.loop_thread import LoopThread
from delayd.client.sending.arguments import TIMEOUT_MS
from delayd.client.sending.pending import BlockingPages, Pages

P = ParamSpec("P")
R = TypeVar("R")
Page = TypeVar("Page", bound=Sized)


def blocking(
    method: Callable[Concatenate[AsyncAdmin, P], Coroutine[object, object, R]],
) -> Callable[Concatenate[Admin, P], R]:
    """The blocking form of a method of AsyncAdmin."""

    @wraps(method)
    def called(self: Admin, /, *args: P.args, **kwargs: P.kwargs) -> R:
        engine = self._own.standing()
        return engine.thread.call(method(engine.admin, *args, **kwargs), ends_with_caller=True)

    return called


def blocking_pages(
    method: Callable[Concatenate[AsyncAdmin, P], Coroutine[object, object, Pages[Page]]],
) -> Callable[Concatenate[Admin, P], BlockingPages[Page]]:
    """The blocking form of a method that gives pages: these are for a plain ``for``."""

    @wraps(method)
    def called(self: Admin, /, *args: P.args, **kwargs: P.kwargs) -> BlockingPages[Page]:
        engine = self._own.standing()
        return BlockingPages(engine.thread.call(method(engine.admin, *args, **kwargs)), engine.thread)

    return called


class Admin:
    """Asks a running cluster about groups, dead letters and quotas, and decides about them. Use it with ``with``.

    Example::

        with delayd.Admin("127.0.0.1:7400") as admin:
            for group in admin.groups("orders.cancel"):
                print(group.group, group.waiting, "waiting", group.info.outstanding, "with consumers")
            for page in admin.dead_letters("orders.cancel", "billing"):
                for letter in page:
                    print(letter.dead_at, letter.reason, letter.error, letter.body)

    The arguments are those of `AsyncAdmin`.
    """

    def __init__(
        self, address: str | None = None, *, secret: SecretFile | None = None, timeout_ms: float = TIMEOUT_MS
    ) -> None:
        meta = need_meta(address)
        self._own = OwnEngine("admin", lambda: _Engine(meta, secret, timeout_ms))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    groups = blocking(AsyncAdmin.groups)
    pause = blocking(AsyncAdmin.pause)
    resume = blocking(AsyncAdmin.resume)
    rewind = blocking(AsyncAdmin.rewind)
    delete_group = blocking(AsyncAdmin.delete_group)
    dead_groups = blocking(AsyncAdmin.dead_groups)
    dead_letters = blocking_pages(AsyncAdmin.dead_letters)
    retries = blocking_pages(AsyncAdmin.retries)
    redrive = blocking(AsyncAdmin.redrive)
    purge = blocking(AsyncAdmin.purge)
    quotas = blocking(AsyncAdmin.quotas)
    set_quota = blocking(AsyncAdmin.set_quota)

    def close(self) -> None:
        """Disconnect. A second call does nothing."""
        engine = self._own.close()
        if engine is not None:
            engine.close()


class _Engine:
    """An AsyncAdmin on a thread of its own."""

    def __init__(self, address: str, secret: SecretFile | None, timeout_ms: float) -> None:
        self.pid = os.getpid()
        self.thread = LoopThread("delayd-admin")
        self.admin = self.thread.run(lambda: AsyncAdmin(address, secret=secret, timeout_ms=timeout_ms))
        remember(self)

    def end(self, until: float) -> None:
        """End the thread because the program ends; see at_exit."""
        self.thread.end(THREAD_S)

    def close(self) -> None:
        """Disconnect and end the thread."""
        forget(self)
        self.thread.call(self.admin.close())
        self.thread.close()
