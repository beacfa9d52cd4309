"""docs/deploy.md agrees with what it tells about: files, commands, options, numbers."""

import re

import click
import pytest

from cli.main import commands
from delayd.net.budget import FILES_MIN
from tests.packaging.commands import REPOSITORY

PAGE = (REPOSITORY / "docs" / "deploy.md").read_text()
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
# By its path, or as what a container runs: the image is called delayd, and so is the program in it.
CALLS = re.findall(
    r"^/opt/delayd/bin/delayd (.+)$|docker (?:run …|exec delayd) delayd ([a-z][^`\n]+)", PAGE, re.MULTILINE
)


@pytest.mark.parametrize("line", [first or second for first, second in CALLS])
def test_each_command_of_the_page_exists_with_its_options(line: str) -> None:
    name, *words = line.split()
    command = commands.get_command(click.Context(commands), name)
    assert command is not None, name
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_page_names_commands_and_files_that_are_there() -> None:
    assert len(CALLS) >= 7
    links = re.findall(r"\]\(([^)#]+)[)#]", PAGE)
    assert "../Dockerfile" in links and "../deploy/delayd@.service" in links
    assert [link for link in links if not (REPOSITORY / "docs" / link).exists()] == []


def test_the_numbers_of_the_page_are_those_of_the_recipe_and_the_servers() -> None:
    (uid,) = re.findall(r"--uid (\d+)", DOCKERFILE)
    assert f"as user {uid}" in PAGE and f"chown {uid}:{uid}" in PAGE
    assert f"below {FILES_MIN:,}" in PAGE
    unit = (REPOSITORY / "deploy" / "delayd.service").read_text()
    for setting in (
        "KillMode=mixed",
        "TimeoutStopSec=15",
        "LimitNOFILE=65536",
        "OOMPolicy=continue",
        "StartLimitBurst=5",
    ):
        assert setting in PAGE and f"{setting}\n" in unit
