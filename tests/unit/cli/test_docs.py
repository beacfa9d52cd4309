"""The page of the command line names exit codes and shows command lines as they are; its map is made."""

import re
from pathlib import Path

import pytest

from cli.main import PLACES
from tests.unit.pages import DOCS, ROOT, commands

from .runner import run

_PAGE = (DOCS / "cli.md").read_text()
_PAGES = [*DOCS.glob("**/*.md"), *(ROOT / name for name in ("README.md", "CHANGELOG.md", "examples/README.md"))]
_FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_RUN = re.compile(r"^(?:\$ )?(?:.*\| )?delayd ([a-z].*)$", re.MULTILINE)
_IN_A_SENTENCE = re.compile(r"`delayd ([a-z][^`]*)`")


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_is_one_with_these_options(page: Path) -> None:
    assert not wrong_commands(page.read_text())


def test_commands_that_do_not_exist_are_found_wherever_a_page_has_them() -> None:
    page = "Its skips: `delayd find %once`.\n```\necho a | delayd wait --all\n```\n`delayd top --no`, `delayd push`"
    assert wrong_commands(page) == ["wait --all", "find %once", "top --no"]
    assert len([run for page in _PAGES for run in commands_on(page.read_text())]) > 300


def commands_on(text: str) -> list[str]:
    """The command lines of a page, behind the word `delayd`."""
    runs = [found for block in _FENCED.findall(text) for found in _RUN.findall(block)]
    return runs + _IN_A_SENTENCE.findall(_FENCED.sub("", text))


def wrong_commands(text: str) -> list[str]:
    """The commands of a page that the program does not know, or not with these options."""
    return [line for line in commands_on(text) if not _is_known(line)]


def _is_known(line: str) -> bool:
    words = re.findall(r""" "[^"]*"|'[^']*'|[^\s"']\S*""", line.partition("#")[0], re.VERBOSE)
    name = next((each for each in (" ".join(words[:2]), words[0]) if each in commands()), None)
    if name is None:
        return len(words) == 1 and words[0] in PLACES  # A group of commands, as a sentence names it.
    known = {option for parameter in commands()[name].params for option in (*parameter.opts, *parameter.secondary_opts)}
    named = {found[0] for word in words if (found := re.match(r"--[a-z-]+", word))}
    return named <= known | {"--help"}


def test_the_exit_codes_are_those_of_the_overview() -> None:
    overview = " ".join(run("--help").out.split())
    codes = re.findall(r"^\| (\d+) \|", _PAGE, re.MULTILINE)
    assert codes == ["0", "1", "2", "3", "4", "130", "141"]
    for code in codes[:-1]:
        assert re.search(rf"\b{code} [a-z]", overview)
