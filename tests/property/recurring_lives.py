"""Lives of recurring schedules: years of decisions with outages, kills, restores, edits, pauses and clocks that jump.

``python -m tests.property.recurring_lives --schedules 10000 --years 50 --jobs 2`` counts what is missing and what is
doubled. A life keeps a state, and each decision takes its place whole or not at all, as at a server. With ``--records``
the state is the record of a delay server, in bytes, and the server's own functions change it. A part of a life ends
with each edit and each restore; then every occurrence of that part must have run or must lie in one row of skips, and
not in both.
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
from delayd.delay.ending.occurrences import LEAD_MS, Asks, Change, DecidedNow, Recurs
from delayd.errors import SlowDown
from delayd.recurrence.deciding import Overlap, RunDecision, RunPolicy, decide
from delayd.wire.recurring import RecurringRecord, RecurringRequest, RecurringSpec, RecurringWish

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
        self.now_ms += self.random.choice((MINUTE_MS, HOUR_MS, DAY_MS, 7 * DAY_MS, 200 * DAY_MS, 600 * DAY_MS))
        self.found["outages"] += 1
        # A caller may come before what is due is decided.
        self.random.choice((lambda: self.decide(self.now_ms), self.pause, self.edit))()

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

    def _overlap(self) -> Overlap:
        return self.random.choice(("all", "all", "all", "skip"))

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
            overlap=self._overlap(),
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


class RecordLife(Life):
    """The same, with the record and the functions of a delay server: only what is durable is kept between two of them.

    Occurrences are decided some time before their instants. After a restore the server itself skips what an earlier
    life may have sent.
    """

    NAME = b"life"

    def __init__(self, seed: int, years: int) -> None:
        super().__init__(seed, years)
        spec = self._spec(self.state.recurrence, self.state.policy)
        record = RecurringRecord(spec, 1, self.now_ms, self.now_ms, self.now_ms)
        self._durable = self._copied = record.encode()
        self._restored_ms = 0

    def decide(self, at_ms: int) -> None:
        self._change(lambda now_ms: Recurs(now_ms, now_ms + LEAD_MS, self._restored_ms), at_ms)

    def pause(self) -> None:
        wish = RecurringWish.RESUME if self.state.paused else RecurringWish.PAUSE
        self._ask(RecurringRequest(wish, self.NAME))
        self.found["pauses"] += 1
        if self.state.paused and self.random.random() < 0.7:
            self.now_ms += self.random.randrange(60 * DAY_MS)
            self.pause()

    def edit(self) -> None:
        version = RecurringRecord.decode(self._durable).version
        spec = self._spec(*self._drawn())
        # What comes meanwhile, while the edit is tried again after a kill, is decided by the old specification.
        self._ask(RecurringRequest(RecurringWish.PUT, self.NAME, version, spec), self._judge)
        self.found["edits"] += 1

    def back_up(self) -> None:
        self._copied = self._durable

    def restore(self) -> None:
        self.decide(self.now_ms)
        self._judge()
        # Nobody puts a copy back so soon that the life before was still ahead of the clock.
        self.now_ms = self._restored_ms = max(self.now_ms, self.state.decided_ms) + MINUTE_MS
        self._durable = self._copied
        self._read()
        self._from_ms = self.state.decided_ms
        self.decide(self.now_ms)
        self.found["restores"] += 1

    def _overlap(self) -> Overlap:
        return "all"  # Of a server.

    def _spec(self, recurrence: delayd.Recurrence, policy: RunPolicy) -> RecurringSpec:
        # With the longer body no more than sixteen occurrences fit into one decision.
        return RecurringSpec(recurrence, policy, "subject", bytes(self.random.choice((2, 250_000, 250_000))))

    def _ask(self, request: RecurringRequest, before: Callable[[], None] = lambda: None) -> None:
        """Ask again until the answer comes, as a client does."""

        def asked(now_ms: int) -> Change:
            return Asks(request, Recurs(now_ms, now_ms, self._restored_ms))

        self._change(asked, self.now_ms, before)

    def _change(self, change: Callable[[int], Change], at_ms: int, before: Callable[[], None] = lambda: None) -> None:
        while True:
            try:
                decided = change(at_ms)(self.NAME, RecurringRecord.decode(self._durable))
            except SlowDown:
                # The server decides one part after the other meanwhile.
                self.decide(at_ms)
                self.found["asked again"] += 1
                continue
            if decided is None:
                return  # It was done by a try whose answer was lost.
            self.found["decisions"] += 1
            is_killed = self.random.random() < 0.05
            if is_killed and self.random.random() < 0.5:
                self.found["kills"] += 1
                away_ms = self.random.choice((0, 500, 90_000, DAY_MS))
                self.now_ms, at_ms = self.now_ms + away_ms, at_ms + away_ms
                continue
            self._take(decided, before)
            if not is_killed:
                return
            self.found["answers lost"] += 1

    def _take(self, decided: DecidedNow, before: Callable[[], None]) -> None:
        self._runs += decided.sent
        self._skips += [(skip.first_ms, skip.last_ms) for skip in decided.skips]
        self.found["rows of skips"] += len(decided.skips)
        self.found["counted as skipped"] += sum(skip.count for skip in decided.skips)
        self._durable = decided.record.encode()
        # The occurrences of this decision belong to the specification before.
        self.state = replace(self.state, decided_ms=decided.record.decided_ms)
        before()
        self._read()

    def _read(self) -> None:
        record = RecurringRecord.decode(self._durable)
        spec = record.spec
        self.state = State(spec.recurrence, spec.policy, record.decided_ms, record.sent, record.paused)


def wrong(found: Counter[str]) -> int:
    """How much of what was counted must not be."""
    return found["missing"] + found["doubled"] + found["other"] + abs(found["skipped"] - found["counted as skipped"])


def lives(seeds: range, years: int, kind: type[Life] = Life) -> Counter[str]:
    """Live some lives, and sum up."""
    total: Counter[str] = Counter(missing=0, doubled=0, other=0)
    for seed in seeds:
        total.update(kind(seed, years).live())
    return total


def _lives(given: tuple[range, int, type[Life]]) -> Counter[str]:
    return lives(*given)


def main() -> int:
    """Live as many as are asked for, and print the account."""
    parser = argparse.ArgumentParser(description="Lives of recurring schedules.")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--years", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", action="store_true", help="keep the record of a delay server")
    options = parser.parse_args()
    kind = RecordLife if options.records else Life
    parts = [
        (range(first, min(first + 50, options.seed + options.schedules)), options.years, kind)
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
