"""Entry checks (rule E1): a number is held against the width in which it will be stored, where it enters."""

import pytest

from delayd.errors import BadRequest
from delayd.wire.frame import Head
from delayd.wire.heads import (
    HANDLE_MOST,
    INT_MAX,
    RETRY_AFTER_MS_MAX,
    U32_MAX,
    error_from_head,
    need_retry_after,
)
from tests.worlds.realtime import ready_world


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
