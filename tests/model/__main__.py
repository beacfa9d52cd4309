"""Run the model: ``python -m tests.model [--without RULE[,RULE]] [--in CONFIGURATION] [--wide] [--each-rule]``.

Prints a line for each configuration, and the shortest trace when something is wrong. Exit 1 if it is, with all rules.
"""

import argparse
import sys

from tests.model.rules import CONFIGURATIONS, PAIRS, RULES, WIDE
from tests.model.search import Result, Search

STATES_MAX = 2_000_000  # About 2 GB of memory.


def main() -> int:
    """Search what the arguments name."""
    every = CONFIGURATIONS | WIDE
    parser = argparse.ArgumentParser(prog="python -m tests.model", description="Search the handoff's states.")
    parser.add_argument("--without", default="", help=f"rules to remove, with commas: {', '.join(RULES)}")
    parser.add_argument("--in", dest="only", choices=every, help="search this configuration only")
    parser.add_argument("--wide", action="store_true", help="search the wide configurations, up to a minute each")
    parser.add_argument("--each-rule", action="store_true", help="remove each rule in turn")
    parser.add_argument("--states-max", type=int, default=STATES_MAX, help="give up above so many states")
    arguments = parser.parse_args()
    removed = frozenset(filter(None, arguments.without.split(",")))
    if unknown := removed - set(RULES):
        parser.error(f"no rule is called {', '.join(sorted(unknown))}")
    names = [arguments.only] if arguments.only else list(WIDE if arguments.wide else CONFIGURATIONS)
    searches = [(name, removed) for name in names]
    if arguments.each_rule:
        removals = [frozenset((name,)) for name in RULES] + PAIRS
        searches = [(RULES[min(without)].configuration, without) for without in removals]
    elif removed and arguments.only is None:
        first = RULES[min(removed)].configuration
        searches.sort(key=lambda search: search[0] != first)
    wrong = False
    for name, without in searches:
        for rule in sorted(without):
            print(f"{rule}: {RULES[rule].text}")
        result = Search(every[name], without).run(arguments.states_max)
        print(
            _line(name, result), *(f"  {at:2} {told}" for at, told in enumerate(result.trace, 1)), sep="\n", flush=True
        )
        wrong = wrong or bool(result.trace) or not result.complete
        if result.trace and not arguments.each_rule:
            break
    return int(wrong and not removed and not arguments.each_rule)


def _line(name: str, result: Result) -> str:
    end = "nothing wrong" if result.complete else "given up"
    if result.trace:
        end = f"wrong after {len(result.trace) - 1} steps"
    return f"{name}: {result.states:,} states, {result.finals:,} final, {result.seconds:.1f} s, {end}"


if __name__ == "__main__":
    sys.exit(main())
