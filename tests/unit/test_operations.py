"""The pages of operations agree with the code: every setting with its default, every line of the log, every file."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from delayd.config import CONFIGS, Value, load_config
from delayd.delay.books.retention import NOT_SEALED
from delayd.net.files import CONNECTIONS_MAX, FILES_MIN
from delayd.net.program import STOP_MS_MAX
from delayd.net.registration import RegistrationState
from delayd.waits import WaitKind
from tests.operations_page import LOG_LINES, PAGE, ROOT, as_on_the_page, files_on_the_page

SOURCES = ("delayd", "meta", "realtime", "cli", "spark")
LEVELS = ("info", "warning", "error", "critical")  # Debugging is off, and no change of state.
SAYS_LEVEL_LATER = "log"  # Its level is computed, so that the page may name several.
CALLS = (*LEVELS, "exception", SAYS_LEVEL_LATER)
CALLED = re.compile(rf"\b(?:log|limited)\.(?:{'|'.join(CALLS)})\b")

# Events whose name is computed, by the rest of their line.
COMPUTED = {
    "%s meta=%s code=%s reason=%r": {RegistrationState.AWAY.value, RegistrationState.REFUSED.value},
    "%s hour=%s reason=%r": {NOT_SEALED, "seal_differs", "content_differs"},
}


class Line(NamedTuple):
    """A line that the code logs or the page tells of."""

    event: str
    keys: tuple[str, ...]


def _logged() -> Iterator[tuple[str, str, str]]:
    """Path, level and format of each logging call."""
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text()
        # Most modules log nothing, and each worker makes these syntax trees before it runs any test.
        if not CALLED.search(source):
            continue
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "limited" as name), attr=level)) if (
                    level in CALLS
                ):
                    # A LogLimit is told the cause first.
                    form = node.args[1 if level == SAYS_LEVEL_LATER or name == "limited" else 0]
                    assert isinstance(form, ast.Constant), f"{path}:{node.lineno} logs no literal"
                    yield str(path.relative_to(ROOT)), level.replace("exception", "error"), str(form.value)


def _line(form: str) -> Line:
    return Line(form.split()[0], tuple(re.findall(r"(\w+)=", form)))


def _told() -> dict[Line, set[str]]:
    """The lines of the page with their levels."""
    told: dict[Line, set[str]] = {}
    for cells, levels in re.findall(
        r"^\| (`[^|]+`) \| ((?:info|warning|error|critical)[^|]*) \|", LOG_LINES, re.MULTILINE
    ):
        for form in re.findall(r"`([^`]+)`", cells):
            told.setdefault(_line(form), set()).update(levels.split(", "))
    return told


LOGGED = list(_logged())
TOLD = _told()


def _lines(form: str) -> list[Line]:
    if not form.startswith("%s"):
        return [_line(form)]
    return [_line(form.replace("%s", event, 1)) for event in sorted(COMPUTED[form])]


@pytest.mark.parametrize(("path", "level", "form"), LOGGED)
def test_each_line_of_the_log_is_on_the_page_with_its_level(path: str, level: str, form: str) -> None:
    for line in _lines(form):
        assert line in TOLD, f"{path} logs {form!r}; docs/log-lines.md has no `{line.event} {'= '.join(line.keys)}=`"
        if level != SAYS_LEVEL_LATER:
            assert level in TOLD[line], f"{path} logs {line.event} as {level}"


def test_the_page_tells_of_no_line_that_is_not_logged() -> None:
    assert len(LOGGED) > 50, "the calls were found"
    assert set(TOLD) == {line for _, _, form in LOGGED for line in _lines(form)}
    assert {level for levels in TOLD.values() for level in levels} <= set(LEVELS)


@pytest.mark.parametrize("role", CONFIGS)
def test_each_setting_is_on_the_page_with_its_default_and_range(role: str) -> None:
    section = re.search(rf"^\*\*`\[{role}\]`\*\*\n\n(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    told = re.findall(r"^\| `(\w+)` \| `([^`]+)`[^|]* \| ([^|]*)\| (.+) \|$", section[1], re.MULTILINE)
    expected = []
    defaults = CONFIGS[role]()
    for each in fields(defaults):
        bounds = f"{each.metadata['least']} to {each.metadata['most']}" if "least" in each.metadata else ""
        expected.append((each.name, _toml(getattr(defaults, each.name)), bounds))
    assert [(name, default, bounds.strip()) for name, default, bounds, _ in told] == expected
    assert all(len(reason) > 5 for *_, reason in told)


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else f'"{value}"'


def test_the_page_has_a_row_for_each_folder_of_logs() -> None:
    told = files_on_the_page()
    folders = ("message", "schedule", "dispatch", "seal", "keys", "quarantine", "consume", "pull", "tally", "index")
    assert {path.split("/")[1] for path in told if path.endswith(".log")} == set(folders)
    assert as_on_the_page("realtime/consume/00000001/00000000000000000000.log") in told
    assert as_on_the_page("delay/schedule/20261121/2026112115.log") in told


def test_the_page_names_the_limits_of_the_code() -> None:
    assert f"warns (`few_files`) below {FILES_MIN:,} " in PAGE
    assert f"Each server takes {CONNECTIONS_MAX:,} connections." in PAGE
    assert f"{STOP_MS_MAX / 1000:g}" == "5" and "stops a server within five seconds" in PAGE


@pytest.mark.parametrize("role", CONFIGS)
def test_the_page_names_the_port_of_each_server(role: str) -> None:
    assert f"| {role} | {CONFIGS[role]().port} " in PAGE


def test_the_example_of_a_config_file_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "delayd.toml"
    path.write_text(example)
    for role in CONFIGS:
        assert load_config(role, str(path)).data == "/var/lib/delayd"


def _in_capitals(template: str) -> str:
    """The words that are filled in, as the page writes them."""
    return re.sub(r"\{(\w+)\}", lambda word: word[1].upper(), template)


def test_each_state_that_waits_for_an_operator_is_on_the_page_with_what_leads_out_of_it() -> None:
    section = PAGE[PAGE.index("## States") : PAGE.index("## Damage")]
    told = re.findall(r"^\| `([^|]+)` \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    assert [row[:2] for row in told] == [tuple(map(_in_capitals, kind.value)) for kind in WaitKind]
    assert all(len(cost) > 5 for *_, cost in told)


def test_a_server_says_of_no_other_state_that_it_waits_for_an_operator() -> None:
    """Only what is refused for now, which ends by itself, is told in words of its own."""
    built = set()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text()
        if re.search(r"\bWait\(", source):
            for function in ast.walk(ast.parse(source)):
                if isinstance(function, ast.FunctionDef) and re.search(r"\bWait\(", ast.unparse(function)):
                    built.add((str(path.relative_to(ROOT)), function.name))
    assert built == {("delayd/waits.py", "wait"), ("delayd/delay/standing.py", "refuses")}
