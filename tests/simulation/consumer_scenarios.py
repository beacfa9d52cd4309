"""Scenarios of consumers: what was fetched and not handed to a handler goes to others at once (rule Q4).

Invariant: each lasts some milliseconds, so no lease ends within it; whatever else a run has damaged stays as it is.
"""

from __future__ import annotations

from delayd.wire.requests import RequestType
from tests.simulation.consumer import Consumer, Held
from tests.simulation.parts import Parts
from tests.simulation.realtime_side import RealtimeLife, RealtimeSide
from tests.simulation.steps import Kinds

FETCHED = 1_000
WAIT_MS = 400
RECALLED_WITHIN_MS = 20  # A pull of one that fetches ahead is answered within half of it when others want messages.


class ConsumerScenarios(Parts):
    """Consumers that fetch ahead, are slow, are interrupted, or end."""

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        if not self.cluster.delay_up:
            return []
        return [(3, self.fetched_is_given_back), (3, self.pull_is_interrupted), (3, self.slow_beside_idle)]

    def fetched_is_given_back(self) -> None:
        """What a consumer has fetched ahead it gives back: another one gets it at once, as the same attempt."""
        found = self._two_consumers()
        if found is None:
            return
        first, other, life = found
        first.pull(FETCHED, 0)
        self.cluster.calm(1)
        self._give_back(first, other, life)

    def pull_is_interrupted(self) -> None:
        """A program is interrupted while it waits for messages, gives back what came all the same, and ends."""
        found = self._two_consumers()
        if found is None:
            return
        first, other, life = found
        first.pull(FETCHED, WAIT_MS)
        if self.cluster.delay_up:
            self.steps.send_rows((-1_000,), [first.books.subject])
        self.moves(12)
        if not first.is_connected():
            return
        first.end_pull()
        self.cluster.calm(1)
        if not first.ended or not first.is_connected():
            return
        self._give_back(first, other, life)
        first.close()
        self.moves(4)

    def slow_beside_idle(self) -> None:
        """A slow consumer has fetched all that there is; one with empty hands gets a share of it."""
        found = self._two_consumers()
        if found is None:
            return
        first, other, life = found
        first.pull(FETCHED, 0)
        self.cluster.calm(1)
        fresh = len(first.held)
        if fresh < 2 or not (first.is_connected() and other.is_connected()) or first.pulling:
            return
        first.pull(1, WAIT_MS, fresh)
        other.pull(1, WAIT_MS)
        had = len(other.held)
        self.cluster.calm(RECALLED_WITHIN_MS)
        if len(first.held) > fresh and first.is_connected() and not first.pulling:
            # A message was there for it before the other one waited; it fetches on, as a client does.
            fresh = len(first.held)
            first.pull(1, WAIT_MS, fresh)
            self.cluster.calm(RECALLED_WITHIN_MS)
        if not self._undisturbed(life) or not (first.is_connected() and other.is_connected()) or len(other.held) > had:
            return
        assert first.wanted > 0, (
            f"{first.name} has {fresh} messages ahead, and does not hear that {other.name} has none"
        )
        first.returned.clear()
        first.settle(RequestType.NACK, first.held[-min(first.wanted, (fresh + 1) // 2) :], uncounted=True)
        self.cluster.calm(1)
        if self._undisturbed(life) and first.is_connected() and other.is_connected() and self._offered(first, life):
            assert len(other.held) > had, f"{other.name} waits while messages were given back for it"

    def _two_consumers(self) -> tuple[Consumer, Consumer, RealtimeLife] | None:
        """Both consumers of a group that has messages, connected to a server that is well."""
        cluster = self.cluster
        cluster.held.clear()
        cluster.router.up = True
        cluster.tell_router()
        subject = self.random.choice(cluster.subjects)
        self.steps.send_rows((-1_000,), [subject])
        cluster.calm(60)
        if not cluster.delay_up:
            return None
        target = cluster.world.server.targets.get(subject)
        side = next((side for side in cluster.sides if side.log_id == target), None)
        if side is None or side.life is None or not self._well(side):
            return None
        books = self.random.choice([each for each in cluster.books if (each.log_id, each.subject) == (target, subject)])
        first, other = (each for each in cluster.consumers if each.books is books)
        for each in (first, other):
            if each.is_connected() and each.pulling:
                each.end_pull()
        cluster.calm(1)
        if not (first.is_connected() and other.is_connected()) or first.pulling or other.pulling:
            return None
        # Whoever is connected has a server.
        return first, other, side.life

    def _give_back(self, first: Consumer, other: Consumer, life: RealtimeLife) -> None:
        """All that one consumer has goes back uncounted; the other one gets it at once."""
        held = list(first.held)
        if not held or not first.is_connected():
            return
        first.returned.clear()
        first.settle(RequestType.NACK, held, uncounted=True)
        self.cluster.calm(1)
        if not (first.is_connected() and other.is_connected()) or not self._undisturbed(life):
            return
        had = len(other.held)
        other.pull(FETCHED, 0)
        self.cluster.calm(1)
        if not other.is_connected() or not self._undisturbed(life):
            return
        got = {each.consume_sequence: each.attempt for each in other.held[had:]}
        # An answer to what it gave back earlier may have come only now. What it holds from before a death may be the
        # same message at other attempts: only the one that the server knows of counts.
        returned = sorted(self._offered(first, life).intersection(held))
        kept = [each for each in returned if each.consume_sequence not in got]
        assert not kept, f"{first.name} gave {kept} back, and {other.name} does not get them at once"
        for each in returned:
            sequence, attempt = each.consume_sequence, got[each.consume_sequence]
            assert attempt == each.attempt, (
                f"no handler was given {sequence}, and it comes as attempt {attempt} after {each.attempt}"
            )

    def _offered(self, first: Consumer, life: RealtimeLife) -> set[Held]:
        """What a consumer gave back and others get: not what has expired meanwhile (rule Q7)."""
        expiries, now_ms = self.cluster.world.outside.expiries, life.clock.now_ms()
        bodies = {each: first.books.given[each.consume_sequence] for each in first.returned}
        return {each for each, body in bodies.items() if expiries.get(body, now_ms + 1) > now_ms}

    def _well(self, side: RealtimeSide) -> bool:
        """Whether nothing of a server's disk is damaged or about to fail, and it serves consumers."""
        server = None if side.life is None else side.life.server
        if server is not None and (not server.knows_its_consumers or server.makes_consume_logs):
            return False  # Its pull log was read wrongly by its start, or a consume log is made again.
        faults = side.disk.faults
        planned = (faults.crash_at, faults.fail_sync_at, faults.fail_write_at)
        full = side.disk.free_bytes("/") < 1 << 20
        return not side.damages.any(side.disk) and not full and planned == (None, None, None)

    def _undisturbed(self, life: RealtimeLife) -> bool:
        """Whether a server still lives that life, and its disk is well."""
        return any(side.life is life and self._well(side) for side in self.cluster.sides)
