"""The servers of a torture: real processes on fixed ports in one directory, which die and come back.

Invariant: a server that ends otherwise than it was told to is a broken promise; so is one that does not come back.
"""

import asyncio
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from delayd.config import Value

from .processes import HOST, ServerProcess
from .torture_cut import cut_connections
from .torture_neighbour import annoy

ROLES = ("meta", "delay", "realtime")
# The kinds of rounds, and how many cards of each are in the deck that rounds are drawn from.
KINDS = {"one": 15, "two": 6, "all": 5, "stopped": 5, "terminated": 6, "cut": 5, "late": 5, "hostile": 6}
READY_S = 90.0  # To recover and say so, on a machine that is busy; a start takes half a second on an idle one.
STOPPED_S = (0.5, 3.0)
APART_S = 0.25  # The deaths of one round, and its starts, are this far apart.
DOWN_S = 1.0
STARTING_S = 0.9  # A start, its recovery and the first seconds of load fall into this.
PORTS = (20_000, 32_000)  # Below those that the system gives to connections, or one of them takes a dead server's port.
MIB = 1 << 20
BAD_WORDS = ("CRITICAL", "Traceback", "AssertionError")
EIO = "Input/output error"  # A server may log a file that it can't read as critical, if the line says why.


class Failed(Exception):
    """A server did what it never may."""


class Cluster:
    """Three servers; a plain class, for who kills them must see them as they are."""

    def __init__(self, data: Path, draw: random.Random, lease_ms: int, environment: Mapping[str, str]) -> None:
        # Which ports are free is no matter of the seed, so they have a series of their own.
        ports = random.Random(draw.random())
        meta = ServerProcess("meta", data, {"heartbeat_ms": 200, "lease_ms": 1_000}, environment)
        self._looked = dict.fromkeys(ROLES, 0)  # How much of each log was looked at.
        self.happened: Counter[str] = Counter()  # How often each kind of event happened to a server.
        self._stopped = shuffled(draw, ROLES)
        meta.port = _free_port(ports)
        checkpoint: dict[str, Value] = {
            "checkpoint_every_ms": draw.choice((60, 700, 5_000)),
            "segment_bytes": MIB,
            "meta": meta.address,
        }
        self.servers = {
            "meta": meta,
            # Small frames, segments and caches: all that takes a day to happen happens within seconds.
            "delay": ServerProcess(
                "delay",
                data,
                {
                    **checkpoint,
                    "load_ahead_ms": 500,
                    "tail_bytes": draw.choice((0, MIB // 4, 64 * MIB)),
                    "source_cache_bytes": MIB,
                    "frame_rows_max": draw.choice((20, 200, 8_000)),
                    "outcomes_flush_ms": draw.choice((5, 50, 300)),
                },
                environment,
            ),
            "realtime": ServerProcess(
                "realtime",
                data,
                {**checkpoint, "lease_ms": lease_ms, "tail_bytes": draw.choice((0, MIB // 4, MIB))},
                environment,
            ),
        }
        for role in ("delay", "realtime"):
            self.servers[role].port = _free_port(ports)

    @property
    def meta(self) -> str:
        """Where meta is, in every life."""
        return self.servers["meta"].address

    async def start(self, roles: tuple[str, ...] = ROLES) -> float:
        """Start servers and wait until they are ready; the seconds that took."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(READY_S):
                await asyncio.gather(*(asyncio.to_thread(self.servers[role].start) for role in roles))
        except AssertionError as error:
            raise Failed(f"a server of {roles} did not start: {error}") from error
        except TimeoutError:
            self.kill(ROLES)
            raise Failed(f"the servers {roles} were not ready within {READY_S:g} s") from None
        return time.monotonic() - began

    def kill(self, roles: tuple[str, ...]) -> None:
        """SIGKILL those that run."""
        for role in roles:
            if self.servers[role].running:
                self.happened[f"SIGKILL {role}"] += 1
                self.servers[role].kill()

    async def round(self, kind: str, draw: random.Random) -> str:
        """Do something terrible to some server, and bring all back; says what it was."""
        # Those that hold messages are struck most.
        one = draw.choices(ROLES, (1, 3, 3))[0]
        others = draw.sample([role for role in ROLES if role != one], {"two": 1, "all": 2}.get(kind, 0))
        roles = (one, *others)
        if kind == "stopped":
            return await self._stop_one(next(self._stopped), draw)
        if kind == "hostile":
            self.happened["hostile neighbour"] += 1
            return f"{await annoy(HOST, self.servers[one].port, draw)} at {one}"
        if kind == "late":
            return await self._deliver_late(draw)
        if kind == "cut":
            cut = cut_connections(self.servers[roles[0]].pid, draw, draw.choice((0.5, 1.0)))
            self.happened["connections cut"] += cut
            return f"cut {cut} connections of {roles[0]}"
        if kind == "terminated":
            code = await asyncio.to_thread(self.servers[roles[0]].terminate)
            if code != 0:
                raise Failed(f"{roles[0]} ended with {code} after SIGTERM")
            told = f"SIGTERM {roles[0]}"
            self.happened[told] += 1
        else:
            for role in roles:
                self.kill((role,))
                await asyncio.sleep(draw.choice((0, draw.uniform(0, APART_S))))
            told = f"SIGKILL {'+'.join(roles)}"
        await asyncio.sleep(draw.choice((0, draw.uniform(0, DOWN_S))))
        while draw.random() < 0.35:
            told += await self._end_while_it_starts(draw.choice(roles), draw)
        return f"{told}, back in {await self.start(roles):.1f} s"

    def check(self, excused: tuple[str, ...] = ()) -> None:
        """Failed, if a server ended by itself or has said since the last look that something is wrong with it.

        Lines with a word that is excused are what the last round was about.
        """
        for role, server in self.servers.items():
            if not server.running:
                raise Failed(f"{role} ended by itself: {server.log[-4_000:]}")
            said = server.log
            # The last line may be half written.
            end = said.rfind("\n") + 1
            for line in said[self._looked[role] : end].splitlines():
                found = [word for word in BAD_WORDS if word in line]
                if found and not any(word in line for word in (EIO, *excused)):
                    at = said.index(line, self._looked[role])
                    raise Failed(f"{role} says {found[0]}: {said[max(0, at - 200) : at + 4_000]}")
            self._looked[role] = end

    async def terminate(self) -> None:
        """SIGTERM to all, one after the other."""
        for role in reversed(ROLES):
            code = await asyncio.to_thread(self.servers[role].terminate)
            if code != 0:
                raise Failed(f"{role} ended with {code} after SIGTERM")

    async def _stop_one(self, role: str, draw: random.Random) -> str:
        stopped_s = draw.uniform(*STOPPED_S)
        self.servers[role].signal(signal.SIGSTOP)
        self.happened[f"SIGSTOP {role}"] += 1
        await asyncio.sleep(stopped_s)
        if draw.random() < 0.25:
            self.kill((role,))
            return f"SIGSTOP {role} for {stopped_s:.1f} s, SIGKILL, back in {await self.start((role,)):.1f} s"
        self.servers[role].signal(signal.SIGCONT)
        return f"SIGSTOP {role} for {stopped_s:.1f} s"

    async def _deliver_late(self, draw: random.Random) -> str:
        """What the delay server had sent is read only after it has connected again (rule H3)."""
        realtime = self.servers["realtime"]
        realtime.signal(signal.SIGSTOP)
        await asyncio.sleep(draw.uniform(0, STOPPED_S[0]))
        cut = cut_connections(self.servers["delay"].pid, draw, 1.0, frozenset((realtime.port,)))
        await asyncio.sleep(draw.uniform(*STOPPED_S))
        realtime.signal(signal.SIGCONT)
        self.happened["bytes read late"] += 1
        return f"SIGSTOP realtime, cut {cut} connections of delay to it, SIGCONT"

    async def _end_while_it_starts(self, role: str, draw: random.Random) -> str:
        self.servers[role].spawn()
        after_s = draw.uniform(0, STARTING_S)
        await asyncio.sleep(after_s)
        if not self.servers[role].running:
            raise Failed(f"{role} ended while it started: {self.servers[role].log[-4_000:]}")
        number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        self.happened["ended in its start"] += 1
        self.servers[role].signal(number)
        code = await asyncio.to_thread(self.servers[role].wait)
        # Before Python has come to its first line, the kernel ends it.
        if code not in ((-number,) if number == signal.SIGKILL else (0, -number)):
            raise Failed(f"{role} ended with {code} after {number.name}: {self.servers[role].log[-4_000:]}")
        return f", {number.name} {role} {after_s:.2f} s into its start"


def shuffled(draw: random.Random, cards: Sequence[str]) -> Iterator[str]:
    """Each of the cards in any order, and then all again: none is missed for long."""
    while True:
        yield from draw.sample(cards, len(cards))


def _free_port(draw: random.Random) -> int:
    while True:
        port = draw.randrange(*PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
