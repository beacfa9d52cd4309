"""Steps of callers whose sends are to happen once: records of sends, and the messages behind them (docs/once.md).

Invariant: few names, so that most sends meet a record; a step draws everything from the run's own chance.
"""

from __future__ import annotations

import numpy as np

from tests.simulation.cluster import HOUR_MS
from tests.simulation.key_steps import KEYS, NO_KEY, SENT_MS
from tests.simulation.parts import Parts
from tests.simulation.steps import Kinds
from tests.worlds.delay import Wanted
from tests.worlds.delay_adapter import RequestWish
from tests.worlds.key_books import KEEP, RECORD, RECORDS, REJECT, REPLACE

NAMES = (b"once-a", b"once-b")
KEPT_MS = (700, 4_000, 9_000, HOUR_MS)  # How long records stay, in place of a day: some end while the run goes on.


class OnceSteps(Parts):
    """What callers want done once."""

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        if not self.cluster.delay_up:
            return []
        return [
            (24, self.send_once),
            (6, self.answer_is_lost),
            (3, self.ask_about_records),
            (2, self.move_records),
            (2, self.free_names),
        ]

    def send_once(self) -> None:
        """Send messages behind records, and some without one."""
        self._send([self.random.choice(NAMES) for _ in range(self.random.choice((1, 1, 2, 4)))])

    def answer_is_lost(self) -> None:
        """The server dies while a send is under way, and its caller, who has no answer, asks the next life again."""
        name = self.random.choice(NAMES)
        self._send([name])
        self.moves(self.random.choice((0, 4, 12)))
        if not self.cluster.delay_lives():
            return
        if self.chance(0.3):
            self.steps.checkpoint_delay()
            self.moves(12)
        if self.cluster.delay_lives():
            self.delay_dies_and_starts()
            self._send([name])

    def ask_about_records(self) -> None:
        """Ask what became of the newest records of names."""
        self.cluster.callers.ask_by_key(RequestWish.GET, self._names())

    def move_records(self) -> None:
        """An operator wants records to end at another instant."""
        names = self._names()
        now_ms = self.cluster.world.clock.now_ms()
        wanted_at_ms = np.array([now_ms + self.random.choice(KEPT_MS) for _ in names], np.int64)
        self.cluster.callers.ask_by_key(RequestWish.MOVE, names, wanted_at_ms)

    def free_names(self) -> None:
        """An operator wants records cancelled."""
        self.cluster.callers.ask_by_key(RequestWish.CANCEL, self._names())

    def _names(self) -> list[tuple[bytes, bytes]]:
        return [(RECORDS, name) for name in self.random.sample(NAMES, self.random.choice((1, 2)))]

    def _send(self, names: list[bytes]) -> None:
        world = self.cluster.world
        rows: list[Wanted] = []
        keys: list[bytes] = []
        policies: list[int] = []
        for name in names:
            kind = self.random.random()
            if kind < 0.9:
                _, _, body = self.steps.message((0,))
                rows.append((world.clock.now_ms() + self.random.choice(KEPT_MS), RECORDS, b"record of " + body))
                keys.append(name)
                policies.append(RECORD)
            if kind > 0.1:
                rows.append(self.steps.message(SENT_MS))
                keys.append(self.random.choice((NO_KEY, NO_KEY, *KEYS)))
                policies.append(self.random.choice((REJECT, KEEP, REPLACE)) if keys[-1] else REJECT)
        # It may be refused at once, or accepted in this very call.
        self.cluster.callers.keys.sent(world.outside.last_number + 1, keys, policies, world.outside)
        world.send(rows, keys, policies)
