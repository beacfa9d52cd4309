"""One run of a simulated cluster from one seed: steps by chance, faults among them, then a healing and the books.

Invariant: the seed decides everything, so a failing seed fails again, with the same trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from delayd.testing.clock import START_MS
from delayd.testing.disk import Crash
from tests.simulation.clock_scenarios import ClockScenarios
from tests.simulation.cluster import Cluster
from tests.simulation.consumer_scenarios import ConsumerScenarios
from tests.simulation.copy_scenarios import CopyScenarios
from tests.simulation.damage_scenarios import DamageScenarios
from tests.simulation.disk_scenarios import DiskScenarios
from tests.simulation.handoff_scenarios import HandoffScenarios
from tests.simulation.hostile_scenarios import HostileScenarios
from tests.simulation.key_steps import KeySteps
from tests.simulation.load_scenarios import LoadScenarios
from tests.simulation.once_steps import OnceSteps
from tests.simulation.operator_epilogues import OperatorEpilogues
from tests.simulation.steps import Kinds, Steps

STEPS = 80
CHECK_EVERY = 16  # Steps between two readings of all files.
MOVES_AMONG_STEPS = 0.75  # The rest are drawn by weight, scenarios among them.
MIXED_STEPS = 0.3  # In the others threads go on while they can, and bytes are carried after that.
FAVOURED, FAVOURED_TIMES = 3, 8  # Each run has some kinds of steps that happen more often: no two runs are alike.
EPILOGUE_SHARE = 0.25  # Of the runs.
KEYED_OF_FOUR = 2  # So many of four seeds have callers who use keys: batches with keys take another path than others.
EXPIRING_EVERY, EXPIRING = 8, (1, 7)  # In these of so many seeds messages expire; callers use keys in the first one.
ONCE_EVERY, ONCE = 8, (4, 5)  # In these of so many seeds sends are to happen once; their callers use keys as well.
TRACE_LINES = 400


class Run:
    """One seed; `run` raises AssertionError with the trace when a promise is broken."""

    def __init__(
        self,
        seed: int,
        steps: int = STEPS,
        favoured: Sequence[str] = (),
        *,
        keyed: bool | None = None,
        expiring: bool | None = None,
        once: bool | None = None,
    ) -> None:
        """``keyed``: whether callers use keys and move messages; ``expiring``: whether messages expire; ``once``:
        whether sends are to happen once.

        When nobody says so, the seed does.
        """
        self.seed = seed
        self.keyed = seed % 4 < KEYED_OF_FOUR if keyed is None else keyed
        self.once = seed % ONCE_EVERY in ONCE if once is None else once
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self._random = Random(seed)
        self._count = steps
        self.cluster = Cluster(self._random, self.tell)
        self._begun_ms = self.cluster.machine.boottime_ms
        expiring = seed % EXPIRING_EVERY in EXPIRING if expiring is None else expiring
        self._steps = Steps(self.cluster, self._random, self.tell, Random(seed) if expiring else None)
        parts = (self.cluster, self._steps, self._random, self.tell)
        self._epilogues = OperatorEpilogues(*parts)
        self._scenarios = (
            HandoffScenarios(*parts),
            DiskScenarios(*parts),
            DamageScenarios(*parts),
            CopyScenarios(*parts),
            ClockScenarios(*parts),
            LoadScenarios(*parts),
            HostileScenarios(*parts),
            ConsumerScenarios(*parts),
        )
        self._key_steps = KeySteps(*parts)
        self._once_steps = OnceSteps(*parts)
        drawn = self._random.sample(sorted(kind.__name__ for _, kind in self._all_kinds()), FAVOURED)
        self._favoured = favoured or drawn

    @property
    def virtual_ms(self) -> int:
        """Time that has passed in the cluster."""
        return self.cluster.machine.boottime_ms - self._begun_ms

    @property
    def kinds(self) -> Kinds:
        """What may be drawn now, with its weight."""
        return [
            (weight * FAVOURED_TIMES if kind.__name__ in self._favoured else weight, kind)
            for weight, kind in self._all_kinds()
        ]

    def tell(self, line: str) -> None:
        """Add a line to the trace."""
        self.trace.append(line)

    def run(self) -> Counter[str]:
        """Take all steps, heal, and compare the books; the steps by kind."""
        checks = self.cluster.checks
        try:
            for number in range(self._count):
                self._step(number)
                if number % CHECK_EVERY == 0:
                    checks.at_any_time()
            self.tell("no more faults")
            checks.drain()
            checks.at_the_end()
            self._epilogue()
        except (Exception, Crash) as error:
            shown = "\n".join(self.trace[-TRACE_LINES:])
            raise AssertionError(f"seed {self.seed}: {type(error).__name__}: {error}\n{shown}") from error
        return self.counts

    @property
    def epilogues(self) -> set[str]:
        """The kinds of what may come last."""
        return {each.__name__ for each in self._epilogues.all()}

    def _epilogue(self) -> None:
        """Mostly nothing; where one was asked for, that one."""
        epilogues = self._epilogues.all()
        asked_for = [each for each in epilogues if each.__name__ in self._favoured]
        if asked_for or self._random.random() < EPILOGUE_SHARE:
            epilogue = self._random.choice(asked_for or epilogues)
            self._do(epilogue.__name__, f"     {epilogue.__name__}", epilogue)

    def _all_kinds(self) -> Kinds:
        keyed = self._key_steps.kinds() if self.keyed else []
        once = self._once_steps.kinds() if self.once else []
        return self._steps.kinds() + keyed + once + [kind for each in self._scenarios for kind in each.kinds()]

    def _step(self, number: int) -> None:
        self.cluster.network.forget_ended()
        self.cluster.mixed = self._random.random() < MIXED_STEPS
        at_ms = self.cluster.machine.wall_ms - START_MS
        if self._random.random() < MOVES_AMONG_STEPS and (moves := self.cluster.moves()):
            move = self._random.choice(moves)
            self._do("move", f"{number:4} {at_ms:8} {move.what}", move.do)
            return
        kinds = self.kinds
        kind = self._random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
        self._do(kind.__name__, f"{number:4} {at_ms:8} {kind.__name__}", kind)

    def _do(self, kind: str, line: str, step: Callable[[], None]) -> None:
        self.counts[kind] += 1
        self.tell(line)
        try:
            step()
        except Crash as crash:
            self.tell(f"     dies at {crash}")
        self.cluster.bury()
        self.cluster.callers.look()
