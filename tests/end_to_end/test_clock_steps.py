"""The wall clock of running servers is set ahead and back: never early, on time by the clock, nothing lost (T1)."""

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
from delayd.reading.books import AuditReport, audit_directory
from tests.waiting import DEADLINE_S

from .processes import ServerProcess, started
from .serve import BELIEVED_VARIABLE
from .torture_books import realtime_messages
from .wall_clock import WallClock

SECOND_MS, HOUR_MS, DAY_MS = 1_000, 3_600_000, 86_400_000
BELIEVED_AFTER_MS = 14_000  # Of the servers here.
# How late a message may be by a clock that is believed, on a machine that stands still for seconds. One that goes by a
# wrong clock is off by BELIEVED_AFTER_MS at least.
WITHIN_S = 12.0
BEFORE_HOUR_MS = 12_000  # For the operator's word, and messages before the hour ends.
BELIEVED_MS = 3_000  # A jump ahead by so much is believed at once.
BAD_WORDS = ("CRITICAL", "Traceback", "AssertionError")


class Service:
    """Three servers on one wall clock, with a producer and a consumer on the machine's."""

    def __init__(self, data: Path, wall: WallClock, servers: dict[str, ServerProcess]) -> None:
        self.data, self.wall, self.servers = data, wall, servers
        self.sent = 0
        self.came: dict[bytes, float] = {}  # Bodies, with the instant on time.monotonic().
        self._producer = Producer(servers["meta"].address)
        self._consumer = Consumer(servers["meta"].address, "orders", "billing")

    def send(self, *delays_s: float) -> dict[bytes, float]:
        """Send messages by their delay; bodies, with the instant on time.monotonic() before which none may come."""
        # A producer knows the servers' clock as of its last answer.
        self._producer.send("warm", b"", delay=timedelta())
        told: dict[bytes, float] = {}
        for delay_s in delays_s:
            body = b"message %d" % self.sent
            self.sent += 1
            told[body] = time.monotonic() + delay_s
            self._producer.send("orders", body, delay=timedelta(seconds=delay_s))
        return told

    def pull(self, seconds: float) -> None:
        """Take what comes within so many seconds."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            batch = self._consumer.pull(wait=timedelta(seconds=left_s))
            for body in batch.bodies:
                assert body not in self.came, f"{body!r} came twice"
                self.came[body] = time.monotonic()
            batch.ack()

    def expect(self, told: dict[bytes, float], *, within_s: float = WITHIN_S) -> None:
        """All of these come: not before their time, and not late."""
        deadline = max(time.monotonic(), *told.values()) + DEADLINE_S
        while not told.keys() <= self.came.keys() and time.monotonic() < deadline:
            self.pull(0.1)
        assert told.keys() <= self.came.keys(), f"never came: {told.keys() - self.came.keys()}"
        for body, due in told.items():
            late_s = self.came[body] - due
            assert 0 <= late_s < within_s, f"{body!r} came {late_s:.3f} s after it was due"

    def trust(self) -> None:
        """The operator's word, given with the command."""
        command = [sys.executable, "-m", "delayd", "clock", "--meta", self.servers["meta"].address, "--trust"]
        command += ["--data", str(self.data)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "yes" in told and "no" not in told.split(), told

    def close(self) -> None:
        self._producer.close()
        self._consumer.close()

    def check(self) -> AuditReport:
        """End all servers, audit their files: nothing lost, early or twice; and none of them complained."""
        self.close()
        for role in ("delay", "realtime", "meta"):
            assert self.servers[role].terminate() == 0
            for word in BAD_WORDS:
                assert word not in self.servers[role].log, self.servers[role].log[-4_000:]
        for delivered, claimed_at_ms in realtime_messages(self.data):
            assert claimed_at_ms >= delivered.deliver_at_ms, f"{delivered.body!r} left early"
        command = [sys.executable, "-m", "delayd", "audit", "--data", str(self.data)]
        told = subprocess.run(command, capture_output=True, text=True)
        assert told.returncode == 0, told.stdout + told.stderr
        return audit_directory(str(self.data), now_ms=time.time_ns() // 1_000_000)


@contextmanager
def running(folder: Path) -> Iterator[Service]:
    wall = WallClock(folder)
    data = folder / "data"
    with ExitStack() as stack:
        stack.enter_context(wall.preloaded())
        servers = {"meta": stack.enter_context(ServerProcess("meta", data, {"heartbeat_ms": 200, "lease_ms": 2_000}))}
        settings: dict[str, Value] = {"meta": servers["meta"].address, "checkpoint_every_ms": 1_000}
        believed = {BELIEVED_VARIABLE: str(BELIEVED_AFTER_MS)}
        servers |= {role: ServerProcess(role, data, settings, believed) for role in ("realtime", "delay")}
        stack.enter_context(started(servers["realtime"], servers["delay"]))
        yield Service(data, wall, servers)


@pytest.mark.serial
@pytest.mark.timeout(110)
def test_rule_T1_servers_whose_wall_clock_is_set_keep_every_promise(tmp_path: Path) -> None:
    # Three services at once, for two of them wait for the end of a doubt.
    with running(tmp_path / "ahead") as ahead, running(tmp_path / "back") as back, running(tmp_path / "all") as every:
        pending, jumped = ahead.send(HOUR_MS / 1000 + 5), time.monotonic()
        ahead.wall.step(HOUR_MS)
        stepped = set_back_behind_the_end_of_an_hour(back)
        ahead.expect(ahead.send(0, 0.5))
        set_by_seconds_hours_and_days(every)
        for step_ms in (-DAY_MS, DAY_MS):
            send_and_consume(back, tmp_path / f"client{step_ms}", step_ms)
        # A jump ahead is in doubt for a while. Nobody has looked since for as long as the other services took.
        believed = jumped + BELIEVED_AFTER_MS / 1000
        ahead.expect(dict.fromkeys(pending, believed), within_s=WITHIN_S + max(0.0, time.monotonic() - believed))
        while "hour_sealed" not in back.servers["delay"].log and time.monotonic() < stepped + 2 * DEADLINE_S:
            back.pull(0.2)
        assert "hour_sealed" in back.servers["delay"].log, "housekeeping goes on after the clock was set back"
        for service in (ahead, back, every):
            total = service.check().total
            assert total.early == total.lost == total.duplicate == 0


def set_by_seconds_hours_and_days(service: Service) -> None:
    """Both ways, with an operator's word after each jump ahead."""
    wall = service.wall
    service.expect(service.send(0, 0.3, 0.6))
    # A second ahead is believed at once, so what was pending comes a second sooner.
    sooner = service.send(2.0)
    wall.step(SECOND_MS)
    service.expect({body: due - 1 for body, due in sooner.items()})
    later = service.send(0.5)
    wall.step(-SECOND_MS)
    stepped = time.monotonic()
    # What was due before it may have left before, on a machine that stands still for a moment.
    service.expect({body: due + 1 if due > stepped else due for body, due in later.items()})
    for step_ms in (HOUR_MS, DAY_MS):
        held = service.send(5.0, 6.0)
        wall.step(-step_ms)
        # Nobody waits for the hour in which they are filed: they are due by the clock, and come.
        service.expect(service.send(0, 0.3, 2.0))
        assert not held.keys() & service.came.keys(), "what was pending is an hour or a day off by this clock"
        wall.step(step_ms)
        service.expect(service.send(0, 0.4))
        assert not held.keys() & service.came.keys(), "a jump ahead is not believed at once"
        service.trust()
        service.expect(dict.fromkeys(held, time.monotonic()))
        service.expect(service.send(0, 0.4))


def set_back_behind_the_end_of_an_hour(service: Service) -> float:
    """An hour ends, and before anyone has sealed it the clock is set back to the one before; when that was."""
    wall = service.wall
    wall.step(HOUR_MS - wall.now_ms() % HOUR_MS - BEFORE_HOUR_MS)
    service.trust()
    service.expect(service.send(0, 0.5))
    assert HOUR_MS - wall.now_ms() % HOUR_MS <= BEFORE_HOUR_MS, "it is in the next hour already"
    while (left_ms := HOUR_MS - wall.now_ms() % HOUR_MS) > BELIEVED_MS + SECOND_MS:
        wall.step(BELIEVED_MS)
        service.expect(service.send(0))
    # The first append in the next hour closes this one.
    service.pull(left_ms / 1000)
    service.expect(service.send(0))
    wall.step(-HOUR_MS)
    stepped = time.monotonic()
    service.expect(service.send(0, 0.5))
    return stepped


def send_and_consume(service: Service, folder: Path, step_ms: int) -> None:
    """A producer and a consumer whose own clocks are wrong, which are not asked for anything."""
    meta, clock = service.servers["meta"].address, WallClock(folder)
    clock.step(step_ms)
    began, subject = time.monotonic(), f"wrong{step_ms}"
    with clock.preloaded() as environment:
        for words in (
            ["send", subject, "body", "--in", "1s"],
            ["consume", subject, "--group", "g", "--max", "1", "--wait", "20s"],
        ):
            command = [sys.executable, "-m", "delayd", *words, "--meta", meta]
            told = subprocess.run(command, env=environment, check=True, capture_output=True)
    assert b"body" in told.stdout and time.monotonic() - began >= 1.0
