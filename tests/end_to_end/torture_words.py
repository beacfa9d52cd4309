"""Torture of what consumers say: ``python -m tests.end_to_end.torture_words --rounds N [--seed S]``.

Consumers acknowledge, give back with and without a delay, reject, extend, stall past their leases and die, while the
realtime and the delay server are killed and stopped. After each round everything comes to rest: each message is
acknowledged, or a dead letter of its group. All dead letters are sent again then, and everything is acknowledged. At
the end the books of the directory are audited. The exit code is 1 if any promise was broken.

Promises: no message comes after its acknowledgement or its rejection returned. No handler gets more attempts than
there are. No attempt comes twice. Each life names the message's first one. Nothing is lost.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import delayd
from delayd.client.pulling.async_consumer import AsyncConsumer, AsyncMessage
from delayd.client.sending.async_producer import AsyncProducer
from delayd.errors import DelaydError, StaleHandle
from delayd.reading.books import audit_directory

from .cluster import Cluster, cluster, command

SUBJECT, GROUP = "words", "g"
ATTEMPTS = 4
LEASE = timedelta(seconds=1.5)
BACKOFF = delayd.Backoff(first=timedelta(seconds=0.05), most=timedelta(seconds=0.3))
MESSAGES = 150  # A round.
CONSUMERS = 4
ROUND_S = 4.0  # Of trouble; then everything comes to rest.
REST_S = 90.0  # Within which it must.
TROUBLE = ("kill realtime", "kill delay", "kill both", "stop realtime", "stop delay", "none")
MUST_HAPPEN = ("ack", "back off", "delay", "at once", "reject", "extend", "stall", "lapse", "gathered", "too late")


@dataclass(slots=True)
class Fate:
    """What is known of one message."""

    origin: int  # The sequence of its receipt.
    acked: bool = False  # An acknowledgement has returned.
    maybe: bool = False  # An acknowledgement or a rejection was sent, and nobody knows what became of it.
    dead: bool = False  # A rejection has returned.
    attempt: int = 0  # The last one that a handler got.


@dataclass(slots=True)
class WordLedger:
    """All messages, and the promises that were broken."""

    fates: list[Fate] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    words: Counter[str] = field(default_factory=Counter)
    handed: int = 0

    def sent(self, origin: int) -> None:
        """A message was accepted; its number is that of the fate."""
        self.fates.append(Fate(origin))

    def hand(self, number: int, attempt: int, origin: int) -> None:
        """A handler gets a message."""
        fate = self.fates[number]
        self.handed += 1
        for wrong, what in (
            (fate.acked, "comes after it was acknowledged"),
            (fate.dead, "comes after it was rejected"),
            (not 0 < attempt <= ATTEMPTS, f"comes as attempt {attempt} of {ATTEMPTS}"),
            (attempt <= fate.attempt, f"comes as attempt {attempt} after attempt {fate.attempt}"),
            (origin != fate.origin, f"is message {fate.origin}, and this life names {origin}"),
        ):
            if wrong:
                self.violations.append(f"{number} {what}")
        fate.maybe, fate.attempt = False, attempt

    def acked(self, number: int) -> None:
        """An acknowledgement has returned."""
        self.fates[number].acked = True

    def rejected(self, number: int) -> None:
        """A rejection has returned."""
        self.fates[number].dead = True

    def redriven(self) -> None:
        """Dead letters come again, as their first attempt."""
        for fate in self.fates:
            fate.dead, fate.attempt = False, 0

    def at_rest(self, dead: int) -> bool:
        """Whether that many dead letters are all that is not acknowledged."""
        left = [fate for fate in self.fates if not fate.acked]
        return len(left) - sum(fate.maybe for fate in left) <= dead <= len(left)


class Handler:
    """One consumer, which does something else with each message; ``calm``: it acknowledges."""

    def __init__(self, meta: str, ledger: WordLedger, draw: random.Random) -> None:
        self.calm = False
        self.stopped = False
        self._meta = meta
        self._ledger = ledger
        self._draw = draw

    async def run(self) -> None:
        """Consume until it is stopped, with one consumer after the other."""
        while not self.stopped:
            prefetch = self._draw.random() < 0.5
            consumer = AsyncConsumer(
                *(self._meta, SUBJECT, GROUP),
                lease=LEASE,
                prefetch=prefetch,
                timeout_ms=3_000,
                max_attempts=ATTEMPTS,
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
            self._ledger.hand(int(message.body), message.attempt, message.origin_sequence)
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
            elif word == "reject" or (message.attempt == ATTEMPTS and word != "lapse"):
                self._ledger.fates[number].maybe = True
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
with delayd.Consumer(sys.argv[1], {SUBJECT!r}, {GROUP!r}, lease=lease, max_attempts={ATTEMPTS}) as consumer:
    print("ready", flush=True)
    for message in consumer:
        time.sleep(0.05)
"""


class Torture:
    """Rounds in one directory."""

    def __init__(self, servers: Cluster, seed: int, say: Callable[[str], None]) -> None:
        self.ledger = WordLedger()
        self._servers = servers
        self._draw = random.Random(f"{seed} words")
        self._say = say

    async def run(self, rounds: int) -> None:
        """Run all rounds, or until a promise is broken."""
        meta = self._servers.meta.address
        async with AsyncProducer(meta) as producer:
            for number in range(1, rounds + 1):
                handlers = [Handler(meta, self.ledger, random.Random(self._draw.random())) for _ in range(CONSUMERS)]
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
                self._say(f"{number:4} {trouble}: {dead} dead letters; handed out {self.ledger.handed}")
                if self.ledger.violations:
                    return

    async def _trouble(self, producer: AsyncProducer) -> str:
        """Send messages, and do something terrible to the servers and to a consumer meanwhile."""
        first = len(self.ledger.fates)
        bodies = [b"%d" % (first + row) for row in range(MESSAGES)]
        delays = [timedelta(seconds=self._draw.uniform(0, ROUND_S)) for _ in bodies]
        receipts = await asyncio.gather(
            *(producer.send(SUBJECT, body, delay=delay) for body, delay in zip(bodies, delays, strict=True))
        )
        for receipt in receipts:
            self.ledger.sent(receipt.sequence)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _DIES, self._servers.meta.address),
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
        """Wait until each message is acknowledged or a dead letter; how many are that."""
        until = time.monotonic() + REST_S
        while True:
            dead = await asyncio.to_thread(self._dead)
            if self.ledger.at_rest(dead):
                return dead
            if time.monotonic() > until:
                left = [number for number, fate in enumerate(self.ledger.fates) if not fate.acked]
                self.ledger.violations.append(f"{dead} dead letters, and {len(left)} are not acknowledged: {left[:20]}")
                return dead
            await asyncio.sleep(0.3)

    async def _all_acked(self) -> None:
        until = time.monotonic() + REST_S
        while left := [number for number, fate in enumerate(self.ledger.fates) if not fate.acked and not fate.maybe]:
            if time.monotonic() > until:
                self.ledger.violations.append(f"{len(left)} messages were lost: {left[:20]}")
                return
            await asyncio.sleep(0.5)
            # A message whose acknowledgement got no answer may have died after the others were sent again.
            await asyncio.to_thread(self._redrive)

    def _dead(self) -> int:
        listed = json.loads(command("dead", "list", "--meta", self._servers.meta.address, "--format", "json"))
        return sum(row["dead"] for row in listed)

    def _redrive(self) -> None:
        self.ledger.redriven()
        command("dead", "redrive", SUBJECT, GROUP, "--meta", self._servers.meta.address, "--yes")


def torture(data: Path, rounds: int, seed: int, say: Callable[[str], None]) -> WordLedger:
    """Run a torture in an empty directory."""
    with cluster(data) as servers:
        running = Torture(servers, seed, say)
        asyncio.run(running.run(rounds))
        for server in (servers.delay, servers.realtime, servers.meta):
            server.end()
    ledger = running.ledger
    total = audit_directory(str(data), now_ms=int(time.time() * 1000)).total
    for name in ("lost", "duplicate", "early", "orphan", "mismatch", "missing", "unproven"):
        if count := getattr(total, name):
            ledger.violations.append(f"the audit finds {count} {name}")
    say(f"audit: {total.scheduled} scheduled for {len(ledger.fates)} messages, {total.dispatched} dispatched")
    return ledger


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.end_to_end.torture_words", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    data = Path(tempfile.mkdtemp(prefix="delayd-words-"))
    print(f"seed {options.seed}, data in {data}", flush=True)
    ledger = torture(data, options.rounds, options.seed, lambda line: print(line, flush=True))
    never = [word for word in MUST_HAPPEN if options.rounds >= 10 and not ledger.words[word]]
    words = ", ".join(f"{word} {count}" for word, count in sorted(ledger.words.items()))
    print(f"{len(ledger.fates)} messages, handed out {ledger.handed} times: {words}")
    if never:
        print(f"NEVER {', '.join(never)}")
    for violation in ledger.violations[:20]:
        print(f"VIOLATION {violation}")
    if ledger.violations or never:
        return 1
    shutil.rmtree(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
