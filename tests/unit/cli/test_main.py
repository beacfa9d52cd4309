"""Errors of the command line: one sentence on stderr that says what to do, and the documented exit code."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from pathlib import Path

import click
import pytest

from cli.main import BUG, INTERRUPTED, NOT_BALANCED, OWN_COMMAND, PLACES, TRY_LATER, USAGE, commands, exit_code_of
from cli.shared_options import DataFolder
from delayd.errors import (
    BadMagic,
    BadSubject,
    BatchMalformed,
    ConnectionLost,
    DamagedData,
    DelaydError,
    DirectoryInUse,
    InternalError,
    NewerFormat,
    NoDelayServer,
    OutcomeUnknown,
    PastHorizon,
    QueueFull,
    SendHandle,
    ServerUnavailable,
    SyncFailed,
)
from tests.books import START_MS, Books

from .runner import Ran, run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadSubject("x"), USAGE),
        (PastHorizon("x"), USAGE),
        (BatchMalformed("x"), USAGE),
        (DirectoryInUse("/d", "pid 1"), USAGE),
        (NewerFormat("/f", 2, 1), USAGE),
        (BadMagic("x"), USAGE),
        (DamagedData("/f", 1, "x"), NOT_BALANCED),
        (SyncFailed("/f", "x"), NOT_BALANCED),
        (ServerUnavailable("x"), TRY_LATER),
        (NoDelayServer("x"), TRY_LATER),
        (QueueFull("x"), TRY_LATER),
        (ConnectionLost("x", sent=True), TRY_LATER),
        (OutcomeUnknown("x", SendHandle(1, 2, 3)), TRY_LATER),
        (InternalError("x"), BUG),
    ],
)
def test_an_exit_code_says_who_must_act(error: DelaydError, code: int) -> None:
    assert exit_code_of(error) == code


def _raises(error: BaseException) -> Callable[[object], int]:
    def server(config: object) -> int:
        raise error

    return server


def _meta(server: Callable[[object], int]) -> Ran:
    return run("meta", servers={"meta": server})


def test_an_error_of_delayd_is_one_sentence_without_a_traceback() -> None:
    ran = _meta(_raises(DamagedData("/data/x.log", 64, "the checksum differs")))
    assert ran.code == NOT_BALANCED
    assert ran.out == ""
    assert ran.err.startswith("delayd: /data/x.log is damaged at byte 64: the checksum differs; restore this file")
    assert ran.err.count("\n") == 1


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        _meta(lambda config: 1 // 0)


def _meta_with_a_folder(error: OSError, data: Path) -> Ran:
    (data / "meta").mkdir()
    return run("meta", "--data", str(data), servers={"meta": _raises(error)})


@pytest.mark.parametrize("command", [["--help"], ["schedule", "hours"], ["seals", "--format", "csv"]])
def test_an_output_without_space_is_one_sentence(command: list[str], tmp_path: Path) -> None:
    with closing(Books(str(tmp_path))) as books, open("/dev/full", "wb") as full:
        books.send([START_MS])
        books.checkpoint()
        data = ["--data", books.root] if command != ["--help"] else []
        done = subprocess.run([*OWN_COMMAND, *command, *data], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == USAGE
    assert done.stderr.decode().startswith("delayd: the output can't be written (No space left on device); free")
    assert done.stderr.count(b"\n") == 1


def test_a_closed_output_is_no_error() -> None:
    command = f"exec {shlex.join([*OWN_COMMAND, '--version'])} >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_interrupted_command_exits_with_130() -> None:
    ran = _meta(_raises(KeyboardInterrupt()))
    assert ran.code == INTERRUPTED
    assert ran.err.endswith("delayd: stopped\n")


@pytest.mark.parametrize(
    "arguments",
    [["send", "a", "b", "--in", "1s", "--timeout", "300ms"], ["consume", "a", "--group", "g", "--wait", "10ms"]],
    ids=["send", "consume"],
)
def test_messages_that_can_not_travel_are_one_sentence_and_never_a_success(
    arguments: list[str], unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.consume_command.REACH_MS_MIN", 300.0)
    ran = run(*arguments, "--meta", f"127.0.0.1:{unused_port}")
    assert (ran.code, ran.out) == (TRY_LATER, "")
    said = "nothing was sent: " if arguments[0] == "send" else ""
    assert ran.err.startswith(f"delayd: {said}no connection to 127.0.0.1:{unused_port} ")
    assert ran.err.count("\n") == 1


def _every_command() -> dict[str, tuple[click.Command, click.Context]]:
    """Each command, group and subcommand by its words, in the context of those above it."""
    found: dict[str, tuple[click.Command, click.Context]] = {
        "": (commands, click.Context(commands, info_name="delayd"))
    }
    for name, place in PLACES.items():
        command = getattr(import_module(f"cli.{place.module}"), place.name)
        context = click.Context(command, found[""][1], name)
        found[name] = (command, context)
        if isinstance(command, click.Group):
            found |= {
                f"{name} {sub}": (each, click.Context(each, context, sub)) for sub, each in command.commands.items()
            }
    return found


_EVERY = _every_command()


def _examples(words: str) -> list[list[str]]:
    """The command lines at the end of a help, as a shell reads them, from behind ``delayd`` up to a pipe."""
    ran = run(*words.split(), "--help")
    assert ran.code == 0
    heading, *lines = ran.out[ran.out.rindex("\n  Examples") :].strip().splitlines()
    assert heading.endswith(":")
    found = []
    for line in lines:
        typed = shlex.split(line)
        typed = typed[typed.index("delayd") + 1 :]
        found.append(typed[: next((index for index, word in enumerate(typed) if word in ("|", ">")), len(typed))])
    return found


@pytest.mark.parametrize("words", _EVERY)
def test_every_help_ends_with_examples_of_that_command(words: str) -> None:
    lines = _examples(words)
    assert lines
    assert all(" ".join(line).startswith(words) for line in lines)


@pytest.mark.parametrize("words", _EVERY)
def test_the_examples_of_every_help_are_command_lines_that_parse(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Their files and folders are on the reader's machine.
    for kind in (click.Path, click.File, DataFolder):
        monkeypatch.setattr(kind, "convert", lambda self, value, *_: value)
    for line in _examples(words):
        # A group that does something by itself is called without the name of one of its commands, too.
        count = 2 if len(line) > 1 and " ".join(line[:2]) in _EVERY else 1
        command, context = _EVERY[" ".join(line[:count])]
        command.make_context(line[count - 1], line[count:], context.parent)


def test_the_overview_says_what_each_command_says_of_itself() -> None:
    overview = " ".join(run("--help").out.split())
    for name, place in PLACES.items():
        assert f"{name} {place.summary}" in overview


def test_the_overview_imports_no_command() -> None:
    sys.modules.pop("cli.serve", None)
    run("--help")
    assert "cli.serve" not in sys.modules
