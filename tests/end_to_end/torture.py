"""Torture of real processes: ``python -m tests.end_to_end.torture --rounds N [--seed S]``.

Each round kills or stops servers at some moment, or does something to their disk, clock or directories, while producers
and consumers go on; now and then everything drains and the books are checked; sometimes, and at the end, by SQL, with
``--audit three`` by Spark as well. One line a round and a summary; the exit code is 1 if any promise was broken, or if
the audits differ. ``--kinds`` says what rounds do.
"""

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from delayd import open_data
from delayd.hours import hour_of_ms
from delayd.reading.books import AuditReport
from tests.three_audits import audit_three_ways

from .serve import BUG_VARIABLE
from .torture_books import check_books
from .torture_cluster import KINDS, ROLES, Cluster, Failed, shuffled
from .torture_faults import EXCUSED, FAULTS, Faults
from .torture_keys import KeyLedger
from .torture_ledger import Fate, Ledger
from .torture_load import CONSUMERS, KEYS_SUBJECT, LEASE, Load
from .torture_planted import PLANTED

ALL_KINDS = {**KINDS, **FAULTS}
DISK_RETRY_S = 35.0  # A server tries every 30 s what it could not read.
COMPARE_EVERY = 3  # Drains: the audits are compared when everything has drained.
DRAIN_S = 30.0  # After the last start: a lease, the clients' waits between tries, and what had gathered.
BEFORE_S = (
    0.05,
    2.5,
)  # A round waits this long before it strikes: often the servers still recover from the round before.
BURST_SHARE = 0.25  # This share of the rounds strikes while much is being sent: kept, and nobody was told yet.
AFTER_BURST_MS = (0, 40)
HERD_SHARE = 0.35  # This share strikes when many messages are due at once: handed over, and nobody was told yet.
AFTER_HERD_MS = (-10, 60)
STRIKES_MAX = 3  # In a round.
PASSED_MS = 8 * 3_600_000  # Messages with keys are due within less.
SEALED_WITHIN_S = 240.0  # A server looks every 30 s for what it can seal.
PLANTED_ROUNDS = 6
PLANTED_KEYED = 1_000
SHOWN_MAX = 20
MUST_HAPPEN = (
    *(f"{number} {role}" for number in ("SIGKILL", "SIGSTOP") for role in ROLES),
    *("read with EIO", "clock +1 h", "clock -1 h", "copy", "backup", "restore"),
    *("hostile neighbour", "connections cut", "bytes read late", "ended in its start"),
)
"""What a run whose rounds have had every card of the deck must have seen, or it fails."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a torture went."""

    rounds: int
    ledger: Ledger
    report: AuditReport | None
    keys: KeyLedger
    drain_s_max: float
    drains_s: float
    happened: Counter[str]
    never: tuple[str, ...]  # Events that this many rounds must cause, and did not.

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return not (self.ledger.violations or self.never) and self.report is not None


@dataclass(frozen=True)
class Plan:
    """What a torture does."""

    rounds: int
    seed: int
    kinds: Sequence[str] = tuple(ALL_KINDS)
    keyed: int = 300  # Messages with keys that are sent in each round.
    drain_every: int = 8  # Rounds.
    days: int = 400  # So far ahead are messages without keys due; each hour has files of its own.
    spark: bool = False  # Audit in Spark, too.
    bug: str | None = None  # One of PLANTED, for the delay server.
    seal: bool = False  # At the end all messages with keys fall due, and their hours are sealed.


class Torture:
    """One torture in one directory."""

    def __init__(self, data: Path, plan: Plan, say: Callable[[str], None]) -> None:
        self._data = data
        self._plan = plan
        self._say = say
        self._draw = random.Random(f"{plan.seed} rounds")
        self._ledger = Ledger(tuple(CONSUMERS))
        self._keys = KeyLedger(self._ledger, KEYS_SUBJECT)
        kinds = plan.kinds
        self._faults = Faults(data, self._ledger, kinds, hours_pass=plan.seal)
        lease_ms = LEASE // timedelta(milliseconds=1)
        bug = {} if plan.bug is None else {BUG_VARIABLE: plan.bug}
        self._cluster = Cluster(data, self._draw, lease_ms, {**self._faults.environment, **bug})
        self._ahead_ms = 0  # So far the servers' clock is ahead of the machine's.
        self._retry_s = 0.0  # The servers try again after this time to read what they could not.
        self._drain_s_max = 0.0
        self._drains_s = 0.0
        self._deck = [kind for kind in kinds for _ in range(ALL_KINDS[kind])]
        self._next_kind = shuffled(self._draw, self._deck)
        self._done = 0

    async def run(self) -> Result:
        """Run all rounds, or until a promise is broken."""
        report: AuditReport | None = None
        try:
            await self._cluster.start()
            async with Load(self._cluster.meta, self._ledger, self._keys, self._plan.seed, self._plan.days) as load:
                await self._strike(load)
                if self._plan.seal and not self._ledger.violations:
                    await self._seal(load)
            await self._cluster.terminate()
            report = check_books(self._data, self._ledger, self._keys, self._now_ms(), stopped=True)
            await self._compare()
        except (Failed, TimeoutError) as error:
            self._ledger.broken(f"{type(error).__name__}: {error}")
        finally:
            self._cluster.kill(ROLES)
        self._faults.remove()
        happened = self._cluster.happened
        # Rounds that had every card of the deck.
        whole = self._done >= len(self._deck) and set(self._plan.kinds) == ALL_KINDS.keys()
        never = tuple(name for name in MUST_HAPPEN if whole and not happened[name])
        return Result(self._done, self._ledger, report, self._keys, self._drain_s_max, self._drains_s, happened, never)

    async def _strike(self, load: Load) -> None:
        ledger, plan = self._ledger, self._plan
        for number in range(1, plan.rounds + 1):
            load.resume()
            load.keyed.begin(plan.keyed)
            await self._strike_once(number, load)
            # A round takes as long as its messages with keys take to be sent.
            for _ in range(STRIKES_MAX - 1):
                if load.keyed.left and not ledger.violations:
                    await self._strike_once(number, load)
            await load.keyed.sent()
            self._done = number
            if number % plan.drain_every == 0 or number == plan.rounds:
                await self._drain(load)
                if number % (plan.drain_every * COMPARE_EVERY) == 0:
                    await self._compare()
            if ledger.violations:
                return

    async def _strike_once(self, number: int, load: Load) -> None:
        before = await self._wait(load)
        self._cluster.check()
        told = await self._round()
        load.check()
        ledger = self._ledger
        self._say(f"{number:4} {before}: {told}; sent {len(ledger.sent)}, got {ledger.deliveries}")

    async def _round(self) -> str:
        """Do one of the terrible things; says which."""
        kind, life = next(self._next_kind), self._cluster.servers["delay"].pid
        if kind in KINDS:
            told = await self._cluster.round(kind, self._draw)
        else:
            told = await self._faults.round(kind, self._cluster, self._draw)
        if self._cluster.servers["delay"].pid != life:
            self._ledger.delay_server_started()
        if kind == "disk":
            self._retry_s = DISK_RETRY_S
        self._cluster.check(EXCUSED.get(kind, ()))
        return told

    async def _wait(self, load: Load) -> str:
        """Wait for the moment to strike; says what it is."""
        roll = self._draw.random()
        if roll < BURST_SHARE:
            load.send_burst(self._draw)
            after_ms = self._draw.randint(*AFTER_BURST_MS)
            await asyncio.sleep(after_ms / 1000)
            return f"{after_ms} ms into a burst"
        if roll < BURST_SHARE + HERD_SHARE:
            after_ms = self._draw.randint(*AFTER_HERD_MS)
            await asyncio.sleep((load.send_herd(self._draw) + after_ms - self._now_ms()) / 1000)
            return f"{after_ms} ms after a herd"
        before_s = self._draw.uniform(*BEFORE_S)
        await asyncio.sleep(before_s)
        return f"after {before_s:.2f} s"

    async def _drain(self, load: Load) -> None:
        """Let everything that is due arrive, and check the books of the running servers."""
        ledger, began = self._ledger, time.monotonic()
        await load.quiet()
        due_until_ms, within_s = self._now_ms() + 4_000, DRAIN_S + self._retry_s
        self._retry_s = 0.0
        while missing := ledger.missing(due_until_ms):
            # Messages that were sent ahead are not due before then.
            if time.monotonic() > began + within_s and self._now_ms() > due_until_ms + within_s * 1000:
                for group, number in missing:
                    ledger.broken(f"not delivered: {ledger.tell(number)} to {group}")
                break
            load.check()
            self._cluster.check()
            await asyncio.sleep(0.1)
        drain_s = time.monotonic() - began
        self._drain_s_max = max(self._drain_s_max, drain_s)
        self._drains_s += drain_s
        # A message that was acknowledged and comes again does so when a lease would have ended.
        await asyncio.sleep(LEASE / timedelta(seconds=1))
        report = await asyncio.to_thread(check_books, self._data, ledger, self._keys, self._now_ms(), stopped=False)
        self._say(f"     drained in {drain_s:.1f} s: {_figures(report)}")

    async def _seal(self, load: Load) -> None:
        """Let hours pass, so that all messages with keys leave, and wait until those hours are sealed."""
        await self._faults.pass_hours(self._cluster, PASSED_MS)
        self._ahead_ms = PASSED_MS
        await self._drain(load)
        began, until_hour = time.monotonic(), hour_of_ms(self._now_ms())
        while open_hours := await asyncio.to_thread(_open_hours, self._data, until_hour):
            if time.monotonic() > began + SEALED_WITHIN_S:
                self._ledger.broken(f"not sealed within {SEALED_WITHIN_S:g} s: {', '.join(open_hours)}")
                break
            self._cluster.check()
            await asyncio.sleep(1)
        await self._drain(load)
        self._say(f"     sealed in {time.monotonic() - began:.1f} s")

    def _now_ms(self) -> int:
        return int(time.time() * 1000) + self._ahead_ms

    async def _compare(self) -> None:
        """Audit by all ways; they must agree to the last row, also while the servers run."""
        folder = self._data.with_name(f"{self._data.name}-export")
        audits = await asyncio.to_thread(audit_three_ways, self._data, self._now_ms(), folder, spark=self._plan.spark)
        self._say(f"     {audits.line}")
        for difference in audits.differences:
            self._ledger.broken(f"the audits differ: {difference}")
        shutil.rmtree(folder)


def torture(data: Path, plan: Plan, say: Callable[[str], None]) -> Result:
    """Run a torture in an empty directory."""
    return asyncio.run(Torture(data, plan, say).run())


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.end_to_end.torture", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--keyed", type=int, default=Plan.keyed, help="messages with keys in each round")
    parser.add_argument("--days", type=int, default=Plan.days, help="so far ahead are messages without keys due")
    parser.add_argument("--drain-every", type=int, default=Plan.drain_every, help="rounds")
    parser.add_argument("--seal", action="store_true", help="at the end hours pass and are sealed")
    parser.add_argument("--audit", choices=("two", "three"), default="two", help="three: in Spark, too")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=tuple(ALL_KINDS),
        default=tuple(ALL_KINDS),
        metavar="KIND",
        help=f"what rounds do, all by default: {', '.join(ALL_KINDS)}",
    )
    parser.add_argument("--planted", action="store_true", help="only see that each planted bug is noticed")
    options = parser.parse_args()
    if options.planted:
        return notice_planted(options.seed)
    data = Path(tempfile.mkdtemp(prefix="delayd-torture-"))
    logging.basicConfig(filename=data / "clients.log", level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    # Py4J tells of its end when the log's folder is gone.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    print(f"seed {options.seed}, data in {data}", flush=True)
    began = time.monotonic()
    plan = Plan(
        *(options.rounds, options.seed, options.kinds, options.keyed, options.drain_every, options.days),
        spark=options.audit == "three",
        seal=options.seal,
    )
    result = torture(data, plan, partial(print, flush=True))
    show(result, time.monotonic() - began)
    if result.good:
        shutil.rmtree(data)
        return 0
    print(f"FAILED: seed {options.seed}, data and the servers' logs are kept in {data}")
    return 1


def planted_plan(bug: str, seed: int) -> Plan:
    """A torture that notices a planted bug in one of its rounds."""
    return Plan(PLANTED_ROUNDS, seed, ("one",), PLANTED_KEYED, drain_every=1, bug=bug)


def notice_planted(seed: int) -> int:
    """Plant each bug, one after the other; the exit code is 1 if a torture notices none of it."""
    missed = 0
    for bug in PLANTED:
        with tempfile.TemporaryDirectory(prefix="delayd-torture-") as folder:
            result = torture(Path(folder) / "data", planted_plan(bug, seed), _say_nothing)
        noticed = result.ledger.violations[:1]
        missed += not noticed
        print(f"{bug}\n  {noticed[0] if noticed else 'NOT NOTICED'}", flush=True)
    return min(1, missed)


def show(result: Result, took_s: float) -> None:
    """Print the summary."""
    ledger = result.ledger
    fates = ", ".join(f"{fate.value} {ledger.count(fate)}" for fate in Fate)
    a_round_s = took_s / max(1, result.rounds)
    print(f"{result.rounds} rounds in {took_s:.0f} s, {a_round_s:.1f} s each, {result.drains_s:.0f} s of them drains")
    print(f"sent {len(ledger.sent)} ({fates}), cancelled {ledger.cancelled}")
    print(f"delivered {ledger.deliveries}, of them again {ledger.repeated}; slowest drain {result.drain_s_max:.1f} s")
    heard = ", ".join(f"{name} {count}" for name, count in sorted(result.keys.heard.items()))
    print(f"with keys: sent {len(result.keys.numbers)}; heard {heard}")
    print(f"errors that clients met: {ledger.faults}")
    if result.report is not None:
        print(f"audit: {_figures(result.report)}")
    for violation in ledger.violations[:SHOWN_MAX]:
        print(f"VIOLATION {violation}")
    happened = ", ".join(f"{name} {count}" for name, count in sorted(result.happened.items()))
    never = f"; NEVER {', '.join(result.never)}" if result.never else ""
    print(f"violations: {len(ledger.violations)}; happened: {happened}{never}")


def _say_nothing(_: str) -> None:
    pass


def _figures(report: AuditReport) -> str:
    total = report.total
    ended = f"scheduled {total.scheduled} = dispatched {total.dispatched} + cancelled {total.cancelled}"
    others = f"pending {total.pending} + undecided {total.undecided} + waiting {total.waiting}"
    faults = f"lost {total.lost}, early {total.early}, duplicate {total.duplicate}, orphan {total.orphan}"
    return f"{ended} + {others}; {faults}, mismatch {total.mismatch}"


def _open_hours(data: Path, until_hour: int) -> list[str]:
    """Hours of the delay server before this one that are not sealed, by the last checkpoint."""
    table = open_data(data).hours()
    return [
        hour
        for hour, state, begins_at_ms in zip(table["hour"], table["state"], table["begins_at_ms"], strict=True)
        if state != "sealed" and hour_of_ms(int(begins_at_ms)) < until_hour
    ]


if __name__ == "__main__":
    sys.exit(main())
