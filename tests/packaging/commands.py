"""Commands that tests of packaging run, and what they print."""

import subprocess
import sys
from pathlib import Path

import delayd

REPOSITORY = Path(delayd.__file__).parents[1]
DEADLINE_S = 110.0


def run(*command: str, folder: Path = REPOSITORY) -> str:
    """Run a command to its end, which is to be a good one; what it wrote to stdout."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, kind: str, target: Path) -> Path:
    """Build one distribution, ``--wheel`` or ``--sdist``, with the build backend of this environment."""
    run(sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", str(target), str(source))
    (built,) = target.iterdir()
    return built
