"""Admin: what operators ask of a running cluster, and decide about it, from the caller's own event loop or any thread.

Dead letters of a group, and messages that are to come to it again, are pending messages of its retry subject
(docs/consuming.md, Dead letters): they are found, ended and moved as every pending message is.

Invariant: a decision is durable before its call returns. What only an operator may decide needs the cluster's secret;
what any producer may do, such as to end dead letters, needs none.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple, TypeVar

from delayd.batch.labels import (
    ATTEMPT,
    DEAD_AT_MS,
    DEAD_KEPT_MS,
    DEAD_TAG,
    ERROR,
    FIRST_DUE_MS,
    KEY,
    LIFE_PREFIX,
    ORIGIN,
    REASON,
    Headers,
    number_in,
)
from delayd.client.asking import ask
from delayd.client.asking.ask import GroupAt, Listing, Moved, QuotaAt
from delayd.client.asking.messages import asked_of
from delayd.client.asking.walking import (
    Pages,
    PendingMessage,
    Progress,
    Walked,
    blocking_pages,
    page_of,
    shift_ms_of,
    window_of,
)
from delayd.client.engine import (
    AsyncClient,
    BlockingClient,
    Client,
    OnThread,
    OwnEngine,
    OwnLoopEngine,
    blocking,
    form_of,
)
from delayd.client.instants import instant_ms, utc
from delayd.client.limits import check_subject, need_meta
from delayd.client.producer import ProducerCore
from delayd.client.sending.receipts import Receipt
from delayd.client.sending.send_options import LINGER_MS, QUEUE_BYTES_MAX, TIMEOUT_MS, ProducerSettings
from delayd.errors import BadArgument, BadSetting
from delayd.secret import SECRET_FILE, Secret, read_secret
from delayd.wire.asked import AskedWindow, Content, Piece
from delayd.wire.consuming import AtInstant, AtSequence, End, Position
from delayd.wire.scheduling import LIMITS

KEPT = timedelta(milliseconds=DEAD_KEPT_MS)


class Letter(NamedTuple):
    """A message that a group gave back: a dead letter, or one that waits to come again.

    Fields:
        receipt: of the message as it is kept now; its due instant is when it comes again, or when a dead letter ends.
        dead_at: since when it is a dead letter; None when it waits to come again.
        attempts: how often handlers of the group got it.
        reason: why it is a dead letter; empty when it is none.
        error: what its last handler said.
        origin: the sequence of the message as it was sent, at the delay server that took it then.
        first_due: when it was due the first time.
        key: the one that it was sent with, which is free by now; None without one.
        tags: those that it was sent with.
        headers: those that it was sent with.
        body: what it was sent with.
    """

    receipt: Receipt
    dead_at: datetime | None
    attempts: int
    reason: str
    error: str
    origin: int
    first_due: datetime | None
    key: str | None
    tags: tuple[str, ...]
    headers: Headers
    body: bytes


class DeadGroup(NamedTuple):
    """A group that has dead letters, and how many."""

    subject: str
    group: str
    letters: int


def letters_window(place: GroupAt, since: datetime | None = None, before: datetime | None = None) -> AskedWindow:
    """The dead letters of a group that died in a window; BadArgument, NaiveDatetime when it is none."""
    return window_of(place.kept_as, _due(since), _due(before), DEAD_TAG)


def letters_of(log_id: int, piece: Piece, *, dead: bool) -> list[Letter]:
    """The dead letters of a piece of a walk, or what waits to come again."""
    found = map(_letter, page_of(log_id, piece, whole=True))
    return [letter for letter in found if (letter.dead_at is not None) == dead]


def _due(died: datetime | None) -> datetime | None:
    """When a letter that died at an instant is due."""
    return None if died is None else died + KEPT


def _letter(message: PendingMessage) -> Letter:
    headers = message.headers or {}
    died_ms, first_due_ms = number_in(headers, DEAD_AT_MS), number_in(headers, FIRST_DUE_MS)
    is_dead = DEAD_TAG in message.tags
    return Letter(
        message.receipt,
        utc(died_ms) if is_dead else None,
        number_in(headers, ATTEMPT),
        _text(headers, REASON),
        _text(headers, ERROR),
        number_in(headers, ORIGIN),
        utc(first_due_ms) if first_due_ms else None,
        _text(headers, KEY) or None,
        tuple(tag for tag in message.tags if tag != DEAD_TAG),
        {name: value for name, value in headers.items() if not name.startswith(LIFE_PREFIX)},
        message.body or b"",
    )


def _text(headers: Headers, name: str) -> str:
    value = headers.get(name, "")
    return value if isinstance(value, str) else ""


R = TypeVar("R")

SecretFile = str | os.PathLike[str] | Secret


class Operates(Client["AdminCore"]):
    """What both forms of an admin take, and how they ask."""

    def __init__(
        self,
        address: str | None = None,
        *,
        secret: SecretFile | None = None,
        timeout_ms: float = TIMEOUT_MS,
        token: str | None = None,
    ) -> None:
        meta = need_meta(address, token)
        self._secret = secret
        self._limit_s = timeout_ms / 1000
        self._begin(meta, ProducerSettings(LINGER_MS, QUEUE_BYTES_MAX, timeout_ms))

    @abstractmethod
    def _begin(self, meta: str, settings: ProducerSettings) -> None:
        """Have an engine that reaches this meta."""

    @property
    def _meta(self) -> str:
        return self._core.address

    async def _walk(self, walk: Coroutine[object, object, R]) -> R:
        return await self._run(walk, ends_with_caller=True)

    async def _ask(self, question: Coroutine[object, object, R]) -> R:
        async def in_time() -> R:
            with ask.in_time(self._limit_s):
                return await question

        return await self._walk(in_time())

    async def _at_each(
        self, subject: str, group: str, decide: Callable[[GroupAt], Coroutine[object, object, None]]
    ) -> Listing[GroupAt]:
        """Decide about a group at each server that has it, one after the other."""

        async def at_each() -> Listing[GroupAt]:
            places = await ask.find_group(self._meta, subject, group)
            for place in places:
                await decide(place)
            return places

        return await self._ask(at_each())

    async def _listed(self, subject: str | None) -> Listing[GroupAt]:
        if subject is not None:
            check_subject(subject)
        return await self._ask(ask.list_groups(self._meta, subject))

    async def _place(self, subject: str, group: str) -> GroupAt:
        check_subject(subject)
        return ask.one_place(await self._ask(ask.find_group(self._meta, subject, group)))

    def _need_secret(self) -> Secret:
        secret = self._secret
        if secret is None:
            raise BadSetting(f"only an operator may do this: give secret= the path of the cluster's {SECRET_FILE}")
        if not isinstance(secret, Secret):
            secret = self._secret = read_secret(os.fspath(secret))
        return secret


class AsyncAdmin(Operates, AsyncClient["AdminCore"]):
    """Asks a running cluster about groups, dead letters and quotas, and decides about them. Use it with ``async with``.

    Example::

        async with delayd.AsyncAdmin("127.0.0.1:7400") as admin:
            for group in await admin.groups("orders.cancel"):
                print(group.group, group.waiting, "waiting", group.info.outstanding, "with consumers")
            async for page in await admin.dead_letters("orders.cancel", "billing"):
                for letter in page:
                    print(letter.dead_at, letter.reason, letter.error, letter.body)

    Args:
        address: where meta listens, as ``host:port``, or over TLS as ``delayds://host:port?ca=FILE``
            (docs/security.md). The default is the environment variable DELAYD_META, or 127.0.0.1:7400.
        secret: the path of the cluster's secret, a file `cluster.secret` in the data directory of a server. Only what
            an operator decides about groups and quotas needs it.
        timeout_ms: how long a call may take. One that pages through dead letters or retries, or ends or moves them,
            may take as long for each of its pieces.
        token: what lets this client in where servers ask for tokens (docs/security.md); it must not be in a repository.
            The default is the environment variable DELAYD_TOKEN, or none.
    """

    def _begin(self, meta: str, settings: ProducerSettings) -> None:
        self._own = OwnLoopEngine("admin", lambda: AdminCore(meta, settings))
        self._own.standing()  # It belongs to the loop in which it is made.

    async def groups(self, subject: str | None = None) -> Listing[GroupAt]:
        """List the consumer groups of a subject, or of all, with their progress.

        A group is listed once for each realtime server that has it. Check ``missing`` of the answer: it names the
        servers that could not be asked.
        """
        return await self._listed(subject)

    async def pause(self, subject: str, group: str) -> None:
        """Give the consumers of a group no more messages, until `resume`; needs the secret.

        Consumers may finish and acknowledge what they have. Restarts change nothing.
        """
        await self._pause(subject, group, paused=True)

    async def resume(self, subject: str, group: str) -> None:
        """Give the consumers of a paused group messages again; needs the secret."""
        await self._pause(subject, group, paused=False)

    async def rewind(self, subject: str, group: str, to: str | datetime | int, *, dry_run: bool = True) -> Moved:
        """Let a group go on at an earlier or a later message; needs the secret.

        Args:
            to: ``"earliest"``, ``"latest"``, an instant (the first message that was handed over then or later), or a
                consume sequence, as ``info`` of `groups` has them.
            dry_run: only tell what it would do. It is the default; say False to do it.

        Returns what it does, or has done.
        """
        secret, position = self._need_secret(), _position(to)

        async def move() -> Moved:
            place = ask.one_place(await ask.find_group(self._meta, subject, group))
            moved = await ask.move_group(place, secret, position, dry_run=True)
            if dry_run:
                return moved
            # Where the words led when it was told, not where they lead by now.
            return await ask.move_group(place, secret, AtSequence(moved.next), dry_run=False)

        return await self._ask(move())

    async def delete_group(self, subject: str, group: str, *, keep_pending: bool = False) -> int:
        """Delete a group, and end its dead letters and what was to come to it again; needs the secret.

        The group never gets what it has not acknowledged. A consumer that names it later makes a new group.

        Args:
            keep_pending: leave dead letters and retries at the delay servers.

        Returns how many dead letters and retries have ended.
        """
        secret = self._need_secret()
        places = await self._at_each(subject, group, lambda place: ask.delete_group(place, secret))
        ended = 0
        for place in [] if keep_pending else places:
            window = window_of(place.kept_as, None, None, None)
            ended += (await self._walk(self._core.walker.cancel(window, dry_run=False, progress=None))).done
        return ended

    async def dead_groups(self, subject: str | None = None) -> Listing[DeadGroup]:
        """Count the dead letters of each group that has any. Check ``missing`` of the answer."""
        listed = await self._listed(subject)
        counted: list[DeadGroup] = []
        for place in listed:
            walk = self._core.walker.cancel(letters_window(place), dry_run=True, progress=None)
            counted.append(DeadGroup(place.subject, place.group, (await self._walk(walk)).found))
        return Listing([each for each in counted if each.letters], listed.missing)

    async def dead_letters(
        self,
        subject: str,
        group: str,
        *,
        since: datetime | None = None,
        before: datetime | None = None,
        page_size: int | None = None,
        resume: str | None = None,
    ) -> Pages[list[Letter]]:
        """Read the dead letters of a group, a page at a time, from the running delay servers.

        Args:
            since: only those that are dead since then, or later.
            before: only those that were dead before then.
            page_size, resume: as for `AsyncProducer.pending`.
        """
        window = letters_window(await self._place(subject, group), since, before)
        return self._core.walker.pages(window, Content.WHOLE, partial(letters_of, dead=True), page_size, resume)

    async def dead_letter(self, subject: str, group: str, receipt: Receipt) -> Letter | None:
        """Read the dead letter of a group that has this ``receipt``; None when the group has no such one."""
        kept_as = (await self._place(subject, group)).kept_as
        one = asked_of(kept_as, receipt).rows()
        window = window_of(kept_as, None, None, DEAD_TAG)
        pages = self._core.walker.pages(window, Content.WHOLE, partial(letters_of, dead=True), one=one)
        page = await self._walk(pages.next())
        return page[0] if page else None

    async def retries(
        self, subject: str, group: str, *, due_from: datetime | None = None, due_before: datetime | None = None
    ) -> Pages[list[Letter]]:
        """Read the messages that a group gave back and that wait to come to it again, a page at a time.

        Args:
            due_from: when the first of them comes; None: the earliest.
            due_before: they come before this; None: all later ones.
        """
        window = window_of((await self._place(subject, group)).kept_as, due_from, due_before, None)
        return self._core.walker.pages(window, Content.WHOLE, partial(letters_of, dead=False))

    async def redrive(
        self,
        subject: str,
        group: str,
        *,
        since: datetime | None = None,
        before: datetime | None = None,
        dry_run: bool = True,
        progress: Progress | None = None,
    ) -> Walked:
        """Send dead letters to their group again, as the first attempt, or only count them.

        Args:
            since, before: as for `dead_letters`.
            dry_run: only count. It is the default; say False to send them.
            progress: called with the counts so far, after each piece.
        """
        window = letters_window(await self._place(subject, group), since, before)
        return await self._walk(
            self._core.walker.reschedule(window, shift_ms_of(-KEPT), {}, dry_run=dry_run, progress=progress)
        )

    async def purge(
        self,
        subject: str,
        group: str,
        *,
        since: datetime | None = None,
        before: datetime | None = None,
        dry_run: bool = True,
        progress: Progress | None = None,
    ) -> Walked:
        """End dead letters for good, or only count them; the arguments are those of `redrive`."""
        window = letters_window(await self._place(subject, group), since, before)
        return await self._walk(self._core.walker.cancel(window, dry_run=dry_run, progress=progress))

    async def quotas(self, prefix: str = "") -> Listing[QuotaAt]:
        """List the quotas of subjects that begin with ``prefix``, one for each delay server.

        Check ``missing`` of the answer.
        """
        return await self._ask(ask.list_quotas(self._meta, prefix))

    async def set_quota(
        self,
        subject: str,
        *,
        per_second: int | None = None,
        pending: int | None = None,
        pending_bytes: int | None = None,
    ) -> None:
        """Set a subject's quota at all delay servers, in place of the one that it had; needs the secret.

        A limit that you leave out is no limit, so a call without limits lifts the quota.

        Args:
            subject: the one that it is for.
            per_second: messages that may be due in one second.
            pending: messages that may be pending.
            pending_bytes: bytes that bodies and headers of them may have.

        Raises:
            BadSetting: the quota is not set at all servers; the message names where, and why.
        """
        check_subject(subject)
        secret = self._need_secret()
        limits = dict(zip(LIMITS, (per_second, pending, pending_bytes), strict=True))
        done = await self._ask(ask.set_quota(self._meta, subject, limits, secret))
        if done.missing:
            raise BadSetting("; ".join(done.missing))

    async def close(self) -> None:
        """Disconnect. A second call does nothing."""
        engine = self._own.close()
        if engine is not None:
            await engine.close()

    async def _pause(self, subject: str, group: str, *, paused: bool) -> None:
        secret = self._need_secret()
        await self._at_each(subject, group, lambda place: ask.pause_group(place, secret, paused=paused))


@form_of(AsyncAdmin)
class Admin(Operates, BlockingClient["AdminCore"]):
    """Asks a running cluster about groups, dead letters and quotas, and decides about them. Use it with ``with``."""

    groups = blocking(AsyncAdmin.groups)
    pause = blocking(AsyncAdmin.pause)
    resume = blocking(AsyncAdmin.resume)
    rewind = blocking(AsyncAdmin.rewind)
    delete_group = blocking(AsyncAdmin.delete_group)
    dead_groups = blocking(AsyncAdmin.dead_groups)
    dead_letters = blocking_pages(blocking(AsyncAdmin.dead_letters))
    dead_letter = blocking(AsyncAdmin.dead_letter)
    retries = blocking_pages(blocking(AsyncAdmin.retries))
    redrive = blocking(AsyncAdmin.redrive)
    purge = blocking(AsyncAdmin.purge)
    quotas = blocking(AsyncAdmin.quotas)
    set_quota = blocking(AsyncAdmin.set_quota)
    close = blocking(AsyncAdmin.close)
    _pause = AsyncAdmin._pause

    def _begin(self, meta: str, settings: ProducerSettings) -> None:
        self._own = OwnEngine("admin", lambda: OnThread("delayd-admin", lambda _: AdminCore(meta, settings)))


class AdminCore(ProducerCore):
    """The connections to delay servers, in one loop."""

    def __init__(self, address: str, settings: ProducerSettings) -> None:
        super().__init__("an AsyncAdmin", address, settings)
        self.address = address


def _position(to: str | datetime | int) -> Position:
    if isinstance(to, datetime):
        return AtInstant(instant_ms(to, "to"))
    if isinstance(to, int) and not isinstance(to, bool) and to >= 0:
        return AtSequence(to)
    for end in End:
        if to == end.value:
            return end
    raise BadArgument(f'to is {to!r:.80}, and must be "earliest", "latest", an aware datetime, or a sequence')
