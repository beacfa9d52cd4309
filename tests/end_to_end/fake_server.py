"""Stands for one server under a supervisor: it listens, says that it is ready, and ends as the test tells it to.

A file ``<role>.start`` in its data directory holds the exit code with which it fails to start, ``<role>.end`` the one
with which a running one ends; each is used up. ``<role>.held`` keeps it from being ready, as damage does. ``.deaf``
makes it ignore SIGTERM, ``<role>.talk`` makes it write many lines to stderr, and at its end one more without a line
feed. ``<role>.pipes`` leaves a process behind that keeps its pipes open for LEFT_S after its end. It notes how it was
started.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

TALK_LINES = 300
LEFT_S = 3  # Longer than the supervisor waits for meta.
_LOOK_S = 0.02


def main() -> int:
    """Serve until told to end."""
    role, *options = sys.argv[1:]
    given = {name: value for name, value in pairwise(options) if name.startswith("--")}
    data = Path(given.get("--data") or Path(given["--secret-file"]).with_name("data"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN if (data / f"{role}.deaf").exists() else lambda *_: sys.exit(0))
    with (data / f"{role}.starts").open("a") as notes:
        notes.write(json.dumps([os.getpid(), *options]) + "\n")
    if (data / f"{role}.talk").exists():
        for number in range(TALK_LINES):
            print(f"line {number} {'x' * (37 * number % 9_000)}", file=sys.stderr, flush=True)
        atexit.register(lambda: os.write(2, f"last words of {role}".encode()))
    if (data / f"{role}.pipes").exists():
        atexit.register(lambda: subprocess.Popen(["sleep", str(LEFT_S)]))
    code = _told(data / f"{role}.start")
    if code is not None:
        return code
    if (data / f"{role}.held").exists():
        print(f"held {role} 127.0.0.1:{given['--port']} pid={os.getpid()}", flush=True)
        while (data / f"{role}.held").exists():
            time.sleep(_LOOK_S)
    with socket.create_server(("127.0.0.1", int(given["--port"]))) as listener:
        print(f"ready {role} 127.0.0.1:{listener.getsockname()[1]} pid={os.getpid()}", flush=True)
        while True:
            if select.select([sys.stdin], [], [], _LOOK_S)[0] and not os.read(0, 1):
                return 0
            code = _told(data / f"{role}.end")
            if code is not None:
                return code


def _told(file: Path) -> int | None:
    try:
        code = int(file.read_text())
        file.unlink()
    except (FileNotFoundError, ValueError):
        return None
    return code


if __name__ == "__main__":
    sys.exit(main())
