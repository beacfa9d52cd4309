"""Dispatcher: it moves due rows from the wheel to the link of their subject's target (rules H5, P7).

A subject's first row waits until the subject's target is noted durably in the message log. Every target has its own
queue, so a target that is away delays only its own subjects. When an operator moves a subject, it leaves its old target
once no row of it is in doubt there, and its new target is noted first.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

import msgpack
import numpy as np
from numpy.typing import NDArray

from delayd.address import Endpoint
from delayd.batch.columns import FEW_ROWS
from delayd.batch.names import RECORD_SUBJECT, RECURRING_SUBJECT
from delayd.batch.sequences import among
from delayd.delay.handoff.link import Link, Phase
from delayd.delay.handoff.target_words import TargetWords
from delayd.delay.handoff.window import MayHaveLeft, lowest_offset, split_off
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.rows import Rows
from delayd.delay.subjects import Subjects
from delayd.delay.timers.wheel import Wheel
from delayd.errors import DamagedValue, DiskFull, key_text
from delayd.log.control import TargetNote, encode_known
from delayd.machine.alarms import Alarms
from delayd.machine.executor import Done, Executor
from delayd.machine.state import State
from delayd.wire.meta import Move

log = logging.getLogger(__name__)

# Rows taken from the wheel in one turn of the loop. Only a herd has more, and then others get their turn in between.
ROWS_A_STEP = 65_536
ASK_AGAIN_MS = 1_000  # After meta named no route: how long until it is asked again.
NO_TARGET = -1
RECURRING, RECORD = RECURRING_SUBJECT.encode(), RECORD_SUBJECT.encode()
OWN_SUBJECTS = (RECURRING, RECORD)  # Their rows are handed over to nobody: this server decides about them.
SUBJECTS_MIN = 1_024  # A first capacity of the table of links.

LogControl = Callable[[bytes, Callable[[], None]], None]
AskRoutes = Callable[[list[bytes]], None]


@dataclass(frozen=True, slots=True)
class Notes:
    """The targets of subjects, as a start found them."""

    targets: Mapping[bytes, int]  # By subject.
    owed: Collection[bytes]  # Subjects whose target only the message log names: the next checkpoint takes it.
    lost: Collection[bytes]  # Subjects whose target does not check in the state.
    earlier: MayHaveLeft  # What an earlier life may have sent (H5).


@dataclass(frozen=True, slots=True)
class Routing:
    """What the dispatcher asks of the other parts of the server."""

    ledger: Ledger
    new_link: Callable[[int], Link]
    log_control: LogControl
    ask_routes: AskRoutes


class Dispatcher:
    """The routes of subjects, and their due rows."""

    def __init__(
        self, wheel: Wheel, subjects: Subjects, alarms: Alarms, words: TargetWords, notes: Notes, routing: Routing
    ) -> None:
        self._earlier = notes.earlier
        self.links: dict[int, Link] = {}
        self.targets = dict(notes.targets)  # Subject to log_id of its target; durable in the message log (rule H5).
        self.changed = {subject: notes.targets[subject] for subject in notes.owed}  # What no checkpoint holds yet.
        self.forgotten: set[bytes] = set()  # Subjects whose note the next checkpoint takes out of the state.
        self.withheld = set(notes.lost)  # Subjects whose target was lost: their rows wait for an operator.
        self._wheel = wheel
        self._subjects = subjects
        self._clock = alarms.clock
        self._new_link = routing.new_link
        self._log_control = routing.log_control
        self._ask_routes = routing.ask_routes
        self._link_of = np.full(SUBJECTS_MIN, NO_TARGET, np.int32)  # By subject number: index of its link in _order.
        self._known = 0  # How many subjects, by number, already have a place in ``_link_of``.
        self._order: list[Link] = []
        self._index_of: dict[int, int] = {}  # By target.
        self._unrouted: defaultdict[int, list[Rows]] = defaultdict(list)
        self._asked: set[bytes] = set()
        self._places: dict[int, Endpoint] = {}
        self._ask_again = alarms.alarm(self._ask_unrouted)
        # What the former targets of subjects may have offered and lost, since a start.
        self._left_behind: dict[bytes, set[MayHaveLeft]] = {}
        self._lost = words.lost  # Targets that are sent nothing any more (rule H5).
        self._is_freed = words.is_freed  # Tells whether all rows that wait for a lost target are in doubt.
        self._moving: dict[bytes, int] = {}  # Subjects on their way to another target.
        self._ledger = routing.ledger
        self._trusted = False
        # Called when rows of such a subject have fallen due.
        self.on_own: dict[bytes, Callable[[], None]] = dict.fromkeys(OWN_SUBJECTS, _nobody_decides)
        self.on_ready: Callable[[], None] = _nobody_waits  # Called when a target can be asked something, or may be.
        for target in sorted(set(notes.targets.values())):
            self._link(target)

    @property
    def unrouted_rows(self) -> int:
        """Due rows whose subject has no target yet."""
        return sum(map(len, self.unrouted()))

    @property
    def given_up(self) -> list[int]:
        """The targets that an operator gave up for good, rising."""
        return sorted(self._lost)

    def unrouted(self) -> Iterator[Rows]:
        """View the due rows whose subject has no target yet, in several arrays."""
        return (rows for parts in self._unrouted.values() for rows in parts)

    @property
    def recurs(self) -> bool:
        """Whether there may be recurring schedules."""
        return self._subjects.has(RECURRING)

    def own(self, subject: bytes) -> list[Rows]:
        """View the due rows of one of `OWN_SUBJECTS`, in several arrays."""
        if not self._subjects.has(subject):
            return []
        return list(self._unrouted.get(self._subjects.number(subject), ()))

    @property
    def targets_away(self) -> int:
        """How many targets are not connected that a subject is noted for, or a message waits for."""
        away = [link for link in self._order if link.phase is not Phase.READY and not link.is_lost]
        noted = set(self.targets.values()) if away else set()
        return sum(link.target in noted or link.rows > 0 or bool(link.alarm) for link in away)

    @property
    def wants_places(self) -> bool:
        """Whether a target is not connected: it may listen at another address now."""
        return any(link.phase is not Phase.READY and not link.is_lost for link in self._order)

    def step(self) -> None:
        """Hand due rows to their links, and let the links send."""
        self._route_new_subjects()
        # After a reboot nothing is sent until the clock is confirmed: a message that left too early can't be taken
        # back.
        self._trusted = self._trusted or self._clock.confirmed
        if self._trusted:
            now_ms = self._clock.now_ms()
            # Rows beyond this number are taken in a later turn of the loop: `next_due_ms` then says that they are due.
            rows = self._wheel.take_due(now_ms, ROWS_A_STEP)
            if len(rows):
                self._hand_out(self._ledger.may_leave(rows))
        for link in self._order:
            link.pump()
        if self._moving:
            self._move_on()

    @property
    def takes_due_rows(self) -> bool:
        """Whether due rows have left the wheel, so that each row is where it waits."""
        return self._trusted

    def move(self, subject: bytes, target: int) -> None:
        """Send a subject's rows to another target from now on, by an operator's decision."""
        if target in self._lost:
            log.warning("move_not_followed subject=%s target=%016x reason=it_is_lost", subject.decode(), target)
        elif self.targets.get(subject, target) != target:
            self._moving[subject] = target

    def is_moving(self, subject: bytes) -> bool:
        """Whether a move is not noted durably yet, or an answer that meta gave before the move may still arrive."""
        return subject in self._moving or subject in self._asked

    def link_of(self, subject: bytes) -> Link | None:
        """The link of a subject's target. While that is not known, meta is asked for it, and `on_ready` tells."""
        if subject not in self.targets:
            self._subjects.number(subject)
            self._route_new_subjects()
            return None
        return self._link(self.targets[subject])

    def free(self, target: int) -> None:
        """All rows that may be at a lost target are decided: ask for other targets of its subjects."""
        self._route_new_subjects()
        rows = self.links[target].sender.take_rest()
        for subject in [subject for subject, log_id in self.targets.items() if log_id == target]:
            if self._subjects.has(subject):
                self._leave(subject)
            del self.targets[subject]
            self.changed.pop(subject, None)
            self.forgotten.add(subject)
            self._moving.pop(subject, None)
            if not self._subjects.has(subject):
                continue
            number = self._subjects.number(subject)
            self._link_of[number] = NO_TARGET
            own = rows.take(np.flatnonzero(rows["subject"] == number))
            if len(own):
                self._unrouted[number].append(own)
        self._ask_again.soon()

    def came(self) -> None:
        """Look at rows that have just entered the wheel: rows that are due already are handed out without waiting for
        the timer.
        """
        self._route_new_subjects()
        now_ms = self._clock.now_ms()
        due_ms = self._wheel.next_due_ms(now_ms)
        if due_ms is not None and due_ms <= now_ms:
            self.step()

    def next_due_ms(self) -> int | None:
        """The instant at which something is due next, by the judged clock."""
        if not self._trusted:
            return None
        return self._wheel.next_due_ms(self._clock.now_ms())

    def routed(self, routes: dict[bytes, int], unrouted: list[bytes]) -> None:
        """Take meta's answer: note each new target, and use it when that is durable."""
        for subject in unrouted:
            self._asked.discard(subject)
        if unrouted:
            self._ask_again.after(ASK_AGAIN_MS)
        notes: list[tuple[bytes, int]] = []
        for subject, target in routes.items():
            if subject in self.targets or subject not in self._asked:
                continue
            if target in self._lost:
                # Meta has not heard yet that the target is lost.
                self._asked.discard(subject)
                self._ask_again.after(ASK_AGAIN_MS)
                continue
            notes.append((subject, target))
        if notes:
            self._log_control(encode_notes(notes), partial(self.noted, notes))

    def noted(self, notes: Sequence[tuple[bytes, int]]) -> None:
        """Targets are noted durably: from now on rows of each subject may be sent there."""
        for subject, target in notes:
            self._note(subject, target)
        for target in {target: None for _, target in notes}:
            if self._is_freed(target):
                # An operator gave the target up while the note was being stored: ask for another target of its
                # subjects.
                self.free(target)
            else:
                self._link(target).pump()
        self.on_ready()

    def _note(self, subject: bytes, target: int) -> None:
        self._asked.discard(subject)
        self._moving.pop(subject, None)
        self._leave(subject)
        self.targets[subject] = self.changed[subject] = target
        self.forgotten.discard(subject)
        number = self._subjects.number(subject)
        self._route_new_subjects()
        link = self._link(target)
        self._link_of[number] = self._index_of[target]
        for rows in self._unrouted.pop(number, []):
            link.offer(self._ledger.may_leave(rows))

    def _leave(self, subject: bytes) -> None:
        """Remember what the target of a subject may have offered and lost, for its rows go elsewhere now."""
        target = self.targets.get(subject)
        if target is not None and (bound := self.links[target].lost_offers) is not None:
            self._left_behind.setdefault(subject, set()).add(bound)

    def place(self, target: int, endpoint: Endpoint) -> None:
        """Tell where a target listens."""
        self._places[target] = endpoint
        link = self.links.get(target)
        if link is not None and link.endpoint != endpoint:
            link.move(endpoint)

    def drop(self, ended: NDArray[np.uint64]) -> None:
        """Drop rows that targets have named, wherever they wait; ``ended`` are all of them, sorted."""
        for link in self._order:
            link.sender.leave_out(ended)

    def may_have_left(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows a target may hold that has not answered since an earlier life of this server (rule H5), or that
        consumers may have had, for their target has lost what it had offered (rule C1).
        """
        found = self._earlier.among(rows)
        for link in self._order:
            if link.lost_offers is not None:
                found |= link.lost_offers.among(rows)
        if found.any():
            for number in np.unique(rows["subject"].compress(found)).tolist():
                own = np.flatnonzero(rows["subject"] == np.uint32(number))
                found[own] = self._may_have_left(rows.take(own), self._subjects.names[number])
        for link in self._order:
            if len(link.lost_rows):
                found |= among(rows["sequence"], link.lost_rows)
        return found

    def _may_have_left(self, rows: Rows, subject: bytes) -> NDArray[np.bool_]:
        """The same for rows of one subject."""
        bounds = list(self._left_behind.get(subject, ()))
        link = self.links[self.targets[subject]] if subject in self.targets else None
        if link is not None and link.lost_offers is not None:
            bounds.append(link.lost_offers)
        if subject in self.withheld if link is None else not link.sender.earlier_settled:
            bounds.append(self._earlier)
        found = np.zeros(len(rows), np.bool_)
        for bound in bounds:
            found |= bound.among(rows)
        return found

    def take_out(self, sequences: NDArray[np.uint64], arrays: Collection[int]) -> list[Rows]:
        """Take rows out of where they wait: they have ended; returns them, in several arrays. ``sequences`` rise, and
        ``arrays`` are the ids of the arrays in which the rows stand.
        """
        found = [rows for link in self._order for rows in link.sender.take_out(sequences, arrays)]
        for number, parts in list(self._unrouted.items()):
            kept, taken = split_off(parts, sequences, arrays)
            if taken:
                self._unrouted[number] = kept
                found += taken
        return found

    def lowest_message_log_offset(self) -> int | None:
        """Lowest message log offset that a due row refers to (rule P6)."""
        offsets = [link.sender.lowest_message_log_offset() for link in self._order]
        offsets.append(lowest_offset(list(self.unrouted())))
        return min((offset for offset in offsets if offset is not None), default=None)

    def waiting(self) -> list[Rows]:
        """View the due rows that are at no target, in several arrays."""
        return [*(rows for link in self._order for rows in link.sender.waiting_parts()), *self.unrouted()]

    def in_flight(self) -> Iterator[Rows]:
        """View the rows that were handed over and are not decided, in several arrays."""
        return (rows for link in self._order for rows in link.sender.window.rows())

    def parts(self) -> Iterator[Rows]:
        """View all rows that have left the wheel and are not decided, in several arrays."""
        return chain(self.waiting(), self.in_flight())

    def take_changes(self) -> tuple[dict[bytes, int], set[bytes]]:
        """Take what the next checkpoint is to hold: notes that are new, and subjects whose note is not needed."""
        taken = self.changed, self.forgotten
        self.changed, self.forgotten = {}, set()
        return taken

    def forget_targets(self) -> None:
        """Forget the targets of subjects that no row in memory uses, unless rows of them may be in doubt (H5)."""
        for subject, target in list(self.targets.items()):
            link = self.links[target]
            settled = link.phase is Phase.READY and link.sender.window.earlier_settled
            if settled and not self._subjects.has(subject):
                del self.targets[subject]
                self._left_behind.pop(subject, None)
                self.changed.pop(subject, None)
                self.forgotten.add(subject)

    def _move_on(self) -> None:
        """Note the new targets of subjects whose old target holds nothing in doubt; their rows wait here meanwhile."""
        for subject, target in list(self._moving.items()):
            if subject not in self.targets or target in self._lost:
                # Either the subject was forgotten, and meta is asked when it is next used; or the new target is lost.
                del self._moving[subject]
                continue
            link = self.links[self.targets[subject]]
            if subject in self._asked or link.is_lost:
                continue
            number = self._subjects.number(subject)
            self._route_new_subjects()
            self._link_of[number] = NO_TARGET
            rows = link.sender.take_subject(number)
            if len(rows):
                self._unrouted[number].append(rows)
            if not link.sender.holds_subject(number):
                self._asked.add(subject)
                log.info("subject_moves target=%016x to=%016x", link.target, target)
                self._log_control(encode_notes([(subject, target)]), partial(self.noted, [(subject, target)]))

    def _hand_out(self, rows: Rows) -> None:
        if not len(rows):
            return
        if len(rows) <= FEW_ROWS:
            # Mostly there are a few rows of one subject: then plain integers take a third of the time of the arrays
            # below.
            subjects = rows["subject"].tolist()
            index = int(self._link_of[subjects[0]])
            if index != NO_TARGET and subjects.count(subjects[0]) == len(subjects):
                self._order[index].offer(rows)
                return
        targets = self._link_of.take(rows["subject"])
        first = int(targets[0])
        if first != NO_TARGET and bool((targets == first).all()):
            self._order[first].offer(rows)
            return
        for part in _split(rows, targets):
            index = int(self._link_of[int(part["subject"][0])])
            if index == NO_TARGET:
                for of_one in _split(part, part["subject"]):
                    number = int(of_one["subject"][0])
                    self._unrouted[number].append(of_one)
                    if (name := self._subjects.names[number]) in OWN_SUBJECTS:
                        self.on_own[name]()
            else:
                self._order[index].offer(part)

    def _route_new_subjects(self) -> None:
        """Give subjects that appeared since the last look a link, or ask meta for their targets."""
        ask: list[bytes] = []
        count = len(self._subjects)
        if count > len(self._link_of):
            grown = np.full(2 * count, NO_TARGET, np.int32)
            grown[: self._known] = self._link_of[: self._known]
            self._link_of = grown
        for number in range(self._known, count):
            name = self._subjects.names[number]
            if not name:
                continue  # The name was given back before it was looked at here.
            target = self.targets.get(name)
            if target is not None:
                self._link(target)
                self._link_of[number] = self._index_of[target]
            elif self._may_ask(name):
                ask.append(name)
        self._known = count
        self._ask(ask)

    def _ask_unrouted(self) -> None:
        known = self._subjects.names[: self._known]
        self._ask([name for name in known if name and name not in self.targets and self._may_ask(name)])

    def _ask(self, ask: list[bytes]) -> None:
        if ask:
            self._asked.update(ask)
            self._ask_routes(ask)

    def ask_meta(self, subject: bytes) -> None:
        """Ask meta for a withheld subject's target, by an operator's decision."""
        self.withheld.discard(subject)
        self._ask_again.soon()

    def _may_ask(self, subject: bytes) -> bool:
        return subject not in self._asked and subject not in self.withheld and subject not in OWN_SUBJECTS

    def _has_become_ready(self) -> None:
        self.on_ready()

    def _link(self, target: int) -> Link:
        link = self.links.get(target)
        if link is None:
            link = self.links[target] = self._new_link(target)
            link.on_ready = self._has_become_ready
            link.endpoint = self._places.get(target)
            if target in self._lost:
                link.lose()
            self._index_of[target] = len(self._order)
            self._order.append(link)
        return link


def _nobody_waits() -> None:
    """Until the part that asks targets is made."""


def _nobody_decides() -> None:
    """Until the part that decides about such rows is made."""


def _split(rows: Rows, keys: NDArray[np.integer]) -> list[Rows]:
    """The rows of each key, in the order they had: one sort, however many keys there are."""
    order = keys.argsort(kind="stable")
    ordered, keys = rows.take(order), keys.take(order)
    cuts = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(rows)]
    return [ordered[low:high] for low, high in pairwise(cuts)]


def encode_notes(notes: Sequence[tuple[bytes, int]]) -> bytes:
    """The control batch of notes (docs/formats/batch.md, Control records)."""
    return encode_known([TargetNote(subject, target) for subject, target in notes])


SEEN_KEY = b"moves_seen"  # The number of the last moved route that is done.


class RouteMoves:
    """Carries out the moves that meta reports; `worker` writes the number of the last move that is done."""

    def __init__(self, state: State, dispatcher: Dispatcher, worker: Executor) -> None:
        try:
            value = state.get(SEEN_KEY)
        except DamagedValue as error:
            # Meta reports all moves again; a move that is done already is not done twice.
            log.warning("value_rebuilt key=%s source=meta", key_text(error.key))
            value = None
        self.seen = 0 if value is None else int(msgpack.unpackb(value))
        self._state = state
        self._dispatcher = dispatcher
        self._worker = worker
        self._storing = False

    def take(self, moves: Sequence[Move]) -> None:
        """See delayd.net.registration.Moves."""
        done = self.seen
        for move in sorted(moves):
            subject = move.subject.encode()
            self._dispatcher.move(subject, move.log_id)
            if self._dispatcher.is_moving(subject):
                break
            done = move.number
        if done != self.seen and not self._storing:
            self._storing = True
            pairs = [(SEEN_KEY, msgpack.packb(done))]
            self._worker.submit(partial(self._state.commit, pairs), partial(self._stored, done))

    def _stored(self, number: int, ended: Done[None]) -> None:
        self._storing = False
        try:
            ended.result()
        except DiskFull as error:
            log.warning("moves_not_stored reason=%r", str(error))
        else:
            self.seen = number
