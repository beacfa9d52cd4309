"""A workload of what realtime servers send again, and what must hold after a death at each of its operations.

Messages come again, dead letters are kept, sent to their group again (moved to now) and ended.
"""

from __future__ import annotations

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.batch.labels import DEAD_TAG
from delayd.batch.names import retry_subject
from delayd.log.pull import RetryRow
from delayd.reading.find import FileFinder, Search, WantedMessages
from delayd.testing.clock import START_MS
from realtime.retries import RetriedRows, retry_batch
from tests.crash.delay_deaths import BEFORE_HOUR_MS, HOUR_MS, Death, finish
from tests.worlds.delay import DATA, PRODUCER_ID, World, wanted
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.outside import Sent

BEGIN_MS = HOUR_MS - BEFORE_HOUR_MS
SUBJECT = retry_subject(0x7001, 3)
KEPT_MS = 6 * HOUR_MS  # How long dead letters are kept, in place of 725 days: each hour that passes takes its time.
FIRST_LIFE = 500  # The sequence of the first message that comes again.


class AgainDeath(Death):
    """One death in it."""

    def __init__(self, at: int | None) -> None:
        self._numbers: list[int] = []
        super().__init__(at)

    def work(self, world: World) -> None:
        """Rows are moved and ended in memory and in files; each batch comes twice or more often."""
        world.send(wanted(2, BEGIN_MS + 600, "new"))
        self._again(world, "soon", 2, BEGIN_MS + 700)
        self._again(world, "dead", 4, KEPT_MS, "no such order")
        world.settle()
        self._redrive(world, "dead-0")
        world.checkpoint()
        self._again(world, "later", 1, BEGIN_MS + 900)
        self._again(world, "soon", 0, 0)
        world.cancel(world.receipts("dead-1"))
        world.settle()
        self._redrive(world, "dead-2")
        world.pass_ms(800)
        world.checkpoint()
        # What was sent again is a dead letter once more, and is ended.
        self._again(world, "twice", 2, KEPT_MS, "no such order")
        world.settle()
        world.cancel(world.receipts("twice-0"))
        world.settle()

    def finish(self, world: World, *, sealing: bool) -> None:
        """See Death; and each row names its first life, dead letters by their tag."""
        finish(world, sealing=sealing)
        search = Search(WantedMessages(subject=SUBJECT.encode()), ended=True)
        found = [row for each in FileFinder(world.disk, DATA, search).found() for row in each.rows]
        taken = [rows for sent, rows in world.outside.accepted.values() if sent.again]
        assert len({row.sequence for row in found}) >= sum(rows.rows for rows in taken)
        for row in found:
            if row.body is not None:
                name, _, index = row.body.decode().partition("-")
                assert row.origin_sequence == FIRST_LIFE + int(index), f"{row} names another message"
                assert (row.tags == (DEAD_TAG,)) == (name in ("dead", "twice")), f"{row} is or is no dead letter"

    def _again(self, world: World, name: str, count: int, due_ms: int, reason: str = "") -> None:
        """A realtime server sends messages; none: it sends its first batch once more."""
        if not count:
            world.send_again(self._numbers[0])
            return
        outside = world.outside
        outside.last_number += 1
        self._numbers.append(outside.last_number)
        rows = [(START_MS + due_ms, SUBJECT.encode(), f"{name}-{index}".encode()) for index in range(count)]
        stored = parse(dispatch_batch(1, [body for _, _, body in rows], first_sequence=FIRST_LIFE))
        how = RetryRow(1, 0, 0, count, 1, START_MS + due_ms, reason, "no")
        part = ProducerPart(PRODUCER_ID, outside.last_number, min(outside.unanswered, default=outside.last_number))
        data = retry_batch(part, SUBJECT, [RetriedRows(stored, 0, how)], world.clock.now_ms())
        outside.unanswered[outside.last_number] = Sent(outside.last_number, data, rows, again=True)
        world.send_again(outside.last_number)

    def _redrive(self, world: World, name: str) -> None:
        world.reschedule(world.receipts(name), world.clock.now_ms())
        world.settle()
