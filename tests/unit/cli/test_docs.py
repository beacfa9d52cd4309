"""The page of the command line names exit codes and shows command lines as they are; its map is made."""

import re

from tests.unit.pages import DOCS, commands

from .runner import run

_PAGE = (DOCS / "cli.md").read_text()


def test_every_run_on_the_page_is_a_command_line_that_parses() -> None:
    runs = re.findall(r"^\$ (?:.*\| )?delayd (.*)$", _PAGE, re.MULTILINE)
    assert len(runs) > 10
    for line in runs:
        words = re.findall(r'"[^"]*"|\S+', line)
        named = set(re.findall(r"--[a-z-]+", line))
        name = " ".join(words[:2]) if " ".join(words[:2]) in commands() else words[0]
        known = {option for parameter in commands()[name].params for option in parameter.opts}
        assert named <= known, line


def test_the_exit_codes_are_those_of_the_overview() -> None:
    overview = " ".join(run("--help").out.split())
    codes = re.findall(r"^\| (\d+) \|", _PAGE, re.MULTILINE)
    assert codes == ["0", "1", "2", "3", "4", "130", "141"]
    for code in codes[:-1]:
        assert re.search(rf"\b{code} [a-z]", overview)
