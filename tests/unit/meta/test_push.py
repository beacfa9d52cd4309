"""Meta keeps push targets, durably, and lets nobody overwrite a change that he has not seen (docs/push.md)."""

from __future__ import annotations

import pytest

from delayd.errors import BadArgument
from delayd.testing.state import MemoryState
from delayd.wire.push import TARGETS_MAX, PushTarget
from meta.push import GATEWAY_KEPT_MS, PushTable, target_key, target_value

TARGET = PushTarget("a", "orders.paid", "https://example.com/", "push/a", f"whsec_{'A' * 40}")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.ms = 1_000

    def monotonic_ms(self) -> int:
        return self.ms

    def now_ms(self) -> int:
        return self.ms


def table_of(*targets: PushTarget, clock: Clock | None = None) -> PushTable:
    state = MemoryState()
    state.commit([(target_key(each.name), target_value(each)) for each in targets])
    return PushTable(state, "state.lmdb", clock or Clock())  # type: ignore[arg-type]


def test_a_change_is_for_the_version_that_is_there() -> None:
    table = table_of(TARGET._replace(version=3))
    table.check_change(TARGET, 3)
    for was, what in ((0, "already"), (2, "meanwhile"), (4, "meanwhile")):
        with pytest.raises(BadArgument, match=what):
            table.check_change(TARGET, was)
    with pytest.raises(BadArgument, match="no push target"):
        table.check_change(TARGET._replace(name="b"), 1)
    with pytest.raises(BadArgument, match="no push target"):
        table.check_known("b")


def test_the_revision_is_another_one_exactly_when_a_target_is() -> None:
    first, second = table_of(TARGET), table_of(TARGET)
    assert first.revision == second.revision != table_of().revision
    second.set(TARGET._replace(url="https://example.com/other", version=2))
    assert first.revision != second.revision
    second.set(TARGET)
    assert first.revision == second.revision
    second.remove("a")
    assert second.revision == table_of().revision


def test_pages_go_on_behind_a_name() -> None:
    table = table_of(*(TARGET._replace(name=f"n{number:03}") for number in range(120)))
    names, more, after = list[str](), True, ""
    while more:
        page, more = table.page(after)
        names += [each.name for each in page]
        after = names[-1]
    assert names == [f"n{number:03}" for number in range(120)]


def test_there_are_at_most_so_many() -> None:
    table = table_of(*(TARGET._replace(name=f"n{number}") for number in range(TARGETS_MAX)))
    with pytest.raises(BadArgument, match="delete one first"):
        table.check_change(TARGET, 0)
    table.check_change(TARGET._replace(name="n7"), 1)


def test_gateways_that_ask_share_the_work_until_they_are_silent() -> None:
    clock = Clock()
    table = table_of(clock=clock)
    assert [table.gateways(each) for each in (0, 7, 7, 8, 0)] == [0, 1, 1, 2, 2]
    clock.ms += GATEWAY_KEPT_MS
    assert table.gateways(8) == 2
    clock.ms += 1
    assert table.gateways(8) == 1
