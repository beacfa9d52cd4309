"""A sealed hour is told to the operator's command also over `kill -9`, and its messages are proved to outsiders."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from delayd import Consumer, Producer
from delayd.config import Value
from delayd.machine.operating import WaitKind
from tests.waiting import DEADLINE_S

from .processes import ServerProcess, started
from .trials import Operator, tries
from .wall_clock import WallClock

HOUR_MS = 3_600_000
SWEEP_S = 30.0
# It fails until somebody mends it. Then the first run takes the lines, and is under way when the server is killed.
HOOK = (
    "[ -e {folder}/mended ] || exit 3; "
    "if [ -e {folder}/first ]; then cat >> {folder}/told; else cat > {folder}/part; echo $$ > {folder}/pid; "
    "mv {folder}/part {folder}/first; exec sleep 600; fi"
)


def delayd(*words: str) -> str:
    ran = subprocess.run([sys.executable, "-m", "delayd", *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def wait_for(path: Path, server: ServerProcess) -> str:
    end = time.monotonic() + SWEEP_S + DEADLINE_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end, server.log[-4_000:]
        time.sleep(0.1)
    return path.read_text()


@contextmanager
def running(folder: Path) -> Iterator[tuple[WallClock, dict[str, ServerProcess]]]:
    wall, data = WallClock(folder), folder / "data"
    with ExitStack() as stack:
        stack.enter_context(wall.preloaded())
        servers = {"meta": stack.enter_context(ServerProcess("meta", data, {"heartbeat_ms": 200, "lease_ms": 2_000}))}
        settings: dict[str, Value] = {"meta": servers["meta"].address, "checkpoint_every_ms": 500}
        servers["realtime"] = ServerProcess("realtime", data, settings)
        servers["delay"] = ServerProcess("delay", data, {**settings, "seal_hook": HOOK.format(folder=folder)})
        stack.enter_context(started(servers["realtime"], servers["delay"]))
        yield wall, servers


@pytest.mark.serial
@pytest.mark.timeout(200)
@tries(WaitKind.SEALS_NOT_TOLD)
def test_a_seal_is_told_again_after_kill_9_and_a_message_under_it_is_proved(tmp_path: Path) -> None:
    with running(tmp_path) as (wall, servers):
        address, data = servers["meta"].address, str(tmp_path / "data")
        with Producer(address) as producer, Consumer(address, "orders", "billing") as consumer:
            receipt = producer.send("orders", b"42", delay=timedelta(milliseconds=300), key="order-42")
            (message,) = consumer.pull(wait=timedelta(seconds=DEADLINE_S))
            message.ack()
            wall.step(HOUR_MS)
            delayd("clock", "--meta", address, "--trust", "--data", data)
            producer.send(
                "orders", b"43", delay=timedelta()
            )  # The first append in the next hour closes the one before.
        operator = Operator(address, tmp_path / "data")
        operator.until_told(WaitKind.SEALS_NOT_TOLD)
        (tmp_path / "mended").touch()
        first = wait_for(tmp_path / "first", servers["delay"])
        servers["delay"].kill()
        # The command of the life before goes on by itself: nobody may end it but who started it.
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        servers["delay"].start()
        told = wait_for(tmp_path / "told", servers["delay"])
        assert told.startswith(first)
        operator.until_gone(WaitKind.SEALS_NOT_TOLD)
        assert first.split()[3] in delayd("seals", "--data", data)
        head = delayd("tree-head", "--data", data)
        assert "NOT" not in head
        vkey = delayd("tree-head", "--data", data, "--key").strip()
        proof = tmp_path / "order-42.tlog-proof"
        proof.write_text(delayd("prove", receipt.token, "--data", data))
        shown = delayd("check-proof", str(proof), "--key", vkey, "--receipt", receipt.token)
        assert f"message {receipt.sequence} of delay server {receipt.log_id:016x} ended: dispatched" in shown
        checker = Path(__file__).parents[2] / "examples" / "check_proof.py"
        alone = subprocess.run([sys.executable, str(checker), str(proof), vkey], capture_output=True, text=True)
        assert alone.returncode == 0 and f"message {receipt.sequence} of" in alone.stdout, alone.stderr
