"""Torture of what consumers say: ``python -m tests.end_to_end.torture_words --rounds N [--seed S]``.

Consumers acknowledge, give back with and without a delay, reject, extend, stall past their leases and die, while the
realtime and the delay server are killed and stopped. There are three groups: one takes all messages, one those with
some tags, and one keeps an order. Some messages expire. After each round everything comes to rest: each message that a
group wants is acknowledged, expired, or a dead letter of the group. All dead letters are sent again then, and
everything is acknowledged. At the end the books of the directory are audited. The exit code is 1 if any promise was
broken.

Promises: no message comes after its acknowledgement or its rejection returned. No handler gets more attempts than
there are. No attempt comes twice. Each life names the message's first one, and its expiry until it was a dead letter.
No group gets a message that its tags do not want, or one that expired long ago. The group that keeps an order gets no
message of an ordering key while it has not done with another one. Nothing is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import delayd
from delayd import AsyncConsumer, AsyncMessage, AsyncProducer
from delayd.errors import DelaydError, StaleHandle
from delayd.reading.books import audit_directory
from tests.unit.cli.runner import run
from tests.waiting import wait_until

from .cluster import Cluster, cluster, command

SUBJECT = "words"
ATTEMPTS = 4
MANY = 1_000  # Of the group that keeps an order: there a message becomes a dead letter only when a handler rejects it.
LEASE = timedelta(seconds=1.5)
BACKOFF = delayd.Backoff(first=timedelta(seconds=0.05), most=timedelta(seconds=0.3))
MESSAGES = 150  # A round.
CONSUMERS = 3  # Of each group.
TTLS_S = (0.02, 0.3, 1.5, 3_600.0)  # The last one never ends in a torture.
EXPIRES = 0.3  # Of all messages.
LATE_MS = 20_000  # A message that was given out in time may come so late: its server, or this one, was stopped.
KEYS = 40  # Ordering keys.
TAGS = (("eu",), ("eu", "large"), ("uk", "large"), ("us", "large"), ("eu-large",), ())
ROUND_S = 4.0  # Of trouble; then everything comes to rest.
REST_S = 90.0  # Within which it must.
TROUBLE = ("kill realtime", "kill delay", "kill both", "stop realtime", "stop delay", "none")
MUST_HAPPEN = (
    *("ack", "back off", "delay", "at once", "reject", "extend", "stall", "lapse", "gathered", "too late"),
    *("expired", "unwanted", "in order"),
)


class Group(NamedTuple):
    """A group of consumers, and the tags that it wants."""

    name: str
    tags_any: tuple[str, ...] = ()
    tags_all: tuple[str, ...] = ()
    ordered: bool = False
    attempts: int = ATTEMPTS

    def wants(self, tags: tuple[str, ...]) -> bool:
        """Whether a message with these tags is for this group."""
        some = not self.tags_any or any(tag in self.tags_any for tag in tags)
        return some and all(tag in tags for tag in self.tags_all)


GROUPS = (Group("all"), Group("some", ("eu", "uk"), ("large",)), Group("ordered", ordered=True, attempts=MANY))


@dataclass(slots=True)
class Fate:
    """What is known of one message."""

    origin: int | None  # The sequence of its receipt; None: nobody has told it yet.
    expires_at_ms: int | None = None
    wanted: bool = True  # By the group.
    redriven: bool = False  # It may have been a dead letter, which does not expire.
    buried: bool = False  # It has been one for sure.
    acked: bool = False  # An acknowledgement has returned.
    maybe: bool = False  # An acknowledgement or a rejection was sent, and nobody knows what became of it.
    dead: bool = False  # A rejection has returned.
    attempt: int = 0  # The last one that a handler got.
    handed: bool = False  # A handler has got it.
    rejected_in: int = 0  # How often dead letters had been sent again when a handler rejected it.
    may_die: bool = False  # It may have become a dead letter, which comes again out of order.

    def holds_up(self, now_ms: int) -> bool:
        """Whether a handler has got it, and the group has for sure not done with it."""
        if not self.handed or self.acked or self.maybe or self.may_die:
            return False
        return self.expires_at_ms is None or self.expires_at_ms > now_ms


@dataclass(slots=True)
class WordLedger:
    """All messages as one group gets them, and the promises that were broken."""

    fates: list[Fate] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    words: Counter[str] = field(default_factory=Counter)
    handed: int = 0
    ordered: bool = False
    attempts: int = ATTEMPTS
    _redriving: bool = False
    _redrives: int = 0

    def sent(self, origin: int | None, expires_at_ms: int | None = None, *, wanted: bool = True) -> None:
        """A message is sent, or was accepted; its number is that of the fate."""
        self.fates.append(Fate(origin, expires_at_ms, wanted))

    def accepted(self, number: int, origin: int) -> None:
        """The receipt of a message has come; it may have been handed out before."""
        fate = self.fates[number]
        if fate.origin not in (None, origin):
            self.violations.append(f"{number} is message {origin}, and a life named {fate.origin}")
        fate.origin = origin

    def hand(self, number: int, attempt: int, origin: int, expires_at_ms: int | None = None, *, now_ms: int) -> None:
        """A handler gets a message."""
        fate = self.fates[number]
        late = expires_at_ms is not None and expires_at_ms + LATE_MS < now_ms
        other = expires_at_ms != fate.expires_at_ms and not (expires_at_ms is None and fate.redriven)
        self.handed += 1
        before = self._others_of_key(number) if self.ordered and not fate.may_die else []
        self.words["in order"] += bool(before)
        holding = [other for other in before if self.fates[other].holds_up(now_ms)]
        for wrong, what in (
            (fate.acked, "comes after it was acknowledged"),
            (fate.dead, "comes after it was rejected"),
            (not 0 < attempt <= self.attempts, f"comes as attempt {attempt} of {self.attempts}"),
            (attempt <= fate.attempt, f"comes as attempt {attempt} after attempt {fate.attempt}"),
            (fate.origin not in (None, origin), f"is message {fate.origin}, and this life names {origin}"),
            (not fate.wanted, "comes, and its group does not want its tags"),
            (late, f"expired at {expires_at_ms} and comes at {now_ms}"),
            (holding, f"comes, though the group has not done with {holding[:3]} of its key"),
            (other, f"expires at {fate.expires_at_ms}, and this life names {expires_at_ms}"),
        ):
            if wrong:
                self.violations.append(f"{number} {what}")
        fate.origin = origin
        fate.maybe, fate.attempt, fate.handed = False, attempt, True

    def _others_of_key(self, number: int) -> list[int]:
        """Earlier messages of its ordering key that a handler has got."""
        of_key = range(number % KEYS, len(self.fates), KEYS)
        return [other for other in of_key if other != number and self.fates[other].handed]

    def acked(self, number: int) -> None:
        """An acknowledgement has returned."""
        self.fates[number].acked = True

    def rejecting(self, number: int) -> None:
        """A rejection is sent."""
        fate = self.fates[number]
        fate.maybe, fate.rejected_in = True, self._redrives

    def rejected(self, number: int) -> None:
        """A rejection has returned."""
        fate = self.fates[number]
        fate.buried = fate.may_die = True
        # If dead letters were sent again meanwhile, it may have come in time to be among them.
        fate.dead = fate.rejected_in == self._redrives and not self._redriving

    @contextmanager
    def redriving(self) -> Iterator[None]:
        """Within it dead letters are sent again: as their first attempt, and they do not expire any more."""
        for fate in self.fates:
            fate.dead, fate.attempt, fate.redriven = False, 0, True
        self._redriving = True
        yield
        self._redriving = False
        self._redrives += 1

    def at_rest(self, dead: int, now_ms: int) -> bool:
        """Whether that many dead letters are all that is not acknowledged or expired."""
        return len(self.left(now_ms)) <= dead <= sum(fate.wanted and not fate.acked for fate in self.fates)

    def left(self, now_ms: int) -> list[int]:
        """The numbers of the messages that the group has not done with for sure: none may be lost."""
        return [
            number
            for number, fate in enumerate(self.fates)
            if fate.wanted
            and not (fate.acked or fate.maybe)
            and (fate.expires_at_ms is None or fate.expires_at_ms > now_ms or fate.buried)
        ]

    def expired(self, now_ms: int) -> int:
        """How many messages expired, as far as this group knows."""
        ends = [fate.expires_at_ms for fate in self.fates if fate.wanted and not fate.acked]
        return sum(end is not None and end <= now_ms for end in ends)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Handler:
    """One consumer, which does something else with each message; ``calm``: it acknowledges."""

    def __init__(self, meta: str, group: Group, ledger: WordLedger, draw: random.Random) -> None:
        self.calm = False
        self.stopped = False
        self._meta = meta
        self._group = group
        self._ledger = ledger
        self._draw = draw

    async def run(self) -> None:
        """Consume until it is stopped, with one consumer after the other."""
        while not self.stopped:
            prefetch = self._draw.random() < 0.5
            consumer = AsyncConsumer(
                *(self._meta, SUBJECT, self._group.name),
                lease=LEASE,
                tags_any=self._group.tags_any,
                tags_all=self._group.tags_all,
                ordered=self._group.ordered,
                prefetch=prefetch,
                timeout_ms=3_000,
                max_attempts=self._group.attempts,
                backoff=BACKOFF,
            )
            pulls = self._draw.randint(1, 30)
            while pulls > 0 and not self.stopped:
                pulls -= 1
                with suppress(DelaydError):
                    await self._pull(consumer)
            with suppress(DelaydError):
                await consumer.close()

    async def _pull(self, consumer: AsyncConsumer) -> None:
        batch = await consumer.pull(self._draw.randint(1, 5), wait=timedelta(seconds=0.3))
        # What outlived its lease on the way here may have come to others meanwhile.
        if not len(batch) or time.monotonic() > batch.pulled.lease_ends - 0.2:
            return
        for message in batch:
            origin, expires_at_ms = message.origin_sequence, message.expires_at_ms
            self._ledger.hand(int(message.body), message.attempt, origin, expires_at_ms, now_ms=_now_ms())
        for message in batch:
            await self._handle(consumer, message)

    async def _handle(self, consumer: AsyncConsumer, message: AsyncMessage) -> None:
        number = int(message.body)
        word = "ack" if self.calm else self._word()
        self._ledger.words[word] += 1
        try:
            if word == "ack":
                await self._ack(message, number)
            elif word == "gathered":
                self._ledger.fates[number].maybe = True
                await message.ack(wait=False)
                await consumer.flush()
                self._ledger.acked(number)
            elif word == "extend":
                await message.extend(LEASE * 2)
                await asyncio.sleep(LEASE.total_seconds() * 1.2)
                await self._ack(message, number)
            elif word == "stall":
                await asyncio.sleep(LEASE.total_seconds() * 1.3)
                await self._ack(message, number)
            elif word == "reject" or (message.attempt >= ATTEMPTS and word != "lapse"):
                fate = self._ledger.fates[number]
                fate.maybe = fate.may_die = True
                await message.reject("bad", error="rejected")
                self._ledger.rejected(number)
            elif word == "delay":
                await message.nack(timedelta(seconds=self._draw.uniform(0.01, 0.4)), error="later")
            elif word == "at once":
                await message.nack(timedelta(0))
            elif word == "back off":
                await message.nack(error="again")
        except StaleHandle:
            # Nothing came of it: the message belongs to somebody else by now.
            self._ledger.fates[number].maybe = False
            self._ledger.words["too late"] += 1

    async def _ack(self, message: AsyncMessage, number: int) -> None:
        self._ledger.fates[number].maybe = True
        await message.ack()
        self._ledger.acked(number)

    def _word(self) -> str:
        words = {
            "ack": 30,
            "gathered": 6,
            "back off": 20,
            "delay": 15,
            "at once": 8,
            "reject": 4,
            "extend": 5,
            "stall": 5,
        }
        return self._draw.choices([*words, "lapse"], [*words.values(), 7])[0]


_DIES = f"""
import sys, time, delayd
from datetime import timedelta
lease = timedelta(seconds={LEASE.total_seconds()})
_, meta, group, attempts = sys.argv  # It names no tags: those of the group hold.
with delayd.Consumer(meta, {SUBJECT!r}, group, lease=lease, max_attempts=int(attempts)) as consumer:
    print("ready", flush=True)
    for message in consumer:
        time.sleep(0.05)
"""


class Torture:
    """Rounds in one directory."""

    def __init__(self, servers: Cluster, seed: int, say: Callable[[str], None]) -> None:
        self.ledgers = {group: WordLedger(ordered=group.ordered, attempts=group.attempts) for group in GROUPS}
        self._servers = servers
        self._draw = random.Random(f"{seed} words")
        self._say = say

    async def run(self, rounds: int) -> None:
        """Run all rounds, or until a promise is broken."""
        meta = self._servers.meta.address
        await self._make_groups()
        async with AsyncProducer(meta) as producer:
            for number in range(1, rounds + 1):
                handlers = [
                    Handler(meta, group, ledger, random.Random(self._draw.random()))
                    for group, ledger in self.ledgers.items()
                    for _ in range(CONSUMERS)
                ]
                tasks = [asyncio.create_task(handler.run()) for handler in handlers]
                trouble = await self._trouble(producer)
                dead = await self._rest()
                for handler in handlers:
                    handler.calm = True
                await asyncio.to_thread(self._redrive)
                await self._all_acked()
                for handler in handlers:
                    handler.stopped = True
                await asyncio.gather(*tasks)
                handed = sum(ledger.handed for ledger in self.ledgers.values())
                self._say(f"{number:4} {trouble}: {dead} dead letters; handed out {handed}")
                if any(ledger.violations for ledger in self.ledgers.values()):
                    return

    async def _make_groups(self) -> None:
        """Pull from each group once: the first pull says what a group wants."""
        for group in GROUPS:
            consumer = AsyncConsumer(
                *(self._servers.meta.address, SUBJECT, group.name),
                tags_any=group.tags_any,
                tags_all=group.tags_all,
                ordered=group.ordered,
            )
            async with consumer:
                await consumer.pull(wait=timedelta(0))

    async def _send(self, producer: AsyncProducer) -> None:
        """Send the messages of a round: due within it, some with an expiry, each with the tags of its turn."""

        async def send(number: int) -> None:
            due_ms = _now_ms() + int(self._draw.uniform(0, ROUND_S) * 1_000)
            ttl_s = self._draw.choice(TTLS_S) if self._draw.random() < EXPIRES else None
            tags = TAGS[number % len(TAGS)]
            for group, ledger in self.ledgers.items():
                expires_at_ms = None if ttl_s is None else due_ms + int(ttl_s * 1_000)
                ledger.sent(None, expires_at_ms, wanted=group.wants(tags))
            receipt = await producer.send(
                SUBJECT,
                b"%d" % number,
                deliver_at=datetime.fromtimestamp(due_ms / 1_000, UTC),
                ttl=None if ttl_s is None else timedelta(seconds=ttl_s),
                tags=tags,
                ordering_key=b"%d" % (number % KEYS),
            )
            for ledger in self.ledgers.values():
                ledger.accepted(number, receipt.sequence)

        first = len(self.ledgers[GROUPS[0]].fates)
        # They run in order up to their first wait, so each has the fate of its number.
        await asyncio.gather(*(send(number) for number in range(first, first + MESSAGES)))

    async def _trouble(self, producer: AsyncProducer) -> str:
        """Send messages, and do something terrible to the servers and to a consumer meanwhile."""
        await self._send(producer)
        group = self._draw.choice(GROUPS)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _DIES, self._servers.meta.address, group.name, str(group.attempts)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            assert child.stdout is not None
            await child.stdout.readline()
            trouble = self._draw.choice(TROUBLE)
            await asyncio.sleep(self._draw.uniform(0, ROUND_S / 2))
            await asyncio.to_thread(self._strike, trouble)
            await asyncio.sleep(self._draw.uniform(0, ROUND_S / 2))
        finally:
            child.kill()
            await child.wait()
        return trouble

    def _strike(self, trouble: str) -> None:
        word, _, role = trouble.partition(" ")
        servers = {"realtime": (self._servers.realtime,), "delay": (self._servers.delay,)}
        for server in servers.get(role, (self._servers.realtime, self._servers.delay) if role == "both" else ()):
            if word == "kill":
                server.kill()
            else:
                server.signal(signal.SIGSTOP)
                time.sleep(self._draw.uniform(0.1, 2.0))
                server.signal(signal.SIGCONT)
        if word == "kill":
            for server in servers.get(role, (self._servers.delay, self._servers.realtime)):
                server.start()

    async def _rest(self) -> int:
        """Wait until each message is acknowledged, expired or a dead letter; how many are dead letters."""
        until = time.monotonic() + REST_S
        while True:
            # Before the count: a message that expires after it may be pending still.
            now_ms = _now_ms()
            dead = await asyncio.to_thread(self._dead)
            if all(ledger.at_rest(dead[group.name], now_ms) for group, ledger in self.ledgers.items()):
                return dead.total()
            if time.monotonic() > until:
                for group, ledger in self.ledgers.items():
                    if left := ledger.left(now_ms):
                        told = f"{dead[group.name]} dead letters of {group.name}, and {len(left)} are not acknowledged"
                        ledger.violations.append(f"{told}: {left[:20]}")
                return dead.total()
            await asyncio.sleep(0.3)

    async def _all_acked(self) -> None:
        until = time.monotonic() + REST_S
        while any(ledger.left(_now_ms()) for ledger in self.ledgers.values()):
            if time.monotonic() > until:
                for group, ledger in self.ledgers.items():
                    if left := ledger.left(_now_ms()):
                        ledger.violations.append(f"{len(left)} messages of {group.name} were lost: {left[:20]}")
                return
            await asyncio.sleep(0.5)
            # A message whose acknowledgement got no answer may have died after the others were sent again.
            await asyncio.to_thread(self._redrive)

    def _dead(self) -> Counter[str]:
        listed = json.loads(command("dead", "list", "--meta", self._servers.meta.address, "--format", "json"))
        return Counter({row["group"]: row["dead"] for row in listed})

    def _redrive(self) -> None:
        for group, ledger in self.ledgers.items():
            with ledger.redriving():
                # A realtime server that has just begun may not have been heard by meta yet.
                wait_until(partial(self._redriven, group.name), f"dead letters of {group.name} are sent again")

    def _redriven(self, group: str) -> bool:
        ran = run("dead", "redrive", SUBJECT, group, "--meta", self._servers.meta.address, "--yes")
        assert ran.code == 0 or "no realtime server that lives" in ran.err, ran.err
        return ran.code == 0


def torture(data: Path, rounds: int, seed: int, say: Callable[[str], None]) -> dict[Group, WordLedger]:
    """Run a torture in an empty directory."""
    with cluster(data) as servers:
        running = Torture(servers, seed, say)
        asyncio.run(running.run(rounds))
        for server in (servers.delay, servers.realtime, servers.meta):
            server.end()
    ledger = running.ledgers[GROUPS[0]]
    total = audit_directory(str(data), now_ms=_now_ms()).total
    for name in ("lost", "duplicate", "early", "orphan", "mismatch", "missing", "unproven"):
        if count := getattr(total, name):
            ledger.violations.append(f"the audit finds {count} {name}")
    counts = f"{total.dispatched} dispatched, {total.expired} expired"
    say(f"audit: {total.scheduled} scheduled for {len(ledger.fates)} messages, {counts}")
    return running.ledgers


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.end_to_end.torture_words", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    data = Path(tempfile.mkdtemp(prefix="delayd-words-"))
    print(f"seed {options.seed}, data in {data}", flush=True)
    ledgers = torture(data, options.rounds, options.seed, lambda line: print(line, flush=True))
    words: Counter[str] = Counter()
    for group, ledger in ledgers.items():
        words += ledger.words
        words["expired"] += ledger.expired(_now_ms())
        words["unwanted"] += sum(not fate.wanted for fate in ledger.fates)
        print(f"{group.name}: {len(ledger.fates)} messages, handed out {ledger.handed} times")
        for violation in ledger.violations[:20]:
            print(f"VIOLATION {group.name}: {violation}")
    never = [word for word in MUST_HAPPEN if options.rounds >= 10 and not words[word]]
    print(", ".join(f"{word} {count}" for word, count in sorted(words.items())))
    if never:
        print(f"NEVER {', '.join(never)}")
    if never or any(ledger.violations for ledger in ledgers.values()):
        return 1
    shutil.rmtree(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
