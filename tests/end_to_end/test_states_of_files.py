"""States of damaged files and values, of clocks and of contents: what `delayd status` prints leads out of each."""

from __future__ import annotations

import shlex
import shutil
from functools import partial
from pathlib import Path
from signal import SIGTERM

from delayd.machine.operating import WaitKind
from tests.end_to_end.cluster import cluster, command, flip, flip_value, put_back, stopped
from tests.end_to_end.trials import LOOK_S, tries
from tests.end_to_end.wall_clock import WallClock
from tests.named_commands import commands_in
from tests.waiting import wait_until

HOUR_MS = 3_600_000
SEGMENT_BYTES = 4_096
HEADER_POSITION = 20  # A byte of the header of any file.
BODY = "." * 1_000  # A few of them fill a segment.


@tries(WaitKind.FILE_SET_ASIDE_OR_GIVEN_UP)
def test_a_damaged_file_is_put_back_or_given_up_as_status_says(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        operator = production.operator
        production.send("1")
        assert production.consumed(1) == ["1"]
        with stopped(production.delay):
            (dispatched,) = (tmp_path / "delay/dispatch").glob("*/*.log")
            whole = flip(dispatched, -1)
        assert f"put {dispatched} back" in operator.until_told(WaitKind.FILE_SET_ASIDE_OR_GIVEN_UP)
        put_back(dispatched, whole)
        operator.follow(WaitKind.FILE_SET_ASIDE_OR_GIVEN_UP, 0)
        # Without a copy it is given up.
        with stopped(production.delay):
            dispatched.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
        operator.follow(WaitKind.FILE_SET_ASIDE_OR_GIVEN_UP, 1)
        production.send("3")
        wait_until(lambda: "3" in production.consumed(1), "it comes, maybe behind the first one")


@tries(WaitKind.FILE_SET_ASIDE, WaitKind.FILE_SET_ASIDE, WaitKind.FILE_SET_ASIDE_OR_GIVEN_UP)
def test_files_of_the_message_logs_are_put_back_or_given_up_as_status_says(tmp_path: Path) -> None:
    with cluster(tmp_path, segment_bytes=SEGMENT_BYTES) as production:
        operator = production.operator
        for number in range(8):
            production.send(f"{number}{BODY}")
        delay, realtime = production.delay, production.realtime
        first, delivered = f"{0:020}.log", tmp_path / "realtime/message"
        # What is due at one moment is handed over in one group, which is in one file whatever its size.
        wait_until(lambda: len(list(delivered.iterdir())) > 1 or production.send(BODY), "one of its files is full")
        for server, kind in ((delay, WaitKind.FILE_SET_ASIDE), (realtime, WaitKind.FILE_SET_ASIDE)):
            damaged = tmp_path / server.role / "message" / first
            with stopped(server):
                whole = flip(damaged, HEADER_POSITION)
            assert f"put {damaged} back" in operator.until_told(kind)
            put_back(damaged, whole)
            operator.follow(kind, 0)
        # A message that can't be read is given up.
        with stopped(realtime):
            flip(damaged, whole.index(BODY.encode()))
        assert production.consumed(1)
        assert operator.follow(WaitKind.FILE_SET_ASIDE_OR_GIVEN_UP, 1)


@tries(WaitKind.HELD, WaitKind.PULLS_UNREAD)
def test_a_held_start_and_a_pull_log_go_on_when_their_file_is_put_back(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        operator, realtime = production.operator, production.realtime
        production.send("1", "2")
        assert production.consumed(2) == ["1", "2"]
        with stopped(realtime):
            pass
        production.send("3")
        assert production.consumed(1) == ["3"]
        realtime.kill()
        (pulled,) = (tmp_path / "realtime/pull").glob("*.log")
        (delivered,) = (tmp_path / "realtime/message").glob("*.log")
        wholes = {path: path.read_bytes() for path in (pulled, delivered)}
        for path, whole in wholes.items():
            path.write_bytes(whole[: len(whole) // 4])
        realtime.start_held()
        operator.until_told(WaitKind.HELD)
        put_back(delivered, wholes[delivered])
        operator.until_gone(WaitKind.HELD)
        realtime.until_ready()
        assert f"put {pulled} back" in operator.until_told(WaitKind.PULLS_UNREAD)
        put_back(pulled, wholes[pulled])
        operator.follow(WaitKind.PULLS_UNREAD, 0)
        production.send("4")
        assert production.consumed(1) == ["4"]


@tries(
    *(WaitKind.ROUTE_DAMAGED, WaitKind.SET_ASIDE, WaitKind.GROUP_DAMAGED, WaitKind.GROUP_WITHOUT_NAME),
    WaitKind.STATE_REPLACED,
)
def test_values_of_states_that_do_not_check_are_decided_on_as_status_says(tmp_path: Path) -> None:
    with cluster(tmp_path, checkpoint_every_ms=200) as production:
        operator = production.operator
        production.send("1")
        assert production.consumed(1) == ["1"]
        for server, prefixes in (
            (production.delay, [b"producer/"]),
            (production.realtime, [b"group/"]),
            (production.meta, [b"route/"]),
        ):
            with stopped(server):
                for prefix in prefixes:
                    flip_value(tmp_path / server.role, prefix)
        # All that needs a decision is in one list, with the commands of `delayd status`.
        for kind in (WaitKind.SET_ASIDE, WaitKind.ROUTE_DAMAGED, WaitKind.GROUP_DAMAGED):
            listed = command("mend", "list", "--meta", operator.meta)
            for words in commands_in(operator.until_told(kind)):
                assert shlex.join(words) in listed, listed
            operator.follow(kind, 0)
        # The group begins at the earliest message again.
        assert production.consumed(1) == ["1"]
        with stopped(production.realtime):
            for prefix in (b"group/", b"name/"):
                flip_value(tmp_path / "realtime", prefix)
        operator.follow(WaitKind.GROUP_WITHOUT_NAME, 0)
        servers = (production.delay, production.realtime, production.meta)
        for server in servers:
            state = tmp_path / server.role / "state.lmdb/data.mdb"
            shutil.copyfile(state, state.with_suffix(".copy"))
            state.with_suffix(".copy").rename(state)
        # A new subject is a commit for each of them; without one they look every 30 s.
        production.send("x", subject="new")
        told = partial(operator.told, WaitKind.STATE_REPLACED)
        wait_until(lambda: len(told()) == len(servers), lambda: str(told()), every_s=LOOK_S)
        operator.until_told(WaitKind.STATE_REPLACED)
        for server in servers:
            # It says once more that it was replaced, as an error, when its stop writes it.
            server.signal(SIGTERM)
            assert server.wait() == 0
            server.start()
        operator.until_gone(WaitKind.STATE_REPLACED)
        production.send("2")
        assert production.consumed(2) == ["1", "2"]


@tries(WaitKind.CLOCK, WaitKind.CLOCK_WAS_AHEAD)
def test_a_clock_is_compared_and_trusted_as_status_says(tmp_path: Path) -> None:
    wall = WallClock(tmp_path)
    with wall.preloaded(), cluster(tmp_path / "data", checkpoint_every_ms=100) as production:
        operator = production.operator
        wall.step(3 * HOUR_MS)
        # Each server names its own command; the first one of a line compares, the second one trusts.
        assert operator.follow(WaitKind.CLOCK, 0, 1)
        production.send("1")
        assert production.consumed(1) == ["1"]
        wall.step(-3 * HOUR_MS)
        operator.follow(WaitKind.CLOCK_WAS_AHEAD, 0)
        production.send("2")
        assert production.consumed(1) == ["2"]
