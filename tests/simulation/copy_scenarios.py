"""Scenarios of copies: a directory that comes back from a backup, and a copy of one that runs beside it (rules H7, H8).

Invariant: whatever a copy does is undone with it: in the end each server runs on its newest directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.errors import DelaydError, NotReady
from tests.simulation.cluster import HOUR_MS
from tests.simulation.delay_side import NAME, DelayLife
from tests.simulation.parts import Parts
from tests.simulation.realtime_side import RealtimeSide
from tests.simulation.steps import Kinds
from tests.worlds.delay import Remains, encode_wanted

OTHER_PRODUCER = 0xC0FFEE


class CopyScenarios(Parts):
    """Restored servers, and two of them at once."""

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        if not self.cluster.delay_up:
            return []
        return [(4, self.delay_is_restored), (4, self.realtime_is_restored), (4, self.delay_copy_runs_beside)]

    def delay_is_restored(self) -> None:
        """The delay server starts on a backup, and hands nothing over; then its newest directory is back (rule H8)."""
        cluster = self.cluster
        self._all_work()
        if not cluster.delay_up:
            return
        world = cluster.world
        # It has messages that were delivered since.
        self._send_to_all()
        self.moves(12)
        backup, ends = cluster.delay_backup(), {side.log_id: world.server.end_of(side.log_id) for side in cluster.sides}
        for _ in range(2):
            # Only what T knows to be decided proves that a backup is old: W goes with the next batch.
            self._send_to_all()
            cluster.calm(self.random.choice((400, 1_200)))
        if not cluster.delay_lives() or not all(self._decided(side) > ends[side.log_id] for side in cluster.sides):
            return
        cluster.delay_dies(None)
        with self._copy(backup) as copy:
            known = [(side, self._decided(side)) for side in cluster.sides]
            self._live_beside(copy, 10, self.random.choice((1_000, 4_000)))
            if all(self._proves_a_copy(side, offset, copy) for side, offset in known):
                assert not copy.dispatched, "a delay server that was restored from a backup hands messages over"
        cluster.delay_starts(faults=False)
        self.some_work()

    def delay_copy_runs_beside(self) -> None:
        """A copy of the delay server runs beside it; its hellos are refused, and it takes nothing (rules H3, H8)."""
        cluster = self.cluster
        self._all_work()
        if not cluster.delay_up:
            return
        self._send_to_all()
        self.moves(12)
        if not cluster.delay_lives():
            return
        self.tell(f"     {NAME} dies, killed")
        cluster.delay_dies(None)
        copied = cluster.delay_backup()
        cluster.delay_starts(faults=False)
        self._send_to_all()
        cluster.calm(self.random.choice((400, 1_200)))
        if not all(self._hears_it(side) for side in cluster.sides):
            return
        with self._copy(copied) as copy:
            self._live_beside(copy, 10, self.random.choice((1_000, 4_000)))
            assert not copy.dispatched, "a copy of a delay server hands messages over"
            if copy.server.is_fenced:
                self._sends_to(copy)
        self.some_work()

    def realtime_is_restored(self) -> None:
        """A realtime server starts on a backup: it gets nothing, until its newest directory is back (rule H7)."""
        cluster = self.cluster
        self._all_work()
        side = self.steps.side()
        # Damage is mended once: in the copy, and then it would stay in the newest directory.
        side.damages.mend(side.disk)
        disk = side.disk.copied()
        kept = (disk, side.state.after_crash(disk))
        self._send_to_all()
        cluster.calm(self.random.choice((400, 1_200)))
        cluster.bury()
        if not cluster.delay_up or side.life is None:
            return
        side.die(None, 0)
        newest = side.disk, side.state
        side.disk, side.state = kept
        self.tell(f"     {side.name} is restored from a backup")
        try:
            cluster.side_starts(side, faults=False)
            if self.chance(0.5):
                self.delay_dies_and_starts()
            # A delay server that lost what it knew of the end may take an older one for whole.
            restored = side.life
            assert restored is not None
            if cluster.world.server.end_of(side.log_id) > restored.server.log_end:
                self.steps.send_due()
                cluster.calm(self.random.choice((400, 2_500)))
                assert restored not in cluster.world.dispatched, "a realtime server that lost data gets more"
        finally:
            side.die(None, 0)
            side.disk, side.state = newest
        cluster.side_starts(side, faults=False)
        self.some_work()

    def _all_work(self) -> None:
        cluster = self.cluster
        for side in cluster.sides:
            if side.life is None:
                cluster.side_starts(side, faults=False)
        cluster.held.clear()
        cluster.router.up = True
        cluster.tell_router()
        self._send_to_all()
        cluster.calm(self.random.choice((400, 2_500)))

    def _send_to_all(self) -> None:
        if self.cluster.delay_up:
            for subject in self.cluster.subjects:
                self.steps.send_rows((-1_000,), [subject])

    def _decided(self, side: RealtimeSide) -> int:
        """The offset up to which a realtime server knows batches to be decided."""
        return -1 if side.life is None else side.life.server.decided_offset(self.cluster.world.server.log_id)

    def _proves_a_copy(self, side: RealtimeSide, offset: int, copy: DelayLife) -> bool:
        """Whether the last decided batch at a realtime server is of no hour whose dispatch log the copy has damaged."""
        if not copy.server.unread_hours:
            return True
        if side.life is None:
            return False
        try:
            return not side.life.server.may_be_of(copy.server.unread_hours, offset, copy.server.log_id)
        except NotReady:
            return False

    def _hears_it(self, side: RealtimeSide) -> bool:
        """Whether a realtime server has heard this very life of the delay server."""
        server = self.cluster.world.server
        return side.life is not None and side.life.server.is_connected_to(server.log_id, server.epoch)

    @contextmanager
    def _copy(self, remains: Remains) -> Iterator[DelayLife]:
        cluster = self.cluster
        copy = cluster.delay_copy(remains)
        self.tell(f"     a copy of {NAME} starts: epoch {copy.server.epoch}")
        try:
            yield copy
        finally:
            cluster.network.process_died(copy)
            copy.own.die()

    def _live_beside(self, copy: DelayLife, count: int, calm_ms: int) -> None:
        """Let a copy do its work among all others'."""
        for _ in range(count):
            copy.look_around()
            copy.server.wake()
            for _ in range(self.random.choice((4, 12, 40))):
                if moves := [*copy.own_moves(), *self.cluster.moves()]:
                    self.random.choice(moves).do()
            self.cluster.advance(calm_ms // count)

    def _sends_to(self, copy: DelayLife) -> None:
        """Nobody gets a receipt of a server that is fenced."""
        rows = [(copy.clock.now_ms() + HOUR_MS, self.cluster.subjects[0], b"to a copy")]
        heard: list[object] = []
        batch = parse(encode_wanted(rows, ProducerPart(OTHER_PRODUCER, 1, 1)))
        copy.server.send(batch, lambda what, duplicate: heard.append(what))
        self._live_beside(copy, 4, 60)
        assert heard and isinstance(heard[0], DelaydError), f"a fenced server answers a send with {heard}"
