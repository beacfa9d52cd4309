"""The pages of operations agree with the code: files, limits, ports, and what the program writes on each page."""

import ast
import re
from pathlib import Path

import pytest

from delayd.config import CONFIGS, load_config
from delayd.net.budget import CONNECTIONS_MAX, FILES_MIN
from delayd.net.program import STOP_MS_MAX
from tests.unit.pages import PAGES, ROOT, STATE_KEYS, as_on_the_page, files_on_the_page, logged, written

PAGE = (ROOT / "docs" / "operations.md").read_text()
LOG_LINES = (ROOT / "docs" / "log-lines.md").read_text()
SOURCES = ("delayd", "meta", "realtime", "cli", "spark")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_as_the_program_writes_it(page: Path) -> None:
    assert page.read_text() == written(page.read_text()), "run python -m tests.unit.pages"


def test_the_page_of_the_state_has_each_key_that_a_source_names() -> None:
    told = {getattr(module, name) for _, module, name in STATE_KEYS} | {b"identity"}
    sources = (path.read_text() for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    named = {
        key.encode() for text in sources for key in re.findall(r'^\w*(?:PREFIX|KEY) = b"(.+)"', text, re.MULTILINE)
    }
    assert len(named) > 30
    assert named == told


def test_the_page_of_log_lines_says_what_to_do_about_each_that_needs_somebody_and_of_no_other() -> None:
    told = LOG_LINES[: LOG_LINES.index("## All lines")]
    rows = re.findall(r"^- (`[^:]+`): ", told, re.MULTILINE)
    assert len(rows) > 50
    assert {event for row in rows for event in re.findall(r"`(\w+)`", row)} <= {line.event for line in logged()}
    urgent = {line.event for line in logged() if line.levels & {"error", "critical"}}
    assert urgent <= {*re.findall(r"`(\w+)`", told)} | {"operator"}
    assert len(logged()) > 200 and all(line.levels for line in logged()), "the calls were found"


def test_the_page_has_a_row_for_each_folder_of_logs() -> None:
    told = files_on_the_page()
    folders = ("message", "schedule", "dispatch", "seal", "keys", "quarantine", "consume", "pull")
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


def test_a_server_says_of_no_other_state_that_it_waits_for_an_operator() -> None:
    """Only what is refused for now, which ends by itself, is told in words of its own."""
    built = set()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text()
        if re.search(r"\bWait\(", source):
            for function in ast.walk(ast.parse(source)):
                if isinstance(function, ast.FunctionDef) and re.search(r"\bWait\(", ast.unparse(function)):
                    built.add((str(path.relative_to(ROOT)), function.name))
    assert built == {("delayd/machine/operating.py", "wait"), ("delayd/delay/standing.py", "refuses")}
