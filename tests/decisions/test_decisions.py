"""The rules of docs/keys.md hold in every state of the configurations, and each of them is needed."""

import pytest

from tests.decisions.rules import CONFIGURATIONS, RULES
from tests.decisions.search import search

STATES_MAX = 150_000  # More than any configuration has; a search that grows over it has a mistake.


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_rules_C1_C2_P1_hold_in_every_state(name: str) -> None:
    result = search(CONFIGURATIONS[name], frozenset(), STATES_MAX)
    assert not result.trace, "\n".join(result.trace)
    assert result.complete
    assert result.finals


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_something_goes_wrong(rule: str) -> None:
    result = search(CONFIGURATIONS[RULES[rule].configuration], frozenset((rule,)), STATES_MAX)
    assert result.trace, f"{result.states} states and nothing wrong without {rule}: {RULES[rule].text}"


def test_a_trace_tells_the_shortest_way_to_the_harm() -> None:
    trace = search(CONFIGURATIONS["cancel"], frozenset(("claim_first",)), STATES_MAX).trace
    assert trace[0].startswith("a caller asks: cancel")
    assert "row 1 is sent" in trace
    assert trace[-1].startswith("=> row 1")
