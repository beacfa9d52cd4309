"""One run of the fuzzer: real servers, hostile connections of strangers and trusted peers, targets that lie, and an
honest neighbour.

A run first sweeps each field of each request over all boundary values, then draws mutations until it has made its
number of requests. The hostile side is one thread: three servers share the other processor, so it is fast enough.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random

from delayd.batch.columns import ProducerPart
from delayd.secret import SECRET_FILE, Secret, read_secret
from delayd.wire.frame import HeadValue
from delayd.wire.requests import RequestType
from tests.batches import messages
from tests.end_to_end.up_process import Up, up

from .client import Hostile, loop_wait_ms
from .requests import SPECS, Requests
from .target import LyingTargets

ROLES = ("meta", "delay", "realtime")
BURST = 64
MEETINGS = 4  # Between two rounds of bursts, each of the two connections that meet sends this many decisions.
WARM_BURSTS = 20  # Before memory is measured for the first time: tables, threads and caches exist then.
MOVE_EVERY = 20  # Rounds; fuzzed decisions of operators may move subjects too.
LAST_LINES = 60  # So many are shown when a process ends: why it did is among them.
TIMES_MAX = 20  # A run goes on for at most so many times its requests, until it has seen what every run must see.
REST_S = 3.0  # After the last request, before memory is measured again.


@dataclass(slots=True)
class Report:
    """What a run saw."""

    seed: int
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    ended: dict[str, int] = field(default_factory=dict)  # Processes, by role.
    rss_mib: dict[str, tuple[int, int]] = field(default_factory=dict)  # At the start and at the end.
    loop_wait_ms: dict[str, int] = field(default_factory=dict)
    honest: dict[str, object] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """What must not be, whatever the machine does meanwhile."""
        found = [f"{count} {role} processes ended" for role, count in self.ended.items() if count]
        found += [f"{name}: {self.honest.get(name)}" for name in ("lost", "doubled", "errors") if self.honest.get(name)]
        return [*self.errors, *found, *([] if self.honest else ["the honest neighbour said nothing"])]

    @property
    def rss_over_start_mib(self) -> int:
        """The most that one process has more than at the start."""
        return max((end - start for start, end in self.rss_mib.values()), default=0)


def run(folder: Path, requests: int, seed: int, *, sweep: bool = True) -> Report:
    """Fuzz servers that are started for it, with so many requests at least."""
    report = Report(seed)
    with up(folder, "--port", "0") as servers:
        servers.until_ready()
        ports = {role: servers.ready(role)[-1].endpoint.port for role in ROLES}
        secret = read_secret(str(servers.data / SECRET_FILE))
        words = [sys.executable, "-m", "tests.fuzz.honest", *(str(ports[role]) for role in ROLES)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as neighbour:
            assert neighbour.stdout is not None and neighbour.stdin is not None
            try:
                if neighbour.stdout.readline().strip() != "ready":
                    report.errors.append("the honest neighbour was not served")
                else:
                    _fuzz(report, servers, ports, secret, requests, seed, sweep=sweep)
            finally:
                neighbour.stdin.close()
            told = neighbour.stdout.readlines()
        report.honest = json.loads(told[-1]) if told else {}
        report.ended = {role: len(servers.ready(role)) - 1 for role in ROLES}
        if any(report.ended.values()):
            report.errors += last_words(servers.errors, [role for role, count in report.ended.items() if count])
        else:
            report.loop_wait_ms = {role: loop_wait_ms(port) for role, port in ports.items()}
    return report


def _fuzz(
    report: Report, servers: Up, ports: dict[str, int], secret: Secret, requests: int, seed: int, *, sweep: bool
) -> None:
    random = Random(seed)
    now_ms = int(time.time() * 1000)
    pids = {role: servers.ready(role)[-1].pid for role in ROLES}
    # Each role gets a trusted peer and two strangers; the first stranger sweeps as well. A second trusted peer says
    # what the first one says, at once.
    lines = [
        (Hostile(role, ports[role], proved, random), Requests(role, random, now_ms))
        for proved in (secret, None, None, secret)
        for role in ROLES
    ]
    for line, source in lines:
        line.heard = source.heard
    before: dict[str, int] = {}
    begun = time.monotonic()
    keeper = Keeper(ports, secret, random, now_ms)
    try:
        with LyingTargets(secret, keeper.cluster_id, now_ms, seed) as liars:
            swept = [(line, source, source.sweep()) for line, source in lines[: 2 * len(ROLES)] if sweep]
            while swept:
                keeper.keep(liars)
                swept = [each for each in swept if _sweep_on(*each)]
                if not before and sum(line.counts["requests"] for line, _ in lines) > WARM_BURSTS * BURST * len(lines):
                    before = {role: rss_mib(pid) for role, pid in pids.items()}
            while (made := sum(line.counts["requests"] for line, _ in lines)) < requests or (
                made < requests * TIMES_MAX and not _seen_all(lines, liars)
            ):
                keeper.keep(liars)
                for line, source in lines:
                    line.open()
                    line.burst([source.drawn(line.next_id(), line.session) for _ in range(BURST)])
                for first, second in zip(lines[: len(ROLES)], lines[-len(ROLES) :], strict=True):
                    _meet(first, second)
                if not before:
                    before = {role: rss_mib(pid) for role, pid in pids.items()}
                if any(len(servers.ready(role)) > 1 for role in ROLES):
                    break
        report.counts.update({f"lying target {name}": count for name, count in liars.counts.items()})
        if liars.failure is not None:
            report.errors.append(f"the lying targets ended: {liars.failure!r}")
    except (AssertionError, OSError) as error:
        report.errors.append(f"{type(error).__name__}: {error}")
    keeper.close()
    report.seconds = time.monotonic() - begun
    for line, source in lines:
        line.close()
        report.counts["true handles"] += source.true_handles
        report.counts.update({f"{line.role} {name}": count for name, count in line.counts.items()})
        report.counts["requests"] += line.counts["requests"]
    time.sleep(REST_S)
    report.rss_mib = {role: (before.get(role, 0), rss_mib(pid)) for role, pid in pids.items()}


def _seen_all(lines: list[tuple[Hostile, Requests]], liars: LyingTargets) -> bool:
    """Whether servers have answered and refused, have given out handles, and have asked targets, which lied."""
    handles = any(source.true_handles for _, source in lines)
    lied = all(liars.counts[name] for name in ("asked HELLO", "asked DISPATCH", "lies"))
    said = {(line.role, name) for line, _ in lines for name in ("answered", "refused") if line.counts[name]}
    return handles and lied and len(said) == 2 * len(ROLES)


class Keeper:
    """Has meta send a delay server to the lying targets, and gives it messages for them."""

    def __init__(self, ports: dict[str, int], secret: Secret, random: Random, now_ms: int) -> None:
        self._meta = Hostile("meta", ports["meta"], secret, random)
        self._delay = Hostile("delay", ports["delay"], secret, random)
        self._producer_id = random.getrandbits(62) | 1
        self._number = 0
        self._now_ms = now_ms
        self._meta.open()
        self.cluster_id = self._meta.cluster_id

    def keep(self, liars: LyingTargets) -> None:
        """Register them once more, move their subjects there, and send one message to each."""
        self._meta.open()
        self._delay.open()
        subjects: list[HeadValue] = [f"liar.{number}" for number in range(len(liars.targets))]
        for target in liars.targets:
            self._meta.ask(RequestType.REGISTER, target.registered())
        if self._number % MOVE_EVERY == 0:
            self._meta.ask(RequestType.ROUTES, {"subjects": subjects, "assign": True})
            for subject, target in zip(subjects, liars.targets, strict=True):
                self._meta.ask(RequestType.MOVE_ROUTE, {"subject": subject, "to": target.log_id})
        self._number += 1
        batch = messages(
            [b"to a liar"] * len(subjects),
            due=[self._now_ms] * len(subjects),
            subjects=[str(subject).encode() for subject in subjects],
            subject_of=list(range(len(subjects))),
            part=ProducerPart(self._producer_id, self._number, self._number),
        )
        self._delay.ask(RequestType.SEND, {}, batch)

    def close(self) -> None:
        """End its connections."""
        self._meta.close()
        self._delay.close()


def _meet(first: tuple[Hostile, Requests], second: tuple[Hostile, Requests]) -> None:
    """Requests about one thing on two trusted connections, before either reads an answer."""
    both = first, second
    for line, _ in both:
        line.open()
    for cases in [source.meeting(line.session) for line, source in both for _ in range(MEETINGS)]:
        for line, source in both:
            line.send([source.swept(line.next_id(), case) for case in cases])
    for line, _ in both:
        line.read()


def _sweep_on(line: Hostile, source: Requests, cases: Iterator[object]) -> bool:
    """The next burst of a sweep; whether there was one."""
    line.open()
    frames: list[bytes] = []
    for case in islice(cases, BURST):
        frames.append(source.swept(line.next_id(), case))  # type: ignore[arg-type]
    if frames:
        line.burst(frames)
    return bool(frames)


def last_words(errors: str, roles: list[str]) -> list[str]:
    """The last lines that servers of these roles wrote: what ended them is among them."""
    return [
        line for role in roles for line in [x for x in errors.splitlines() if x.startswith(f"{role}: ")][-LAST_LINES:]
    ]


def rss_mib(pid: int) -> int:
    """Memory of a process; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    return next(int(line.split()[1]) >> 10 for line in status.splitlines() if line.startswith("VmRSS"))


def sweep_cases() -> int:
    """How many requests the sweep of one connection of each role makes."""
    return sum(sum(1 for _ in Requests(role, Random(0), 1_700_000_000_000).sweep()) for role in SPECS)
