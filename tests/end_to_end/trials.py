"""Trials: a state that waits for an operator is brought about for real, and what status prints leads out of it.

An operator looks at the screen of `delayd status`, takes a command from a line of it, and types that. A test says with
`tries` for which states it does so; it fails when it has not done all of it for each of them: the line was told, one of
its commands was run as it was printed, and then the line was gone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from string import Formatter
from typing import NamedTuple, ParamSpec

from cli.main import NOT_BALANCED, OK
from cli.shared_options import DATA_VARIABLE
from delayd.address import META_VARIABLE
from delayd.machine.operating import WaitKind
from tests.end_to_end.processes import ServerProcess
from tests.named_commands import A_SERVER, COMMAND, commands_in
from tests.unit.cli.runner import Ran, run
from tests.waiting import wait_until

LOOK_S = 0.1  # Between two looks by a command, which asks all servers.
TRIED_BY: dict[WaitKind, list[str]] = {}  # The tests of each state.

# What the words of a state look like on the screen; of all others nothing is known.
_WORDS = {
    **dict.fromkeys(("log_id", "target", "origin", "to"), "[0-9a-f]{16}"),
    **dict.fromkeys(("id", "path", "meta", "subject", "group", "hour"), r"\S+"),
    "batches": "[0-9,]+ batch(?:es)?",
    "messages": "[0-9,]+ messages?",
    "seals": "[0-9,]+ seals?",
    "slots": "[0-9,-]+…?",
    "role": r"\w+",
    "server": r"\w+ server [0-9a-f]{16}",
}

Parameters = ParamSpec("Parameters")


class _Done(NamedTuple):
    """What the test that runs has done so far, by state."""

    told: dict[WaitKind, str]
    typed: set[WaitKind]
    gone: set[WaitKind]


_done = _Done({}, set(), set())


def tries(*kinds: WaitKind) -> Callable[[Callable[Parameters, None]], Callable[Parameters, None]]:
    """Say of a test that it leads out of these states."""

    def mark(test: Callable[Parameters, None]) -> Callable[Parameters, None]:
        for kind in kinds:
            TRIED_BY.setdefault(kind, []).append(test.__name__)

        @wraps(test)
        def tried(*arguments: Parameters.args, **named: Parameters.kwargs) -> None:
            for of_test in _done:
                of_test.clear()
            test(*arguments, **named)
            for kind in kinds:
                assert kind in _done.told, f"status has not told of {kind.name}"
                if commands_in(_done.told[kind]):
                    assert kind in _done.typed, f"none of the commands was typed that status gives for {kind.name}"
                assert kind in _done.gone, f"{kind.name} was not seen to end"

        return tried

    return mark


class Operator(NamedTuple):
    """Somebody who looks at `delayd status` and does what it says."""

    meta: str
    data: Path
    server: str = ""  # Look at this server alone: meta is away, or does not know it.

    def until_told(self, kind: WaitKind) -> str:
        """Wait until a state is told; the text that says what leads out of it."""
        commands = wait_until(lambda: self.told(kind), lambda: f"{kind.name} in:\n{self._screen()}", every_s=LOOK_S)
        _done.told[kind] = commands[0]
        return commands[0]

    def until_gone(self, kind: WaitKind) -> None:
        """Wait until a state that was told is told no more."""
        assert kind in _done.told, "what was never there can't go"
        wait_until(lambda: not self.told(kind), lambda: f"no {kind.name} in:\n{self._screen()}", every_s=LOOK_S)
        _done.gone.add(kind)

    def follow(self, kind: WaitKind, *ways: int) -> str:
        """Wait until a state is told; for each of its lines type some of the commands, by their places in it, and wait
        until that line is gone. What the last command said.
        """
        said = ""
        self.until_told(kind)
        while lines := self.told(kind):
            line = _done.told[kind] = lines[0]
            for way in ways:
                said = self.type(kind, way).out
            wait_until(partial(self._is_gone, kind, line), self._screen, every_s=LOOK_S)
        self.until_gone(kind)
        return said

    def type(self, kind: WaitKind, way: int, code: int = OK) -> Ran:
        """Run one of the commands of a state that was told, as it is printed."""
        words = commands_in(_done.told[kind])[way]
        environment = {META_VARIABLE: self.meta, DATA_VARIABLE: str(self.data)}
        ran = run(*words, stdin=b"y\n", environment=environment)
        assert ran.code == code, f"delayd {shlex.join(words)}: {ran}"
        _done.typed.add(kind)
        return ran

    def told(self, kind: WaitKind) -> list[str]:
        """What leads out of a state, for each line of it."""
        what, command = (_pattern(text) for text in kind.value)
        return re.findall(rf"^  (?:[^:]+: )?{what}: .*\n    -> ({command})$", self._screen(), re.MULTILINE)

    def _is_gone(self, kind: WaitKind, line: str) -> bool:
        return line not in self.told(kind)

    def _screen(self) -> str:
        ran = run("status", *(("--server", self.server) if self.server else ("--meta", self.meta)))
        assert ran.code in (OK, NOT_BALANCED), ran.err
        return ran.out


def server_to_start(text: str, data: Path, meta: ServerProcess) -> ServerProcess:
    """The server that a line of status says to start, with the address that it gives; DIR is ``data``."""
    (words,) = [words[1:] for found in COMMAND.findall(text) if (words := shlex.split(found))[1] in A_SERVER]
    role, *options = words
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given.keys() == {"--data", "--meta"} and given["--data"] == "DIR", words
    address = meta.address if given["--meta"] == "ADDRESS" else given["--meta"]
    return ServerProcess(role, data, {"meta": address})


def _pattern(text: str) -> str:
    """What finds a text of a state on the screen, where its words are filled in."""
    found = ""
    for literal, name, *_ in Formatter().parse(text):
        found += re.escape(literal) + (f"(?:{_WORDS.get(name, '.+')})" if name else "")
    return found
