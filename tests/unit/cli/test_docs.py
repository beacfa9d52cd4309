"""The page of the command line tells of every command and option, and of nothing that is not there."""

import re
from importlib import import_module
from pathlib import Path

import click
import pytest

from cli.main import PLACES

from .runner import run

_PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
_SERVERS = ("meta", "delay", "realtime")  # Their options are the settings, which their help lists.


def _commands() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name, place in PLACES.items():
        command = getattr(import_module(f"cli.{place.module}"), place.name)
        if isinstance(command, click.Group):
            found |= {f"{name} {sub}": each for sub, each in command.commands.items()}
            if command.invoke_without_command:
                found[name] = command
        else:
            found[name] = command
    return found


_COMMANDS = _commands()


def _section(name: str) -> str:
    heading = "meta, delay, realtime" if name in _SERVERS else name
    found = re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^##|\Z)", _PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/cli.md has no section {heading!r}"
    return found[1]


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_has_a_section_with_a_run(name: str) -> None:
    assert re.search(rf"[$|] delayd {name}\b", _section(name))


@pytest.mark.parametrize("name", [name for name in _COMMANDS if name not in _SERVERS])
def test_every_option_is_told_in_its_command_s_section_or_for_all(name: str) -> None:
    general = _PAGE[: _PAGE.index("## Servers")]
    for parameter in _COMMANDS[name].params:
        if isinstance(parameter, click.Option) and parameter.name != "help":
            option = parameter.opts[0]
            assert f"{option} " in general + _section(name) or f"{option}`" in general + _section(name), option


def test_every_run_on_the_page_is_a_command_line_that_parses() -> None:
    runs = re.findall(r"^\$ (?:.*\| )?delayd (.*)$", _PAGE, re.MULTILINE)
    assert len(runs) > len(_COMMANDS)
    for line in runs:
        words = re.findall(r'"[^"]*"|\S+', line)
        named = set(re.findall(r"--[a-z-]+", line))
        name = " ".join(words[:2]) if " ".join(words[:2]) in _COMMANDS else words[0]
        known = {option for parameter in _COMMANDS[name].params for option in parameter.opts}
        assert named <= known, line


def test_the_exit_codes_are_those_of_the_overview() -> None:
    overview = " ".join(run("--help").out.split())
    codes = re.findall(r"^\| (\d+) \|", _PAGE, re.MULTILINE)
    assert codes == ["0", "1", "2", "3", "4", "130", "141"]
    for code in codes[:-1]:
        assert re.search(rf"\b{code} [a-z]", overview)
