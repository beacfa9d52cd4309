"""A model of what a realtime server offers before it is durable (rule L2): one subject, one group, its consumers.

The message log and the pull log each have a written end and a durable one. The steps are those of a delay server that
hands messages over, of both logs, of consumers and of checkpoints. The server may be killed, which loses its memory, or
the power may fail, which also takes any part of each log behind its durable end. A step is a write, a sync or an
answer, so a fault may come between any two of them.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.model.rules import Rule
from tests.model.search import Step

WAITING, SENT, TAKEN = range(3)  # A message at its delay server: not handed over, on its way, called durable by T.
PULL, ACK, LAPSED, SET_BACK = range(4)


class Entry(NamedTuple):
    """An entry of the pull log. SET_BACK has in ``consume`` where the group goes on, and which pulls are void."""

    op: int
    pull: int
    consume: int
    life: int
    consumer: int
    void: tuple[int, ...] = ()


class Consumers(NamedTuple):
    """The group: ``held`` are PULL entries, ``back`` messages to be offered again, and ``lapsed`` pull sequences of
    which an acknowledgement is stale.
    """

    next: int = 0
    held: tuple[Entry, ...] = ()
    back: tuple[int, ...] = ()
    lapsed: tuple[int, ...] = ()


class Point(NamedTuple):
    """A checkpoint: how much of both logs it counts, and what it says of the group and of pull sequences."""

    rows: int = 0
    entries: int = 0
    group: Consumers = Consumers()
    lives: tuple[tuple[int, int], ...] = ()


class Hand(NamedTuple):
    """A message that a consumer works on, under its handle."""

    consumer: int
    row: int
    pull: int
    life: int
    done: bool = False  # Whether its work is done, and only the answer to that is missing.


class Owed(NamedTuple):
    """An answer that waits until both logs are durable up to these ends: what a consumer gets, or that it is done."""

    hand: Hand
    done: bool
    entries: int
    rows: int


class Offered(NamedTuple):
    """Everything. ``log`` has messages by consume sequence; ``lives`` has the first pull sequence of each life."""

    source: tuple[int, ...]
    log: tuple[int, ...] = ()
    durable: int = 0
    entries: tuple[Entry, ...] = ()
    pulls_durable: int = 0
    point: Point = Point()
    taking: Point | None = None
    group: Consumers = Consumers()
    lives: tuple[tuple[int, int], ...] = ((1, 0),)
    next_pull: int = 0
    owed: tuple[Owed, ...] = ()
    hands: tuple[Hand, ...] = ()
    told: tuple[int, ...] = ()  # Messages that a consumer was told are done.
    given: tuple[int, ...] = ()  # Messages in the order in which consumers got them.
    kills: int = 0
    cuts: int = 0
    cuts_left: int = 0
    serving: bool = True
    wrong: str = ""

    @property
    def life(self) -> int:
        """The life of the server."""
        return self.lives[-1][0]


class Bounds(NamedTuple):
    """One search: how many messages, how many faults of each kind, and whether the group waits for the sync."""

    messages: int
    kills: int
    cuts: int
    consumers: int = 1
    ordered: bool = False
    exclusive: bool = False
    checkpoints: bool = False


CONFIGURATIONS: Mapping[str, Bounds] = {
    # The power fails twice: the second start reads entries that the first one has dropped.
    "offers-twice": Bounds(1, kills=1, cuts=2),
    "offers-killed": Bounds(2, kills=1, cuts=1),
    "offers-checkpoints": Bounds(1, kills=0, cuts=2, checkpoints=True),
    # An ordered group, whose messages all have one key.
    "offers-ordered": Bounds(2, kills=1, cuts=2, ordered=True),
    "offers-exclusive": Bounds(2, kills=1, cuts=1, consumers=2, exclusive=True),
}

WIDE: Mapping[str, Bounds] = {"wide-offers": Bounds(2, kills=2, cuts=1)}

RULES = {
    "L2_acks": Rule("offers-twice", "an acknowledgement waits for the message log, up to what is written, too"),
    "L2_taken": Rule("offers-twice", "a delay server is answered when its batch is durable, not when it is offered"),
    "L2_checkpoint": Rule("offers-checkpoints", "a checkpoint waits for the message log up to what it counts"),
    "L2_dropped": Rule("offers-twice", "a start drops pulls behind the message log's end, and is not held by them"),
    "L2_recorded": Rule("offers-twice", "a start that drops pulls says so in the pull log"),
    "L2_first": Rule("offers-twice", "that record is durable before the start takes a message"),
    "L2_stale": Rule("offers-twice", "handles of pulls that a start has dropped are stale"),
    "L2_order": Rule("offers-ordered", "an ordered group gets what is durable"),
    "L2_lead": Rule("offers-exclusive", "an exclusive group gets what is durable"),
    "L2_reads": Rule("offers-twice", "reads for offers go up to the written end"),
}


class Offers:
    """The model; ``removed`` names rules that are not in force."""

    def __init__(self, bounds: Bounds, removed: frozenset[str] = frozenset()) -> None:
        self._bounds = bounds
        self._removed = removed

    def initial(self) -> Offered:
        """All messages are due, and nothing was handed over."""
        bounds = self._bounds
        return Offered((WAITING,) * bounds.messages, kills=bounds.kills, cuts_left=bounds.cuts)

    def canonical(self, state: Offered) -> Offered:
        """The same situation without what can make no difference any more."""
        group, hands = state.group, tuple(sorted(state.hands))
        named = {hand.pull for hand in (*hands, *[owed.hand for owed in state.owed])}
        # Nobody can name another handle any more.
        group = group._replace(lapsed=tuple(sorted(set(group.lapsed) & named)))
        lives = state.lives if named else state.lives[-1:]
        given = state.given if self._bounds.ordered else tuple(sorted(state.given))
        return state._replace(given=given, hands=hands, owed=tuple(sorted(state.owed)), group=group, lives=lives)

    def steps(self, state: Offered) -> Iterator[Step[Offered]]:
        """All that may happen next without a fault."""
        if state.pulls_durable < len(state.entries):
            yield ("T fsyncs the pull log",), state._replace(pulls_durable=len(state.entries), serving=True)
        if not state.serving:
            return
        if state.durable < len(state.log):
            # A delay server that has not heard the answer asks after a restart, and hears the same.
            source = tuple(TAKEN if known == SENT else known for known in state.source)
            told = ("T fsyncs the message log, and answers the delay server",)
            yield told, state._replace(durable=len(state.log), source=source)
        yield from self._handover(state)
        yield from self._offer(state)
        for at, owed in enumerate(state.owed):
            if self._is_durable(state, owed):
                rest = state._replace(owed=state.owed[:at] + state.owed[at + 1 :])
                yield _finish(rest, owed.hand) if owed.done else self._give(rest, owed.hand)
        known = {(hand.pull, hand.life) for hand in (*state.hands, *[owed.hand for owed in state.owed])}
        for pull in state.group.held:
            if (pull.pull, pull.life) not in known:
                # Its consumer never got the answer.
                yield (f"the lease of pull sequence {pull.pull} ends",), _append(state, pull._replace(op=LAPSED))
        for hand in state.hands:
            if all(owed.hand != hand for owed in state.owed):
                yield self._acknowledge(state, hand)
        yield from self._checkpoint(state)

    def faults(self, state: Offered) -> Iterator[Step[Offered]]:
        """The server is killed, or the power fails; in both cases it starts again."""
        if state.kills:
            yield self._restart(state._replace(kills=state.kills - 1), "is killed", len(state.log), len(state.entries))
        if state.cuts_left:
            fewer = state._replace(cuts_left=state.cuts_left - 1, cuts=state.cuts + 1)
            for rows in range(state.durable, len(state.log) + 1):
                for entries in range(state.pulls_durable, len(state.entries) + 1):
                    yield self._restart(fewer, "loses its power", rows, entries)

    def breach(self, state: Offered, final: bool) -> str:
        """Name what is wrong; empty if nothing is."""
        if state.wrong:
            return state.wrong
        for row, known in enumerate(state.source):
            if known == TAKEN and row not in state.log:
                return f"the delay server was told that message {row} is kept, and it is not in the log"
            if state.log.count(row) > 1:
                return f"message {row} is twice in the log"
            if state.given.count(row) > 1 + state.cuts:
                return f"message {row} was given out more often than the power failed"
            if final and row not in state.told:
                return f"nobody was told that message {row} is done, and nothing more happens"
        end = len(state.log)
        if state.group.next > end or any(pull.consume >= end for pull in state.group.held):
            return "the group has come to messages that the log does not have"
        if state.point.rows > end or state.point.group.next > end:
            return "the checkpoint counts messages that the log does not have"
        if self._bounds.exclusive and len({hand.consumer for hand in state.hands if not hand.done}) > 1:
            return "two consumers work for an exclusive group"
        return ""

    def _handover(self, state: Offered) -> Iterator[Step[Offered]]:
        fresh = False  # Messages that no consumer has had are alike, so one of them is enough.
        for row, known in enumerate(state.source):
            if known == WAITING and not (fresh and row not in state.given):
                fresh = fresh or row not in state.given
                sent = _known(state, row, SENT)
                yield (f"T writes message {row}",), sent._replace(log=(*state.log, row))
            elif known == SENT and "L2_taken" in self._removed:
                yield (f"T answers that it has message {row}",), _known(state, row, TAKEN)

    def _offer(self, state: Offered) -> Iterator[Step[Offered]]:
        """A consumer gets the next message, which is written and perhaps not durable."""
        group = state.group
        at = min([group.next, *group.back])
        if at == len(state.log) or (self._bounds.ordered and group.held):
            return
        if at >= state.durable and "L2_reads" in self._removed:
            wrong = f"message {state.log[at]} is set aside as unreadable, and the log has it"
            yield ("T reads up to the durable end",), state._replace(wrong=wrong)
            return
        for consumer in range(self._bounds.consumers):
            if self._bounds.exclusive and any(pull.consumer != consumer for pull in group.held):
                continue
            entry = Entry(PULL, state.next_pull, at, state.life, consumer)
            hand = Hand(consumer, state.log[at], entry.pull, entry.life)
            after = _append(state, entry)._replace(next_pull=state.next_pull + 1)
            ordered = self._bounds.ordered and "L2_order" not in self._removed
            if ordered or (self._bounds.exclusive and "L2_lead" not in self._removed):
                owed = (*state.owed, Owed(hand, False, len(after.entries), len(state.log)))
                yield (f"consumer {consumer} pulls message {hand.row}; its answer waits",), after._replace(owed=owed)
            else:
                yield self._give(after, hand)

    def _give(self, state: Offered, hand: Hand) -> Step[Offered]:
        told = (f"consumer {hand.consumer} gets message {hand.row} under pull sequence {hand.pull}",)
        wrong = state.wrong
        if hand.row in state.told:
            wrong = f"message {hand.row} comes again, and its consumer was told that it is done"
        elif self._bounds.ordered and hand.row in state.given and state.given[-1] != hand.row:
            wrong = f"message {hand.row} comes again behind a later one of its key"
        return told, state._replace(hands=(*state.hands, hand), given=(*state.given, hand.row), wrong=wrong)

    def _acknowledge(self, state: Offered, hand: Hand) -> Step[Offered]:
        group = state.group
        held = next((pull for pull in group.held if (pull.pull, pull.life) == (hand.pull, hand.life)), None)
        after = state
        if held is not None:
            after = _append(state, held._replace(op=ACK))
        else:
            begin, end = _pulls_of(state, hand.life)
            if hand.pull in group.lapsed or not begin <= hand.pull < end:
                told = f"consumer {hand.consumer} acknowledges message {hand.row}, and hears that its handle is stale"
                return (told,), state._replace(hands=_without(state.hands, hand))
        done = hand._replace(done=True)
        owed = (*state.owed, Owed(done, True, len(after.entries), len(state.log)))
        told = f"consumer {hand.consumer} acknowledges message {hand.row}"
        return (told,), after._replace(owed=owed, hands=(*_without(state.hands, hand), done))

    def _checkpoint(self, state: Offered) -> Iterator[Step[Offered]]:
        if not self._bounds.checkpoints:
            return
        taken = Point(len(state.log), len(state.entries), state.group, state.lives)
        if state.taking is None and taken != state.point:
            yield ("a checkpoint begins",), state._replace(taking=taken)
        elif (
            state.taking is not None
            and state.pulls_durable >= state.taking.entries
            and (state.durable >= state.taking.rows or "L2_checkpoint" in self._removed)
        ):
            yield ("the checkpoint is durable",), state._replace(point=state.taking, taking=None)

    def _is_durable(self, state: Offered, owed: Owed) -> bool:
        if owed.done and "L2_acks" in self._removed:
            return state.pulls_durable >= owed.entries
        return state.pulls_durable >= owed.entries and state.durable >= owed.rows

    def _restart(self, state: Offered, what: str, rows: int, entries: int) -> Step[Offered]:
        """A start, which makes durable what it finds, reads the checkpoint and both logs behind it."""
        told = (f"T {what} and starts; it finds", rows, "messages and", entries, "entries of the pull log")
        log, found, point = state.log[:rows], state.entries[:entries], state.point
        source = tuple(
            known if known != SENT else TAKEN if row in log else WAITING for row, known in enumerate(state.source)
        )
        group, lives = point.group, point.lives or ((1, 0),)
        next_pull = max([0, *[entry.pull + 1 for entry in found if entry.op == PULL]])
        void: list[int] = []
        for entry in found[point.entries :]:
            if entry.op == SET_BACK:
                void.clear()
            elif entry.op == PULL and entry.consume >= rows:
                void.append(entry.pull)
            if entry.life > lives[-1][0]:
                lives = (*lives, (entry.life, _first_of(found, entry.life, next_pull)))
            group = apply(group, entry)
        life = state.life + 1
        read = state._replace(source=source, log=log, durable=rows, entries=found, pulls_durable=entries)
        lives = (*lives, (life, next_pull))
        after = read._replace(group=group, lives=lives, next_pull=next_pull, taking=None, owed=(), serving=True)
        if group.next <= rows:
            return told, after
        if "L2_dropped" in self._removed:
            # What was pulled proves that the log has lost its end, so an operator has to come.
            return (*told, "; the start is held"), after._replace(serving=False, wrong="the start is held")
        record = Entry(SET_BACK, next_pull, rows, life, 0, tuple(void) if "L2_stale" not in self._removed else ())
        if "L2_recorded" in self._removed:
            return told, after._replace(group=apply(group, record))
        after = _append(after, record)
        return (*told, "; it drops pulls"), after._replace(serving="L2_first" in self._removed)


def apply(group: Consumers, entry: Entry) -> Consumers:
    """The group behind an entry of the pull log."""
    if entry.op == PULL:
        back = tuple(consume for consume in group.back if consume != entry.consume)
        return group._replace(next=max(group.next, entry.consume + 1), held=(*group.held, entry), back=back)
    if entry.op == SET_BACK:
        held = tuple(pull for pull in group.held if pull.consume < entry.consume)
        back = tuple(consume for consume in group.back if consume < entry.consume)
        return Consumers(min(group.next, entry.consume), held, back, (*group.lapsed, *entry.void))
    ended = [pull for pull in group.held if (pull.pull, pull.life) == (entry.pull, entry.life)]
    group = group._replace(held=tuple(pull for pull in group.held if pull not in ended))
    if entry.op == ACK or not ended:
        return group
    return group._replace(back=(*group.back, ended[0].consume), lapsed=(*group.lapsed, entry.pull))


def _append(state: Offered, entry: Entry) -> Offered:
    return state._replace(entries=(*state.entries, entry), group=apply(state.group, entry))


def _known(state: Offered, row: int, known: int) -> Offered:
    return state._replace(source=(*state.source[:row], known, *state.source[row + 1 :]))


def _finish(state: Offered, hand: Hand) -> Step[Offered]:
    told = (f"consumer {hand.consumer} is told that message {hand.row} is done",)
    return told, state._replace(hands=_without(state.hands, hand), told=tuple(sorted({*state.told, hand.row})))


def _without(hands: tuple[Hand, ...], hand: Hand) -> tuple[Hand, ...]:
    return tuple(each for each in hands if each != hand)


def _pulls_of(state: Offered, life: int) -> tuple[int, int]:
    """The pull sequences that a life gave out and did not lose."""
    for (each, first), (_, stop) in zip(state.lives, [*state.lives[1:], (0, state.next_pull)], strict=True):
        if each == life:
            return first, stop
    return 0, 0


def _first_of(entries: tuple[Entry, ...], life: int, next_pull: int) -> int:
    return min([next_pull, *[entry.pull for entry in entries if entry.life == life]])
