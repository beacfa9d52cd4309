"""A realtime server's core in memory: its disk, state, clock and executors are fakes, and peers keep its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from delayd.batch.columns import Buffer
from delayd.config import RealtimeConfig, load_config
from delayd.errors import DelaydError
from delayd.machine.executor import Executor
from delayd.testing.clock import SimClock
from delayd.testing.disk import MemoryDisk
from delayd.testing.state import MemoryState
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.heads import (
    need_int,
    need_rows,
    need_u64,
)
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import ORIGIN, bodies_of, dispatch_batch
from tests.worlds.executor import InlineExecutor
from tests.worlds.realtime_adapter import Machine, RealtimeAdapter

DATA = "/data"
SUBJECT = "orders"
GROUP = "billing"


@dataclass(eq=False)
class SimPeer:
    """A connection that keeps what the core answers, by request id."""

    answers: dict[int, list[tuple[Head, bytes]]] = field(default_factory=dict)
    errors: dict[int, DelaydError] = field(default_factory=dict)
    going_on: set[int] = field(default_factory=set)  # Requests whose last answer said that more follow.
    closed: bool = False
    last_id: int = 0

    def answer(
        self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = (), *, more: bool = False
    ) -> None:
        self.answers.setdefault(request_id, []).append((dict(head), b"".join(body)))
        (self.going_on.add if more else self.going_on.discard)(request_id)

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        assert request_id not in self.errors
        assert request_id in self.going_on or request_id not in self.answers
        self.going_on.discard(request_id)
        self.errors[request_id] = error

    @property
    def is_open(self) -> bool:
        return not self.closed

    def close(self) -> None:
        self.closed = True


class World:
    """One life of a server; `restarted` begins the next one. It begins anew in place whenever it wants to."""

    def __init__(
        self,
        disk: MemoryDisk | None = None,
        state: MemoryState | None = None,
        clock: SimClock | None = None,
        commit: Executor | None = None,
        pulls: Executor | None = None,
        work: Executor | None = None,
        settings: Mapping[str, int] | None = None,
        log_id: int = 0xA11CE,
    ) -> None:
        self.disk = MemoryDisk() if disk is None else disk
        self.state = MemoryState(self.disk) if state is None else state
        self.clock = SimClock() if clock is None else clock
        self.settings = settings or {}
        self.failures: list[BaseException] = []
        config = load_config("realtime", overrides={"data": DATA, **self.settings})
        assert isinstance(config, RealtimeConfig)
        self.config = config
        self.disk.make_folder(config.folder)
        self.log_id = log_id
        self.threads = (commit or InlineExecutor(), pulls or InlineExecutor(), work or InlineExecutor())
        self.begun_anew: list[str] = []  # Why, each time.
        self._wants_to = ""
        self._start()

    def _start(self) -> None:
        self.lock = self.disk.lock(f"{self.config.folder}/LOCK")
        machine = Machine(self.disk, self.state, self.clock, *self.threads)
        self.server = RealtimeAdapter(self.config, machine, self.log_id, self.failures.append, self._want_to)
        self.core, self.recovered = self.server.core, self.server.recovered  # For tests of its parts.

    def _want_to(self, why: str) -> None:
        self._wants_to = why

    def _end(self) -> None:
        stopped: list[bool] = []
        self.server.stop(lambda: stopped.append(True))
        assert stopped
        self.server.close()
        self.lock.release()

    def _live_again(self) -> None:
        self.begun_anew.append(self._wants_to)
        self._wants_to = ""
        self._end()
        self._start()

    def restarted(self) -> "World":
        """Stop cleanly and start again on the same disk."""
        self._end()
        return World(self.disk, self.state, self.clock.restarted(), settings=self.settings)

    def send(self, peer: SimPeer, kind: RequestType, head: Mapping[str, HeadValue], *body: bytes) -> int:
        """Give the core a request, as the shell does; returns its id."""
        peer.last_id += 1
        frame = Frame(kind, 0, peer.last_id, dict(head), memoryview(b"".join(body)))
        try:
            self.server.received(peer, frame)
        except DelaydError as error:
            peer.answer_error(peer.last_id, error)
        if self._wants_to:
            self._live_again()
        return peer.last_id

    def ask(self, peer: SimPeer, kind: RequestType, head: Mapping[str, HeadValue], *body: bytes) -> tuple[Head, bytes]:
        """A request that is answered at once; raises its error."""
        request_id = self.send(peer, kind, head, *body)
        if request_id in peer.errors:
            raise peer.errors[request_id]
        ((answer, answer_body),) = peer.answers[request_id]
        return answer, answer_body

    def hello_later(
        self,
        peer: SimPeer,
        session: int,
        *,
        epoch: int = 1,
        instance: int = 7,
        w: tuple[int, int] = (0, 0),
        origin: int = ORIGIN,
        target: int | None = None,
    ) -> int:
        """Say hello; returns the id of the request."""
        meant = self.server.log_id if target is None else target
        head: Head = {
            "log_id": origin,
            "target": meant,
            "epoch": epoch,
            "instance": instance,
            "session": session,
            "w": list(w),
        }
        return self.send(peer, RequestType.HELLO, head)

    def hello(
        self, peer: SimPeer, session: int, *, epoch: int = 1, instance: int = 7, w: tuple[int, int] = (0, 0)
    ) -> list[list[int]]:
        """Say hello and be answered at once; returns the rows of the window."""
        return self.window(peer, self.hello_later(peer, session, epoch=epoch, instance=instance, w=w))

    def window(self, peer: SimPeer, request_id: int) -> list[list[int]]:
        """The rows of the window that a hello was answered; raises its error."""
        if request_id in peer.errors:
            raise peer.errors[request_id]
        return [row for answer, _ in peer.answers[request_id] for row in need_rows(answer, "batches", 7)]

    def dispatch(self, peer: SimPeer, session: int, *batches: bytes, epoch: int = 1) -> tuple[int, list[list[int]]]:
        """Hand batches over; returns when they were appended, and (batch id, offset) of each."""
        answer, _ = self.ask(peer, RequestType.DISPATCH, {"session": session, "epoch": epoch}, *batches)
        return need_int(answer, "appended_at_ms"), need_rows(answer, "batches", 2)

    def pull(
        self, peer: SimPeer, group: str = GROUP, subject: str = SUBJECT, most: int = 1000, max_bytes: int = 1 << 20
    ) -> "Pulled":
        """Pull what there is now."""
        answer, body = self.ask(peer, RequestType.PULL, pull_head(group, subject, most, max_bytes))
        return Pulled(need_u64(answer, "incarnation"), need_rows(answer, "parts", 4), bodies_of(body), body)

    def ack(
        self,
        peer: SimPeer,
        handles: Sequence[Sequence[int]],
        group: str = GROUP,
        subject: str = SUBJECT,
        kind: RequestType = RequestType.ACK,
    ) -> list[list[int]]:
        """Acknowledge; returns what is stale."""
        head: Head = {"subject": subject, "group": group, "handles": [list(handle) for handle in handles]}
        return need_rows(self.ask(peer, kind, head)[0], "stale", 3)

    def give_back(
        self, peer: SimPeer, handles: Sequence[Sequence[int]], group: str = GROUP, subject: str = SUBJECT
    ) -> list[list[int]]:
        """Give back what no handler was given; returns what is stale."""
        head: Head = {"subject": subject, "group": group, "handles": [list(handle) for handle in handles]}
        return need_rows(self.ask(peer, RequestType.NACK, head | {"uncounted": True})[0], "stale", 3)

    def pass_time(self, ms: int) -> None:
        """Let time pass and do what is due then."""
        self.clock.advance(ms)
        self.server.wake()
        if self._wants_to:
            self._live_again()


@dataclass(frozen=True, slots=True)
class Pulled:
    """An answer to a PULL."""

    incarnation: int
    parts: list[list[int]]
    bodies: list[bytes]
    raw: bytes

    @property
    def handles(self) -> list[list[int]]:
        """The handles of all its parts."""
        return [[self.incarnation, pull_first, count] for pull_first, _, count, _ in self.parts]

    @property
    def attempts(self) -> list[int]:
        """The attempt of each part."""
        return [part[3] for part in self.parts]


def pull_head(
    group: str = GROUP,
    subject: str = SUBJECT,
    most: int = 1000,
    max_bytes: int = 1 << 20,
    wait_ms: int = 0,
    lease_ms: int = 30_000,
    ahead: int | None = None,
    stands: bool | None = None,
) -> Head:
    head: Head = {
        "subject": subject,
        "group": group,
        "max_messages": most,
        "max_bytes": max_bytes,
        "wait_ms": wait_ms,
        "lease_ms": lease_ms,
        "consumer": "test",
    }
    told: Head = {"ahead": ahead, "stands": stands}
    return head | {name: value for name, value in told.items() if value is not None}


def ready_world(*bodies: list[bytes], **settings: int) -> tuple[World, SimPeer]:
    """A server that was handed batches of these bodies."""
    world, peer = World(settings=settings), SimPeer()
    world.hello(peer, 1)
    for batch_id, of_batch in enumerate(bodies, 1):
        world.dispatch(peer, 1, dispatch_batch(batch_id, of_batch))
    return world, peer
