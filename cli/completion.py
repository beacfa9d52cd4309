"""``delayd completion``: the script that has a shell complete command lines, and the names that a shell offers then.

Invariant: an offer is quick and silent: it costs less than half a second and never a line of output. A server that is
away, slow or unreadable means that there is nothing to offer.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime

import click
from click.shell_completion import ShellComplete, get_completion_class

from delayd.client.asking import ask
from delayd.errors import BadArgument, DelaydError
from delayd.hours import hour_from_name, hour_start_ms
from delayd.wire.consuming import read_groups
from delayd.wire.frame import Head
from delayd.wire.meta import read_subject_page
from delayd.wire.requests import RequestType

from .shared_options import Command

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_DELAYD_COMPLETE"  # Click looks for it by this name; the scripts set it.


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that has a shell complete delayd's command lines.

    Commands, options and their choices are completed, and so are subjects and groups when meta answers at once
    (--meta or DELAYD_META), and the hours of --from and --to that have a schedule log in the directory of --data.

    $ delayd completion bash > /etc/bash_completion.d/delayd
    $ delayd completion zsh > ~/.zfunc/_delayd
    $ delayd completion fish > ~/.config/fish/completions/delayd.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise BadArgument(f"this version of click has no completion for {shell}; upgrade click")
    # `source` of the class for bash starts a bash to look at its version; the script itself needs none.
    script = ShellComplete.source(kind(click.Group(), {}, "delayd", VARIABLE))
    click.echo(script)


WAIT_S = 0.4  # Somebody has pressed a key and waits; a server on the same network answers within some milliseconds.
OFFERS_MAX = 100  # More names are of no use on a screen; the next letter makes them fewer.
WORDS = ("now", "-1h", "-24h", "-7d", "+1h", "+24h", "+7d")


def subjects(meta: str, begin: str) -> list[str]:
    """Subjects that begin with ``begin``, as meta knows them."""
    return _ask(lambda: _subjects(meta, begin))


def groups(meta: str, subject: str | None, begin: str) -> list[str]:
    """Groups that begin with ``begin``, of one subject or of all."""
    return _ask(lambda: _groups(meta, subject, begin))


def instants(data: str, begin: str) -> list[str]:
    """Words for an instant; once a digit is typed, the hours that the schedule logs below ``data`` are of."""
    found = [word for word in WORDS if word.startswith(begin)]
    if begin[:1].isdigit():
        hours: set[int] = set()
        for folder in (data, *(os.path.join(data, name) for name in _names(data) if name.startswith("delay"))):
            for day in _names(os.path.join(folder, "schedule")):
                hours |= set(_hours(_names(os.path.join(folder, "schedule", day))))
        found += [text for text in map(_text, sorted(hours)) if text.startswith(begin)]
    return found[:OFFERS_MAX]


def _ask(names: Callable[[], Coroutine[object, object, list[str]]]) -> list[str]:
    async def within() -> list[str]:
        async with asyncio.timeout(WAIT_S):
            return await names()

    try:
        return asyncio.run(within())
    except (DelaydError, TimeoutError, OSError):
        return []  # An error would be written across the line that somebody types.


async def _subjects(meta: str, begin: str) -> list[str]:
    async with ask.meta(meta) as connection:
        head: Head = {"prefix": begin, "after": "", "limit": OFFERS_MAX}
        page, _ = read_subject_page(await ask.ask(connection, RequestType.META_SUBJECTS, head))
        return [name for name, _ in page]


async def _groups(meta: str, subject: str | None, begin: str) -> list[str]:
    async with ask.meta(meta) as connection:
        servers = await ask.known_servers(connection, "realtime")
    found: set[str] = set()
    for server in servers:
        if server.alive:
            async with ask.reached(server) as connection:
                head: Head = {"subject": subject, "after": ["", ""], "limit": OFFERS_MAX}
                page, _ = read_groups(await ask.ask(connection, RequestType.GROUPS, head))
                found |= {info.group for info in page if info.group.startswith(begin)}
    return sorted(found)[:OFFERS_MAX]


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _hours(names: list[str]) -> Iterator[int]:
    for name in names:
        try:
            yield hour_from_name(name.removesuffix(".log"))
        except BadArgument:
            continue  # Not a file of delayd's.


def _text(hour: int) -> str:
    # Without minutes: a shell may end a word at a colon.
    return datetime.fromtimestamp(hour_start_ms(hour) / 1000, UTC).strftime("%Y-%m-%dT%HZ")
