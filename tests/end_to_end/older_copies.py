"""Copies of servers' folders as operators make them by hand, and an older copy put in the place of a server."""

import shutil
from pathlib import Path

from tests.end_to_end.cluster import Cluster, log_id_of, until_away
from tests.end_to_end.processes import ServerProcess


def copy_of(data: Path, role: str, target: Path) -> None:
    """What `cp -a` of one server's folder leaves."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(data / role, target / role, dirs_exist_ok=True)


def backed_up(production: Cluster, backup: Path, *roles: str) -> None:
    """Deliver something, copy the folders of stopped servers as an operator would, and deliver more."""
    production.send("1", "2")
    assert production.consumed(2) == ["1", "2"]
    for role in roles:
        server: ServerProcess = getattr(production, role)
        assert server.terminate() == 0
        copy_of(production.data, role, backup)
        server.start()
    production.send("3", "4", "5")
    assert production.consumed(3) == ["3", "4", "5"]
    production.send("6")
    assert production.consumed(1) == ["6"]


def restore(production: Cluster, backup: Path, role: str, *, over: bool = False) -> None:
    """Put a copy in the place of a server's folder, or ``over`` its files when its lease has ended, and start it."""
    server: ServerProcess = getattr(production, role)
    log_id = log_id_of(production, role)
    server.kill()
    if over:
        until_away(production, log_id)
    else:
        shutil.rmtree(production.data / role)
    shutil.copytree(backup / role, production.data / role, dirs_exist_ok=over)
    server.start()
