"""What meta answers is held against what was asked (rule E1)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from delayd.config import DelayConfig
from delayd.delay.core import DelayCore
from delayd.delay.server import DelayServer
from delayd.errors import DelaydError
from delayd.wire.frame import HeadValue
from delayd.wire.meta import Routes, read_moves, read_subject_page


def test_rule_E1_routes_that_nobody_asked_for_are_no_routes() -> None:
    told: list[tuple[dict[bytes, int], list[bytes]]] = []
    server = DelayServer(DelayConfig(data="unused"), lambda error: None)
    dispatcher = SimpleNamespace(routed=lambda routes, unrouted: told.append((routes, unrouted)))
    server._core = cast(DelayCore, SimpleNamespace(handoff=SimpleNamespace(dispatcher=dispatcher)))
    server._rearming = True  # No loop runs here.
    routes = {"a": 7, "\udcff": 8, "é": 9, "other": 10}
    server._routed([b"a", b"b", b"c"], Routes(routes, [], ["b", "é", "x" * 5_000]))
    assert told == [({b"a": 7}, [b"b", b"c"])]


@pytest.mark.parametrize("number", [True, -1, 1 << 64, 1.0, None, "1"])
def test_rule_E1_moves_and_subjects_have_numbers_that_can_be_log_ids(number: HeadValue) -> None:
    assert read_moves({"moves": [[1, "a", 2]]})[0].log_id == 2
    rows: list[HeadValue] = [[number, "a", 2], [1, "a", number], [1, "a b", 2], [1, "", 2]]
    for row in rows:
        with pytest.raises(DelaydError):
            read_moves({"moves": [row]})
    with pytest.raises(DelaydError):
        read_subject_page({"subjects": [["a", number]], "more": False})
