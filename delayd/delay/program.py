"""The program ``delayd delay``."""

from functools import partial

from delayd.config import DelayConfig
from delayd.delay.server import DelayServer
from delayd.net.program import run_program


def run(config: DelayConfig) -> int:
    """Serve until told to stop; returns the exit code of the process (see delayd.net.program)."""
    return run_program(
        config.role,
        partial(DelayServer, config),
        folder=config.folder,
        exit_with_stdin=config.exit_with_stdin,
        admin=config.admin,
    )
