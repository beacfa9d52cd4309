"""``delayd status`` on real servers: what it shows, and the exit code that a script reads."""

import errno
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path

import pytest

import delayd
from tests.unit.cli.runner import Ran, run
from tests.waiting import DEADLINE_S, holds_once, wait_until

from .cluster import COMMAND_EVERY_S, cluster
from .up_process import Up, up

_DELAYD = (sys.executable, "-m", "delayd")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Up]:
    with up(tmp_path, "--port", "0") as running:
        yield running.until_ready()


def status(servers: Up) -> Ran:
    return run("status", "--meta", servers.meta)


def until_code(servers: Up, code: int, *said: str) -> str:
    """Ask until it exits so and says all that; what it wrote."""
    asked: list[Ran] = []

    def holds() -> bool:
        asked.append(status(servers))
        return asked[-1].code == code and all(words in asked[-1].out for words in said)

    wait_until(holds, lambda: asked[-1], every_s=COMMAND_EVERY_S)
    return asked[-1].out


def test_all_is_well_with_three_servers(servers: Up) -> None:
    assert run("send", "orders", "b", "--at", "now", "--meta", servers.meta).code == 0
    out = until_code(servers, 0, "all is well", "1 taken, 0 acknowledged since its start")
    for role in ("meta", "delay", "realtime"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{role} ")]
        ready = servers.ready(role)[-1]
        assert str(ready.endpoint) in line and " yes " in line and " as here " in line
    found = json.loads(run("status", "--meta", servers.meta, "--format", "json").out)
    assert found["well"] is True and found["waits"] == found["refuses"] == []
    assert [each["pid"] for each in found["servers"]] == [
        servers.ready(role)[-1].pid for role in ("meta", "delay", "realtime")
    ]


def test_a_server_that_is_gone_and_what_waits_for_it_are_shown_with_what_helps(servers: Up) -> None:
    assert run("send", "orders", "b", "--at", "now", "--meta", servers.meta).code == 0
    until_code(servers, 0, "1 taken")
    os.kill(servers.process.pid, signal.SIGSTOP)  # So that nobody starts it again.
    try:
        servers.kill("realtime")
        assert run("send", "orders", "b", "--at", "now", "--meta", servers.meta).code == 0
        out = until_code(
            servers, 3, "1 due message for realtime server", "1 target away", "things wait for an operator"
        )
        assert "\n    -> " in out and "delayd server forget" in out
        found = json.loads(run("status", "--meta", servers.meta, "--format", "json").out)
        assert found["well"] is False and [each["serves"] for each in found["servers"]] == [True, True, False]
        assert {wait["server"].split()[0] for wait in found["waits"]} == {"delay", "realtime"}
        assert all(wait["what"] and wait["why"] and wait["command"] for wait in found["waits"])
    finally:
        os.kill(servers.process.pid, signal.SIGCONT)
    until_code(servers, 0, "all is well")


def test_a_server_that_hangs_is_named_and_the_others_are_shown(servers: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for those that serve on a busy machine; nobody should wait for ten seconds here.
    monkeypatch.setattr("delayd.client.asking.ask.ANSWER_MS", 3_000)
    until_code(servers, 0)  # A server is ready before meta knows it.
    pid = servers.ready("delay")[-1].pid
    os.kill(pid, signal.SIGSTOP)

    def is_named() -> None:
        found = status(servers)
        assert found.code == 3 and "gave no answer" in found.out
        assert [line.split()[3] for line in found.out.splitlines()[2:5]] == ["yes", "no", "yes"]

    try:
        # Another one gives no answer in time, either, when the machine stands still.
        holds_once(is_named)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_disk_at_its_reserve_waits_for_an_operator(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[delay]\nfree_bytes_far = 70368744177664\nfree_bytes_all = 70368744177664\n")
    with up(tmp_path, "--port", "0", "--config", str(tmp_path / "c.toml")) as servers:
        # Until meta has heard of the delay server, that is the one thing that waits.
        reserve = "all sends: free disk space is at its reserve"
        out = until_code(servers.until_ready(), 3, reserve, "1 thing waits for an operator")
        assert "-> free space on its disk" in out


def test_without_meta_it_exits_with_4(servers: Up) -> None:
    meta = servers.meta
    servers.end()
    found = run("status", "--meta", meta)
    assert found.code == 4 and "no meta server answers" in found.err and not found.out


def test_one_server_can_be_asked_while_meta_is_away(servers: Up) -> None:
    until_code(servers, 0)
    pid = servers.ready("meta")[-1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        for role in ("delay", "realtime"):
            ready = servers.ready(role)[-1]
            found = run("status", "--server", str(ready.endpoint), "--meta", "127.0.0.1:1")
            assert found.code == 0 and "all is well" in found.out, found
            assert [line.split()[0] for line in found.out.splitlines()[2:3]] == [role]
    finally:
        os.kill(pid, signal.SIGCONT)
    away = run("status", "--server", "127.0.0.1:1")
    assert away.code == 4 and "127.0.0.1:1" in away.err


def test_all_that_is_pending_and_free_and_kept_is_shown_and_for_whom(servers: Up) -> None:
    sent = ("send", "far", "--lines", "--meta", servers.meta)
    for when in ("2s", "300d", "700d"):
        assert run(*sent, "--in", when, stdin=b"x\n" * 5).code == 0
    assert run("send", "orders", "b", "--at", "now", "--meta", servers.meta).code == 0
    read = ("consume", "orders", "--group", "billing", "--max", "1", "--meta", servers.meta)
    assert run(*read).code == 0
    assert run("send", "orders", "c", "--at", "now", "--meta", servers.meta).code == 0
    out = until_code(servers, 0, " 10 pending", "7 taken", "for billing of orders")
    assert " free" in out and " kept, since " in out
    found = json.loads(run("status", "--meta", servers.meta, "--format", "json").out)
    delay, realtime = found["servers"][1:]
    assert delay["counters"]["pending"] == 10 and delay["counters"]["free_bytes"] > 0
    assert (realtime["kept_for"]["subject"], realtime["kept_for"]["group"]) == ("orders", "billing")
    servers.kill("delay")
    # A restart forgets none of them, and its log has the same figure.
    until_code(servers, 0, " 10 pending")
    assert servers.errors.rpartition(" recovered ")[2].partition(" pending=")[2].startswith("10 not_filed=")


def test_dead_letters_that_are_kept_are_counted_whatever_started_again(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        place = ("--meta", production.meta.address)
        with delayd.Producer(production.meta.address) as producer:
            first, *_ = [
                producer.send("s", b"%d" % at, delay=timedelta(0), tags=["eu", f"tag-{at}"]) for at in range(6)
            ]
        with delayd.Consumer(production.meta.address, "s", group="g") as consumer:
            for message in islice(consumer, 6):
                if message.body == b"5":
                    message.nack(timedelta(days=300))
                else:
                    message.reject("it is no order")

        def says(count: str) -> None:
            wait_until(
                lambda: f", {count}" in run("status", *place).out, f"the line says {count}", every_s=0.1, within_s=30
            )

        says("5 dead letters")
        # Neither a restart of who made them forgets one, nor a kill of who keeps them, filed or not.
        assert production.realtime.terminate() == 0
        production.realtime.start()
        for ends in (production.delay.kill, production.delay.terminate, production.delay.kill):
            ends()
            production.delay.start()
            says("5 dead letters")
        # What ends one counts it off: it is given out again, or nobody gets it any more.
        with delayd.Admin(production.meta.address) as admin:
            with delayd.Producer(production.meta.address) as producer:
                assert producer.cancel("s", receipt=first, group="g") is delayd.CancelAnswer.CANCELLED
            says("4 dead letters")
            assert admin.redrive("s", "g", dry_run=False).found == 4
        with delayd.Consumer(production.meta.address, "s", group="g") as consumer:
            for _ in range(3):
                next(consumer).ack()
            next(consumer).reject("it is no order either")
        says("1 dead letter")
        assert run("dead", "purge", "s", "g", "--yes", *place).code == 0
        wait_until(lambda: "dead letter" not in run("status", *place).out, "none is left", every_s=0.1)


def test_a_send_that_waits_says_for_whom(servers: Up) -> None:
    until_code(servers, 0)
    delay = servers.ready("delay")[-1]

    def is_said() -> None:
        until_code(servers, 0)
        os.kill(delay.pid, signal.SIGSTOP)
        try:
            ran = run("send", "orders", "b", "--in", "1s", "--timeout", "2500ms", "--meta", servers.meta)
        finally:
            os.kill(delay.pid, signal.SIGCONT)
        assert ran.code == 4
        said = f"delayd: waiting for the delay server at {delay.endpoint}, which is alive and has not answered"
        assert ran.err.startswith(said)

    # Nothing is heard of it within the limit when the machine stands still.
    holds_once(is_said)


def test_listings_of_servers_fit_a_terminal_of_80_columns_and_one_of_40(servers: Up) -> None:
    assert run("send", "orders.cancel-unpaid", "b", "--at", "now", "--meta", servers.meta).code == 0
    until_code(servers, 0, "all is well", "1 taken")
    options = ("--meta", servers.meta, "--data", str(servers.data))
    for words in (("status",), ("servers",), ("subjects",), ("groups",), ("clock",), ("target", "list")):
        given = options if words == ("target", "list") else options[:2]
        for width in (80, 40):
            lines = on_terminal(width, *words, *given)
            assert lines and max(map(len, lines)) <= width, lines


def on_terminal(width: int, *words: str) -> list[str]:
    """The lines that a command writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, width))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen([*_DELAYD, *words], stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 65_536):
                written += piece
        except OSError as error:
            # A terminal gives this error when no process holds its other side any more.
            assert error.errno == errno.EIO
        os.close(ours)
        process.wait(DEADLINE_S)
    return written.decode().split("\r\n")
