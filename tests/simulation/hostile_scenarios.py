"""Scenarios of strangers: requests of any values, poisoned sends, answers that lie (rules E1, E2, B1).

Invariant: nothing that a stranger sends here may be taken; all that it asks is answered or ends its own connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from delayd.batch.columns import Buffer, ProducerPart
from delayd.errors import DelaydError, RetryLater
from delayd.hours import HOUR_MS, INSTANT_MS_MAX
from delayd.testing.clock import SimClock
from delayd.wire.frame import Frame, FrameReader, Head, HeadValue, encode_frame
from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from tests.batches import PRODUCER, messages
from tests.fuzz.requests import SPECS, Fields
from tests.fuzz.values import BOUNDARY, NUMBERS
from tests.simulation.network import ServedEnd
from tests.simulation.parts import Parts
from tests.simulation.realtime_side import RealtimeSide
from tests.simulation.steps import Kinds
from tests.worlds.delay import PRODUCER_ID, encode_wanted
from tests.worlds.delay_adapter import Requests
from tests.worlds.meta_adapter import LEASE_MS, MetaAdapter, Stranger
from tests.worlds.outside import Sent

REQUESTS = 12  # The number of requests that one stranger sends.
OUTSIDE = (-(1 << 63), -1, 0, INSTANT_MS_MAX + 1, (1 << 63) - 1)  # Instants that no message may be due at.
BROKEN_HEADERS = (b"\xc1", b"\x01", b"\x81", b"\x81\xa1a", b"\xdf\xff\xff\xff\xff")
BAD_SUBJECTS = (b"", b"a b", b"orders.eu\n", b"x" * 256)
LIAR_ANSWERS = 8
STRANGER = 0xBAD  # A producer id of nobody.


# These are served by the shells around the cores, or say nothing of the core that is asked.
OF_SHELLS = frozenset(
    {
        RequestType.PING,
        RequestType.STATUS,
        RequestType.CHALLENGE,
        RequestType.PROVE,
        RequestType.CUT,
        RequestType.CUT_READY,
    }
)


def served(role: str, *others: RequestType) -> dict[RequestType, Fields]:
    """The requests that a core serves, and their fields."""
    return {kind: fields for kind, fields in SPECS[role].items() if kind not in OF_SHELLS or kind in others}


class HostileScenarios(Parts):
    """Whoever connects and means no good, or is broken."""

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        kinds: Kinds = [
            (3, self.hostile_requests_at_realtime),
            (3, self.garbage_at_realtime),
            (3, self.garbage_at_meta),
        ]
        if self.cluster.delay_up:
            kinds += [(3, self.hostile_requests_at_delay), (3, self.poisoned_send), (3, self.target_lies)]
            kinds += [(3, self.garbage_at_delay)]
        return kinds

    def hostile_requests_at_realtime(self) -> None:
        """Well-formed requests of any values come by one connection, which then goes (rules E1, B1)."""
        cluster, side = self.cluster, self.steps.side()
        if side.life is None:
            return
        line = cluster.network.connect(side.life, self, hostile=True)
        for _ in range(REQUESTS):
            kind, head = self._request(served("realtime"))
            if kind in (RequestType.ACK, RequestType.NACK) and self.chance(0.7):
                head |= {"subject": self.random.choice(cluster.subjects).decode(), "group": "group"}
                head["handles"] = [[self._number() for _ in range(3)] for _ in range(self.random.choice((1, 3)))]
            if kind == RequestType.HELLO and self.chance(0.7):
                head["target"] = side.log_id
            line.call(kind, head, (), _nobody_hears)
            self.moves(4)
        cluster.calm(self.random.choice((1, 60)))
        line.end()
        self.moves(12)

    def hostile_requests_at_delay(self) -> None:
        """Well-formed requests of any values at the delay server (rule E1)."""
        server = self.cluster.world.server
        requests = server.frames(with_status=True)
        asker = Asker()
        for _ in range(REQUESTS):
            kind, head = self._request(served("delay", RequestType.STATUS))
            if kind == RequestType.OUTCOME and self.chance(0.7):
                head["log_id"] = server.log_id
                if head.get("producer_id") == PRODUCER_ID:
                    continue
            if kind == RequestType.DRAIN:
                continue  # An operator's word that counts: keys would leave for good, for a server that never was.
            asker.asks(requests, kind, head)
            self.moves(2)
        requests.disconnected(asker)

    def garbage_at_realtime(self) -> None:
        """Bytes that are no frames, or were some once, come by one connection, in the middle of all else (rule E1)."""
        cluster, side = self.cluster, self.steps.side()
        if side.life is None:
            return
        line = cluster.network.connect(side.life, self, hostile=True)
        for number in range(1, REQUESTS + 1):
            if not line.open:
                break
            kind, head = self._request(served("realtime"))
            line.up += self._spoiled(_frame(kind, number, head, self._batch(number)))
            self.moves(4)
        cluster.calm(self.random.choice((1, 60)))
        line.end()
        self.moves(12)

    def garbage_at_delay(self) -> None:
        """Sends whose bytes changed on their way are not taken; what is no frame ends its own connection (rule E1)."""
        server = self.cluster.world.server
        requests, asker = server.frames(), Asker()
        reader = FrameReader()
        for number in range(1, REQUESTS + 1):
            sent = _frame(RequestType.SEND, number, {}, self._batch(number))
            data = self._spoiled(sent)
            for frame in _received(reader, data):
                if frame.fault is None and bytes(frame.body) != self._batch(number):
                    asker.serves(requests, frame)
            if reader.fault is not None:
                reader = FrameReader()
        self.moves(12)
        if self.cluster.delay_up and self.cluster.world.server is server:
            taken = [body for body in asker.taken if body]
            assert not taken, f"sends are taken that were changed on their way: {taken}"
        requests.disconnected(asker)

    def garbage_at_meta(self) -> None:
        """Strangers say to meta what they like, in frames and none, also of what is there: nothing changes (E1, H8)."""
        cluster, random = self.cluster, self.random
        targets = {side.log_id: side.name for side in cluster.sides}
        routes = {subject.decode(): target for subject, target in cluster.router.routes.items()}
        clock = SimClock()  # Its time is its own, so that leases may end.
        meta = MetaAdapter(clock, targets, routes)
        before = meta.told()
        assert before == (routes, targets), before
        peer, reader = Stranger(), FrameReader()
        for number in range(1, 2 * REQUESTS):
            kind, head = self._request(SPECS["meta"])
            if self.chance(0.5):
                # What is there, as an operator or a server would name it.
                told: Head = {
                    "role": "realtime",
                    "log_id": random.choice(list(targets)),
                    "to": random.choice(list(targets)),
                }
                told |= {"subject": random.choice(list(routes)), "routes": True, "host": "stranger", "epoch": 1}
                head |= {name: value for name, value in told.items() if name in head}
            data = _frame(kind, number, head, b"")
            for frame in _received(reader, self._spoiled(data) if self.chance(0.4) else data):
                meta.serves(peer, frame)
            if reader.fault is not None:
                peer, reader = Stranger(), FrameReader()
            meta.does_some(random.choice((0, 1, 3)))
            if self.chance(0.1):
                clock.advance(LEASE_MS + 1)
            if self.chance(0.1):
                meta.begin()
        meta.rests()
        for life in ("this", "the next"):
            assert meta.told() == before, f"strangers have changed what meta tells in {life} life: {meta.told()}"
            meta.begin()

    def _batch(self, number: int) -> bytes:
        """A batch of a stranger, who is the producer of nobody's messages."""
        part = ProducerPart(STRANGER, number, 1)
        due_ms = self.cluster.world.clock.now_ms() // HOUR_MS * HOUR_MS
        return encode_wanted([(due_ms, self.cluster.subjects[0], b"of a stranger %d" % number)], part)

    def _spoiled(self, data: bytes) -> bytes:
        """A frame with bits flipped, a piece cut out, or bytes of no meaning in it."""
        changed, random = bytearray(data), self.random
        at = random.randrange(len(changed))
        kind = random.choice(("flip", "flip", "cut", "insert", "noise"))
        if kind == "flip":
            for _ in range(random.choice((1, 1, 8))):
                changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        elif kind == "cut":
            del changed[at : at + random.choice((1, 8, 64))]
        elif kind == "insert":
            changed[at:at] = random.randbytes(random.choice((1, 8, 64)))
        else:
            changed = bytearray(random.randbytes(random.choice((1, 24, 400))))
        return bytes(changed)

    def poisoned_send(self) -> None:
        """A send of a batch that no reader could read, and a good one beside it, which is taken (rule E2)."""
        world = self.cluster.world
        outside = world.outside
        outside.last_number += 1
        rows = [self.steps.message((-1_000, 1_500))]
        part = ProducerPart(PRODUCER_ID, outside.last_number, min(outside.unanswered, default=outside.last_number))
        good = Sent(outside.last_number, encode_wanted(rows, part), rows)
        outside.unanswered[good.number] = good
        asker = Asker()

        def heard(answer: Head | DelaydError) -> None:
            assert not isinstance(answer, DelaydError), f"a send is refused as a whole for one of its batches: {answer}"
            poison, taken = need_maps(answer, "results")
            assert "error" in poison, f"a batch is taken that no reader can read: {poison}"
            if "error" not in taken:
                found = world.server.answer_to(PRODUCER_ID, good.number)
                assert found is not None and found.base_sequence == taken["base_sequence"]
                world._heard(good, found, taken["duplicate"] is True)

        requests = world.server.frames()
        asker.asks(requests, RequestType.SEND, {}, self._poison() + good.data, heard)
        self.moves(12)

    def target_lies(self) -> None:
        """Somebody at a realtime server's address answers hellos with what can't be; the real one is soon back (E1)."""
        cluster, side = self.cluster, self.steps.side()
        if side.life is None or cluster.network.listeners.get(side.place) is not side.life:
            return
        self.steps.send_due()
        liar = Liar(self, side)
        cluster.network.listeners[side.place] = liar
        cluster.network.cut(side.life)
        try:
            cluster.calm(self.random.choice((60, 400, 2_500)))
        finally:
            cluster.network.process_died(liar)
            side.listen()
        server, target = cluster.world.server, side.log_id
        is_alarmed = cluster.delay_up and server.is_alarmed_at(target) and not server.is_refused_by(target)
        if is_alarmed and self.chance(0.5):
            # Nothing was lost there, so an operator's word changes nothing either.
            self.tell(f"     an operator accepts {side.name}")
            server.accept(side.log_id, lambda told: None)
        cluster.calm(self.random.choice((60, 400)))

    def lie(self, side: RealtimeSide) -> Head:
        """An answer to a hello that no realtime server would give, and that proves it."""
        head: Head = {"log_id": side.log_id, "end_offset": 1 << 62, "highest_sequence": 0, "batches": []}
        name = self.random.choice(("log_id", "end_offset", "highest_sequence", "decided_offset", "batches"))
        wrong: dict[str, list[HeadValue]] = {
            "log_id": [0, -1, 1 << 64, True, None, "x", side.log_id ^ 1],
            "end_offset": [-1, 1 << 63, True, None, b"", []],
            "highest_sequence": [-1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, "x", 0.5],
            "decided_offset": [-1, 1 << 63, True, "x"],
            "batches": [
                None,
                [[(1 << 64) - 1] * 7],
                [[1, 1, 1, 1, 1, 1, (1 << 32) - 1]],
                [[1] * 6],
                [[1] * 8],
                [[1, 1, 1 << 32, 1, 1, 1, 0]],
                [[1, 1, 1, 1 << 63, 1, 1, 0]],
                [[1, 1, 1, 1, INSTANT_MS_MAX + 1, 1, 0]],
                [[1, 1, 1, 1, 1, True, 0]],
            ],
        }
        values = [value for value in wrong[name] if not (isinstance(value, int) and value >= 1 << 64)]
        return head | {name: self.random.choice(values)}

    def _request(self, specs: Mapping[RequestType, Fields]) -> tuple[RequestType, Head]:
        """A request with some fields of any values; it names nothing that is there."""
        kind = self.random.choice([kind for kind in specs if kind is not RequestType.TRUST_CLOCK])
        head: Head = {name: make(self.random) for name, make in specs[kind].items()}
        for _ in range(self.random.choice((0, 1, 1, 3))):
            if head:
                head[self.random.choice(sorted(head))] = self.random.choice(BOUNDARY)
        return kind, head

    def _number(self) -> int:
        return self.random.choice([value for value in NUMBERS if value >= 0])

    def _poison(self) -> bytes:
        due_ms = self.cluster.world.clock.now_ms()
        kind = self.random.choice(("due", "headers", "headers", "subject"))
        if kind == "due":
            return messages([b"poison"], due=[self.random.choice(OUTSIDE)], part=PRODUCER)
        if kind == "headers":
            return messages([b"poison"], due=[due_ms], headers=[self.random.choice(BROKEN_HEADERS)], part=PRODUCER)
        return messages([b"poison"], due=[due_ms], subjects=[self.random.choice(BAD_SUBJECTS)], part=PRODUCER)


class Asker:
    """Asks the delay server; each question has one answer."""

    entry = None  # It has no token.

    def __init__(self) -> None:
        self.taken: list[Head] = []
        self._asked: dict[int, Callable[[Head | DelaydError], None]] = {}
        self._last_id = 0

    def asks(
        self,
        requests: Requests,
        kind: RequestType,
        head: Head,
        body: bytes = b"",
        heard: Callable[[Head | DelaydError], None] = lambda answer: None,
    ) -> None:
        """Ask one thing."""
        self._last_id += 1
        self._asked[self._last_id] = heard
        try:
            requests.received(self, Frame(kind, 0, self._last_id, head, memoryview(body)))
        except DelaydError as error:
            self.answer_error(self._last_id, error)

    def serves(self, requests: Requests, frame: Frame) -> None:
        """Have a frame of whatever it is served, as bytes of a stranger; `taken` gets what is accepted of it."""
        self._asked[frame.request_id] = self._told
        try:
            requests.received(self, frame)
        except DelaydError as error:
            self.answer_error(frame.request_id, error)

    def _told(self, answer: Head | DelaydError) -> None:
        if not isinstance(answer, DelaydError) and "results" in answer:
            self.taken += [result for result in need_maps(answer, "results") if "base_sequence" in result]

    def answer(self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = ()) -> None:
        """See `delayd.delay.requests.Peer`."""
        self._asked.pop(request_id)(dict(head))

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        """See `delayd.delay.requests.Peer`."""
        self._asked.pop(request_id)(error)


class Liar:
    """Listens where a realtime server should, and lies to whoever greets it."""

    def __init__(self, scenarios: HostileScenarios, side: RealtimeSide) -> None:
        self._scenarios = scenarios
        self._side = side

    def received(self, peer: ServedEnd, frame: Frame) -> None:
        """Answer a hello with a lie; refuse the rest."""
        if frame.type != RequestType.HELLO:
            raise RetryLater("not now", retry_after_ms=100)
        lie = self._scenarios.lie(self._side)
        for _ in range(self._scenarios.random.choice((0, 0, LIAR_ANSWERS))):
            peer.answer(frame.request_id, lie, more=True)
        peer.answer(frame.request_id, lie)

    def disconnected(self, peer: ServedEnd) -> None:
        """Nothing is kept of anybody."""

    def answers(self, asked: Frame, head: Mapping[str, HeadValue]) -> None:
        """Whatever it says is a lie."""


def _frame(kind: RequestType, number: int, head: Mapping[str, HeadValue], body: bytes) -> bytes:
    return b"".join(map(bytes, encode_frame(kind, number, head, [body])))


def _received(reader: FrameReader, data: bytes) -> list[Frame]:
    """The frames that bytes are, as far as they are some."""
    room = reader.get_buffer()
    room[: len(data)] = data
    return reader.received(len(data))


def _nobody_hears(answer: Frame | DelaydError) -> None:
    """What a stranger is told is no matter."""
