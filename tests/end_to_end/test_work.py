"""``delayd work`` with real servers and real processes: stops, deaths and changed files lose no message."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from delayd import Producer
from tests.end_to_end.up_process import Up, is_running, up
from tests.waiting import DEADLINE_S, wait_until

APP = """
import os, time
from datetime import timedelta
from pathlib import Path
import delayd

worker = delayd.Worker({meta!r}, drain=timedelta(seconds={drain_s}))
notes = Path({notes!r})

def note(word):
    with notes.open("a") as file:
        file.write(f"{{word}} {{os.getpid()}}\\n")

note("imported")

@worker.on({subject!r}, group="g", lease=timedelta(seconds={lease_s}))
{handler}
"""

QUICK = """
def handle(body, message):
    note(f"did {body.decode()} {message.attempt}")
"""
HANGS_FIRST = """
def handle(body, message):
    note(f"began {body.decode()} {message.attempt}")
    while message.attempt == 1 and not notes.with_name("go").exists():
        time.sleep(0.01)
    note(f"did {body.decode()} {message.attempt}")
"""
BLOCKS = """
async def handle(body):
    note(f"began {body.decode()} 1")
    while True:
        time.sleep(0.01)
"""


PAGE = Path(__file__).parents[2] / "docs" / "worker.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


class App:
    """A program with a worker, in a folder of its own, and what its handlers have noted."""

    def __init__(self, folder: Path, meta: str, subject: str) -> None:
        self.folder = folder
        self.meta = meta
        self.subject = subject
        self.notes = folder / "notes"

    def write(self, handler: str, *, drain_s: float = 30.0, lease_s: float = 60.0, subject: str | None = None) -> None:
        values = {"meta": self.meta, "notes": str(self.notes), "subject": subject or self.subject}
        text = APP.format(handler=handler, drain_s=drain_s, lease_s=lease_s, **values)
        (self.folder / "app.py").write_text(text)

    def send(self, *bodies: bytes) -> None:
        with Producer(self.meta) as producer:
            producer.send_batch(self.subject, bodies, delay=timedelta(0))

    def noted(self, begin: str) -> list[str]:
        """The lines that begin with some words, in their order."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line for line in lines if line.startswith(begin)]

    def pids(self, begin: str = "imported") -> list[int]:
        return [int(line.split()[-1]) for line in self.noted(begin)]

    def until(self, holds: Callable[[], object], what: str) -> None:
        wait_until(holds, lambda: f"{what}: {self.noted('')}\n{(self.folder / 'err').read_text()}")

    def until_noted(self, begin: str, count: int = 1) -> None:
        self.until(lambda: len(self.noted(begin)) >= count, f"{count} of {begin!r}")

    @contextmanager
    def work(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "delayd", "work", "app:worker", *options]
        with (self.folder / "err").open("ab") as errors:
            process = subprocess.Popen(command, cwd=self.folder, stdout=errors, stderr=errors)
        try:
            yield process
        finally:
            process.kill()
            process.wait(DEADLINE_S)
            self.until(lambda: not any(map(is_running, self.pids())), "all its processes have ended")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("up"), "--port", "0") as running:
        running.until_ready()
        yield running


@pytest.fixture
def app(servers: Up, tmp_path: Path) -> App:
    return App(tmp_path, servers.meta, f"work.{tmp_path.name}"[:60])


def test_the_examples_of_the_page_run(servers: Up) -> None:
    assert len(EXAMPLES) == 5
    for example in EXAMPLES:
        program = example.replace("127.0.0.1:7400", servers.meta)
        command = [sys.executable, "-W", "error", "-c", program]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert ran.returncode == 0 and not ran.stderr, f"{example}\n{ran.stdout}\n{ran.stderr}"
        assert ran.stdout, "it shows what it does"
    assert ran.stdout.count("part of 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01") == 2


RETRIES = """
def handle(body, message):
    note(f"{body.decode()} {message.attempt} {message.last_error} {message.headers.get('mine')}")
    if body == b"never":
        raise delayd.Reject("no such order")
    if message.attempt < 3:
        raise delayd.Retry(after=timedelta(milliseconds=20), error=f"busy{message.attempt}")
"""


@pytest.mark.parametrize("is_pattern", [False, True])
def test_a_message_comes_again_through_its_delay_server_with_what_its_handler_said(app: App, is_pattern: bool) -> None:
    app.write(RETRIES, subject=app.subject.replace("work.", "*.") if is_pattern else app.subject)
    with Producer(app.meta) as producer:
        producer.send(app.subject, b"again", delay=timedelta(0), headers={"mine": "yes"})
        producer.send(app.subject, b"never", delay=timedelta(0))
    with app.work() as process:
        app.until_noted("again 3")
        app.until_noted("never")
        assert ended(process) == 0
    assert [line.rpartition(" ")[0] for line in app.noted("again")] == [
        "again 1  yes",
        "again 2 busy1 yes",
        "again 3 busy2 yes",
    ]
    assert len(app.noted("never")) == 1
    assert "message_rejected" in (app.folder / "err").read_text()


def ended(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> int:
    process.send_signal(number)
    return process.wait(DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_handler_end_and_its_message_is_acknowledged(app: App, number: int) -> None:
    app.write(HANGS_FIRST)
    app.send(b"a")
    with app.work() as process:
        app.until_noted("began a")
        process.send_signal(number)
        app.until(lambda: "worker_drains" in (app.folder / "err").read_text(), "it drains")
        assert process.poll() is None
        (app.folder / "go").touch()
        assert process.wait(DEADLINE_S) == 0
    app.write(QUICK)
    app.send(b"b")
    with app.work() as process:
        app.until_noted("did b")
        assert ended(process) == 0
    assert len(app.noted("did a")) == 1, "the next worker got another message only"


def test_a_message_whose_handler_outlasts_the_drain_comes_again_as_the_same_attempt(app: App) -> None:
    app.write(HANGS_FIRST, drain_s=0.1)
    app.send(b"a")
    with app.work() as process:
        app.until_noted("began a 1")
        assert ended(process) == 0
    app.write(QUICK)
    with app.work() as process:
        app.until_noted("did a 1")
        assert ended(process) == 0


@pytest.mark.parametrize("options", [(), ("--processes", "2")])
def test_a_second_signal_ends_all_at_once(app: App, options: tuple[str, ...]) -> None:
    app.write(BLOCKS)
    app.send(b"a")
    with app.work(*options) as process:
        app.until_noted("began a")
        process.send_signal(signal.SIGTERM)
        # The same signal again would be one signal, as long as the process has not seen the first one.
        assert ended(process, signal.SIGINT) == 130


def test_a_worker_whose_loop_a_coroutine_blocks_ends_all_the_same(app: App) -> None:
    app.write(BLOCKS, drain_s=0.0)
    with (app.folder / "app.py").open("a") as file:
        file.write("\nimport delayd.worker.worker\ndelayd.worker.worker.GRACE_S = 0.2\n")
    app.send(b"a")
    with app.work() as process:
        app.until_noted("began a")
        assert ended(process) == 1
    assert "drain_overdue" in (app.folder / "err").read_text()


def test_processes_share_the_work_and_one_that_dies_is_started_again_and_its_messages_come_again(app: App) -> None:
    app.write(HANGS_FIRST, lease_s=1)
    app.send(b"a", b"b")
    with app.work("--processes", "2") as process:
        app.until_noted("imported", 2)
        app.until_noted("began", 2)
        (victim, *_) = app.pids("began a")
        os.kill(victim, signal.SIGKILL)
        app.until_noted("imported", 3)
        app.until_noted("did a 2")
        (app.folder / "go").touch()
        app.until_noted("did b")
        assert ended(process) == 0
    assert "was ended by SIGKILL; it is started again" in (app.folder / "err").read_text()


def test_the_processes_end_when_the_one_that_started_them_is_killed(app: App) -> None:
    app.write(QUICK)
    with app.work("--processes", "2") as process:
        app.until_noted("imported", 2)
        process.kill()
        app.until(lambda: not any(map(is_running, app.pids())), "both have ended")


def test_with_reload_a_changed_file_starts_the_worker_again_also_after_a_mistake(app: App) -> None:
    app.write(QUICK)
    with app.work("--reload") as process:
        app.until_noted("imported")
        (app.folder / "app.py").write_text("import delayd\nworker = delayd.Worker(\n")
        app.until(lambda: "started again when a source file changes" in (app.folder / "err").read_text(), "it waits")
        app.write(QUICK)
        app.until_noted("imported", 2)
        app.send(b"a")
        app.until_noted("did a")
        assert ended(process) == 0


def test_processes_that_can_not_import_the_worker_end_with_the_reason(app: App) -> None:
    (app.folder / "app.py").write_text("import nothing_of_this_name\n")
    with app.work("--processes", "2") as process:
        assert process.wait(DEADLINE_S) == 2
    assert "No module named 'nothing_of_this_name'" in (app.folder / "err").read_text()
