"""Messages are sent as columns in groups in which each key has its messages in their order."""

from __future__ import annotations

import random

import pytest

from delayd.errors import BadArgument
from delayd.gateway.keeping import groups_of
from delayd.gateway.streams import Wished
from delayd.gateway.values import NewMessage

AT_MS = 1_800_000_000_000


def test_a_key_that_comes_in_another_form_ends_its_group() -> None:
    wished: list[Wished] = [
        NewMessage(body="", key="a", delay="1h"),
        NewMessage(body="", delay="1h"),
        NewMessage(body="", key="b", delay_ms=1),
        NewMessage(body="", key="a", deliver_at_ms=AT_MS),
        NewMessage(body="", key="a", delay="1h"),
        NewMessage(body="", key="b", delay="1h", tags=["t"], ordering_key="o", ttl_ms=1),
        BadArgument("no message"),
        NewMessage(body="", key="c", delay="1h", spread_ms=1),
    ]
    assert [group.rows for group in groups_of(wished)] == [[0, 2], [1], [3], [4, 5], [6, 7]]
    assert [sorted(group.keys) for group in groups_of(wished)] == [["a", "b"], [], ["a"], ["a", "b"], ["c"]]


@pytest.mark.parametrize("seed", range(30))
def test_each_key_has_its_rows_in_their_order(seed: int) -> None:
    chance = random.Random(seed)
    forms = [{"delay": "1h"}, {"deliver_at_ms": AT_MS}, {"delay": "1h", "spread_ms": 5}, {}]
    wished: list[Wished] = [
        NewMessage(
            body="",
            key=chance.choice((None, "a", "b", "c", "d")),
            on_conflict=chance.choice(("reject", "replace")),
            **chance.choice(forms),  # type: ignore[arg-type]
        )
        for _ in range(200)
    ]
    groups = groups_of(wished)
    assert sorted(row for group in groups for row in group.rows) == list(range(len(wished)))
    sent = [row for group in groups for row in group.rows]
    for key in "abcd":
        own = [row for row in sent if getattr(wished[row], "key", None) == key]
        assert own == sorted(own)
