"""A directory that is open within a program: the same files and promises as with servers, and one program at a time."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from delayd.errors import AlreadyClosed, BadArgument, BadSetting, DirectoryInUse
from tests.end_to_end.cluster import cluster
from tests.waiting import DEADLINE_S

SOON = timedelta(milliseconds=50)
LATER = timedelta(hours=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def _bodies(home: delayd.Embedded, subject: str, count: int) -> list[bytes]:
    with home.consumer(subject, group="g") as consumer:
        found: list[bytes] = []
        while len(found) < count:
            batch = consumer.pull(max_messages=count - len(found), wait=timedelta(seconds=DEADLINE_S))
            assert len(batch), f"{count} messages of {subject} come within {DEADLINE_S} s, and {len(found)} came"
            found += batch.bodies
            batch.ack()
    return found


def test_messages_are_sent_and_come_at_their_time_without_a_server_or_a_port(data: Path) -> None:
    with delayd.open(data) as home:
        with home.producer() as producer:
            receipt = producer.send("orders", b"1", delay=SOON)
            columns = producer.send_batch("orders", [b"2", b"3"], delay=SOON)
            assert len(columns) == 2
            assert producer.get("orders", receipt=receipt).state in delayd.MessageState
        assert sorted(_bodies(home, "orders", 3)) == [b"1", b"2", b"3"]
        listening = Path("/proc/self/net/tcp").read_text()
        inodes = {line.split()[9] for line in listening.splitlines()[1:] if line.split()[3] == "0A"}
        own = {_opened(fd) for fd in os.listdir("/proc/self/fd")}
        assert not {f"socket:[{inode}]" for inode in inodes} & own


def _opened(fd: str) -> str:
    """What a descriptor is of; a thread of the home may have closed it since it was listed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_clients_of_several_threads_and_of_a_loop_share_it(data: Path) -> None:
    with delayd.open(data) as home:

        def send(number: int) -> None:
            with home.producer() as producer:
                for row in range(20):
                    producer.send("many", b"%d-%d" % (number, row), delay=timedelta(0))

        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()

        async def consume() -> list[bytes]:
            found: list[bytes] = []
            async with home.async_consumer("many", group="g") as consumer:
                async for message in consumer:
                    found.append(message.body)
                    await message.ack()
                    if len(found) == 80:
                        return found
            return found

        async def bounded() -> list[bytes]:
            async with asyncio.timeout(DEADLINE_S):
                return await consume()

        found = asyncio.run(bounded())
        for thread in threads:
            thread.join()
    assert sorted(found) == sorted(b"%d-%d" % (number, row) for number in range(4) for row in range(20))


def test_what_was_kept_is_there_when_it_is_opened_again(data: Path) -> None:
    with delayd.open(data) as home, home.producer() as producer:
        receipt = producer.send("orders", b"1", delay=LATER)
    with delayd.open(data) as home, home.producer() as producer:
        moved = producer.reschedule("orders", receipt=receipt, delay=SOON)
        assert moved is not None
        assert _bodies(home, "orders", 1) == [b"1"]


def test_servers_go_on_with_the_directory_and_give_it_back(data: Path) -> None:
    with delayd.open(data) as home, home.producer() as producer:
        producer.send("orders", b"1", delay=SOON)
        receipt = producer.send("orders", b"2", delay=LATER)
    with cluster(data) as servers, delayd.Producer(servers.meta.address) as producer:
        assert producer.reschedule("orders", receipt=receipt, delay=SOON) is not None
        with delayd.Consumer(servers.meta.address, "orders", group="g") as consumer:
            batch = consumer.pull(max_messages=1, wait=timedelta(seconds=DEADLINE_S))
            assert len(batch) == 1
            batch.ack()
    with delayd.open(data) as home:
        assert len(_bodies(home, "orders", 1)) == 1


def test_a_second_process_is_told_who_has_it(data: Path) -> None:
    script = f"import delayd; delayd.open({os.fspath(data)!r})"
    with delayd.open(data):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S * 2)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert "DirectoryInUse" in last and str(os.getpid()) in last
        # Nothing of the failed try is left behind, and the first one goes on.
        with pytest.raises(DirectoryInUse, match=str(os.getpid())):
            delayd.open(data)
    delayd.open(data).close()


def test_a_program_that_is_killed_loses_nothing_that_it_was_told_is_kept(data: Path) -> None:
    script = (
        "import delayd, sys\n"
        "from datetime import timedelta\n"
        f"producer = delayd.open({os.fspath(data)!r}).producer()\n"
        "for number in range(1000000):\n"
        "    producer.send('orders', b'%d' % number, delay=timedelta(seconds=0))\n"
        "    print(number, flush=True)\n"
    )
    with _program(script) as program:
        assert program.stdout is not None
        told = 0
        for line in program.stdout:
            told = int(line)
            if told >= 100:
                program.kill()
                break
        told = max([told, *map(int, program.stdout.read().split())])
    with delayd.open(data) as home:
        found = _bodies(home, "orders", told + 1)
        assert sorted(map(int, found))[: told + 1] == list(range(told + 1))


@contextmanager
def _program(script: str) -> Iterator["subprocess.Popen[str]"]:
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        yield program
    finally:
        program.kill()
        program.wait(DEADLINE_S)
        assert program.stdout is not None
        program.stdout.close()


def test_a_forked_child_is_told_that_it_has_no_servers(data: Path) -> None:
    with delayd.open(data) as home:
        child = os.fork()
        if child == 0:
            told = 1
            try:
                with pytest.raises(AlreadyClosed):
                    home.producer()
                home.close()
                told = 0
            finally:
                os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with home.producer() as producer:
            producer.send("orders", b"1", delay=LATER)


def test_after_the_close_it_says_so(data: Path) -> None:
    home = delayd.open(data)
    home.close()
    home.close()
    with pytest.raises(AlreadyClosed, match="was closed"):
        home.consumer("orders", group="g")
    assert "closed" in repr(home)


def test_settings_are_those_of_the_servers(data: Path) -> None:
    with delayd.open(data, retention_ms=3_600_000, lease_ms=2_000):
        pass
    with pytest.raises(BadSetting, match="colour"):
        delayd.open(data, colour="red")
    with pytest.raises(BadSetting, match="port"):
        delayd.open(data, port=7400)
    with pytest.raises(BadArgument):
        delayd.open("")
