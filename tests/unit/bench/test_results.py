"""Results: lines are read, told as a table, drawn, and put between the comments of a page."""

import json
from pathlib import Path

import pytest

from bench import report
from bench.report import BEGIN, END, fill_in
from bench.results import Result, read_results
from bench.table import full_table

FACTS = {
    "size": "quick",
    "cpu": "A Processor",
    "cores": 2,
    "kernel": "6.1",
    "python": "3.11.7",
    "commit": "abc1234",
    "date": "2026-11-21T15:00:00Z",
}


def three(median: float, least: float, most: float) -> dict[str, float]:
    return {"median": median, "min": least, "max": most}


def lines() -> list[str]:
    beside = {"steal_s": three(0.1, 0, 0.2), "fsync_ms_p50": three(0.2, 0.1, 0.3), "fsync_ms_p99": three(2, 1, 3)}
    batches = {"case": "batches", "title": "schedule, batches of 500", **FACTS}
    steady = {"case": "steady-5000", "title": "steady 5,000/s", **FACTS}
    restart = {"case": "restart-1000000", "title": "restart with 1,000,000 pending", **FACTS}
    curve = [float(value) for value in range(20)]
    late = {
        "late_ms_p50": three(1.5, 1.4, 1.6),
        "late_ms_p99": three(4, 3.5, 5),
        "late_ms_p99_9": three(9, 8, 10),
        "late_ms_max": three(20, 12, 30),
        "early": three(0, 0, 0),
        "lost": three(0, 0, 0),
    }
    first = {"pending": three(1e6, 1e6, 1e6), "first_dispatch_s": three(2.5, 2.5, 2.5)}
    written: list[dict[str, object]] = [
        {**batches, "side": "delayd", "run": 1, "messages_s": 612_000},
        {
            **batches,
            "of": {
                "delayd": {"runs": 3, "messages_s": three(612_345, 590_000, 650_000), **beside},
                "redis_py": {"runs": 3, "messages_s": three(102_000, 90_000, 110_000), **beside},
                "ratio": {"redis_py": three(6.004, 5.4, 7.2)},
            },
        },
        {**steady, "side": "delayd", "run": 1, "late_ms_curve": curve},
        {**steady, "side": "redis", "run": 1, "skipped": "apt-get install redis-server"},
        {**steady, "of": {"delayd": {"runs": 3, **late, **beside}, "ratio": {}}},
        {**restart, "of": {"delayd": {"runs": 1, **first, **beside}, "ratio": {}}},
    ]
    return [json.dumps(line) for line in written]


@pytest.fixture
def results() -> dict[str, Result]:
    return read_results(lines())


def test_results_hold_the_figures_the_curves_and_why_a_side_is_missing(results: dict[str, Result]) -> None:
    assert list(results) == ["batches", "steady-5000", "restart-1000000"]
    assert results["batches"].median("delayd", "messages_s") == 612_345
    assert results["batches"].median("redis", "messages_s") is None
    assert results["batches"].runs == {"delayd": 3, "redis_py": 3}
    assert len(results["steady-5000"].curves["delayd"]) == 1
    assert results["steady-5000"].problems == {"redis": "apt-get install redis-server"}


def test_of_a_case_that_was_measured_again_the_later_result_counts() -> None:
    again = [line.replace("612345", "700000").replace('"skipped"', '"of_old"') for line in lines()]
    results = read_results([*lines(), *again[:2]])
    assert results["batches"].median("delayd", "messages_s") == 700_000
    assert list(results)[-1] == "batches"


def test_the_table_tells_medians_spreads_quotients_and_what_stood_beside(results: dict[str, Result]) -> None:
    table = full_table(results).splitlines()
    assert "A Processor, 2 cores, Linux 6.1, Python 3.11.7; 2026-11-21, commit abc1234" in table[0]
    assert "medians of 1 or 3 runs" in table[0]
    assert table[4] == (
        "| schedule, batches of 500 | 612,000 (590,000 to 650,000)/s | 102,000 (90,000 to 110,000)/s | – "
        "| 6 (5.4 to 7.2) x | 0.1; 0.2 / 2 |"
    )
    assert table[5].startswith(
        "| steady 5,000/s | 1.5 / 4 / 9 / 20 ms (p99 3.5 to 5); early 0 | – | apt-get install redis-server |"
    )
    assert table[6].startswith("| restart with 1,000,000 pending | 2.5 s |")
    assert len({line.count("|") for line in table[2:]}) == 1, "every row has all cells"


def test_a_page_gets_what_stands_between_its_comments_and_nothing_else() -> None:
    page = f"above\n{BEGIN}\nold\n{END}\nbelow\n"
    assert fill_in(page, "new") == f"above\n{BEGIN}\nnew\n{END}\nbelow\n"
    assert fill_in(fill_in(page, "new"), "newer") == f"above\n{BEGIN}\nnewer\n{END}\nbelow\n"


def test_a_report_writes_pages_and_small_pictures(results: dict[str, Result], tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "performance.md").write_text(f"{BEGIN}\n{END}\n")
    (tmp_path / "README.md").write_text("without comments\n")
    written = report.report(results, tmp_path)
    pictures = sorted((tmp_path / "docs" / "plots").iterdir())
    assert [path.stem for path in pictures] == ["lateness", "restart", "throughput"]
    assert all(path.stat().st_size < 60_000 for path in pictures)
    assert set(written) == {*pictures, tmp_path / "docs" / "performance.md"}
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "| schedule, batches of 500 | 612,000" in page
    assert "![lateness](plots/lateness.png)" in page
    assert (tmp_path / "README.md").read_text() == "without comments\n"
