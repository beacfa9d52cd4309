"""The command line with real servers: what is sent is consumed, listed from live files, and audited."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from uuid import uuid4

import pytest

from cli.main import TRY_LATER
from delayd.client.asking import ask
from delayd.errors import DiskReserve
from delayd.secret import Secret
from delayd.wire.frame import Head
from delayd.wire.requests import RequestType
from tests.unit.cli.runner import run
from tests.unit.pages import as_on_the_page, files_on_the_page
from tests.waiting import DEADLINE_S, holds_in_time, wait_until

from .up_process import Up, is_running, up

_DELAYD = (sys.executable, "-m", "delayd")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """All servers, shared by the tests of this file."""
    with up(tmp_path_factory.mktemp("up"), "--port", "0") as running:
        yield running.until_ready()


@pytest.fixture
def subject() -> str:
    """One that no other test uses."""
    return f"test.{uuid4().hex}"


def _meta(servers: Up) -> tuple[str, str]:
    return "--meta", f"127.0.0.1:{servers.ready('meta')[0].endpoint.port}"


def _run(*arguments: str, stdin: bytes = b"", code: int = 0) -> str:
    # In this process, for a new Python takes longer than most commands.
    ran = run(*arguments, stdin=stdin)
    assert ran.code == code, f"{' '.join(arguments)}\n{ran.out}\n{ran.err}"
    return ran.out


def _consumed(servers: Up, subject: str, *options: str, group: str = "g") -> list[dict[str, object]]:
    out = _run("consume", subject, "--group", group, "--format", "json", *options, *_meta(servers))
    return [json.loads(line) for line in out.splitlines()]


def test_a_message_comes_with_its_headers_when_it_is_due_and_not_before(servers: Up, subject: str) -> None:
    options = ("--in", "500ms", "--header", "trace=a1", "--format", "json")
    receipt = json.loads(_run("send", subject, "order 42", *options, *_meta(servers)))
    (message,) = _consumed(servers, subject, "--max", "1", "--wait", "20s")
    assert message["body"] == "order 42"
    assert message["headers"] == {"trace": "a1"}
    assert message["attempt"] == 1
    for name in ("sequence", "log_id", "deliver_at_ms"):
        assert message[name] == receipt[name]
    assert time.time_ns() // 1_000_000 >= receipt["deliver_at_ms"]
    assert isinstance(message["late_ms"], int)
    assert message["late_ms"] >= 0


def test_the_receipt_says_in_words_when_it_is_due(servers: Up, subject: str) -> None:
    later = _run("send", subject, "b", "--in", "2h", *_meta(servers))
    assert later.startswith("kept as sequence ")
    assert ", in 2 h 00 min\n" in later or ", in 1 h 59 min\n" in later
    past = _run("send", subject, "b", "--at", "-1h", *_meta(servers))
    assert " already, so it leaves at once\n" in past


def test_a_body_may_be_any_bytes_of_a_file_or_of_stdin(servers: Up, subject: str, tmp_path: Path) -> None:
    body = bytes(range(256))
    (tmp_path / "body").write_bytes(body)
    _run("send", subject, "--file", str(tmp_path / "body"), "--at", "now", *_meta(servers))
    _run("send", subject, "--file", "-", "--at", "now", *_meta(servers), stdin=body)
    command = [*_DELAYD, "consume", subject, "--group", "g", "--max", "2", "--wait", "20s", "--format", "raw"]
    done = subprocess.run([*command, *_meta(servers)], capture_output=True, timeout=DEADLINE_S, check=True)
    assert done.stdout == (body + b"\n") * 2


def test_each_line_is_a_message(servers: Up, subject: str, tmp_path: Path) -> None:
    lines = [b"%d" % number for number in range(25_000)] + [b"", b"the last, unended"]
    (tmp_path / "lines").write_bytes(b"\n".join(lines))
    out = _run("send", subject, "--lines", "--file", str(tmp_path / "lines"), "--at", "now", *_meta(servers))
    assert out.startswith("kept 25,002 messages, due ")
    found = _consumed(servers, subject, "--max", "25002", "--wait", "20s")
    assert sorted(str(message["body"]).encode() for message in found) == sorted(lines)


def test_acknowledged_messages_do_not_come_again_and_others_do(servers: Up, subject: str) -> None:
    _run("send", subject, "--lines", "--at", "now", *_meta(servers), stdin=b"a\nb\nc\n")
    groups = count()

    def judged(lease: timedelta) -> None:
        group, lease_ms = f"g{next(groups)}", lease // timedelta(milliseconds=1)
        wanted = ("--max", "3", "--wait", "20s")
        looked_at = _consumed(servers, subject, *wanted, "--no-ack", "--lease", f"{lease_ms}ms", group=group)
        assert [message["body"] for message in looked_at] == ["a", "b", "c"]
        again = _consumed(servers, subject, *wanted, group=group)
        assert [message["attempt"] for message in again] == [2, 2, 2]
        assert _consumed(servers, subject, "--wait", "1500ms", group=group) == []

    # What is shown when its lease has ended is shown again.
    holds_in_time(timedelta(seconds=1), judged)


def test_a_group_takes_the_messages_with_its_tags(servers: Up, subject: str) -> None:
    for body, tags in (("1", ["eu", "large"]), ("2", ["eu"]), ("3", ["us", "large"]), ("4", ["uk", "large"])):
        _run("send", subject, body, "--at", "now", *(f"--tag={tag}" for tag in tags), *_meta(servers))
    wanted = ("--tags-any", "eu", "--tags-any", "uk", "--tags-all", "large")
    found = _consumed(servers, subject, *wanted, "--max", "2", "--wait", "20s")
    assert sorted(str(message["body"]) for message in found) == ["1", "4"]


def test_a_pattern_takes_its_subjects_and_text_shows_which(servers: Up, subject: str) -> None:
    for word in ("eu", "us"):
        _run("send", f"{subject}.{word}", word, "--at", "now", *_meta(servers))
    looked_at = ("--max", "2", "--wait", "20s", "--no-ack")
    found = _consumed(servers, f"{subject}.*", "--max", "2", "--wait", "20s", group="other")
    assert sorted((message["subject"], message["body"]) for message in found) == [
        (f"{subject}.eu", "eu"),
        (f"{subject}.us", "us"),
    ]
    lines = _run("consume", f"{subject}.>", "--group", "g", *looked_at, *_meta(servers)).splitlines()
    assert sorted(line.split()[0] for line in lines) == [f"{subject}.eu", f"{subject}.us"]


def test_every_group_gets_every_message(servers: Up, subject: str) -> None:
    _run("send", subject, "b", "--at", "now", *_meta(servers))
    for group in ("one", "two"):
        assert len(_consumed(servers, subject, "--max", "1", "--wait", "20s", group=group)) == 1


def test_text_shows_when_it_was_due_and_escapes_what_a_terminal_would_obey(servers: Up, subject: str) -> None:
    _run("send", subject, "--file", "-", "--at", "2026-01-01T00:00:00Z", *_meta(servers), stdin=b"a\x1b[31mb\nc")
    out = _run("consume", subject, "--group", "g", "--max", "1", "--wait", "20s", *_meta(servers))
    assert out.startswith("2026-01-01T00:00:00.000Z  late ")
    assert out.endswith(r"  a\x1b[31mb\nc" + "\n")


@pytest.mark.usefixtures("heard_interrupts")
def test_follow_goes_on_until_it_is_interrupted(servers: Up, subject: str) -> None:
    command = [*_DELAYD, "consume", subject, "--group", "g", "--follow", "--format", "raw", *_meta(servers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as following:
        try:
            assert following.stdout is not None
            for body in ("one", "two"):
                _run("send", subject, body, "--at", "now", *_meta(servers))
                assert following.stdout.readline() == body.encode() + b"\n"
            following.send_signal(signal.SIGINT)
            _, err = following.communicate(timeout=DEADLINE_S)
        finally:
            following.kill()
    assert following.returncode == 130
    assert err.decode().endswith("delayd: stopped\n")
    assert _consumed(servers, subject, "--wait", "200ms") == []


def test_a_reader_that_goes_away_is_no_error(servers: Up, subject: str) -> None:
    _run("send", subject, "--lines", "--at", "now", *_meta(servers), stdin=(b"x" * 100 + b"\n") * 20_000)
    consume = " ".join([*_DELAYD, "consume", subject, "--group", "g", "--wait", "20s", *_meta(servers)])
    done = subprocess.run(
        ["bash", "-c", f"{consume} | head -n 1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        timeout=DEADLINE_S,
        check=True,
    )
    first, code = done.stdout.decode().splitlines()
    assert "x" * 100 in first
    assert (int(code), done.stderr) == (141, b"")
    assert _consumed(servers, subject, "--max", "1", "--wait", "20s"), "what nobody read comes again"


def test_servers_subjects_and_groups_are_listed(servers: Up, subject: str) -> None:
    _run("send", subject, "--lines", "--at", "now", *_meta(servers), stdin=b"a\nb\nc\n")
    _consumed(servers, subject, "--max", "2", "--wait", "20s")
    listed = json.loads(_run("servers", "--format", "json", *_meta(servers)))
    assert {(row["role"], row["pid"], row["alive"]) for row in listed} == {
        (role, servers.ready(role)[0].pid, True) for role in ("delay", "realtime")
    }
    (realtime,) = [row["log_id"] for row in listed if row["role"] == "realtime"]
    (row,) = json.loads(_run("subjects", "--prefix", subject, "--format", "json", *_meta(servers)))
    assert (row["subject"], row["realtime_log_id"], row["messages"], row["end"]) == (subject, realtime, 3, 3)
    assert (row["groups"], row["quarantined"]) == (1, 0) and 0 <= row["oldest_ago_ms"] < 60_000
    (group,) = json.loads(_run("groups", "--subject", subject, "--format", "json", *_meta(servers)))
    assert (group["group"], group["waiting"], group["outstanding"]) == ("g", 1, 0)


@pytest.mark.parametrize("command", [["servers"], ["send", "a", "b", "--in", "1s"], ["consume", "a", "--group", "g"]])
def test_the_port_of_another_server_is_named_where_meta_is_wanted(servers: Up, command: list[str]) -> None:
    address = f"127.0.0.1:{servers.ready('delay')[0].endpoint.port}"
    ran = run(*command, "--meta", address)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"delayd: {address} is no meta server; give the address of one")


def test_the_clocks_of_servers_are_compared_and_trusted(servers: Up) -> None:
    for options in ((), ("--trust", "--data", str(servers.data))):
        clocks = json.loads(_run("clock", *options, *_meta(servers), "--format", "json"))
        assert [clock["role"] for clock in clocks] == ["delay", "realtime"]
        assert all(clock["believed"] and abs(clock["ahead_ms"]) < 5_000 for clock in clocks)


def test_a_server_that_can_not_follow_its_clock_is_named_and_the_others_do(
    servers: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide, trusted = ask.decide, list[str]()

    async def full_at_delay(server: ask.Known, kind: RequestType, head: Head, secret: Secret) -> Head:
        if server.role == "delay":
            raise DiskReserve("no space is left for /a/message/0.log; free some")
        trusted.append(server.role)
        return await decide(server, kind, head, secret)

    monkeypatch.setattr(ask, "decide", full_at_delay)
    ran = run("clock", "--trust", "--data", str(servers.data), *_meta(servers), "--format", "json")
    address = f"127.0.0.1:{servers.ready('delay')[-1].endpoint.port}"
    why = "does not follow its clock: no space is left for /a/message/0.log; free some"
    assert (ran.code, ran.err) == (TRY_LATER, f"delayd: the delay server at {address} {why}\n")
    assert trusted == ["realtime"] and len(json.loads(ran.out)) == 2


def test_files_of_running_servers_are_listed_verified_and_audited(servers: Up, subject: str) -> None:
    data = ("--data", str(servers.data))
    _run("send", subject, "gone", "--at", "now", *_meta(servers))
    _consumed(servers, subject, "--max", "1", "--wait", "20s")
    _run("send", subject, "waits", "--in", "3h", *_meta(servers))
    outcomes = ("dispatch", "show", "--subject", subject, "--format", "json", *data)
    servers.until(lambda: len(json.loads(_run(*outcomes))) == 1, "the outcome is in the dispatch log")
    (pending,) = json.loads(_run("schedule", "show", "--subject", subject, "--body", "--format", "json", *data))
    assert (pending["body"], pending["state"]) == ("waits", "pending")
    (found,) = json.loads(_run("schedule", "find", subject, "--grep", "^wa[a-z]*s$", "--format", "json", *data))
    assert found == pending | {"key": None, "tags": []}
    assert _run("schedule", "find", subject, "--all", "--count", *data) == "2\n"
    hours = json.loads(_run("schedule", "hours", "--subject", subject, "--format", "json", *data))
    assert [(row["messages"], row["pending"]) for row in hours] == [(1, 0), (1, 1)]
    (outcome,) = json.loads(_run(*outcomes))
    assert outcome["outcome"] == "dispatched"
    assert "none is damaged" in _run("log", "verify", *data)
    report = json.loads(_run("audit", "--format", "json", *data))
    assert report["balanced"] is True
    assert report["total"]["early"] == 0


def test_every_file_of_a_data_directory_is_on_the_page_of_operations(servers: Up, subject: str) -> None:
    _run("send", subject, "b", "--at", "now", *_meta(servers))
    _consumed(servers, subject, "--max", "1", "--wait", "20s")
    found = {str(path.relative_to(servers.data)) for path in servers.data.rglob("*") if path.is_file()}
    assert len(found) > 10
    assert {as_on_the_page(path) for path in found} <= files_on_the_page()


def test_a_server_that_is_killed_comes_back_with_what_it_had(tmp_path: Path) -> None:
    with up(tmp_path, "--port", "0") as running:
        running.until_ready()
        _run("send", "orders", "--lines", "--in", "3s", *_meta(running), stdin=b"a\nb\nc\n")
        for role in ("delay", "realtime"):
            running.kill(role)
        running.until(lambda: all(len(running.ready(role)) == 2 for role in ("delay", "realtime")), "both serve again")
        found = _consumed(running, "orders", "--max", "3", "--wait", "20s")
        assert [message["body"] for message in found] == ["a", "b", "c"]
        assert json.loads(_run("audit", "--format", "json", "--data", str(running.data)))["balanced"] is True
        pids = [ready.pid for role in ("meta", "delay", "realtime") for ready in running.ready(role)]
        assert running.end() == 0
        assert not any(map(is_running, pids))


def test_servers_end_with_a_supervisor_that_is_killed_and_leave_their_directories_free(tmp_path: Path) -> None:
    with up(tmp_path, "--port", "0") as running:
        running.until_ready()
        pids = [running.ready(role)[0].pid for role in ("meta", "delay", "realtime")]
        running.process.kill()
        running.until(lambda: not any(map(is_running, pids)), "all have ended")
    with up(tmp_path, "--port", "0") as running:
        assert running.until_ready().end() == 0


def test_two_on_one_directory_end_the_second_with_who_holds_it(servers: Up, tmp_path: Path) -> None:
    command = [*_DELAYD, "up", "--data", str(servers.data), "--port", "0"]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert f"{servers.ready('meta')[0].pid}" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_a_data_directory_that_can_not_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [*_DELAYD, "meta", "--data", str(tmp_path / "file"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert f"delayd: {tmp_path / 'file'} is a file; choose another directory with --data\n" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_progress_is_shown_to_a_person(servers: Up, subject: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"a\nb\nc")
    ours, theirs = pty.openpty()
    command = [*_DELAYD, "send", subject, "--lines", "--file", str(tmp_path / "lines"), "--at", "now", *_meta(servers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=DEADLINE_S, check=True)
    shown = os.read(ours, 1 << 16).decode()
    os.close(theirs)
    os.close(ours)
    assert "messages" in shown
    assert "/3" in shown
    assert done.stdout.startswith(b"kept 3 messages, due ")


def test_a_shell_is_offered_subjects_and_groups_of_running_servers(servers: Up, subject: str) -> None:
    _run("send", subject, "x", "--in", "0s", *_meta(servers))
    _consumed(servers, subject, "--max", "1", "--wait", "20s", group="billing")
    option, address = _meta(servers)

    def offered(*words: str) -> list[str]:
        environment = {
            **os.environ,
            "_DELAYD_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("delayd", *words)),
            "COMP_CWORD": str(len(words)),
        }
        ran = subprocess.run(_DELAYD, capture_output=True, text=True, timeout=60, env=environment)
        assert ran.stderr == ""
        return [line.partition(",")[2] for line in ran.stdout.splitlines() if line]

    # The machine may be busy: an offer that comes too late is none, and the key is pressed again.
    wait_until(lambda: offered("consume", option, address, subject[:9]) == [subject], "the subject is offered")
    wait_until(lambda: offered("consume", option, address, subject, "--group", "b") == ["billing"], "so is the group")
