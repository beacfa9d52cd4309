"""What the ledger of a torture knows of messages with keys: which answers about each of them may be true.

Invariant: whoever asks about a key waits for each answer before asking about that key again. An answer that never comes
leaves both states possible until all is quiet, because the request may still be carried out.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from delayd import CancelAnswer, MessageState, RescheduleAnswer, SendVerdict
from delayd.client.sending.receipts import ReceiptColumns
from delayd.wire.asked import AnswerRows

from .torture_ledger import Fate, Ledger, Name, Sent


class State(Enum):
    """What is known for certain of a message with a key."""

    ASKED = "asked"
    OPEN = "open"  # It is kept: it is pending, or it has left and nobody was told.
    LEFT = "left"
    CANCELLED = "cancelled"
    REPLACED = "replaced"
    MET = "met"  # It met another message with its key, and is not kept.
    REFUSED = "refused"


FREE = (State.CANCELLED, State.LEFT)
NEVER = (State.CANCELLED, State.REPLACED)


class Accepted(NamedTuple):
    """The name of a row, and when it was accepted."""

    name: Name
    at_ms: int


class Row(NamedTuple):
    """The name of a row, and when it is due."""

    name: Name
    due_ms: int | None  # None where nobody said so.


@dataclass(frozen=True, slots=True)
class Asked:
    """Messages that somebody asks about, by their receipts or by their keys; None: nobody has sent this key."""

    numbers: Sequence[int | None]
    receipts: ReceiptColumns | None = None
    keys: Sequence[str] | None = None

    def each(self) -> Iterator[tuple[int | None, str | None]]:
        """Each message, with its key if it is asked about by that."""
        keys: Sequence[str | None] = self.keys or [None] * len(self.numbers)
        return zip(self.numbers, keys, strict=True)


@dataclass(slots=True)
class Keyed(Sent):
    """A message with a key."""

    key: str = ""
    on_conflict: str = ""
    state: State = State.ASKED
    verdict: SendVerdict = SendVerdict.ACCEPTED
    first: Accepted | None = None  # Of its first row, as its receipt says.
    loose: tuple[int, ...] = ()  # Instants to which it may still be moved, by requests that got no answer.
    loose_cancel: bool = False


class KeyLedger:
    """The part of a ledger about the messages of one subject that have keys."""

    def __init__(self, ledger: Ledger, subject: str) -> None:
        self.subject = subject
        self.numbers: list[int] = []
        self.newest: dict[str, int] = {}
        self.heard: Counter[str] = Counter()
        self._ledger = ledger
        self._loose_cancels: set[str] = set()
        self._loose_moves: dict[str, tuple[int, ...]] = {}

    # Sends.

    def send(self, key: str, on_conflict: str, deliver_at_ms: int, size: int) -> tuple[int, bytes]:
        """A new message is about to be sent: its number and its body."""
        keyed = Keyed(self.subject, deliver_at_ms, size, key=key, on_conflict=on_conflict)
        self._expect_loose(keyed)
        number, body = self._ledger.add(keyed)
        self.numbers.append(number)
        return number, body

    def refused(self, number: int) -> None:
        """The producer was told that nothing is kept of it, not even a row."""
        self.of(number).state = State.REFUSED
        self._ledger.refused(number)

    def accepted(self, number: int, first: Accepted, now_ms: int) -> None:
        """It is kept, and no message with its key was pending."""
        keyed = self.of(number)
        self._heard("send", SendVerdict.ACCEPTED.name)
        earlier = self._newest(keyed.key)
        if earlier is not None and earlier.state is State.OPEN:
            if not earlier.cancel_asked:
                self._left(earlier, now_ms, f"its key is taken by message {number}")
        elif earlier is not None and earlier.state not in FREE:
            self._broken(f"ACCEPTED beside message {self.newest[keyed.key]}, {earlier.state.value}", number)
        self._takes(number, keyed, first)

    def replaced(self, number: int, first: Accepted, other: Row | None) -> None:
        """It is kept, and has taken the place of the message whose newest row is ``other``, as far as that was told."""
        keyed = self.of(number)
        self._heard("send", SendVerdict.REPLACED.name)
        earlier = self._newest(keyed.key)
        if other is not None:
            self._need_other(number, earlier, other)
        if keyed.on_conflict != "replace":
            self._broken(f"REPLACED, and was sent with {keyed.on_conflict}", number)
        if earlier is not None:
            if earlier.state is not State.OPEN:
                self._broken(f"REPLACED a message that is {earlier.state.value}", number)
            self._never(self.newest[keyed.key], earlier, State.REPLACED)
        self._takes(number, keyed, first)

    def met(self, number: int, verdict: SendVerdict, first: Accepted | None, other: Row | None) -> None:
        """It is not kept, because of an earlier message; ``first`` is its own row, and ``other`` that of the earlier
        one, where they were told.
        """
        keyed = self.of(number)
        self._heard("send", verdict.name)
        wanted = {
            SendVerdict.REJECTED: ("reject",),
            SendVerdict.KEPT: ("keep",),
            SendVerdict.IN_FLIGHT: ("keep", "replace"),  # The earlier message has stayed in flight.
        }.get(verdict, ())
        earlier = self._newest(keyed.key)
        if keyed.on_conflict not in wanted:
            self._broken(f"{verdict.name}, and was sent with {keyed.on_conflict}", number)
        if other is not None:
            self._need_other(number, earlier, other)
        if earlier is None or earlier.state not in (State.OPEN, State.LEFT):
            held = "none" if earlier is None else earlier.state.value
            self._broken(f"{verdict.name} because of an earlier message, which is {held}", number)
        keyed.state, keyed.verdict, keyed.first = State.MET, verdict, first
        self._ledger.refused(number)

    # Cancels, moves and questions. A number of None stands for a key that nobody has sent.

    def cancelling(self, number: int | None) -> None:
        """Somebody is about to cancel it."""
        if number is not None:
            self.of(number).cancel_asked = True

    def moving(self, number: int | None, wanted_ms: int) -> None:
        """Somebody is about to move it to this instant."""
        keyed = None if number is None else self.of(number)
        if keyed is not None and keyed.state is State.OPEN and wanted_ms not in keyed.instants:
            keyed.instants = (*keyed.instants, wanted_ms)
            # Until the answer says which row is the newest, either may come.
            keyed.name = None

    def cancel_lost(self, number: int | None, key: str | None) -> None:
        """No answer came: it may be carried out until all is quiet, by key even on a later message."""
        self._heard("cancel", "no answer")
        if key is not None:
            self._loose_cancels.add(key)
        if number is not None:
            self.of(number).loose_cancel = True

    def move_lost(self, number: int | None, key: str | None, wanted_ms: int) -> None:
        """No answer came: as for a cancel."""
        self._heard("reschedule", "no answer")
        if key is not None:
            self._loose_moves[key] = (*self._loose_moves.get(key, ()), wanted_ms)
        if number is not None:
            keyed = self.of(number)
            keyed.loose = (*keyed.loose, wanted_ms)

    def cancel_answered(self, number: int | None, answer: CancelAnswer, now_ms: int) -> None:
        """A cancel was answered."""
        self._heard("cancel", answer.name)
        self._known(number, answer.name)
        if number is None or self._not_there(number, answer.name):
            return
        keyed = self.of(number)
        if answer is CancelAnswer.CANCELLED:
            if keyed.state is State.OPEN:
                self._never(number, keyed, State.CANCELLED)
            elif keyed.state not in NEVER:
                self._broken(f"a cancel says CANCELLED, and it is {keyed.state.value}", number)
            return
        keyed.cancel_asked = keyed.loose_cancel
        if answer is CancelAnswer.ALREADY_DISPATCHED:
            self._left(keyed, now_ms, "a cancel says ALREADY_DISPATCHED", number)

    def move_answered(
        self, number: int | None, answer: RescheduleAnswer, wanted_ms: int, row: Row, now_ms: int
    ) -> None:
        """A wish to move it was answered; ``row`` is its newest row, as the answer says."""
        self._heard("reschedule", answer.name)
        self._known(number, answer.name)
        if number is None or self._not_there(number, answer.name):
            return
        keyed = self.of(number)
        if answer is RescheduleAnswer.MOVED:
            self._moved(number, keyed, wanted_ms, row)
        elif answer is RescheduleAnswer.ALREADY_DISPATCHED:
            self._left(keyed, now_ms, "a reschedule says ALREADY_DISPATCHED", number)
        elif answer is RescheduleAnswer.CANCELLED:
            self._ended(number, keyed, "a reschedule says CANCELLED")

    def state_answered(self, number: int | None, row: AnswerRows, now_ms: int, *, delivered: bool) -> None:
        """A question was answered; ``delivered``: a consumer had it before the question."""
        state = MessageState(int(row["state"]))
        self._heard("get", state.name)
        self._known(number, state.name)
        if number is None:
            return
        keyed = self.of(number)
        told = f"asked what became of it, heard {state.name}"
        match state:
            case MessageState.PENDING:
                if keyed.state is not State.OPEN or delivered:
                    self._broken(told, number)
            case MessageState.DISPATCHED:
                self._left(keyed, now_ms, told, number)
            case MessageState.CANCELLED:
                self._ended(number, keyed, told)
            case MessageState.REPLACED:
                if keyed.state is not State.REPLACED:
                    self._broken(told, number)
            case MessageState.REJECTED | MessageState.KEPT:
                kept = keyed.verdict is SendVerdict.KEPT
                if keyed.state is not State.MET or kept != (state is MessageState.KEPT):
                    self._broken(told, number)
            case MessageState.IN_FLIGHT:
                pass  # For example while its hour is being loaded.
            case _:
                self._broken(told, number)
        due = int(row["deliver_at_ms"])
        if state in (MessageState.PENDING, MessageState.DISPATCHED) and due not in keyed.instants:
            self._broken(f"{told}, due at {due}", number)

    def settled(self, number: int, row: AnswerRows) -> bool:
        """Now that all is quiet, an answer about it is the only truth; False: this one says nothing."""
        state, keyed = MessageState(int(row["state"])), self.of(number)
        if state is MessageState.IN_FLIGHT:
            return False
        if state in (MessageState.PENDING, MessageState.DISPATCHED):
            keyed.instants = (int(row["deliver_at_ms"]),)
            assert keyed.first is not None
            keyed.name = (keyed.first.name[0], int(row["sequence"]))
            keyed.cancel_asked, keyed.loose, keyed.loose_cancel = False, (), False
        return True

    def is_quiet(self) -> None:
        """No request is under way any more."""
        self._loose_cancels.clear()
        self._loose_moves.clear()

    def open_numbers(self) -> list[int]:
        """The messages that may still be pending."""
        return [number for number in self.numbers if self.of(number).state is State.OPEN]

    def is_newest(self, number: int) -> bool:
        """Whether its key names this message."""
        return self.newest[self.of(number).key] == number

    def of_keys(self, numbers: Sequence[int]) -> Asked:
        """Messages as a program names them by their keys; each is the newest of its key."""
        return Asked(numbers, keys=[self.of(number).key for number in numbers])

    def by_keys(self, keys: Sequence[str]) -> Asked:
        """What a program asks by these keys."""
        return Asked([self.newest.get(key) for key in keys], keys=keys)

    def of_receipts(self, numbers: Sequence[int]) -> Asked:
        """Messages as a program names them by their receipts, which it keeps in columns."""
        rows = [self.of(number) for number in numbers]
        firsts = [keyed.first for keyed in rows if keyed.first is not None]
        assert len(firsts) == len(rows), "each of them has a receipt"
        receipts = ReceiptColumns(
            np.array([first.name[0] for first in firsts], np.uint64),
            np.array([first.name[1] for first in firsts], np.uint64),
            np.array([keyed.deliver_at_ms for keyed in rows], np.int64),
            np.array([first.at_ms for first in firsts], np.int64),
        )
        return Asked(numbers, receipts=receipts)

    def of(self, number: int) -> Keyed:
        """One message."""
        keyed = self._ledger.sent[number]
        assert isinstance(keyed, Keyed)
        return keyed

    def _newest(self, key: str) -> Keyed | None:
        number = self.newest.get(key)
        return None if number is None else self.of(number)

    def _takes(self, number: int, keyed: Keyed, first: Accepted) -> None:
        keyed.state, keyed.first = State.OPEN, first
        self.newest[keyed.key] = number
        if len(keyed.instants) == 1:
            self._ledger.kept(number, first.name)
        else:
            keyed.fate = Fate.KEPT

    def _expect_loose(self, keyed: Keyed) -> None:
        """Requests by its key that got no answer may still be carried out, on this one."""
        keyed.cancel_asked = keyed.loose_cancel = keyed.key in self._loose_cancels
        keyed.loose = self._loose_moves.get(keyed.key, ())
        keyed.instants = (keyed.deliver_at_ms, *keyed.loose)

    def _need_other(self, number: int, earlier: Keyed | None, other: Row) -> None:
        """The row that a verdict names is the newest one of the key."""
        if earlier is None:
            self._broken(f"met {other}; its key is new", number)
            return
        # A move without an answer may have been carried out since, and the new row may have been delivered.
        names = (None, other.name) if not earlier.loose else (earlier.name,)
        if other.due_ms not in (None, *earlier.instants) or earlier.name not in names:
            self._broken(f"met {other}; the newest row of its key is {earlier.name}, due {earlier.instants}", number)

    def _moved(self, number: int, keyed: Keyed, wanted_ms: int, row: Row) -> None:
        name, due_ms = row
        if keyed.state is not State.OPEN:
            self._broken(f"moved, and it is {keyed.state.value}", number)
        if due_ms != wanted_ms:
            self._broken(f"moved to {due_ms}, not to {wanted_ms}", number)
        # Beside the answer a consumer may have had it already, but only the row that is due then.
        if keyed.name not in (None, name) and not keyed.loose:
            self._broken(f"moved as {name}", number)
        keyed.instants = (wanted_ms, *keyed.loose)
        keyed.name = None if keyed.loose else name

    def _left(self, keyed: Keyed, now_ms: int, told: str, number: int | None = None) -> None:
        number = self.newest[keyed.key] if number is None else number
        if keyed.state not in (State.OPEN, State.LEFT):
            self._broken(f"{told}, and it is {keyed.state.value}", number)
            return
        if min(keyed.instants) > self._ledger.clock_of(number, now_ms):
            self._broken(f"{told}, and it is due only at {keyed.instants}", number)
        keyed.state, keyed.dispatched, keyed.cancel_asked = State.LEFT, True, False

    def _ended(self, number: int, keyed: Keyed, told: str) -> None:
        if keyed.state is State.OPEN and keyed.cancel_asked:
            self._never(number, keyed, State.CANCELLED)
        elif keyed.state not in NEVER:
            self._broken(f"{told}, and it is {keyed.state.value}", number)

    def _never(self, number: int, keyed: Keyed, state: State) -> None:
        keyed.state = state
        self._ledger.is_cancelled(number)

    def _not_there(self, number: int, told: str) -> bool:
        """Whether the answer says all that there is to say: it is not kept, or not known, or in flight."""
        if told != "IN_FLIGHT" and (told == "UNKNOWN") != (self.of(number).state is State.MET):
            self._broken(f"an answer says {told}", number)
        return told in ("IN_FLIGHT", "UNKNOWN")

    def _known(self, number: int | None, told: str) -> None:
        if number is None and told != "UNKNOWN":
            self._ledger.broken(f"an answer says {told} of a key that nobody has sent")

    def _heard(self, about: str, answer: str) -> None:
        self.heard[f"{about} {answer}"] += 1

    def _broken(self, what: str, number: int) -> None:
        keyed = self.of(number)
        self._ledger.broken(f"{what}: key {keyed.key}, {keyed.state.value}, {self._ledger.tell(number)}")
