"""Pusher: the due messages of one target are pulled, POSTed and settled (docs/push.md).

Invariant: a message is acknowledged only after the target has said 2xx of a POST that had it. All else gives it back:
to its delay server for the time until the next attempt, to the group at once when nothing was POSTed, or to the dead
letters after the last attempt. What is over a limit is not pulled; what is over the limit of its flow key waits here
for a moment, or at its delay server for longer.

     group ──pulled, as many as may go now──▶ in hand ──┬─ POST ──▶ 2xx: acknowledged
                                                │       ├─ else: comes again after the back-off, or is a dead letter
                                                ▼       └─ 410: given back, and the target is paused
                                     waits for its flow key ──longer than FLOW_WAIT_S──▶ comes again, not counted

A message that was put off counts one attempt of its group without a POST. How many of these there were stands at the
begin of the error that travels with it (`put off 3 times`), so nothing here must last.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from delayd.client.pulling.acks import Backoff
from delayd.client.pulling.consumer import AsyncConsumer, AsyncMessage
from delayd.errors import BadArgument, BadHeaders, DelaydError
from delayd.gateway.caller import Caller, Outcome
from delayd.gateway.pacing import Breaker, Pace
from delayd.gateway.signing import Signer, valid_keys
from delayd.gateway.values import FLOW, JSON, PULL_MAX, TIMEOUT, PushedMessage, duration, shown
from delayd.hours import instant_text
from delayd.machine.operating import LogLimit
from delayd.wire.push import TIMEOUT_MS_MAX, TIMEOUT_MS_MIN, PushTarget, header_pairs, per_second

log = logging.getLogger(__name__)
limited = LogLimit(log)

CONCURRENCY = 64  # POSTs of one gateway to a target that has no limit of its own.
PULL_WAIT = timedelta(seconds=20)
TROUBLE_S = 1.0  # How long to wait when servers can't be reached.
LEASE_MARGIN_S = 10.0  # Besides the deadline: to be told, and to say what became of it.
POST_S = 0.1  # So long a POST takes, as far as nothing is known.
POST_SHARE = 0.2  # What the last POST counts in the average of how long they take.
FLOW_WAIT_S = 5.0  # A message waits here so long for its flow key, else at its delay server.
FLOW_HELD_MAX = 1_000  # Messages that wait here, of one target.
FLOWS_MAX = 10_000  # Flow keys that are known at one time, of one target.
FLOW_KEY_MAX = 200  # A longer key is known by a digest.
FORGET_S = 1.0  # How often keys are looked for whose limits stand as if they had never been used.
BUSY_S = 0.05  # How long to wait when the gateway has as many POSTs under way as it can.
PUT_OFF_S_MAX = 24 * 3_600.0
BUSY = frozenset({429, 503})
UNBOUNDED = (1 << 32) - 1

_TRACES = ("traceparent", "tracestate")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_PLAIN = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_PUT_OFF = re.compile(r"put off ([0-9]{1,9}) times")

_encode = msgspec.json.Encoder().encode


class Counts:
    """What became of POSTs and messages, in this process."""

    __slots__ = ("delivered", "failed", "posts", "put_off")

    def __init__(self) -> None:
        self.posts = self.delivered = self.failed = self.put_off = 0


class _Waiting(NamedTuple):
    """A message that waits for its flow key, at most until then."""

    message: AsyncMessage
    until: float


class _Flow:
    """The messages of one flow key that are here."""

    __slots__ = ("in_hand", "key", "pace", "put_off_until", "timer", "waiting")

    def __init__(self, key: str, rate: float) -> None:
        self.key = key
        self.pace = Pace(rate)
        self.in_hand = 0
        self.waiting: deque[_Waiting] = deque()
        self.timer: asyncio.TimerHandle | None = None
        self.put_off_until = 0.0  # Those that were put off come one after the other until then.


class _Read(NamedTuple):
    """What the headers of a message say to its gateway."""

    flow: str
    timeout_ms: int | None


class Pusher:
    """One target, served by this gateway; belongs to one loop."""

    def __init__(
        self,
        target: PushTarget,
        caller: Caller,
        new_consumer: Callable[[PushTarget], AsyncConsumer],
        gone: Callable[[PushTarget, str], None],
    ) -> None:
        self.target = target
        self.counts = Counts()
        self.last_failure = ""
        self._caller = caller
        self._consumer = new_consumer(target)
        self._gone = gone
        self._is_gone = False
        self._keys: list[str] = []
        self._signer = Signer([])
        self._headers = {**dict(header_pairs(target.headers))}
        self._backoff = Backoff(timedelta(milliseconds=target.first_ms), timedelta(milliseconds=target.most_ms))
        self._sharing = 1
        self._pace = Pace(per_second(target.rate))
        self._breaker = Breaker()
        self._flows: dict[str, _Flow] = {}
        self._forget_at = 0.0
        self._held = 0  # Messages that wait for their flow keys.
        self._post_s = POST_S  # About how long a POST takes.
        self._under_way: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._running = asyncio.get_running_loop().create_task(self._run())
        self._running.add_done_callback(self._told_of_bug)

    @property
    def under_way(self) -> int:
        """POSTs that wait for their answers."""
        return len(self._under_way)

    @property
    def rests_s(self) -> float:
        """How long the target is left alone from now on."""
        return self._breaker.wait_s(time.monotonic())

    def share(self, gateways: int) -> None:
        """So many gateways serve the target: each takes its part of the rates."""
        if gateways != self._sharing:
            self._sharing = gateways
            self._pace = Pace(per_second(self.target.rate) / gateways)
            for flow in self._flows.values():
                flow.pace = Pace(self._flow_rate)

    @property
    def _flow_rate(self) -> float:
        return per_second(self.target.flow_rate) / self._sharing

    async def close(self) -> None:
        """Pull no more. What is under way may end, as long as nobody calls `cut`; the rest goes back at once."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._give_back_waiting()
        while self._under_way:
            await asyncio.wait(self._under_way)
        try:
            await self._consumer.close()
        except DelaydError as error:
            self._trouble(error)

    def cut(self) -> None:
        """End what is under way; its messages go back to the group at once."""
        for task in self._under_way:
            task.cancel()

    async def _run(self) -> None:
        while not self._is_gone:
            try:
                room = await self._room()
                most = min(room * self.target.batch, max(PULL_MAX, self.target.batch))
                batch = await self._consumer.pull(most, wait=PULL_WAIT)
                if batch.outage is not None:
                    raise batch.outage
            except DelaydError as error:
                self._trouble(error)
                await asyncio.sleep(TROUBLE_S)
                continue
            messages = [*batch]
            for first in range(0, len(messages), self.target.batch):
                self._take(messages[first : first + self.target.batch])

    async def _room(self) -> int:
        """How many POSTs may begin now; waits until it is one at least."""
        while True:
            self._changed.clear()
            now = time.monotonic()
            free = self._free(now)
            if free > 0 and self._held < FLOW_HELD_MAX:
                return free
            rest_s = max(self._breaker.wait_s(now), self._pace.wait_s(now))
            await self._wait(rest_s or (None if self._caller.room else BUSY_S))

    def _free(self, now: float) -> int:
        """How many POSTs the target's own limits let begin."""
        if self._breaker.wait_s(now):
            return 0
        most = 1 if self._breaker.is_trying else self._concurrency
        return self._pace.room(now, max(0, min(most - len(self._under_way), self._caller.room)))

    async def _wait(self, limit_s: float | None) -> None:
        """Wait until a POST has ended, or for so long."""
        try:
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
        except TimeoutError:
            return

    @property
    def _concurrency(self) -> int:
        return max(1, self.target.concurrency // self._sharing) if self.target.concurrency else CONCURRENCY

    def _take(self, messages: Sequence[AsyncMessage]) -> None:
        """Begin a POST of these messages, or let one wait for its flow key."""
        target = self.target
        spent = [each for each in messages if _tries(each) > target.attempts]
        for message in spent:
            # Gateways have died with it so often, and nobody knows whether it was POSTed.
            self._begin(self._settle_dead(message, "no attempt was heard of to its end", b""))
        fresh = [each for each in messages if each not in spent] if spent else messages
        if not fresh:
            return
        if _has_flows(target):
            (message,) = fresh  # Such a target has one message in a POST.
            key = _read(message).flow
            if key:
                self._take_of_flow(key, message)
                return
        self._post(fresh)

    def _post(self, messages: Sequence[AsyncMessage], flow: _Flow | None = None) -> None:
        self._pace.take(time.monotonic())
        self._begin(self._posted(messages, flow))

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._changed.set()
        if self._held:
            for flow in [flow for flow in self._flows.values() if flow.waiting]:
                self._look(flow)
        self._told_of_bug(task)

    def _told_of_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("push_failed target=%s", self.target.name, exc_info=error)

    # Flow keys.

    def _take_of_flow(self, key: str, message: AsyncMessage) -> None:
        now = time.monotonic()
        flow = self._flows.get(key)
        if flow is None:
            if len(self._flows) >= FLOWS_MAX and not self._forget_flows(now):
                self._begin(self._put_off(message, key, FLOW_WAIT_S))
                return
            flow = self._flows[key] = _Flow(key, self._flow_rate)
        if not flow.waiting and self._may_go(flow, now):
            self._go(flow, message)
            return
        wait_s = flow.pace.wait_s(now) + len(flow.waiting) / self._flow_speed
        if wait_s > FLOW_WAIT_S or self._held >= FLOW_HELD_MAX:
            self._put_off_after(flow, message, now, wait_s)
            return
        flow.waiting.append(_Waiting(message, now + FLOW_WAIT_S))
        self._held += 1
        if len(flow.waiting) == 1:
            self._later(flow, now)

    def _may_go(self, flow: _Flow, now: float) -> bool:
        most = self.target.flow_concurrency
        has_room = not most or flow.in_hand < max(1, most // self._sharing)
        return has_room and flow.pace.room(now, 1) > 0 and self._free(now) > 0

    @property
    def _flow_speed(self) -> float:
        """About how many messages of a key go in a second."""
        most = self.target.flow_concurrency / max(self._post_s, 0.001)
        return min(self._flow_rate or most, most or self._flow_rate)

    def _go(self, flow: _Flow, message: AsyncMessage) -> None:
        flow.pace.take(time.monotonic())
        flow.in_hand += 1
        self._post([message], flow)

    def _later(self, flow: _Flow, now: float) -> None:
        """Look again when the next message of a key may go, or has waited for too long; a POST's end looks, too."""
        wait_s = max(flow.pace.wait_s(now), self._pace.wait_s(now)) or FLOW_WAIT_S
        if flow.timer is not None:
            flow.timer.cancel()
        wait_s = min(wait_s, max(0.0, flow.waiting[0].until - now))
        flow.timer = asyncio.get_running_loop().call_later(wait_s, self._look, flow)

    def _look(self, flow: _Flow) -> None:
        now = time.monotonic()
        while flow.waiting:
            first = flow.waiting[0]
            if first.until <= now:
                self._put_off_after(flow, first.message, now, len(flow.waiting) / self._flow_speed)
            elif self._may_go(flow, now):
                self._go(flow, first.message)
            else:
                self._later(flow, now)
                return
            flow.waiting.popleft()
            self._held -= 1

    def _give_back_waiting(self) -> None:
        """Nothing goes now; what waits for its flow key is the group's again, and spends no attempt."""
        waiting = [each.message for flow in self._flows.values() for each in flow.waiting]
        for flow in self._flows.values():
            flow.waiting.clear()
        self._held = 0
        if waiting:
            self._consumer.give_back(waiting)

    def _forget_flows(self, now: float) -> bool:
        """Forget keys whose limits stand as if they had never been used; returns whether there is room now."""
        if now < self._forget_at:
            return False
        self._forget_at = now + FORGET_S
        for key, flow in [*self._flows.items()]:
            if not flow.waiting and not flow.in_hand and flow.pace.is_rested(now) and flow.put_off_until <= now:
                del self._flows[key]
        return len(self._flows) < FLOWS_MAX

    def _put_off_after(self, flow: _Flow, message: AsyncMessage, now: float, wait_s: float) -> None:
        """Let a message come again when those of its key that were put off before it have gone."""
        flow.put_off_until = max(flow.put_off_until, now + wait_s) + 1.0 / self._flow_speed
        self._begin(self._put_off(message, flow.key, min(PUT_OFF_S_MAX, flow.put_off_until - now)))

    async def _put_off(self, message: AsyncMessage, key: str, wait_s: float) -> None:
        self.counts.put_off += 1
        error = f"put off {_put_offs(message) + 1} times; its flow key {key} is over its limit"
        await self._said(message.nack(timedelta(seconds=wait_s), error=error))

    # One POST.

    async def _posted(self, messages: Sequence[AsyncMessage], flow: _Flow | None) -> None:
        try:
            outcome = await self._asked(messages)
        except asyncio.CancelledError:
            # The gateway stops, or the target was changed: the URL may have been asked.
            for message in messages:
                await self._said(message.nack(timedelta(0), wait=False))
            raise
        finally:
            if flow is not None:
                flow.in_hand -= 1  # The end of this task looks who goes next.
        await self._settle(messages, outcome)

    async def _asked(self, messages: Sequence[AsyncMessage]) -> Outcome:
        target = self.target
        timeout_ms = max(_read(message).timeout_ms or target.timeout_ms for message in messages)
        if timeout_ms > target.timeout_ms:
            lease = _lease(target, timeout_ms)
            for message in messages:
                try:
                    await message.extend(lease)
                except DelaydError as error:
                    return Outcome(0, f"not asked: its lease could not be extended ({error.message})")
        headers, body = self._told(messages)
        self.counts.posts += 1
        began = time.monotonic()
        outcome = await self._caller.post(target.url, headers, body, timeout_ms / 1_000)
        self._post_s += POST_SHARE * (time.monotonic() - began - self._post_s)
        return outcome

    def _told(self, messages: Sequence[AsyncMessage]) -> tuple[dict[str, str], bytes]:
        """The headers and the body of a POST."""
        target = self.target
        headers = {**self._headers, "content-type": target.content_type}
        if target.batch == 1:
            (message,) = messages
            body = message.body
            headers |= _headers_of(message)
            headers["webhook-id"] = message_id(message)
        else:
            rows = [(each, range(each.row, each.row + 1)) for each in messages]
            body = _encode([shown(PushedMessage, [message_id(each)], each.columns, row)[0] for each, row in rows])
            headers["content-type"] = JSON
            headers["webhook-id"] = _batch_id(messages)
        now_s = time.time()
        keys = valid_keys(target, int(now_s * 1_000))
        if keys != self._keys:
            self._keys, self._signer = keys, Signer(keys)
        headers["webhook-timestamp"] = str(int(now_s))
        headers["webhook-signature"] = self._signer.sign(headers["webhook-id"], int(now_s), body)
        return headers, body

    async def _settle(self, messages: Sequence[AsyncMessage], outcome: Outcome) -> None:
        now = time.monotonic()
        if outcome.is_done:
            if self._breaker.took():
                log.info("push_goes_on target=%s", self.target.name)
            self.counts.delivered += len(messages)
            # Where the server bounds what is held, the next message waits for this word.
            wait = bool(self.target.concurrency)
            for message in messages:
                await self._said(message.ack(wait=wait))
            return
        self.counts.failed += 1
        self.last_failure = outcome.what
        if outcome.status == 410:
            self._stop_asking(messages, outcome)
            return
        if outcome.status == 0 or outcome.status >= 500 or outcome.status in BUSY:
            if outcome.status in BUSY and outcome.retry_after_s:
                self._breaker.rest(now + outcome.retry_after_s)
            pause_s = self._breaker.failed(now)
            if self._breaker.wait_s(now):
                self._give_back_waiting()
            if pause_s:
                log.warning("push_rests target=%s seconds=%d reason=%r", self.target.name, pause_s, outcome.what)
        else:
            self._breaker.took()  # It answers, and does not want this message.
        for message in messages:
            await self._settle_failed(message, outcome)

    async def _settle_failed(self, message: AsyncMessage, outcome: Outcome) -> None:
        tries = _tries(message)
        if tries >= self.target.attempts:
            await self._settle_dead(message, f"{outcome.what}, in attempt {tries} of {tries}", outcome.answer)
            return
        wait_s = max(self._backoff.delay_ms(tries) / 1_000, outcome.retry_after_s or 0.0)
        error = outcome.what + (f": {outcome.answer.decode(errors='replace')}" if outcome.answer else "")
        put_offs = _put_offs(message)
        if put_offs:
            error = f"put off {put_offs} times; {error}"
        await self._said(message.nack(timedelta(seconds=wait_s), error=error))

    async def _settle_dead(self, message: AsyncMessage, reason: str, answer: bytes) -> None:
        await self._said(message.reject(reason, error=answer.decode(errors="replace")))

    def _stop_asking(self, messages: Sequence[AsyncMessage], outcome: Outcome) -> None:
        self._consumer.give_back(messages)
        if not self._is_gone:
            self._is_gone = True
            self._running.cancel()
            self._gone(self.target, outcome.what)

    async def _said(self, word: Coroutine[object, object, None]) -> None:
        """Say a word about a message; when nobody hears it, its lease ends and it comes again."""
        try:
            await word
        except DelaydError as error:
            self._trouble(error)

    def _trouble(self, error: DelaydError) -> None:
        name = self.target.name
        limited.warning(
            f"push_delayed {name}", "push_delayed target=%s code=%s reason=%r", name, error.code, str(error)
        )


def consumer_of(meta: str, target: PushTarget, connect_timeout: timedelta) -> AsyncConsumer:
    """What pulls for a target. The server bounds what all gateways hold together."""
    lease = _lease(target, target.timeout_ms)
    bound: int | None = target.concurrency * target.batch
    if not bound:
        bound = UNBOUNDED if target.version > 1 else None  # A bound of an earlier version is lifted by a large one.
    return AsyncConsumer(
        meta,
        target.subject,
        target.group,
        lease=lease,
        prefetch=False,
        group_max_in_flight=bound,
        connect_timeout=connect_timeout,
    )


def _lease(target: PushTarget, timeout_ms: int) -> timedelta:
    """How long a message is held that is POSTed within a deadline, and may wait for its flow key before that."""
    waits_s = FLOW_WAIT_S if _has_flows(target) else 0.0
    return timedelta(milliseconds=timeout_ms, seconds=LEASE_MARGIN_S + waits_s)


def _has_flows(target: PushTarget) -> bool:
    return bool(target.flow_rate or target.flow_concurrency)


def message_id(message: AsyncMessage) -> str:
    """The `webhook-id` of a message: the same in each attempt."""
    return f"msg_{message.log_id:016x}_{message.origin_sequence}"


def _batch_id(messages: Sequence[AsyncMessage]) -> str:
    """The `webhook-id` of several: no POST of other messages has it, so none is taken for this one."""
    ids = " ".join(map(message_id, messages))
    return f"batch_{hashlib.blake2b(ids.encode(), digest_size=16).hexdigest()}"


async def post_test(caller: Caller, target: PushTarget) -> Outcome:
    """POST to a target once; the POST is about no message."""
    now_ms = time.time_ns() // 1_000_000
    data = {"target": target.name, "subject": target.subject}
    body = _encode({"type": "delayd.test", "timestamp": instant_text(now_ms), "data": data})
    number = f"msg_test_{secrets.token_hex(8)}"
    headers = {**dict(header_pairs(target.headers)), "content-type": JSON, "webhook-id": number}
    headers["webhook-timestamp"] = str(now_ms // 1_000)
    headers["webhook-signature"] = Signer(valid_keys(target, now_ms)).sign(number, now_ms // 1_000, body)
    return await caller.post(target.url, headers, body, target.timeout_ms / 1_000)


def _put_offs(message: AsyncMessage) -> int:
    found = _PUT_OFF.match(message.last_error) if message.attempt > 1 else None
    return int(found[1]) if found is not None else 0


def _tries(message: AsyncMessage) -> int:
    """Which attempt this is, without those in which it was put off."""
    return max(1, message.attempt - _put_offs(message))


def _read(message: AsyncMessage) -> _Read:
    if not message.headers_bytes:
        return _Read("", None)
    try:
        headers = message.headers
    except BadHeaders:
        return _Read("", None)
    flow, timeout = headers.get(FLOW, ""), headers.get(TIMEOUT, "")
    timeout_ms: int | None = None
    if isinstance(timeout, str) and timeout:
        try:
            timeout_ms = int(duration(timeout) / timedelta(milliseconds=1))
        except BadArgument:
            timeout_ms = None  # The deadline of the target counts.
        else:
            timeout_ms = min(max(timeout_ms, TIMEOUT_MS_MIN), TIMEOUT_MS_MAX)
    key = flow if isinstance(flow, str) else flow.decode(errors="replace")
    if len(key) > FLOW_KEY_MAX:
        key = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return _Read(key, timeout_ms)


def _headers_of(message: AsyncMessage) -> dict[str, str]:
    """What a POST says of its message."""
    told = {"delayd-subject": message.subject, "delayd-attempt": str(_tries(message))}
    told["delayd-deliver-at"] = instant_text(message.first_deliver_at_ms)
    if message.key is not None:
        told["delayd-key"] = quote(message.key)
    if not message.headers_bytes:
        return told
    try:
        headers = message.headers
    except BadHeaders:
        return told
    for name, value in headers.items():
        if isinstance(value, str) and _TOKEN.fullmatch(name) and _PLAIN.fullmatch(value):
            low = name.lower()
            if low == "content-type" or low in _TRACES:
                told[low] = value
            elif low not in (FLOW, TIMEOUT):
                told[f"delayd-header-{low}"] = value
    return told
