"""Asking: questions to delay servers about messages.

Joined questions: those about single messages that wait for room at one server travel together.

Invariant: each caller hears what it would have heard alone, whatever becomes of the others. When a joined request fails
as a whole, because one of its questions spoils it, each question is asked alone.

Message asker: cancels and moves messages, and asks what became of them, by receipt or by key (docs/keys.md).

Invariant: a question that may have been served is asked again until the time limit, because the same question has the
same effect however often it is asked.

Place asker: asks a delay server for the least loaded instants of messages that are sent with ``spread``
(docs/quotas.md).

Invariant: an instant that comes back lies within its message's window, so nothing is delivered early because of it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from delayd.batch import ROWS_MAX, Int64s
from delayd.client.instants import ServerClock, monotonic_us, utc
from delayd.client.limits import check_subject
from delayd.client.routing import OWNER_LOST, DelayGroup, Groups, KeyOwners, MetaView, RetryWaits, spread_ms, unreadable
from delayd.client.sending.options import Columns, Key, Single, check_key, check_keys
from delayd.client.sending.receipts import BatchReceipt, Receipt, ReceiptColumns, SendVerdict
from delayd.errors import (
    BadArgument,
    BadRequest,
    CallerError,
    ConnectionLost,
    DelaydError,
    RequestTimedOut,
    RetryLater,
    ServerUnavailable,
)
from delayd.hours import INSTANT_MS_MAX
from delayd.log_id import LogId
from delayd.wire.ending import (
    ANSWER,
    KEY_ROWS_MAX,
    AnswerRows,
    Asked,
    AskedKeys,
    CancelAnswer,
    MessageState,
    RescheduleAnswer,
    decode_answers,
    encode_asked,
    encode_asked_keys,
)
from delayd.wire.finding import Piece, Window, read_piece
from delayd.wire.frame import Head
from delayd.wire.heads import U64_MAX, need_u64
from delayd.wire.quotas import encode_instants, read_instants
from delayd.wire.requests import RequestType

JOINED_MAX = 4_096  # Questions in one request.

# What is asked, of which server, about messages of which subject, and that again where receipts name the messages.
Kind = tuple[RequestType, int, bytes, bytes]
Row = tuple[int, int, int]  # The fields of `Asked`.

# Takes a request, a server, its rows and a deadline, and where receipts name the messages their subject.
Ask = Callable[..., Awaitable[AnswerRows]]


class _Question(NamedTuple):
    """One question, which has one row."""

    asked: Row | AskedKeys
    deadline: float
    answer: asyncio.Future[AnswerRows | None]  # None: ask alone.


class Joined:
    """The questions that wait, of one producer; belongs to one loop."""

    def __init__(self, room: Callable[[int], asyncio.Semaphore], ask: Ask) -> None:
        self._room = room  # Of a server.
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Kind, list[_Question]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def ask(
        self, request: RequestType, log_id: int, asked: Row | AskedKeys, deadline: float, subject: bytes = b""
    ) -> AnswerRows:
        """Ask about one message; ``subject`` is that of a receipt."""
        kind = (request, log_id, asked.subject if isinstance(asked, AskedKeys) else subject, subject)
        question = _Question(asked, deadline, self._loop.create_future())
        waiting = self._waiting.get(kind)
        if waiting is None:
            self._waiting[kind] = [question]
            self._serve(kind)
        else:
            waiting.append(question)
        answer = await question.answer
        if answer is None:
            async with self._room(log_id):
                return await self._ask(request, log_id, _join([asked]), deadline, *_given(subject))
        return answer

    def _serve(self, kind: Kind) -> None:
        """Ask all that wait as soon as there is room."""
        serving = self._loop.create_task(self._ask_together(kind))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _ask_together(self, kind: Kind) -> None:
        request, log_id, _, subject = kind
        questions: list[_Question] = []
        try:
            async with self._room(log_id):
                waiting = self._waiting.pop(kind)
                if len(waiting) > JOINED_MAX:
                    self._waiting[kind] = waiting[JOINED_MAX:]
                    self._serve(kind)
                # Whoever went away is not asked for.
                questions = [question for question in waiting[:JOINED_MAX] if not question.answer.done()]
                if not questions:
                    return
                together = _join([question.asked for question in questions])
                deadline = max(question.deadline for question in questions)
                rows = await self._ask(request, log_id, together, deadline, *_given(subject))
        except BaseException as error:
            # Of several questions each is asked alone now, and hears its own error.
            spoiled = len(questions) > 1 and isinstance(error, DelaydError)
            for question in questions or self._waiting.pop(kind, []):
                if question.answer.done():
                    continue
                if spoiled:
                    question.answer.set_result(None)
                elif isinstance(error, asyncio.CancelledError):
                    question.answer.cancel()
                else:
                    question.answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for number, question in enumerate(questions):
                if not question.answer.done():
                    question.answer.set_result(rows[number : number + 1])


def _given(subject: bytes) -> tuple[bytes, ...]:
    return (subject,) if subject else ()


def _join(asked: Sequence[Row | AskedKeys]) -> Asked | AskedKeys:
    """Make one question of those of one kind."""
    first = asked[0]
    if isinstance(first, AskedKeys):
        named = [each for each in asked if isinstance(each, AskedKeys)]
        keys = [key for each in named for key in each.keys]
        return AskedKeys(first.subject, keys, [number for each in named for number in each.numbers])
    sequences, due_ms, accepted_ms = zip(*asked, strict=True)
    return Asked(np.array(sequences, np.uint64), np.array(due_ms, np.int64), np.array(accepted_ms, np.int64))


Found = TypeVar("Found")

_ANSWERS_OF = {
    RequestType.CANCEL: np.array(list(CancelAnswer), np.uint8),
    RequestType.RESCHEDULE: np.array(list(RescheduleAnswer), np.uint8),
}

_FIELDS = (  # What a question takes from a receipt, and the most that each may be.
    ("log_id", U64_MAX),
    ("sequence", U64_MAX),
    ("deliver_at_ms", INSTANT_MS_MAX),
    ("accepted_at_ms", INSTANT_MS_MAX),
)

_LEADS_ON = (MessageState.MOVED, MessageState.DRAINED)
MANY_UNDER_WAY = 4  # Requests of 65,536 rows under way at one server; it takes 16 of them.


class MessageInfo(NamedTuple):
    """What became of one message so far.

    Fields:
        state: a `MessageState`; PENDING until it is handed over or ended.
        deliver_at_ms: when it is due, in milliseconds since the epoch.
        attempt: how often it was handed over; 0 while it has no outcome.
        decided_at_ms: when it was handed over or ended; None while it is pending.
        target_log_id: the realtime server that has it; None when it was not handed over.
        target_appended_at_ms: when that server appended it, by that server's clock.
        target_offset: where, in that server's message log.
        other: the sequence of the message that took its place, or that it met; None when there is none.
        other_at_ms: when that message is due.
    """

    state: MessageState
    deliver_at_ms: int
    attempt: int
    decided_at_ms: int | None
    target_log_id: LogId | None
    target_appended_at_ms: int | None
    target_offset: int | None
    other: int | None
    other_at_ms: int | None

    def __str__(self) -> str:
        return f"{self.state.name.lower()}, due at {utc(self.deliver_at_ms).isoformat()}"


def info_of(answer: np.void) -> MessageInfo:
    """One answer as a caller reads it."""
    handed_over = int(answer["target_log_id"]) != 0
    other = int(answer["other"])
    return MessageInfo(
        MessageState(int(answer["state"])),
        int(answer["deliver_at_ms"]),
        int(answer["attempt"]),
        int(answer["decided_at_ms"]) or None,
        LogId(int(answer["target_log_id"])) if handed_over else None,
        int(answer["target_appended_at_ms"]) if handed_over else None,
        int(answer["target_offset"]) if handed_over else None,
        other or None,
        int(answer["other_at_ms"]) if other else None,
    )


class AskedRows(NamedTuple):
    """The rows that a caller asks about, checked: columns, and the server of each; None where the owner of the keys
    must still be found.
    """

    log_ids: NDArray[np.uint64] | None
    asked: Asked | AskedKeys
    row_count: int
    subject: bytes = b""  # Of the messages that receipts name: the server refuses one of another subject.


class AskedOne(NamedTuple):
    """The row that a caller asks about, checked: the server of a receipt, and the receipt's fields or a key."""

    log_id: int
    asked: Row | AskedKeys
    subject: bytes = b""  # As in `AskedRows`.

    def rows(self) -> AskedRows:
        """As columns of one row."""
        if isinstance(self.asked, AskedKeys):
            return AskedRows(None, self.asked, 1)
        sequence, due_ms, accepted_ms = self.asked
        columns = Asked(np.array([sequence], np.uint64), np.array([due_ms]), np.array([accepted_ms]))
        return AskedRows(np.array([self.log_id], np.uint64), columns, 1, self.subject)


def asked_of(subject: str, receipt: Receipt | None, key: Key | None = None) -> AskedOne:
    """Check the arguments of a question about one message.

    Raises:
        BadSubject, BadKey, BadArgument: they are not a subject, and a receipt or a key.
    """
    name = check_subject(subject)
    if receipt is None and key is not None:
        return AskedOne(0, AskedKeys(name, [check_key(key)]))
    _need_one_of(receipt is None, key is None, "key")
    if not isinstance(receipt, Receipt):
        raise BadArgument(
            f"receipt is what a send returned, not {type(receipt).__name__}; Receipt.of_token makes one of a token"
        )
    for field, most in _FIELDS:
        value = getattr(receipt, field)
        if not isinstance(value, int) or not 0 <= value <= most:
            raise BadArgument(f"receipt is none that a send returned: its {field} is {value!r:.100}")
    return AskedOne(receipt.log_id, (receipt.sequence, receipt.deliver_at_ms, receipt.accepted_at_ms), name)


def asked_of_batch(
    subject: str, receipt: BatchReceipt | ReceiptColumns | None, keys: Sequence[Key] | None = None
) -> AskedRows:
    """Check the arguments of a question about many messages; raises as `asked_of`."""
    name = check_subject(subject)
    if receipt is None and keys is not None:
        packed = check_keys(keys)
        return AskedRows(None, AskedKeys(name, packed), len(packed))
    _need_one_of(receipt is None, keys is None, "keys")
    if not isinstance(receipt, BatchReceipt | ReceiptColumns):
        what = "what send_batch or reschedule_batch returned, or a page of pending messages"
        raise BadArgument(f"receipt is {what}, not {type(receipt).__name__}")
    asked = Asked(receipt.sequences, receipt.deliver_at_ms, receipt.accepted_at_ms)
    if isinstance(receipt, BatchReceipt):
        asked = _standing(receipt, asked)
    return AskedRows(receipt.log_ids, asked, len(receipt), name)


def _standing(receipt: BatchReceipt, asked: Asked) -> Asked:
    """The messages that stand for those of a batch: of one that was KEPT it is the earlier message with its key."""
    kept = receipt.verdicts == SendVerdict.KEPT
    if not kept.any():
        return asked
    others = (receipt.others, receipt.others_at_ms, receipt.others_filed_at_ms)
    return Asked._make(np.where(kept, *columns) for columns in zip(others, asked, strict=True))


def _need_one_of(no_receipt: bool, no_key: bool, name: str) -> None:
    if no_receipt == no_key:
        raise BadArgument(f"say once which message is meant: by receipt= or by {name}=")


class NewInstants:
    """The instants to which messages are to be moved, and the number under which each try of the call asks for it.

    Instants that count from now are fixed with the first connection to their server, so that each try wants the same.
    """

    def __init__(self, when: Int64s, relative: bool, number: int = 0) -> None:
        self._when = when
        self._relative = relative
        self.number = number

    def take(self, rows: NDArray[np.intp]) -> NewInstants:
        """Those of some rows."""
        return NewInstants(self._when.take(rows), self._relative, self.number)

    def under(self, number: int) -> NewInstants:
        """The same, for a call with this number."""
        return NewInstants(self._when, self._relative, number)

    def at(self, clock: ServerClock) -> Int64s:
        """The instants by the clock of the server that holds the messages; ClockInDoubt when it is not confirmed."""
        if self._relative:
            self._when, self._relative = clock.latest_ms_column(self._when), False
        return self._when


class MessageAsker:
    """Asks the delay servers that hold messages; used by one producer, on one loop."""

    def __init__(self, groups: Groups, owners: KeyOwners, timeout_ms: float, unreached_s: float = 0.0) -> None:
        """``unreached_s``: how much of the time limit is left when a question is given up because nobody is reached."""
        self._unreached_s = unreached_s
        self._groups = groups
        self._owners = owners
        self._timeout_s = timeout_ms / 1000
        self._rooms: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()  # By server, while in use.
        self._joined = Joined(self._room_at, self._ask_newest)
        # Changes by key, and moves, are numbered, so that one which is asked for again is made once (rule I1).
        self._asker = secrets.randbits(64) or 1
        self._next_number = 1
        self._under_way: dict[int, None] = {}  # The first number of each such call that has not ended.

    async def cancel(self, rows: AskedRows) -> AnswerRows:
        """End messages; one answer a row, in order, once those that are CANCELLED are so durably."""
        return (await self._ask_all(RequestType.CANCEL, rows))[1]

    async def cancel_one(self, one: AskedOne) -> CancelAnswer:
        """End one message."""
        return CancelAnswer(int((await self._ask_one(RequestType.CANCEL, one))["answer"]))

    async def get_one(self, one: AskedOne) -> MessageInfo:
        """Ask what became of one message."""
        return info_of(await self._ask_one(RequestType.GET, one))

    async def get(self, rows: AskedRows) -> AnswerRows:
        """Ask what became of messages; one answer a row, in order."""
        return (await self.locate(rows))[1]

    async def locate(self, rows: AskedRows) -> tuple[NDArray[np.uint64], AnswerRows]:
        """As `get`, with the server that each message is at."""
        return await self._ask_all(RequestType.GET, rows)

    async def reschedule(self, rows: AskedRows, instants: NewInstants) -> tuple[NDArray[np.uint64], AnswerRows]:
        """Move messages to other instants; the server of each, and one answer a row, in order, once those that are
        MOVED are so durably.
        """
        return await self._ask_all(RequestType.RESCHEDULE, rows, instants)

    async def servers(self) -> list[int]:
        """The logs of all delay servers that meta knows."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        return await self._until(deadline, lambda: self._groups.all(deadline))

    async def find(self, log_id: int, window: Window) -> Piece:
        """The next pending messages of a walk at one server."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s

        async def ask() -> Piece:
            _, connection = await self._groups.reached(log_id, deadline)
            left_ms = max(0.0, deadline - loop.time()) * 1000
            answer = await connection.request(RequestType.FIND, window.to_head(log_id), timeout_ms=left_ms)
            try:
                if need_u64(answer.head, "log_id") != log_id:
                    raise BadRequest("it is another log's")
                return read_piece(answer.head, answer.body)
            except CallerError as error:
                raise unreadable(connection, error) from error

        return await self._until(deadline, ask)

    async def _ask_one(self, request: RequestType, one: AskedOne) -> np.void:
        """Ask about one message together with others that wait."""
        if isinstance(one.asked, AskedKeys):
            _, rows = await self._ask_all(request, one.rows())
        else:
            deadline = asyncio.get_running_loop().time() + self._timeout_s
            rows = await self._joined.ask(request, one.log_id, one.asked, deadline, one.subject)
        row: np.void = rows[0]
        return row

    async def _ask_all(
        self, request: RequestType, rows: AskedRows, instants: NewInstants | None = None
    ) -> tuple[NDArray[np.uint64], AnswerRows]:
        """Ask all servers that hold messages: the server of each message, and one answer a row, in order."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        by_key = isinstance(rows.asked, AskedKeys)
        if request is RequestType.GET or (instants is None and not by_key):
            # To ask does nothing, and a receipt names one message: to cancel it twice is to cancel it once.
            return await self._ask_owners(request, rows, instants, deadline)
        # A call has a number, and then one for each of its keys.
        number = self._next_number
        self._next_number += 1 + by_key * rows.row_count
        self._under_way[number] = None
        if isinstance(rows.asked, AskedKeys):
            rows = rows._replace(asked=rows.asked._replace(numbers=range(number + 1, self._next_number)))
        if instants is not None:
            instants = instants.under(number)
        try:
            return await self._ask_owners(request, rows, instants, deadline)
        finally:
            del self._under_way[number]

    async def _ask_owners(
        self, request: RequestType, rows: AskedRows, instants: NewInstants | None, deadline: float
    ) -> tuple[NDArray[np.uint64], AnswerRows]:
        """Ask the servers that receipts name, or those that own the keys."""
        keys = rows.asked
        if not isinstance(keys, AskedKeys):
            return await self._ask_at(request, rows, instants, deadline)

        async def ask() -> tuple[NDArray[np.uint64], AnswerRows]:
            # After a try that failed, rows that were answered are asked about again: they get the same answers.
            owned = rows._replace(log_ids=await self._owners_of(keys, deadline))
            try:
                return await self._ask_at(request, owned, instants, deadline)
            except DelaydError as error:
                self._owners.heard(error)
                raise

        return await self._until(deadline, ask)

    async def _ask_at(
        self, request: RequestType, rows: AskedRows, instants: NewInstants | None, deadline: float
    ) -> tuple[NDArray[np.uint64], AnswerRows]:
        """Ask the servers that the rows name."""
        log_ids = rows.log_ids
        assert log_ids is not None, "receipts name servers, and owners were found for keys"
        if rows.row_count == 1 and instants is None and isinstance(rows.asked, AskedKeys):
            return log_ids, await self._joined.ask(request, int(log_ids[0]), rows.asked, deadline)
        found, servers = np.zeros(rows.row_count, ANSWER), np.zeros(rows.row_count, np.uint64)
        rows_max = ROWS_MAX if isinstance(rows.asked, Asked) else KEY_ROWS_MAX

        async def ask(log_id: int, places: NDArray[np.intp]) -> None:
            async with self._room_at(log_id):
                asked = rows.asked.take(places.tolist())
                wanted = None if instants is None else instants.take(places)
                where = await self._ask_where(request, log_id, asked, deadline, rows.subject, wanted)
                servers[places], found[places] = where

        try:
            async with asyncio.TaskGroup() as tasks:
                for log_id in np.unique(log_ids).tolist():
                    places = np.flatnonzero(log_ids == np.uint64(log_id))
                    for first in range(0, len(places), rows_max):
                        tasks.create_task(ask(log_id, places[first : first + rows_max]))
        except ExceptionGroup as errors:
            # The first one ended the others; callers know nothing of groups of errors.
            raise errors.exceptions[0] from None
        return servers, found

    def _room_at(self, log_id: int) -> asyncio.Semaphore:
        """The room for requests at one server, so that one that is away keeps nobody from the others."""
        room = self._rooms.get(log_id)
        if room is None:
            room = self._rooms[log_id] = asyncio.Semaphore(MANY_UNDER_WAY)
        return room

    async def _ask_newest(
        self,
        request: RequestType,
        log_id: int,
        asked: Asked | AskedKeys,
        deadline: float,
        subject: bytes = b"",
        wanted: NewInstants | None = None,
    ) -> AnswerRows:
        """Ask about rows of one server, and go on to the newest row of each message, wherever that is: the answers."""
        return (await self._ask_where(request, log_id, asked, deadline, subject, wanted))[1]

    async def _ask_where(
        self,
        request: RequestType,
        log_id: int,
        asked: Asked | AskedKeys,
        deadline: float,
        subject: bytes = b"",
        wanted: NewInstants | None = None,
    ) -> tuple[NDArray[np.uint64], AnswerRows]:
        """The same, with the server that gave each answer: a server names the row where it stopped on the way, and the
        other server to which an operator has drained a message.
        """
        found = (await self._ask(request, log_id, asked, deadline, subject, wanted)).copy()
        servers = np.full(len(found), log_id, np.uint64)
        while len(rows := np.flatnonzero(np.isin(found["state"], _LEADS_ON))):
            told = found.take(rows)
            drained = told["state"] == MessageState.DRAINED
            servers[rows] = np.where(drained, told["target_log_id"], servers.take(rows))
            newer = Asked(
                np.where(drained, told["other"], told["sequence"]),
                np.where(drained, told["other_at_ms"], told["deliver_at_ms"]),
                np.where(drained, told["target_appended_at_ms"], told["accepted_at_ms"]),
            )
            for server in np.unique(servers.take(rows)).tolist():
                there = np.flatnonzero(servers.take(rows) == np.uint64(server))
                own = None if wanted is None else wanted.take(rows.take(there))
                asked_there = newer.take(there.tolist())
                found[rows.take(there)] = await self._ask(request, server, asked_there, deadline, subject, own)
        return servers, found

    async def _owners_of(self, asked: AskedKeys, deadline: float) -> NDArray[np.uint64]:
        """The server that owns each key."""

        try:
            async with asyncio.timeout_at(deadline):
                return await self._owners.find([asked.subject] * len(asked.keys), asked.keys)
        except TimeoutError:
            raise ServerUnavailable("meta named no delay server in time; nothing was asked") from None

    async def _ask(
        self,
        request: RequestType,
        log_id: int,
        asked: Asked | AskedKeys,
        deadline: float,
        subject: bytes,
        wanted: NewInstants | None,
    ) -> AnswerRows:
        """Ask one server, again and again while it may answer later; about keys only while it is their owner."""
        return await self._until(
            deadline,
            lambda: self._ask_once(request, log_id, asked, subject, wanted, deadline),
            OWNER_LOST if isinstance(asked, AskedKeys) else (),
        )

    async def _until(
        self, deadline: float, ask: Callable[[], Awaitable[Found]], final: tuple[type[DelaydError], ...] = ()
    ) -> Found:
        """Ask again and again until the deadline, while an answer may come later; ``final`` errors end it at once."""
        backoff = RetryWaits()
        while True:
            try:
                return await ask()
            except final:
                raise
            except (RetryLater, ConnectionLost, RequestTimedOut) as error:
                if not await _waits(error, backoff, deadline, self._unreached_s):
                    raise

    async def _ask_once(
        self,
        request: RequestType,
        log_id: int,
        asked: Asked | AskedKeys,
        subject: bytes,
        wanted: NewInstants | None,
        deadline: float,
    ) -> AnswerRows:
        group, connection = await self._groups.reached(log_id, deadline)
        head: Head = {"log_id": log_id}
        wanted_at_ms = None if wanted is None else wanted.at(group.link.clock)
        numbers: Head = {"asker": self._asker, "low_water": next(iter(self._under_way), self._next_number)}
        if isinstance(asked, AskedKeys):
            body, row_count = encode_asked_keys(asked, wanted_at_ms), len(asked.keys)
            if asked.numbers:
                head |= numbers
        else:
            body, row_count = encode_asked(asked, wanted_at_ms), len(asked.sequences)
            if wanted is not None:
                head |= {**numbers, "number": wanted.number}
            if subject:
                head["subject"] = subject.decode()
        left_ms = max(0.0, deadline - asyncio.get_running_loop().time()) * 1000
        answer = await connection.request(request, head, [body], timeout_ms=left_ms)
        try:
            if need_u64(answer.head, "log_id") != log_id:
                raise BadRequest("it is another log's")
            rows = decode_answers(answer.body)
            if len(rows) != row_count:
                raise BadRequest(f"it has {len(rows)} rows for {row_count}")
        except BadRequest as error:
            raise unreadable(connection, error) from error
        known = _ANSWERS_OF.get(request)
        if known is not None and not np.isin(rows["answer"], known).all():
            raise ConnectionLost("a delay server gave an answer that this version does not know", sent=True)
        return rows


# A server looks for each message alone, at most so many in a request; messages of one second need one look.
APART_MAX = 512
TOGETHER_MIN = 32
TOGETHER_MAX = 65_536
APART_MS_MAX = 86_000_000  # Messages of one request are due within so much time; a server takes a day.
SECOND_MS = 1_000


class PlaceAsker:
    """Asks delay servers for instants; used by one producer, on one loop."""

    def __init__(self, groups: Groups, meta: MetaView, timeout_ms: float, unreached_s: float = 0.0) -> None:
        """``unreached_s``: how much of the time limit is left when a call is given up because nobody is reached."""
        self._unreached_s = unreached_s
        self._groups = groups
        self._meta = meta
        self._timeout_s = timeout_ms / 1000

    async def place(self, row: Single, window_ms: int) -> Single:
        """A send with the instant that a server chose."""
        subject, body, when, relative, *rest = row
        column = np.array([when], np.int64)
        (instant_ms,) = (await self._ask_all(subject, column, relative, window_ms)).tolist()
        return (subject, body, instant_ms, False, *rest)

    async def place_columns(self, columns: Columns, window_ms: int) -> Columns:
        """A batch with the instants that a server chose."""
        if not columns.bodies:
            return columns
        subject = columns.subject.decode("ascii")
        instants_ms = await self._ask_all(subject, columns.deliver, columns.relative, window_ms)
        return columns._replace(deliver=instants_ms, relative=False)

    async def _ask_all(self, subject: str, deliver: Int64s, relative: bool, window_ms: int) -> Int64s:
        loop, backoff = asyncio.get_running_loop(), RetryWaits()
        deadline = loop.time() + self._timeout_s
        while True:
            group: DelayGroup | None = None
            try:
                async with asyncio.timeout(max(0.0, deadline - loop.time())):
                    group = self._groups.choose() or await self._groups.find()
                    await group.link.connection()
                    due_ms = group.link.clock.latest_ms_column(deliver) if relative else deliver
                    return await self._ask_group(group, subject, due_ms, window_ms, deadline)
            except TimeoutError:
                raise RequestTimedOut(
                    "no delay server chose an instant in time; nothing was sent", sent=False
                ) from None
            except (RetryLater, ConnectionLost, RequestTimedOut) as error:
                if group is not None and not isinstance(error, ServerUnavailable):
                    group.refused(loop.time())
                    if self._groups.another_takes():
                        continue
                self._meta.refresh_soon()
                if not await _waits(error, backoff, deadline, self._unreached_s):
                    raise

    async def _ask_group(
        self, group: DelayGroup, subject: str, due_ms: Int64s, window_ms: int, deadline: float
    ) -> Int64s:
        chosen = np.empty(len(due_ms), np.int64)
        head: Head = {"subject": subject, "spread_ms": window_ms}
        for rows in _requests(due_ms):
            own = due_ms.take(rows)
            left_ms = max(0.0, deadline - asyncio.get_running_loop().time()) * 1000
            connection = await group.link.connection()
            asked_us = monotonic_us()
            group.asked(asyncio.get_running_loop().time())
            answer = await connection.request(RequestType.PLACES, head, [encode_instants(own)], timeout_ms=left_ms)
            try:
                group.link.hear(asked_us, answer.head)
                found = read_instants(answer.body)
                if len(found) != len(own) or (found < own).any():
                    raise BadRequest("its instants are not those of the messages that were asked for")
            except BadRequest as error:
                raise unreadable(connection, error) from error
            chosen[rows] = found
        return chosen


def _requests(due_ms: Int64s) -> Iterator[NDArray[np.intp]]:
    """The rows of each request."""
    order = np.argsort(due_ms, kind="stable")
    seconds = due_ms.take(order) // SECOND_MS
    _, begins, counts = np.unique(seconds, return_index=True, return_counts=True)
    many = counts >= TOGETHER_MIN
    for begin, count in zip(begins[many].tolist(), counts[many].tolist(), strict=True):
        for first in range(begin, begin + count, TOGETHER_MAX):
            yield order[first : min(first + TOGETHER_MAX, begin + count)]
    apart = order.take(np.flatnonzero(np.repeat(~many, counts)))
    while len(apart):
        near = int(np.searchsorted(due_ms.take(apart), int(due_ms[apart[0]]) + APART_MS_MAX, "right"))
        yield apart[: min(near, APART_MAX)]
        apart = apart[min(near, APART_MAX) :]


async def _waits(error: DelaydError, waits: RetryWaits, deadline: float, unreached_s: float) -> bool:
    """Wait before the next try; False when no time is left for one, ``unreached_s`` earlier if nobody was reached."""
    hint_ms = spread_ms(error.retry_after_ms) if error.retry_after_ms else 0.0
    wait_s = max(hint_ms, waits.next_ms()) / 1000
    until = deadline - unreached_s if isinstance(error, ServerUnavailable) else deadline
    if asyncio.get_running_loop().time() + wait_s >= until:
        return False
    await asyncio.sleep(wait_s)
    return True
