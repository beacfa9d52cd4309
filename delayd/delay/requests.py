"""Requests: the frames that a delay server answers, and the core behind them (docs/protocol.md, Delay server)."""

import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import HEADER, BatchKind, Buffer, Int64s
from delayd.batch.names import check_subject
from delayd.batch.validate import check_subjects, refused_rows
from delayd.delay.core import DelayCore
from delayd.delay.ending.requested import RequestWish
from delayd.delay.producers import AcceptedBatch, Allowance
from delayd.delay.quotas.quotas import QuotaUse
from delayd.errors import RETRY_AFTER_MS_DEFAULT, BatchMalformed, DelaydError, QuotaReached, UnknownServer
from delayd.log.control import QuotaLimits
from delayd.log.hour import ENDED_BYTES
from delayd.machine.clock import JudgedClock
from delayd.wire.asked import (
    AnswerRows,
    DrainProgress,
    Piece,
    read_asked,
    read_asked_keys,
    read_drain_order,
    read_move_try,
    read_moves,
    read_tries,
    read_window,
    wanted_of_keys,
)
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.heads import (
    need_bool,
    need_int,
    need_str,
    need_u64,
)
from delayd.wire.meta import SlotOwners, need_slots, versions_bytes
from delayd.wire.recurring import RecurringRecord, body_of, read_recurring
from delayd.wire.requests import RequestType, not_served
from delayd.wire.scheduling import (
    BATCHES_MAX,
    QUOTAS_PAGE_MAX,
    AcceptedResult,
    DueHour,
    QuotaInfo,
    RefusedResult,
    accepted_head,
    due_hours_head,
    encode_instants,
    limits_of,
    quotas_head,
    read_instants,
    results_body,
    results_head,
    targets_head,
)
from delayd.wire.status import Decision, decided_head, list_head, read_decision

log = logging.getLogger(__name__)

PIECE_BATCHES = 64  # Batches taken in one turn of the loop: some milliseconds at most when each of them is refused.
LENGTH = struct.Struct("<I")
LENGTH_AT = 8  # Position of the length in the header of a batch.

_WISHES = {
    RequestType.CANCEL: RequestWish.CANCEL,
    RequestType.GET: RequestWish.GET,
    RequestType.RESCHEDULE: RequestWish.MOVE,
}

Soon = Callable[[Callable[[], None]], object]
# Takes a piece that begins at a batch's number, and returns the number at which the next piece begins.
Take = Callable[[int], int]
Answer = tuple[Head, Sequence[Buffer]]  # Head and body.
T = TypeVar("T")


class Entry(Protocol):
    """`delayd.net.tokens.Pass`; both raise NotAllowed."""

    def check_table(self, kind: RequestType, table: bytes, subjects: Callable[[], Iterable[bytes]]) -> None:
        """Look at the table of subjects of a batch."""

    def check_whole(self, kind: RequestType) -> None:
        """Look at a request that may concern any subject."""


class Peer(Protocol):
    """The connection that asked."""

    @property
    def entry(self) -> Entry | None:
        """What its token lets it ask for; None when that is everything that others may."""

    def answer(self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = ()) -> None:
        """Answer a request."""

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        """Answer a request with an error."""


class Requests:
    """Turns frames into calls of the core, and their outcomes into answers."""

    def __init__(
        self,
        core: DelayCore,
        clock: JudgedClock,
        status: Callable[[], Head],
        soon: Soon | None = None,
        others: Mapping[int, Callable[[Peer, Frame], None]] | None = None,
        leave: Callable[[Callable[[], object]], object] = lambda call: call(),
    ) -> None:
        """`soon` calls back at the next turn of the loop; without a loop, all of a SEND is taken at once. `others`
        serve requests that concern the directory and not the core. `leave` gives an answer to another server, now or
        when a backup has cut that one, too.
        """
        self._core = core
        self._soon = soon
        self._leave = leave
        # The rest of each SEND: how to take more, from which batch, up to which.
        self._rests: deque[tuple[Take, int, int]] = deque()
        self._clock = clock
        self._status = status
        self.allowances: dict[Peer, Allowance] = {}  # One for each connection that has sent a batch.
        self._handlers: dict[int, Callable[[Peer, Frame], None]] = {
            RequestType.PING: self._ping,
            RequestType.STATUS: self._tell_status,
            RequestType.SEND: self._send,
            RequestType.SEND_AGAIN: self._send_again,
            RequestType.SEND_DRAINED: self._send_drained,
            RequestType.DRAIN: self._drain,
            RequestType.RETIRE: self._retire,
            RequestType.OUTCOME: self._outcome,
            RequestType.CHECKPOINT: self._checkpoint,
            RequestType.TRUST_CLOCK: self._trust_clock,
            RequestType.MEND_LIST: self._list_quarantine,
            RequestType.MEND: self._mend,
            RequestType.TARGETS: self._list_targets,
            RequestType.TARGET_LOST: self._obey_about_target,
            RequestType.TARGET_ACCEPT: self._obey_about_target,
            RequestType.RELEASE_SLOTS: self._release_slots,
            RequestType.RECUR: self._recur,
            RequestType.CANCEL: self._ask_rows,
            RequestType.GET: self._ask_rows,
            RequestType.RESCHEDULE: self._ask_rows,
            RequestType.FIND: self._find,
            RequestType.QUOTAS: self._list_quotas,
            RequestType.DUE_HOURS: self._list_due_hours,
            RequestType.SET_QUOTA: self._set_quota,
            RequestType.PLACES: self._choose_places,
            **(others or {}),
        }

    def disconnected(self, peer: Peer) -> None:
        """Forget a connection that has ended."""
        self.allowances.pop(peer, None)

    def received(self, peer: Peer, frame: Frame) -> None:
        """Serve one request; raises an error that the peer is to be told at once."""
        handler = self._handlers.get(frame.type)
        if handler is None:
            raise not_served("delay", frame.type)
        handler(peer, frame)

    def _ping(self, peer: Peer, frame: Frame) -> None:
        peer.answer(frame.request_id, self._head())

    def _tell_status(self, peer: Peer, frame: Frame) -> None:
        peer.answer(frame.request_id, self._status())

    def _checkpoint(self, peer: Peer, frame: Frame) -> None:
        self._core.checkpoint(lambda offset: peer.answer(frame.request_id, self._head(replay_offset=offset)))

    def _list_quarantine(self, peer: Peer, frame: Frame) -> None:
        after, limit = need_str(frame.head, "after"), need_int(frame.head, "limit")
        peer.answer(frame.request_id, list_head(self._core.memory.quarantine.listing(), after, limit))

    def _mend(self, peer: Peer, frame: Frame) -> None:
        id_, decision = read_decision(frame.head, self._core.memory.quarantine.listing())
        words = self._core.repair.words
        obey = words.drop if decision is Decision.GIVE_UP else words.release
        obey(id_, lambda done, text: peer.answer(frame.request_id, decided_head(id_, done, text)))

    def _list_targets(self, peer: Peer, frame: Frame) -> None:
        behind = need_u64(frame.head, "after")
        peer.answer(frame.request_id, self._head(**targets_head(self._core.handoff.targets.listing(), behind)))

    def _trust_clock(self, peer: Peer, frame: Frame) -> None:
        self._clock.trust()
        log.warning("clock_trusted now_ms=%d", self._clock.now_ms())
        self._core.follow_clock(_tell(peer, frame, lambda done: ({"now_ms": self._clock.now_ms()}, ())))

    def _obey_about_target(self, peer: Peer, frame: Frame) -> None:
        """Carry out an operator's decision about a target; the answer goes out when it is durable."""

        targets = self._core.handoff.targets
        obey = targets.lose if frame.type == RequestType.TARGET_LOST else targets.accept
        obey(need_u64(frame.head, "log_id"), _tell(peer, frame, lambda told: (self._head(message=told), ())))

    def _list_quotas(self, peer: Peer, frame: Frame) -> None:
        after, prefix = need_str(frame.head, "after"), need_str(frame.head, "prefix")
        found = self._core.asked.quotas.listing(after.encode(), prefix.encode(), QUOTAS_PAGE_MAX + 1)
        peer.answer(frame.request_id, self._head(**quotas_head([_quota_info(each) for each in found])))

    def _list_due_hours(self, peer: Peer, frame: Frame) -> None:
        """Count pending messages by the hour in which they are filed."""
        after = need_int(frame.head, "after")
        counted = sorted(self._core.standing.pending_by_hour().items())
        found = [DueHour(hour, messages) for hour, messages in counted if hour > after and messages > 0]
        peer.answer(frame.request_id, self._head(**due_hours_head(found)))

    def _set_quota(self, peer: Peer, frame: Frame) -> None:
        """Set or lift a quota; the answer goes out when that is durable and in force."""
        subject = need_str(frame.head, "subject").encode()
        check_subject(subject)

        limits = QuotaLimits(*limits_of(frame.head))
        self._core.set_quota(subject, limits, _tell(peer, frame, lambda done: (self._head(), ())))

    def _choose_places(self, peer: Peer, frame: Frame) -> None:
        """Answer with the least loaded instants for messages that a caller is about to send."""
        subject = need_str(frame.head, "subject").encode()
        check_subject(subject)
        due_ms = read_instants(frame.body)

        def chosen(instants: Int64s) -> Answer:
            return self._head(), [encode_instants(instants)]

        self._core.places(subject, due_ms, need_int(frame.head, "spread_ms"), _tell(peer, frame, chosen))

    def _send(self, peer: Peer, frame: Frame) -> None:
        places = places_of(frame.body)
        allowance = self.allowances.get(peer)
        if allowance is None:
            allowance = self.allowances[peer] = Allowance()
        request_id = frame.request_id
        if len(places) == 1:
            # Single sends make such frames, a thousand times a second: the result of the one batch is the answer.
            batch, answer = _parse_sent(frame.body, peer.entry), partial(self._answer_one, peer, request_id)
            if isinstance(batch, DelaydError):
                answer(batch, False)
            else:
                self._core.send(batch, answer, allowance)
            return
        results: dict[int, AcceptedResult | RefusedResult] = {}

        def answered(index: int, what: AcceptedBatch | DelaydError, duplicate: bool) -> None:
            results[index] = _result(what, duplicate)
            if len(results) == len(places):
                in_order = [results[at] for at in range(len(places))]
                peer.answer(request_id, self._head(results=results_head(in_order)), results_body(in_order))

        take = partial(self._take, (frame.body, peer.entry), places, answered, allowance)
        begin = take(0)
        if begin < len(places):
            self._later(take, begin, len(places))

    def _send_again(self, peer: Peer, frame: Frame) -> None:
        """Take messages that come again to their group: one batch of a realtime server."""
        batch, answer = _parse(frame.body), partial(self._answer_server, peer, frame.request_id)
        if isinstance(batch, BatchMalformed):
            answer(batch, False)
            return
        self._core.send_again(batch, answer, self.allowances.setdefault(peer, Allowance()))

    def _send_drained(self, peer: Peer, frame: Frame) -> None:
        """Take messages that another delay server held: one batch."""
        batch, answer = _parse(frame.body), partial(self._answer_server, peer, frame.request_id)
        if isinstance(batch, BatchMalformed):
            answer(batch, False)
            return
        self._core.send_drained(batch, answer)

    def _drain(self, peer: Peer, frame: Frame) -> None:
        """Let pending messages go to another delay server, a piece at a time."""

        def told(what: DrainProgress | DelaydError) -> None:
            if isinstance(what, DelaydError):
                peer.answer_error(frame.request_id, what)
            else:
                peer.answer(frame.request_id, self._head(**what.to_head()))

        self._core.asked.endings.let_leave(read_drain_order(frame.head), told)

    def _retire(self, peer: Peer, frame: Frame) -> None:
        """Say whether this server holds nothing any more."""

        def done(told: str | DelaydError) -> None:
            if isinstance(told, DelaydError):
                peer.answer_error(frame.request_id, told)
            else:
                peer.answer(frame.request_id, self._head(message=told))

        self._core.standing.retire(done)

    def _answer_server(self, peer: Peer, request_id: int, what: AcceptedBatch | DelaydError, duplicate: bool) -> None:
        # A server that hears of it forgets the message, and this must be in no backup in which the message is missing.
        self._leave(partial(self._answer_one, peer, request_id, what, duplicate))

    def _answer_one(self, peer: Peer, request_id: int, what: AcceptedBatch | DelaydError, duplicate: bool) -> None:
        if isinstance(what, AcceptedBatch) and not what.decided:
            head = accepted_head(what.base_sequence, what.rows, what.appended_at_ms, duplicate)
            peer.answer(request_id, self._head(results=[head]))
        else:
            results = [_result(what, duplicate)]
            peer.answer(request_id, self._head(results=results_head(results)), results_body(results))

    def _take(
        self,
        sent: tuple[memoryview, Entry | None],
        places: Sequence[tuple[int, int]],
        answered: Callable[[int, AcceptedBatch | DelaydError, bool], None],
        allowance: Allowance,
        begin: int,
    ) -> int:
        """Take a piece of the batches of a SEND; returns where the next piece begins."""
        body, entry = sent
        end = min(begin + PIECE_BATCHES, len(places))
        for index in range(begin, end):
            start, size = places[index]
            batch = _parse_sent(body[start : start + size], entry)
            # An error of one batch is told for that batch alone; its neighbours are kept.
            if isinstance(batch, DelaydError):
                answered(index, batch, False)
            else:
                self._core.send(batch, partial(answered, index), allowance)
        return end

    def _later(self, take: Take, begin: int, end: int) -> None:
        """Take the rest of a SEND piece by piece, in turn with the rests of others and with everything else on the
        loop.
        """
        if self._soon is None:
            while begin < end:
                begin = take(begin)
            return
        self._rests.append((take, begin, end))
        if len(self._rests) == 1:
            self._soon(self._go_on)

    def _go_on(self) -> None:
        assert self._soon is not None, "only a loop has turns"
        take, begin, end = self._rests.popleft()
        begin = take(begin)
        if begin < end:
            self._rests.append((take, begin, end))
        if self._rests:
            self._soon(self._go_on)

    def _release_slots(self, peer: Peer, frame: Frame) -> None:
        """Give up slots of keys, by an operator's word; the answer has their versions."""

        def released(owners: SlotOwners) -> Answer:
            return self._head(versions=versions_bytes(owners.versions)), ()

        self._core.asked.endings.owned_slots.release(need_slots(frame.head, "slots"), _tell(peer, frame, released))

    def _ask_rows(self, peer: Peer, frame: Frame) -> None:
        """Cancel or move messages, or say what became of them: one answer a row, in the order of the request."""
        self._check_log_id(frame)

        def told(rows: AnswerRows) -> Answer:
            return self._head(retry_after_ms=RETRY_AFTER_MS_DEFAULT), [rows.tobytes()]

        answered = _tell(peer, frame, told)
        names = read_asked_keys(frame.body)
        kind, entry = RequestType(frame.type), peer.entry
        if names is not None:
            if entry is not None:
                asked = parse(frame.body)
                entry.check_table(kind, asked.subject_table, asked.subjects)
            wanted_at_ms = wanted_of_keys(names, moves=frame.type == RequestType.RESCHEDULE)
            wish = _WISHES[kind]
            tries = None if wish is RequestWish.GET else read_tries(frame.head, names)
            self._core.asked.endings.ask_by_key(wish, names, answered, wanted_at_ms, tries)
            return
        subject = need_str(frame.head, "subject").encode() if "subject" in frame.head else b""
        if subject:
            check_subject(subject)
        elif entry is not None:
            entry.check_whole(kind)
        endings = self._core.asked.endings
        if frame.type == RequestType.GET:
            endings.get(read_asked(frame.body), answered, subject)
            return
        exact = "exact" in frame.head and need_bool(frame.head, "exact")
        if frame.type == RequestType.CANCEL:
            endings.cancel(read_asked(frame.body), answered, subject, exact=exact)
        else:
            moved_by = read_move_try(frame.head)
            endings.reschedule(*read_moves(frame.body), answered, subject, moved_by, exact=exact)

    def _find(self, peer: Peer, frame: Frame) -> None:
        """List pending messages, a piece at a time."""
        self._check_log_id(frame)

        def found(piece: Piece) -> Answer:
            return self._head(**piece.to_head()), piece.to_body()

        self._core.asked.endings.find(read_window(frame.head), _tell(peer, frame, found))

    def _recur(self, peer: Peer, frame: Frame) -> None:
        """Make, change or run a recurring schedule; the answer has its record."""
        self._check_log_id(frame)

        def told(record: RecurringRecord) -> Answer:
            return self._head(), body_of(record.encode())

        request = read_recurring(frame.head, frame.body)
        self._core.asked.endings.ask_recurring(request, _tell(peer, frame, told))

    def _check_log_id(self, frame: Frame) -> None:
        """A receipt names the log that has its messages; no other server knows them."""
        log_id = need_u64(frame.head, "log_id")
        if log_id != self._core.site.identity.log_id:
            raise UnknownServer(
                f"this is the delay server {self._core.site.identity.log_id:016x}; ask {log_id:016x}, which was sent to"
            )

    def _outcome(self, peer: Peer, frame: Frame) -> None:
        self._check_log_id(frame)

        def answered(found: AcceptedBatch | None) -> None:
            if found is None:
                peer.answer(frame.request_id, self._head(state="unknown", result=None))
                return
            result = _accepted(found, True)
            head = self._head(state="accepted", result=result.to_head())
            peer.answer(frame.request_id, head, results_body([result]))

        self._core.ask_outcome(need_u64(frame.head, "producer_id"), need_u64(frame.head, "producer_batch"), answered)

    def _head(self, **fields: HeadValue) -> Head:
        head: Head = {"log_id": self._core.site.identity.log_id, "now_ms": self._clock.now_ms(), **fields}
        if self._clock.in_boot_doubt:
            head["clock_in_doubt"] = True
        return head


def _tell(peer: Peer, frame: Frame, answer: Callable[[T], Answer]) -> Callable[[T | DelaydError], None]:
    """What a part of the core calls when it has done what a request wants, or with the error by which it is refused."""

    def told(what: T | DelaydError) -> None:
        if isinstance(what, DelaydError):
            peer.answer_error(frame.request_id, what)
        else:
            peer.answer(frame.request_id, *answer(what))

    return told


def split(body: Buffer) -> list[Batch | BatchMalformed]:
    """View the PRODUCER batches that follow one another in a body; a malformed batch is replaced by its error.

    Raises as `places_of`.
    """
    view = memoryview(body)
    return [_parse(view[start : start + size]) for start, size in places_of(body)]


def places_of(body: Buffer) -> list[tuple[int, int]]:
    """Where the batches of a body begin, and how long each says it is.

    Raises:
        BatchMalformed: their lengths do not fill the body exactly, so nobody can tell where one of them begins.
    """
    places: list[tuple[int, int]] = []
    position = 0
    while position < len(body):
        if len(places) == BATCHES_MAX:
            raise BatchMalformed(f"a SEND of more than {BATCHES_MAX} batches; put more rows into each, or send two")
        size = LENGTH.unpack_from(body, position + LENGTH_AT)[0] if len(body) - position >= HEADER.size else 0
        if size < HEADER.size or size & 7 or size > len(body) - position:
            raise BatchMalformed(
                f"batch {len(places)} claims {size} of the {len(body) - position} bytes that are left of the body; "
                "batches follow one another and fill it exactly"
            )
        places.append((position, size))
        position += size
    if not places:
        raise BatchMalformed("a SEND without a batch; put at least one into its body")
    return places


def _parse_sent(body: memoryview, entry: Entry | None) -> Batch | DelaydError:
    """View a batch of a client, and check that its token allows to send to each of its subjects."""
    batch = _parse(body)
    if entry is None or isinstance(batch, BatchMalformed):
        return batch
    try:
        # The table is not proved yet, and must be whole before it is read.
        check_subjects(batch)
        entry.check_table(RequestType.SEND, batch.subject_table, batch.subjects)
    except DelaydError as error:
        return error
    return batch


def _parse(data: memoryview) -> Batch | BatchMalformed:
    try:
        batch = parse(data)
    except BatchMalformed as error:
        return error
    if batch.kind is not BatchKind.PRODUCER:
        return BatchMalformed(f"a batch of kind {batch.kind.name} can't be sent; producers send PRODUCER batches")
    return batch


def _result(what: AcceptedBatch | DelaydError, duplicate: bool) -> AcceptedResult | RefusedResult:
    if isinstance(what, AcceptedBatch):
        return _accepted(what, duplicate)
    next_free_ms = what.next_free_ms if isinstance(what, QuotaReached) else None
    return RefusedResult(what.code, what.message, what.retry_after_ms, refused_rows(what), next_free_ms)


def _quota_info(use: QuotaUse) -> QuotaInfo:
    return QuotaInfo(use.subject.decode(), *use.limits, use.counted, use.rows, use.bytes, use.highest_ms, use.highest)


def _accepted(taken: AcceptedBatch, duplicate: bool) -> AcceptedResult:
    decided = len(taken.decided) // ENDED_BYTES
    return AcceptedResult(taken.base_sequence, taken.rows, taken.appended_at_ms, duplicate, decided, taken.decided)
