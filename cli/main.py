"""The command ``delayd``: one click group, whose commands receive what the launcher injects as ``click`` object.

Invariant: an error that a user can act on is one sentence on stderr and a documented exit code, never a traceback.
"""

from collections.abc import Sequence

import click

import delayd

from .programs import Programs


def main(programs: Programs, arguments: Sequence[str] | None = None) -> int:
    """Run one command; ``arguments`` are those of the process unless given. Returns the exit code."""
    try:
        result: object = commands.main(arguments, prog_name="delayd", obj=programs, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("delayd: stopped", err=True)
        return 130  # What a shell reports for a program that Ctrl-C ended.
    return result if isinstance(result, int) else 0


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(delayd.__version__, prog_name="delayd")
def commands() -> None:
    """Holds messages until they are due and delivers each of them once, on time."""
