"""Run the model: ``python -m tests.model [--without RULE[,RULE]] [--in CONFIGURATION] [--wide] [--each-rule]``.

Prints a line for each configuration, and the shortest trace when something is wrong. Exit 1 if it is, with all rules.
"""

import argparse
import sys

from tests.model import offers, rules
from tests.model.handoff import Handoff
from tests.model.offers import Offers
from tests.model.search import Result, Search

STATES_MAX = 2_000_000  # About 2 GB of memory.
CONFIGURATIONS = [*rules.CONFIGURATIONS, *offers.CONFIGURATIONS]
WIDE = [*rules.WIDE, *offers.WIDE]
RULES = rules.RULES | offers.RULES


def main() -> int:
    """Search what the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description="Search the states of the models.")
    parser.add_argument("--without", default="", help=f"rules to remove, with commas: {', '.join(RULES)}")
    parser.add_argument("--in", dest="only", choices=[*CONFIGURATIONS, *WIDE], help="search this configuration only")
    parser.add_argument("--wide", action="store_true", help="search the wide configurations, up to a minute each")
    parser.add_argument("--each-rule", action="store_true", help="remove each rule in turn")
    parser.add_argument("--states-max", type=int, default=STATES_MAX, help="give up above so many states")
    arguments = parser.parse_args()
    removed = frozenset(filter(None, arguments.without.split(",")))
    if unknown := removed - set(RULES):
        parser.error(f"no rule is called {', '.join(sorted(unknown))}")
    names = [arguments.only] if arguments.only else WIDE if arguments.wide else CONFIGURATIONS
    searches = [(name, removed) for name in names]
    if arguments.each_rule:
        removals = [frozenset((name,)) for name in RULES] + rules.PAIRS
        searches = [(RULES[min(without)].configuration, without) for without in removals]
    elif removed and arguments.only is None:
        searches = [(RULES[min(removed)].configuration, removed)]
    wrong = False
    for name, without in searches:
        for rule in sorted(without):
            print(f"{rule}: {RULES[rule].text}")
        result = search(name, without, arguments.states_max)
        print(
            _line(name, result), *(f"  {at:2} {told}" for at, told in enumerate(result.trace, 1)), sep="\n", flush=True
        )
        wrong = wrong or bool(result.trace) or not result.complete
        if result.trace and not arguments.each_rule:
            break
    return int(wrong and not removed and not arguments.each_rule)


def search(name: str, removed: frozenset[str], states_max: int) -> Result:
    """Search one configuration, without some rules."""
    of_offers = {**offers.CONFIGURATIONS, **offers.WIDE}
    if name in of_offers:
        return Search(Offers(of_offers[name], removed)).run(states_max)
    return Search(Handoff((rules.CONFIGURATIONS | rules.WIDE)[name], removed)).run(states_max)


def _line(name: str, result: Result) -> str:
    end = "nothing wrong" if result.complete else "given up"
    if result.trace:
        end = f"wrong after {len(result.trace) - 1} steps"
    return f"{name}: {result.states:,} states, {result.finals:,} final, {result.seconds:.1f} s, {end}"


if __name__ == "__main__":
    sys.exit(main())
