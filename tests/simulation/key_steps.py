"""Steps of callers: keyed sends, moves, cancels and questions, by receipts and by keys (docs/keys.md).

Invariant: few names, so that rows meet; a step draws everything from the run's own chance.
"""

from __future__ import annotations

import numpy as np

from delayd.batch.columns import Int64s
from tests.simulation.cluster import HOUR_MS
from tests.simulation.parts import Parts
from tests.simulation.steps import Kinds
from tests.worlds.delay import Wanted
from tests.worlds.delay_adapter import RequestWish
from tests.worlds.key_books import KEEP, REJECT, REPLACE, Name

NO_KEY = b""
KEYS = (b"a", b"b", b"c")
SENT_MS = (-HOUR_MS, -500, 0, 300, 1_500, 4_000, 9_000, HOUR_MS)
MOVED_MS = (-HOUR_MS, -500, 0, 700, 4_000, 9_000, HOUR_MS)


class KeySteps(Parts):
    """What callers want of messages that may be under way."""

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        if not self.cluster.delay_up:
            return []
        return [
            (24, self.send_keyed),
            (8, self.move),
            (8, self.move_by_key),
            (6, self.cancel_by_key),
            (5, self.get),
            (5, self.get_by_key),
            (4, self.callers_meet),
            (3, self.release_slots),
        ]

    def send_keyed(self) -> None:
        """Send messages that meet each other by a few keys."""
        self._send(self.random.choice((1, 1, 3, 6)), SENT_MS)

    def move(self) -> None:
        """Want messages moved by their receipts."""
        asked = self.cluster.world.some_receipts(self.random)
        if asked is not None:
            self.cluster.callers.ask(RequestWish.MOVE, asked, self._instants(len(asked.sequences)))

    def move_by_key(self) -> None:
        """Want the newest messages of keys moved."""
        names = self._names()
        self.cluster.callers.ask_by_key(RequestWish.MOVE, names, self._instants(len(names)))

    def cancel_by_key(self) -> None:
        """Want the newest messages of keys cancelled."""
        self.cluster.callers.ask_by_key(RequestWish.CANCEL, self._names())

    def get(self) -> None:
        """Ask what became of messages."""
        asked = self.cluster.world.some_receipts(self.random)
        if asked is not None:
            self.cluster.callers.ask(RequestWish.GET, asked)

    def get_by_key(self) -> None:
        """Ask what became of the newest messages of keys."""
        self.cluster.callers.ask_by_key(RequestWish.GET, self._names())

    def release_slots(self) -> None:
        """An operator has the server give up slots of keys, and gives them back, at once or later (rule I4)."""
        subjects, keys = zip(*self._names(), strict=True)
        self.cluster.world.server.release_keys(subjects, keys)
        self.moves(self.random.choice((0, 4, 12)))
        if self.chance(0.7):
            self.cluster.router.slots_given += 1

    def callers_meet(self) -> None:
        """Several callers want different things of the same few messages at the same time, and then the server dies."""
        self._send(self.random.choice((1, 2)), (300, 4_000, HOUR_MS), self.random.choice(KEYS))
        if self.chance(0.7):
            self.cluster.calm(self.random.choice((1, 60)))
        for _ in range(self.random.choice((2, 4))):
            self.random.choice((self.send_keyed, self.move, self.move_by_key, self.cancel_by_key, self.get_by_key))()
            self.moves(self.random.choice((0, 2, 12)))
            if not self.cluster.delay_lives():
                return
        if self.chance(0.3):
            self.steps.checkpoint_delay()
            self.moves(12)
        if self.chance(0.4) and self.cluster.delay_lives():
            self.delay_dies_and_starts()
            self.send_last_again()
            self.get_by_key()

    def _send(self, count: int, ahead_ms: tuple[int, ...], key: bytes | None = None) -> None:
        world = self.cluster.world
        rows: list[Wanted] = [self.steps.message(ahead_ms) for _ in range(count)]
        keys = [self.random.choice((NO_KEY, *KEYS)) if key is None else key for _ in rows]
        policies = [self.random.choice((REJECT, KEEP, REPLACE)) if key else REJECT for key in keys]
        # It may be refused at once, or accepted in this very call.
        self.cluster.callers.keys.sent(world.outside.last_number + 1, keys, policies, world.outside)
        world.send(rows, keys, policies)

    def _names(self) -> list[Name]:
        """Some names of one subject."""
        subject = self.random.choice(self.cluster.subjects)
        return [(subject, key) for key in self.random.sample(KEYS, self.random.choice((1, 1, 2)))]

    def _instants(self, count: int) -> Int64s:
        now_ms = self.cluster.world.clock.now_ms()
        ahead = [self.random.choice(MOVED_MS) + self.random.randint(0, 400) for _ in range(count)]
        return np.array([now_ms + each for each in ahead], np.int64)
