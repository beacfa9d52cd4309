"""The supervisor, with fakes in the place of servers: what starts, what is started again, and how all of it ends."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.waiting import DEADLINE_S

from .fake_server import TALK_LINES
from .up_process import Up, is_running, up, up_command, watched

_ROLES = ("meta", "delay", "realtime")
HOLD = """
import sys, time
from delayd.machine.disk import RealDisk
from delayd.machine.identity import mark_stopping
lock = RealDisk().lock(sys.argv[1], sys.argv[2])
mark_stopping(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def four_ports() -> int:
    """The first of four free ports in a row, below those that a system gives to whoever asks for any."""
    while True:
        port = random.randrange(10_000, 32_000)
        with ExitStack() as stack, suppress(OSError):
            for number in range(4):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + number))
            return port


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Up]:
    with up(tmp_path, "--port", "0", fakes=True) as running:
        yield running.until_ready()


@pytest.fixture
def running_servers(tmp_path: Path) -> Iterator[Up]:
    with up(tmp_path, "--port", "0") as running:
        yield running.until_ready()


def _starts(running: Up, role: str) -> list[list[str]]:
    notes = running.data / f"{role}.starts"
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def _option(start: list[str], name: str) -> str:
    return start[start.index(name) + 1]


def _until_ready_again(running: Up, role: str, count: int) -> None:
    running.until(lambda: len(running.ready(role)) == count, f"the {role} server serves for the time {count}")


def _tell(running: Up, role: str, what: str, code: int) -> None:
    (running.data / f"{role}.{what}").write_text(str(code))


def test_each_server_says_that_it_is_ready_and_then_all_are(running: Up) -> None:
    assert running.lines[0].startswith("ready meta 127.0.0.1:")
    assert {line.split()[1] for line in running.lines[1:3]} == {"delay", "realtime"}
    assert running.lines[3:] == ["ready"]


def test_stderr_says_where_all_is_and_how_to_stop(running: Up) -> None:
    meta, delay, realtime = (f"127.0.0.1:{running.ready(role)[0].endpoint.port}" for role in _ROLES)
    running.until(lambda: " stops all; " in running.errors, "it has said all")
    said = running.errors
    assert f"delayd: meta is at {meta}, which producers and consumers are given; the " in said
    assert f"the delay server at {delay}" in said and f"the realtime server at {realtime}" in said
    assert f"delayd: the data is in {running.data}\n" in said
    assert f"`kill {running.process.pid}` stops all; to try it: delayd send hello world --in 5s --meta {meta}\n" in said


def test_a_setting_that_no_server_takes_starts_none(tmp_path: Path) -> None:
    (tmp_path / "delayd.toml").write_text("[realtime]\nlease_ms = 1\n")
    for options in (["--config", str(tmp_path / "delayd.toml")], ["--host", "0.0.0.0"], ["--config", "/no/file"]):
        with up(tmp_path, "--port", "0", *options, fakes=True) as running:
            assert running.process.wait(30) == 2
            assert running.lines == [] and running.errors.count("\n") == 1, running.errors


def test_the_others_are_told_where_meta_is(running: Up) -> None:
    meta = running.ready("meta")[0]
    for role in ("delay", "realtime"):
        assert _option(_starts(running, role)[0], "--meta") == f"127.0.0.1:{meta.endpoint.port}"


def test_those_that_register_are_told_under_which_host_they_are_reached(tmp_path: Path) -> None:
    with up(tmp_path, "--port", "0", "--advertise-host", "node-1", fakes=True) as running:
        running.until_ready()
        for role in ("delay", "realtime"):
            assert _option(_starts(running, role)[0], "--advertise-host") == "node-1"
        assert "--advertise-host" not in _starts(running, "meta")[0]


def test_ports_follow_that_of_meta(tmp_path: Path, four_ports: int) -> None:
    with up(tmp_path, "--port", str(four_ports), fakes=True) as running:
        running.until_ready()
        assert [running.ready(role)[0].endpoint.port for role in _ROLES] == [four_ports + index for index in range(3)]


def test_servers_are_measured_at_neighbouring_ports_when_the_user_says_so(tmp_path: Path, four_ports: int) -> None:
    with up(tmp_path, "--port", "0", "--admin-port", str(four_ports)) as running:
        running.until_ready()
        for number, role in enumerate(("meta", "delay", "realtime")):
            line = http.client.HTTPConnection("127.0.0.1", four_ports + number, timeout=DEADLINE_S)
            line.request("GET", "/metrics")
            assert f'delayd_start_time_seconds{{role="{role}"'.encode() in line.getresponse().read()
            line.close()


def test_http_is_served_at_the_fourth_port_and_a_gateway_that_is_killed_comes_back(
    tmp_path: Path, four_ports: int
) -> None:
    with up(tmp_path, "--port", str(four_ports), "--gateway", "--gateway-audits", str(tmp_path)) as running:
        running.until_ready()
        (first,) = running.ready("gateway")
        assert first.endpoint.port == four_ports + 3
        assert f"; the gateway at http://127.0.0.1:{four_ports + 3}\n" in running.errors
        url = f"http://127.0.0.1:{four_ports + 3}/v1/subjects/s/messages?delay=1h"
        with urllib.request.urlopen(url, b"x", DEADLINE_S) as answer:
            assert answer.status == 201
        with urllib.request.urlopen(f"http://127.0.0.1:{four_ports + 3}/audits", timeout=DEADLINE_S) as answer:
            assert f"Audits in {tmp_path}" in answer.read().decode()
        os.kill(first.pid, signal.SIGKILL)
        _until_ready_again(running, "gateway", 2)
        assert "delayd: the gateway was ended by SIGKILL; it is started again in 0.2 s\n" in running.errors
        assert running.ready("gateway")[1].endpoint == first.endpoint
        assert running.end() == 0
        assert not is_running(running.ready("gateway")[1].pid)


def test_the_gateway_is_given_its_own_options_and_the_terms_of_the_servers(tmp_path: Path, four_ports: int) -> None:
    secret = tmp_path / "secret"
    (tmp_path / "settings.toml").write_text(f'[meta]\nsecret_file = "{secret}"\nrequire_token = true\n')
    words = ["--gateway-host 0.0.0.0", "--gateway-name one --gateway-name two", "--gateway-allow-private"]
    words += ["--gateway-audits /audits", f"--gateway-port {four_ports}"]
    given = ("--port", "0", "--gateway", "--config", str(tmp_path / "settings.toml"), *" ".join(words).split())
    with up(tmp_path, *given, fakes=True) as running:
        running.until(lambda: bool(_starts(running, "gateway")), "the gateway is started")
        start = _starts(running, "gateway")[0]
    said = " ".join(map(str, start))
    assert all(word.replace("--gateway-", "--") in said for word in words)
    assert _option(start, "--secret-file") == str(secret) and "--require-token" in start and "--insecure" not in start
    with up(tmp_path, "--port", "0", "--gateway", "--insecure", fakes=True) as running:
        running.until_ready()
        start = _starts(running, "gateway")[-1]
    assert "--insecure" in start and not {"--host", "--allow-private", "--name", "--audits"} & set(map(str, start))


def test_a_gateway_whose_port_is_taken_keeps_no_server_from_serving(tmp_path: Path, four_ports: int) -> None:
    with (
        socket.create_server(("127.0.0.1", four_ports + 3)),
        up(tmp_path, "--port", str(four_ports), "--gateway") as running,
    ):
        running.until(lambda: "ready without gateway" in running.lines, "the servers are ready")
        assert f"127.0.0.1:{four_ports + 3} can't be listened on" in running.errors
        assert "delayd: the gateway can't start, its reason is above; the servers go on without it\n" in running.errors
        assert running.end() == 0


def test_without_the_packages_of_a_gateway_one_line_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Finder(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, *rest):\n"
        "        return None if name == 'starlette' else super().find_spec(name, *rest)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Finder\n"
    )
    command = up_command(tmp_path, "--port", "0", "--gateway", fakes=False)
    with watched(["env", f"PYTHONPATH={folder}", *command], tmp_path) as running:
        running.until_ready()
        said = "delayd: no gateway runs, for it needs starlette: pip install 'delayd[gateway]'\n"
        assert running.errors.count("gateway") == 2 and said in running.errors
        assert running.end() == 0


@pytest.mark.parametrize("role", _ROLES)
def test_a_server_that_is_killed_is_started_again_on_its_port(running: Up, role: str) -> None:
    first = running.ready(role)[0]
    os.kill(first.pid, signal.SIGKILL)
    _until_ready_again(running, role, 2)
    second = running.ready(role)[1]
    assert second.endpoint.port == first.endpoint.port
    assert second.pid != first.pid
    said = f"delayd: the {role} server was ended by SIGKILL; it is started again in 0.2 s\n"
    running.until(lambda: said in running.errors, "it says so")
    assert running.lines.count("ready") == 1


def test_a_server_that_dies_again_and_again_waits_longer_each_time(running: Up) -> None:
    for deaths in (1, 2, 3):
        _tell(running, "delay", "end", 1)
        _until_ready_again(running, "delay", deaths + 1)
    waits = [line.rpartition(" in ")[2] for line in running.errors.splitlines() if "started again in" in line]
    assert waits == ["0.2 s", "0.4 s", "0.8 s"]


def test_a_server_that_stopped_itself_is_not_started_again_and_the_others_go_on(running: Up) -> None:
    others = [running.ready(role)[0].pid for role in ("meta", "realtime")]
    _tell(running, "delay", "end", 3)
    running.until(lambda: "stays down until `delayd up` is started anew" in running.errors, "it says so")
    stopped = "the delay server stopped itself, for its data is damaged or an fsync failed"
    running.until(lambda: stopped in running.errors, "it says why")
    running.until(
        lambda: "the meta and realtime servers go on; look at the disk" in running.errors, "it says what goes on"
    )
    # A restart would come within a fifth of a second; another server's restart shows that one has passed.
    os.kill(others[1], signal.SIGKILL)
    _until_ready_again(running, "realtime", 2)
    assert len(_starts(running, "delay")) == 1
    assert is_running(others[0])
    assert running.end() == 3


@pytest.mark.parametrize("role", ["delay", "realtime"])
def test_a_server_that_does_not_start_on_damage_is_named_and_the_others_are_ready_without_it(
    tmp_path: Path, role: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f"{role}.start").write_text("3")
    other = "realtime" if role == "delay" else "delay"
    with up(tmp_path, "--port", "0", fakes=True) as running:
        running.until(lambda: f"ready without {role}" in running.lines, "the others are ready")
        assert len(running.ready("meta")) == len(running.ready(other)) == 1
        damaged = f"delayd: the {role} server does not start, for its data is damaged"
        running.until(lambda: damaged in running.errors, "it is named")
        running.until(lambda: f"the meta and {other} servers go on" in running.errors, "the others are named")
        assert running.end() == 3
        assert "ready" not in running.lines


def test_a_server_that_a_damaged_file_holds_is_named_and_serves_when_that_is_mended(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "realtime.held").touch()
    with up(tmp_path, "--port", "0", fakes=True) as running:
        running.until(lambda: "ready without realtime" in running.lines, "the others are ready")
        held = "the realtime server does not start, for its data is damaged; it waits until the file that its log above"
        running.until(lambda: held in running.errors, "it is named")
        (tmp_path / "data" / "realtime.held").unlink()
        running.until(lambda: len(running.ready("realtime")) == 1, "it serves")
        assert len(_starts(running, "realtime")) == 1
        assert running.end() == 0


def test_what_is_held_at_the_end_is_told_by_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "delay.held").touch()
    with up(tmp_path, "--port", "0", fakes=True) as running:
        running.until(lambda: "ready without delay" in running.lines, "the others are ready")
        assert running.end() == 3


def test_when_all_have_stopped_themselves_it_ends_with_3(running: Up) -> None:
    for role in _ROLES:
        _tell(running, role, "end", 3)
    assert running.process.wait(30) == 3


def test_a_server_with_a_wrong_setting_ends_all_with_2(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "delay.start").write_text("2")
    with up(tmp_path, "--port", "0", fakes=True) as running:
        assert running.process.wait(30) == 2
        assert "the delay server can't start, its reason is above; all servers stop" in running.errors
        assert not any(is_running(ready.pid) for role in _ROLES for ready in running.ready(role))


def test_once_it_has_served_a_wrong_setting_may_pass(running: Up) -> None:
    _tell(running, "delay", "start", 2)
    os.kill(running.ready("delay")[0].pid, signal.SIGKILL)
    _until_ready_again(running, "delay", 2)
    assert len(_starts(running, "delay")) == 3


def test_sigterm_stops_all_and_exits_with_0(running: Up) -> None:
    pids = [running.ready(role)[0].pid for role in _ROLES]
    assert running.end() == 0
    assert not any(map(is_running, pids))


def test_a_second_signal_ends_what_does_not_stop(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "delay.deaf").touch()
    with up(tmp_path, "--port", "0", fakes=True) as running:
        running.until_ready()
        delay, realtime = running.ready("delay")[0].pid, running.ready("realtime")[0].pid
        running.process.send_signal(signal.SIGINT)
        running.until(lambda: not is_running(realtime), "the first signal has come")
        assert is_running(delay)
        assert running.end(signal.SIGINT) == 130
        assert "did not stop within" not in running.errors, "it was not waited for"
        assert not is_running(delay)


def test_a_server_that_does_not_stop_is_killed_and_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "delay.deaf").touch()
    with up(tmp_path, "--port", "0", fakes=True) as running:
        running.until_ready()
        assert running.end() == 1
        assert "the delay server did not stop within 5.5 s and is killed" in running.errors
        assert not is_running(running.ready("delay")[0].pid)


def test_a_server_that_has_stopped_is_not_called_killed_when_the_news_of_it_is_late(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.pipes").touch()
    with up(tmp_path, "--port", "0", fakes=True) as running:
        running.until_ready()
        assert running.end() == 0
        assert "did not stop" not in running.errors


def test_servers_do_not_outlive_a_supervisor_that_is_killed(running: Up) -> None:
    pids = [running.ready(role)[0].pid for role in _ROLES]
    running.process.kill()
    running.until(lambda: not any(map(is_running, pids)), "all have ended")


def test_ctrl_c_reaches_the_supervisor_alone(running: Up) -> None:
    groups = {os.getpgid(running.ready(role)[0].pid) for role in _ROLES}
    assert os.getpgid(running.process.pid) not in groups
    assert len(groups) == len(_ROLES)


def test_servers_go_on_when_nobody_reads_the_ready_lines_any_more(tmp_path: Path) -> None:
    command = up_command(tmp_path, "--port", "0", fakes=True)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"ready meta ")
            process.stdout.close()
            running = Up(process, tmp_path)
            running.until(lambda: bool(_starts(running, "delay")), "the delay server has started")
            _tell(running, "delay", "end", 1)
            running.until(lambda: len(_starts(running, "delay")) == 2, "it has started again")
            assert int(_option(_starts(running, "delay")[1], "--port")) > 0, "its port stays"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_lines_of_servers_come_whole_in_their_order_and_say_which_server(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for role in _ROLES:
        (tmp_path / "data" / f"{role}.talk").touch()
    with up(tmp_path, "--port", "0", fakes=True) as running:
        running.until_ready()
        assert running.end() == 0
        lines = running.errors.splitlines()
    assert all(line.split(" ")[0] in ("meta:", "delay:", "realtime:", "delayd:") for line in lines)
    for role in _ROLES:
        own = [line.removeprefix(f"{role}: ") for line in lines if line.startswith(f"{role}: ")]
        expected = [f"line {number} {'x' * (37 * number % 9_000)}" for number in range(TALK_LINES)]
        assert own == [*expected, f"last words of {role}"]


@pytest.mark.parametrize("role", ["meta", "delay", "realtime"])
def test_a_server_that_is_stopping_is_waited_for_and_named(tmp_path: Path, role: str) -> None:
    folder = tmp_path / "data" / role
    folder.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", HOLD, f"{folder}/LOCK", role], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with up(tmp_path, "--port", "0") as running:
            line = f"lock_awaited role={role} holder='pid {holder.pid} {role}' limit_ms=15000"
            try:
                running.until(lambda: line in running.errors, "it says for whom")
                assert "ready" not in running.lines and running.process.poll() is None
            finally:
                holder.kill()
            running.until_ready()
            assert running.end() == 0


def test_one_that_is_started_while_servers_of_a_killed_one_still_end_serves(tmp_path: Path) -> None:
    with up(tmp_path, "--port", "0") as first:
        pids = [first.until_ready().ready(role)[-1].pid for role in _ROLES]
        first.end(signal.SIGKILL)
        again = tmp_path / "again"
        again.mkdir()
        (again / "data").symlink_to(first.data)
        with up(again, "--port", "0") as second:
            second.until_ready()
            assert not any(map(is_running, pids))
            assert second.end() == 0


def test_a_directory_whose_servers_serve_on_is_refused_at_once(running_servers: Up, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    (again / "data").symlink_to(running_servers.data)
    with up(again, "--port", "0") as second:
        assert second.process.wait(DEADLINE_S) == 2
        # A server that waits for the lock says so before it does.
        assert "is in use by pid" in second.errors and "lock_awaited" not in second.errors
