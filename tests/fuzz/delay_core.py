"""Random and hostile requests to a delay server's core, beside a model of what is true (rules B2, C1, E1).

No process, no socket and no thread: a world in memory whose steps come one by one, so a seed repeats a run exactly.
Honest callers send messages and cancel, move and ask about them, by receipt and by key, now and then with receipts that
they have made up; hostile ones send what the fuzzer draws. Now and then an answer is lost, a target is silent for a
while, and the server is stopped, killed or loses its power: then honest callers ask again, with the same bytes.
Afterwards everybody has left, and

- each request was answered once, and by name if it was refused;
- each answer was true: what it says of a message agrees with what was answered before and with what targets hold;
- an ending was told as the same one each time, and a change that was asked again was done once: it undid nothing that
  others had done since;
- each counter of what requests hold is 0;
- no turn of the loop took longer than `TURN_MS_MAX` of processor time.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import numpy as np

from delayd import Recurrence
from delayd.batch.columns import Buffer, ProducerPart
from delayd.delay.requests import Requests
from delayd.errors import BadRequest, DelaydError, NoRecurring, RecurringConflict, RetryLater
from delayd.hours import INSTANT_MS_MAX
from delayd.outcome import MessageState
from delayd.recurrence.deciding import RunPolicy
from delayd.testing.clock import START_MS
from delayd.testing.executor import StepExecutor
from delayd.testing.tree import PowerLoss
from delayd.wire.asked import (
    AnswerRows,
    Asked,
    AskedKeys,
    AskedWindow,
    CancelAnswer,
    RescheduleAnswer,
    decode_answers,
    encode_asked,
    encode_asked_keys,
    read_piece,
)
from delayd.wire.frame import Frame, FrameReader, HeadValue
from delayd.wire.heads import (
    need_int,
    need_maps,
    need_u64,
)
from delayd.wire.recurring import RecurringRequest, RecurringSpec, RecurringWish, body_of
from delayd.wire.requests import DELAY_LIMITS, RequestType
from tests.batches import messages
from tests.worlds.delay import TARGET_IDS, World

from . import requests as hostile
from .fields import Read, watched

TURN_MS_MAX = 20.0
HOUR_MS = 3_600_000
SUBJECT = b"truth"
HELD = ("queued_bytes", "asked_rows", "asked_copies", "key_look_ups", "find_pieces", "owed_rows")
PEERS = 6
STEPS_A_REQUEST = 6  # So much of what could happen next does happen between two requests.
MESSAGES_KEPT = 3_000
REST_STEPS = 30  # Of up to 100 ms.
WRITTEN_WITHIN_MS = 3_000  # The outcome of a message is durable by then, after the message was handed over.
REST_EVERY = 2_000  # Requests; then all that is pending is listed and compared.
DUE_AFTER_MS = (0, 7, 1_003, 60_007, HOUR_MS + 7, 30 * HOUR_MS + 7)
FAR_MS = 400 * HOUR_MS
LOST = 0.1  # So many answers are lost.
ENDS = 0.002  # So often does a life of the server end, and a target become silent.
TRIES_MAX = 100  # Then a caller gives up, and nobody knows what became of the request.
ASKER = 0xA5
ENDINGS = (MessageState.CANCELLED, MessageState.DISPATCHED)
CHANGES = (RequestType.CANCEL, RequestType.RESCHEDULE)
MOVED = RescheduleAnswer.MOVED
STOPS = frozenset(
    {
        RequestType.RELEASE_SLOTS,
        RequestType.RETIRE,
        RequestType.TARGET_LOST,
        RequestType.TARGET_ACCEPT,
    }
)


Answered = tuple[Mapping[str, HeadValue] | DelaydError, bytes]


class Untrue(AssertionError):
    """An answer says what is not so."""


@dataclass(slots=True, eq=False)
class Message:
    """What is known of a message of an honest caller."""

    body: bytes
    key: bytes
    due_ms: int
    receipts: list[tuple[int, int, int]] = field(default_factory=list)  # The first one, and those of moves.
    cancelled: bool = False
    busy: bool = False  # A request that changes it is under way.
    ended: tuple[int, ...] = ()  # How its ending was told first.
    ender: Ask | None = None  # The request that cancelled it.
    next_has_key: bool = False  # Whether another message has got its key since.


Heard = Callable[["Ask", Mapping[str, HeadValue] | DelaydError, bytes], bool]


@dataclass(slots=True, eq=False)
class Ask:
    """A request of an honest caller, until the caller has its answer."""

    kind: RequestType
    head: dict[str, HeadValue]
    body: bytes
    heard: Heard  # Whether something is still open.
    chosen: list[Message] = field(default_factory=list)
    calm: set[int] = field(default_factory=set)  # Those of them that no other request changes.
    moved: dict[int, tuple[int, ...]] = field(default_factory=dict)  # The receipts that it was told, by message.
    made: set[int] = field(default_factory=set)  # The messages that it has moved, not only found where it wanted them.
    number: int = 0  # The first one of its tries, if it has any.
    tries: int = 0
    is_lost: bool = False  # An answer to it was lost, or a life of the server ended meanwhile.

    @property
    def is_done(self) -> bool:
        """Whether it is a move that was done: others may change its messages, and it changes them no more."""
        return self.kind is RequestType.RESCHEDULE and len(self.made) == len(self.chosen) > 0


class Peer:
    """One connection; what it has asked and what it was answered."""

    entry = None  # It has no token.

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reader = FrameReader(room=DELAY_LIMITS.plain)
        self._reader.room_by_type = DELAY_LIMITS.by_type_trusted
        self._asked: dict[int, Callable[[Mapping[str, HeadValue] | DelaydError, bytes], None]] = {}
        self._next_id = 0
        self.source = hostile.Requests("delay", run.random, START_MS)

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def send(self, data: bytes, heard: Callable[[Mapping[str, HeadValue] | DelaydError, bytes], None]) -> bool:
        """Send the bytes of one request; whether the connection goes on."""
        buffer = self._reader.get_buffer()
        while data:
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            data = data[size:]
            for frame in self._reader.received(size):
                self._asked[frame.request_id] = heard
                self._run.serve(self, frame)
            if self._reader.fault is not None:
                return False
            buffer = self._reader.get_buffer()
        return not self._reader.unfinished_bytes

    @property
    def owed(self) -> int:
        return len(self._asked)

    def answer(self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = ()) -> None:
        self._run.counts["answered"] += 1
        self._run.judge(partial(self._asked.pop(request_id), head, b"".join(body)))

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        self._run.counts["refused"] += 1
        self._run.counts[f"refused {error.code}"] += 1
        self._run.judge(partial(self._asked.pop(request_id), error, b""))


class Run:
    """One run over one world."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.counts: Counter[str] = Counter()
        self.read: Read = set()  # The fields that the core has read, by the type of their request.
        self.turn_ms = 0.0
        self._judged_s = 0.0  # Processor time that the model has taken inside of turns.
        self.slowest = ""
        self._world = World(load_ahead_ms=60_000, segment_bytes=4 << 20, seed=seed)
        self._soon: deque[Callable[[], None]] = deque()
        core = self._world.core
        self._log_id = core.site.identity.log_id
        self._requests = Requests(core, core.site.clock, dict, self._soon.append)  # type: ignore[arg-type]
        self._peers = [Peer(self) for _ in range(PEERS)]
        self._messages: list[Message] = []
        self._of_sequence: dict[int, Message] = {}
        self._held: dict[bytes, int] = {}  # By body: how often targets have it.
        self._batches_seen = dict.fromkeys(TARGET_IDS, 0)
        self._number = 0
        self._at_rest = False
        self._tries = 0  # Numbers of changes by key.
        self._open: list[Ask] = []  # Under way.
        self._again: deque[Ask] = deque()  # Those whose answers were lost.

    def requests(self, count: int) -> None:
        """Make so many requests, then let everybody leave, and judge what is left."""
        honest = [self._send, self._ask_receipts, self._ask_receipts, self._ask_keys, self._outcome, self._recur]
        gc.collect()
        gc.disable()
        try:
            number = 0
            while self.counts["requests"] < count:
                number += 1
                if self.random.random() < 0.5:
                    self._hostile()
                else:
                    self.random.choice(honest)()
                self._step(self.random.randrange(STEPS_A_REQUEST))
                if self._again and self.random.random() < 0.3:
                    self._try(self._again.popleft())
                if self.random.random() < ENDS:
                    self._end_life()
                if self.random.random() < ENDS:
                    self._target_is_silent()
                if self.random.random() < 0.02:
                    self._pass(self.random.choice((1, 40, 700, 5_000)))
                if number % REST_EVERY == 0:
                    self._compare_all()
                    gc.collect()
        finally:
            gc.enable()
        self._compare_all()
        self._leave()

    # Turns of the loop.

    def serve(self, peer: Peer, frame: Frame) -> None:
        """Give a request to the core, as the connection of a server does."""
        self.counts["requests"] += 1
        try:
            if frame.fault is not None:
                raise frame.fault
            if frame.body and frame.type not in DELAY_LIMITS.bodies:
                raise BadRequest("it has no body")
            self._turn(lambda: self._requests.received(peer, watched(frame, self.read)), f"request {frame.type}")
        except DelaydError as error:
            peer.answer_error(frame.request_id, error)

    def judge(self, hear: Callable[[], object]) -> None:
        """Have an answer judged; that takes no time of the server."""
        began = time.thread_time()
        try:
            hear()
        finally:
            self._judged_s += time.thread_time() - began

    def _turn(self, call: Callable[[], object], name: str) -> None:
        began = time.thread_time() - self._judged_s
        try:
            call()
        finally:
            took_ms = 1_000 * (time.thread_time() - self._judged_s - began)
            if took_ms > self.turn_ms:
                self.turn_ms, self.slowest = took_ms, name

    def _step(self, steps: int) -> None:
        """Let some of what could happen next happen; only the loop's own part of it is measured."""
        world = self._world
        for _ in range(steps):
            if self._soon and self.random.random() < 0.5:
                self._turn(self._soon.popleft(), "soon")
                continue
            moves = world.moves()
            if not moves:
                self._turn(world.core.wake, "wake")
                moves = world.moves()
                if not moves:
                    return
            self._move(self.random.choice(moves))

    def _move(self, move: Callable[[], None]) -> None:
        name = getattr(move, "__name__", "")
        if name in ("run_one", "sync", "carry_up"):
            move()  # On another thread, or in another process.
        else:
            self._turn(move, _name(move))

    def _settle(self) -> None:
        world = self._world
        while True:
            if self._soon:
                self._turn(self._soon.popleft(), "soon")
                continue
            move = world.next_move()
            if move is None:
                self._turn(world.core.wake, "wake")
                move = world.next_move()
                if move is None:
                    if not self._soon:
                        world._forget_ended()
                        return
                    continue
            self._move(move)

    def _pass(self, ms: int) -> None:
        """Let time pass."""
        world = self._world
        end = world.clock.monotonic_ms() + ms
        while (left := end - world.clock.monotonic_ms()) > 0:
            world.clock.advance(max(1, min(left, world.idle_ms())))
            world.look_around()
            self._turn(world.core.wake, "wake")
            self._step(20)

    def _rest(self) -> None:
        """Let everything come to its end that is under way, and time pass for what is written a little later."""
        for target in self._world.outside.targets.values():
            target.hangs = False
        self._settle()
        steps = 0
        while steps < REST_STEPS or self._again:
            steps += 1
            for _ in range(len(self._again)):
                self._try(self._again.popleft())
            self._world.clock.advance(max(1, min(100, self._world.idle_ms())))
            self._world.look_around()
            self._turn(self._world.core.wake, "wake")
            self._settle()

    def _end_life(self) -> None:
        """The server is stopped, killed, or loses its power, and the next one takes up what is left."""
        way = self.random.choice((None, None, *PowerLoss))
        if way is None and self.random.random() < 0.5:
            self._world.stop()
        self.counts["lives"] += 1
        self._world = self._world.after_crash(way, self.random.getrandbits(16))
        self._soon.clear()
        core = self._world.core
        self._requests = Requests(core, core.site.clock, dict, self._soon.append)  # type: ignore[arg-type]
        self._peers = [Peer(self) for _ in range(PEERS)]
        for ask in self._open:
            ask.is_lost = True
        self._again += self._open
        self._open = []

    def _target_is_silent(self) -> None:
        """A target answers nobody, or does so again; its connections may break besides."""
        log_id = self.random.choice(sorted(self._world.outside.targets))
        target = self._world.outside.targets[log_id]
        target.hangs = not target.hangs
        if self.random.random() < 0.5:
            self._world.cut(log_id, keep=self.random.randrange(3))

    # Hostile callers.

    def _hostile(self) -> None:
        peer = self.random.choice(self._peers)
        data = peer.source.drawn(peer.next_id(), None)
        kind = data[5] if len(data) > 5 else 0
        if kind == RequestType.DRAIN or (kind in STOPS and self.random.random() < 0.98):
            # What an operator takes away for good would leave little to ask about, and drained rows would be under way
            # for ever: no other delay server is there.
            return
        if not peer.send(data, lambda head, body: None) or self.random.random() < 0.002:
            self._end(peer)

    def _end(self, peer: Peer) -> None:
        """A connection goes away, with what it has asked under way; another one comes."""
        self._requests.disconnected(peer)
        self._peers[self._peers.index(peer)] = Peer(self)
        self._gone = peer

    # Honest callers.

    def _ask(self, kind: RequestType, head: dict[str, HeadValue], body: bytes, heard: Heard, **known: Any) -> None:
        self._try(Ask(kind, head, body, heard, **known))

    def _try(self, ask: Ask) -> None:
        ask.tries += 1
        peer = self.random.choice(self._peers)
        data = hostile.frame(ask.kind, peer.next_id(), hostile._packed(ask.head), ask.body)
        changes = ask.kind in CHANGES and not ask.is_done
        ask.calm = {id(each) for each in ask.chosen if changes or not each.busy}
        for each in ask.chosen if changes else ():
            each.busy = True
        self._open.append(ask)
        assert peer.send(data, partial(self._hear, ask)), "an honest request is whole"

    def _hear(self, ask: Ask, head: Mapping[str, HeadValue] | DelaydError, body: bytes) -> None:
        """Take an answer. One that is lost is judged all the same: the next one has to agree with it."""
        self._open.remove(ask)
        was_done = ask.is_done
        is_open = ask.heard(ask, head, body)
        is_lost = ask.kind in (*CHANGES, RequestType.SEND) and self.random.random() < LOST
        goes_on = is_lost or (is_open and ask.is_lost and ask.tries < TRIES_MAX)
        if ask.kind in CHANGES and not was_done:
            for each in ask.chosen:
                each.busy = goes_on and not ask.is_done
        if goes_on:
            ask.is_lost = True
            self.counts["asked again"] += 1
            self._again.append(ask)

    def _send(self) -> None:
        self._number += 1
        count = self.random.choice((1, 1, 2, 5, 40))
        now_ms = self._world.clock.now_ms()
        sent = [
            Message(
                b"%d-%d" % (self._number, row),
                b"%d-%d" % (self._number, row) if self.random.random() < 0.4 else b"",
                now_ms + self.random.choice((*DUE_AFTER_MS, FAR_MS + 7)),
            )
            for row in range(count)
        ]
        before = self._free_key()
        if before is not None and count < 5:
            sent[0].key, before.next_has_key = before.key, True
        keyed = any(each.key for each in sent)
        batch = messages(
            [each.body for each in sent],
            due=[each.due_ms for each in sent],
            keys=[each.key for each in sent] if keyed else None,
            subjects=[SUBJECT],
            part=ProducerPart(0xABC0_0000 + self._number % 7, self._number, 0),
        )

        def heard(ask: Ask, head: Mapping[str, HeadValue] | DelaydError, body: bytes) -> bool:
            if isinstance(head, DelaydError):
                raise Untrue(f"an honest SEND was answered {head!r}")
            (result,) = need_maps(dict(head), "results")
            if "error" in result:
                self.counts["own sends refused"] += 1
                return True
            base, at_ms = need_u64(result, "base_sequence"), need_int(result, "appended_at_ms")
            if sent[0].receipts:
                if sent[0].receipts[0] != (base, sent[0].due_ms, at_ms) and len(sent[0].receipts) == 1:
                    raise Untrue(f"{sent[0]} was accepted again as {base} at {at_ms}")
                return False
            for row, each in enumerate(sent):
                each.receipts.append((base + row, each.due_ms, at_ms))
                self._of_sequence[base + row] = each
            self._messages += sent
            for each in self._messages[:-MESSAGES_KEPT]:
                for sequence, _, _ in each.receipts:
                    self._of_sequence.pop(sequence, None)
            del self._messages[:-MESSAGES_KEPT]
            return False

        self._ask(RequestType.SEND, {}, batch, heard)

    def _free_key(self) -> Message | None:
        """A cancelled message whose key nobody asks about, but perhaps whoever has cancelled it and asks again."""
        waiting = (*self._again, *self._open)
        for ask in (ask for ask in waiting if ask.kind is RequestType.CANCEL):
            for each in ask.chosen:
                others = [other for other in waiting if other is not ask and each in other.chosen]
                if each.ender is ask and each.key and not each.next_has_key and not others:
                    return each
        return None

    def _outcome(self) -> None:
        number = self.random.randrange(1, self._number + 2)
        head: dict[str, HeadValue] = {
            "log_id": self._log_id,
            "producer_id": 0xABC0_0000 + number % 7,
            "producer_batch": number,
        }

        def heard(ask: Ask, head: Mapping[str, HeadValue] | DelaydError, body: bytes) -> bool:
            if isinstance(head, DelaydError):
                raise Untrue(f"an honest OUTCOME was answered {head!r}")
            return False

        self._ask(RequestType.OUTCOME, head, b"", heard)

    def _recur(self) -> None:
        """Ask of a schedule that nobody has made: each such request is refused for that, and changes nothing."""
        wish = self.random.choice((RecurringWish.PUT, RecurringWish.PAUSE, RecurringWish.RESUME, RecurringWish.RUN))
        is_put, is_run = wish is RecurringWish.PUT, wish is RecurringWish.RUN
        spec = RecurringSpec(Recurrence(cron="0 0 29 2 *"), RunPolicy(), SUBJECT.decode(), b"1") if is_put else None
        version, number = None if is_run else 3, self.random.randrange(1, 9) if is_run else 0
        note = "why" if wish is RecurringWish.PAUSE else ""
        request = RecurringRequest(wish, b"nobody's", version, spec, note, number)
        refused = RecurringConflict if is_put else NoRecurring

        def heard(ask: Ask, head: Mapping[str, HeadValue] | DelaydError, body: bytes) -> bool:
            if not isinstance(head, refused | RetryLater):
                raise Untrue(f"an honest {wish.name} of a schedule that is not there was answered {head!r}")
            return False

        body = b"" if spec is None else b"".join(body_of(spec.encode()))
        self._ask(RequestType.RECUR, request.to_head(self._log_id), body, heard)

    def _some(self, count: int, *, change: bool) -> list[Message]:
        free = [each for each in self.random.choices(self._messages, k=count) if not (change and each.busy)]
        return list(dict.fromkeys(free))

    def _ask_receipts(self) -> None:
        if not self._messages:
            return
        random = self.random
        kind = random.choice((RequestType.GET, RequestType.GET, RequestType.CANCEL, RequestType.RESCHEDULE))
        change = kind is not RequestType.GET
        chosen = self._some(random.choice((1, 1, 3, 30)), change=change)
        moved = [each for ask in self._again if ask.is_done for each in ask.chosen if not each.busy]
        if moved and random.random() < 0.5:
            # Somebody else changes them before the caller who has moved them asks again.
            kind, chosen = random.choice(CHANGES), list(dict.fromkeys(moved))
        rows: list[tuple[int, int, int]] = []
        meant: list[Message | None] = []
        for each in chosen:
            rows.append(random.choice(each.receipts))
            meant.append(each)
            if random.random() < 0.3:
                rows.append(self._made_up(each))
                meant.append(None)
        self._change(kind, chosen, rows, meant)

    def _made_up(self, message: Message) -> tuple[int, int, int]:
        """A receipt that nobody was given: of a message with another instant, perhaps of the row that it is now."""
        sequence, due_ms, at_ms = message.receipts[self.random.choice((0, -1))]
        if self.random.random() < 0.2:
            return self.random.randrange(1 << 40, 1 << 41), due_ms, at_ms
        return sequence, due_ms + self.random.choice((1, HOUR_MS)), at_ms

    def _change(
        self,
        kind: RequestType,
        chosen: list[Message],
        rows: list[tuple[int, int, int]],
        meant: list[Message | None],
        keys: list[bytes] | None = None,
    ) -> None:
        if not rows:
            return
        moves = kind is RequestType.RESCHEDULE
        instant_ms = self._world.clock.now_ms() + self.random.choice(DUE_AFTER_MS)
        wanted = np.full(len(rows), instant_ms, np.int64) if moves else None
        if keys is None:
            columns = np.array(rows, np.int64).T
            asked = Asked(columns[0].astype(np.uint64), columns[1].copy(), columns[2].copy())
            contradicts = len({row[0] for row in rows}) < len(set(rows))
            body = encode_asked(asked, wanted)
        else:
            contradicts = False
            numbers = range(self._tries + 1, self._tries + 1 + len(keys)) if kind in CHANGES else ()
            body = encode_asked_keys(AskedKeys(SUBJECT, keys, numbers), wanted)
        head: dict[str, HeadValue] = {"log_id": self._log_id}
        number = 0
        if (keys is not None and kind in CHANGES) or moves:
            number, self._tries = self._tries + 1, self._tries + len(keys or (1,))
            known = [ask.number for ask in (*self._open, *self._again) if ask.number]
            head |= {"asker": ASKER, "low_water": min(known, default=number)}
        if keys is None and moves:
            head["number"] = number

        def heard(ask: Ask, head: Mapping[str, HeadValue] | DelaydError, body: bytes) -> bool:
            if isinstance(head, DelaydError):
                fair = isinstance(head, RetryLater) or (contradicts and isinstance(head, BadRequest))
                if not fair:
                    raise Untrue(f"an honest {kind.name} was answered {head!r}")
                self.counts["own requests refused"] += 1
                return isinstance(head, RetryLater)
            is_open = False
            for answer, message in zip(decode_answers(body), meant, strict=True):
                state = MessageState(int(answer["state"]))
                self.counts[f"{kind.name} {state.name}"] += 1
                is_open |= message is not None and state is MessageState.IN_FLIGHT
                self._judge(ask, message, answer, instant_ms, by_key=keys is not None)
            return is_open

        self._ask(kind, head, body, heard, chosen=chosen, number=number)

    def _ask_keys(self) -> None:
        random = self.random
        if not self._messages:
            return
        kind = random.choice((RequestType.GET, RequestType.CANCEL, RequestType.RESCHEDULE))
        some = self._some(random.choice((1, 5, 20)), change=kind is not RequestType.GET)
        chosen = [each for each in some if each.key and not each.next_has_key]
        meant: list[Message | None] = [*chosen]
        keys = [each.key for each in chosen]
        if random.random() < 0.2:
            keys.append(b"nobody's")
            meant.append(None)
        self._change(kind, chosen, [(0, 0, 0)] * len(keys), meant, keys)

    # Truth.

    def _is_held(self, message: Message) -> bool:
        """Whether a target has a message."""
        for log_id, target in self._world.outside.targets.items():
            for kept in target.log[self._batches_seen[log_id] :]:
                for body in kept.bodies:
                    self._held[body] = self._held.get(body, 0) + 1
            self._batches_seen[log_id] = len(target.log)
        count = self._held.get(message.body, 0) if message.body else 0
        if count > 1:
            raise Untrue(f"{message.body!r} was delivered {count} times")
        if count and message.cancelled:
            raise Untrue(f"{message.body!r} was answered CANCELLED, and delivered")
        return bool(count)

    def _judge(
        self,
        ask: Ask,
        message: Message | None,
        answer: AnswerRows,
        instant_ms: int,
        *,
        by_key: bool,
    ) -> None:
        kind, calm = ask.kind, id(message) in ask.calm
        state, said = MessageState(int(answer["state"])), int(answer["answer"])
        if message is None:
            if state not in (MessageState.UNKNOWN, MessageState.IN_FLIGHT):
                raise Untrue(f"{kind.name} of a receipt that nobody was given: {state.name}")
            return
        if ask.is_done and id(message) in ask.moved:
            if state is not MessageState.IN_FLIGHT and (said, _receipt(answer)) != (MOVED, ask.moved[id(message)]):
                raise Untrue(f"{message} was moved as {ask.moved[id(message)]}, and then it was told {answer}")
            return
        due = message.due_ms <= self._world.clock.now_ms()
        held = self._is_held(message)

        def where() -> str:
            return f"{kind.name} of {message}: {state.name} {said}, held {held}"

        if by_key and state is MessageState.UNKNOWN and (message.cancelled or held):
            return  # A key is forgotten when its message has ended long ago.
        if state in (MessageState.UNKNOWN, MessageState.EXPIRED, MessageState.IN_DOUBT, MessageState.REJECTED):
            raise Untrue(where())
        # A message that fell due this moment has just left, and its outcome is written a little later.
        just_left = 0 <= self._world.clock.now_ms() - message.due_ms <= WRITTEN_WITHIN_MS
        if self._at_rest and state is MessageState.IN_FLIGHT and not just_left:
            raise Untrue(f"{where()}, and nothing is under way")
        if state in ENDINGS:
            names = ("decided_at_ms", "target_log_id", "target_offset", "target_appended_at_ms")
            ending = (state, *(int(answer[name]) for name in names))
            message.ended = message.ended or ending
            if message.ended != ending:
                raise Untrue(f"{where()}, an ending told as {ending}")
        if not calm:
            return  # It was asked beside a request that changes it, so either answer is right.
        if message.cancelled and state not in (MessageState.CANCELLED, MessageState.IN_FLIGHT):
            raise Untrue(where())
        # A target may have it by now, though it was pending when the answer was made.
        delivered = (MessageState.DISPATCHED, MessageState.IN_FLIGHT, MessageState.PENDING)
        if held and not message.cancelled and state not in delivered[: 2 if kind is RequestType.CANCEL else 3]:
            raise Untrue(where())
        if state is MessageState.DISPATCHED and not held:
            raise Untrue(where())
        if state is MessageState.CANCELLED and kind is not RequestType.CANCEL and not message.cancelled:
            raise Untrue(where())
        if not due and not held and not message.cancelled and kind is RequestType.GET:
            if state not in (MessageState.PENDING, MessageState.IN_FLIGHT):
                raise Untrue(where())
            if state is MessageState.PENDING and int(answer["deliver_at_ms"]) != message.due_ms:
                raise Untrue(f"{where()}, due at {answer['deliver_at_ms']}")
        if kind is RequestType.CANCEL and said == CancelAnswer.CANCELLED:
            message.ender = message.ender or (None if message.cancelled else ask)
            message.cancelled = True
            if not int(answer["decided_at_ms"]):
                raise Untrue(f"{where()}, without its instant")
        if kind is RequestType.RESCHEDULE and said == MOVED:
            if message.cancelled or int(answer["deliver_at_ms"]) != instant_ms:
                raise Untrue(f"{where()}, due at {answer['deliver_at_ms']} and wanted at {instant_ms}")
            message.due_ms = instant_ms
            receipt = _receipt(answer)
            if ask.moved.setdefault(id(message), receipt)[0] != receipt[0]:
                raise Untrue(f"{where()}, moved twice: to {ask.moved[id(message)]} and {receipt}")
            if receipt not in message.receipts:
                # The index of keys does not know when a row was accepted, so one row may have two receipts.
                if receipt[0] not in [known[0] for known in message.receipts]:
                    ask.made.add(id(message))
                message.receipts.append(receipt)
                self._of_sequence[receipt[0]] = message

    def _compare_all(self) -> None:
        """At rest: what FIND lists is what is pending, and each message is told as what it is."""
        self._rest()
        if any(each.busy for each in self._messages):
            raise Untrue("a request was never answered")
        found: set[int] = set()
        window: AskedWindow | None = AskedWindow(SUBJECT, 0, INSTANT_MS_MAX, rows_max=self.random.choice((200, 65_536)))
        while window is not None:
            told: list[Answered] = []
            self._ask(RequestType.FIND, window.to_head(self._log_id), b"", partial(_note, told))
            self._settle()
            ((head, body),) = told
            if isinstance(head, DelaydError):
                raise Untrue(f"FIND was answered {head!r}")
            piece = read_piece(dict(head), body)
            sequences = set(piece.rows["sequence"].tolist())
            if sequences & found:
                raise Untrue("FIND has listed a message twice")
            found |= sequences
            until = piece.until_sequence
            window = None if piece.place is None else window._replace(place=piece.place, until_sequence=until)
        now_ms = self._world.clock.now_ms()
        pending = {
            each.receipts[-1][0]
            for each in self._messages
            if not each.cancelled and each.due_ms > now_ms and not self._is_held(each)
        }
        # A move whose answer was lost or refused may have given it another row: these are asked by receipt.
        missed = pending - found
        if missed:
            raise Untrue(f"FIND does not list {len(missed)} pending messages: {sorted(missed)[:5]}")
        self._at_rest = True
        for first in range(0, len(self._messages), 500):
            some = self._messages[first : first + 500]
            self._change(RequestType.GET, some, [each.receipts[0] for each in some], list(some))
            self._settle()
        self._at_rest = False
        self.counts["compared"] += len(self._messages)

    def _leave(self) -> None:
        """Everybody leaves; what is left must be nothing."""
        owed = sum(peer.owed for peer in self._peers)
        if owed:
            raise Untrue(f"{owed} requests were never answered")
        for peer in list(self._peers):
            self._requests.disconnected(peer)
        self._rest()
        counters = self._world.core.standing.counters()
        held = {name: counters[name] for name in HELD if counters[name]}
        if self._requests.allowances:
            held["allowances"] = len(self._requests.allowances)
        if held:
            raise Untrue(f"everybody has left, and this is held: {held}")


def _name(move: Callable[[], None]) -> str:
    """What the loop does in a move: of a job that has ended, the function that hears of it."""
    executor = getattr(move, "__self__", None)
    if not isinstance(executor, StepExecutor) or not executor._ran:
        return getattr(move, "__qualname__", "")
    call: object = executor._ran[0]
    while isinstance(call, partial):
        call = call.func
    return getattr(call, "__qualname__", "")


def _receipt(answer: AnswerRows) -> tuple[int, int, int]:
    """That of the row which an answer is about."""
    return int(answer["sequence"]), int(answer["deliver_at_ms"]), int(answer["accepted_at_ms"])


def _note(told: list[Answered], ask: Ask, head: Mapping[str, HeadValue] | DelaydError, body: bytes) -> bool:
    told.append((head, body))
    return False
