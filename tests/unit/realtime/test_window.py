"""The window of a group against a dictionary that has each message and each pull by itself, over pieces that split and
empty: whatever is said, in whatever order, each is where the table of moves says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delayd.log.pull import GroupDecision, PullEntry, PullOp, RetryRow
from delayd.machine.alarms import NEVER_MS
from realtime import group_window as window_module
from realtime.group_window import (
    BECAME,
    HELD,
    MOVES,
    Became,
    GroupWindow,
    GroupWord,
    Runs,
    Stage,
    StateRun,
    pause_after,
)

MESSAGES = 40
NOW_MS = 1_000_000
LEASE_MS = 30_000
SAID = {
    PullOp.ACK: GroupWord.ACK,
    PullOp.NACK: GroupWord.NACK,
    PullOp.LAPSED: GroupWord.LAPSED,
    PullOp.RETURNED: GroupWord.RETURNED,
}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "pull",
                "pull",
                "ack",
                "nack",
                "lapse",
                "return",
                "retry",
                "extend",
                "resume",
                "rot",
                "read",
                "drop",
                "jump",
            ]
        ),
        st.integers(0, 60),
        st.integers(1, 9),
        st.booleans(),
    ),
    min_size=1,
    max_size=60,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "PIECE_RUNS", 3)


@dataclass
class Message:
    stage: Stage = Stage.NEW
    attempt: int = 1
    pull: int = -1
    until_ms: int = NEVER_MS


@dataclass
class Model:
    """One dictionary entry for each message, and one for each pull."""

    window: GroupWindow = field(default_factory=lambda: GroupWindow(0))
    messages: dict[int, Message] = field(default_factory=lambda: {each: Message() for each in range(MESSAGES)})
    pulls: dict[int, tuple[int, int, Became]] = field(default_factory=dict)  # Message, incarnation and what became.
    came_back: list[int] = field(default_factory=list)
    next_pull: int = 0

    def say(self, word: GroupWord, number: int, until_ms: int = NEVER_MS) -> None:
        message = self.messages[number]
        stage = message.stage = MOVES[message.stage, word]
        message.until_ms = until_ms
        if number in self.came_back:
            self.came_back.remove(number)
        if stage is Stage.OFFERED:
            self.came_back.append(number)
        if word in BECAME:
            of, incarnation, _ = self.pulls[message.pull]
            self.pulls[message.pull] = of, incarnation, BECAME[word]
            message.attempt += word is not GroupWord.RETURNED
        elif word is GroupWord.ACK:
            del self.pulls[message.pull]

    def pull(self, _: int, count: int, other: bool) -> None:
        for offer in list(self.window.offers(MESSAGES)):
            taken = min(count, offer.messages)
            if not taken:
                return
            numbers = range(offer.consume_first, offer.consume_first + taken)
            at = (1, 7 + other, self.next_pull, offer.consume_first, taken, 0, LEASE_MS)
            assert self.window.apply(PullEntry(PullOp.PULL, offer.attempt, *at), NOW_MS) == taken
            for number in numbers:
                self.say(GroupWord.PULLED, number, NOW_MS + LEASE_MS)
                assert self.messages[number].attempt == offer.attempt
                self.messages[number].pull = self.next_pull
                self.pulls[self.next_pull] = number, 7 + other, Became.HELD
                self.next_pull += 1
            count -= taken

    def named(self, first: int, count: int, other: bool) -> tuple[int, int, int]:
        """Whose pulls a word is about, the first one and how many: often just what somebody holds."""
        held = list(self.window.held())
        if held and count < 6:
            run = held[first % len(held)]
            return run.incarnation, run.first, run.messages if count < 4 else 1
        return 7 + other, first, 2 * count

    def of(self, incarnation: int, first: int, count: int) -> list[int]:
        """The messages that a word about these pulls concerns."""
        wanted = (self.pulls.get(pull) for pull in range(first, first + count))
        return [each[0] for each in wanted if each is not None and each[1:] == (incarnation, Became.HELD)]

    def word(self, op: PullOp, number: int, count: int, other: bool) -> None:
        incarnation, first, covered = self.named(number, count, other)
        numbers = self.of(incarnation, first, covered)
        assert self.window.apply(PullEntry(op, 0, 1, incarnation, first, 0, covered, 0), NOW_MS) == len(numbers)
        for number in numbers:
            pause_ms = pause_after(self.messages[number].attempt) if op is PullOp.NACK else 0
            if pause_ms:
                self.say(GroupWord.PUT_OFF, number, NOW_MS + pause_ms)
            else:
                self.say(SAID[op], number)

    def retry(self, first: int, count: int, other: bool) -> None:
        incarnation, first, covered = self.named(first, count, other)
        numbers = self.of(incarnation, first, covered)
        row = RetryRow(incarnation, first, MESSAGES, covered, 1, 0, "" if other else "no such order", "")
        self.window.leave(GroupDecision(1, self.next_pull, 1, 1, 0, (row,)))
        for number in numbers:
            self.say(GroupWord.RETRY if other else GroupWord.REJECT, number)

    def extend(self, first: int, count: int, other: bool) -> None:
        incarnation, first, covered = self.named(first, count, other)
        for number in self.of(incarnation, first, covered):
            self.messages[number].until_ms = NOW_MS + 10 * count
        self.window.extend(first, first + covered, incarnation, NOW_MS + 10 * count)

    def tell(self, word: GroupWord, first: int, count: int) -> None:
        end = min(first + count, MESSAGES)
        if first < self.window.next < end or first > self.window.next:
            return
        for number in range(first, end):
            if (self.messages[number].stage, word) in MOVES:
                self.say(word, number)
        self.window.tell(word, first, end)

    def jump(self, first: int, count: int, other: bool) -> None:
        """Pull new messages that others stand before."""
        first = min(self.window.next + first % 3, MESSAGES - 1)
        for number in range(self.window.next, first):
            self.say(GroupWord.PASSED_BY, number)
        self.window.apply(PullEntry(PullOp.PULL, 1, 1, 7, self.next_pull, first, 1, 0, LEASE_MS), NOW_MS)
        if self.messages[first].stage is not Stage.NEW:
            raise AssertionError("only new messages are beyond next")
        self.say(GroupWord.PULLED, first, NOW_MS + LEASE_MS)
        self.messages[first].pull = self.next_pull
        self.pulls[self.next_pull] = first, 7, Became.HELD
        self.next_pull += 1

    def check(self) -> None:
        window = self.window
        seen = {number: Message() for number in range(window.next, MESSAGES)}
        for run in window.others:
            for number in range(run.first, run.end):
                seen[number] = Message(Stage(run.state), run.attempt, -1, run.until_ms)
        pulls: dict[int, tuple[int, int, Became]] = {}
        for run in window.handles:
            for at in range(run.messages):
                number = run.consume_first + at
                pulls[run.first + at] = (number, run.incarnation, Became(run.state))
                if run.state == HELD:
                    seen[number] = Message(Stage.HELD, run.attempt, run.first + at, run.until_ms)
        for number, message in self.messages.items():
            found = seen.pop(number, None)
            if found is None:
                assert message.stage in (Stage.LEAVING, Stage.SETTLED)
                continue
            assert (found.stage, found.attempt, found.until_ms) == (message.stage, message.attempt, message.until_ms)
            assert found.stage is not Stage.HELD or found.pull == message.pull
        assert {pull: each[2] for pull, each in pulls.items()} == {pull: each[2] for pull, each in self.pulls.items()}
        offered = [
            at for run in window.came_back() for at in range(run.consume_first, run.consume_first + run.messages)
        ]
        assert offered == self.came_back
        open_ = [each for each in self.messages if self.messages[each].stage not in (Stage.LEAVING, Stage.SETTLED)]
        assert window.oldest == min([*open_, window.next])
        assert window.next_end_ms() == min(message.until_ms for message in self.messages.values())
        for table in (window.handles, window.others):
            assert [(run.first, run.end) for run in table] == sorted((run.first, run.end) for run in table)
            assert sum(table.runs) == len(table) == len(list(table)) == len(list(table.copy()))
            assert sum(table.messages) == sum(run.messages for run in table)


ONE = ("pull", 0, 1, False)


# A lease that is extended over an acknowledged message; and parts of runs, not the first one, that can't be read.
@example([ONE, ONE, ONE, ("ack", 1, 1, False), ("extend", 0, 6, False)])
@example(
    [*[ONE] * 7, ("pull", 0, 2, False), *[ONE] * 5, ("nack", 20, 1, False), ("nack", 0, 1, False), ("rot", 1, 7, False)]
)
@example([("pull", 0, 9, False), ONE, ("nack", 1, 3, False), ("nack", 0, 3, False), ("rot", 3, 3, False)])
@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_each_message_is_where_the_table_of_moves_says(steps: list[tuple[str, int, int, bool]]) -> None:
    model = Model()
    words = {"ack": PullOp.ACK, "nack": PullOp.NACK, "lapse": PullOp.LAPSED, "return": PullOp.RETURNED}
    told = {
        "resume": GroupWord.RESUMED,
        "rot": GroupWord.UNREADABLE,
        "read": GroupWord.READABLE,
        "drop": GroupWord.GIVEN_UP,
    }
    for what, first, count, other in steps:
        if what in words:
            model.word(words[what], first, count, other)
        elif what in told:
            model.tell(told[what], first % MESSAGES, count)
        elif what == "jump" and model.window.next >= MESSAGES - 4:
            continue
        else:
            getattr(model, what)(first, count, other)
        model.check()


@given(st.integers(20, 200), st.data())
def test_single_messages_of_a_long_run_are_taken_in_any_order(messages: int, data: st.DataObject) -> None:
    held = Runs()
    held.add(StateRun(0, messages, HELD, 1, 500, 7, 0, NOW_MS))
    left = set(range(messages))
    order = data.draw(st.permutations(range(0, messages, data.draw(st.integers(1, 3)))))
    for number in data.draw(st.sampled_from([order, sorted(order), sorted(order, reverse=True)])):
        run = StateRun(number, 1, HELD, 1, 500 + number, 7, 0, NOW_MS)
        assert held.take(number, number + 1, (HELD,), 7) == [run]
        left.discard(number)
        assert held.messages[HELD] == len(left)
    assert [number for run in held for number in range(run.first, run.end)] == sorted(left)
    assert held.oldest == (500 + min(left) if left else (1 << 64) - 1)


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(1, 20))
def test_parts_of_runs_are_found_and_neighbours_become_one(numbers: set[int], first: int, length: int) -> None:
    runs = Runs()
    for number in numbers:
        runs.join(StateRun(number, 1, Became.LAPSED))
    assert len(runs) == len([number for number in numbers if number - 1 not in numbers])
    within = runs.within(first, first + length)
    inside = sorted(numbers & set(range(first, first + length)))
    assert [number for run in within for number in range(run.first, run.end)] == inside
    for number in range(62):
        run = runs.at(number)
        assert (run is not None and run.first <= number < run.end) is (number in numbers)
