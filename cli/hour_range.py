"""The hours that --from and --to choose for a command that reads whole hours.

Invariant: the hour that holds either instant is one of them, but for an hour that only begins with --to.
"""

from dataclasses import dataclass

import click

from delayd.errors import BadArgument
from delayd.hours import hour_from_name, hour_of_ms

from .progress import Advance
from .times import check_order


@dataclass(frozen=True, slots=True)
class HourRange:
    """Hours from one up to another, which is not one of them; None sets no bound."""

    first: int | None
    until: int | None

    @classmethod
    def of(cls, from_ms: int | None, to_ms: int | None) -> "HourRange":
        """The hours that hold an instant from one up to another, the second left out."""
        check_order(from_ms, to_ms)
        return cls(
            None if from_ms is None else hour_of_ms(from_ms), None if to_ms is None else hour_of_ms(to_ms - 1) + 1
        )

    def __contains__(self, hour: object) -> bool:
        if not isinstance(hour, int):
            return False
        return (self.first is None or hour >= self.first) and (self.until is None or hour < self.until)


def hour_of_name(text: str) -> int:
    """Read an hour of an option, as listings show it: ten digits, in UTC."""
    try:
        return hour_from_name(text)
    except BadArgument as error:
        raise click.BadParameter(error.message) from error


class Hours:
    """Turns "so many of so many" into steps."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        self._advance(done - self._done, total)
        self._done = done
