"""``python -m bench [CASE ...] [--runs N]``: run the cases, one JSON line a result, then the median of each.

Cases: schedule (batches and singles), steady (5,000/s and 20,000/s), restart (after kill -9, with 1 M pending). Parts
of delayd on their own: ``python -m bench.net``, ``bench.wheel``, ``bench.clients``, ``bench.disk``. A figure is of
this machine at this minute: steal and fsync stand beside it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial

from bench import schedule
from bench.machine import measured
from bench.restart import restart
from bench.steady import steady

Case = Callable[[], dict[str, float]]

CASES: dict[str, dict[str, Case]] = {
    "schedule": {"schedule batches of 500": schedule.batches, "schedule singles": schedule.singles},
    "steady": {"steady 5,000/s": partial(steady, 5_000), "steady 20,000/s": partial(steady, 20_000)},
    "restart": {"restart with 1 M pending": partial(restart, 1_000_000)},
}


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure real servers on loopback.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without one")
    parser.add_argument("--runs", type=int, default=3, help="of each case; the median is quoted (default: 3)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.cases) - set(CASES))
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; choose of {', '.join(CASES)}")
    for name in arguments.cases or CASES:
        for title, case in CASES[name].items():
            _run(title, case, arguments.runs)
    return 0


def _run(title: str, case: Case, runs: int) -> None:
    results = []
    for number in range(runs):
        results.append(measured(case))
        print(json.dumps({"case": title, "run": number + 1, **results[-1]}), flush=True)
    if runs > 1:
        figures = [name for name, value in results[0].items() if isinstance(value, int | float)]
        medians = {name: statistics.median([float(str(result[name])) for result in results]) for name in figures}
        print(json.dumps({"case": title, "median_of": runs, **medians}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
