"""Plans: answers to PULLs before they leave, and the entries of the pull log that they become."""

from collections.abc import Sequence
from typing import NamedTuple

from delayd.log.pull import PullEntry, PullOp

from .groups import Group
from .parts import Part
from .polls import Waiting
from .window import Offer


class Planned(NamedTuple):
    """The messages that a waiting PULL is about to get, by group; each group comes once, and has a part."""

    waiting: Waiting
    picked: list[tuple[Group, list[Part]]]

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order of their pull sequences."""
        return [part for _, parts in self.picked for part in parts]


class Pulled(NamedTuple):
    """An entry of the pull log, and what it is about."""

    waiting: Waiting
    group: Group
    entry: PullEntry


def pulled(planned: Sequence[Planned], pull_first: int, nobody: int, now_ms: int) -> list[Pulled]:
    """The entries for planned answers, whose messages get the pull sequences from ``pull_first`` on. ``nobody`` is the
    incarnation in entries of messages that are passed over.
    """
    entries: list[Pulled] = []
    for waiting, picked in planned:
        for group, parts in picked:
            last: PullEntry | None = None
            for part in parts:
                if part.passed:
                    offer = Offer(part.consume_first, part.rows, part.attempt)
                    over = passed_over(group, offer, (nobody, pull_first), now_ms)
                    entries += [Pulled(waiting, group, entry) for entry in over]
                    last = None
                elif (
                    last is not None
                    and last.attempt == part.attempt
                    and last.consume_first + last.covered == part.consume_first
                    # Messages on the two sides of ``next`` are replayed differently, so they get two entries (rule Q5).
                    and part.consume_first != group.next
                ):
                    last = last._replace(covered=last.covered + part.rows)
                    entries[-1] = Pulled(waiting, group, last)
                else:
                    at = (waiting.incarnation, pull_first, part.consume_first, part.rows, now_ms)
                    last = PullEntry(PullOp.PULL, part.attempt, group.group_id, *at, waiting.lease_ms)
                    entries.append(Pulled(waiting, group, last))
                pull_first += part.rows
    return entries


def passed_over(group: Group, offer: Offer, at: tuple[int, int], now_ms: int) -> list[PullEntry]:
    """The entries by which messages count as acknowledged that nobody gets; ``at`` is an incarnation of nobody, and the
    pull sequence that comes next. They stand in one append, so that a crash keeps both or none.
    """
    first, count = offer.consume_first, offer.messages
    return [
        PullEntry(PullOp.PULL, offer.attempt, group.group_id, *at, first, count, now_ms),
        PullEntry(PullOp.ACK, 0, group.group_id, *at, 0, count, now_ms),
    ]
