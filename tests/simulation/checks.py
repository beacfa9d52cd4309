"""What must hold in a simulated cluster, always and when all is quiet, read from the files alone; and the healing.

Invariant: a check never takes a server's word from its memory for what its files say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from delayd.hours import hour_of_ms
from delayd.reading.seals import verify_seals
from tests.simulation.consumer import GroupBooks
from tests.simulation.network import ServedEnd
from tests.simulation.realtime_side import RealtimeSide
from tests.worlds.delay import DATA

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

DELIVERED_WITHIN_MS = (
    120_000  # After the last fault: a jump of the clock is believed after 30 s, an alarm lasts as long.
)
FENCED_WITHIN_MS = 40_000
CONSUMED_WITHIN_MS = 30_000
TRIED_AGAIN_WITHIN_MS = 40_000  # What could not be read is read again after half a minute.
DRAIN_STEP_MS = 1_000
DOUBT_STEP_MS = 3_000


class Checks:
    """The checks of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.delivered_after_ms = 0
        self._cluster = cluster
        self._removed: dict[int, int] = {}

    def at_any_time(self) -> None:
        """What holds at every instant."""
        cluster = self._cluster
        self.read_logs()
        cluster.world.check_logs()
        self._quarantine()
        self._waiting()
        self._cancelled()
        if cluster.delay_up and not any(side.disk.crashed for side in cluster.sides):
            self._outcomes()
            self._expired()
            self._seals()

    def drain(self) -> None:
        """Let time pass until everything due has been delivered and acknowledged, each within its bound."""
        cluster = self._cluster
        cluster.heal()
        world, machine = cluster.world, cluster.machine
        begun_ms = machine.monotonic_ms
        while world.server.is_fenced:
            # Whoever fenced it off is asked again.
            assert machine.monotonic_ms - begun_ms < FENCED_WITHIN_MS, f"fenced: {world.server.fences}"
            cluster.calm(DRAIN_STEP_MS)
        world._repeat_sends()
        waited_ms, begun_ms = 0, machine.monotonic_ms
        while missing := self._missing():
            assert waited_ms < DELIVERED_WITHIN_MS, (
                f"not delivered {DELIVERED_WITHIN_MS} ms after the last fault: {sorted(missing)[:5]}"
            )
            # A clock that was set back an hour makes rows wait as long: nobody has to live through it step by step.
            due_ms = min(due for _, due, _, body in world.newest_rows() if body in missing)
            # Only what is due is waited for.
            waited_ms += min(machine.monotonic_ms - begun_ms, max(0, world.clock.now_ms() - due_ms))
            machine.advance(max(0, due_ms - world.clock.now_ms() - 3_000))
            begun_ms = machine.monotonic_ms
            if not world.clock.confirmed:
                # Nothing but time makes a jump believed.
                machine.advance(DOUBT_STEP_MS)
            cluster.calm(DRAIN_STEP_MS)
        self.delivered_after_ms = waited_ms
        begun_ms = machine.monotonic_ms
        while world.server.has_set_aside:
            assert machine.monotonic_ms - begun_ms < DELIVERED_WITHIN_MS, (
                f"{DELIVERED_WITHIN_MS} ms after all files were restored, set aside: {world.server.told_of_damage()}"
            )
            cluster.calm(DRAIN_STEP_MS)
        begun_ms = machine.monotonic_ms
        within_ms = CONSUMED_WITHIN_MS + (TRIED_AGAIN_WITHIN_MS if cluster.damaged else 0)
        while self._undelivered() or self._unacknowledged() or self._unread():
            assert machine.monotonic_ms - begun_ms < within_ms, (
                f"{within_ms} ms after the last fault, never given to a consumer: "
                f"{sorted(self._undelivered())[:5]}, not acknowledged: {self._unacknowledged()}, "
                f"pull logs that were not read again: {self._unread()}"
            )
            complete = self._acknowledged()
            for consumer in cluster.consumers:
                if consumer.books not in complete:
                    consumer.drain()
            cluster.calm(DRAIN_STEP_MS)
        cluster.calm(DRAIN_STEP_MS)

    def at_the_end(self) -> None:
        """What holds when all is quiet and everything has been delivered."""
        self.read_logs()
        world = self._cluster.world
        world.check_books()
        self._expired()
        self._cluster.callers.check()
        self._cancelled()
        self._quarantine()
        self._nobody_else()
        self._seals()
        if world.books.sealed:
            report = verify_seals(DATA, disk=world.disk)
            assert not report.broken, f"seals are broken: {report.broken}"
            named = {each.hour for each in report.seals}
            assert named >= world.books.sealed.keys(), f"hours {world.books.sealed.keys() - named} have no seal"

    def _missing(self) -> set[bytes]:
        """Bodies of accepted messages that no realtime server's files have."""
        self.read_logs()
        return self._cluster.world.missing()

    def _undelivered(self) -> set[bytes]:
        """Bodies that are in a realtime server's files and were never given to a consumer of their group."""
        self.read_logs()
        groups: defaultdict[tuple[int, bytes], list[GroupBooks]] = defaultdict(list)
        for books in self._cluster.books:
            groups[books.log_id, books.subject].append(books)
        return {
            body
            for side in self._cluster.sides
            for kept in self._cluster.world.outside.targets[side.log_id].log
            for books in groups[side.log_id, kept.subject]
            for body in books.owed(kept.bodies, removed=kept.offset < side.leaving_below)
            # A group passes over what expires in its file.
            if body not in self._cluster.world.outside.expiries
        }

    def _unacknowledged(self) -> list[str]:
        """Groups that have not got everything acknowledged."""
        return [
            f"{side.name} {group.subject}: {group.oldest} of {group.end}"
            for side in self._cluster.sides
            if side.life is not None
            for group in side.life.server.groups()
            if group.oldest < group.end
        ]

    def _unread(self) -> list[str]:
        """Servers that read their pull log wrongly, know no group therefore, and have not read it again."""
        up = [(side.name, side.life) for side in self._cluster.sides if side.life is not None]
        return [name for name, life in up if not life.server.knows_its_consumers]

    def _acknowledged(self) -> list[GroupBooks]:
        """Books of groups that have heard everything acknowledged, or whose server has nothing for them."""
        rows: Counter[tuple[int, bytes]] = Counter()
        for log_id, target in self._cluster.world.outside.targets.items():
            for kept in target.log:
                rows[log_id, kept.subject] += len(kept.bodies)
        return [books for books in self._cluster.books if len(books.acknowledged) == rows[books.log_id, books.subject]]

    def read_logs(self) -> None:
        """Take the realtime servers' files as they are; what retention took away was acknowledged (rule Q3)."""
        for side in self._cluster.sides:
            if side.disk.crashed:
                continue
            self._cluster.world.outside.targets[side.log_id].log = side.log()
            if len(side.removed) > self._removed.get(side.log_id, 0):
                self._removed[side.log_id] = len(side.removed)
                for books in self._cluster.books:
                    if books.log_id == side.log_id:
                        self._removal(books, side)

    def _removal(self, books: GroupBooks, side: RealtimeSide) -> None:
        """Nothing that a group had, or was to have, is removed before an acknowledgement of it was sent."""
        tried = {books.given[sequence] for sequence in books.tried}
        for kept in side.removed.values():
            if kept.subject == books.subject:
                lost = books.owed(kept.bodies, removed=True) | ((set(kept.bodies) & books.bodies) - tried)
                lost -= self._cluster.world.outside.expiries.keys()
                assert not lost, f"removed before anybody acknowledged it: {sorted(lost)}"

    def _outcomes(self) -> None:
        """Each outcome that is told names a row that its target's files have, exactly there."""
        held = {
            sequence: (kept.part.hour, log_id, kept.offset, kept.part.batch_id)
            for log_id, target in self._cluster.world.outside.targets.items()
            for kept in target.log
            for sequence in kept.sequences
        }
        for sequence, told in self._cluster.world.outcomes().items():
            assert held.get(sequence) == told, (
                f"the dispatch log has {sequence} at {told}, it is at {held.get(sequence)}"
            )

    def _expired(self) -> None:
        """A row is EXPIRED only if it was accepted with an expiry, was claimed then or later, and is nowhere (S8)."""
        world = self._cluster.world
        expired = world.expired()
        if not expired:
            return
        body_of = {sequence: body for sequence, _, _, body in world.newest_rows()}
        held = {row for target in world.outside.targets.values() for kept in target.log for row in kept.sequences}
        for sequence, claimed_at_ms in expired.items():
            body = body_of.get(sequence, b"")
            expires_ms = world.outside.expiries.get(body)
            assert sequence not in held, f"{body!r} is EXPIRED and delivered"
            # The answer to a send may be under way: then nobody knows its sequences yet.
            assert not body or (expires_ms is not None and expires_ms <= claimed_at_ms), (
                f"{body!r} is EXPIRED, claimed at {claimed_at_ms}; it expires at {expires_ms}"
            )

    def _cancelled(self) -> None:
        """Nobody was ever given a message of which a caller was told that it has ended (rule C1)."""
        given = {row for books in self._cluster.books for row in books.rows}
        wrong = given & self._cluster.world.outside.cancelled
        assert not wrong, f"cancelled, moved or replaced, and given to a consumer: {sorted(wrong)}"

    def _quarantine(self) -> None:
        """Where nobody damages a file, no consumer is told that one is."""
        if self._cluster.damaged:
            return
        for side in self._cluster.sides:
            if side.life is not None:
                rotten = side.life.server.subjects_with_damage()
                assert not rotten, f"{side.name} has quarantined messages of {rotten}"

    def _waiting(self) -> None:
        """Nothing waits for a connection that has gone (rule B1)."""
        for side in self._cluster.sides:
            if side.life is not None:
                gone = [peer for peer in side.life.server.remembered() if isinstance(peer, ServedEnd) and peer.gone]
                assert not gone, f"{side.name} remembers {len(gone)} connections that have gone"

    def _nobody_else(self) -> None:
        """All that was given was acknowledged by who had it: the servers say that nothing is left (rule Q1)."""
        for books in self._cluster.books:
            untried = books.given.keys() - books.tried
            # When the lease of a message ends after its expiry, the group passes over it.
            untried = {row for row in untried if books.given[row] not in self._cluster.world.outside.expiries}
            assert not untried, f"acknowledged by nobody of {books.group}: consume sequences {sorted(untried)[:5]}"

    def _seals(self) -> None:
        """No accepted row belongs to an hour that was sealed without it."""
        books = self._cluster.delay_books
        if books is not None and books.sealed:
            books.filed_in_sealed(
                (hour_of_ms(max(due, accepted.appended_at_ms)), accepted.base_sequence + index)
                for sent, accepted in self._cluster.world.outside.accepted.values()
                for index, (due, _, _) in enumerate(sent.wanted)
            )
            moved = self._cluster.world.outside.moved_rows.values()
            books.filed_in_sealed((hour_of_ms(filed_ms), sequence) for sequence, _, filed_ms in moved)
