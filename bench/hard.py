"""Lateness where it is hard: on a slow disk, with several targets, with many consumers; in two states of the code.

Run ``python -m bench.hard --against WORKTREE [--turns 3] [CASE ...]``: one JSON line for each case, with median, least
and most of each state; the two take turns. Real servers on loopback, 5,000 messages a second with delays of 1 to 5 s.

    disk        each fsync and fdatasync of a server takes 20 ms longer (a small library before libc; needs gcc)
    targets     16 subjects over four realtime servers
    consumers   64 consumers of one group take one subject
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import uvloop

from bench.arrivals import consume
from bench.figures import Figures, spreads
from bench.servers import Servers, servers
from bench.steady import DRAIN_S, producing, subject_name
from delayd.secret import SECRET_FILE

HERE = Path(__file__).resolve().parent.parent
NOW, BEFORE = "now", "before"
RATE, SECONDS, SETTLE_S = 5_000, 10, 5
SYNC_MS = 20
SUBJECTS, TARGETS, CONSUMERS = 16, 4, 64
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
#define SLOW(name) int name(int fd) {\\
    static int (*next)(int); if (!next) next = (int (*)(int))dlsym(RTLD_NEXT, #name);\\
    usleep(%d * 1000); return next(fd); }
SLOW(fsync)
SLOW(fdatasync)
"""


def disk() -> Figures:
    """Each sync takes longer."""
    with tempfile.TemporaryDirectory(prefix="delayd-bench-") as folder:
        source, library = Path(folder, "slow.c"), Path(folder, "slow.so")
        source.write_text(SHIM % SYNC_MS)
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        os.environ["LD_PRELOAD"] = str(library)
        with servers("realtime", "delay") as running:
            return _steady(running, 1, 1)


def targets() -> Figures:
    """Several realtime servers."""
    with servers("realtime", "delay") as running, _more_targets(running, TARGETS - 1):
        return _steady(running, SUBJECTS, 1)


def consumers() -> Figures:
    """Many consumers of one group."""
    with servers("realtime", "delay") as running:
        return _steady(running, 1, CONSUMERS)


CASES = {"disk": disk, "targets": targets, "consumers": consumers}


def _steady(running: Servers, subjects: int, consumers: int) -> Figures:
    expected = RATE * (SECONDS + SETTLE_S)
    names = [subject_name(number) for number in range(subjects) for _ in range(consumers)]
    with producing("delayd", running.meta, RATE, SECONDS + SETTLE_S, subjects):
        arrivals = uvloop.run(consume(running.meta, names, expected, SECONDS + SETTLE_S + DRAIN_S))
    return {**arrivals.figures(SETTLE_S), "lost": expected - arrivals.count}


@contextlib.contextmanager
def _more_targets(running: Servers, count: int) -> Iterator[None]:
    """So many realtime servers more, each with a directory of its own."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="delayd-bench-")))
            shutil.copy(running.data / SECRET_FILE, folder / SECRET_FILE)
            Servers(folder, stack, {}, running.environment, running.meta).start("realtime")
        yield


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.hard", description="Compare lateness where it is hard.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without one")
    parser.add_argument("--against", type=Path, metavar="WORKTREE", help="the other state of the code")
    parser.add_argument("--turns", type=int, default=3, help="of each state and case")
    parser.add_argument("--side", action="store_true", help="measure this state once, and print its figures")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.cases) - set(CASES))
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; choose of {', '.join(CASES)}")
    if arguments.side:
        for case in arguments.cases:
            print(json.dumps(CASES[case]()), flush=True)
        return
    sides = {NOW: HERE} if arguments.against is None else {NOW: HERE, BEFORE: arguments.against.resolve()}
    for case in arguments.cases or CASES:
        figures: dict[str, list[Figures]] = {name: [] for name in sides}
        for turn in range(arguments.turns):
            for name in reversed(sides) if turn & 1 else sides:
                figures[name].append(_measured(sides[name], case))
        told = {name: spreads(runs) for name, runs in figures.items()}
        print(json.dumps({"bench": "hard", "case": case, **told}), flush=True)


def _measured(tree: Path, case: str) -> Figures:
    # This file measures both: what it imports is that of the other state.
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--side", case]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, check=True
    )
    figures: Figures = json.loads(done.stdout)
    return figures


if __name__ == "__main__":
    main()
