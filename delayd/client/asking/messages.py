"""Messages: what a producer asks delay servers about messages, over the connections on which it sends.

A question is declared as data (`Question`): the request, what is put into it, and how the answer is read. `Asker` asks
it: of the server that a receipt names, of the owners of keys, of all servers, or of whichever has room; again while an
answer may come later, until the call's time is up. Then answers stand in the order of what was asked. A cancel of three
messages, of which B had moved from server 1 to server 2:

    rows          A at 1, B at 1, C at 3
    CANCEL to 1   A: CANCELLED; B: DRAINED, it is at 2 now    CANCEL to 3   C: IN_FLIGHT     (at the same time)
    CANCEL to 2   B: CANCELLED
    answer        A CANCELLED, B CANCELLED, C IN_FLIGHT, of the servers 1, 2, 3

Invariants: a question that may have been served is asked again until the time limit, because the same question has the
same effect however often it is asked (docs/keys.md; rule I1). Questions about single messages that wait for room at one
server travel together, and each caller hears what it would have heard alone: when a joined request fails as a whole,
because one of its questions spoils it, each is asked alone. An instant that a server chose lies within its message's
window, so nothing is delivered early because of it (docs/quotas.md).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import ROWS_MAX, Int64s
from delayd.client.instants import ServerClock, monotonic_us, utc
from delayd.client.limits import check_subject
from delayd.client.routing import (
    OWNER_LOST,
    DelayGroup,
    Groups,
    KeyOwners,
    MetaView,
    RetryWaits,
    ServerLink,
    spread_ms,
    unreadable,
)
from delayd.client.sending.batch_sender import read_outcome
from delayd.client.sending.receipts import Accepted, BatchReceipt, Receipt, ReceiptColumns, SendVerdict
from delayd.client.sending.send_options import Columns, Key, Single, check_key, check_keys
from delayd.errors import (
    BadArgument,
    BadRequest,
    CallerError,
    ConnectionLost,
    DelaydError,
    LogId,
    RequestTimedOut,
    RetryLater,
    SendHandle,
    ServerUnavailable,
)
from delayd.hours import INSTANT_MS_MAX
from delayd.net.connection import Connection
from delayd.outcome import MessageState
from delayd.wire.asked import (
    ANSWER,
    KEY_ROWS_MAX,
    AnswerRows,
    Asked,
    AskedKeys,
    AskedWindow,
    CancelAnswer,
    Piece,
    RescheduleAnswer,
    decode_answers,
    encode_asked,
    encode_asked_keys,
    read_piece,
)
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import U64_MAX, need_u64
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import encode_instants, read_instants

A = TypeVar("A")
Answer = TypeVar("Answer")
LogIds = NDArray[np.uint64]
Row = tuple[int, int, int]  # The fields of `Asked`.


class Question(NamedTuple, Generic[A, Answer]):
    """One question to a delay server, as data."""

    request: RequestType
    put: Callable[[A, ServerLink], tuple[Head, list[bytes]]]  # Head and body of the request to this server.
    read: Callable[[A, Frame], Answer]  # CallerError for an answer that is none.


def count_of(asked: Asked | AskedKeys) -> int:
    """How many messages are asked about."""
    return len(asked.keys if isinstance(asked, AskedKeys) else asked.sequences)


class AskedMessages(NamedTuple):
    """What is asked about messages, whichever server has them."""

    asked: Asked | AskedKeys
    numbers: Numbers
    subject: bytes = b""  # Receipts name messages of it: the server refuses one of another subject.
    instants: NewInstants | None = None  # To which they are to be moved.
    number: int = 0  # A move by receipt has one.
    exact: bool = False  # As in `AskedRows`.

    @property
    def row_count(self) -> int:
        """How many messages."""
        return count_of(self.asked)

    def take(self, rows: NDArray[np.intp]) -> AskedMessages:
        """The same about some of them."""
        instants = None if self.instants is None else self.instants.take(rows)
        return self._replace(asked=self.asked.take(rows.tolist()), instants=instants)


def _put_wish(wish: AskedMessages, link: ServerLink) -> tuple[Head, list[bytes]]:
    head: Head = {"log_id": need_log(link)}
    wanted_at_ms = None if wish.instants is None else wish.instants.at(link.clock)
    if isinstance(wish.asked, AskedKeys):
        if wish.asked.numbers:
            head |= wish.numbers.head
        return head, [encode_asked_keys(wish.asked, wanted_at_ms)]
    if wish.instants is not None:
        head |= {**wish.numbers.head, "number": wish.number}
    if wish.subject:
        head["subject"] = wish.subject.decode()
    if wish.exact:
        head["exact"] = True
    return head, [encode_asked(wish.asked, wanted_at_ms)]


def _read_wish(known: type[IntEnum] | None, wish: AskedMessages, answer: Frame) -> AnswerRows:
    rows = decode_answers(answer.body)
    if len(rows) != wish.row_count:
        raise BadRequest(f"it has {len(rows)} rows for {wish.row_count}")
    if known is not None and not np.isin(rows["answer"], [*known]).all():
        raise ConnectionLost("a delay server gave an answer that this version does not know", sent=True)
    return rows


About = Question[AskedMessages, AnswerRows]
GET = About(RequestType.GET, _put_wish, partial(_read_wish, None))
CANCEL = About(RequestType.CANCEL, _put_wish, partial(_read_wish, CancelAnswer))
RESCHEDULE = About(RequestType.RESCHEDULE, _put_wish, partial(_read_wish, RescheduleAnswer))
FIND = Question[AskedWindow, Piece](
    RequestType.FIND,
    lambda window, link: (window.to_head(need_log(link)), []),
    lambda _, answer: read_piece(answer.head, answer.body),
)
OUTCOME = Question[SendHandle, Accepted | None](
    RequestType.OUTCOME,
    lambda handle, _: ({name: getattr(handle, name) for name in ("log_id", "producer_id", "producer_batch")}, []),
    lambda handle, answer: read_outcome(answer, handle.log_id),
)


class Sought(NamedTuple):
    """Messages of one subject for which instants are sought, each within ``window_ms`` from its own."""

    subject: str
    window_ms: int
    due_ms: Int64s


def _read_places(sought: Sought, answer: Frame) -> Int64s:
    found = read_instants(answer.body)
    if len(found) != len(sought.due_ms) or (found < sought.due_ms).any():
        raise BadRequest("its instants are not those of the messages that were asked for")
    return found


PLACES = Question[Sought, Int64s](
    RequestType.PLACES,
    lambda sought, _: (
        {"subject": sought.subject, "spread_ms": sought.window_ms},
        [encode_instants(sought.due_ms)],
    ),
    _read_places,
)


def need_log(link: ServerLink) -> int:
    """The log of a delay server; only meta's link has none."""
    assert link.log_id is not None, "a delay server is named by its log"
    return link.log_id


def window_behind(window: AskedWindow, piece: Piece) -> AskedWindow | None:
    """What to look for next; None when the walk is at its end at this server."""
    if piece.place is None:
        return None
    return window._replace(place=piece.place, until_sequence=piece.until_sequence)


JOINED_MAX = 4_096  # Questions in one request.

# What is asked, of which server, about messages of which subject, and whether by keys.
Kind = tuple[About, int, bytes, bool]


class _Joining(NamedTuple):
    """One question, which has one row."""

    asked: Row | AskedKeys
    deadline: float
    answer: asyncio.Future[AnswerRows | None]  # None: ask alone.


class Joined:
    """The questions that wait, of one producer; belongs to one loop.

    ``room`` is that of a server; ``ask`` takes a kind, what was asked of it, and a deadline.
    """

    def __init__(
        self,
        room: Callable[[int], asyncio.Semaphore],
        ask: Callable[[Kind, Sequence[Row | AskedKeys], float], Awaitable[AnswerRows]],
    ) -> None:
        self._room = room
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Kind, list[_Joining]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def ask(self, kind: Kind, asked: Row | AskedKeys, deadline: float) -> AnswerRows:
        """Ask about one message."""
        joining = _Joining(asked, deadline, self._loop.create_future())
        waiting = self._waiting.get(kind)
        if waiting is None:
            self._waiting[kind] = [joining]
            self._serve(kind)
        else:
            waiting.append(joining)
        answer = await joining.answer
        if answer is None:
            async with self._room(kind[1]):
                return await self._ask(kind, [asked], deadline)
        return answer

    def _serve(self, kind: Kind) -> None:
        """Ask all that wait as soon as there is room."""
        serving = self._loop.create_task(self._ask_together(kind))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _ask_together(self, kind: Kind) -> None:
        joined: list[_Joining] = []
        try:
            async with self._room(kind[1]):
                waiting = self._waiting.pop(kind)
                if len(waiting) > JOINED_MAX:
                    self._waiting[kind] = waiting[JOINED_MAX:]
                    self._serve(kind)
                # Whoever went away is not asked for.
                joined = [each for each in waiting[:JOINED_MAX] if not each.answer.done()]
                if not joined:
                    return
                deadline = max(each.deadline for each in joined)
                rows = await self._ask(kind, [each.asked for each in joined], deadline)
        except BaseException as error:
            # Each of several questions is asked alone now, and hears its own error.
            spoiled = len(joined) > 1 and isinstance(error, DelaydError)
            for each in joined or self._waiting.pop(kind, []):
                if each.answer.done():
                    continue
                if spoiled:
                    each.answer.set_result(None)
                elif isinstance(error, asyncio.CancelledError):
                    each.answer.cancel()
                else:
                    each.answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for number, each in enumerate(joined):
                if not each.answer.done():
                    each.answer.set_result(rows[number : number + 1])


def _join(asked: Sequence[Row | AskedKeys]) -> Asked | AskedKeys:
    """Make one question of those of one kind."""
    first = asked[0]
    if isinstance(first, AskedKeys):
        named = [each for each in asked if isinstance(each, AskedKeys)]
        keys = [key for each in named for key in each.keys]
        return AskedKeys(first.subject, keys, [number for each in named for number in each.numbers])
    sequences, due_ms, accepted_ms = zip(*asked, strict=True)
    return Asked(np.array(sequences, np.uint64), np.array(due_ms, np.int64), np.array(accepted_ms, np.int64))


_FIELDS = (  # What a question takes from a receipt, and the most that each may be.
    ("log_id", U64_MAX),
    ("sequence", U64_MAX),
    ("deliver_at_ms", INSTANT_MS_MAX),
    ("accepted_at_ms", INSTANT_MS_MAX),
)

_LEADS_ON = (MessageState.MOVED, MessageState.DRAINED)  # A drained message is as it was, at another server.
MANY_UNDER_WAY = 4  # Requests of 65,536 rows under way at one server; it takes 16 of them.


class MessageInfo(NamedTuple):
    """What became of one message so far.

    Fields:
        state: a `MessageState`; PENDING until it is handed over or ended.
        deliver_at_ms: when it is due, in milliseconds since the epoch.
        attempt: how often it was handed over; 0 before that, and when it ended in another way.
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
    subject: bytes = b""  # Receipts name messages of it: the server refuses one of another subject.
    exact: bool = False  # Only messages that are as their receipts say are changed.


class AskedOne(NamedTuple):
    """The row that a caller asks about, checked: the server of a receipt, and the receipt's fields or a key."""

    log_id: int
    asked: Row | AskedKeys
    subject: bytes = b""  # As in `AskedRows`, and so is the next.
    exact: bool = False

    def rows(self) -> AskedRows:
        """As columns of one row."""
        if isinstance(self.asked, AskedKeys):
            return AskedRows(None, self.asked)
        sequence, due_ms, accepted_ms = self.asked
        columns = Asked(np.array([sequence], np.uint64), np.array([due_ms]), np.array([accepted_ms]))
        return AskedRows(np.array([self.log_id], np.uint64), columns, self.subject, self.exact)


def unmoved_of(subject: str, receipt: Receipt | None, key: Key | None, group: str | None) -> AskedOne:
    """Check the arguments of a change of one message that has to be as its receipt says; raises as `asked_of`."""
    if receipt is None or key is not None or group is not None:
        raise BadArgument("if_unmoved is about the message of a receipt: give receipt=, and neither key= nor group=")
    return asked_of(subject, receipt)._replace(exact=True)


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
        return AskedRows(None, AskedKeys(name, check_keys(keys)))
    _need_one_of(receipt is None, keys is None, "keys")
    if not isinstance(receipt, BatchReceipt | ReceiptColumns):
        what = "what send_batch or reschedule_batch returned, or a page of pending messages"
        raise BadArgument(f"receipt is {what}, not {type(receipt).__name__}")
    asked = Asked(receipt.sequences, receipt.deliver_at_ms, receipt.accepted_at_ms)
    if isinstance(receipt, BatchReceipt):
        asked = _standing(receipt, asked)
    return AskedRows(receipt.log_ids, asked, name)


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
    """The instants to which messages are to be moved.

    Instants that count from now are fixed with the first connection to their server, so that each try wants the same.
    """

    def __init__(self, when: Int64s, relative: bool) -> None:
        self._when = when
        self._relative = relative

    def take(self, rows: NDArray[np.intp]) -> NewInstants:
        """Those of some rows."""
        return NewInstants(self._when.take(rows), self._relative)

    def at(self, clock: ServerClock) -> Int64s:
        """The instants by the clock of the server that holds the messages; ClockInDoubt when it is not confirmed."""
        if self._relative:
            self._when, self._relative = clock.latest_ms_column(self._when), False
        return self._when


class Numbers:
    """The numbers of a producer's changes by key, and of its moves: one that is asked for again is made once (rule I1).

    A call has a number, and then one for each of its keys.
    """

    def __init__(self) -> None:
        self._asker = secrets.randbits(64) or 1
        self._next = 1
        self._under_way: dict[int, None] = {}  # The first number of each call that has not ended.

    @property
    def head(self) -> Head:
        """Whose numbers they are, and below which of them nothing is asked for again."""
        return {"asker": self._asker, "low_water": next(iter(self._under_way), self._next)}

    @contextmanager
    def of_call(self, keys: int) -> Iterator[range]:
        """The numbers of a call, which ends with the block."""
        numbers = range(self._next, self._next + 1 + keys)
        self._next = numbers.stop
        self._under_way[numbers.start] = None
        try:
            yield numbers
        finally:
            del self._under_way[numbers.start]


class Asker:
    """Asks the delay servers for one producer, on one loop."""

    def __init__(
        self, groups: Groups, owners: KeyOwners, meta: MetaView, timeout_ms: float, unreached_s: float
    ) -> None:
        """``unreached_s``: how much of the time limit is left when a question is given up because nobody is reached."""
        self._unreached_s = unreached_s
        self._groups = groups
        self._owners = owners
        self._meta = meta
        self._timeout_s = timeout_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._rooms: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()  # By server, while in use.
        self._joined = Joined(self._room_at, self._ask_joined)
        self._numbers = Numbers()

    # One server.

    async def once(self, question: Question[A, Answer], log_id: int, asked: A, deadline: float) -> Answer:
        """Ask the server that holds a log, in one try."""
        group, connection = await self._groups.reached(log_id, deadline)
        return await self._ask_over(connection, group.link, question, asked, deadline)

    async def outcome(self, handle: SendHandle) -> Accepted | None:
        """Ask what became of a batch whose outcome was unknown; None when it was not kept and never will be."""
        if not isinstance(handle, SendHandle):
            raise BadArgument(f"a handle is that of an OutcomeUnknown, not {type(handle).__name__}")
        accepted = await self.once(OUTCOME, handle.log_id, handle, self._deadline())
        if accepted is None or not handle.row_count:
            return accepted
        if not 0 <= handle.first_row <= accepted.row_count - handle.row_count:
            raise BadArgument(f"the handle names rows beyond the {accepted.row_count} of its batch")
        return accepted.part(handle.first_row, handle.row_count)

    async def find(self, log_id: int, window: AskedWindow) -> Piece:
        """The next pending messages of a walk at one server."""
        deadline = self._deadline()
        return await self._until(deadline, lambda: self.once(FIND, log_id, window, deadline))

    async def pieces(self, log_id: int, window: AskedWindow) -> AsyncIterator[Piece]:
        """All pending messages of a window at one server, piece by piece."""
        left: AskedWindow | None = window
        while left is not None:
            piece = await self.find(log_id, left)
            left = window_behind(left, piece)
            yield piece

    async def one(self, question: About, one: AskedOne) -> np.void:
        """Ask about one message, together with others that wait."""
        if isinstance(one.asked, AskedKeys) or one.exact:
            _, rows = await self.ask(question, one.rows())
        else:
            rows = await self._joined.ask((question, one.log_id, one.subject, False), one.asked, self._deadline())
        row: np.void = rows[0]
        return row

    async def get_one(self, one: AskedOne) -> MessageInfo:
        """Ask what became of one message."""
        return info_of(await self.one(GET, one))

    async def cancel_one(self, one: AskedOne) -> CancelAnswer:
        """End one message."""
        return CancelAnswer(int((await self.one(CANCEL, one))["answer"]))

    # All servers that hold messages.

    async def servers(self) -> list[int]:
        """The logs of all delay servers that meta knows."""
        deadline = self._deadline()
        return await self._until(deadline, lambda: self._groups.all(deadline))

    async def ask(
        self, question: About, rows: AskedRows, instants: NewInstants | None = None
    ) -> tuple[LogIds, AnswerRows]:
        """Ask all servers that hold messages: the server of each message, and one answer a row, in order, once what it
        says is durable.
        """
        deadline = self._deadline()
        wish = AskedMessages(rows.asked, self._numbers, rows.subject, instants, exact=rows.exact)
        keys = rows.asked if isinstance(rows.asked, AskedKeys) else None
        if question is GET or (instants is None and keys is None):
            # To ask does nothing, and a receipt names one message: to cancel it twice is to cancel it once.
            return await self._ask_owners(question, rows.log_ids, wish, deadline)
        with self._numbers.of_call(0 if keys is None else len(keys.keys)) as numbers:
            asked = wish.asked if keys is None else keys._replace(numbers=numbers[1:])
            wish = wish._replace(asked=asked, number=numbers.start)
            return await self._ask_owners(question, rows.log_ids, wish, deadline)

    async def _ask_owners(
        self, question: About, log_ids: LogIds | None, wish: AskedMessages, deadline: float
    ) -> tuple[LogIds, AnswerRows]:
        """Ask the servers that receipts name, or those that own the keys."""
        keys = wish.asked
        if not isinstance(keys, AskedKeys):
            assert log_ids is not None, "receipts name servers"
            return await self._ask_at(question, log_ids, wish, deadline)

        async def ask() -> tuple[LogIds, AnswerRows]:
            # After a try that failed, rows that were answered are asked about again: they get the same answers.
            try:
                async with asyncio.timeout_at(deadline):
                    owners = await self._owners.find([keys.subject] * len(keys.keys), keys.keys)
            except TimeoutError:
                raise ServerUnavailable("meta named no delay server in time; nothing was asked") from None
            try:
                return await self._ask_at(question, owners, wish, deadline)
            except DelaydError as error:
                self._owners.heard(error)
                raise

        return await self._until(deadline, ask)

    async def ask_owner(self, question: Question[A, Answer], subject: bytes, key: bytes, asked: A) -> Answer:
        """Ask the owner of a key something that has the same effect however often it is asked."""
        deadline = self._deadline()

        async def ask() -> Answer:
            try:
                async with asyncio.timeout_at(deadline):
                    (owner,) = (await self._owners.find([subject], [key])).tolist()
            except TimeoutError:
                raise ServerUnavailable("meta named no delay server in time; nothing was asked") from None
            try:
                return await self.once(question, owner, asked, deadline)
            except DelaydError as error:
                self._owners.heard(error)
                raise

        return await self._until(deadline, ask)

    async def _ask_at(
        self, question: About, log_ids: LogIds, wish: AskedMessages, deadline: float
    ) -> tuple[LogIds, AnswerRows]:
        """Ask the servers of the rows, all at the same time."""
        if wish.row_count == 1 and wish.instants is None and isinstance(wish.asked, AskedKeys):
            kind = (question, int(log_ids[0]), wish.asked.subject, True)
            return log_ids, await self._joined.ask(kind, wish.asked, deadline)
        found, servers = np.zeros(wish.row_count, ANSWER), np.zeros(wish.row_count, np.uint64)
        rows_max = ROWS_MAX if isinstance(wish.asked, Asked) else KEY_ROWS_MAX

        async def ask(log_id: int, places: NDArray[np.intp]) -> None:
            async with self._room_at(log_id):
                servers[places], found[places] = await self._ask_newest(question, log_id, wish.take(places), deadline)

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

    async def _ask_joined(self, kind: Kind, asked: Sequence[Row | AskedKeys], deadline: float) -> AnswerRows:
        question, log_id, subject, by_key = kind
        wish = AskedMessages(_join(asked), self._numbers, b"" if by_key else subject)
        return (await self._ask_newest(question, log_id, wish, deadline))[1]

    async def _ask_newest(
        self, question: About, log_id: int, wish: AskedMessages, deadline: float
    ) -> tuple[LogIds, AnswerRows]:
        """Ask one server about rows, and go on to the newest row of each message, wherever that is: the server that
        gave each answer, and the answers.

        A server names the row where it stopped on the way, and the other server to which an operator has drained a
        message.
        """
        found = (await self._ask_again(question, log_id, wish, deadline)).copy()
        servers = np.full(len(found), log_id, np.uint64)
        leads_on = _LEADS_ON[1:] if wish.exact else _LEADS_ON
        while len(rows := np.flatnonzero(np.isin(found["state"], leads_on))):
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
                own = wish.take(rows.take(there))._replace(asked=newer.take(there.tolist()))
                found[rows.take(there)] = await self._ask_again(question, server, own, deadline)
        return servers, found

    async def _ask_again(self, question: About, log_id: int, wish: AskedMessages, deadline: float) -> AnswerRows:
        """Ask one server, again and again while it may answer later; about keys only while it is their owner."""
        final = OWNER_LOST if isinstance(wish.asked, AskedKeys) else ()
        return await self._until(deadline, lambda: self.once(question, log_id, wish, deadline), final)

    # Whichever server has room.

    async def place(self, row: Single, window_ms: int) -> Single:
        """A send with the instant that a server chose."""
        subject, body, when, relative, *rest = row
        column = np.array([when], np.int64)
        (instant_ms,) = (await self._places(subject, column, relative, window_ms)).tolist()
        return (subject, body, instant_ms, False, *rest)

    async def place_columns(self, columns: Columns, window_ms: int) -> Columns:
        """A batch with the instants that a server chose."""
        if not columns.bodies:
            return columns
        subject = columns.subject.decode("ascii")
        instants_ms = await self._places(subject, columns.deliver, columns.relative, window_ms)
        return columns._replace(deliver=instants_ms, relative=False)

    async def _places(self, subject: str, deliver: Int64s, relative: bool, window_ms: int) -> Int64s:
        deadline = self._deadline()

        async def ask(group: DelayGroup) -> Int64s:
            await group.link.connection()
            due_ms = group.link.clock.latest_ms_column(deliver) if relative else deliver
            chosen = np.empty(len(due_ms), np.int64)
            for rows in _requests(due_ms):
                connection = await group.link.connection()
                group.asked(self._loop.time())
                sought = Sought(subject, window_ms, due_ms.take(rows))
                found = await self._ask_over(connection, group.link, PLACES, sought, deadline)
                chosen[rows] = found
            return chosen

        async def ask_any() -> Int64s:
            while True:
                group: DelayGroup | None = None
                try:
                    group = self._groups.choose() or await self._groups.find()
                    return await ask(group)
                except (RetryLater, ConnectionLost, RequestTimedOut) as error:
                    if group is not None and not isinstance(error, ServerUnavailable):
                        group.refused(self._loop.time())
                        if self._groups.another_takes():
                            continue
                    self._meta.refresh_soon()
                    raise

        try:
            async with asyncio.timeout_at(deadline):
                return await self._until(deadline, ask_any)
        except TimeoutError:
            raise RequestTimedOut("no delay server chose an instant in time; nothing was sent", sent=False) from None

    # What all of them share.

    def _deadline(self) -> float:
        return self._loop.time() + self._timeout_s

    def _room_at(self, log_id: int) -> asyncio.Semaphore:
        """The room for requests at one server, so that one that is away keeps nobody from the others."""
        room = self._rooms.get(log_id)
        if room is None:
            room = self._rooms[log_id] = asyncio.Semaphore(MANY_UNDER_WAY)
        return room

    async def _ask_over(
        self, connection: Connection, link: ServerLink, question: Question[A, Answer], asked: A, deadline: float
    ) -> Answer:
        head, body = question.put(asked, link)
        left_ms = max(0.0, deadline - self._loop.time()) * 1000
        asked_us = monotonic_us()
        answer = await connection.request(question.request, head, body, timeout_ms=left_ms)
        try:
            link.hear(asked_us, answer.head)
            log_id = need_u64(answer.head, "log_id")
            if log_id != link.log_id:
                raise BadRequest(f"it is for the log {log_id:016x} instead of {link.log_id:016x}")
            return question.read(asked, answer)
        except CallerError as error:
            raise unreadable(connection, error) from error

    async def _until(
        self, deadline: float, ask: Callable[[], Awaitable[Answer]], final: tuple[type[DelaydError], ...] = ()
    ) -> Answer:
        """Ask again and again until the deadline, while an answer may come later; ``final`` errors end it at once."""
        backoff = RetryWaits()
        while True:
            try:
                return await ask()
            except final:
                raise
            except (RetryLater, ConnectionLost, RequestTimedOut) as error:
                hint_ms = spread_ms(error.retry_after_ms) if error.retry_after_ms else 0.0
                wait_s = max(hint_ms, backoff.next_ms()) / 1000
                # No time is left for another try, or as little as says that nobody was reached.
                if self._loop.time() + wait_s >= deadline - self._left_s(error):
                    raise
            await asyncio.sleep(wait_s)

    def _left_s(self, error: DelaydError) -> float:
        return self._unreached_s if isinstance(error, ServerUnavailable) else 0.0


# A server looks for each message alone, at most so many in a request; messages of one second need one look.
APART_MAX = 512
TOGETHER_MIN = 32
TOGETHER_MAX = 65_536
APART_MS_MAX = 86_000_000  # Messages of one request are due within so much time; a server takes a day.
SECOND_MS = 1_000


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
