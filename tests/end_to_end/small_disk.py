"""Small file systems of their own, for tests that fill them."""

import shutil
import subprocess
from pathlib import Path

import pytest

# In namespaces of its own nobody needs to be root to mount, and mount and servers are gone with the process.
PRIVATE = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]


def private_mounts(folder: Path) -> None:
    """Skip where a test may not mount anything, not even for itself."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare command: a test can't have a small file system of its own")
    told = subprocess.run([*PRIVATE, "mount", "-t", "tmpfs", "none", str(folder)], capture_output=True, text=True)
    if told.returncode:
        pytest.skip(f"this kernel lets nobody mount in a namespace of his own: {told.stderr.strip()}")
