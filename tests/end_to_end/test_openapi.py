"""What a gateway does is what its OpenAPI document says: schemathesis asks a real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.gateways import gateway_of
from tests.end_to_end.processes import ServerProcess

# A request that fits its schema may still be refused: a message has one of four instants, a token has a checksum.
LEFT_OUT = "positive_data_acceptance"
ENDLESS = "follow"
HOOKS = "tests.end_to_end.openapi_hooks"


@pytest.mark.parametrize(
    ("examples", "requests_min"),
    [
        pytest.param(3, 50, marks=pytest.mark.timeout(300)),
        pytest.param(600, 20_000, marks=[pytest.mark.long, pytest.mark.timeout(7_200)]),
    ],
)
def test_answers_are_as_the_document_says(tmp_path: Path, examples: int, requests_min: int) -> None:
    with (
        ServerProcess("meta", tmp_path) as meta,
        ServerProcess("realtime", tmp_path, {"meta": meta.address}),
        ServerProcess("delay", tmp_path, {"meta": meta.address}),
        gateway_of(meta.address, tmp_path, "--secret-file", str(next(tmp_path.rglob("cluster.secret")))) as gateway,
    ):
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{gateway.port}/v1/openapi.json"]
        command += ["--phases", "fuzzing" if examples < 100 else "coverage,fuzzing", "--max-examples", str(examples)]
        command += ["--exclude-checks", LEFT_OUT, "--exclude-operation-id", ENDLESS, "--warnings", "off"]
        command += ["--suppress-health-check", "all", "--continue-on-failure", "--no-color", "--request-timeout", "60"]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False, timeout=7_000
        )
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
        made = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        assert made is not None and int(made[1]) == int(made[2]) >= requests_min, done.stdout[-2_000:]
        assert " ERROR " not in gateway.log, gateway.log
