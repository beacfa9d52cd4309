"""The commands that a server names in its `waits`, and in errors: each of them can be typed as it stands."""

from __future__ import annotations

import re
import shlex

import click

from cli.main import commands

COMMAND = re.compile(r"delayd(?: -*\w(?:[\w./,:-]*\w)?)+")
A_SERVER = ("delay", "realtime", "meta")  # To start one, an operator knows more than any server does.


def commands_in(text: str) -> list[list[str]]:
    """The words of each command that a text names, without `delayd`.

    A text that goes on behind a command sets it off by a comma, a semicolon or a colon.
    """
    found: list[list[str]] = []
    for words in COMMAND.findall(text):
        command = shlex.split(words)[1:]
        if command[0] not in A_SERVER:
            found.append(command)
    return found


def check_commands(text: str) -> None:
    """Each command that a text names has all of its arguments; AssertionError when one can't be run as it stands."""
    for words in commands_in(text):
        group: click.Command = commands
        rest = words
        context = click.Context(commands, info_name="delayd")
        while isinstance(group, click.Group) and rest:
            found = group.get_command(context, rest[0])
            assert found is not None, f"there is no command {' '.join(words)} ({text})"
            group, rest = found, rest[1:]
        try:
            group.make_context(words[0], [*rest], parent=context)
        except click.ClickException as error:
            raise AssertionError(
                f"`delayd {' '.join(words)}` can't be run: {error.format_message()} ({text})"
            ) from error
