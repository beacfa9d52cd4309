"""The container: its recipe names what exists, and its commands do here what they are to do there.

No container is built: the instructions are read, and what they copy, start, ask and signal is tried in an environment
that has the wheel and what it requires.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import zipfile
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from delayd.address import META_PORT
from delayd.config import DELAY_PORT, GATEWAY_PORT, REALTIME_PORT
from tests.end_to_end.up_process import Up, watched
from tests.packaging.commands import REPOSITORY, build

DATA = "/var/lib/delayd"
STEPS = ["ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"]


class Step(NamedTuple):
    """One instruction, on one line."""

    name: str
    rest: str


def steps() -> list[Step]:
    text = re.sub(r"^\s*#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Step(*line.split(" ", 1)) for line in lines if line]


def only(name: str, containing: str = "") -> str:
    """The rest of an instruction that stands there once."""
    (rest,) = (step.rest for step in steps() if step.name == name and containing in step.rest)
    return rest


def sources() -> list[str]:
    """What is copied from the repository."""
    copied = [step.rest.split()[:-1] for step in steps() if step.name == "COPY" and "--from=" not in step.rest]
    return [name for names in copied for name in names]


def test_the_recipe_has_two_stages_and_no_instruction_that_is_not_known() -> None:
    assert {step.name for step in steps()} <= {*STEPS, "ENTRYPOINT", "CMD"}
    assert [step.rest for step in steps() if step.name == "FROM"] == [
        "python:${PYTHON}-slim AS build",
        "python:${PYTHON}-slim",
    ]
    assert only("ARG") == "PYTHON=3.11"


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    ignore = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    sent = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert sent == set(sources())
    assert all((REPOSITORY / name).exists() for name in sources())
    assert "**/__pycache__" in ignore


def test_what_is_copied_is_all_that_the_wheel_is_made_from(wheel: Path, tmp_path: Path) -> None:
    for name in sources():
        source, target = REPOSITORY / name, tmp_path / "src" / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    built = build(tmp_path / "src", "--wheel", tmp_path / "dist")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(built) as second:
        assert set(first.namelist()) == set(second.namelist())


def test_it_runs_as_a_user_of_its_own_with_its_data_in_a_volume() -> None:
    text = "\n".join(step.rest for step in steps())
    assert (
        only("USER") == "delayd"
        and f"--home-dir {DATA}" in text
        and f"install -d -o delayd -g delayd -m 0750 {DATA}" in text
    )
    assert only("VOLUME") == DATA
    assert only("EXPOSE") == f"{META_PORT} {DELAY_PORT} {REALTIME_PORT} {GATEWAY_PORT}"
    assert only("ENV") == f"PATH=/opt/delayd/bin:$PATH DELAYD_SECRET_FILE={DATA}/cluster.secret"


def test_its_command_serves_is_healthy_and_stops_at_its_signal(gateway_environment: Path, tmp_path: Path) -> None:
    words = json.loads(only("ENTRYPOINT")) + json.loads(only("CMD"))
    assert words[0] == "delayd" and words[words.index("--data") + 1] == DATA
    assert only("RUN", containing="pip install").endswith(' ".[gateway]"'), "what this environment has"
    # Tests listen on loopback only, and on ports that are free.
    here = {"delayd": str(gateway_environment / "bin" / "delayd"), DATA: "data", "0.0.0.0": "127.0.0.1"}
    command = [here.get(word, word) for word in words] + ["--port", "0"]
    with watched(command, tmp_path, tmp_path) as running:
        # A server registers with meta a moment after it is ready.
        running.until(lambda: is_healthy(gateway_environment, running), "all serve and are known")
        running.until_ready()
        assert running.ready("gateway"), (running.lines, running.errors)
        with urlopen(f"http://{running.ready('gateway')[0].endpoint}/healthz") as answer:
            assert answer.status == 200
        realtime = running.ready("realtime")[0].pid
        os.kill(realtime, signal.SIGSTOP)
        running.until(lambda: not is_healthy(gateway_environment, running), "a server that hangs is noticed")
        os.kill(realtime, signal.SIGCONT)
        running.until(lambda: is_healthy(gateway_environment, running), "it is well again")
        assert running.end(signal.Signals[only("STOPSIGNAL")]) == 0
        assert not is_healthy(gateway_environment, running)


def is_healthy(environment: Path, running: Up) -> bool:
    """Run the health check as a container's shell would."""
    options, _, command = only("HEALTHCHECK").partition("CMD ")
    assert re.fullmatch(r"(--(interval|timeout|start-period|retries)=\d+s? )+", options)
    place = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "DELAYD_META": running.meta}
    done = subprocess.run(["sh", "-c", command], env={**os.environ, **place}, stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0
