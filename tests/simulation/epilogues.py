"""Epilogues: an operator's words that end something for good, when a run's books have been compared (rules H5, I5).

Invariant: nothing of the run is checked behind an epilogue, only what the word itself promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from delayd.errors import DelaydError, NotReady
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.hour import schedule_path
from delayd.log.segment import FileKind, open_segment
from delayd.outcome import Outcome
from tests.simulation.checks import DOUBT_STEP_MS, DRAIN_STEP_MS
from tests.simulation.copy_scenarios import CopyScenarios
from tests.simulation.damage import Flipped, file_of
from tests.simulation.realtime_side import RealtimeSide
from tests.worlds.delay import FOLDER
from tests.worlds.delay_adapter import list_dispatch_logs, read_outcomes

ALARM_MS = 40_000  # The delay server asks a target that refused again within this time.
HOURS_AHEAD = 3  # An hour that is not loaded for long, so that its rows are in its file alone.
# So many rounds of sends, of 1.2 s each, until a realtime server has heard what became of the first ones: one that was
# refused hears nothing before.
ROUNDS_MAX = ALARM_MS // 1_200 + 1
CONFIRMED_WITHIN_MS = 60_000  # A clock that nobody sets is believed after half a minute.


class Epilogues(CopyScenarios):
    """Each is the last thing that happens to its cluster."""

    def all(self) -> list[Callable[[], None]]:
        """All of them."""
        return [self.restored_server_is_accepted, self.target_is_lost, self.hour_is_given_up]

    def restored_server_is_accepted(self) -> None:
        """An operator accepts a delay server that was restored: no two messages have one sequence (rule I5)."""
        cluster = self.cluster
        self._confirm_the_clock()
        self._all_work()
        cluster.world.swept = False
        self._send_to_all()
        cluster.calm(1_200)
        backup, ends = (
            cluster.delay_backup(),
            {side.log_id: cluster.world.server.end_of(side.log_id) for side in cluster.sides},
        )
        targets = set(cluster.world.server.targets.values())
        sides = [side for side in cluster.sides if side.log_id in targets]
        for _ in range(ROUNDS_MAX):
            # Only what T knows to be decided proves that a backup is old: W goes with the next batch.
            self._send_to_all()
            cluster.calm(1_200)
            if all(self._decided(side) > ends[side.log_id] for side in sides):
                break
        else:
            raise AssertionError("realtime servers do not hear what is decided")
        cluster.delay_dies(None)
        cluster.remains = backup
        cluster.delay_starts(faults=False)
        self.tell("     the delay server is restored from a backup, for good")
        world = cluster.world
        server = world.server

        def is_noticed() -> bool:
            return all(server.is_refused_by(side.log_id) for side in sides) and bool(server.fences)

        self._wait(is_noticed)
        assert is_noticed(), "nobody notices that a delay server was restored"
        for side in sides:
            server.accept(side.log_id, _nobody_hears)
        self._wait(lambda: not server.fences)
        waits = server.fences
        assert not waits, f"an operator's word changes nothing: {waits}"
        before = set(world.outside.accepted)
        self._send_to_all()
        cluster.calm(5_000)
        new = {body for number in set(world.outside.accepted) - before for body in self._bodies_of(number)}
        assert new, "a server that was accepted takes nothing"
        found: dict[int, bytes] = {}
        bodies: Counter[bytes] = Counter()
        for side in cluster.sides:
            for kept in side.log():
                bodies.update(kept.bodies)
                for sequence, body in zip(kept.sequences, kept.bodies, strict=True):
                    known = found.setdefault(sequence, body)
                    assert known == body, f"{known!r} and {body!r} have the sequence {sequence}"
        over = self._expired_now()
        wrong = {body: bodies[body] for body in new if bodies[body] != (body not in over)}
        assert not wrong, f"sent after the word, and so often at the targets: {wrong}"

    def target_is_lost(self) -> None:
        """An operator gives a target up: what it may hold goes nowhere else, and all else does (rules H5, S2)."""
        cluster = self.cluster
        self._confirm_the_clock()
        self._all_work()
        cluster.world.swept = False  # The books of the run know of no messages in doubt.
        lost = self.steps.side()
        (other,) = [side for side in cluster.sides if side is not lost]
        first = cluster.world.outside.last_number
        # What it takes it does not answer, or it takes nothing.
        held = {f"{line.name} down" for line in self.lines_of_delay() if line.listener is lost.life}
        held = self.random.choice((held, held, {f"{lost.name} runs a commit"}, set()))
        cluster.hold(*held)
        for ahead_ms in (-1_000, 2_000):
            for subject in cluster.subjects:
                self.steps.send_rows((ahead_ms,), [subject])
        cluster.calm(self.random.choice((60, 400)))
        if self.chance(0.6):
            # A later life does not know what the one before had sent.
            self.delay_dies_and_starts()
        self.tell(f"     {lost.name} is gone for good")
        lost.die(None, 0)
        cluster.held -= held
        for subject in cluster.subjects:
            cluster.router.routes[subject] = other.log_id
        del cluster.router.told[lost.log_id]
        said: list[DelaydError | str] = []
        for _ in range(3):
            self._lose(lost, said)
            self.moves(self.random.choice((0, 4, 12)))
            if self.chance(0.4):
                self.delay_dies_and_starts()
            cluster.calm(1_200)
        # A death may have taken the word with it.
        self._lose(lost, said)
        server = cluster.world.server
        given_up = not server.knows(lost.log_id) or server.has_given_up(lost.log_id)
        assert given_up, f"an operator's word is not taken: {said}"
        cluster.calm(5_000)
        self._repeat_what_is_unanswered()
        self._wait(lambda: self._all_told(first))
        cluster.calm(1_200)
        self._check_lost(lost, other, first)

    def hour_is_given_up(self) -> None:
        """An operator drops an hour whose schedule log is damaged for good: no more is lost than he is told (L5)."""
        cluster = self.cluster
        self._confirm_the_clock()
        self._all_work()
        world = cluster.world
        world.swept = False  # The books of the run know of no messages that were given up.
        # When the clock was set back, messages are filed behind those that came before.
        hour = hour_of_ms(max(world.clock.now_ms(), world.server.appended_at_ms)) + HOURS_AHEAD
        begins_ms = hour * HOUR_MS
        of_hour: list[int] = []
        for _ in range(self.random.choice((1, 3))):
            self.steps.send_each([begins_ms + ms for ms in (0, 400, 9_000)])
            of_hour.append(world.outside.last_number)
            cluster.calm(60)
            world.server.checkpoint(lambda offset: None)
            cluster.calm(1_200)
        self._repeat_what_is_unanswered()
        cluster.calm(60)
        path = schedule_path(FOLDER, hour)
        for _ in range(ROUNDS_MAX):
            if world.disk.exists(path):
                break
            world.server.checkpoint(lambda offset: None)
            cluster.calm(5_000)
        written = file_of(world.disk, path)
        if written is None or not len(written.cached):
            raise AssertionError(f"{path} was not written by {len(of_hour)} checkpoints")
        position = self.random.randrange(len(written.cached))
        self.tell(f"     bit 1 at {position} of {path} flips for good")
        cluster.damaged = True
        cluster.delay_damages.add(Flipped(world.disk, path, position, 1))
        if self.chance(0.5):
            self.delay_dies_and_starts()
            world = cluster.world
        cluster.machine.advance(begins_ms - world.clock.now_ms() - 500)
        before = world.outside.last_number
        self._send_to_all()
        others = range(before + 1, world.outside.last_number + 1)
        self._wait(lambda: world.clock.now_ms() > begins_ms + ALARM_MS // 2)
        told: list[tuple[bool, str]] = []
        found = [entry for entry in world.server.set_aside if entry.hour == hour]
        for entry in found:
            world.server.drop(entry.id, lambda done, text: told.append((done, text)))
        self._wait(lambda: len(told) == len(found))
        cluster.calm(5_000)
        assert len(told) == len(found) and all(done for done, _ in told), f"an operator drops {found}, and hears {told}"
        assert not world.server.has_set_aside, f"set aside, though it was given up: {world.server.told_of_damage()}"
        bodies = Counter(body for side in cluster.sides for kept in side.log() for body in kept.bodies)
        over = self._expired_now()
        wrong = [body for number in others for body in self._bodies_of(number) if bodies[body] != (body not in over)]
        assert not wrong, f"of another hour than the one that was dropped, and not at the targets once: {wrong}"
        counts = [bodies[body] for number in of_hour for body in self._bodies_of(number)]
        dead = sum(outcomes.count(Outcome.DEAD) for outcomes in self._outcomes_now().values())
        expired = sum(body in over for number in of_hour for body in self._bodies_of(number))
        lost = dead + world.server.dropped_rows(hour)
        assert max(counts) <= 1 and counts.count(0) == lost + expired, (
            f"{lost} are said to be lost, {expired} expired; at the targets: {counts}"
        )

    def _confirm_the_clock(self) -> None:
        """Let time pass until the clock is believed, which nobody sets any more: operators' words need it."""
        cluster = self.cluster
        begun_ms = cluster.machine.monotonic_ms
        while not cluster.world.clock.confirmed:
            assert cluster.machine.monotonic_ms - begun_ms < CONFIRMED_WITHIN_MS, "the clock stays in doubt"
            cluster.machine.advance(DOUBT_STEP_MS)
            cluster.calm(DRAIN_STEP_MS)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Let time pass until it is so, or an alarm's time is over."""
        for _ in range(ALARM_MS // DRAIN_STEP_MS):
            if until():
                return
            self.cluster.calm(DRAIN_STEP_MS)

    def _all_told(self, first: int) -> bool:
        """Whether all that was sent behind a batch has an outcome."""
        told = self._outcomes_now()
        return not self.cluster.world.outside.unanswered and all(
            sequence in told
            for number, (_, accepted) in self.cluster.world.outside.accepted.items()
            if number > first
            for sequence in range(accepted.base_sequence, accepted.base_sequence + accepted.rows)
        )

    def _lose(self, lost: RealtimeSide, said: list[DelaydError | str]) -> None:
        server = self.cluster.world.server
        if server.knows(lost.log_id) and not server.has_given_up(lost.log_id):
            try:
                server.lose(lost.log_id, said.append)
            except NotReady as error:
                self.tell(f"     not yet: {error}")
                said.append(error)

    def _repeat_what_is_unanswered(self) -> None:
        world = self.cluster.world
        for number in list(world.outside.unanswered):
            world.send_again(number)

    def _check_lost(self, lost: RealtimeSide, other: RealtimeSide, first: int) -> None:
        world = self.cluster.world
        there = {sequence for kept in lost.log() for sequence in kept.sequences}
        here = Counter(sequence for kept in other.log() for sequence in kept.sequences)
        told = self._outcomes_now()
        for number, (_, accepted) in world.outside.accepted.items():
            if number <= first:
                continue
            for sequence in range(accepted.base_sequence, accepted.base_sequence + accepted.rows):
                assert here[sequence] + (sequence in there) <= 1, f"{sequence} is at two targets, one of them lost"
                outcomes = told.get(sequence, [])
                assert len(outcomes) == 1, f"{sequence} has the outcomes {outcomes}"
                in_doubt = outcomes == [Outcome.IN_DOUBT]
                assert not (in_doubt and here[sequence]), f"{sequence} is in doubt, and was sent elsewhere"
                ended = outcomes in ([Outcome.CANCELLED], [Outcome.EXPIRED])
                assert not (ended and (here[sequence] or sequence in there)), (
                    f"{sequence} has the outcome {outcomes[0].name}, and was sent"
                )
                assert in_doubt or ended or here[sequence] or sequence in there, f"{sequence} is nowhere"

    def _outcomes_now(self) -> dict[int, list[Outcome]]:
        world = self.cluster.world
        found: dict[int, list[Outcome]] = {}
        for _, path in list_dispatch_logs(world.disk, FOLDER):
            segment = open_segment(world.disk, path, FileKind.DISPATCH, world.server.log_id, write=False)
            rows = read_outcomes(segment)
            segment.close()
            for sequence, outcome in zip(
                rows.sequences.tolist(), rows.parts["outcome"][rows.part_of].tolist(), strict=True
            ):
                found.setdefault(sequence, []).append(Outcome(outcome))
        return found

    def _expired_now(self) -> set[bytes]:
        """The bodies of the messages that have the outcome EXPIRED."""
        told, outside = self._outcomes_now(), self.cluster.world.outside
        return {
            body
            for sent, accepted in outside.accepted.values()
            for sequence, (_, _, body) in enumerate(sent.wanted, accepted.base_sequence)
            if body in outside.expiries and told.get(sequence) == [Outcome.EXPIRED]
        }

    def _bodies_of(self, number: int) -> list[bytes]:
        return [body for _, _, body in self.cluster.world.outside.accepted[number][0].wanted]


def _nobody_hears(told: DelaydError | str) -> None:
    """What comes of it is seen."""
