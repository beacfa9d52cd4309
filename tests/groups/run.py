"""Runs walks from seeds, and says which went wrong."""

from __future__ import annotations

import logging
import secrets
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from unittest.mock import patch

from delayd.errors import DelaydError
from tests.groups.walk import STEPS, Between, Kind, Walk
from tests.worlds.delay import small_slots

TOLD = 40  # The last lines of a trace.


@dataclass(slots=True)
class Report:
    """How some walks went."""

    walks: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: dict[int, str] = field(default_factory=dict)  # By seed: the trace, and what went wrong.

    def add(self, other: Report) -> None:
        """Put two reports together."""
        self.walks += other.walks
        self.counts += other.counts
        self.wrong |= other.wrong


def walks(first: int, count: int, steps: int = STEPS, wrong_max: int = 10, kind: Kind = Kind.PLAIN) -> Report:
    """Walk from each of so many seeds, until too many went wrong."""
    report = Report()
    with _quiet(), small_slots():
        for seed in range(first, first + count):
            report.walks += 1
            found, walk = walk_from(seed, steps, kind)
            report.counts += walk.counts
            if found is not None:
                told = "\n".join(f"  {line}" for line in walk.trace[-TOLD:])
                report.wrong[seed] = f"seed {seed}\n{told}\n{found}"
                if len(report.wrong) >= wrong_max:
                    break
    return report


def walk_from(seed: int, steps: int = STEPS, kind: Kind = Kind.PLAIN) -> tuple[str | None, Walk]:
    """One walk, and what went wrong in it."""
    random = Random(seed)
    # Whatever the servers draw is the same each time.
    with patch.object(secrets, "randbits", random.getrandbits):
        walk = Walk(seed, kind)
        try:
            walk.run(steps)
        except Between:
            walk.counts["ends_between"] += 1
        except (AssertionError, LookupError, ValueError, TypeError, DelaydError, OSError):
            return traceback.format_exc(limit=-6), walk
    return None, walk


@contextmanager
def _quiet() -> Iterator[None]:
    """What the servers log of rot is no news here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
