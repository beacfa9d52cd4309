"""Subjects: what a consumer consumes, one subject, a list or a pattern; and from where its messages came.

Invariant: a place stands for one subject at one server, for as long as the consumer lives. So a handle with a place
finds its server after the close of the consumer and in a forked child, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from delayd.client.limits import check_subject
from delayd.errors import BadArgument, BadSubject
from delayd.limits import SUBSCRIBED_MAX
from delayd.patterns import Pattern, is_pattern
from delayd.retry_subject import is_reserved

MANY = "give one subject, a list such as ['orders.cancel', 'mail.send'], or a pattern such as 'orders.*'"


class Place(NamedTuple):
    """A subject at a realtime server."""

    subject: str
    log_id: int


class Subjects:
    """What one consumer consumes; ``label`` says it in one text."""

    __slots__ = ("_numbers", "_places", "label", "names", "pattern")

    def __init__(self, subject: str | Sequence[str]) -> None:
        self._places: list[Place] = []
        self._numbers: dict[Place, int] = {}
        self.pattern: Pattern | None = None
        self.names: tuple[str, ...] = ()
        if isinstance(subject, str):
            self.label = subject
            if is_pattern(subject):
                self.pattern = Pattern(subject)
            elif subject:
                _check(subject)
            return
        self.names = _listed(subject)
        self.label = self.names[0] if len(self.names) == 1 else f"{self.names[0]} and {len(self.names) - 1} more"

    @property
    def are_many(self) -> bool:
        """Whether messages may be of several subjects."""
        return bool(self.names) or self.pattern is not None

    def meets(self, other: Subjects) -> bool:
        """Whether a subject may be consumed by both."""
        if self.pattern is None:
            names = self.names or (self.label,)
            if other.pattern is not None:
                return any(other.pattern.matches(name) for name in names)
            return not {*names}.isdisjoint(other.names or (other.label,))
        return other.meets(self) if other.pattern is None else self.pattern.meets(other.pattern.text)

    def place(self, subject: str, log_id: int) -> int:
        """The number of a place."""
        place = Place(subject, log_id)
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = len(self._places)
            self._places.append(place)
        return number

    def at(self, number: int) -> Place:
        """The place with this number."""
        return self._places[number]


def _check(subject: str) -> None:
    check_subject(subject)
    if is_reserved(subject):
        raise BadSubject(f"{subject} is a name that servers keep for themselves; consume the subject that you send to")


def _listed(subjects: Iterable[str]) -> tuple[str, ...]:
    if isinstance(subjects, bytes | dict) or not isinstance(subjects, Iterable):
        raise BadArgument(f"a subject is text, not {type(subjects).__name__}; {MANY}")
    names = tuple(subjects)
    if not names:
        raise BadArgument(f"an empty list of subjects; {MANY}")
    if len(names) > SUBSCRIBED_MAX:
        raise BadArgument(
            f"a list of {len(names)} subjects; one consumer takes at most {SUBSCRIBED_MAX}: use a pattern, or several"
            " consumers"
        )
    for name in names:
        if isinstance(name, str) and is_pattern(name):  # type: ignore[redundant-expr]
            raise BadArgument(f"{name!r} is a pattern, and a list has subjects only; give the pattern alone")
        _check(name)
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise BadArgument(f"the list names {twice} twice")
    return names
