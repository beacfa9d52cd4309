"""One secret for all servers of a test, and connections that have proved it, as servers and operators have."""

import os
from pathlib import Path

from delayd.address import Endpoint
from delayd.machine.operating import Fence
from delayd.net.connection import Connection, Handler
from delayd.net.entry import connect
from delayd.net.trust import Membership, prove
from delayd.secret import SECRET_FILE, Secret
from delayd.testing.state import MemoryState

KEY = bytes(range(32))
SECRET = Secret(KEY, SECRET_FILE)
PROOF_MS_MAX = 10_000


def put_secret(data: Path) -> Path:
    """Put the secret where a server of this directory looks for it, unless it has one."""
    path = data / SECRET_FILE
    if not path.exists():
        data.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(KEY.hex() + "\n")
    return path


def put_secrets(path: Path, *keys: bytes) -> None:
    """Put a file with these secrets in the place of another one, as an operator does."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{key.hex()}\n" for key in keys))
    new.chmod(0o600)
    new.replace(path)


def membership() -> Membership:
    """A server that has not met its meta yet."""
    return Membership(SECRET, MemoryState(), "state.lmdb", 5, Fence("delay", 1))


async def connect_trusted(host: str, port: int, handler: Handler | None = None) -> Connection:
    """A connection of a server or an operator."""
    connection = await connect(Endpoint(host, port), handler)
    await prove(connection, SECRET, 0, PROOF_MS_MAX)
    return connection
