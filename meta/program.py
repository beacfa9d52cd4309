"""The program ``delayd meta``."""

from __future__ import annotations

from functools import partial

from delayd.config import MetaConfig
from delayd.net.program import run_program

from .server import MetaService


def run(config: MetaConfig) -> int:
    """Serve until told to stop; returns the exit code of the process (see delayd.net.program)."""
    return run_program(
        config.role,
        partial(MetaService, config),
        folder=config.folder,
        exit_with_stdin=config.exit_with_stdin,
        admin=config.admin,
    )
