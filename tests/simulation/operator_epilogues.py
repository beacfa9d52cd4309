"""Epilogues of operators whose words meet one another, deaths, and what is under way (rules E1, L5, L10, Q1).

Invariant: what is checked is what the sentence said that the operator was shown: no word costs more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from delayd.errors import DelaydError
from delayd.hours import hour_name, hour_of_ms
from delayd.outcome import Outcome
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import RequestType
from delayd.wire.status import Decision, Quarantined, read_list
from tests.simulation.damage import Damage, Flipped, Gone, file_of
from tests.simulation.damage_scenarios import FILE_HEADER_BYTES, LASTING, durable_named
from tests.simulation.epilogues import Epilogues
from tests.simulation.network import Line
from tests.simulation.realtime_side import RealtimeSide
from tests.worlds.delay import FOLDER
from tests.worlds.delay_adapter import dispatch_log_name, list_dispatch_logs

OPERATORS = 2
WORDS = 6
GROUP, DOOMED = "group", "doomed"
DECIDED = ([Outcome.IN_DOUBT], [Outcome.CANCELLED], [Outcome.EXPIRED])


class Word(NamedTuple):
    """What an operator said at a realtime server of something that is quarantined; ``answers`` has one when it came."""

    decision: Decision
    about: Quarantined
    answers: list[Frame | DelaydError]

    @property
    def is_done(self) -> bool:
        """Whether the server has said that it is done."""
        answer = self.answers[0] if self.answers else None
        return isinstance(answer, Frame) and answer.head.get("done") is True


class OperatorEpilogues(Epilogues):
    """Several operators, who do not know of each other."""

    def all(self) -> list[Callable[[], None]]:
        """All of them."""
        return [*super().all(), self.dispatch_log_is_given_up, self.words_meet_at_realtime]

    def dispatch_log_is_given_up(self) -> None:
        """Operators drop an hour's dispatch log, again and again, through deaths: nothing of it comes twice (L5)."""
        cluster = self.cluster
        self._confirm_the_clock()
        self._all_work()
        cluster.world.swept = False  # The books of the run know of no messages that were given up.
        for _ in range(self.random.choice((2, 3))):
            self._send_to_all()
            self.steps.send_rows((2_000, 8_000))
            cluster.calm(self.random.choice((400, 1_200)))
            if self.chance(0.6):
                cluster.world.server.checkpoint(lambda offset: None)
                cluster.calm(1_200)
        cluster.calm(2_500)
        self._repeat_what_is_unanswered()
        cluster.calm(1_200)
        hour = self._damage_a_dispatch_log()
        if hour is None:
            return
        self.delay_dies_and_starts()
        told: list[tuple[bool, str]] = []
        for _ in range(WORDS):
            self._say_of_hour(hour, told)
            self.moves(self.random.choice((0, 4, 12, 40)))
            if self.chance(0.3):
                self.delay_dies_and_starts()
            if self.chance(0.5):
                cluster.calm(self.random.choice((60, 1_200)))
        self._wait(lambda: not self._say_of_hour(hour, told, drops=True))
        left = cluster.world.server.told_of_damage()
        assert not left, f"an operator gives a dispatch log up, and {left} is quarantined; he heard {told}"
        self._repeat_what_is_unanswered()
        self._send_to_all()
        self._wait(lambda: not cluster.world.server.is_fenced and not self._due_and_nowhere())
        waits = cluster.world.server.fences
        assert not waits, f"an hour that was given up makes nobody a restored server: {waits}"
        lost = self._due_and_nowhere()
        assert not lost, f"at no target, and not said to be in doubt: {sorted(lost)[:5]}"
        copies = Counter(sequence for side in cluster.sides for kept in side.log() for sequence in kept.sequences)
        twice = [sequence for sequence, count in copies.items() if count > 1]
        assert not twice, f"a dispatch log was given up, and messages come twice: {twice[:5]}"
        several = {sequence: told for sequence, told in self._outcomes_now().items() if len(told) > 1}
        assert not several, f"messages with several outcomes: {several}"

    def words_meet_at_realtime(self) -> None:
        """Operators release, drop and delete at a realtime server while consumers pull: each costs what it says."""
        cluster = self.cluster
        self._confirm_the_clock()
        self._all_work()
        cluster.damaged = True
        side = self.steps.side()
        subject = next((each for each in cluster.subjects if self._target_of(each) == side.log_id), None)
        if subject is None:
            return
        doomed = cluster.add_group(side, subject, DOOMED)
        for _ in range(self.random.choice((2, 4))):
            self.steps.send_rows((-1_000,), [subject])
            cluster.calm(1_200)
        if self.chance(0.7):
            self.realtime_dies_and_starts(side)  # So that nothing is in memory.
        side.disk.faults.fail_reads["/message/"] = LASTING
        of_both = [consumer for consumer in cluster.consumers if consumer.books.subject == subject]
        words: list[Word] = []
        lines = [self._operator(side) for _ in range(OPERATORS)]
        for _ in range(WORDS):
            for _ in range(4):
                self.random.choice(of_both).pull_if_connected()
                self.moves(12)
            lines = [line if line.listener is side.life else self._operator(side) for line in lines]
            self._say(side, self.random.choice(lines), words)
            if self.chance(0.2):
                head: Head = {"subject": subject.decode(), "group": DOOMED}
                self.random.choice(lines).call(RequestType.DELETE_GROUP, head, (), _nobody_hears)
            self.moves(self.random.choice((0, 4, 12)))
            if self.chance(0.2):
                self.realtime_dies_and_starts(side)
            cluster.calm(self.random.choice((1, 60, 400)))
        cluster.calm(400)
        cluster.consumers = [consumer for consumer in cluster.consumers if consumer not in doomed]
        cluster.books = [books for books in cluster.books if books is not doomed[0].books]
        for consumer in doomed:
            consumer.die()
        given_up = self._given_up(side, words)
        self._check_costs(side, subject, words, given_up)

    # The delay server.

    def _damage_a_dispatch_log(self) -> int | None:
        """Flip a bit of a dispatch log for good, where it is durable, or take the whole file; its hour."""
        cluster, disk = self.cluster, self.cluster.world.disk
        for hour, path in reversed(list_dispatch_logs(disk, FOLDER)):
            node = file_of(disk, path)
            until = durable_named(disk, path, cluster.world.server.log_id)
            if node is None or node.pending or until <= FILE_HEADER_BYTES or cluster.delay_hours().get(hour).sealed:
                continue
            gone = self.chance(0.4) and cluster.world.server.has_counted_all_outcomes(hour)
            if gone:
                self.tell(f"     {path} is gone for good")
                damage: Damage = Gone(disk, path, wanted=lambda: False)
            else:
                position = self.random.randrange(FILE_HEADER_BYTES, until)
                self.tell(f"     bit 1 at {position} of {path} flips for good")
                damage = Flipped(disk, path, position, 1)
            cluster.damaged = True
            cluster.delay_damages.add(damage)
            return hour
        return None

    def _say_of_hour(self, hour: int, told: list[tuple[bool, str]], *, drops: bool = False) -> bool:
        """Have an operator decide on a file of an hour; whether there was something to decide."""
        server, id_ = self.cluster.world.server, dispatch_log_name(hour_name(hour))
        if not server.has(id_):
            return False
        action = "drop" if drops or self.chance(0.7) else "release"
        self.tell(f"     an operator says {action} {id_}")
        (server.drop if action == "drop" else server.release)(id_, lambda done, text: told.append((done, text)))
        return True

    def _due_and_nowhere(self) -> set[int]:
        """Accepted messages that are due, at no target, and without an outcome that says so."""
        cluster = self.cluster
        there = {sequence for side in cluster.sides for kept in side.log() for sequence in kept.sequences}
        told, now_ms = self._outcomes_now(), cluster.world.clock.now_ms()
        return {
            accepted.base_sequence + index
            for sent, accepted in cluster.world.outside.accepted.values()
            for index, (due_ms, _, _) in enumerate(sent.wanted)
            if due_ms <= now_ms
            and hour_of_ms(due_ms) >= hour_of_ms(now_ms) - 1
            and accepted.base_sequence + index not in there
            and told.get(accepted.base_sequence + index) not in DECIDED
        }

    # A realtime server.

    def _target_of(self, subject: bytes) -> int | None:
        return self.cluster.world.server.targets.get(subject)

    def _operator(self, side: RealtimeSide) -> Line:
        assert side.life is not None, "it was started"
        return self.cluster.network.connect(side.life, self, hostile=True)

    def _say(self, side: RealtimeSide, line: Line, words: list[Word]) -> None:
        """Have an operator read the list, and decide on something of it when he has."""

        def listed(answer: Frame | DelaydError) -> None:
            if isinstance(answer, DelaydError) or not line.open:
                return
            entries, _ = read_list(answer.head)
            entries = [entry for entry in entries if entry.id.startswith("rows/")]
            if not entries:
                return
            about = self.random.choice(entries)
            decision = self.random.choice((Decision.GIVE_UP, Decision.TAKE))
            self.tell(f"     an operator says {decision} {about.id} at {side.name}: {about.costs[Decision.GIVE_UP]}")
            word = Word(decision, about, [])
            words.append(word)
            for _ in range(self.random.choice((1, 1, 2))):
                line.call(RequestType.MEND, {"id": about.id, "decision": decision}, (), partial(_heard, word))

        line.call(RequestType.MEND_LIST, {"after": "", "limit": 100}, (), listed)

    def _given_up(self, side: RealtimeSide, words: list[Word]) -> dict[int, set[bytes]]:
        """By batch, the bodies that operators may have given up."""
        dropped = {int(word.about.id.rpartition("/")[2]) for word in words if word.decision is Decision.GIVE_UP}
        return {kept.offset: set(kept.bodies) for kept in side.log() if kept.offset in dropped}

    def _check_costs(
        self, side: RealtimeSide, subject: bytes, words: list[Word], given_up: dict[int, set[bytes]]
    ) -> None:
        cluster = self.cluster
        key = (side.log_id, subject, GROUP)
        (books,) = [each for each in cluster.books if (each.log_id, each.subject, each.group) == key]
        sure = {
            int(word.about.id.rpartition("/")[2])
            for word in words
            if word.decision is Decision.GIVE_UP and word.is_done and f" {GROUP}" in word.about.costs[Decision.GIVE_UP]
        }
        never = {body for offset in sure for body in given_up[offset]} - books.bodies
        side.disk.faults.fail_reads.clear()
        consumers = [each for each in cluster.consumers if each.books is books]
        may_lack = {body for bodies in given_up.values() for body in bodies} | cluster.world.outside.expiries.keys()

        def owed() -> set[bytes]:
            """What the group must yet be given: retention may have decided on some before there was a group."""
            of_subject = [kept for kept in side.log() if kept.subject == subject]
            removed = [books.owed(kept.bodies, removed=kept.offset < side.leaving_below) for kept in of_subject]
            return set[bytes]().union(*removed) - may_lack

        def drained() -> bool:
            for consumer in consumers:
                consumer.drain()
            return not owed()

        self._wait(drained)
        for _ in range(4):
            drained()
            cluster.calm(400)
        lack = owed()
        assert not lack, f"never given to {GROUP}, and no operator gave them up: {sorted(lack)[:5]}"
        back = never & books.bodies
        assert not back, f"an operator gave them up, and was told that they never come: {sorted(back)[:5]}"


def _heard(word: Word, answer: Frame | DelaydError) -> None:
    word.answers.append(answer)


def _nobody_hears(answer: Frame | DelaydError) -> None:
    """It is done, or another one has done it."""
