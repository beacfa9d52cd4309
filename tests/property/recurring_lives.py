"""Lives of recurring schedules: years of decisions with outages, kills, restores, edits, pauses and clocks that jump.

``python -m tests.property.recurring_lives --schedules 10000 --years 50 --jobs 2`` counts what is missing and what is
doubled. A life stands on `decide` alone, as a server does: it keeps a state, and each decision takes its place whole or
not at all. A part of a life ends with each edit and each restore; then every occurrence of that part must have run or
must lie in one row of skips, and not in both.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from multiprocessing import get_context
from random import Random
from typing import Any

import delayd
from delayd.recurrence.deciding import RunDecision, RunPolicy, decide

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
BEGIN_MS = 1_798_761_600_000  # 2027-01-01T00:00Z.
YEAR_MS = 365 * DAY_MS + DAY_MS // 4
ZONES = (
    *("UTC", "Europe/Berlin", "America/New_York", "America/Santiago", "Africa/Cairo", "Australia/Lord_Howe"),
    *("Africa/Casablanca", "Asia/Kolkata", "America/Havana", "Antarctica/Troll"),
)
# How often a kind of line is drawn. Lines of each month are most: they reach through all of fifty years in few steps.
LINES: Sequence[tuple[int, Callable[[Random], dict[str, Any]]]] = (
    (2, lambda random: {"cron": f"{random.randrange(60)} {random.randrange(24)} * * *"}),
    (1, lambda random: {"cron": f"*/30 {random.randrange(4)} * * SUN"}),
    (12, lambda random: {"cron": f"{random.choice((0, 30))} {random.randrange(4)} * * {random.randrange(7)}"}),
    (40, lambda random: {"cron": f"{random.choice((0, 30))} {random.randrange(4)} {random.randint(1, 31)} * *"}),
    (20, lambda random: {"cron": f"0 2 {random.choice(('L', 'LW', '29'))} * *"}),
    (10, lambda random: {"cron": f"15 2 * {random.choice(('3', '10', '3,10,11'))} SUN#{random.randint(1, 4)}"}),
    (15, lambda random: {"every": timedelta(seconds=random.randint(5 * 86_400, 90 * 86_400))}),
)


@dataclass(frozen=True)
class State:
    """What a server keeps of a schedule."""

    recurrence: delayd.Recurrence
    policy: RunPolicy
    decided_ms: int
    ran: int = 0
    paused: bool = False


class Life:
    """One schedule from its making to the end of the simulated time."""

    def __init__(self, seed: int, years: int, decides: Callable[..., RunDecision] = decide) -> None:
        self.random = Random(seed)
        self.end_ms = BEGIN_MS + years * YEAR_MS
        self.now_ms = BEGIN_MS + self.random.randrange(DAY_MS)
        self.state = State(*self._drawn(), self.now_ms)
        self.copy = self.state
        self.found: Counter[str] = Counter(schedules=1)
        self._decides = decides
        self._from_ms = self.now_ms  # Where this part of the life began.
        self._runs: list[int] = []
        self._skips: list[tuple[int, int]] = []
        self._last_run_ms = 0  # Of all parts.

    def live(self) -> Counter[str]:
        """Live it, and return what was counted."""
        steps = (
            (300, self.serve),
            (8, self.be_away),
            (6, self.look),
            (4, self.pause),
            (2, self.edit),
            (1, self.back_up),
        )
        names = [step for weight, step in (*steps, (1, self.restore)) for _ in range(weight)]
        while self.now_ms < self.end_ms:
            self.random.choice(names)()
        self.decide(self.now_ms)
        self._judge()
        return self.found

    def serve(self) -> None:
        """Be there when the next one comes, most often."""
        next_ms = self.state.recurrence.next_after(self.state.decided_ms)
        self.now_ms = max(self.now_ms, (next_ms or self.end_ms) + self.random.choice((0, 0, 1, 700, 20_000)))
        self.decide(self.now_ms)

    def be_away(self) -> None:
        self.now_ms += self.random.choice((MINUTE_MS, HOUR_MS, DAY_MS, 7 * DAY_MS, 200 * DAY_MS))
        self.found["outages"] += 1
        self.decide(self.now_ms)

    def look(self) -> None:
        """Decide at any instant, also of a clock that was set back or just before an occurrence."""
        next_ms = self.state.recurrence.next_after(self.state.decided_ms) or self.now_ms
        self.decide(self.random.choice((self.now_ms, self.now_ms - DAY_MS, min(self.now_ms, next_ms - 1))))
        self.found["looks"] += 1

    def pause(self) -> None:
        self.decide(self.now_ms)
        self.state = replace(self.state, paused=not self.state.paused)
        self.found["pauses"] += 1
        if self.state.paused and self.random.random() < 0.7:
            self.now_ms += self.random.randrange(60 * DAY_MS)
            self.pause()

    def edit(self) -> None:
        self.decide(self.now_ms)
        self._judge()
        self.state = replace(self.state, decided_ms=max(self.now_ms, self.state.decided_ms))
        recurrence, policy = self._drawn()
        self.state = replace(self.state, recurrence=recurrence, policy=policy, ran=0)
        self.found["edits"] += 1

    def back_up(self) -> None:
        self.copy = self.state

    def restore(self) -> None:
        """Go back to a copy: what recurs up to now may have run since, so it is not decided again."""
        self.decide(self.now_ms)
        self._judge()
        self.state = replace(self.copy, decided_ms=max(self.now_ms, self.state.decided_ms))
        self._from_ms = self.state.decided_ms
        self.found["restores"] += 1

    def decide(self, at_ms: int) -> None:
        """Make a decision durable, unless a kill comes before that; then it is made again."""
        state = self.state
        while True:
            busy = self.random.random() < 0.2
            decision = self._decides(
                *(state.recurrence, state.policy, state.decided_ms, at_ms),
                ran=state.ran,
                paused=state.paused,
                busy=busy,
            )
            self.found["decisions"] += 1
            if self.random.random() >= 0.05:
                break
            # The next life of the server begins some time later, and knows nothing of this decision.
            self.found["kills"] += 1
            away_ms = self.random.choice((0, 500, 90_000, DAY_MS))
            self.now_ms, at_ms = self.now_ms + away_ms, at_ms + away_ms
        self.state = replace(state, decided_ms=decision.decided_ms, ran=state.ran + len(decision.run))
        self._runs += decision.run
        self._skips += [(skip.first_ms, skip.last_ms) for skip in decision.skipped]
        self.found["rows of skips"] += len(decision.skipped)
        self.found["counted as skipped"] += sum(skip.count for skip in decision.skipped)

    def _drawn(self) -> tuple[delayd.Recurrence, RunPolicy]:
        random = self.random
        weights = [weight for weight, _ in LINES]
        options = random.choices([line for _, line in LINES], weights)[0](random)
        options["timezone"] = random.choice(ZONES)
        if "cron" in options:
            options["fold"] = random.choice((None, None, "first", "last", "both"))
            options["gap"] = random.choice((None, None, "shift", "skip"))
        if random.random() < 0.2:
            options["skip_dates"] = [date(year, 12, 25) for year in range(2027, 2080)]
        policy = RunPolicy(
            misfire=random.choice(("all", "all", "last", "skip")),
            catchup=random.choice((None, timedelta(days=2))),
            catchup_max=random.choice((3, 10_000)),
            overlap=random.choice(("all", "all", "all", "skip")),
        )
        return delayd.Recurrence(**options), policy

    def _judge(self) -> None:
        """Hold what was decided in this part of the life against what recurs in it."""
        due = list(self.state.recurrence.between(self._from_ms, self.state.decided_ms))
        ran, covered, place = Counter(self._runs), Counter[int](), 0
        for first_ms, last_ms in sorted(self._skips):
            while place < len(due) and due[place] < first_ms:
                place += 1
            # A row that overlaps the one before it counts there, too.
            here = place
            while here < len(due) and due[here] <= last_ms:
                covered[due[here]] += 1
                here += 1
        self.found["occurrences"] += len(due)
        self.found["run"] += len(self._runs)
        self.found["skipped"] += sum(covered.values())
        self.found["missing"] += sum(1 for each in due if not ran[each] and not covered[each])
        self.found["doubled"] += sum(max(0, ran[each] + covered[each] - 1) for each in due)
        self.found["other"] += sum(1 for each in ran if each <= self._last_run_ms) + len(ran.keys() - set(due))
        self._last_run_ms = max(self._runs, default=self._last_run_ms)
        self._from_ms, self._runs, self._skips = self.state.decided_ms, [], []


def wrong(found: Counter[str]) -> int:
    """How much of what was counted must not be."""
    return found["missing"] + found["doubled"] + found["other"] + abs(found["skipped"] - found["counted as skipped"])


def lives(seeds: range, years: int) -> Counter[str]:
    """Live some lives, and sum up."""
    total: Counter[str] = Counter(missing=0, doubled=0, other=0)
    for seed in seeds:
        total.update(Life(seed, years).live())
    return total


def _lives(given: tuple[range, int]) -> Counter[str]:
    return lives(*given)


def main() -> int:
    """Live as many as are asked for, and print the account."""
    parser = argparse.ArgumentParser(description="Lives of recurring schedules.")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--years", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    parts = [
        (range(first, min(first + 50, options.seed + options.schedules)), options.years)
        for first in range(options.seed, options.seed + options.schedules, 50)
    ]
    begun = time.monotonic()
    total: Counter[str] = Counter(missing=0, doubled=0, other=0)
    with get_context("spawn").Pool(options.jobs) as pool:
        for found in pool.imap_unordered(_lives, parts):
            total.update(found)
    print(f"{options.years} years in {time.monotonic() - begun:.0f} s:", end=" ")
    print(", ".join(f"{name} {count:,}" for name, count in total.items()))
    return 1 if wrong(total) else 0


if __name__ == "__main__":
    sys.exit(main())
