"""What the server decides about the requests of a commit, in their order (docs/keys.md, The decision)."""

from tests.decisions.state import (
    Answer,
    Ask,
    Asked,
    Commit,
    Ended,
    Group,
    Reason,
    Removed,
    State,
    Told,
    ended_in,
    newest,
    outcome_of,
    rows_of,
)

PENDING, IN_FLIGHT, ENDED = range(3)


class Decider:
    """The decisions of one commit."""

    def __init__(self, state: State, removed: Removed) -> None:
        self._state = state
        self._removed = removed
        self._next = max(rows_of(state.log), default=0) + 1
        self._rows: list[int] = []
        self._ended: list[Ended] = []
        self._taker = 0  # The newest row of this commit that took the key.
        self._told: list[Told] = []

    def commit(self) -> Commit:
        """Decide all requests of the queue."""
        for asked in self._state.queue:
            self._told.append(self._decide(asked))
        ended = {each.row for each in self._ended}
        claimed = frozenset(ended) & self._state.loaded
        return Commit(self._groups(), tuple(self._told), claimed)

    def _groups(self) -> tuple[Group, ...]:
        rows, ended = tuple(self._rows), tuple(self._ended)
        if not rows and not ended:
            return ()
        if "one_group" in self._removed and rows and ended:
            return Group((), ended), Group(rows, ())
        return (Group(rows, ended),)

    def _decide(self, asked: Asked) -> Told:
        ask = asked.ask
        row = 1 if ask is Ask.CANCEL_FIRST else self._find(asked)
        where = self._where(row)
        if ask in (Ask.SEND, Ask.REPLACE):
            return self._send(ask, row, where)
        if row == 0:
            return Told(ask, Answer.UNKNOWN)
        if where == IN_FLIGHT:
            return Told(ask, Answer.IN_FLIGHT, row)
        if where == ENDED:
            return self._has_ended(ask, row)
        if ask is Ask.MOVE:
            new = self._new()
            self._end(row, Reason.MOVED, new)
            if "follower" in self._removed:
                self._rows.pop()
            return Told(ask, Answer.MOVED, row, new)
        self._end(row, Reason.CANCELLED)
        return Told(ask, Answer.CANCELLED, row)

    def _find(self, asked: Asked) -> int:
        if "compared" in self._removed:
            return asked.looked
        if "moved_to_run" in self._removed:
            return max(asked.looked, self._taker, *self._state.entries, *self._state.frozen, 0)
        return max(newest(self._state, self._removed), self._taker)

    def _where(self, row: int) -> int:
        state = self._state
        if row == 0 or row in {each.row for each in self._ended}:
            return ENDED
        if row in self._rows:
            return PENDING
        if row in state.sent or (row in state.doubt and "in_flight" not in self._removed):
            return IN_FLIGHT
        # While the next commit is decided, what the one before has ended is claimed still.
        return PENDING if row in state.loaded and row not in state.claimed else ENDED

    def _send(self, ask: Ask, row: int, where: int) -> Told:
        new = self._new(takes=False)
        if where == PENDING and ask is Ask.REPLACE:
            self._end(row, Reason.REPLACED, new)
        elif where != ENDED and ask is Ask.SEND:
            self._end(new, Reason.REJECTED, row)
            return Told(ask, Answer.REJECTED, new, row)
        elif where == IN_FLIGHT:
            self._end(new, Reason.IN_FLIGHT, row)
            return Told(ask, Answer.IN_FLIGHT, new, row)
        self._taker = new
        return Told(ask, Answer.ACCEPTED, new)

    def _has_ended(self, ask: Ask, row: int) -> Told:
        outcome = outcome_of(self._state, row)
        if outcome is not None and outcome.dispatched:
            return Told(ask, Answer.ALREADY_DISPATCHED, row)
        reasons = {**ended_in(self._state.log), **{each.row: each for each in self._ended}}
        if ask is Ask.CANCEL_FIRST and row in reasons and reasons[row].reason is Reason.MOVED:
            # A receipt follows the moves; the model asks again for the newest row.
            return Told(ask, Answer.IN_FLIGHT, row)
        return Told(ask, Answer.CANCELLED, row)

    def _new(self, *, takes: bool = True) -> int:
        new, self._next = self._next, self._next + 1
        self._rows.append(new)
        if takes:
            self._taker = new
        return new

    def _end(self, row: int, reason: Reason, other: int = 0) -> None:
        self._ended.append(Ended(row, reason, other))
