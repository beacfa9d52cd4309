"""Lives of requests that are done once: the same and other requests under a few names, at two gateways, while gateways
and the delay server die, answers are lost, frames come late, and days pass.

``python -m tests.property.once_lives --seeds 2000`` lives that many. A gateway is what answers a POST in a real one,
with its sends, over a wire that loses what it wants; the delay server is the real one on a disk in memory. A life is
judged by the answers and by what the targets got:

    - two messages under one name are a day apart, whatever was asked for, and so are two of one line of a list
    - all answers that name one message are the same
    - only a name that was used for another request is refused for that
    - each receipt leads to a message that was sent, and each of those was handed over, but for replaced ones
    - no other message was handed over but those of requests that were not answered
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from random import Random
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from delayd.batch.columns import ProducerPart
from delayd.client.asking.messages import AskedOne, MessageInfo, info_of
from delayd.client.asking.once import CheckedSends, OnceSends
from delayd.client.instants import HomeClock, ServerClock, set_clock
from delayd.client.sending.outbox import Recorded, RecordedSend
from delayd.client.sending.receipts import Accepted
from delayd.errors import DelaydError, LogId, OutcomeUnknown, SendHandle, SlowDown, error_by_code
from delayd.gateway.connection import HttpConnection, Listener
from delayd.gateway.once import TOKEN, OnceRequests
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.sends import send
from delayd.outcome import MessageState
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from delayd.wire.asked import Asked, AskedWindow, Piece, decode_answers, encode_asked, read_piece
from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from tests.worlds.delay import TARGET_IDS, Answer, World, new_world, small_slots

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
HOST = "once-lives"
TIMEOUT_MS = 30_000
SUBJECTS = ("orders", "mail")
NAMES = (b"a", b"b", b"c", b"\xff\xfe")  # The last one is no UTF-8.
DELAYS_MS = (0, 0, 400, 5_000, 2 * HOUR_MS, 30 * HOUR_MS, 50 * HOUR_MS)
KEYS = ("k", "l")
WAYS = (None, None, *PowerLoss)
KINDS = ("one", "one", "raw", "keyed", "list", "stream")
SENT = (MessageState.PENDING, MessageState.IN_FLIGHT, MessageState.DISPATCHED, MessageState.REPLACED)
FUZZ_MS = 120_000  # A batch is bound up to so long before it is accepted, and a clock is known to some milliseconds.
UNDER_WAY_MS = 8_000  # With a pause of 20 s behind it, a batch is accepted before its sender has given up.
HEAL_TURNS = 3_000

Told = dict[str, Any]
"""A receipt or a problem, as JSON."""


class Wish(NamedTuple):
    """A request that a caller makes under a name; each of its messages has a body of its own."""

    kind: str
    subject: str
    messages: tuple[Told, ...]


class Ask(NamedTuple):
    """One time that it was made."""

    name: tuple[str, bytes]
    wish: Wish
    begun_ms: int
    task: asyncio.Task[list[Told]]


class Heard(NamedTuple):
    """Its answer: one for each message, or one alone."""

    ask: Ask
    at_ms: int
    told: list[Told]


class Parcel:
    """A batch on its way: it may arrive several times, and its answer may be lost each time."""

    def __init__(self, number: int, rows: Recorded, data: bytes, bound_ms: int) -> None:
        self.number, self.rows, self.data, self.bound_ms = number, rows, data, bound_ms
        self.answers: list[Answer | DelaydError] | None = None  # Of its last arrival, once they are there.
        self.given_up = False


class Clock(HomeClock):
    """The clocks of the machine on which a life takes place."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def delay_us(self) -> int:
        return self._life.world.clock.monotonic_ms() * 1_000

    def wall_ms(self) -> int:
        return self._life.world.clock.now_ms()


class Gateway:
    """One life of a gateway: what answers its callers, and its way to the delay server."""

    def __init__(self, life: Life, number: int) -> None:
        self.life = life
        self.producer_id = number
        self.gathering = Recorded()
        self.parcels: list[Parcel] = []
        self.questions: list[tuple[Callable[[], Awaitable[object]], asyncio.Future[None]]] = []
        self.tasks: list[asyncio.Task[list[Told]]] = []
        self.is_dead = False
        self.server_clock = ServerClock(HOST)
        self._last = 0
        self.hear_clock()
        checked = CheckedSends(f"{HOST}:1")
        self.once = OnceRequests(OnceSends(self, self, checked, TIMEOUT_MS))  # type: ignore[arg-type]

    def hear_clock(self) -> None:
        """An answer says what the server's clock shows."""
        now_us = self.life.clock.delay_us()
        self.server_clock.sample(now_us, now_us, self.life.world.clock.now_ms(), self.life.clock.wall_ms() * 1_000)

    def add_recorded(self, send: RecordedSend) -> None:
        """See Outbox."""
        if not self.is_dead:
            self.gathering.add(send)

    def leave(self) -> None:
        """Bind what was gathered."""
        if self.gathering.count:
            rows, self.gathering = self.gathering, Recorded()
            self._last += 1
            low = min([parcel.number for parcel in self.parcels], default=self._last)
            part = ProducerPart(self.producer_id, self._last, low)
            data = b"".join(rows.encode(part, self.server_clock, self.life.log_id))
            self.parcels.append(Parcel(self._last, rows, data, self.life.now_ms))

    def arrive(self, parcel: Parcel) -> None:
        """The bytes of a parcel come to the server."""
        self.life.found["arrivals"] += 1
        parcel.answers = self.life.world.begin(RequestType.SEND, body=parcel.data)

    def hear(self, parcel: Parcel) -> None:
        """The answer to a parcel comes, if there is one."""
        if not parcel.answers:
            return
        (answer,) = parcel.answers
        parcel.answers = None
        self.hear_clock()
        error = answer if isinstance(answer, DelaydError) else None
        if not isinstance(answer, DelaydError):
            (result,) = need_maps(answer[0], "results")
            if "error" not in result:
                self.parcels.remove(parcel)
                if not parcel.given_up:
                    parcel.rows.accept(_accepted(self.life.log_id, result, answer[1]))
                return
            error = error_by_code(str(result["error"]), str(result["message"]), 0, {})
        assert error is not None, "it is refused"
        self.life.found[f"refused {error.code}"] += 1
        assert isinstance(error, SlowDown), error
        # It is sent again, or its time is up: of a refused batch nothing is kept.
        if self.life.random.random() < 0.3:
            self.parcels.remove(parcel)
            if not parcel.given_up:
                parcel.rows.fail(error)

    def give_up(self, parcel: Parcel) -> None:
        """Its time is up, and nobody knows whether it is kept; its bytes may be under way still."""
        if not parcel.given_up:
            parcel.given_up = True
            handle = SendHandle(self.life.log_id, self.producer_id, parcel.number)
            parcel.rows.fail(OutcomeUnknown("no answer came", handle))

    async def find(self, log_id: int, window: AskedWindow) -> Piece:
        """See Asker."""
        head, body = await self._ask(RequestType.FIND, window.to_head(log_id))
        return read_piece(head, body)

    async def get_one(self, one: AskedOne) -> MessageInfo:
        """See Asker."""
        assert isinstance(one.asked, tuple), "it is asked by its receipt"
        sequence, due_ms, accepted_ms = one.asked
        asked = Asked(np.array([sequence], np.uint64), np.array([due_ms]), np.array([accepted_ms]))
        head = {"log_id": one.log_id, "subject": one.subject.decode()}
        _, body = await self._ask(RequestType.GET, head, encode_asked(asked))
        info: MessageInfo = info_of(decode_answers(body)[0])
        return info

    async def _ask(self, kind: RequestType, head: Any, body: bytes = b"") -> Answer:
        """Ask until an answer comes, whoever dies meanwhile."""
        while True:
            turn = asyncio.get_running_loop().create_future()
            if not self.is_dead:
                self.life.turns.append(turn)
            await turn
            answers = self.life.world.begin(kind, head, body)
            self.life.world.settle()
            if answers and not isinstance(answers[0], DelaydError):
                return answers[0]

    async def post(self, name: tuple[str, bytes], wish: Wish) -> list[Told]:
        """POST a request; what is told of each message, or of all."""
        headers = [(b"idempotency-key", name[1])]
        if wish.kind == "raw":
            (message,) = wish.messages
            body, query = message["body"].encode(), f"delay_ms={message['delay_ms']}".encode()
        else:
            kind, query = b"application/x-ndjson" if wish.kind == "stream" else b"application/json", b""
            headers.append((b"content-type", kind))
            made: object = list(wish.messages) if wish.kind in ("list", "stream") else wish.messages[0]
            lines = made if isinstance(made, list) and wish.kind == "stream" else [made]
            body = b"\n".join(json.dumps(each).encode() for each in lines)
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": query}
        scope[TOKEN] = name[0]
        receive = Caller(body).receive
        sent: list[bytes] = []

        async def out(message: Any) -> None:
            sent.append(message.get("body", b""))

        try:
            request = Request(scope, receive)
            listener_of = partial(Listener, request, set())
            response = await send(None, self.once, wish.subject, request, listener_of)  # type: ignore[arg-type]
            await response(scope, receive, out)
        except (DelaydError, Refusal) as error:
            return [problem(error)]
        text = b"".join(sent)
        if wish.kind == "stream":
            return [json.loads(line) for line in text.splitlines()]
        found = json.loads(text)
        return found if isinstance(found, list) else [found]

    def die(self) -> None:
        """Nobody hears anything more; what is under way may arrive."""
        self.is_dead = True
        for parcel in self.parcels:
            parcel.given_up = True
        for task in self.tasks:
            task.cancel()


class Caller(RequestResponseCycle):
    """A caller that sends one body and reads the whole answer, as a gateway's connection has it, without a socket."""

    def __init__(self, body: bytes) -> None:
        self._incoming = {"type": "http.request", "body": body, "more_body": False}
        self.flow = FlowControl(asyncio.Transport())
        self.disconnected = False
        self.on_response = HttpConnection.__new__(HttpConnection).on_response_complete

    async def receive(self) -> Any:
        """Its body in one piece."""
        return self._incoming


class Life:
    """One life, from its seed."""

    def __init__(self, seed: int, steps: int) -> None:
        self.random = Random(seed)
        self.found: Counter[str] = Counter(lives=1)
        self.turns: list[asyncio.Future[None]] = []  # Of questions that wait to be asked.
        self.clock = Clock(self)
        settings: dict[str, Any] = {
            "checkpoint_every_ms": self.random.choice((300, 2_000, 60_000)),
            "load_ahead_ms": self.random.choice((500, 4_000)),
            "segment_bytes": self.random.choice((4_096, 65_536)),
        }
        start_ms = START_MS + HOUR_MS - self.random.choice((2_000, 2_000_000))
        self.world = World(new_world(TARGET_IDS[:1], start_ms), seed=seed, **settings)
        self.world.settle()
        self.log_id = LogId(self.world.server.log_id)
        self.asks: list[Ask] = []
        self.heard: list[Heard] = []
        self._steps = steps
        self._followed = 0  # Of so many answers the receipts were followed.
        self._producers = 1 << 32
        self._wishes = {name: [self._drawn(name, at) for at in range(2)] for name in self._names()}
        self.gateways: list[Gateway] = []
        self.late: list[Gateway] = []  # Dead ones, of which parcels are under way.

    @property
    def now_ms(self) -> int:
        """By the server's clock."""
        return self.world.clock.now_ms()

    def live(self) -> Counter[str]:
        """Live it, judge it, and return what was counted."""
        with _clock_of(self.clock):
            asyncio.run(self._live())
        return self.found

    async def _live(self) -> None:
        self.gateways = [self._gateway() for _ in range(2)]
        kinds: Sequence[tuple[int, Callable[[], int | None]]] = (
            (24, self.ask),
            (6, self.ask_twice),
            (24, self.leave),
            (24, self.arrive),
            (24, self.hear),
            (16, self.questions),
            (16, self.move),
            (24, self.settle),
            (4, self.give_up),
            (8, self.pass_time),
            (1, self.pass_hours),
            (1, self.pass_a_day),
            (3, self.checkpoint),
            (2, self.sweep),
            (2, self.server_dies),
            (1, self.gateway_dies),
        )
        weights = [weight for weight, _ in kinds]
        for _ in range(self._steps):
            (kind,) = self.random.choices([kind for _, kind in kinds], weights)
            if (jump_ms := kind()) is not None:
                await self._jump(jump_ms)
            await self._run()
        await self._end()
        self._judge()

    async def _run(self) -> None:
        """Let the gateways do what they can."""
        for _ in range(12):
            await asyncio.sleep(0)
        for ask in [each for each in self.asks if each.task.done()]:
            self.asks.remove(ask)
            if not ask.task.cancelled():
                self.heard.append(Heard(ask, self.now_ms, ask.task.result()))
                self.found["answers"] += 1
            else:
                self.heard.append(Heard(ask, self.now_ms, [{"status": 504}]))

    # Steps.

    def ask(self) -> None:
        """A caller asks for something under a name."""
        name = self.random.choice([*self._wishes])
        wish = self.random.choices(self._wishes[name], (4, 1))[0]
        self._post(self.random.choice(self.gateways), name, wish)

    def ask_twice(self) -> None:
        """The same is asked for at both gateways."""
        name = self.random.choice([*self._wishes])
        for gateway in self.gateways:
            self._post(gateway, name, self._wishes[name][0])

    def leave(self) -> None:
        for gateway in self.gateways:
            gateway.leave()

    def arrive(self) -> None:
        """Batches come to the server."""
        for gateway in self._all():
            for parcel in list(gateway.parcels):
                if self.random.random() < 0.6:
                    gateway.arrive(parcel)

    def hear(self) -> None:
        for gateway in self._all():
            for parcel in list(gateway.parcels):
                if self.random.random() < 0.7:
                    gateway.hear(parcel)
                elif parcel.answers:
                    parcel.answers = None
                    self.found["answers lost"] += 1

    def questions(self) -> None:
        turns, self.turns = self.turns, []
        for turn in turns:
            if not turn.done():
                turn.set_result(None)

    def move(self) -> None:
        for _ in range(self.random.choice((1, 3, 10))):
            moves = self.world.moves()
            if moves:
                self.random.choice(moves)()
        self.world.server.wake()

    def settle(self) -> None:
        self.world.settle()

    def give_up(self) -> None:
        for gateway in self.gateways:
            for parcel in gateway.parcels:
                if self.random.random() < 0.3:
                    gateway.give_up(parcel)
                    self.found["given up"] += 1

    def pass_time(self) -> None:
        self.world.pass_ms(self.random.choice((1, 300, 2_000, 20_000)))
        self._drop_old()

    def pass_hours(self) -> int:
        return self.random.choice((HOUR_MS, 5 * HOUR_MS))

    def pass_a_day(self) -> int:
        """To about the end of records."""
        return DAY_MS + self.random.choice((-60_000, -1_000, 0, 1_000, 60_000))

    def checkpoint(self) -> None:
        self.world.server.checkpoint(lambda offset: None)

    def sweep(self) -> None:
        self.world.server.sweep()

    def server_dies(self) -> None:
        """Whatever was under way to it is lost, or arrives in its next life."""
        self.found["kills"] += 1
        for gateway in self._all():
            for parcel in gateway.parcels:
                parcel.answers = None
        self.world = self.world.after_crash(self.random.choice(WAYS), self.random.randrange(1 << 16))

    def gateway_dies(self) -> None:
        """Another one takes its place."""
        self.found["gateways killed"] += 1
        number = self.random.randrange(2)
        dead = self.gateways[number]
        dead.die()
        self.late.append(dead)
        self.gateways[number] = self._gateway()

    # Parts of steps.

    def _all(self) -> list[Gateway]:
        return [*self.gateways, *self.late]

    def _gateway(self) -> Gateway:
        self._producers += 1
        return Gateway(self, self._producers)

    def _post(self, gateway: Gateway, name: tuple[str, bytes], wish: Wish) -> None:
        task = asyncio.get_running_loop().create_task(gateway.post(name, wish))
        gateway.tasks.append(task)
        self.asks.append(Ask(name, wish, self.now_ms, task))
        self.found["asks"] += 1

    async def _jump(self, ms: int) -> None:
        """Time passes in which nothing is under way: nobody waits for so long."""
        await self._finish()
        self.found["jumps"] += 1
        self.world.clock.advance(ms)
        self.world.pass_ms(1_500)

    def _drop_old(self) -> None:
        """No bytes are under way for so long."""
        for gateway in self._all():
            for parcel in list(gateway.parcels):
                if parcel.bound_ms + UNDER_WAY_MS < self.now_ms:
                    gateway.give_up(parcel)
                    gateway.parcels.remove(parcel)

    def _names(self) -> Iterator[tuple[str, bytes]]:
        for token in ("", "token"):
            for name in NAMES:
                yield token, name

    def _drawn(self, name: tuple[str, bytes], at: int) -> Wish:
        kind = self.random.choice(KINDS)
        count = self.random.randint(1, 4) if kind in ("list", "stream") else 1
        messages: list[Told] = []
        for number in range(count):
            message: Told = {"body": f"{name} {at} {number}", "delay_ms": self.random.choice(DELAYS_MS)}
            if kind == "keyed" or (count > 1 and self.random.random() < 0.3):
                message["key"] = self.random.choice(KEYS)
                message["on_conflict"] = self.random.choice(("reject", "keep", "replace"))
            messages.append(message)
        return Wish(kind, self.random.choice(SUBJECTS), tuple(messages))

    # The end.

    async def _finish(self) -> None:
        """All that was asked for is answered."""
        for _ in range(HEAL_TURNS):
            self.leave()
            for gateway in self._all():
                for parcel in list(gateway.parcels):
                    if parcel.answers is None:
                        gateway.arrive(parcel)
            self.world.settle()
            for gateway in self._all():
                for parcel in list(gateway.parcels):
                    gateway.hear(parcel)
            self.questions()
            await self._run()
            if not self.asks and not any(gateway.parcels for gateway in self._all()):
                self._follow_receipts()
                return
            self.world.pass_ms(100)
        raise AssertionError(f"never answered: {self.asks}")

    def _follow_receipts(self) -> None:
        """Each receipt leads to its message, which was sent: a message that was refused has none."""
        for heard in self.heard[self._followed :]:
            for told in heard.told:
                if "id" in told:
                    asked = Asked(
                        np.array([told["sequence"]], np.uint64),
                        np.array([told["deliver_at_ms"]]),
                        np.array([told["accepted_at_ms"]]),
                    )
                    _, body = self.world.ask(RequestType.GET, {"log_id": self.log_id}, encode_asked(asked))
                    state = info_of(decode_answers(body)[0]).state
                    self.found[f"receipts of {state.name.lower()}"] += 1
                    assert state in SENT, f"{heard.ask} was told {told}, which is {state.name}"
        self._followed = len(self.heard)

    async def _end(self) -> None:
        """All that is due comes."""
        await self._finish()
        for _ in range(40):
            self.world.clock.advance(2 * HOUR_MS)
            self.world.pass_ms(700)
        self.world.delete_hours()

    def _judge(self) -> None:
        self._judge_answers()
        self._judge_deliveries()
        self.world.check_sealing()

    def _judge_answers(self) -> None:
        """Hold the answers against each other."""
        by_place: defaultdict[tuple[tuple[str, bytes], int], list[tuple[Heard, Told]]] = defaultdict(list)
        for heard in self.heard:
            wish = heard.ask.wish
            if len(heard.told) != len(wish.messages):
                (told,) = heard.told
                self._is_refused(heard, told)
                continue
            for place, told in enumerate(heard.told):
                if "id" in told:
                    by_place[heard.ask.name, place].append((heard, told))
                else:
                    self._is_refused(heard, told)
        for answers in by_place.values():
            firsts: dict[int, Told] = {}
            for number, (heard, told) in enumerate(answers):
                if not told.get("kept"):
                    first = firsts.setdefault(told["sequence"], told)
                    assert _lasting(first) == _lasting(told), f"{first} was told, then {heard}"
                until_ms = self._kept_from(heard, told) + DAY_MS - FUZZ_MS
                for later, again in answers[number + 1 :]:
                    if later.at_ms < until_ms:
                        self.found["answers again"] += 1
                        same = _lasting(told) == _lasting(again) and later.ask.wish == heard.ask.wish
                        assert same, f"{heard.ask} was told {told} at {heard.at_ms}, then {later.ask} {again}"

    def _kept_from(self, heard: Heard, told: Told) -> int:
        """The instant of a record that is behind an answer; an earlier one where the answer does not show it."""
        if heard.ask.wish.kind in ("one", "raw"):
            return int(told["accepted_at_ms"])
        # The record of the whole request may be older than the one of the message.
        name, since_ms = heard.ask.name, heard.ask.begun_ms - 2 * DAY_MS
        return min(each.ask.begun_ms for each in self.heard if each.ask.name == name and each.ask.begun_ms >= since_ms)

    def _is_refused(self, heard: Heard, told: Told) -> None:
        """Whether a request, or one message of it, could be refused so."""
        code = told.get("code", "unknown")
        self.found[f"told {code}"] += 1
        wish = heard.ask.wish
        if code == "other_request":
            others = [
                each.ask.begun_ms
                for each in [*self.heard]
                if each.ask.name == heard.ask.name and each.ask.wish != wish and each.ask.begun_ms <= heard.at_ms
            ]
            assert others, f"{heard} was told so, and nobody has asked for anything else"
        elif code == "key_pending" or code == "in_flight":
            keyed = [message for message in wish.messages if "key" in message]
            assert keyed, f"{heard} was told so, and has no key"
        else:
            assert code in ("under_way", "unknown", "outcome_unknown", "slow_down"), heard

    def _judge_deliveries(self) -> None:
        """Hold what was handed over against the answers."""
        delivered: defaultdict[bytes, list[int]] = defaultdict(list)
        for target in self.world.outside.targets.values():
            for kept in target.log:
                for body, due_ms in zip(kept.bodies, kept.deliver_at_ms, strict=True):
                    delivered[body].append(due_ms)
        named: defaultdict[bytes, set[int]] = defaultdict(set)
        vain: Counter[bytes] = Counter()
        for heard in self.heard:
            messages = heard.ask.wish.messages
            for place, message in enumerate(messages):
                told = heard.told[place] if len(heard.told) == len(messages) else heard.told[0]
                if "id" in told:
                    if not told.get("kept"):
                        named[message["body"].encode()].add(told["sequence"])
                elif told.get("code") not in ("other_request", "under_way"):
                    vain[message["body"].encode()] += 1
        for wishes in self._wishes.values():
            for wish in wishes:
                for message in wish.messages:
                    body = message["body"].encode()
                    dues = sorted(delivered.pop(body, []))
                    self.found["delivered"] += len(dues)
                    what = f"{body!r} was handed over for {dues}, answers name {named[body]}"
                    assert all(later - earlier >= DAY_MS - FUZZ_MS for earlier, later in pairwise(dues)), what
                    assert len(dues) <= len(named[body]) + vain[body], what
                    if "key" not in message:
                        assert len(dues) >= len(named[body]), what
        assert not delivered, f"nobody has asked for {delivered}"


def _lasting(told: Told) -> Told:
    return {name: value for name, value in told.items() if name not in ("duplicate", "replaced")}


def _accepted(log_id: LogId, result: Any, body: bytes) -> Accepted:
    return Accepted(
        log_id, result["base_sequence"], result["count"], result["appended_at_ms"], result["duplicate"], body
    )


@contextmanager
def _clock_of(clock: HomeClock) -> Iterator[None]:
    end = set_clock(HOST, clock)
    try:
        yield
    finally:
        end()


def lives(seeds: Iterable[int], steps: int = 250) -> Counter[str]:
    """Live some lives, and sum up; AssertionError with the seed when a promise is broken."""
    total: Counter[str] = Counter(lives=0)
    with small_slots():
        for seed in seeds:
            try:
                total.update(Life(seed, steps).live())
            except Exception as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return total


def _lives(given: tuple[range, int]) -> Counter[str]:
    logging.disable(logging.CRITICAL)
    return lives(*given)


def main() -> int:
    """Live as many as are asked for, and print the account."""
    parser = argparse.ArgumentParser(description="Lives of requests that are done once.")
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    last = options.first + options.seeds
    parts = [(range(first, min(first + 20, last)), options.steps) for first in range(options.first, last, 20)]
    begun, wrong = time.monotonic(), 0
    total: Counter[str] = Counter()
    with get_context("spawn").Pool(options.jobs) as pool:
        for found in [pool.apply_async(_lives, (part,)) for part in parts]:
            try:
                total.update(found.get())
            except AssertionError as error:
                wrong += 1
                print(error, flush=True)
    print(f"{options.seeds} seeds in {time.monotonic() - begun:.0f} s, {wrong} parts of twenty wrong:", end=" ")
    print(", ".join(f"{name} {count:,}" for name, count in sorted(total.items())))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
