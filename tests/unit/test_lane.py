"""The lane of a thread, compiled and as its twin: the same bytes, outcomes and order, whatever the system says.

``make asan`` runs these tests with the sanitizers.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delayd.machine.lane import BUFFERS_MAX, Lane
from tests.compiled import Faults, build_kernel, load_kernel
from tests.waiting import DEADLINE_S

WHOLE = 1 << 20
CALLS = 3_000  # Enough for thread and loop to meet between any two steps.
numbers = st.lists(st.sampled_from([0, 1, 2, 7, 40, WHOLE, -errno.ENOSPC, -errno.EIO]), max_size=5)
buffers_of = st.lists(st.binary(max_size=30) | st.binary(max_size=30).map(bytearray), max_size=8)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernel(tmp_path_factory.mktemp("kernel"), faults=True)


@pytest.fixture(scope="module")
def lanes(kernel: Path) -> dict[str, Callable[[], Lane]]:
    return {"python": Lane, "compiled": load_kernel(kernel).lane}


@pytest.fixture
def faults(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    made = Faults(kernel, monkeypatch)
    yield made
    made.script()  # The compiled lane of the next test has no faults that were left over.


@pytest.fixture(params=["python", "compiled"])
def lane(lanes: dict[str, Callable[[], Lane]], request: pytest.FixtureRequest) -> Iterator[Lane]:
    made = lanes[request.param]()
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def content(file: int) -> bytes:
    return os.pread(file, WHOLE, 0)


def do_all(lane: Lane) -> list[Any]:
    """Do what was added, on this thread."""
    lane.signal()
    assert lane.wait()
    return lane.ended()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(buffers_of, st.integers(0, 50), st.booleans()), max_size=4), numbers, numbers)
def test_bytes_and_outcomes_are_those_of_the_twin(
    lanes: dict[str, Callable[[], Lane]],
    faults: Faults,
    tmp_path: Path,
    calls: list[tuple[list[Any], int, bool]],
    writes: list[int],
    syncs: list[int],
) -> None:
    found = []
    for name, make in lanes.items():
        faults.script(writes, syncs)
        failed: list[int] = []
        lane, file = make(), os.open(tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for buffers, position, sync in calls:
            lane.add(file, buffers, position, failed.append if sync else None)
        found.append((do_all(lane), failed, content(file)))
        lane.close()
        os.close(file)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("writes", "syncs", "outcome", "kept"),
    [
        ([], [], 0, b"abcdef"),
        ([1, 2, WHOLE], [], 0, b"abcdef"),
        ([-errno.ENOSPC], [], errno.ENOSPC, b""),
        ([4, -errno.EDQUOT], [], errno.EDQUOT, b"abcd"),
        ([4, 0], [], errno.EIO, b"abcd"),
        ([], [-errno.EIO], -errno.EIO, b"abcdef"),
    ],
)
def test_rule_L1_an_outcome_says_which_call_failed_and_why(
    lane: Lane, faults: Faults, file: int, writes: list[int], syncs: list[int], outcome: int, kept: bytes
) -> None:
    faults.script(writes, syncs)
    failed: list[int] = []
    lane.add(file, [b"abc", b"", b"def"], 0, failed.append)
    assert (do_all(lane), content(file)) == ([outcome], kept)
    assert failed == ([-outcome] if outcome < 0 else [])


def test_rule_L1_the_thread_notes_a_failed_sync_before_the_loop_hears_of_it(
    lane: Lane, faults: Faults, file: int
) -> None:
    heard_before: list[bool] = []

    def failed(number: int) -> None:
        heard_before.append(bool(select.select([lane], [], [], 0)[0]))

    faults.script(syncs=[-errno.EIO])
    lane.add(file, [b"x"], 0, failed)
    assert do_all(lane) == [-errno.EIO] and heard_before == [False]


@pytest.mark.parametrize("syncs", [[], [-errno.EIO]])
def test_rule_L1_nothing_is_begun_behind_a_failure_until_all_that_was_added_is_told(
    lane: Lane, faults: Faults, file: int, syncs: list[int]
) -> None:
    failure = -errno.EIO if syncs else errno.ENOSPC
    faults.script([] if syncs else [-errno.ENOSPC], syncs)
    lane.add(file, [b"first"], 0, int)
    assert _wait(lane) and lane.ended() == [failure]
    lane.add(file, [b"again"], 0, int)
    assert do_all(lane) == [0] and content(file) == b"again"
    faults.script([] if syncs else [-errno.ENOSPC], syncs)
    for part in (b"third", b"fourth", b"fifth"):
        lane.add(file, [part], 0, int)
    assert do_all(lane) == [failure, errno.ECANCELED, errno.ECANCELED]
    assert content(file) == (b"third" if syncs else b"again")


def _wait(lane: Lane) -> bool:
    lane.signal()
    return lane.wait()


def test_a_failure_that_is_told_before_the_calls_behind_it_have_ended_keeps_them_from_beginning(
    lane: Lane, faults: Faults, file: int
) -> None:
    faults.script([-errno.ENOSPC])
    lane.add(file, [b"first"], 0, None)
    lane.signal()
    lane.add(file, [b"second"], 0, None)
    assert lane.wait() and lane.ended() == [errno.ENOSPC]
    assert do_all(lane) == [errno.ECANCELED] and content(file) == b""


def test_more_buffers_than_one_call_takes_and_views_of_wide_items_are_written(lane: Lane, file: int) -> None:
    buffers: list[Any] = [bytes([number & 255]) * (number % 3) for number in range(2 * BUFFERS_MAX + 5)]
    buffers.append(memoryview(array("Q", range(9))))
    lane.add(file, buffers, 3, int)
    assert do_all(lane) == [0]
    assert content(file) == bytes(3) + b"".join(bytes(buffer) for buffer in buffers)


def test_a_thread_does_calls_and_the_loop_hears_of_all_in_order(lane: Lane, file: int) -> None:
    woken: list[bool] = []

    def work() -> None:
        while lane.wait():
            woken.append(True)
            lane.end(nothing)
        woken.append(False)

    nothing: Callable[[], object] = tuple
    thread = threading.Thread(target=work)
    thread.start()
    heard: list[object] = []
    for number in range(CALLS):
        lane.add(file, [b"%04d" % number], 4 * number, None if number % 50 else int)
        heard += lane.ended()
    lane.signal()
    while len(heard) < CALLS + 1:
        assert select.select([lane], [], [], DEADLINE_S)[0]
        heard += lane.ended()
    assert heard == [*[0] * CALLS, nothing]
    lane.stop()
    thread.join(DEADLINE_S)
    # The last event may come behind what it tells of, which was taken before.
    assert lane.ended() == [] and not select.select([lane], [], [], 0)[0]
    assert woken == [True, False]
    assert content(file) == b"".join(b"%04d" % number for number in range(CALLS))


def test_a_stop_begins_no_call_and_buffers_are_let_go(lane: Lane, file: int) -> None:
    buffer = bytearray(b"held")
    lane.add(file, [buffer], 0, int)
    lane.stop()
    assert not lane.wait() and not lane.wait() and lane.ended() == [] and content(file) == b""


def test_buffers_are_held_until_the_calls_are_told_and_no_longer(lane: Lane, file: int) -> None:
    buffer = bytearray(b"held")
    lane.add(file, [buffer], 0, None)
    assert do_all(lane) == [0]
    gc.collect()
    buffer.clear()  # A bytearray that is in use can't be resized.


def test_what_is_no_call_is_refused(lanes: dict[str, Callable[[], Lane]], file: int) -> None:
    lane: Any = lanes["compiled"]()
    calls: list[Any] = [("x", [], 0, None), (file, (), 0, None), (file, ["x"], 0, None), (file, [], None, None), ()]
    calls.append((file, [b"x"], 0, True))
    for wrong in calls:
        with pytest.raises((TypeError, SystemError)):
            lane.add(*wrong)
    with pytest.raises(TypeError):
        lanes["compiled"](1)  # type: ignore[call-arg]
    assert do_all(lane) == []
    lane.close()
    lane.close()


def test_a_descriptor_that_is_closed_is_an_outcome(lane: Lane) -> None:
    lane.add(1 << 20, [b"x"], 0, None)
    assert do_all(lane) == [errno.EBADF]


def test_a_child_of_a_fork_can_let_a_lane_go_while_the_thread_of_its_parent_waits(
    lanes: dict[str, Callable[[], Lane]],
) -> None:
    for make in lanes.values():
        lane = make()
        thread = threading.Thread(target=lane.wait)
        thread.start()
        child = os.fork()
        if not child:
            del thread, lane
            gc.collect()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        lane.stop()
        thread.join(DEADLINE_S)
        lane.close()
