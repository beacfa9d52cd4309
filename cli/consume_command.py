"""``delayd consume``: takes due messages of a subject for a group, shows and acknowledges them.

Invariant: a message is acknowledged only after it was written out, so one that nobody could read comes again. Ctrl-C
ends a wait, and never falls between a message and its acknowledgement.
"""

import base64
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Self

import click

from delayd.batch.names import is_pattern
from delayd.client.pulling.consumer import Consumer, MessageBatch
from delayd.client.pulling.message import MessageView
from delayd.errors import BadHeaders, RetryLater
from delayd.hours import duration_text, instant_text

from .listing import printable
from .shared_options import Command, meta_option, offer_groups, offer_subjects
from .times import duration

MESSAGES = 500  # Pulled at once.
TEXT_LENGTH = 10_000  # A longer body is cut in text; raw and JSON have all of it.
REACH_MS_MIN = 5_000.0  # A server that is just restarted is waited for, whatever --wait says.
REACH_MS_MAX = 30_000.0  # Longer than it takes to restart and replay.
FOLLOW_WAIT = timedelta(seconds=5)  # How often a quiet --follow looks whether it was interrupted.

_MS = timedelta(milliseconds=1)


@click.command(cls=Command)
@click.argument("subject", shell_complete=offer_subjects)
@click.option(
    "--group",
    required=True,
    metavar="NAME",
    shell_complete=offer_groups,
    help="Consumers of one group share the messages.",
)
@click.option(
    "--tags-any", multiple=True, metavar="TAG", help="Messages with this tag or one of the others; may be given again."
)
@click.option("--tags-all", multiple=True, metavar="TAG", help="Messages with all of these tags; may be given again.")
@click.option("--max", "most", type=click.IntRange(min=1), metavar="N", help="End after so many messages.")
@click.option("--wait", type=duration, default="5s", show_default=True, help="End when none came for so long.")
@click.option("--follow", is_flag=True, help="Do not end; wait for more until Ctrl-C.")
@click.option("--no-ack", is_flag=True, help="Only look: they are offered again when their lease ends.")
@click.option(
    "--lease",
    type=duration,
    default="60s",
    show_default=True,
    help="After this, what is not acknowledged is offered again.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "raw"]),
    default="text",
    show_default=True,
    help="Text for people; JSON with one object a line; raw bodies, each followed by a line feed.",
)
@meta_option
def consume(
    subject: str,
    group: str,
    tags_any: tuple[str, ...],
    tags_all: tuple[str, ...],
    most: int | None,
    wait: timedelta,
    follow: bool,
    no_ack: bool,
    lease: timedelta,
    form: str,
    meta: str,
) -> None:
    """Take due messages and acknowledge them.

    SUBJECT may be a pattern: * stands for one word between dots, > at the end for one or more.

    A new group begins with the earliest message that the server still keeps. Each message goes to one consumer of the
    group. Its first consumer says for good which tags it wants; a later one names the same tags, or none.

    Exit codes: 0 done, also when no message came; 4 the servers could not be reached.

    $ delayd consume orders.cancel --group billing --max 10
    $ delayd consume orders.cancel --group billing --follow --format json | jq .body
    $ delayd consume orders.cancel --group look --max 5 --no-ack
    $ delayd consume 'orders.>' --group billing --follow
    $ delayd consume orders.cancel --group europe --tags-any eu --tags-any uk
    """
    write = _text_of_many if form == "text" and is_pattern(subject) else WRITERS[form]
    taken = 0
    # A call for some messages has no use for others ahead, which somebody may want. And without prefetch a pull ends
    # by an answer or an error, so that "nothing came" is never said of a server that was not reached.
    prefetch = follow and most is None and not no_ack
    reach_ms = REACH_MS_MAX if follow else min(max(wait / _MS, REACH_MS_MIN), REACH_MS_MAX)
    consumer = Consumer(
        *(meta, subject, group),
        lease=lease,
        prefetch=prefetch,
        timeout_ms=reach_ms,
        tags_any=tags_any,
        tags_all=tags_all,
    )
    with consumer, Interrupts() as interrupts:
        while most is None or taken < most:
            with interrupts.at_once():
                batch = _pull(consumer, MESSAGES if most is None else min(MESSAGES, most - taken), wait, follow)
            if not batch:
                if follow:
                    continue
                break
            for row in range(len(batch)):
                sys.stdout.buffer.write(write(batch[row]))
            sys.stdout.buffer.flush()
            if not no_ack:
                batch.ack(wait=False)
            taken += len(batch)
    if not taken:
        click.echo(f"delayd: nothing came within {duration_text(wait / _MS)}", err=True)


def _pull(consumer: Consumer, most: int, wait: timedelta, follow: bool) -> MessageBatch | None:
    try:
        return consumer.pull(most, FOLLOW_WAIT if follow else wait)
    except RetryLater as error:
        if not follow:
            raise
        click.echo(f"delayd: {error.message}; it is tried again", err=True)
        return None


def _text(message: MessageView) -> bytes:
    words = [instant_text(message.deliver_at_ms), f"late {duration_text(message.late_ms)}"]
    if message.attempt > 1:
        words.append(f"attempt {message.attempt}")
    try:
        words += [f"{name}={_shown(value)}" for name, value in message.headers.items()]
    except BadHeaders:
        words.append(f"headers that can't be decoded: {printable(message.headers_bytes)}")
    return f"{'  '.join(words)}  {printable(message.body, TEXT_LENGTH)}\n".encode()


def _text_of_many(message: MessageView) -> bytes:
    return message.subject.encode() + b"  " + _text(message)


def _raw(message: MessageView) -> bytes:
    return message.body + b"\n"


def _json(message: MessageView) -> bytes:
    found: dict[str, object] = {
        "subject": message.subject,
        "log_id": f"{message.log_id:016x}",
        "sequence": message.sequence,
        "deliver_at_ms": message.deliver_at_ms,
        "late_ms": message.late_ms,
        "attempt": message.attempt,
    }
    if message.key is not None:
        found["key"] = message.key
    try:
        found["headers"] = {name: _json_value(value) for name, value in message.headers.items()}
    except BadHeaders:
        found["headers_base64"] = base64.b64encode(message.headers_bytes).decode("ascii")
    try:
        found["body"] = message.body.decode()
    except UnicodeDecodeError:
        found["body_base64"] = base64.b64encode(message.body).decode("ascii")
    return json.dumps(found, ensure_ascii=False).encode() + b"\n"


def _shown(value: str | bytes) -> str:
    return printable(value.encode() if isinstance(value, str) else value)


def _json_value(value: str | bytes) -> str | dict[str, str]:
    return value if isinstance(value, str) else {"base64": base64.b64encode(value).decode("ascii")}


WRITERS: dict[str, Callable[[MessageView], bytes]] = {"text": _text, "json": _json, "raw": _raw}


class Interrupts:
    """Holds back KeyboardInterrupt while its `with` block runs; does nothing where SIGINT is ignored."""

    def __init__(self) -> None:
        self._heard = False
        self._at_once = False
        self._holds = False

    def __enter__(self) -> Self:
        self._holds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in here as it comes, and first what was held back."""
        self._at_once = True
        try:
            if self._heard:
                raise KeyboardInterrupt
            yield
        finally:
            self._at_once = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True
        if self._at_once:
            raise KeyboardInterrupt
