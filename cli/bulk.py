"""Messages of a window in bulk: counted first, then cancelled or moved, with progress and a true account."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple, Protocol

import click

from delayd.client.asking.walking import Walked
from delayd.client.instants import utc
from delayd.errors import DelaydError

from .exits import NOT_BALANCED, OK, TRY_LATER
from .listing import progress
from .options import bundle, confirm, from_option, to_option
from .times import check_order

ASKS_FROM = 1_001  # So many messages and more are not ended or moved without a question.


class Walk(Protocol):
    """`Producer.cancel_where`, or what moves messages."""

    def __call__(self, *, dry_run: bool, progress: Callable[[Walked], object] | None) -> Walked: ...


class Wording(NamedTuple):
    """How a command says what it does to messages."""

    done: str  # "cancelled 3 messages"
    cost: str  # "3 messages of orders.cancel ..."
    goes_on: bool = False  # Whether it goes on by a word that it tells when it was interrupted.


class Due(NamedTuple):
    """A window of instants, as walks take it; None sets no bound."""

    since: datetime | None
    before: datetime | None

    @classmethod
    def of(cls, from_ms: int | None, to_ms: int | None) -> Due:
        """Take the options of a command."""
        check_order(from_ms, to_ms)
        return cls(None if from_ms is None else utc(from_ms), None if to_ms is None else utc(to_ms))


due_options = bundle("due", Due.of, from_option, to_option)


def in_bulk(subject: str, walk: Walk, wording: Wording, *, dry_run: bool, yes: bool) -> int:
    """Count, ask, and do; the exit code."""
    walked = walk(dry_run=True, progress=None)
    if dry_run or not walked.found:
        click.echo(f"{walked.found:,} messages of {subject} are pending there")
        return _code_of(walked)
    if walked.found >= ASKS_FROM:
        confirm(f"{walked.found:,} messages of {subject} {wording.cost}", yes)
    walked = walk_all(walk, wording, walked.found)
    click.echo(f"{wording.done} {walked.done:,} messages of {subject}")
    return _code_of(walked)


def walk_all(walk: Walk, wording: Wording, found: int) -> Walked:
    """Do it, with progress; stderr says how much is done if it is interrupted."""
    with progress("messages", found) as advance:
        last = Walked()

        def told(so_far: Walked) -> None:
            nonlocal last
            advance(so_far.done - last.done)
            last = so_far

        try:
            return walk(dry_run=False, progress=told)
        except (KeyboardInterrupt, DelaydError) as error:
            servers = error.details.get("servers") if isinstance(error, DelaydError) else None
            if isinstance(servers, str):
                click.echo(f"delayd: not all is done at the delay servers {servers}", err=True)
            rest = f"; to go on, say it again with --resume {last.resume}" if wording.goes_on and last.resume else ""
            click.echo(f"delayd: {last.done:,} messages are {wording.done} so far{rest}", err=True)
            raise


def _code_of(walked: Walked) -> int:
    if walked.ended:
        click.echo(f"delayd: {walked.ended:,} were handed over or ended meanwhile", err=True)
    if walked.in_flight:
        click.echo(f"delayd: {walked.in_flight:,} are being handed over: say it again", err=True)
    return told_unread(walked.unread) or (TRY_LATER if walked.in_flight else OK)


def told_unread(unread: int) -> int:
    """The exit code of a walk that met so many files which can't be read; stderr says so."""
    if not unread:
        return OK
    click.echo("delayd: files of hours could not be read, so messages may be missing; see `delayd status`", err=True)
    return NOT_BALANCED
