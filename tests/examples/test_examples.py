"""Each example runs as examples/README.md says, against one ``delayd up``, with sizes and delays made small."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from delayd.errors import BadSetting
from spark.session import check_spark
from tests.end_to_end.up_process import Up, is_running, up
from tests.small_spark import environment
from tests.tamper.archived import honest_archive

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
README = (EXAMPLES / "README.md").read_text()
COMMANDS = dict(re.findall(r"^\| `((?:python|jupyter lab) examples/(\S+))` \|", README, re.MULTILINE))
NO_PROGRAMS_OF_THEIR_OWN = {
    *("README.md", "__init__.py", "__pycache__", "audit.sql", "archive.sql"),
    *("check_proof.py", "demo.py", "reference_reader.py"),  # Other tests run them.
}
DEADLINE_S = 100.0  # One program ends within it; all of them take half a minute on a machine that does nothing else.

# What an example that reads the logs finds there has to be put there first.
SMALL_BATCH = ("python examples/batch_of_a_million.py", "--count", "2000")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("examples"), "--port", "0") as running:
        yield running.until_ready()


def test_the_readme_lists_each_example_with_the_command_that_is_tested() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} - NO_PROGRAMS_OF_THEIR_OWN == set(COMMANDS.values())
    source = Path(__file__).read_text()
    assert [command for command in COMMANDS if f'"{command}"' not in source] == []


def test_each_example_says_what_it_shows_how_to_run_it_and_what_it_takes() -> None:
    for command, name in COMMANDS.items():
        if name.endswith(".py"):
            text = (EXAMPLES / name).read_text()
            assert text.startswith('"""') and f"    {command}" in text.split('"""')[1], name
            assert "delayd._" not in text and len(text.splitlines()) <= 80, name


def test_an_order_that_is_not_paid_in_time_is_cancelled(servers: Up) -> None:
    said = run(servers, "python examples/order_timeout.py", "--orders", "6", "--pay-within", "0.3")
    assert said[-1] == "cancelled: 3 paid: 3"
    assert sum(line.endswith("ms after its time was over") for line in said) == 3


def test_a_reminder_waits_for_months_and_one_that_is_overdue_leaves_at_once(servers: Up) -> None:
    said = run(servers, "python examples/reminder.py")
    assert sum("T09:00:00" in line and "days" in line for line in said) == 2
    assert "leaves at once" in said[2] and said[3].startswith("mail to linus: your contract ends on ")


def test_a_call_that_fails_is_repeated_with_growing_delays_and_given_up(servers: Up) -> None:
    said = run(servers, "python examples/retry_with_backoff.py", "--first-delay", "0.1", "--tries", "4")
    assert any(re.fullmatch(r"shaky/\w+: try 3 worked", line) for line in said)
    assert re.fullmatch(r"gone/\w+: given up after 4 tries", said[-1])
    waits = [float(line.split()[-2]) for line in said if line.startswith("gone/") and "failed" in line]
    assert len(waits) == 3 and waits[0] < waits[1] < waits[2]


def test_a_newsletter_comes_at_an_even_rate(servers: Up) -> None:
    given = ("--recipients", "36000", "--hours", "0.1", "--watch", "2", "--start-in", "1")
    said = run(servers, "python examples/rate_spreading.py", *given)
    assert re.fullmatch(r"36,000 messages are kept after [0-9.]+ s; 100 a second over 0.1 h", said[0])
    assert said[1:] == ["second 1: 100 messages", "second 2: 100 messages"]


def test_a_service_finishes_what_it_holds_when_it_is_told_to_stop(servers: Up) -> None:
    process = start(servers, "python examples/asyncio_service.py", "--rate", "50", "--delay", "0.1")
    assert process.stdout is not None
    said = [process.stdout.readline().strip() for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, "")
    assert said[0].startswith("the first order is kept as ") and said[1].startswith("the first order was done ")
    *counts, stopped = rest.splitlines()
    numbers = {words[0]: int(words[1]) for words in map(str.split, counts)}
    assert stopped == "stopped" and numbers["took"] >= numbers["did"] >= 1


def test_a_batch_comes_once_each(servers: Up) -> None:
    said = run(servers, "python examples/batch_of_a_million.py", "--count", "30000")
    assert said[0].startswith("30,000 messages are kept, on disk, after ")
    assert said[-1] == "missing 0, twice 0, early 0"


def test_a_plan_of_two_years_is_read_back_from_the_disk(servers: Up) -> None:
    said = run(servers, "python examples/two_year_plan.py", "--customers", "10", data=servers.data)
    assert said[0].startswith("240 instalments are kept, the last ones for 01 ")
    assert said[1].startswith("refused: ") and "horizon of 732 days" in said[1]
    assert len(said) == 26 and all(line.endswith(": 10 instalments") for line in said[2:])


def test_the_books_balance_after_a_crash(servers: Up) -> None:
    said = run(servers, "python examples/crash_and_audit.py", "--messages", "8000", data=servers.data)
    assert said[0].startswith("kill -9 ")
    assert said[1] == "the consumer has 8,000 of 8,000 messages, 0 of them twice"
    assert said[-1] == "lost 0, duplicate 0, early 0, orphan 0"


def test_a_server_that_this_program_did_not_start_is_not_killed(servers: Up, tmp_path: Path) -> None:
    pid = servers.ready("delay")[-1].pid
    # Nobody holds this LOCK: whoever has the number now is somebody else.
    (tmp_path / "delay").mkdir()
    (tmp_path / "delay" / "LOCK").write_text(f"{pid} delay")
    process = start(servers, "python examples/crash_and_audit.py", "--messages", "400", "--data", str(tmp_path))
    said, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1 and "no delay server runs on" in errors, said + errors
    assert is_running(pid)


def test_the_notebook_of_the_logs_runs_from_top_to_bottom(servers: Up) -> None:
    run(servers, *SMALL_BATCH)
    program = program_of("jupyter lab examples/read_the_logs.ipynb")
    said = finish(spawn(servers, [sys.executable, "-W", "error", "-c", program]))
    assert "the books balance" in said
    assert any(
        re.fullmatch(r"million\.\w+: 2,000 messages, 2,000 dispatched, median .* ms late", line) for line in said
    )


@pytest.mark.spark
@pytest.mark.timeout(400)
def test_the_notebook_of_a_fleet_runs_from_top_to_bottom(servers: Up, tmp_path: Path) -> None:
    need_spark()
    program = program_of("jupyter lab examples/books_of_a_fleet.ipynb")
    own = environment(tmp_path, DELAYD_ARCHIVE=str(honest_archive()))
    process = spawn(servers, [sys.executable, "-W", "error", "-c", program], own)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    lines = said.splitlines()
    assert "the books balance" in lines and "Spark and DuckDB agree on 38 messages" in lines
    assert [line for line in lines if re.fullmatch(r"000000000000de1a: 3 seals, the last one is [0-9a-f]{64}", line)]
    assert "0000000000007002 orders.us: 4 messages, median 0 ms late" in lines


def program_of(command: str) -> str:
    """The program of a notebook, which is kept without outputs: one namespace, cell by cell, as Jupyter runs it."""
    assert command in COMMANDS
    notebook = json.loads((REPOSITORY / command.split()[-1]).read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    return "\n\n".join("".join(cell["source"]) for cell in cells)


@pytest.mark.spark
@pytest.mark.timeout(400)
def test_spark_reads_the_logs_of_the_servers(servers: Up, tmp_path: Path) -> None:
    need_spark()
    run(servers, *SMALL_BATCH)
    words = "--data", str(servers.data), "--master", "local[1]"
    process = start(servers, "python examples/spark_audit.py", *words, environment=environment(tmp_path))
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert re.search(r"^\|million\.\w+ *\|2000 +\|2000 +\|", said, re.MULTILINE)
    assert re.search(r"^pending \d+, overdue 0, doubled 0, early 0$", said, re.MULTILINE)


def need_spark() -> None:
    try:
        check_spark()
    except BadSetting as error:
        pytest.skip(str(error))


def run(servers: Up, command: str, *given: str, data: Path | None = None) -> list[str]:
    """Run an example to its end, which is to be a good one; what it said, line by line."""
    return finish(start(servers, command, *given, *(() if data is None else ("--data", str(data)))))


def start(
    servers: Up, command: str, *given: str, environment: Mapping[str, str] = os.environ
) -> "subprocess.Popen[str]":
    """Start an example, from the repository as its README says."""
    assert command in COMMANDS
    python, program = command.split()
    assert python == "python"
    return spawn(servers, [sys.executable, program, *given], environment)


def spawn(servers: Up, command: list[str], environment: Mapping[str, str] = os.environ) -> "subprocess.Popen[str]":
    places = {"DELAYD_META": servers.meta, "DELAYD_DATA": str(servers.data)}
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**environment, **places},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: "subprocess.Popen[str]") -> list[str]:
    """Wait for the end of a program; its lines."""
    said, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, ""), said + errors
    return said.splitlines()
