"""What a delay server tells of itself in figures is true over its long life: hours pass and are sealed and deleted, the
server is killed, files rot and are mended, and after each step each figure is what a model has read in the files.

The model remembers every row that was accepted, and every outcome that any dispatch log has ever had. The server's
figures come from sums that it keeps, so the two only agree when no sum lost or doubled anything.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.batch.names import retry_subject
from delayd.errors import BatchMalformed, DamagedValue, DataError, DelaydError, UnknownServer
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.hour import RESTORED_STEP, dispatch_path, schedule_path
from delayd.log.pull import RetryRow
from delayd.log.segment import FileKind, UnfinishedFile, open_segment
from delayd.machine.alarms import DAMAGED_AGAIN_MS, LOOK_MS
from delayd.outcome import Outcome
from delayd.reading.books import audit_directory
from delayd.reading.data import Data
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES
from delayd.testing.tree import PowerLoss
from delayd.wire import scheduling
from delayd.wire.frame import Head
from delayd.wire.heads import need_maps
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import read_due_hours
from realtime.retries import RetriedRows, retry_batch
from tests.memory_files import content, put
from tests.worlds.delay import DATA, FOLDER, PRODUCER_ID, TARGET_IDS, Wanted, World, new_world
from tests.worlds.delay_adapter import DelayCore, list_dispatch_logs, read_outcomes
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.drain import carry, log_id, piece
from tests.worlds.key_books import KEEP, REJECT, REPLACE
from tests.worlds.outside import Sent
from tests.worlds.rotten import flip_value
from tests.worlds.target import FakeTarget

SUBJECTS = (b"orders.eu", b"mail")
WAYS = (None, *PowerLoss)  # None is a SIGKILL.
DEAD_AFTER_MS = 10_000  # Longer than a step in which an hour ends takes.
SETTINGS = {"dispatch_give_up_after_ms": DEAD_AFTER_MS, "retention_hours": 2, "load_ahead_ms": 60_000}
REST_MS = 200  # Outcomes are written by then.
MINUTE_MS = 60_000
AWAY = f"{FOLDER}/away.log"
PAGE_HOURS = 3  # So that hours come in several pages.


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "DUE_HOURS_PAGE_MAX", PAGE_HOURS)


class FiguresModel:
    """What is true of one delay server, by its files and by what was sent to it."""

    def __init__(self) -> None:
        self.ended: dict[int, Outcome] = {}
        self.readable: set[int] = set()  # Those of them that a file says now.
        self.expired_before = 0  # By earlier lives.

    def look(self, world: World) -> None:
        """Read the outcomes that the dispatch logs have now, and those in files that stand beside them."""
        self.readable.clear()
        paths = [path for _, path in list_dispatch_logs(world.disk, FOLDER)]
        names = world.disk.list_folder(f"{FOLDER}/quarantine") if world.disk.exists(f"{FOLDER}/quarantine") else []
        paths += [f"{FOLDER}/quarantine/{name}" for name in names if name[:10].isdigit() and name.count(".") < 3]
        for path in paths:
            try:
                segment = open_segment(world.disk, path, FileKind.DISPATCH, world.server.log_id, write=False)
                rows = read_outcomes(segment)
            except (DataError, UnfinishedFile, FileNotFoundError):
                continue
            outcomes = rows.parts["outcome"].take(rows.part_of).tolist()
            self.ended.update(zip(rows.sequences.tolist(), map(Outcome, outcomes), strict=True))
            self.readable.update(rows.sequences.tolist())

    def rows(self, world: World) -> dict[int, tuple[int, bytes, bytes]]:
        """Each row that was accepted, or that took the place of a moved one: its due instant, subject and body."""
        found: dict[int, tuple[int, bytes, bytes]] = {}
        for sent, accepted in world.outside.accepted.values():
            for index, (due_ms, subject, body) in enumerate(sent.wanted):
                sequence = accepted.base_sequence + index
                found[sequence] = due_ms, subject, body
                while sequence in world.outside.moved_rows:
                    sequence, due_ms, _ = world.outside.moved_rows[sequence]
                    found[sequence] = due_ms, subject, body
        return found

    def pending(self, world: World) -> dict[int, tuple[int, bytes, bytes]]:
        """Those of them without an outcome."""
        return {sequence: row for sequence, row in self.rows(world).items() if sequence not in self.ended}

    def count(self, outcome: Outcome) -> int:
        """How many rows have this outcome."""
        return Counter(self.ended.values())[outcome]


class LongLife:
    """A server that lives for many hours, and beside it the model; each step ends with a comparison."""

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)
        self.world = World(new_world(TARGET_IDS, START_MS), core=DelayCore, seed=seed, **SETTINGS)
        self.other = World(load_ahead_ms=1_000, seed=seed + 1)  # It takes what is drained.
        self.model = FiguresModel()
        self.names = 0
        self.trace: list[str] = []
        self.lost: set[int] = set()  # Messages that an operator gave up, with or without an outcome.
        self.lacking: set[int] = set()  # Hours of these.
        self.latest_ms = 0
        self.rotten: list[DamagedValue] = []
        self.is_aside = False  # Whether something of an hour is set aside.
        self.unknown: set[int] = set()  # Rows of an hour whose dispatch log was damaged before this life.
        limits = {"per_second": None, "pending": 1 << 40, "pending_bytes": None}
        self.world.ask(RequestType.SET_QUOTA, {"subject": SUBJECTS[0].decode(), **limits})
        self.world.own_all_keys()

    # What is compared.

    def check(self) -> None:
        """Compare each figure of the server with the model's."""
        world, model = self.world, self.model
        world.pass_ms(REST_MS)
        self._wait_for_counts()
        model.look(world)
        told, _ = world.ask(RequestType.STATUS)
        pending = {sequence: row for sequence, row in model.pending(world).items() if sequence not in self.lost}
        letters = {sequence for sequence, (_, _, body) in pending.items() if body.startswith(b"dead")}
        expected: dict[str, object] = {
            "pending": len(pending) + len(self.unknown & model.ended.keys() - model.readable),
            "dead_rows": model.count(Outcome.DEAD),
            "ended_expired": model.count(Outcome.EXPIRED) - model.expired_before,
            "owed_rows": 0,
            "leaving_rows": 0,
            "accepted_rows": len(model.rows(world)),
        }
        due_hours = self._due_hours()
        if not (self.is_aside or self.unknown):
            ahead = max(hour_of_ms(max(world.clock.now_ms(), self.latest_ms)), *self.lacking, 0)
            hours_of = Counter(hour_of_ms(row[0]) for row in pending.values())
            expected["due hours"] = len(pending), {hour: rows for hour, rows in hours_of.items() if hour > ahead}
        if not self.is_aside:  # Nobody counts by subject what is set aside (docs/quotas.md).
            expected["dead_letters"] = len(letters)
        found: dict[str, object] = {name: told.get(name) for name in expected}
        if "due hours" in expected:
            later = {hour: rows for hour, rows in due_hours.items() if hour > ahead}
            found["due hours"] = sum(due_hours.values()), later
        if not (self.is_aside or world.outside.unanswered):  # Messages with keys count from before their verdict on.
            own = [row for sequence, row in pending.items() if row[1] == SUBJECTS[0] and sequence not in letters]
            quota = self._quota()
            found["quota"] = tuple(quota[name] for name in ("pending_now", "bytes_now"))
            expected["quota"] = len(own), sum(len(row[2]) for row in own)
        if not (self.is_aside or told["undecided_batches"]):
            now_ms = world.clock.now_ms()
            self.latest_ms = max(self.latest_ms, now_ms)
            waits, were_due = ([row for row in pending.values() if row[0] <= ms] for ms in (now_ms, self.latest_ms))
            # What was due before the clock was set back goes back to the wheel when its target would take it.
            may_wait = range(len(waits), len(were_due) + 1)
            found["waiting_rows"] = told["waiting_rows"]
            expected["waiting_rows"] = told["waiting_rows"] if told["waiting_rows"] in may_wait else may_wait
        if not self.is_aside:
            filed, deleted = len(world.scheduled()), sum(world.deleted().values())
            found["scheduled_rows"], expected["scheduled_rows"] = told["scheduled_rows"], filed
            not_filed = len(model.rows(world)) - filed - deleted - len(self.lost)
            found["pending_rows"], expected["pending_rows"] = told["pending_rows"], not_filed
            hours = Data(FOLDER, world.disk).hours()
            found["pending in files"], expected["pending in files"] = int(sum(hours["pending"])), len(pending)
            found["rows in files"], expected["rows in files"] = int(sum(hours["messages"])), filed + not_filed
        assert found == expected, self._said(found, expected)

    def audit(self) -> None:
        """Compare the totals of an audit with the model."""
        self.world.checkpoint()
        self.check()
        report = audit_directory(DATA, now_ms=self.world.clock.now_ms(), disk=self.world.disk)
        total, model, rows = report.total, self.model, self.model.rows(self.world)
        assert total.scheduled + sum(self.world.deleted().values()) + len(self.lost) == len(rows)
        assert total.pending + total.waiting + total.undecided == len(model.pending(self.world).keys() - self.lost)
        assert total.dead == model.count(Outcome.DEAD)
        assert total.missing == total.lost == total.mismatch == total.conservation == 0

    def _wait_for_counts(self) -> None:
        """Give the server time to count what it counts after a start."""
        for _ in range(20):
            told, _ = self.world.ask(RequestType.STATUS)
            if "dead_letters" in told and self._quota()["counted"]:
                return
            self.world.pass_ms(1_000)
        raise AssertionError(self._said("nothing is counted", ""))

    def _quota(self) -> Head:
        head, _ = self.world.ask(RequestType.QUOTAS, {"after": "", "prefix": ""})
        (quota,) = need_maps(head, "quotas")
        return quota

    def _due_hours(self) -> dict[int, int]:
        """How many messages are pending in each hour, page by page."""
        found: dict[int, int] = {}
        while True:
            head, _ = self.world.ask(RequestType.DUE_HOURS, {"after": max(found, default=0)})
            page, more = read_due_hours(head)
            assert len(page) <= PAGE_HOURS and all(due.messages > 0 for due in page)
            found |= dict(page)
            if not more:
                return found

    def _said(self, found: object, expected: object) -> str:
        return f"told {found}, true is {expected}\n" + "\n".join(self.trace)

    # Steps.

    def step(self, name: str) -> None:
        """Take one step, and compare."""
        self.trace.append(f"{name} at {self.world.clock.now_ms() - START_MS}")
        getattr(self, name)()
        self.check()

    def draw(self, ahead: tuple[int, ...]) -> list[Wanted]:
        """Some messages, each with another body."""
        rows: list[Wanted] = []
        for _ in range(self.random.choice((1, 2, 5))):
            self.names += 1
            due_ms = self.world.clock.now_ms() + self.random.choice(ahead)
            rows.append((due_ms, self.random.choice(SUBJECTS), b"m%d-0" % self.names))
        return rows

    def send(self) -> None:
        self.world.send(self.draw((-HOUR_MS, 100, 5_000, MINUTE_MS, 40 * MINUTE_MS, HOUR_MS, 5 * HOUR_MS)))
        self.world.settle()

    def send_far(self) -> None:
        self.world.send(self.draw((3 * HOUR_MS, 30 * HOUR_MS)))
        self.world.settle()

    def send_expiring(self) -> None:
        """Messages that expire before their target takes them."""
        rows = self.draw((1_000,))
        now_ms = self.world.clock.now_ms()
        for target in self.world.outside.targets.values():
            target.hangs = True
        self.world.send(rows, expires=[now_ms + 3_000] * len(rows))
        self.world.pass_ms(20_000)
        for target in self.world.outside.targets.values():
            target.hangs = False
        self.world.pass_ms(10_000)

    def send_keyed(self) -> None:
        rows = self.draw((5_000, 40 * MINUTE_MS, 5 * HOUR_MS))
        keys = [self.random.choice((b"a", b"b")) for _ in rows]
        self.world.send_keyed(rows, keys, [self.random.choice((REJECT, KEEP, REPLACE)) for _ in rows])
        self.world.settle()

    def cancel(self) -> None:
        if (asked := self.world.some_receipts(self.random)) is not None:
            self.world.cancel(asked)
            self.world.settle()

    def move(self) -> None:
        if (asked := self.world.some_receipts(self.random)) is not None:
            self.world.reschedule(asked, self.world.clock.now_ms() + self.random.choice((300, 2 * HOUR_MS)))
            self.world.settle()

    def dead_letter(self) -> None:
        """A realtime server makes dead letters."""
        world, outside = self.world, self.world.outside
        outside.last_number += 1
        self.names += 1
        subject, count = retry_subject(TARGET_IDS[0], 1), self.random.choice((1, 3))
        bodies = [b"dead%d-%d" % (self.names, index) for index in range(count)]
        due_ms = world.clock.now_ms() + self.random.choice((3 * HOUR_MS, 200 * HOUR_MS))
        stored = parse(dispatch_batch(1, bodies, first_sequence=1 << 40))
        part = ProducerPart(PRODUCER_ID, outside.last_number, min(outside.unanswered, default=outside.last_number))
        how = RetryRow(1, 0, 0, count, 1, due_ms, "no order", "no")
        data = retry_batch(part, subject, [RetriedRows(stored, 0, how)], world.clock.now_ms())
        rows = [(due_ms, subject.encode(), body) for body in bodies]
        outside.unanswered[outside.last_number] = Sent(outside.last_number, data, rows, again=True)
        world.send_again(outside.last_number)
        world.settle()

    def refuse(self) -> None:
        """The targets refuse messages by name for so long that they are dead."""
        rows = self.draw((100,))
        for target in self.world.outside.targets.values():
            target.refuse_with, target.refused_bodies = BatchMalformed("no"), {body for _, _, body in rows}
        self.world.send(rows)
        self.world.pass_ms(800)
        self.check()
        self.world.pass_ms(DEAD_AFTER_MS + 3_000)
        for target in self.world.outside.targets.values():
            target.refuse_with = None

    def refuse_over_an_hour(self) -> None:
        """Messages are refused until long after the last checkpoint that counts their hour."""
        self._all_targets_up()
        self.world.clock.advance(HOUR_MS - self.world.clock.now_ms() % HOUR_MS - 2_000)
        rows = self.draw((100,))
        for target in self.world.outside.targets.values():
            target.refuse_with, target.refused_bodies = BatchMalformed("no"), {body for _, _, body in rows}
        self.world.send(rows)
        self.world.pass_ms(6_000)
        self.world.checkpoint()
        self.check()
        self.world.pass_ms(DEAD_AFTER_MS + 3_000)
        for target in self.world.outside.targets.values():
            target.refuse_with = None
        self.world.sweep()
        self.check()
        self.die()

    def target_away(self) -> None:
        target = self.random.choice(list(self.world.outside.targets.values()))
        if target.up:
            self.world.crash_target(target.log_id)
        else:
            target.restart()
        self.world.pass_ms(5_000)

    def target_lost(self) -> None:
        """A target is given up while it holds messages that it has not acknowledged; another one takes its place."""
        outside = self.world.outside
        self._all_targets_up()
        gone = self.random.choice(list(outside.targets.values()))
        gone.hangs = True
        self.send()
        self.world.pass_ms(2_000)
        told: list[DelaydError | str] = []
        try:
            self.world.server.lose(gone.log_id, told.append)
        except UnknownServer:
            gone.hangs = False  # It was never sent anything.
            return
        self.world.settle()
        assert len(told) == 1
        self.world.cut(gone.log_id)
        self.world.settle()
        outside.late = [cable for cable in outside.late if cable.target is not gone]
        self.world.cables = [cable for cable in self.world.cables if cable.target is not gone]
        del outside.targets[gone.log_id]
        other = max([gone.log_id, *outside.targets]) + 1
        outside.targets[other] = FakeTarget(other, gone.now_ms)
        self.world.pass_ms(5_000)

    def drain(self) -> None:
        """What is far ahead moves to another server."""
        piece(self.world, log_id(self.other))
        carry(self.world, self.other)

    def disk_full(self) -> None:
        """The disk is full for a while: nothing is accepted, and no outcome is written."""
        self.send()
        self.world.disk.capacity_bytes = self.world.disk.used_bytes
        self.world.pass_ms(5_000)
        self.check()
        self.world.disk.capacity_bytes = CAPACITY_BYTES
        self.world.pass_ms(5_000)

    def clock_steps(self) -> None:
        """Somebody sets the clock; it is believed after half a minute."""
        self.world.clock.step_wall(self.random.choice((-HOUR_MS, -3_000, 3_000, HOUR_MS)))
        self.world.pass_ms(2_000)
        self.check()
        self.world.pass_ms(40_000)

    def hour(self) -> None:
        """An hour goes by."""
        self.world.clock.advance(HOUR_MS - self.world.clock.now_ms() % HOUR_MS - 2_000)
        self.world.pass_ms(6_000)

    def minutes(self) -> None:
        self.world.clock.advance(20 * MINUTE_MS)
        self.world.pass_ms(3_000)

    def checkpoint(self) -> None:
        self.world.checkpoint()

    def sweep(self) -> None:
        self.world.sweep()

    def delete(self) -> None:
        self.world.delete_hours()

    def die(self) -> None:
        # What a step has told is at rest, so that a loss of power takes nothing that was told.
        self._begin(self.world.after_crash(self.random.choice(WAYS), self.random.randrange(1 << 16)))

    def stop(self) -> None:
        assert self.world.stop()
        self.world.server.close()
        self._begin(self.world.after_crash())

    # Files that rot, and what becomes of them.

    def dispatch_rots(self) -> None:
        """The dispatch log of an hour rots while messages of the hour are delivered, and is mended or given up."""
        self._all_targets_up()
        soon_ms = self.world.clock.now_ms() + 40_000
        self.model.look(self.world)
        if any(due_ms < soon_ms for due_ms, _, _ in self.model.pending(self.world).values()):
            return  # Its outcome would go to the file that was replaced, which nobody has noticed yet.
        for ahead_ms in (100, 50_000, 90_000):
            self._send_in(ahead_ms, 1)
        self.world.pass_ms(3_000)
        self.world.checkpoint()
        self.check()
        hour = hour_of_ms(self.world.clock.now_ms())
        path = dispatch_path(FOLDER, hour)
        if not self.world.disk.exists(path) or self.world.hours().get(hour).sealed:
            return  # The clock was ahead, so these are filed in a later hour.
        whole = content(self.world.disk, path)
        put(self.world.disk, path, b"rotten" + whole[6:])
        self.is_aside = True
        for _ in range(2):
            self.world.pass_ms(LOOK_MS + 1_000)
            assert [entry.hour for entry in self.world.server.set_aside] == [hour]
            self.check()
        if self.random.random() < 0.5:
            self.die()
            # What only the damaged log says, this life does not know: such messages count as pending until then.
            self.unknown = {sequence for sequence, of_row in self.world.scheduled().items() if of_row == hour}
            self.check()
            self.world.pass_ms(40_000)
            self.check()
            self.unknown = set()
        if self.random.random() < 0.7:
            put(self.world.disk, path, whole)
            self.world.pass_ms(DAMAGED_AGAIN_MS + 2_000)
        else:
            self.world.ask(RequestType.MEND, {"id": f"dispatch/{hour_name(hour)}", "decision": "give-up"})
            self.world.pass_ms(2_000)
        self._mended()

    def value_rots(self) -> None:
        """What the state says of an hour rots."""
        kept = self.world.state.scan(b"outcomes/", self.rotten) + self.world.state.scan(b"hour/", self.rotten)
        if kept:
            flip_value(self.world.state, self.random.choice(kept)[0])
            self.die()

    def schedule_away(self) -> None:
        """The schedule log of a far hour is away while more is filed, and comes back."""
        if hour_of_ms(self.world.clock.now_ms() + 5 * HOUR_MS) in self.lacking:
            return  # While it is away nobody can tell which outcomes are those of messages that were lost.
        self._send_in(5 * HOUR_MS, 3)
        self.world.checkpoint()
        path = schedule_path(FOLDER, hour_of_ms(self.world.clock.now_ms() + 5 * HOUR_MS))
        self._rename(path, AWAY)
        self._send_in(5 * HOUR_MS, 2)
        self.world.checkpoint()
        assert self.world.server.set_aside
        self.is_aside = True
        self.check()
        if self.random.random() < 0.5:
            self.die()
            self.check()
        self._rename(AWAY, path)
        self.world.pass_ms(DAMAGED_AGAIN_MS + 2_000)
        self._mended()

    def schedule_given_up(self) -> None:
        """The end of a schedule log rots, and an operator gives it up: messages and outcomes of messages are lost."""
        due_ms = self.world.clock.now_ms() + 5 * HOUR_MS
        hour = hour_of_ms(due_ms)
        path = schedule_path(FOLDER, hour)
        self._send_in(5 * HOUR_MS, 3)
        self.world.checkpoint()
        before = self.world.scheduled().keys()
        number = self._send_in(5 * HOUR_MS, 3)
        self.world.cancel(self.world.receipts(f"r{number}-0", f"r{number - 1}-0"))
        self.world.pass_ms(REST_MS)
        self.world.checkpoint()
        lost = self.world.scheduled().keys() - before
        put(self.world.disk, path, content(self.world.disk, path)[:-1] + b"?")
        self._rename(path, AWAY)
        self._send_in(5 * HOUR_MS, 1)
        self.world.checkpoint()
        self._rename(AWAY, path)
        self.world.ask(RequestType.MEND, {"id": f"schedule/{hour_name(hour)}", "decision": "give-up"})
        self.world.settle()
        self.lost |= lost
        self.lacking.add(hour)
        self._mended()

    def _send_in(self, ahead_ms: int, count: int) -> int:
        self.names += 1
        due_ms = self.world.clock.now_ms() + ahead_ms
        self.world.send([(due_ms, SUBJECTS[0], b"r%d-%d" % (self.names, index)) for index in range(count)])
        self.world.settle()
        return self.names

    def _all_targets_up(self) -> None:
        for target in self.world.outside.targets.values():
            if not target.up:
                target.restart()
        self.world.pass_ms(5_000)

    def _mended(self) -> None:
        """The server has begun anew in place, and nothing is set aside any more."""
        assert not self.world.server.set_aside
        self.is_aside = False
        self._begin(self.world)

    def _rename(self, path: str, to: str) -> None:
        self.world.disk.rename(path, to)
        for each in (path, to):
            self.world.disk.sync_folder(each.rpartition("/")[0])

    def _begin(self, world: World) -> None:
        self.model.look(world)
        self.model.expired_before = self.model.count(Outcome.EXPIRED)
        self.world = world


STEPS = (
    *("send", "send", "send_far", "send_expiring", "send_keyed", "cancel", "move", "dead_letter", "refuse"),
    *("target_away", "hour", "hour", "minutes", "checkpoint", "sweep", "sweep", "delete", "die", "stop"),
    *(
        "refuse_over_an_hour",
        "dispatch_rots",
        "schedule_away",
        "schedule_given_up",
        "target_lost",
        "drain",
        "disk_full",
        "clock_steps",
        "value_rots",
    ),
)


@pytest.mark.parametrize("seed", range(12))
def test_each_figure_is_true_at_each_moment_of_a_long_life(seed: int) -> None:
    life = LongLife(seed)
    for _ in range(60):
        life.step(life.random.choice(STEPS))
    life.audit()


def test_sequences_that_a_restored_server_leaves_unused_count_as_no_messages() -> None:
    life = LongLife()
    life.step("send")
    life.world.core.ask_targets_first()
    life.world.pass_ms(1_000)
    life.step("send")
    life.step("checkpoint")
    life.step("die")
    rows = life.model.rows(life.world)
    assert life.world.status("next_sequence") > RESTORED_STEP > life.world.status("accepted_rows") == len(rows) > 1
