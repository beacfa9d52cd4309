"""The yardstick does what it is said to do: nothing before it is due, everything once, nothing lost by a restart."""

import shutil
import time
from collections.abc import Callable, Iterator

import pytest

from bench.messages import BODIES, now_ms
from bench.redis_peer import (
    ID_BYTES,
    Line,
    RedisError,
    RedisMissing,
    RedisServer,
    Taker,
    command,
    redis_server,
    zadd,
    zadds,
)

HOUR_MS = 3_600_000

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def take_all(line: Line, rows: int = 7) -> list[bytes]:
    """What is due now, until a look finds nothing."""
    taker = Taker(line, rows)
    taken: list[bytes] = []
    while members := taker.take():
        assert len(members) <= rows
        taken += members
    line.settle()
    return taken


def test_a_command_is_an_array_of_words_with_their_lengths() -> None:
    assert command(b"LPOP", b"ready", b"12") == b"*3\r\n$4\r\nLPOP\r\n$5\r\nready\r\n$2\r\n12\r\n"


def test_one_command_or_one_for_each_schedule_the_same() -> None:
    due = [1_800_000_000_000, 1_800_000_000_001]
    one = b"$4\r\nZADD\r\n$7\r\npending\r\n"
    pairs = [command(b"%d" % at, bytes(7) + bytes([5 + row]) + b"x")[4:] for row, at in enumerate(due)]
    assert zadd(5, due, [b"x", b"x"]) == b"*6\r\n" + one + pairs[0] + pairs[1]
    assert zadds(5, due, [b"x", b"x"]) == b"*4\r\n" + one + pairs[0] + b"*4\r\n" + one + pairs[1]


@needs_redis
@pytest.mark.parametrize(("schedule", "commands"), [(zadd, 1), (zadds, 100)])
def test_what_is_due_is_taken_once_in_its_order_and_the_rest_stays(
    server: RedisServer, schedule: Callable[[int, list[int], list[bytes]], bytes], commands: int
) -> None:
    now = now_ms()
    due = [now - 1 - number if number % 2 else now + HOUR_MS for number in range(100)]
    with Line(server.port) as line:
        line.send(schedule(0, due, BODIES[:100]), commands)
        line.settle()
        taken = take_all(line)
        assert taken == [
            number.to_bytes(ID_BYTES, "big") + BODIES[number] for number in sorted(range(1, 100, 2), reverse=True)
        ]
        assert take_all(line) == []
        line.send(command(b"ZCARD", b"pending"), 1)
        assert line.receive() == 50


@needs_redis
def test_what_was_written_is_there_after_a_kill(server: RedisServer) -> None:
    with Line(server.port) as line:
        line.send(zadd(0, [now_ms()] * 50, BODIES[:50]), 1)
        line.settle()
        end = time.monotonic() + 10
        while not _written(line):
            assert time.monotonic() < end
    server.kill()
    server.start()
    with Line(server.port) as line:
        assert len(take_all(line)) == 50


def _written(line: Line) -> bool:
    """Whether nothing waits to be written to the append-only file; then the end of the process loses nothing."""
    line.send(command(b"INFO", b"persistence"), 1)
    told = line.receive()
    assert isinstance(told, bytes)
    return b"aof_buffer_length:0\r\n" in told


@needs_redis
def test_an_answer_that_is_an_error_is_raised(server: RedisServer) -> None:
    with Line(server.port) as line:
        line.send(command(b"NONSENSE"), 1)
        with pytest.raises(RedisError, match="unknown command"):
            line.receive()


def test_without_redis_one_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RedisMissing, match="apt-get install redis-server"), redis_server():
        pass
