"""``python -m bench [CASE ...] [--full]``: run the cases against real servers, one JSON line a result.

Each run of a side gives a line (`run`), and each case one with median, least and most of its runs and the quotients to
Redis (`of`). ``python -m bench.report FILE`` makes the table and the plots of docs/performance.md from them. A figure
is of this machine at this minute: steal and fsync stand beside it, and a run with more than 0.2 s of steal is repeated.

Parts of delayd on their own: ``python -m bench.net``, ``bench.wheel``, ``bench.clients``, ``bench.disk``.
Two states of the code beside each other: ``python -m bench.cpu --against WORKTREE``.
"""

import argparse
import json
import signal
import sys
import time

from bench import machine
from bench.cases import cases
from bench.runs import Runner

BUDGET_S = {
    "tiny": 0,
    "quick": 190,
    "full": 1_260,
}  # After this time each case runs only once, and nothing is repeated.


def main() -> int:
    """Run what the command line names."""
    names = [case.name for case in cases("full")]
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure real servers on loopback.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)}; all without one")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_const", const="full", dest="size", help="all sizes; about 25 minutes")
    size.add_argument("--tiny", action="store_const", const="tiny", dest="size", help="to see that each case works")
    parser.add_argument("--runs", type=int, help="of each case (default: 3, and 1 of the long ones without --full)")
    arguments = parser.parse_args()
    size_name = arguments.size or "quick"
    chosen = cases(size_name)
    unknown = sorted(set(arguments.cases) - {case.name for case in chosen})
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; choose of {', '.join(case.name for case in chosen)}")
    # When this process is told to end, a run under way must end its own processes, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    end = time.monotonic() + BUDGET_S[size_name]
    runner = Runner(size_name, _print, {"size": size_name, **machine.facts()}, arguments.runs, end)
    for case in chosen:
        if not arguments.cases or case.name in arguments.cases:
            runner.run(case)
    return 1 if runner.failed else 0


def _print(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
