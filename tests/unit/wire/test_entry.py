"""Entry checks (rule E1): a number is held against the width in which it will be stored, where it enters."""

from collections.abc import Callable

import pytest

from delayd.errors import BadRequest
from delayd.hours import INSTANT_MS_MAX
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    HANDLE_MOST,
    INT_MAX,
    RETRY_AFTER_MS_MAX,
    U32_MAX,
    U64_MAX,
    WINDOW_MOST,
    error_from_head,
    need_instant,
    need_int,
    need_retry_after,
    need_rows,
    need_str,
    need_u32,
    need_u64,
)
from tests.worlds.realtime import ready_world

WIDTHS: list[tuple[Callable[[Head, str], int], int]] = [
    (need_u32, U32_MAX),
    (need_int, INT_MAX),
    (need_u64, U64_MAX),
    (need_instant, INSTANT_MS_MAX),
]
EDGES = [edge for power in (7, 8, 15, 16, 31, 32, 63, 64) for edge in ((1 << power) - 1, 1 << power, (1 << power) + 1)]
NO_NUMBERS: list[HeadValue] = [None, True, False, 1.0, float("nan"), float("inf"), "1", b"1", [1], {"a": 1}]


@pytest.mark.parametrize(("need", "most"), WIDTHS)
def test_rule_E1_a_number_is_taken_up_to_its_width_and_nothing_else_is_a_number(
    need: Callable[[Head, str], int], most: int
) -> None:
    for value in (0, 1, most - 1, most, *EDGES):
        if value <= most:
            assert need({"n": value}, "n") == value
    wrong = [-1, -(1 << 63), most + 1, *(edge for edge in EDGES if edge > most), *NO_NUMBERS]
    for each in wrong:
        with pytest.raises(BadRequest, match=r"^n is"):
            need({"n": each}, "n")


def test_rule_E1_each_column_of_rows_has_its_own_width() -> None:
    widest = list(WINDOW_MOST)
    assert need_rows({"rows": [widest]}, "rows", len(widest), WINDOW_MOST) == [widest]
    for column, most in enumerate(WINDOW_MOST):
        row: list[HeadValue] = [*widest]
        row[column] = most + 1
        with pytest.raises(BadRequest, match="rows"):
            need_rows({"rows": [[*widest], row]}, "rows", len(widest), WINDOW_MOST)


def test_rule_E1_a_text_without_an_encoding_is_refused() -> None:
    with pytest.raises(BadRequest, match="name"):
        need_str({"name": "\ud800"}, "name")


def test_rule_E1_nobody_is_made_to_wait_for_longer_than_an_hour() -> None:
    assert need_retry_after({"retry_after_ms": INT_MAX}) == RETRY_AFTER_MS_MAX
    head: Head = {"code": "slow_down", "message": "", "retry_after_ms": INT_MAX, "details": {}}
    assert error_from_head(head).retry_after_ms == RETRY_AFTER_MS_MAX


def test_rule_E1_an_acknowledgement_wider_than_the_pull_log_is_refused_and_neighbours_never_add_up_to_one() -> None:
    world, peer = ready_world([b"a", b"b"])
    pulled = world.pull(peer)
    incarnation, first = pulled.incarnation, pulled.parts[0][0]
    for row in ([incarnation, first, U32_MAX + 1], [incarnation, INT_MAX + 1, 1]):
        with pytest.raises(BadRequest, match="handles"):
            world.ack(peer, [row])
    world.ack(peer, [[incarnation, first + n * U32_MAX, U32_MAX] for n in range(3)])
    assert HANDLE_MOST[2] == U32_MAX and world.pull(peer).bodies == []
