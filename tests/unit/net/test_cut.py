"""A cut fixes what a server's files hold; it belongs to the connection that asked for it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from delayd.errors import DamagedData, DelaydError, NotReady
from delayd.machine.state import LmdbState
from delayd.net.cut import FOLDER, SIZES, Cuts, pack_sizes, read_sizes
from delayd.testing.executor import StepExecutor
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.requests import RequestType


class Peer:
    """Keeps what it is answered."""

    def __init__(self) -> None:
        self.answers: list[Head] = []
        self.errors: list[DelaydError] = []

    def answer(self, request_id: int, head: Mapping[str, HeadValue]) -> None:
        self.answers.append(dict(head))

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        self.errors.append(error)


class World:
    """One server's cuts, with a worker that runs when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = LmdbState(str(folder / "state.lmdb"))
        self.state.commit([(b"a", b"1")])
        self.worker = StepExecutor()
        self.held: list[int] = []
        self.lasts = True
        self.cuts = Cuts(str(folder), 7, self.state, self.worker, self.held.append, lambda: self.lasts)

    def ask(self, peer: Peer, kind: RequestType, **head: HeadValue) -> None:
        self.cuts.handlers[kind](peer, Frame(kind, 0, 1, dict(head), memoryview(b"")))

    def work(self) -> None:
        self.worker.run_all()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.work()
    made.state.close()


def test_a_second_backup_waits_and_an_ended_cut_is_told(world: World) -> None:
    first, second = Peer(), Peer()
    world.ask(first, RequestType.CUT, hold_ms=0)
    with pytest.raises(NotReady):
        world.ask(second, RequestType.CUT, hold_ms=0)
    world.work()
    with pytest.raises(NotReady):
        world.ask(second, RequestType.CUT, hold_ms=0)
    with pytest.raises(NotReady):
        world.ask(second, RequestType.CUT_READY, cut=1)
    world.cuts.disconnected(second)
    world.ask(first, RequestType.CUT, hold_ms=0)  # The same backup cuts again.
    world.work()
    with pytest.raises(NotReady):
        world.ask(first, RequestType.CUT_READY, cut=1)
    world.cuts.disconnected(first)
    world.work()
    world.ask(second, RequestType.CUT, hold_ms=0)
    assert not first.errors and len(second.answers) == 1


def test_another_connection_asks_about_a_cut_of_all_servers_and_ends_nothing(world: World) -> None:
    first, second = Peer(), Peer()
    world.ask(first, RequestType.CUT, hold_ms=0)
    world.work()
    with pytest.raises(NotReady):
        world.ask(second, RequestType.CUT_READY, cut=0)
    world.ask(first, RequestType.CUT, hold_ms=500, moment_ms=1_000)
    world.ask(second, RequestType.CUT_READY, cut=0)
    assert not second.answers, "its files are not written yet"
    world.work()
    (told,) = second.answers
    assert (told["cut"], told["moment_ms"]) == (2, 1_000)
    world.cuts.disconnected(second)
    world.ask(first, RequestType.CUT_READY, cut=2)
    assert first.answers[-1]["held"] is True
    world.cuts.disconnected(first)
    with pytest.raises(NotReady):
        world.ask(second, RequestType.CUT_READY, cut=0)


def test_a_connection_that_ends_while_the_files_are_written_leaves_none(world: World) -> None:
    peer = Peer()
    world.ask(peer, RequestType.CUT, hold_ms=0)
    world.cuts.disconnected(peer)
    world.work()
    world.work()
    assert not (world.folder / FOLDER).exists()


def test_files_that_can_not_be_written_are_an_error_of_the_request(world: World) -> None:
    (world.folder / FOLDER).write_bytes(b"a file is in the way")
    peer = Peer()
    world.ask(peer, RequestType.CUT, hold_ms=0)
    world.ask(peer, RequestType.CUT_READY, cut=1)
    world.work()
    (error,) = peer.errors
    assert str(world.folder / FOLDER) in error.message


def test_sizes_that_do_not_check_are_refused() -> None:
    data = pack_sizes({"message/0.log": 6})
    for place in range(len(data)):
        with pytest.raises(DamagedData):
            read_sizes(SIZES, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
