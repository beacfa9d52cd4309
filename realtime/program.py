"""The realtime server as a program."""

from functools import partial

from delayd.config import RealtimeConfig
from delayd.net.program import run_program

from .server import RealtimeServer


def run(config: RealtimeConfig) -> int:
    """Serve until told to stop; returns the exit code of the process."""
    return run_program(
        config.role, partial(RealtimeServer, config), folder=config.folder, exit_with_stdin=config.exit_with_stdin
    )
