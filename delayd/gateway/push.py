"""Push: the targets that meta has are served, each by a pusher, and changed at a user's word (docs/push.md).

Invariant: nothing here must last. Targets are meta's: this process asks for them each second, and what it pulls is held
as any consumer holds it. While meta is away, the targets that are known are served on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial

from delayd.client.asking import ask
from delayd.client.asking.push import change_target, find_target, list_targets
from delayd.errors import BadArgument, DelaydError
from delayd.gateway.caller import Caller, Outcome
from delayd.gateway.problems import Refusal
from delayd.gateway.pusher import Pusher, consumer_of, post_test
from delayd.hours import instant_text
from delayd.machine.operating import LogLimit
from delayd.net.connection import Connection
from delayd.secret import Secret
from delayd.wire.heads import need_int, need_u64
from delayd.wire.push import PushTarget, read_push_targets
from delayd.wire.requests import RequestType

log = logging.getLogger(__name__)
limited = LogLimit(log)

POLL_S = 1.0
STOP_S = 2.0  # POSTs that are under way when the gateway stops may end.
CONNECT_TIMEOUT = timedelta(seconds=5)


class Push:
    """All push targets, as this gateway serves them; belongs to one loop."""

    def __init__(self, meta: str, secret: Secret | None, *, allow_private: bool) -> None:
        self._meta = ask.as_operator(meta, secret)  # So that what is pulled needs no token.
        self.secret = secret
        self._allow_private = allow_private
        self._caller: Caller | None = None
        self._id = secrets.randbits(63) | 1  # By which meta counts the gateways that share the work.
        self._pushers: dict[str, Pusher] = {}
        self._leaving: dict[Pusher, asyncio.Task[None]] = {}  # Targets that were changed: their last POSTs end.
        self._polling: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()  # Targets that are being paused.

    @property
    def pushers(self) -> dict[str, Pusher]:
        """What is served, by name."""
        return self._pushers

    def start(self) -> None:
        """Begin to serve; without the cluster's secret nothing is served."""
        self._caller = Caller(allow_private=self._allow_private)
        if self.secret is not None:
            self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def close(self) -> None:
        """Pull no more, and give back what is in hand."""
        for task in [*([self._polling] if self._polling is not None else []), *self._telling]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for name in [*self._pushers]:
            self._leave(name)
        leaving = [*self._leaving.values()]
        if leaving:
            await asyncio.wait(leaving, timeout=STOP_S)
        for pusher in self._leaving:
            pusher.cut()
        await asyncio.gather(*leaving)
        if self._caller is not None:
            await self._caller.close()

    @asynccontextmanager
    async def at_meta(self) -> AsyncIterator[Connection]:
        """Meta, which takes what is said there for an operator's word.

        Raises:
            Refusal: this gateway was started without the cluster's secret.
        """
        if self.secret is None:
            raise Refusal(
                403, "not_trusted", "this gateway has no secret of the cluster; start it with --secret-file or --data"
            )
        async with ask.meta(self._meta) as connection:
            await ask.prove(connection, self.secret)
            yield connection

    async def targets(self) -> list[PushTarget]:
        """All targets, by name."""
        async with self.at_meta() as connection:
            return await list_targets(connection)

    async def target(self, name: str) -> PushTarget:
        """One target; BadArgument when there is none of that name."""
        async with self.at_meta() as connection:
            return await find_target(connection, name)

    async def change(self, name: str, change: Callable[[PushTarget], PushTarget]) -> PushTarget:
        """Change a target; see `change_target`."""
        async with self.at_meta() as connection:
            return await change_target(connection, name, change)

    async def try_once(self, target: PushTarget) -> Outcome:
        """POST to a target once, now; the POST is about no message."""
        assert self._caller is not None, "requests come after the start"
        return await post_test(self._caller, target)

    # What is served.

    async def _poll(self) -> None:
        """Serve what meta has, as long as the gateway runs."""
        while True:
            try:
                async with self.at_meta() as connection:
                    seen = 0
                    while True:
                        seen = await self._look(connection, seen)
                        await asyncio.sleep(POLL_S)
            except DelaydError as error:
                limited.warning("push_targets_old", "push_targets_old code=%s reason=%r", error.code, str(error))
                await asyncio.sleep(POLL_S)

    async def _look(self, connection: Connection, seen: int) -> int:
        """Serve the targets that meta has now; returns their revision."""
        answer = await ask.ask(connection, RequestType.PUSH_TARGETS, {"after": "", "seen": seen, "gateway": self._id})
        revision, gateways = need_u64(answer, "revision"), need_int(answer, "gateways", 1)
        if revision != seen:
            page = read_push_targets(answer)
            self._serve(await list_targets(connection) if page.more else page.targets)
        for pusher in self._pushers.values():
            pusher.share(gateways)
        return revision

    def _serve(self, targets: list[PushTarget]) -> None:
        wanted = {target.name: target for target in targets if not target.paused}
        for name in [name for name, pusher in self._pushers.items() if wanted.get(name) != pusher.target]:
            self._leave(name)
        for name, target in wanted.items():
            if name not in self._pushers:
                assert self._caller is not None, "targets come after the start"
                new_consumer = partial(consumer_of, self._meta, connect_timeout=CONNECT_TIMEOUT)
                self._pushers[name] = Pusher(target, self._caller, new_consumer, self._gone)
                log.info("push_served target=%s subject=%s version=%d", name, target.subject, target.version)

    def _leave(self, name: str) -> None:
        """Serve a target no more, or not as it was; what is under way ends beside."""
        pusher = self._pushers.pop(name)
        self._leaving[pusher] = task = asyncio.get_running_loop().create_task(pusher.close())
        task.add_done_callback(lambda _: self._leaving.pop(pusher))

    def _gone(self, target: PushTarget, why: str) -> None:
        """Pause a target that says that it is gone."""
        log.warning("push_target_gone target=%s reason=%r", target.name, why)
        task = asyncio.get_running_loop().create_task(self._pause(target, why))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _pause(self, target: PushTarget, why: str) -> None:
        note = f"{why} at {instant_text(int(time.time() * 1_000))}"
        while True:
            try:
                with suppress(BadArgument):  # Somebody has changed or deleted it meanwhile.
                    await self.change(
                        target.name,
                        lambda known: known._replace(paused=True, note=note) if known == target else known,
                    )
                return
            except DelaydError as error:
                limited.warning("push_targets_old", "push_targets_old code=%s reason=%r", error.code, str(error))
                await asyncio.sleep(POLL_S)
