"""What a realtime server offers before it is durable harms nobody, and each rule about it is needed (rule L2)."""

import pytest

from tests.model.offers import CONFIGURATIONS, RULES, Offers
from tests.model.search import Search

STATES_MAX = 250_000  # More than any main configuration has; a search that grows over it has a mistake.


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_with_all_rules_each_message_is_done_once_and_never_comes_again(name: str) -> None:
    result = Search(Offers(CONFIGURATIONS[name])).run(STATES_MAX)
    assert result.complete
    assert not result.trace, "\n".join(result.trace)
    assert result.finals


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_something_goes_wrong(rule: str) -> None:
    result = Search(Offers(CONFIGURATIONS[RULES[rule].configuration], frozenset((rule,)))).run(STATES_MAX)
    assert result.trace, f"{result.states} states and nothing wrong without {rule}"


def test_a_trace_tells_how_an_acknowledged_message_comes_again() -> None:
    trace = Search(Offers(CONFIGURATIONS["offers-twice"], frozenset(("L2_acks",)))).run(STATES_MAX).trace
    assert trace[0] == "T writes message 0"
    assert trace[-1] == "=> message 0 comes again, and its consumer was told that it is done"
