"""The meta server without I/O: registrations and routes, kept in the state, served from memory.

Invariant: an answer that says something new is given only when its transaction in the state has returned. Decisions
that are made while a transaction runs go into the next one, so any number of routes costs one sync. An operator's
decision has a transaction of its own: it is taken while nothing else is being stored, and nothing new is decided until
it is stored.

     register, routes ──▶ decided ──▶ gathered ──▶ one transaction, off the loop ──▶ durable ──▶ answers
                                        ▲ meanwhile                                   │
                                        └───────────────── the next one ◀─────────────┘
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter

import msgpack

from delayd.batch.names import check_subject, is_reserved, parse_retry_subject
from delayd.errors import (
    BadArgument,
    BadRequest,
    BadSubject,
    DamagedData,
    DamagedValue,
    DiskFull,
    DiskReserve,
    OwnerUnknown,
    RetryLater,
    ServerStopped,
    SlowDown,
    TooManySubjects,
    UnknownServer,
    key_text,
)
from delayd.machine.clock import Clock
from delayd.machine.executor import Done, Executor
from delayd.machine.operating import Wait, WaitKind
from delayd.machine.state import OperatorLog, State
from delayd.net.machine import SERVER_PREFIX
from delayd.net.tokens import TokenBook
from delayd.wire.heads import U64_MAX
from delayd.wire.meta import (
    SUBJECTS_MAX,
    Cordons,
    Move,
    Registered,
    Routes,
    ServerInfo,
    SlotClaims,
    SlotOwners,
    SlotSet,
    SubjectPage,
    Versions,
    read_registered,
    slots_text,
)
from delayd.wire.push import PushTarget, PushTargets
from delayd.wire.tokens import TokenPage, TokenRecord

from .push import PushTable, target_key, target_value
from .registry import CordonTable, Registry, RegistryTerms, ServerStanding, key_of
from .routes import UNUSED_MAX, UNUSED_MS, RouteTable
from .slots import (
    DOUBT_KEY,
    STATE_KEY,
    Given,
    Members,
    SlotTable,
    begin_in_doubt,
    member_key,
    read_in_doubt,
    read_members,
    read_slot_table,
    slot_table_value,
)
from .tokens import TokenTable, token_key, token_value

log = logging.getLogger(__name__)

ROUTE_PREFIX = b"route/"  # `<subject>` The log_id of its realtime server.
LOOK_PREFIX = b"look/"  # `<subject>` The same while no message has used the route.
MOVE_PREFIX = b"move/"  # `<subject>` [number, log_id]: a route that an operator has moved, for the delay servers.
MOVE_NUMBER_MAX = 1 << 62  # A move's number is a u64.
MOVES_MAX = 100  # Moves in one answer; a delay server asks again for more.
DISK_RETRY_AFTER_MS = 1_000  # Somebody must free space first.
STORED_RETRY_AFTER_MS = 50  # The hint while a transaction is under way.

OnStored = Callable[[RetryLater | None], None]
OnRoutes = Callable[[Routes | RetryLater], None]
OnSlots = Callable[[SlotOwners | RetryLater], None]
OnDone = Callable[[str | RetryLater], None]
"""Called with what an operator's decision has done."""


@dataclass(slots=True)
class _Changes:
    """The contents of the next transaction, and the callbacks that wait for it."""

    puts: dict[bytes, bytes] = field(default_factory=dict)
    removes: list[bytes] = field(default_factory=list)
    servers: list[Registered] = field(default_factory=list)
    routes: dict[str, int] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)  # Subjects among these routes that no message has used.
    slots: Given = field(default_factory=dict)
    # Changes in memory that are made once the transaction is durable.
    after: list[Callable[[], None]] = field(default_factory=list)
    waiters: list[OnStored] = field(default_factory=list)


class Meta:
    """Registry and routes of one directory; every method belongs to the loop's thread and none blocks."""

    def __init__(
        self,
        state: State,
        path: str,
        executor: Executor,
        clock: Clock,
        terms: RegistryTerms,
        stop: Callable[[BaseException], None],
    ) -> None:
        self.transactions = 0
        self._state = state
        self._executor = executor
        self._stop = stop
        self._registry = Registry(clock, terms, _stored_servers(state, path))
        lost: list[str] = []
        routes = _stored_routes(state, path, ROUTE_PREFIX, lost)
        looked = _stored_routes(state, path, LOOK_PREFIX, [])
        self._table = RouteTable(routes, looked, lost, clock.monotonic_ms())
        self._slots, self._members = _stored_slots(state)
        self._cordons = CordonTable(state)
        self._push = PushTable(state, path, clock)
        self._tokens = TokenTable(state, path)
        self.book = TokenBook()  # What this server itself knows of them.
        self.book.take(self._tokens.whole())
        self._operators = OperatorLog(state)
        self._moves, moves_lost = _stored_moves(state, path)
        # A lost move may have had the highest number, and no number is given twice.
        self._last_move = (self._moves[-1].number if self._moves else 0) + moves_lost
        self._clock = clock
        self._gathered = _Changes()
        self._committing = False
        self._storing_word = False  # Whether an operator's decision is in the transaction that is under way.

    @property
    def idle(self) -> bool:
        """Whether all decisions are durable and answered."""
        return not self._committing

    def waits(self) -> Iterator[Wait]:
        """List the states that only an operator can end."""
        yield from self._state.waits()
        for subject in sorted(self._table.lost):
            to = self._one_of("realtime")
            yield WaitKind.ROUTE_DAMAGED.wait("its route did not check", subject=subject, to=to)
        if self._slots.disputed.any():
            slots = slots_text(self._slots.disputed)
            to = self._one_of("delay")
            yield WaitKind.SLOTS_DISPUTED.wait("two delay servers claim them", slots=slots, to=to)
        withheld = self._members.vouched(self._slots.durable, self._slots.disputed).withheld & ~self._slots.disputed
        if withheld.any():
            why = f"their owners are not known: {self._members.doubt()}"
            yield WaitKind.SLOTS_WITHHELD.wait(why, slots=slots_text(withheld))
        live = self._registry.live("delay")
        if live and self._members.durable and self._members.durable.isdisjoint(live) and self._slots.free.any():
            for log_id in sorted(self._members.durable):
                away = f"{log_id:016x}"
                yield WaitKind.SLOTS_UNKNOWN.wait(f"delay server {away}, which may own them, is away", log_id=away)

    def _one_of(self, role: str) -> str:
        """A live server of a role, for a command; a word in its place when none lives."""
        live = self._registry.live(role)
        return f"{live[0]:016x}" if live else "LOG_ID"

    def stood_still(self, ms: int) -> None:
        """No server could register for so long."""
        self._registry.stood_still(ms)

    @property
    def server_count(self) -> int:
        """Servers known, alive or not."""
        return len(self._registry)

    @property
    def route_count(self) -> int:
        """Subjects that have a server."""
        return len(self._table)

    def register(self, server: Registered, on_stored: OnStored, claims: SlotClaims | None = None) -> None:
        """Renew a server's lease; `on_stored` is called when this registration is durable, mostly at once.

        `claims` is what a delay server keeps about slots of keys.

        Raises StaleEpoch, EpochOutOfRange, PlaceTaken, FencedInstance, ServerRetired or SlowDown, see `Registry`.
        """
        if server.role == "delay":
            self._cordons.check(server.log_id)
        if not self._registry.holds(server):
            self._need_no_word()
        self._give_routes_back()
        forgotten = self._registry.make_room(server, self._is_needed)
        if forgotten is not None:
            self._gathered.puts.pop(_server_key(forgotten), None)
            self._gathered.removes.append(_server_key(forgotten))
        is_new = self._registry.hear(server)
        if is_new:
            # A transaction removes before it puts, so a server that was forgotten and registers again stays.
            self._gathered.puts[_server_key(server)] = _server_value(server)
            self._gathered.servers.append(server)
            self._gathered.waiters.append(on_stored)
        if claims is not None:
            self._hear_slots(claims, server.log_id)
        self._commit()
        self._end_doubt()
        if not is_new:
            on_stored(None)

    def _hear_slots(self, claims: SlotClaims, log_id: int) -> None:
        """Hear what a delay server that has just registered keeps about slots of keys (rule I4)."""
        self._members.hear(log_id, claims)
        given = self._slots.judge(log_id, claims)
        if given:
            log.warning("slots_claimed log_id=%016x slots=%d", log_id, len(given))
            if not self._members.in_doubt:
                log.critical("slots_in_doubt log_id=%016x", log_id)
            self._gathered.slots.update(given)
            # A state that lacks what a server was told may lack more: who owns the slots that are free here.
            self._gathered.puts[DOUBT_KEY] = b""
            self._members.begin_doubt()
        for newcomer in self._members.newcomers(self._registry.live("delay")):
            self._members.admit(newcomer)
            self._gathered.puts[member_key(newcomer)] = b""
            self._gathered.after.append(partial(self._members.admitted, newcomer))
            self._gathered.waiters.append(partial(self._members.admission_ended, newcomer))

    def _end_doubt(self) -> None:
        """End the doubt about owners when all who may own slots have registered, and what they claimed is durable."""
        members = self._members
        if not members.in_doubt or self._committing or not members.reached() or members.missing():
            return
        given: Given = {}
        for log_id in members.reached():
            given |= self._slots.judge(log_id, members.told[log_id])
        if given:
            # A transaction did not take these claims. The next registration tries again.
            self._gathered.slots.update(given)
            self._commit()
            return
        log.warning("slots_settled members=%d", len(members.reached()))
        self._sure_of(members.reached())
        self._commit()

    def _sure_of(self, members: frozenset[int]) -> None:
        """Store that these are all who may own slots."""
        self._gathered.removes.append(DOUBT_KEY)
        self._gathered.puts.update((member_key(log_id), b"") for log_id in members)
        self._gathered.after.append(partial(self._members.settle, members, self._members.doubts))

    def slot_peers(self, log_id: int) -> frozenset[int] | None:
        """The delay servers that this one shall know; None while meta itself does not know them all."""
        return self._members.peers_for(log_id, self._registry.live("delay"))

    def slots(self, wanted: SlotSet, on_slots: OnSlots) -> None:
        """The owners of all slots; wanted ones without an owner get one first, if a member is alive and meta knows that
        nobody owns them.

        Raises SlowDown while an operator's decision is being stored.
        """
        if not self._members.in_doubt and (wanted & self._slots.free).any():
            self._need_no_word()
            live = [log_id for log_id in self._registry.live("delay") if log_id in self._members.durable]
            live = self._cordons.open(live) or live
            self._gathered.slots.update(self._slots.assign(wanted, live))
        if self._slots.has_unsettled(wanted):
            self._gathered.waiters.append(partial(self._answer_slots, on_slots))
            self._commit()
        else:
            self._answer_slots(on_slots, None)

    def slots_lost(self, claims: SlotClaims, log_id: int) -> SlotSet:
        """Which slots a delay server must not serve any more."""
        return self._slots.lost(log_id, claims)

    def move_slots(self, slots: SlotSet, versions: Versions, to: int, on_done: OnDone, *, lost: bool = False) -> None:
        """Give slots to another server, because an operator says so: their owner has released them, or is ``lost``.

        ``versions`` are those that the operator knew. Raises as `forget` does, BadArgument when a slot was moved
        meanwhile, and OwnerUnknown while meta can't know that those who released them were their owners.
        """
        self._need_quiet()
        if self._members.in_doubt and not lost:
            raise OwnerUnknown(f"{self._members.doubt()}; wait, or say --lost when nobody else owns these slots")
        if not self._registry.has("delay", to):
            raise UnknownServer(f"meta knows no delay server {to:016x}; see `delayd servers`")
        is_new = to not in self._members.durable
        if is_new and not self._members.durable.isdisjoint(self._registry.live("delay")):
            message = f"the other delay servers have not heard of {to:016x} yet; say it again in a moment"
            raise SlowDown(message, retry_after_ms=STORED_RETRY_AFTER_MS)
        self._gathered.slots.update(self._slots.move(slots, versions, to))
        self._gathered.after.append(partial(self._members.moved, slots))
        if is_new:
            self._gathered.puts[member_key(to)] = b""
            self._gathered.after.append(partial(self._members.admitted, to))
        self._decide(f"moved the slots {slots_text(slots)} to {to:016x}", on_done)

    def settle_slots(self, on_done: OnDone) -> None:
        """Know all owners of slots, because an operator says so: each delay server that may own some has registered.

        Raises as `forget` does, and BadArgument when none has.
        """
        self._need_quiet()
        if not self._members.in_doubt:
            on_done("meta knows the owners of all slots; nothing was changed")
            return
        live = [log_id for log_id in self._registry.live("delay") if log_id in self._members.told]
        if not live:
            raise BadArgument("no delay server is alive that has registered with this meta; start them first")
        # When none of them may own slots yet, the first one may from now on.
        self._sure_of(self._members.present() or frozenset(live[:1]))
        free = slots_text(self._slots.free) or "none"
        self._decide(f"all owners of slots have registered; nobody owns these slots: {free}", on_done)

    def servers(self, role: str | None) -> list[ServerInfo]:
        """All servers of a role, or of each."""
        return self._cordons.mark(self._registry.servers(role))

    def cordons(self) -> Cordons:
        """Which delay servers take no new messages, for those that register."""
        return self._cordons.told(self._registry.live("delay"))

    def cordon(self, log_id: int, standing: ServerStanding, on_done: OnDone) -> None:
        """Use a delay server otherwise from now on, because an operator says so: a cordoned one gets no new messages,
        and a retired one, which holds none any more, leaves the cluster for good.

        Raises as `forget` does; BadArgument when this can't follow its standing, or it owns keys.
        """
        self._need_quiet()
        if not self._registry.has("delay", log_id) and self._cordons.of(log_id) is not ServerStanding.RETIRED:
            raise UnknownServer(f"meta knows no delay server {log_id:016x}; see `delayd servers`")
        if self._cordons.of(log_id) is standing:
            on_done(f"the delay server {log_id:016x} is {standing.value} already; nothing was changed")
            return
        self._cordons.check_change(log_id, standing, self._registry.live("delay"))
        if standing is ServerStanding.RETIRED and log_id in self._slots.owners:
            raise BadArgument(f"the delay server {log_id:016x} owns keys; drain it, which moves them")
        if standing is ServerStanding.SERVING:
            self._gathered.removes.append(key_of(log_id))
        else:
            self._gathered.puts[key_of(log_id)] = standing.value.encode()
        if standing is ServerStanding.RETIRED:
            self._retire(log_id)
        self._gathered.after.append(partial(self._cordons.set, log_id, standing))
        self._decide(f"the delay server {log_id:016x} is {standing.value} now", on_done)

    def _retire(self, log_id: int) -> None:
        server = self._registry.find_any("delay", log_id)
        self._gathered.removes += [_server_key(server), member_key(log_id)]
        self._gathered.after.append(partial(self._registry.remove, "delay", log_id))
        self._gathered.after.append(partial(self._members.remove, log_id))

    def moves_after(self, number: int) -> list[Move]:
        """The moves by operators after the move with this number, in order; at most MOVES_MAX."""
        return self._moves[bisect_right(self._moves, number, key=itemgetter(0)) :][:MOVES_MAX]

    def move_seen(self, number: int) -> None:
        """A delay server has done the move with this number. A meta that was lost may have given it, or this one, whose
        directory was restored: the next move gets a higher number, or that server would never do it.
        """
        # A higher one was never given, and would leave no room for the next.
        if number < MOVE_NUMBER_MAX:
            self._last_move = max(self._last_move, number)

    def forget(self, role: str, log_id: int, with_routes: bool, on_done: OnDone) -> None:
        """Forget a server, because an operator says so: it may register anew with any epoch.

        The subjects of a realtime server stay its own, or with `with_routes` get another one when they are next asked
        for. Raises UnknownServer, BadArgument while it is alive, and SlowDown while something is being stored.
        """
        self._need_quiet()
        server = self._registry.forget(role, log_id)
        subjects = self._table.subjects_of(log_id) if role == "realtime" else []
        if subjects and not with_routes:
            anew = replace(server, epoch=1, place=0)
            self._gathered.puts[_server_key(server)] = _server_value(anew)
            self._gathered.after.append(partial(self._registry.begin_anew, anew))
        else:
            self._gathered.removes.append(_server_key(server))
            for name in subjects:
                self._gathered.removes += [ROUTE_PREFIX + name.encode(), LOOK_PREFIX + name.encode()]
            self._gathered.after.append(partial(self._registry.remove, role, log_id))
            if role == "delay" and log_id not in self._slots.owners:
                self._gathered.removes.append(member_key(log_id))
                self._gathered.after.append(partial(self._members.remove, log_id))
            self._gathered.after.append(partial(self._table.remove, log_id))
        freed = len(subjects) if with_routes else 0
        told = f"forgot {role} server {log_id:016x}; {freed} subjects have no server any more"
        self._decide(told, on_done)

    def move(self, subject: str, log_id: int, on_done: OnDone) -> None:
        """Give a subject to another realtime server, because an operator says so. Raises as `forget` does, and
        BadSubject.
        """
        check_subject(subject.encode())
        if is_reserved(subject):
            raise BadSubject(f"{subject} is of the realtime server that it names; move the subject that was sent to")
        self._need_quiet()
        if not self._registry.has("realtime", log_id):
            raise UnknownServer(f"meta knows no realtime server {log_id:016x}; see `delayd servers`")
        before = self._table.get(subject)
        if before == log_id:
            on_done(f"{subject} is at {log_id:016x} already")
            return
        self._last_move += 1
        number = self._last_move
        self._gathered.puts[ROUTE_PREFIX + subject.encode()] = msgpack.packb(log_id)
        self._gathered.puts[MOVE_PREFIX + subject.encode()] = msgpack.packb([number, log_id])
        self._gathered.removes.append(LOOK_PREFIX + subject.encode())
        self._gathered.after.append(partial(self._moved, Move(number, subject, log_id)))
        old = "nobody" if before is None else f"{before:016x}"
        self._decide(f"moved {subject} from {old} to {log_id:016x}", on_done)

    def _moved(self, move: Move) -> None:
        self._table.move(move.subject, move.log_id)
        self._moves = [*(each for each in self._moves if each.subject != move.subject), move]

    def push_targets(self, after: str, seen: int, gateway: int) -> tuple[PushTargets, int]:
        """A page of the push targets, none when their revision is the one that was ``seen``; and how many gateways
        share the work, with the one that asks.
        """
        revision = self._push.revision
        page, more = ((), False) if seen == revision else self._push.page(after)
        return PushTargets(revision, [*page], more), self._push.gateways(gateway)

    def set_push_target(self, target: PushTarget, was: int, on_done: OnDone) -> None:
        """Keep a push target in place of its version ``was``, because an operator says so; 0: it is new.

        Raises SlowDown as `forget` does, BadArgument and BadSubject when it can't be kept.
        """
        self._need_quiet()
        self._push.check_change(target, was)
        kept = target._replace(version=was + 1)
        self._gathered.puts[target_key(kept.name)] = target_value(kept)
        self._gathered.after.append(partial(self._push.set, kept))
        state = " (paused)" if kept.paused else ""
        self._decide(f"{kept.subject} is pushed to {kept.url} as {kept.name}{state}", on_done)

    def delete_push_target(self, name: str, on_done: OnDone) -> None:
        """Forget a push target, because an operator says so. Raises as `set_push_target` does."""
        self._need_quiet()
        self._push.check_known(name)
        self._gathered.removes.append(target_key(name))
        self._gathered.after.append(partial(self._push.remove, name))
        self._decide(f"deleted the push target {name}", on_done)

    @property
    def token_revision(self) -> int:
        """Another one when any token is."""
        return self._tokens.revision

    def tokens(self, after: str) -> TokenPage:
        """A page of the tokens."""
        self._tokens.heard(self.book.used())
        return self._tokens.page(after)

    def tokens_used(self, used: Mapping[str, int]) -> None:
        """Hear from a server which tokens were used, and when."""
        self._tokens.heard(used)

    def set_token(self, record: TokenRecord, is_new: bool, on_done: OnDone) -> None:
        """Keep a token, because an operator says so. Raises SlowDown as `forget` does, BadArgument and BadSubject when
        it can't be kept.
        """
        self._need_quiet()
        self._tokens.check_change(record, is_new=is_new)
        self._gathered.puts[token_key(record.name)] = token_value(record)
        self._gathered.after.append(partial(self._token_set, record))
        self._decide(f"the token {record.name} is for {record.rights}", on_done)

    def revoke_token(self, name: str, on_done: OnDone) -> None:
        """Forget a token, because an operator says so. Raises as `set_token` does."""
        self._need_quiet()
        self._tokens.check_known(name)
        self._gathered.removes.append(token_key(name))
        self._gathered.after.append(partial(self._token_removed, name))
        self._decide(f"revoked the token {name}", on_done)

    def _token_set(self, record: TokenRecord) -> None:
        self._tokens.set(record)
        self.book.take(self._tokens.whole())

    def _token_removed(self, name: str) -> None:
        self._tokens.remove(name)
        self.book.take(self._tokens.whole())

    def _decide(self, told: str, on_done: OnDone) -> None:
        """Store an operator's decision with the changes that it makes."""
        puts, removes = self._operators.entry(self._clock.now_ms(), told)
        self._gathered.puts.update(puts)
        self._gathered.removes += removes
        self._gathered.waiters.append(partial(self._word_stored, told, on_done))
        self._storing_word = True
        self._commit()

    def _word_stored(self, told: str, on_done: OnDone, refused: RetryLater | None) -> None:
        self._storing_word = False
        on_done(told if refused is None else refused)

    def _need_quiet(self) -> None:
        """Refuse an operator's decision while something is being stored that may change its result."""
        if self._committing:
            message = "meta is storing what was decided before; say it again"
            raise SlowDown(message, retry_after_ms=STORED_RETRY_AFTER_MS)

    def _need_no_word(self) -> None:
        """Refuse a question whose answer an operator's decision may change that is just being stored."""
        if self._storing_word:
            raise SlowDown("meta is storing an operator's word", retry_after_ms=STORED_RETRY_AFTER_MS)

    def routes(self, subjects: Sequence[str], assign: bool, on_routes: OnRoutes, *, used: bool = True) -> None:
        """Look up subjects; with `assign` those without a route get one, durable when `on_routes` is called with it.

        `used` says that messages wait for them. Raises BadRequest for too many at once, BadSubject for a name that
        can't be, TooManySubjects when too many unused ones have a route, and SlowDown while an operator's decision is
        being stored; then none got a route.
        """
        if len(subjects) > SUBJECTS_MAX:
            raise BadRequest(f"{len(subjects)} subjects; ask for {SUBJECTS_MAX} at a time", field="subjects")
        for subject in subjects:
            check_subject(subject.encode())
        # Retry subjects name their servers themselves, and need no route that is stored.
        own = [subject for subject in subjects if not is_reserved(subject)]
        # This comes before anything is given back or decided, so that the routes that are asked for stay.
        self._table.look(own, self._clock.monotonic_ms())
        if assign:
            self._assign(own, used)
        if self._table.has_unsettled(own):
            self._gathered.waiters.append(partial(self._answer_routes, subjects, on_routes))
            self._commit()
        else:
            self._answer_routes(subjects, on_routes, None)

    def subjects(self, prefix: str, after: str, limit: int) -> SubjectPage:
        """Subjects that have a route, in order of name; at most SUBJECTS_MAX, whatever the limit."""
        return self._table.page(prefix, after, min(limit, SUBJECTS_MAX))

    def _assign(self, subjects: Sequence[str], used: bool) -> None:
        if any(self._table.get(subject) is None for subject in subjects) or (used and self._table.unused_of(subjects)):
            self._need_no_word()
        if not used and not self._table.has_room(subjects):
            raise TooManySubjects(
                f"{UNUSED_MAX:,} subjects were looked at to which nobody has sent yet; no further one gets a server "
                "before a message for it has come"
            )
        decided = self._table.decide(subjects, self._registry.live("realtime"))
        self._gathered.routes.update(decided)
        if not used:
            self._gathered.unused.update(decided)
        for subject, log_id in decided.items():
            prefix = ROUTE_PREFIX if used else LOOK_PREFIX
            self._gathered.puts[prefix + subject.encode()] = msgpack.packb(log_id)
        if used and (now_used := self._table.unused_of(subjects)):
            for subject, log_id in now_used.items():
                self._gathered.puts[ROUTE_PREFIX + subject.encode()] = msgpack.packb(log_id)
                self._gathered.removes.append(LOOK_PREFIX + subject.encode())
            self._gathered.after.append(partial(self._table.set_used, list(now_used)))
            self._commit()

    def _give_routes_back(self) -> None:
        """Give back routes that were never used and that nobody looks at any more; some of them with each heartbeat."""
        forgotten = self._table.forgotten(self._clock.monotonic_ms() - UNUSED_MS)
        if forgotten and not self._storing_word:
            # They leave memory at once: a question from now on is decided anew, in a transaction behind this one.
            self._table.give_back(forgotten)
            self._gathered.removes += [LOOK_PREFIX + subject.encode() for subject in forgotten]
            log.info("routes_given_back routes=%d", len(forgotten))
            self._commit()

    def _is_needed(self, server: Registered) -> bool:
        if server.role == "delay":
            return bool(self._slots.durable.of(server.log_id).any())
        return self._table.has_routes(server.log_id)

    def _answer_routes(self, subjects: Sequence[str], on_routes: OnRoutes, error: RetryLater | None) -> None:
        if error is not None:
            on_routes(error)
            return
        routes: dict[str, int] = {}
        unrouted: list[str] = []
        for subject in dict.fromkeys(subjects):
            log_id = self._server_of(subject)
            if log_id is None:
                unrouted.append(subject)
            else:
                routes[subject] = log_id
        on_routes(Routes(routes, self._registry.find("realtime", routes.values()), unrouted))

    def _server_of(self, subject: str) -> int | None:
        """The realtime server of a subject, if one is known."""
        if not is_reserved(subject):
            return self._table.get(subject)
        whose = parse_retry_subject(subject)
        return whose[0] if whose is not None and self._registry.has("realtime", whose[0]) else None

    def _answer_slots(self, on_slots: OnSlots, error: RetryLater | None) -> None:
        if error is not None:
            on_slots(error)
            return
        on_slots(self._members.vouched(self._slots.durable, self._slots.disputed))

    def _commit(self) -> None:
        if self._committing:
            return
        changes, self._gathered = self._gathered, _Changes()
        if changes.slots:
            changes.puts[STATE_KEY] = slot_table_value(self._slots.with_given(changes.slots))
        if not (changes.puts or changes.removes):
            # The caller waited for routes of the last transaction, and added none of its own.
            for waiter in changes.waiters:
                waiter(None)
            return
        self._committing = True
        self.transactions += 1
        work = partial(self._state.commit, list(changes.puts.items()), changes.removes)
        self._executor.submit(work, partial(self._committed, changes))

    def _committed(self, changes: _Changes, done: Done[None]) -> None:
        self._committing = False
        refused: RetryLater | None = None
        try:
            done.result()
        except ServerStopped as error:
            self._stop(error)
            return
        except DiskFull as error:
            # Nothing of the transaction was stored, so meta goes on and serves what it knew before.
            refused = DiskReserve(f"meta stores nothing more: {error.message}", retry_after_ms=DISK_RETRY_AFTER_MS)
        now_ms = self._clock.monotonic_ms()
        self._table.settle(changes.routes, durable=refused is None, unused=changes.unused, now_ms=now_ms)
        self._slots.settle(changes.slots, durable=refused is None)
        if refused is None:
            for server in changes.servers:
                self._registry.stored(server)
            for done_too in changes.after:
                done_too()
        for waiter in changes.waiters:
            waiter(refused)
        self._commit()
        if refused is None:
            self._end_doubt()


def _stored_slots(state: State) -> tuple[SlotTable, Members]:
    """The owners of slots and the members; in doubt when the owners do not check."""
    owners = read_slot_table(state)
    in_doubt = read_in_doubt(state)
    if owners is None:
        begin_in_doubt(state)
        owners, in_doubt = SlotOwners.nobody(), True
    table = SlotTable(owners)
    return table, Members(read_members(state) | table.owners, in_doubt=in_doubt)


IN_KEY = ("role", "log_id")  # What the key of a registration says.


def _server_key(server: Registered) -> bytes:
    return SERVER_PREFIX + server.role.encode() + b"/" + server.log_id.to_bytes(8, "big")


def _server_value(server: Registered) -> bytes:
    value: bytes = msgpack.packb({name: said for name, said in server.to_head().items() if name not in IN_KEY})
    return value


def _stored_servers(state: State, path: str) -> list[Registered]:
    servers: list[Registered] = []
    damaged: list[DamagedValue] = []
    for key, value in state.scan(SERVER_PREFIX, damaged):
        role, log_id = key[len(SERVER_PREFIX) : -9], key[-8:]
        try:
            fields = {"role": role.decode(), "log_id": int.from_bytes(log_id, "big"), **msgpack.unpackb(value)}
            servers.append(read_registered(fields))
        except (ValueError, TypeError, BadRequest) as error:
            raise DamagedData(path, 0, f"the value of {key!r} is no registration ({error})") from error
    for damage in damaged:
        # It is known again when it registers.
        log.warning("value_lost key=%s", key_text(damage.key))
    return servers


def _stored_moves(state: State, path: str) -> tuple[list[Move], int]:
    """The moves by operators, by number, and how many of them do not check."""
    moves: list[Move] = []
    damaged: list[DamagedValue] = []
    for key, value in state.scan(MOVE_PREFIX, damaged):
        try:
            number, log_id = msgpack.unpackb(value)
            moves.append(Move(int(number), key[len(MOVE_PREFIX) :].decode(), int(log_id)))
        except (ValueError, TypeError) as error:
            raise DamagedData(path, 0, f"the value of {key!r} is no move ({error})") from error
    for damage in damaged:
        log.warning("value_lost key=%s", key_text(damage.key))
    return sorted(moves), len(damaged)


def _stored_routes(state: State, path: str, prefix: bytes, lost: list[str]) -> list[tuple[str, int]]:
    """The routes below a prefix; subjects whose route does not check are named in ``lost``."""
    routes: list[tuple[str, int]] = []
    damaged: list[DamagedValue] = []
    for key, value in state.scan(prefix, damaged):
        try:
            log_id = msgpack.unpackb(value)
        except ValueError as error:
            raise DamagedData(path, 0, f"the value of {key!r} is no msgpack") from error
        if type(log_id) is not int or not 0 <= log_id <= U64_MAX:
            raise DamagedData(path, 0, f"the value of {key!r} is no log_id")
        routes.append((key[len(prefix) :].decode(), log_id))
    for damage in damaged:
        log.critical("route_lost key=%s reason=%r", key_text(damage.key), str(damage))
        lost.append(damage.key[len(prefix) :].decode("ascii", "replace"))
    return routes
