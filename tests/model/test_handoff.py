"""The handoff's rules hold in every state of the main configurations, and each of them is needed."""

import pytest

from tests.model.handoff import Handoff
from tests.model.rules import CONFIGURATIONS, PAIRS, RULES
from tests.model.search import Search
from tests.model.state import Budget, Configuration, Removed

STATES_MAX = 250_000  # More than any main configuration has; a search that grows over it has a mistake.

PAIRED = frozenset.union(*PAIRS)
REMOVALS = [frozenset((rule,)) for rule in RULES if rule not in PAIRED] + PAIRS


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_with_all_rules_every_message_is_dispatched_exactly_once(name: str) -> None:
    result = Search(Handoff(CONFIGURATIONS[name])).run(STATES_MAX)
    assert result.complete
    assert not result.trace, "\n".join(result.trace)
    assert result.finals


@pytest.mark.parametrize("removed", REMOVALS, ids=lambda removed: "+".join(sorted(removed)))
def test_without_a_rule_something_goes_wrong(removed: Removed) -> None:
    configuration = CONFIGURATIONS[RULES[min(removed)].configuration]
    result = Search(Handoff(configuration, removed)).run(STATES_MAX)
    assert result.trace, f"{result.states} states and nothing wrong without {', '.join(removed)}"


@pytest.mark.parametrize("rule", sorted(PAIRED))
def test_either_rule_of_a_pair_is_enough(rule: str) -> None:
    result = Search(Handoff(CONFIGURATIONS[RULES[rule].configuration], frozenset((rule,)))).run(STATES_MAX)
    assert result.complete
    assert not result.trace, "\n".join(result.trace)


def test_a_trace_tells_the_shortest_way_to_the_harm() -> None:
    configuration = Configuration((0,), (0,), 1, Budget(target_crashes=1))
    trace = Search(Handoff(configuration, frozenset(("L2_answer",)))).run(STATES_MAX).trace
    assert trace[0] == "D connects to T0 as session 1 of epoch 1; W (0, 0)"
    assert trace[-2:] == [
        "T0 dies and restarts; batches in its log: 0",
        "=> row 0 is DISPATCHED in D_h, and the realtime log that it names does not have it",
    ]


def test_a_search_that_is_given_up_says_so() -> None:
    result = Search(Handoff(CONFIGURATIONS["frames"])).run(100)
    assert not result.complete and not result.trace
