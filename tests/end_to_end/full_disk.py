"""A full disk under running servers, told as a story: ``python -m tests.end_to_end.full_disk DISK DATA ROLE...``.

DISK is a small file system of its own; the roles named keep their directories on it. It is filled to its last byte
twice: the servers live through it once, and are killed and started on it the second time. Exits 1, with the reason, on
anything lost, early, dead, refused without a name, or not recovered by itself.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

from delayd import Consumer, Producer
from delayd.config import Value
from delayd.errors import DelaydError, DiskReserve, RetryLater
from delayd.machine.operating import WaitKind
from delayd.reading.books import audit_directory
from tests.end_to_end.trials import Operator, tries
from tests.waiting import wait_until

from .processes import ServerProcess

MIB = 1 << 20
BODY_BYTES = 1_000
FULL_S = 2.0  # Several checkpoints, retries and housekeeping rounds.
DEADLINE_S = 30.0
RECOVERED_S = 25.0  # Retries wait a second or two, a connection that was given up a little more; a busy machine, too.
BAD_WORDS = ("CRITICAL", "Traceback", "AssertionError")
FAR = timedelta(hours=3)
OUTCOMES = 300  # Messages whose outcomes fill several pages of a dispatch log.
TOLD: dict[
    str, dict[str, tuple[str, ...]]
] = {  # The log lines that an operator reads: by the role whose disk was full, then by the server that logs them.
    "delay": {
        "delay": ("sends_taken which=near", "sends_taken which=none", "sends_taken which=all", "checkpoint_put_off"),
    },
    "realtime": {"realtime": ("dispatch_taken which=none", "dispatch_taken which=all"), "delay": ("target_later",)},
    "meta": {},
}


class Ballast:
    """Files that fill a disk."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._file = disk / "ballast"
        self._filling = False

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self._disk)
        return found.f_bavail * found.f_frsize

    def leave(self, free_bytes: int) -> None:
        """Fill it but for so much."""
        self._grow(self.free_bytes - free_bytes)

    @contextmanager
    def full(self) -> Iterator[None]:
        """No byte is left, whatever is removed or cut back meanwhile."""
        self._filling = True
        thread = threading.Thread(target=self._fill)
        thread.start()
        try:
            yield
        finally:
            self._filling = False
            thread.join()
            self._file.unlink()

    def remove(self) -> None:
        self._file.unlink()

    def _fill(self) -> None:
        while self._filling:
            self._grow(self.free_bytes)
            time.sleep(0.005)

    def _grow(self, size: int) -> None:
        with self._file.open("ab", buffering=0) as file:
            try:
                while size > 0:
                    size -= file.write(bytes(min(size, 64 << 10)))
            except OSError:
                # Full, which is what is wanted.
                return


class Story:
    """The servers, a producer that is patient and one that is not, and a consumer on a thread of its own."""

    def __init__(self, disk: Path, data: Path, roles: list[str], stack: ExitStack) -> None:
        self.data, self.roles, self.ballast = data, roles, Ballast(disk)
        data.mkdir(parents=True, exist_ok=True)
        for role in roles:
            (disk / role).mkdir()
            (data / role).symlink_to(disk / role)
        self.servers = {"meta": ServerProcess("meta", data, {"heartbeat_ms": 200, "lease_ms": 2_000})}
        stack.enter_context(self.servers["meta"])
        common: dict[str, Value] = {
            "meta": self.servers["meta"].address,
            "checkpoint_every_ms": 300,
            "segment_bytes": MIB // 4,
        }
        settings: dict[str, dict[str, Value]] = {
            "realtime": {**common, "free_bytes_all": 2 * MIB},
            # Refused for a second it would be dead, if a full disk were a reason.
            "delay": {
                **common,
                "free_bytes_far": 12 * MIB,
                "free_bytes_all": 6 * MIB,
                "dispatch_give_up_after_ms": 1_000,
                "target_silence_ms_max": 2_000,
            },
        }
        for role, chosen in settings.items():
            self.servers[role] = stack.enter_context(ServerProcess(role, data, chosen))
        self.kept: set[bytes] = set()
        self.came: dict[bytes, int] = {}
        self._sent = 0
        meta = self.servers["meta"].address
        self._producer = stack.enter_context(Producer(meta, timeout_ms=int(DEADLINE_S * 1_000)))
        self._hasty = stack.enter_context(Producer(meta, timeout_ms=400))
        self._ended = False
        thread = threading.Thread(target=self._consume)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self.end)

    def end(self) -> None:
        self._ended = True

    def send(self, count: int, delay: timedelta, subject: str = "orders") -> None:
        """Send messages one by one; each is kept, once there is space."""
        for _ in range(count):
            body = self._next_body()
            self._producer.send(subject, body, delay=delay)
            if subject == "orders":
                self.kept.add(body)

    def refuses(self, count: int, delay: timedelta) -> None:
        """So many messages are refused by name, with who must act, and when to come again."""
        for _ in range(count):
            wait_until(lambda: self._is_refused(self._next_body(), delay), "it is refused by name")

    def _is_refused(self, body: bytes, delay: timedelta) -> bool:
        try:
            self._hasty.send("refused", body, delay=delay)
        except DiskReserve as error:
            assert error.retry_after_ms > 0, repr(error)
            assert "free space there" in error.message or "free some" in error.message, error.message
            return True
        except RetryLater:
            return False  # The server is slow, or stands still.
        raise AssertionError("a message was taken on a full disk")

    def _next_body(self) -> bytes:
        self._sent += 1
        return b"%d " % self._sent + bytes(BODY_BYTES)

    def missing(self) -> int:
        """How many messages were promised and have not come."""
        return len(self.kept - self.came.keys())

    def until_all_came(self, seconds: float) -> None:
        wait_until(
            lambda: not self.missing(), lambda: f"{self.missing()} of {len(self.kept)} messages still come", seconds
        )

    def until_taken(self, which: str) -> None:
        """The delay server has read how much space there is, and takes these sends now."""
        server = self.servers["delay"]

        def said() -> bool:
            told = [line for line in server.log.splitlines() if "sends_taken" in line]
            return bool(told) and f"which={which} " in told[-1]

        wait_until(said, lambda: f"it says that it takes {which} sends: {server.log[-3_000:]}", DEADLINE_S)

    def check_alive(self) -> None:
        for role, server in self.servers.items():
            assert server.running, f"the {role} server ended: {server.log[-3_000:]}"

    def check_books(self) -> None:
        for full in self.roles:
            for role, lines in TOLD[full].items():
                for line in lines:
                    assert line in self.servers[role].log, (
                        f"{role} never said {line}: {self.servers[role].log[-3_000:]}"
                    )
        for role in ("delay", "realtime", "meta"):
            assert self.servers[role].terminate() == 0, f"{role}: {self.servers[role].log[-3_000:]}"
            for word in BAD_WORDS:
                assert word not in self.servers[role].log, f"{role}: {self.servers[role].log[-3_000:]}"
        command = [sys.executable, "-m", "delayd", "audit", "--data", str(self.data)]
        told = subprocess.run(command, capture_output=True, text=True)
        assert told.returncode == 0, told.stdout + told.stderr
        total = audit_directory(str(self.data), now_ms=time.time_ns() // 1_000_000).total
        assert total.dead == total.early == total.lost == total.duplicate == 0, str(total)

    def _consume(self) -> None:
        with Consumer(self.servers["meta"].address, "orders", "billing", lease=timedelta(seconds=2)) as consumer:
            while not self._ended:
                try:
                    batch = consumer.pull(wait=timedelta(milliseconds=300))
                    batch.ack()
                except DelaydError:
                    # The pull log has no space, the server was killed, or the lease ended meanwhile: it comes again.
                    time.sleep(0.1)
                    continue
                for body in batch.bodies:
                    self.came[body] = self.came.get(body, 0) + 1


def tell(disk: Path, data: Path, roles: list[str]) -> None:
    """The story; AssertionError when a promise is broken."""
    with ExitStack() as stack:
        story = Story(disk, data, roles, stack)
        ballast, delay_fills = story.ballast, "delay" in roles
        story.send(20, timedelta(0))
        story.until_all_came(DEADLINE_S)
        if delay_fills:
            _reserves(story)
        # Full: what was accepted waits or comes, what is new is refused or kept, and no server ends.
        story.send(50, timedelta(seconds=0.5))
        story.send(50, timedelta(seconds=2))
        (_full_at_delay if roles == ["delay"] else _full)(story)
        story.until_all_came(RECOVERED_S)
        story.send(1, timedelta(0))
        story.until_all_came(DEADLINE_S)
        # Killed and started again while it is full.
        story.send(50, timedelta(seconds=1))
        with ballast.full():
            time.sleep(0.5)
            for role in roles:
                story.servers[role].kill()
            for role in roles:
                story.servers[role].start()
            time.sleep(1.0)
            story.check_alive()
        story.until_all_came(RECOVERED_S)
        story.send(1, timedelta(0))
        story.until_all_came(DEADLINE_S)
        story.end()
        story.check_books()


def _full(story: Story, until_told: Callable[[], object] = lambda: None) -> None:
    """The disk is full for a while; ``until_told`` is called before there is space again."""
    delay_fills = "delay" in story.roles
    with story.ballast.full():
        if delay_fills:
            story.until_taken("none")
        (story.refuses if delay_fills else story.send)(3, timedelta(seconds=0.1))
        time.sleep(FULL_S)
        until_told()
        story.check_alive()


@tries(WaitKind.OUTCOMES_WAIT)
def _full_at_delay(story: Story) -> None:
    """Outcomes can't be written, so nothing more leaves: `delayd status` says so until there is space."""
    operator = Operator(story.servers["meta"].address, story.data)
    # No ballast fills the last page of a dispatch log, so a few outcomes may still fit there.
    story.send(OUTCOMES, timedelta(seconds=3))
    _full(story, lambda: operator.until_told(WaitKind.OUTCOMES_WAIT))
    operator.until_gone(WaitKind.OUTCOMES_WAIT)


def _reserves(story: Story) -> None:
    """At the reserves: first far messages are refused, then all; what is pending is delivered."""
    ballast = story.ballast
    story.send(20, timedelta(seconds=3))
    story.send(1, FAR, "later")
    ballast.leave(9 * MIB)
    story.until_taken("near")
    # Far messages are refused first, then all.
    story.refuses(1, FAR)
    story.send(5, timedelta(seconds=1))
    ballast.leave(4 * MIB)
    story.until_taken("none")
    story.refuses(2, timedelta(seconds=1))
    story.until_all_came(DEADLINE_S)
    ballast.remove()
    story.until_taken("all")
    story.send(1, FAR, "later")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.end_to_end.full_disk",
        description="Fill the disk of real servers to its last byte, and see what waits and what goes on.",
        epilog="Example: python -m tests.end_to_end.full_disk /mnt/small /var/tmp/data delay",
    )
    parser.add_argument("disk", type=Path, help="a mounted file system of some 32 MiB, which is filled")
    parser.add_argument("data", type=Path, help="an empty folder of another file system")
    parser.add_argument("roles", nargs="+", choices=("meta", "delay", "realtime"), help="servers on the small disk")
    arguments = parser.parse_args()
    tell(arguments.disk, arguments.data, arguments.roles)
