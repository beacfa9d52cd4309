"""The page of the judges says what the tree has, and no judge learns more of the product's insides."""

from __future__ import annotations

import re
import shlex
from functools import cache
from importlib import import_module

import pytest

from tests.insides import KNOWN
from tests.judges import (
    HERE,
    JUDGES,
    PAGE,
    PROMISES,
    ROOT,
    TESTS,
    UNIT,
    citations,
    imports,
    judges_of,
    planted,
    promises,
    rules,
    written,
)
from tests.named_commands import check_commands

COMMANDS = sorted(
    {command for judge in JUDGES for command in judge.commands} | {c for p in promises() for c in p.commands}
)
PLANTS = re.compile(r"^(\w+): (?:Bugs|dict\[str, Patch\]) =", re.MULTILINE)
GUARDED = sorted({folder for folder in (*KNOWN, *imports()) if folder != UNIT})


RULES_TABLE = re.compile(r"^## Rules\n.*?(?=^<!-- judges: end)", re.MULTILINE | re.DOTALL)
RUN = "run python -m tests.judges"


def test_the_page_is_as_the_program_writes_it() -> None:
    page = PAGE.read_text()
    assert RULES_TABLE.sub("", page) == RULES_TABLE.sub("", written(page)), RUN


def test_each_judge_that_the_page_names_for_a_rule_judges_it() -> None:
    # A judge that is new may be missing for a while: the page tells no lie by that.
    found, now = RULES_TABLE.search(PAGE.read_text()), RULES_TABLE.search(written(PAGE.read_text()))
    assert found is not None and now is not None
    rows, as_written = (
        [line.strip("| ").split(" | ") for line in table[0].splitlines() if re.match(r"\| [A-Z]\d", line)]
        for table in (found, now)
    )
    assert [(rule, bugs) for rule, _, bugs in rows] == [(rule, bugs) for rule, _, bugs in as_written], RUN
    for rule, judges, _ in rows:
        assert set(judges.split(", ")) <= set(judges_of(rule)), f"{rule}: {RUN}"


def test_each_folder_of_tests_is_on_the_page() -> None:
    folders = {path.parent.name for path in TESTS.glob("*/__init__.py")} | {HERE}
    assert {judge.folder for judge in JUDGES} == folders


@pytest.mark.parametrize("folder", GUARDED)
def test_a_judge_knows_no_more_of_the_insides_than_is_listed(folder: str) -> None:
    known, now = set(KNOWN.get(folder, ())), imports().get(folder, {})
    more = {module: files for module, files in now.items() if module not in known}
    assert not more, f"go through a port: {more}"
    less = known - now.keys()
    assert not less, f"take {sorted(less)} out of tests/insides.py: nothing of {folder} imports them any more"


def test_the_simulation_reaches_servers_through_their_adapters_alone() -> None:
    reaches = re.compile(r"\.core\b")
    files = [path for path in (TESTS / "simulation").glob("*.py") if not path.stem.startswith("planted")]
    found = [path.name for path in files if reaches.search(path.read_text())]
    assert not found, f"ask tests/worlds/*_adapter.py instead: {found}"


@pytest.mark.parametrize("rule", rules())
def test_each_rule_is_named_by_a_test(rule: str) -> None:
    assert citations()[rule], f"no test says that it judges {rule}"


def test_a_rule_that_a_bug_or_a_page_names_is_a_rule() -> None:
    # A rule that somebody cites and nobody has written down says nothing.
    cited = re.compile(r"(?<![\w.])[LPICSHQTEB]\d{1,2}(?![\w.-])")
    for page in (*ROOT.glob("docs/*.md"), *ROOT.glob("docs/formats/*.md")):
        text = re.sub(r"`[^`]*`", "", page.read_text())
        unknown = {each for each in cited.findall(text) if f"rule {each}" in text or f"({each})" in text} - {*rules()}
        assert not unknown, f"{page.name} cites {sorted(unknown)}, which docs/rules.md does not have"


def test_each_planted_bug_of_the_tree_is_on_the_page() -> None:
    names = {f"{bug.rule}: {bug.what}" for bug in planted()}
    found = 0
    for path in TESTS.rglob("*.py"):
        for holder in PLANTS.findall(path.read_text()):
            module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            bugs = getattr(module, holder)
            found += len(bugs)
            assert bugs.keys() <= names, f"tests/judges.py does not list {holder} of {path.relative_to(ROOT)}"
    assert found > 150


def test_each_promise_says_how_it_is_judged() -> None:
    assert [promise.title for promise in promises()] == [*PROMISES]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_can_be_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    if words[0] == "delayd":
        monkeypatch.chdir(ROOT)
        check_commands(command.replace("DIR", "tests"))
    elif words[0] == "pytest":
        missing = [word for word in words[1:] if word.startswith("tests/") and not (ROOT / word).exists()]
        assert not missing, f"{missing} are gone"
    else:
        assert words[:2] == ["python", "-m"], f"nobody knows how to run {command}"
        text = _source(words[2])
        lacking = [word for word in words[3:] if word.startswith("--") and f'"{word}"' not in text]
        assert not lacking, f"{words[2]} has no {lacking}"


@cache
def _source(module: str) -> str:
    """The text of what ``python -m`` runs."""
    place = ROOT.joinpath(*module.split("."))
    return next(path for path in (place.with_suffix(".py"), place / "__main__.py") if path.exists()).read_text()
