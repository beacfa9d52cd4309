"""A hold keeps calls back in their order, for as long as it was asked to and no longer."""

from collections.abc import Callable
from functools import partial

from delayd.net.cut import Hold


class Later:
    """Timers that a test lets go off."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []
        self.cancelled = 0

    def __call__(self, seconds: float, call: Callable[[], None]) -> "Later":
        self.set.append((seconds, call))
        return self

    def cancel(self) -> None:
        self.cancelled += 1


def test_calls_leave_in_their_order_when_the_hold_is_ended() -> None:
    hold, left = Hold(Later()), list[int]()
    hold.begin(2_000)
    for number in range(3):
        hold.leave(partial(left.append, number))
    assert left == []
    assert hold.end(), "it has lasted"
    assert left == [0, 1, 2]
    assert not hold.end(), "it has ended before"
    hold.leave(partial(left.append, 3))
    assert left == [0, 1, 2, 3], "nothing waits without a hold"


def test_a_hold_that_nobody_ends_ends_by_itself_and_says_so() -> None:
    later, left = Later(), list[int]()
    hold = Hold(later)
    hold.begin(2_000)
    hold.leave(lambda: left.append(1))
    ((seconds, end),) = later.set
    assert seconds == 2
    end()
    assert left == [1] and not hold.end()
