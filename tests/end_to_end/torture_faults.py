"""What a torture does to servers beside ending them: to their disk, their clock and their directories.

Invariant: each round ends with the true directories in their place, on a disk that reads and a clock that is right.
"""

import asyncio
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from delayd.batch.columns import ProducerPart
from delayd.config import parse_address
from delayd.errors import DelaydError
from delayd.net.entry import connect
from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from tests.worlds.outside import encode_wanted

from .bad_disk import BadDisk
from .preloaded import Preloaded, environment_of
from .processes import ServerProcess
from .torture_cluster import Cluster, Failed
from .torture_ledger import Ledger
from .wall_clock import WallClock

FAULTS = {"disk": 6, "clock": 5, "copied": 3, "restored": 5}  # How often, beside the kinds of the cluster.
# Lines that are critical, and right in such a round.
EXCUSED = {"restored": ("fenced by=", "target_refused", "origin_restored")}
UNREADABLE = (
    *("/delay/message/", "/delay/schedule/", "/delay/dispatch/", "/delay/seal/", "/delay/"),
    *("/realtime/message/", "/realtime/consume/", "/realtime/pull/", "/realtime/"),
)
UNREADABLE_S = (0.3, 4.0)
HOUR_MS = 3_600_000
STEPPED_S = (0.1, 1.5)
NOTICED_S = 20.0
BESIDE_S = (0.5, 3.0)  # How long a copy runs once it is fenced.
LEASE_S = 1.3  # Meta's lease on a server is 1 s; a server that is back waits for its own former one.
COMMAND_S = 30.0
ASK_AGAIN_S = 0.05


class Faults:
    """The faults of one torture; what they need lies beside its directory."""

    def __init__(self, data: Path, ledger: Ledger, kinds: Sequence[str], *, hours_pass: bool) -> None:
        self._data, self._ledger = data, ledger
        self._beside = data.with_name(f"{data.name}-beside")
        # Without a compiler the other kinds can still be had.
        self._disk = BadDisk(self._beside / "preloaded") if "disk" in kinds else None
        self._wall = WallClock(self._beside / "preloaded") if hours_pass or "clock" in kinds else None
        self._backup_from: int | None = None  # The next message's number when the backup was made.

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the servers."""
        libraries: list[Preloaded] = [library for library in (self._disk, self._wall) if library is not None]
        return environment_of(*libraries)

    async def round(self, kind: str, cluster: Cluster, draw: random.Random) -> str:
        """Do one of them, and undo it; says what it was."""
        if kind == "disk":
            return await self._fail_reads(cluster, draw)
        if kind == "clock":
            return await self._step_clock(cluster, draw)
        if kind == "copied":
            return await self._start_a_copy(cluster, draw)
        if self._backup_from is not None and self._delivered_since(self._backup_from):
            return await self._restore(cluster, draw)
        return await self._back_up(cluster)

    def remove(self) -> None:
        """Remove what lies beside."""
        shutil.rmtree(self._beside, ignore_errors=True)

    # The disk.

    async def _fail_reads(self, cluster: Cluster, draw: random.Random) -> str:
        assert self._disk is not None
        part, failed_s, before = draw.choice(UNREADABLE), draw.uniform(*UNREADABLE_S), self._disk.failed
        with self._disk.failing(part):
            await asyncio.sleep(failed_s)
        failed = self._disk.failed - before
        cluster.happened["read with EIO"] += failed
        return f"EIO from {part} for {failed_s:.1f} s, {failed} reads failed"

    # The clock.

    async def _step_clock(self, cluster: Cluster, draw: random.Random) -> str:
        ahead, believed = draw.random() < 0.5, draw.random() < 0.6
        if ahead:
            self._ledger.clock_is_ahead(HOUR_MS)
        self._step(HOUR_MS if ahead else -HOUR_MS)
        told = f"clock {'+' if ahead else '-'}1 h"
        cluster.happened[told] += 1
        await asyncio.sleep(draw.uniform(*STEPPED_S))
        if ahead and believed:
            await self._trust(cluster)
            told += ", believed"
        if draw.random() < 0.3:
            role = draw.choice(("delay", "realtime"))
            cluster.kill((role,))
            await cluster.start((role,))
            told += f", SIGKILL {role}"
        await asyncio.sleep(draw.uniform(*STEPPED_S))
        self._step(-HOUR_MS if ahead else HOUR_MS)
        if ahead:
            self._ledger.clock_is_right(int(time.time() * 1_000))
        # A jump ahead waits for the word; after one back it sets the log's time back too.
        if not ahead or draw.random() < 0.5:
            await self._trust(cluster)
            told += ", set right by an operator"
        return told

    async def pass_hours(self, cluster: Cluster, ahead_ms: int) -> None:
        """Set the clock ahead for good, by the word of an operator."""
        self._ledger.clock_is_ahead(ahead_ms)
        self._step(ahead_ms)
        await asyncio.sleep(STEPPED_S[1])
        await self._trust(cluster)

    def _step(self, ms: int) -> None:
        assert self._wall is not None
        self._wall.step(ms)
        self._ledger.clock_steps(time.monotonic())

    async def _trust(self, cluster: Cluster) -> None:
        command = [
            sys.executable,
            "-m",
            "delayd",
            "clock",
            "--meta",
            cluster.meta,
            "--trust",
            "--data",
            str(self._data),
        ]
        ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=COMMAND_S)
        if ran.returncode != 0:
            raise Failed(f"the clock was not trusted: {ran.stdout}{ran.stderr}")

    # Directories.

    async def _start_a_copy(self, cluster: Cluster, draw: random.Random) -> str:
        """Start a copy of the files, as a crash would have left them, beside the server that goes on."""
        role, elsewhere = draw.choice(("delay", "realtime")), self._beside / "copy"
        server = cluster.servers[role]
        server.signal(signal.SIGSTOP)
        await asyncio.to_thread(shutil.copytree, self._data / role, elsewhere / role)
        server.signal(signal.SIGCONT)
        copy = server.elsewhere(elsewhere)
        cluster.happened["copy"] += 1
        told = f"a copy of {role} beside it"
        try:
            await asyncio.to_thread(copy.start)
            await _logged(copy, ("fenced by=",))
            if role == "delay":
                await _need_refused(copy.address)
            await asyncio.sleep(draw.uniform(*BESIDE_S))
            if draw.random() < 0.4:
                server.kill()
                await asyncio.sleep(LEASE_S)
                await cluster.start((role,))
                told += ", which is away for longer than its lease"
            if role == "delay":
                await _need_refused(copy.address)
            if not copy.running or "serves=yes" in copy.log or "Traceback" in copy.log:
                raise Failed(f"the copy of {role} did not stand aside: {copy.log[-4_000:]}")
        except AssertionError as error:
            raise Failed(f"the copy of {role} did not start: {error}") from error
        finally:
            copy.end()
        shutil.rmtree(elsewhere)
        return told

    async def _back_up(self, cluster: Cluster) -> str:
        """As an operator makes one: stop the server, copy its folder, start it."""
        backup = self._beside / "backup"
        shutil.rmtree(backup, ignore_errors=True)
        code = await asyncio.to_thread(cluster.servers["delay"].terminate)
        if code != 0:
            raise Failed(f"delay ended with {code} after SIGTERM")
        await asyncio.to_thread(shutil.copytree, self._data / "delay", backup / "delay")
        self._backup_from = len(self._ledger.sent)
        cluster.happened["backup"] += 1
        return f"SIGTERM delay, a backup of it, back in {await cluster.start(('delay',)):.1f} s"

    async def _restore(self, cluster: Cluster, draw: random.Random) -> str:
        """The backup in the place of the delay server; then the true directory is put back."""
        delay, place = cluster.servers["delay"], self._data / "delay"
        true = self._beside / "true"
        delay.kill()
        place.rename(true)
        await asyncio.to_thread(shutil.copytree, self._beside / "backup" / "delay", place)
        said = len(delay.log)
        await cluster.start(("delay",))
        await _logged(delay, ("fenced by=target", "code=stale_epoch"), said)
        await _need_refused(delay.address)
        await asyncio.sleep(draw.uniform(*BESIDE_S))
        await _need_refused(delay.address)
        delay.kill()
        shutil.rmtree(place)
        true.rename(place)
        self._backup_from = None
        cluster.happened["restore"] += 1
        took_s = await cluster.start(("delay",))
        await asyncio.sleep(LEASE_S)
        return f"delay restored from a copy and noticed, its true directory back in {took_s:.1f} s"

    def _delivered_since(self, number: int) -> bool:
        """Whether the realtime server holds what a backup of then does not know."""
        return any(max(copies, default=0) >= number for copies in self._ledger.copies.values())


async def _logged(server: ServerProcess, words: tuple[str, ...], after: int = 0) -> None:
    """Wait until one of these was said."""
    deadline = time.monotonic() + NOTICED_S
    while not any(word in server.log[after:] for word in words):
        if time.monotonic() > deadline:
            raise Failed(f"{server.role} has said none of {words} within {NOTICED_S:g} s: {server.log[-4_000:]}")
        await asyncio.sleep(ASK_AGAIN_S)


async def _need_refused(address: str) -> None:
    try:
        await send_directly(address)
    except DelaydError:
        return
    raise Failed(f"{address} gave a receipt, and may not serve")


async def send_directly(address: str, body: str = "x") -> None:
    """Give a delay server a message without asking meta for it."""
    connection = await connect(parse_address(address))
    try:
        data = encode_wanted([(time.time_ns() // 1_000_000, b"s", body.encode())], ProducerPart(77, 1, 1))
        answer = await connection.request(RequestType.SEND, {}, [data], 10_000)
        (result,) = need_maps(answer.head, "results")
        if "error" in result:
            raise DelaydError(str(result["message"]))
    finally:
        connection.close()
        await connection.closed
