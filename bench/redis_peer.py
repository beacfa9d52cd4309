"""The yardstick: messages that are due later, held by a Redis server of this machine, with the fastest path found.

A sorted set holds the messages: score = due ms, member = an id of 8 bytes and then the body, so that one command
schedules and nothing is looked up later (with ids in the set and bodies in a hash a message took half as long again).
A script moves what is due to a list, a bounded piece a call, and the consumer pops that piece with LPOP: both commands
travel together, and the next pair is under way while the last one is read. What was popped is gone: nothing is
acknowledged.

Commands are written as one buffer of RESP by the few lines below, and answers are read by hiredis: for singles twice as
fast as redis-py, whose own pipelines are measured beside it. The server writes its append-only file with `appendfsync
everysec`, so the last second of what it accepted is lost when the machine fails; it writes no snapshots and rewrites no
files, which would only slow it down.
"""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

PROGRAM = "redis-server"
HOST = "127.0.0.1"
READY_S = 60  # Redis may need this long to load an append-only file of millions of messages.
STOP_S = 30
ID_BYTES = 8
RECEIVE_BYTES = 1 << 20
PENDING, READY = b"pending", b"ready"

# Scores sort the set, so what is due are its first ranks: removing these is cheaper than removing members by name.
MOVE = b"""
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
if #due > 0 then
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, #due - 1)
  redis.call('RPUSH', KEYS[2], unpack(due))
end
return #due
"""
MOVE_ROWS_MAX = 7_000  # One unpack of Lua gives no more values, because its stack is full then.


class RedisMissing(Exception):
    """There is no Redis to compare with on this machine; the text says how to get it."""


class RedisServer:
    """A private server on a free port, which keeps its files in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self.port = _free_port()

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._child is not None
        return self._child.pid

    @property
    def append_only_folder(self) -> Path:
        """Where its log is."""
        return self._folder / "appendonlydir"

    def start(self) -> None:
        """Start it, again if it was killed, and wait until it has loaded its log and answers."""
        settings = {
            "bind": HOST,
            "port": str(self.port),
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "auto-aof-rewrite-percentage": "0",
            "save": "",
            "loglevel": "warning",
        }
        command = [PROGRAM, *(word for name, value in settings.items() for word in (f"--{name}", value))]
        with (self._folder / "redis.out").open("ab") as output:
            self._child = subprocess.Popen(command, stdout=output, stderr=output)
        end = time.monotonic() + READY_S
        while not self._answers():
            if self._child.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"redis-server did not start: {(self._folder / 'redis.out').read_text()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as a crash would."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def stop(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def _answers(self) -> bool:
        # A server that still loads its log accepts connections and answers with an error.
        try:
            with Line(self.port) as line:
                line.send(command(b"PING"), 1)
                return line.receive() == b"PONG"
        except (OSError, RedisError):
            return False


class RedisError(Exception):
    """An answer that is an error."""


class Line:
    """One blocking connection: buffers of commands out, answers in, in the same order."""

    def __init__(self, port: int) -> None:
        import hiredis

        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader(replyError=RedisError, notEnoughData=_NOTHING)
        self.unanswered = 0

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def send(self, commands: bytes, count: int) -> None:
        """Write so many commands at once."""
        self._socket.sendall(commands)
        self.unanswered += count

    def receive(self) -> object:
        """The next answer."""
        while (answer := self._reader.gets()) is _NOTHING:
            data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionError("redis-server closed the connection")
            self._reader.feed(data)
        self.unanswered -= 1
        if isinstance(answer, RedisError):
            raise answer
        return answer

    def settle(self, left: int = 0) -> None:
        """Read answers until no more than ``left`` are missing."""
        while self.unanswered > left:
            self.receive()


class Taker:
    """Takes what is due in pieces; ``depth`` requests are under way."""

    def __init__(self, line: Line, rows: int, depth: int = 2) -> None:
        assert rows <= MOVE_ROWS_MAX
        self._line = line
        line.send(command(b"SCRIPT", b"LOAD", MOVE), 1)
        digest = line.receive()
        assert isinstance(digest, bytes)
        self._digest = digest
        self._rows = b"%d" % rows
        self._depth = depth

    def take(self) -> list[bytes]:
        """The next piece; empty when nothing was due when the server looked."""
        while self._line.unanswered < 2 * self._depth:
            now = b"%d" % (time.time_ns() // 1_000_000)
            move = command(b"EVALSHA", self._digest, b"2", PENDING, READY, now, self._rows)
            self._line.send(move + command(b"LPOP", READY, self._rows), 2)
        self._line.receive()
        popped = self._line.receive()
        return popped if isinstance(popped, list) else []


def command(*words: bytes) -> bytes:
    """One command as RESP."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def zadd(first_id: int, due_ms: Sequence[int], bodies: Sequence[bytes]) -> bytes:
    """One command that schedules all of them."""
    size = ID_BYTES + len(bodies[0])
    numbers = range(first_id, first_id + len(due_ms))
    pairs = [
        b"$13\r\n%d\r\n$%d\r\n%b%b\r\n" % (due, size, number.to_bytes(ID_BYTES, "big"), body)
        for due, number, body in zip(due_ms, numbers, bodies, strict=True)
    ]
    return b"*%d\r\n$4\r\nZADD\r\n$7\r\npending\r\n" % (2 + 2 * len(pairs)) + b"".join(pairs)


def zadds(first_id: int, due_ms: Sequence[int], bodies: Sequence[bytes]) -> bytes:
    """A command for each of them, as one buffer."""
    size = ID_BYTES + len(bodies[0])
    numbers = range(first_id, first_id + len(due_ms))
    return b"".join(
        [
            b"*4\r\n$4\r\nZADD\r\n$7\r\npending\r\n$13\r\n%d\r\n$%d\r\n%b%b\r\n"
            % (due, size, number.to_bytes(ID_BYTES, "big"), body)
            for due, number, body in zip(due_ms, numbers, bodies, strict=True)
        ]
    )


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A running server, which ends with the block; RedisMissing says what to install."""
    if shutil.which(PROGRAM) is None:
        raise RedisMissing(
            "redis-server is not installed, so there is nothing to compare with: apt-get install redis-server"
        )
    if find_spec("hiredis") is None or find_spec("redis") is None:
        raise RedisMissing("the Python packages redis and hiredis are not installed: pip install 'redis[hiredis]'")
    with TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop()


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listening:
        port = listening.getsockname()[1]
        assert isinstance(port, int)
        return port


_NOTHING = object()
