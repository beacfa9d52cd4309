"""Requests that change something and meet others, or the same thing removed, while it is being stored.

Whatever meets whatever at whichever step of the disks: each request is answered once, nothing but named errors comes of
it, and what the server says afterwards is what the next start reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hypothesis import given
from hypothesis.strategies import integers, lists, tuples

from delayd.batch.columns import Buffer
from delayd.errors import DelaydError
from delayd.log.proof import GROUP_PREFIX
from delayd.testing.executor import StepExecutor
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    need_int,
    need_rows,
    need_u64,
)
from delayd.wire.requests import RequestType
from realtime.groups import Group
from realtime.quarantine import RETRY_MS
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head

from .rotten import BAD, flip, flip_value, pull_all, served

GROUPS = (GROUP, "other", "third")
PEERS = 3
ORIGINS = (0xD31A, 0xD31B)
WAIT_MS = 5_000
LEASE_MS = 2_000


class OncePeer(SimPeer):
    """A connection on which a second answer to one request is what it is for the real one: a bug."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: set[int] = set()

    def answer(
        self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = (), *, more: bool = False
    ) -> None:
        assert request_id not in self.ended
        super().answer(request_id, head, body, more=more)
        if not more:
            self.ended.add(request_id)

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        assert request_id not in self.ended
        super().answer_error(request_id, error)
        self.ended.add(request_id)


class Facts(NamedTuple):
    """What must be the same after the next start."""

    origins: list[object]
    groups: Mapping[tuple[str, str], object]
    lost: list[str]
    end: int


class Meeting:
    """One life of a server whose three disks take steps when the test says so."""

    def __init__(self) -> None:
        # One batch that can't be read, and one group whose progress does not check.
        first, peer = served([b"good"], [BAD, b"beside"], [b"more"])
        first.hello(peer, 2, w=(1, 3))
        pull_all(first, "other")
        first.core.checkpoint()
        pull_all(first, "third")
        disk, state = first.disk.after_crash(), first.state.after_crash()
        flip_value(state, next(key for key in sorted(state._pairs) if key.startswith(GROUP_PREFIX)))
        flip(disk, BAD)
        self.executors = StepExecutor(), StepExecutor(), StepExecutor()
        self.world = World(disk, state, None, *self.executors, settings={"tail_bytes": 0})
        self.peers = [OncePeer() for _ in range(PEERS)]
        self.sessions = [(0, 0, 0)] * PEERS  # A peer's origin, epoch and session.
        self.last_batch = 10
        self.last_session = 100
        self.pulls: list[tuple[OncePeer, int, str]] = []
        self.does: list[Callable[[int], None]] = [
            *[self._step(executor) for executor in self.executors],
            *[self._step(executor) for executor in self.executors],
            self._hello,
            self._dispatch,
            self._dispatch,
            self._accept,
            self._pull,
            self._pull,
            self._acknowledge,
            self._delete,
            self._move,
            self._pause,
            self._end_pulls,
            self._decide_rows,
            self._decide_group,
            self._leave,
            self._pass_time,
            lambda number: self.world.core.checkpoint(),
        ]

    def _step(self, executor: StepExecutor) -> Callable[[int], None]:
        def step(number: int) -> None:
            executor.step()

        return step

    def _hello(self, number: int) -> None:
        self.last_session += 1
        at, origin, epoch = number % PEERS, ORIGINS[number // 3 % 2], 1 + number // 6 % 3
        self.sessions[at] = (origin, epoch, self.last_session)
        w = (max(0, epoch - number % 2), number % 20)
        self.world.hello_later(self.peers[at], self.last_session, epoch=epoch, w=w, origin=origin)

    def _dispatch(self, number: int) -> None:
        origin, epoch, session = self.sessions[number % PEERS]
        self.last_batch += 1
        w = (epoch, max(0, self.last_batch - number % 7 - 1))
        batch = dispatch_batch(self.last_batch, [b"%d" % self.last_batch], epoch=epoch, w=w, origin=origin)
        self.world.send(self.peers[number % PEERS], RequestType.DISPATCH, {"session": session, "epoch": epoch}, batch)

    def _accept(self, number: int) -> None:
        self._ask(number, RequestType.ORIGIN_ACCEPT, {"log_id": ORIGINS[number // 3 % 2]})

    def _pull(self, number: int) -> None:
        peer, group = self.peers[number % PEERS], GROUPS[number // 3 % 3]
        wait_ms = WAIT_MS if number % 2 else 0
        head = pull_head(group, most=1 + number % 4, wait_ms=wait_ms, lease_ms=LEASE_MS, ahead=number % 5 // 4)
        self.pulls.append((peer, self.world.send(peer, RequestType.PULL, head), group))

    def _acknowledge(self, number: int) -> None:
        """All that was pulled last, or a part of it, or more than it; the same may be named again and again."""
        for peer, request_id, group in self.pulls[-1 - number % 4 :]:
            for head, _ in peer.answers.get(request_id, ()):
                incarnation = need_u64(head, "incarnation")
                handles = [
                    [incarnation, max(0, first - number % 2), count + number % 3]
                    for first, _, count, _ in need_rows(head, "parts", 4)
                ]
                kind = RequestType.NACK if number % 3 == 1 else RequestType.ACK
                names: Head = {"subject": SUBJECT, "group": group, "handles": [*handles, *handles[: number % 2]]}
                self._ask(number, kind, names if kind is RequestType.ACK else {**names, "uncounted": number % 4 == 0})

    def _delete(self, number: int) -> None:
        self._ask(number, RequestType.DELETE_GROUP, {"subject": SUBJECT, "group": GROUPS[number // 3 % 3]})

    def _move(self, number: int) -> None:
        names: Head = {"subject": SUBJECT, "group": GROUPS[number // 3 % 3]}
        places: tuple[HeadValue, ...] = ("earliest", "latest", {"instant_ms": number}, {"sequence": number % 9})
        self._ask(number, RequestType.MOVE_GROUP, {**names, "to": places[number % 4]})

    def _pause(self, number: int) -> None:
        names: Head = {"subject": SUBJECT, "group": GROUPS[number // 3 % 3]}
        self._ask(number, RequestType.PAUSE_GROUP, {**names, "paused": number % 2 == 0})

    def _end_pulls(self, number: int) -> None:
        self._ask(number, RequestType.PULL_END, {"subject": SUBJECT, "group": GROUPS[number // 3 % 3]})

    def _decide_rows(self, number: int) -> None:
        for bad in list(self.world.core._pulls.quarantine.listing()):
            self._decide(number, bad.id)

    def _decide_group(self, number: int) -> None:
        self._decide(number, "group/00000001")

    def _decide(self, number: int, id_: str) -> None:
        if number % 5 == 0:
            flip(self.world.disk, BAD)
        taken = "release" if id_.startswith("group/") else "take"
        self._ask(number, RequestType.MEND, {"id": id_, "decision": taken if number % 2 else "give-up"})

    def _leave(self, number: int) -> None:
        peer = self.peers[number % PEERS]
        peer.closed = True
        self.peers[number % PEERS] = OncePeer()
        if number % 2:
            self.world.core.disconnected(peer)

    def _pass_time(self, number: int) -> None:
        self.world.clock.advance((10, LEASE_MS, WAIT_MS, RETRY_MS)[number % 4])
        self.world.core.wake()

    def _ask(self, number: int, kind: RequestType, head: Head) -> None:
        self.world.send(self.peers[number % PEERS], kind, head)

    def settle(self) -> None:
        """Have the disks do all that they were given."""
        while sum([executor.run_all() for executor in self.executors]):
            self.world.core.wake()

    def check(self) -> None:
        """Nothing is left unanswered, and nothing is other than the next start finds it."""
        for _ in range(20):
            self.settle()
            self.world.clock.advance(WAIT_MS)
            self.world.core.wake()
        self.settle()
        assert not self.world.failures
        for peer in self.peers:
            if not peer.closed:
                assert peer.ended == set(range(1, peer.last_id + 1))
        world = self.world
        before = facts(world)
        after = facts(World(world.disk.after_crash(), world.state.after_crash(), settings={"tail_bytes": 0}))
        assert before == after


def facts(world: World) -> Facts:
    """What a server knows of delay servers and groups."""
    origins: list[object] = [
        (each.log_id, each.epoch, each.instance, each.session, each.w, each.keys, each.decided_offset)
        for each in sorted(world.core._origins, key=lambda each: each.log_id)
    ]
    groups = {key: progress(group) for key, group in world.core._pulls.groups.items()}
    lost = [each.id for each in world.core._pulls.roster.all_lost]
    status, _ = world.ask(SimPeer(), RequestType.STATUS, {})
    return Facts(origins, groups, lost, need_int(status, "end_offset"))


def progress(group: Group) -> tuple[int, set[int], set[tuple[int, int, int]]]:
    """Its id, what is not acknowledged, and what is held."""
    open_ = set(range(group.next, group.subject.end))
    for run in group.window.others:
        open_.update(range(run.first, run.end))
    held = {
        (run.first + at, run.consume_first + at, run.incarnation)
        for run in group.window.held()
        for at in range(run.messages)
    }
    return group.group_id, open_ | {consume for _, consume, _ in held}, held


@given(steps=lists(tuples(integers(0, 21), integers(0, 59)), min_size=30, max_size=90))
def test_whatever_meets_while_it_is_stored_is_what_the_next_start_reads(steps: list[tuple[int, int]]) -> None:
    meeting = Meeting()
    for kind, number in steps:
        meeting.does[kind % len(meeting.does)](number)
    meeting.check()
