"""``delayd completion``: the script that has a shell complete command lines.

Invariant: what is offered costs a shell's user less than half a second and never a line of output.
"""

import click
from click.shell_completion import ShellComplete, get_completion_class

from delayd.errors import BadArgument

from .options import Command

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
