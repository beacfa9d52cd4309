"""What waits for an operator, as an answer tells it: always three texts, and never more than a head holds."""

import msgpack
import numpy as np
import pytest

from delayd.errors import BadRequest
from delayd.machine.operating import Wait, WaitKind
from delayd.wire.frame import HEAD_BYTES_MAX, Head
from delayd.wire.meta import SLOTS, slots_text
from delayd.wire.status import WAIT_TEXT_MAX, WAITS_MAX, read_waits, waits_head


@pytest.mark.parametrize("char", ["x", "\U0001f600", "\ud800"])
def test_two_lists_of_the_longest_entries_fit_a_head(char: str) -> None:
    longest = waits_head(Wait(*[char * 10_000] * 3) for _ in range(10 * WAITS_MAX))
    head: Head = {"waits": longest, "refuses": longest}
    assert len(msgpack.packb(head)) < HEAD_BYTES_MAX
    found = read_waits(head, "waits")
    assert len(found) > WAITS_MAX // 2
    for wait in found:
        assert len(wait.what.encode()) <= WAIT_TEXT_MAX and len(wait.why.encode()) <= WAIT_TEXT_MAX


def test_the_longest_commands_come_back_whole() -> None:
    every_other = slots_text(np.arange(SLOTS) % 2 == 0)
    longest = (
        WaitKind.SLOTS_DISPUTED.wait("why", slots=every_other, to="a" * 16),
        WaitKind.FILE_SET_ASIDE_OR_GIVEN_UP.wait(
            "why", what="rows/1", id="rows/1", log_id="0" * 16, path="/" + "p" * 4_095, cost="c" * 500
        ),
    )
    found = read_waits({"waits": waits_head(longest)}, "waits")
    assert [wait.command for wait in found] == [wait.command for wait in longest]


@pytest.mark.parametrize("entry", ["text", [], ["a", "b"], ["a", "b", 3], ["a", "b", "c", "d"], {"what": "a"}, None])
def test_an_entry_of_another_shape_is_refused(entry: object) -> None:
    with pytest.raises(BadRequest, match="waits"):
        read_waits({"waits": [entry]}, "waits")  # type: ignore[list-item]
    with pytest.raises(BadRequest):
        read_waits({"waits": None}, "waits")
