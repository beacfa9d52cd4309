"""A random life of a delay server and its surroundings, from one seed: sends, cuts, deaths of either side, bad clocks.

Invariant: the same seed takes the same steps. What was accepted must be at a target exactly once in the end, and the
books of both sides must agree; the trace of steps is part of every failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from delayd.errors import BatchMalformed, CallerError, DelaydError, DiskFull, DiskReserve, RetryLater
from delayd.machine.clock import BELIEVED_AFTER_MS
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES, Crash
from delayd.testing.tree import PowerLoss
from delayd.wire.asked import AnswerRows
from delayd.wire.requests import RequestType
from tests.worlds.delay import TARGET_IDS, Wanted, World, new_world
from tests.worlds.delay_adapter import DelayCore
from tests.worlds.key_books import KEEP, REJECT, REPLACE, KeyBooks

SUBJECTS = (b"orders.eu", b"orders.us", b"mail")
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
STEPS_MS = (-DAY_MS, -HOUR_MS, HOUR_MS, DAY_MS)
BEFORE_HOUR_MS = 5_000  # A run begins this long before the end of an hour, so that most runs pass it.
KEYS = (b"", b"a", b"b", b"c")
CANCELS = (4, 12, 80)  # How often somebody cancels or sends with keys, beside other steps: no two lives are alike.
MOVES = (4, 12, 80)  # The same of moves.
WAYS = (None, None, None, *PowerLoss)  # SIGKILL is the commonest death.


class Chaos:
    """One run; `run` raises AssertionError with the trace when a promise is broken."""

    def __init__(self, seed: int, steps: int = 120, core: type[DelayCore] = DelayCore) -> None:
        self.seed = seed
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()
        self._random = Random(seed)
        self._steps = steps
        self._messages = 0
        targets = TARGET_IDS[: self._random.randint(1, 2)]
        self._settings = {
            "frame_rows_max": self._random.choice((1, 3, 8_000)),
            "frames_in_flight_max": self._random.choice((1, 2, 4)),
            "checkpoint_every_ms": self._random.choice((300, 2_000, 60_000)),
            "segment_bytes": self._random.choice((4_096, 65_536)),
            "load_ahead_ms": self._random.choice((500, 4_000)),
            "tail_bytes": self._random.choice((0, 65_536)),
            # A send that nobody answered is repeated only in the end, and steps of the clock may make that late.
            "producer_keep_ms": 30 * DAY_MS,
        }
        self._cancels = self._random.choice(CANCELS)
        self._keys = KeyBooks()
        self._asked: set[int] = set()  # Rows that somebody wanted to cancel.
        self._moves = self._random.choice(MOVES)
        start_ms = START_MS + HOUR_MS - BEFORE_HOUR_MS
        self.world = World(new_world(targets, start_ms), core=core, seed=seed, **self._settings)
        self._core = core

    def run(self) -> Counter[str]:
        """Take all steps, heal, and compare the books; the steps by kind."""
        try:
            for number in range(self._steps):
                self._step()
                if number % 8 == 0:
                    self.world.check_logs()
            self._heal()
        except Exception as error:
            raise AssertionError(
                f"seed {self.seed}: {type(error).__name__}: {error}\n" + "\n".join(self.trace)
            ) from error
        return self.counts

    def _step(self) -> None:
        moves = self.world.moves()
        if moves and self._random.random() < 0.75:
            self._do("move", self._random.choice(moves))
            return
        kinds: list[tuple[int, Callable[[], None]]] = [
            (30, self._send),
            (self._cancels, self._send_keyed),
            (6, self._send_again),
            (self._cancels, self._cancel),
            (self._moves, self._reschedule),
            (4, self._get),
            (12, self._wake),
            (25, self._advance),
            (25, self._calm),
            (4, self._step_wall),
            (2, self._trust_clock),
            (3, self._believe_wrong_clock),
            (6, self._checkpoint),
            (5, self._cut),
            (4, self._crash_target),
            (5, self._die),
            (4, self._die_soon),
            (3, self._refuse),
            (3, self._meta),
            (4, self._sweep),
            (3, self._fill_disk),
            (2, self._move_targets),
        ]
        weights = [weight for weight, _ in kinds]
        kind = self._random.choices([step for _, step in kinds], weights)[0]
        self._do(kind.__name__, kind)

    def _do(self, name: str, step: Callable[[], None]) -> None:
        self.counts[name] += 1
        self.trace.append(
            f"{name} {getattr(step, '__qualname__', '')} at {self.world.clock.machine.wall_ms - START_MS}"
        )
        try:
            step()
        except Crash as crash:
            self.trace.append(f"died at {crash}")
            self._live_again()
        self._keys.look(self.world.outside)

    # Steps of the surroundings.

    def _send(self) -> None:
        self.world.send(self._draw_rows())

    def _send_keyed(self) -> None:
        """Messages that meet each other by a few keys."""
        rows = self._draw_rows()
        keys = [self._random.choice(KEYS) for _ in rows]
        policies = [self._random.choice((REJECT, KEEP, REPLACE)) if key else REJECT for key in keys]
        number = self.world.send(rows, keys, policies)
        self._keys.sent(number, keys, policies, self.world.outside)

    def _draw_rows(self) -> list[Wanted]:
        world = self.world
        rows: list[Wanted] = []
        for _ in range(self._random.choice((1, 1, 3, 7))):
            self._messages += 1
            ahead = self._random.choice((-HOUR_MS, -500, 0, 300, 1_500, 4_000, 9_000))
            due = world.clock.now_ms() + ahead + self._random.randint(0, 400)
            rows.append((due, self._random.choice(SUBJECTS), b"message %d" % self._messages))
        return rows

    def _send_again(self) -> None:
        known = [*self.world.outside.unanswered, *self.world.outside.accepted]
        if known:
            self.world.send_again(self._random.choice(known))

    def _cancel(self) -> None:
        asked = self.world.some_receipts(self._random)
        if asked is not None:
            self._asked.update(asked.sequences.tolist())
            self.world.cancel(asked)

    def _reschedule(self) -> None:
        """Move messages: one instant for all, or one for each, in the past, soon, or in an hour that is not loaded."""
        asked = self.world.some_receipts(self._random)
        if asked is None:
            return
        count = self._random.choice((1, len(asked.sequences)))
        ahead = [self._random.choice((-HOUR_MS, -500, 0, 700, 4_000, 9_000)) for _ in range(count)]
        now_ms = self.world.clock.now_ms()
        try:
            self.world.reschedule(asked, *(now_ms + each + self._random.randint(0, 400) for each in ahead))
        except (CallerError, RetryLater) as error:
            self.trace.append(f"not moved: {error}")

    def _get(self) -> None:
        asked = self.world.some_receipts(self._random)
        if asked is not None:
            self.world.server.get(asked, _no_one)

    def _wake(self) -> None:
        self.world.server.wake()

    def _advance(self) -> None:
        self.world.clock.advance(self._random.choice((1, 60, 500, 1_500)))
        self.world.look_around()
        self.world.server.wake()

    def _calm(self) -> None:
        self.world.pass_ms(self._random.choice((30, 300, 1_200)))

    def _step_wall(self) -> None:
        self.world.clock.step_wall(self._random.choice((-3_000, -400, 400, 3_000, 60_000, *STEPS_MS)))

    def _trust_clock(self) -> None:
        """An operator says that the clock is right, whatever it shows."""
        self.world.begin(RequestType.TRUST_CLOCK)

    def _believe_wrong_clock(self) -> None:
        """An operator believes a clock that is ahead, and says so again when it is right; messages come meanwhile."""
        ahead_ms = self._random.choice((HOUR_MS, DAY_MS))
        for step_ms in (ahead_ms, -ahead_ms):
            self.world.clock.step_wall(step_ms)
            self._trust_clock()
            self._send()
            if self._random.random() < 0.7:
                self.world.pass_ms(self._random.choice((0, 0, 300, 1_200)))

    def _checkpoint(self) -> None:
        self.world.server.checkpoint(_nothing)

    def _sweep(self) -> None:
        self.world.server.sweep()

    def _cut(self) -> None:
        keep, answers = self._random.randint(0, 2), self._random.randint(0, 2)
        self.world.cut(self._random.choice(list(self.world.outside.targets)), keep, answers)

    def _crash_target(self) -> None:
        log_id = self._random.choice(list(self.world.outside.targets))
        target = self.world.outside.targets[log_id]
        if target.up:
            self.world.crash_target(log_id, self._random.randint(0, 2), self._random.randint(0, 2))
        else:
            target.restart()

    def _refuse(self) -> None:
        refusals: list[DelaydError] = [DiskReserve("full"), BatchMalformed("no")]
        self._random.choice(list(self.world.outside.targets.values())).refusals.append(self._random.choice(refusals))

    def _meta(self) -> None:
        self.world.meta_up = not self.world.meta_up

    def _move_targets(self) -> None:
        """The targets' addresses are mixed up, or right again."""
        outside = self.world.outside
        ids = list(outside.targets)
        outside.moved = {} if outside.moved else dict(zip(ids, reversed(ids), strict=True))

    def _fill_disk(self) -> None:
        disk = self.world.disk
        full = disk.capacity_bytes < CAPACITY_BYTES
        disk.capacity_bytes = CAPACITY_BYTES if full else disk.used_bytes + self._random.randint(0, 3_000)

    # Deaths.

    def _die(self) -> None:
        raise Crash("the test says so")

    def _die_soon(self) -> None:
        self.world.disk.faults.crash_at = len(self.world.disk.operations) + self._random.randint(1, 12)

    def _live_again(self) -> None:
        remains = self.world.remains(self._random.choice(WAYS), self._random.randrange(1 << 16))
        while True:
            if self._random.random() < 0.3:
                remains.disk.faults.crash_at = self._random.randint(1, 12)
            try:
                world = World(remains, core=self._core, seed=self._random.randrange(1 << 16), **self._settings)
            except Crash as crash:
                self.trace.append(f"died again at {crash}")
                remains = remains.after_crash(self._random.choice(WAYS), self._random.randrange(1 << 16))
                continue
            except DiskFull as full:
                self.trace.append(f"no start: {full}")
                remains = remains.after_crash(None)
                remains.disk.capacity_bytes = CAPACITY_BYTES
                continue
            self.trace.append(f"epoch {world.server.epoch}")
            self.world = world
            return

    def _heal(self) -> None:
        self.trace.append("heal")
        self.world.disk.faults.crash_at = None
        if self.counts["_fill_disk"]:
            # A file that could not be created was closed and removed as it was.
            self.world.disk.closed_unsynced.clear()
            self.world.disk.capacity_bytes = CAPACITY_BYTES
        for target in self.world.outside.targets.values():
            target.refusals.clear()
        # A clock that was set ahead is believed after half a minute, one that was set back makes rows wait.
        self.world.drain(240_000)
        self.world.check_books()
        self._keys.check(self.world.outside, dict.fromkeys(self._asked, 0))
        if self._random.random() < 0.3:
            if not self.world.clock.confirmed:
                self.world.pass_ms(BELIEVED_AFTER_MS)  # Nothing is sealed before.
            self.world.check_sealing()


def _no_one(what: AnswerRows | DelaydError) -> None:
    """Nobody reads this answer."""


def _nothing(offset: int) -> None:
    """Nobody waits for this checkpoint."""
