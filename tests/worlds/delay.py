"""A delay server's core and all that surrounds it: disk, state, clock, threads, meta, targets, the network, a producer.

Invariant: nothing happens by itself. Every step is a call, so that a list of steps, or a seed, repeats a run exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from random import Random

import msgpack
import numpy as np

from delayd.address import Endpoint
from delayd.batch.batch import parse
from delayd.batch.columns import Buffer, ProducerPart
from delayd.errors import DelaydError
from delayd.hours import INSTANT_MS_MAX, hour_of_ms, hour_start_ms
from delayd.log.hour import EndedRows, decode_ended
from delayd.outcome import MessageState, Reason
from delayd.reading.seals import verify_seals
from delayd.testing.clock import START_MS
from delayd.testing.executor import StepExecutor
from delayd.testing.tree import PowerLoss
from delayd.wire.asked import AnswerRows, Asked, AskedWindow, CancelAnswer, Piece, Place, RescheduleAnswer
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.heads import need_maps
from delayd.wire.meta import SLOTS, SlotOwners
from delayd.wire.requests import RequestType
from tests.worlds import files
from tests.worlds.delay_adapter import (
    AcceptedBatch,
    DelayAdapter,
    DelayCore,
    HourTable,
    Wire,
    hours_of,
    list_dispatch_logs,
    small_slots,
)
from tests.worlds.files import cancelled_outcomes, deleted_rows, filed_rows, told_outcomes
from tests.worlds.outside import (
    TARGET_IDS,
    Outside,
    Remains,
    Sent,
    Wanted,
    encode_wanted,
    new_world,
    nobody,
    wanted,
)
from tests.worlds.target import Cable

__all__ = [
    "ACCEPTED",
    "TARGET_IDS",
    "Outside",
    "Remains",
    "Verdict",
    "Wanted",
    "World",
    "encode_wanted",
    "new_world",
    "small_slots",
    "wanted",
]

DATA, FOLDER = files.DATA, files.FOLDER
PRODUCER_ID = 0xABCDEF
STOP_STEPS = 400
SLEEP_MS_MAX = 500  # The shell looks around this often.
STEPS_MAX = 20_000  # A run that is not quiet by then never will be.
ACCEPTED = (0, 0)

Answer = tuple[Head, bytes]
Verdict = tuple[int, int]
"""Of a row with a key: the reason with which it met another one, and the sequence of that; else `ACCEPTED`."""


class Asker:
    """A connection with one request: its answer, or the error by which it is refused, once that is there."""

    entry = None  # It has no token.

    def __init__(self) -> None:
        self.told: list[Answer | DelaydError] = []

    def answer(self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = ()) -> None:
        """Hear the answer."""
        self.told.append((dict(head), b"".join(body)))

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        """Hear the refusal."""
        self.told.append(error)


class World:
    """One life of a delay server; `after_crash` begins the next one, and may be called more than once."""

    def __init__(
        self, remains: Remains | None = None, *, core: type[DelayCore] = DelayCore, seed: int = 0, **settings: int
    ) -> None:
        self.random = Random(seed)
        self.settings = settings
        self.core_type = core
        remains = new_world() if remains is None else remains
        self.disk, self.state, self.outside, self.clock = remains.disk, remains.state, remains.outside, remains.clock
        outside = self.outside
        self.cables: list[Cable] = []
        self.asked: list[list[bytes]] = []  # Questions to meta, not answered yet.
        self.meta_up = True
        self.dials = 0
        small = {"free_bytes_far": 0, "free_bytes_all": 0, "segment_bytes": 8192, "outcomes_flush_ms": 20}
        self.disk.make_folder(FOLDER)
        draw = Random(seed * 7919 + self.state.commits + len(self.disk.operations) + outside.machine.wall_ms)
        self._settings_of_all = {"data": DATA, **small, **settings}
        self._draw = draw
        self._begins_anew = False
        self._start()

    @classmethod
    def greeted(cls, **settings: int) -> World:
        """A world whose target was greeted, and whose first message was delivered and decided."""
        world = cls(None, core=DelayCore, seed=0, **settings)
        world.send(wanted(1, 0, "first"))
        world.pass_ms(200)
        assert world.bodies() == [b"first-0"] and world.target_info()["state"] == "ready"
        return world

    def _start(self) -> None:
        random_id = partial(self._draw.getrandbits, 64)
        self.server = DelayAdapter(self, self._settings_of_all, self.new_thread, random_id, self.core_type)
        self.core, self.threads = self.server.core, self.server.threads  # For tests of its parts.
        self.server.whenever_rows_end(self._note_moves)

    def begin_anew(self, why: str) -> None:
        """The server wants to begin anew in place, which happens at the next look."""
        self._begins_anew = True

    def live_again(self) -> None:
        """Stop the server if it wants to begin anew, and start it on what it leaves."""
        if self._begins_anew:
            self._begins_anew = False
            self.stop()
            self.server.close()
            self._leave_on_its_way(self.outside)
            self.cables.clear()
            self.asked.clear()
            self._start()
            self.look_around()

    def _leave_on_its_way(self, outside: Outside) -> None:
        """Requests that have left may arrive, though nobody hears of it."""
        for cable in self.cables:
            other = Cable(outside.targets[cable.target.log_id], nobody)
            other.up.extend(cable.up)
            other.ended = True
            outside.late.append(other)

    def _note_moves(self, rows: EndedRows) -> None:
        for row in rows[rows["reason"] == Reason.MOVED].tolist():
            sequence, _, other, due_ms, decided_ms = row[:5]
            known = self.outside.moved_rows.setdefault(sequence, (other, due_ms, max(due_ms, decided_ms)))
            assert known[:2] == (other, due_ms), f"sequence {sequence} was moved to {known}, then to {other}"

    def own_all_keys(self) -> None:
        """Let the server hear from meta that all keys are its own."""
        self.server.own_all_keys()
        self.settle()

    def slots(self) -> SlotOwners | DelaydError:
        """What meta says: all keys are this server's."""
        return SlotOwners(np.full(SLOTS, self.server.log_id, np.uint64), np.ones(SLOTS, np.uint32))

    # The producer.

    def send(
        self,
        wanted: Iterable[Wanted],
        keys: Sequence[bytes] | None = None,
        flags: Sequence[int] | None = None,
        expires: Sequence[int] | None = None,
    ) -> int:
        """Send messages as one batch; its number. ``expires``: instants, 0 for a message that never expires."""
        outside = self.outside
        outside.last_number += 1
        rows = list(wanted)
        low_water = min(outside.unanswered, default=outside.last_number)
        part = ProducerPart(PRODUCER_ID, outside.last_number, low_water)
        data = encode_wanted(rows, part, keys, flags, expires)
        if expires is not None:
            outside.expiries.update((row[2], instant) for row, instant in zip(rows, expires, strict=True) if instant)
        outside.unanswered[outside.last_number] = Sent(outside.last_number, data, rows, keyed=keys is not None)
        self.send_again(outside.last_number)
        return outside.last_number

    def send_again(self, number: int) -> None:
        """Send a batch as it was sent before."""
        sent = self.outside.unanswered.get(number) or self.outside.accepted[number][0]
        batch, heard = parse(sent.data), partial(self._heard, sent)
        if sent.again:
            self.server.send_again(batch, heard)
        else:
            self.server.send(batch, heard)

    def _heard(self, sent: Sent, what: AcceptedBatch | DelaydError, duplicate: bool) -> None:
        outside = self.outside
        if isinstance(what, DelaydError):
            outside.refused.append((sent.number, what))
            return
        assert what.rows == len(sent.wanted)
        known = outside.accepted.get(sent.number)
        if known is not None:
            assert known[1] == what, f"batch {sent.number} was answered {known[1]}, then {what}"
        outside.unanswered.pop(sent.number, None)
        outside.accepted[sent.number] = (sent, what)
        if sent.keyed:
            # Rows that meet others by their keys end, whoever asked.
            outside.cancel_asked.update(range(what.base_sequence, what.base_sequence + what.rows))
            outside.cancelled.update(decode_ended(what.decided)["sequence"].tolist())

    def send_keyed(self, rows: Sequence[Wanted], keys: Sequence[bytes], policy: int | Sequence[int]) -> int:
        """Send rows with keys, under one policy or each under its own; the number of their batch."""
        policies = [policy] * len(keys) if isinstance(policy, int) else policy
        return self.send(rows, keys, [each if key else 0 for each, key in zip(policies, keys, strict=True)])

    def sent_keyed(self, rows: Sequence[Wanted], keys: Sequence[bytes], policy: int | Sequence[int]) -> list[Verdict]:
        """The same, and let everything happen that takes no time: the verdicts."""
        number = self.send_keyed(rows, keys, policy)
        self.settle()
        return self.verdicts(number)

    def verdicts(self, number: int) -> list[Verdict]:
        """What the producer was told of each row of a batch."""
        _, accepted = self.outside.accepted[number]
        told = [ACCEPTED] * accepted.rows
        for row in decode_ended(accepted.decided):
            mine, other = int(row["sequence"]), int(row["other"])
            if row["reason"] == Reason.REPLACED:
                mine, other = other, mine
            told[mine - accepted.base_sequence] = (int(row["reason"]), other)
        return told

    # Whoever asks over a connection.

    def begin(self, kind: RequestType, head: Head | None = None, body: bytes = b"") -> list[Answer | DelaydError]:
        """Give the server a request; the list holds its answer, or the error of a refusal, once it is there."""
        asker = Asker()
        crossed: Head = msgpack.unpackb(msgpack.packb(head or {}))
        try:
            self.server.frames(with_status=True).received(asker, Frame(kind, 0, 1, crossed, memoryview(body)))
        except DelaydError as error:
            asker.answer_error(1, error)
        return asker.told

    def ask(self, kind: RequestType, head: Head | None = None, body: bytes = b"") -> Answer:
        """The same, and let everything happen that takes no time: the answer. Raises the error of a refusal."""
        told = self.begin(kind, head, body)
        self.settle()
        (answer,) = told
        if isinstance(answer, DelaydError):
            raise answer
        return answer

    def status(self, name: str) -> int:
        """A figure of STATUS at this instant; 0 for one that is left out."""
        (answer,) = self.begin(RequestType.STATUS)
        assert not isinstance(answer, DelaydError), answer
        return int(str(answer[0].get(name, 0)))

    # Whoever cancels.

    def receipts(self, *names: str) -> Asked:
        """What the receipts say of accepted messages whose bodies begin with one of these names."""
        rows = [
            (accepted.base_sequence + index, due, accepted.appended_at_ms)
            for sent, accepted in self.outside.accepted.values()
            for index, (due, _, body) in enumerate(sent.wanted)
            if body.decode().rpartition("-")[0] in names or body.decode() in names
        ]
        assert rows, f"nothing that is called {names} was accepted"
        sequences, due_ms, accepted_ms = zip(*rows, strict=True)
        return Asked(np.array(sequences, np.uint64), np.array(due_ms, np.int64), np.array(accepted_ms, np.int64))

    def receipts_of(self, number: int) -> Asked | None:
        """What the receipts of one batch say; None before it is accepted."""
        if number not in self.outside.accepted:
            return None
        sent, accepted = self.outside.accepted[number]
        count, due_ms = len(sent.wanted), [due for due, _, _ in sent.wanted]
        sequences = np.arange(accepted.base_sequence, accepted.base_sequence + count, dtype=np.uint64)
        return Asked(sequences, np.array(due_ms, np.int64), np.full(count, accepted.appended_at_ms, np.int64))

    def some_receipts(self, random: Random) -> Asked | None:
        """Some rows of a batch that was accepted, perhaps long ago, or of several; None before the first one."""
        known = self.outside.accepted
        if not known:
            return None
        rows: set[tuple[int, int, int]] = set()
        for number in random.choices(list(known), k=random.choice((1, 1, 4))):
            sent, accepted = known[number]
            row = random.randrange(len(sent.wanted))
            rows.add((accepted.base_sequence + row, sent.wanted[row][0], accepted.appended_at_ms))
        sequences, due_ms, accepted_ms = zip(*sorted(rows), strict=True)
        return Asked(np.array(sequences, np.uint64), np.array(due_ms, np.int64), np.array(accepted_ms, np.int64))

    def all_receipts(self) -> Asked | None:
        """What all receipts say; None before the first one."""
        rows = [
            (accepted.base_sequence + index, due, accepted.appended_at_ms)
            for sent, accepted in self.outside.accepted.values()
            for index, (due, _, _) in enumerate(sent.wanted)
        ]
        if not rows:
            return None
        columns = np.array(rows, np.int64).T
        return Asked(columns[0].astype(np.uint64), columns[1].copy(), columns[2].copy())

    def cancel(self, asked: Asked) -> list[list[CancelAnswer]]:
        """Want messages cancelled; the list that is returned holds the answers once they are there."""
        told: list[list[CancelAnswer]] = []
        outside = self.outside
        outside.cancel_asked.update(asked.sequences.tolist())

        def heard(what: AnswerRows | DelaydError) -> None:
            if isinstance(what, DelaydError):
                outside.refused.append((0, what))
                return
            answers = [CancelAnswer(answer) for answer in what["answer"].tolist()]
            pairs = zip(what["sequence"].tolist(), answers, strict=True)
            outside.cancelled.update(number for number, answer in pairs if answer is CancelAnswer.CANCELLED)
            told.append(answers)

        self.server.cancel(asked, heard)
        return told

    def reschedule(self, asked: Asked, *instants: int) -> list[AnswerRows]:
        """Want messages moved, all to one instant or each to its own; the list that is returned holds the answers once
        they are there.
        """
        told: list[AnswerRows] = []
        wanted_at_ms = np.array(instants if len(instants) > 1 else instants * len(asked.sequences), np.int64)
        for sequence, instant in zip(asked.sequences.tolist(), wanted_at_ms.tolist(), strict=True):
            self.outside.moves_asked.setdefault(sequence, set()).add(instant)

        def heard(what: AnswerRows | DelaydError) -> None:
            if isinstance(what, DelaydError):
                self.outside.refused.append((0, what))
                return
            moved = what["answer"] == RescheduleAnswer.MOVED
            assert (what["deliver_at_ms"] == wanted_at_ms)[moved].all(), "moved to another instant than was wanted"
            told.append(what)

        self.server.reschedule(asked, wanted_at_ms, heard)
        return told

    def list_pending(self, heard: Callable[[list[int]], None]) -> None:
        """Call back with the sequences of the first pending messages, unless they can't be listed now."""
        window = AskedWindow(b"", 0, INSTANT_MS_MAX, Place(0, 0), 0, 1_000)

        def told(what: Piece | DelaydError) -> None:
            if not isinstance(what, DelaydError):
                heard(what.rows["sequence"].tolist())

        self.core.asked.endings.find(window, told)

    def states(self, asked: Asked) -> list[MessageState]:
        """What the server says became of messages."""
        told: list[MessageState] = []

        def heard(what: AnswerRows | DelaydError) -> None:
            assert not isinstance(what, DelaydError), what
            told.extend(MessageState(state) for state in what["state"].tolist())

        self.server.get(asked, heard)
        self.settle()
        return told

    def target_info(self) -> Head:
        """What TARGETS says of the first target."""
        (answer,) = self.begin(RequestType.TARGETS, {"after": 0})
        assert not isinstance(answer, DelaydError), answer
        return need_maps(answer[0], "targets")[0]

    def bodies(self, log_id: int = TARGET_IDS[0]) -> list[bytes]:
        """What a target has, in its order."""
        return [body for kept in self.outside.targets[log_id].log for body in kept.bodies]

    # Steps.

    def new_thread(self) -> StepExecutor:
        """One of the server's threads."""
        return StepExecutor()

    def executors(self) -> tuple[StepExecutor, ...]:
        """The three threads, which take turns as the test says."""
        threads = (self.threads.commit, self.threads.outcomes, self.threads.worker)
        return tuple(thread for thread in threads if isinstance(thread, StepExecutor))

    def answer_routes(self) -> None:
        """Meta answers the oldest question."""
        subjects = self.asked.pop(0)
        if not self.meta_up:
            self.server.hears_routes({}, subjects)
            return
        for log_id in self.outside.targets:
            self.server.hears_place(log_id, f"target-{log_id}")
        self.server.hears_routes({subject: self.target_of(subject) for subject in subjects}, [])

    def look_around(self) -> None:
        """What the shell does every second or less: it asks where targets are while one is needed."""
        if self.meta_up and self.server.wants_places:
            for log_id in self.outside.targets:
                self.server.hears_place(log_id, f"target-{log_id}")

    def target_of(self, subject: bytes) -> int:
        """Meta's route of a subject, which never changes."""
        ids = sorted(self.outside.targets)
        return ids[sum(subject) % len(ids)]

    def moves(self) -> list[Callable[[], None]]:
        """Everything that could happen next without time passing, but for the targets' syncs."""
        found: list[Callable[[], None]] = []
        for executor in self.executors():
            if executor.waiting:
                found.append(executor.run_one)
            if executor.ran:
                found.append(executor.complete_one)
        if self.asked:
            found.append(self.answer_routes)
        for cable in (*self.cables, *self.outside.late):
            if cable.up and cable.target.up and not cable.target.hangs:
                found.append(cable.carry_up)
            if cable.down:
                found.append(cable.carry_down)
        found.extend(target.sync for target in self.outside.targets.values() if target.can_sync)
        return found

    def next_move(self) -> Callable[[], None] | None:
        """The first of all moves, if there is one."""
        return next(iter(self.moves()), None)

    def settle(self) -> None:
        """Do all that happens without time passing."""
        for _ in range(STEPS_MAX):
            self.live_again()
            move = self.next_move()
            if move is None:
                self.server.wake()
                move = self.next_move()
                if move is None:
                    self._forget_ended()
                    return
            move()
        raise AssertionError("the world does not come to rest")

    def work(self) -> None:
        """Do all that happens without time passing, but for the network of the targets."""
        while self.asked or any(executor.step() for executor in self.executors()):
            if self.asked:
                self.answer_routes()

    def send_due(self, count: int, name: str, after_ms: int = 100) -> None:
        """Send messages that are due so long after now, and have them durable."""
        self.send(wanted(count, self.clock.now_ms() - START_MS + after_ms, name))
        self.work()

    def fall_due(self, count: int, name: str = "a") -> None:
        """Let messages fall due; their frames are on their way, as far as there is room."""
        self.send_due(count, name)
        self.clock.advance(100)
        self.server.wake()

    def pass_ms(self, ms: int) -> None:
        """Let time pass, with everything done at each instant at which something is due."""
        end = self.clock.monotonic_ms() + ms
        self.settle()
        while (left := end - self.clock.monotonic_ms()) > 0:
            self.clock.advance(max(1, min(left, self.idle_ms())))
            self.look_around()
            self.settle()

    def idle_ms(self) -> int:
        """How long the server sleeps now: as its shell computes it."""
        return self.server.sleep_ms(SLEEP_MS_MAX)

    def drain(self, ms: int = 60_000) -> None:
        """Heal everything, retry what is not accepted, and let time pass until each message has an outcome.

        It ends after ``ms`` in all cases; the time until the next missing message is due does not count.
        """
        self.meta_up = True
        self.outside.moved.clear()
        for target in self.outside.targets.values():
            if not target.up:
                target.restart()
        self._repeat_sends()
        waited_ms = 0
        while (missing := self.missing()) and waited_ms < ms:
            dues = [due for _, due, _, body in self.newest_rows() if body in missing]
            # Nothing happens for long: nobody has to live through it in half seconds.
            self.clock.advance(max(0, min(dues) - self.clock.now_ms() - 3_000))
            self.pass_ms(500)
            waited_ms += 500
        self.pass_ms(1_000)

    def _repeat_sends(self) -> None:
        # A server may begin anew meanwhile, and then let a send with a key wait for a row in flight.
        for _ in range(40):
            self.look_around()
            self.settle()
            for number in list(self.outside.unanswered):
                self.send_again(number)
            self.settle()
            if not self.outside.unanswered:
                return
            self.pass_ms(500)
        raise AssertionError(f"never accepted: {self.outside.refused[-3:]}")

    def missing(self) -> set[bytes]:
        """Bodies of accepted messages that no target has, and that are neither cancelled nor expired."""
        wanted = {
            body: sequence for sequence, _, _, body in self.newest_rows() if sequence not in self.outside.cancelled
        }
        for target in self.outside.targets.values():
            for kept in target.log:
                for body in kept.bodies:
                    wanted.pop(body, None)
        if not self.outside.expiries.keys().isdisjoint(wanted):
            over = self.expired()
            wanted = {body: sequence for body, sequence in wanted.items() if sequence not in over}
        # What nobody wanted cancelled has no business to be: only where it can tell anything are the files read.
        if not self._cancel_asked().isdisjoint(wanted.values()):
            gone = self.cancelled()
            return {body for body, sequence in wanted.items() if sequence not in gone}
        return set(wanted)

    def newest_rows(self) -> list[tuple[int, int, int, bytes]]:
        """Of each accepted message the newest row: sequence, due instant, the instant of its filing hour, and body."""
        return [
            (*self.outside.newest(accepted.base_sequence + index, due, max(due, accepted.appended_at_ms)), body)
            for sent, accepted in self.outside.accepted.values()
            for index, (due, _, body) in enumerate(sent.wanted)
        ]

    def checkpoint(self) -> int:
        """Ask for a checkpoint, let it finish; the replay offset that was answered."""
        answers: list[int] = []
        self.server.checkpoint(answers.append)
        self.settle()
        return answers[0]

    def sweep(self) -> None:
        """Let retention look at the hours, and do what comes of it."""
        self.server.sweep()
        self.settle()

    def delete_hours(self) -> None:
        """Let retention delete what is past its time: the next published checkpoint comes before the files go."""
        self.sweep()
        self.pass_ms(61_000)
        self.sweep()

    def stop(self) -> bool:
        """Stop the server cleanly; whether it called back."""
        stopped: list[bool] = []
        self.server.stop(lambda: stopped.append(True))
        for _ in range(STOP_STEPS):
            if stopped or not self.moves():
                break
            self.moves()[0]()
        return bool(stopped)

    # Deaths.

    def remains(self, way: PowerLoss | None = None, seed: int = 0, *, late: bool = True) -> Remains:
        """What dying now leaves, in a world of its own; ``late``: requests under way may still arrive at targets."""
        found = Remains(self.disk, self.state, self.outside, self.clock).after_crash(way, seed)
        if late:
            self._leave_on_its_way(found.outside)
        return found

    def after_crash(self, way: PowerLoss | None = None, seed: int = 0, *, late: bool = True) -> World:
        """The next life, in a world of its own; None is a SIGKILL."""
        remains = self.remains(way, seed, late=late)
        return World(remains, core=self.core_type, seed=seed + 1, **self.settings)

    def crash_target(self, log_id: int, answers: int = 0, keep: int = 0) -> None:
        """Kill a target; ``answers`` that had left arrive all the same, and ``keep`` requests in its next life."""
        for cable in self._cables_of(log_id):
            cable.cut(keep, answers)
        self.outside.targets[log_id].crash(self.random)

    def cut(self, log_id: int, keep: int = 0, answers: int = 0) -> None:
        """Break the connections to a target; ``keep`` requests under way arrive later."""
        for cable in self._cables_of(log_id):
            cable.cut(keep, answers)

    @property
    def cable(self) -> Cable:
        """The only connection that is open."""
        (cable,) = [cable for cable in self.cables if not cable.ended]
        return cable

    def _cables_of(self, log_id: int) -> list[Cable]:
        return [cable for cable in self.cables if cable.target.log_id == log_id and not cable.ended]

    def _forget_ended(self) -> None:
        self.cables = [cable for cable in self.cables if not cable.ended or cable.up or cable.down]

    def dial(self, endpoint: Endpoint, connected: Callable[[Wire], None], lost: Callable[[DelaydError], None]) -> None:
        meant = int(endpoint.host.removeprefix("target-"))
        target = self.outside.targets[self.outside.moved.get(meant, meant)]
        cable = Cable(target, lost)
        self.cables.append(cable)
        self.dials += 1
        if target.up:
            cable.down.append(lambda: connected(cable))
        else:
            cable.cut(keep=0)

    # Books.

    def check_logs(self) -> None:
        """What holds at every instant: no message twice at the targets, none early, none of its bytes changed."""
        sent = [*self.outside.unanswered.values(), *(sent for sent, _ in self.outside.accepted.values())]
        wanted = {body: (due, subject) for batch in sent for due, subject, body in batch.wanted}
        wanted |= {body: (due, wanted[body][1]) for _, due, _, body in self.newest_rows()}
        # A move by key may have found a message whose send has no answer yet: nobody knows its newest instant.
        unanswered = {body for batch in self.outside.unanswered.values() for _, _, body in batch.wanted}
        bodies: Counter[bytes] = Counter()
        for target in self.outside.targets.values():
            for kept in target.log:
                bodies.update(kept.bodies)
                for due, body in zip(kept.deliver_at_ms, kept.bodies, strict=True):
                    expected = (due, wanted[body][1]) if body in unanswered else wanted[body]
                    assert expected == (due, kept.subject), f"{body!r} was {wanted[body]}, is {due} {kept.subject!r}"
                    assert kept.part.claimed_at_ms >= due, (
                        f"{body!r} was due at {due}, sent at {kept.part.claimed_at_ms}"
                    )
        held = {number for target in self.outside.targets.values() for kept in target.log for number in kept.sequences}
        assert not held & self.outside.cancelled, f"cancelled and delivered: {sorted(held & self.outside.cancelled)}"
        twice = {body for body, count in bodies.items() if count > 1}
        assert not twice, f"at the targets more than once: {sorted(twice)}"

    def check_books(self) -> None:
        """What holds at rest: each accepted message is at a target, and the dispatch logs say exactly where."""
        self.check_logs()
        assert not self.missing(), f"accepted and never delivered: {sorted(self.missing())}"
        numbered = [(accepted.base_sequence, accepted.rows) for _, accepted in self.outside.accepted.values()]
        numbered.sort()
        for (base, rows), (following, _) in pairwise(numbered):
            assert base + rows <= following, f"sequences {base} and {following} overlap"
        sequence_of = {body: sequence for sequence, _, _, body in self.newest_rows()}
        held: dict[int, tuple[int, int, int, int]] = {}
        for log_id, target in self.outside.targets.items():
            for kept in target.log:
                for sequence, body in zip(kept.sequences, kept.bodies, strict=True):
                    assert sequence_of[body] == sequence, f"{body!r} has sequence {sequence}, not {sequence_of[body]}"
                    held[sequence] = (kept.part.hour, log_id, kept.offset, kept.part.batch_id)
        deleted = self.deleted()
        asked = self._cancel_asked()
        may_expire = {sequence for sequence, _, _, body in self.newest_rows() if body in self.outside.expiries}
        gone = self._rows_of_deleted_hours(deleted) & (asked | may_expire)
        for hour, rows in deleted.items():
            counted = sum(row[0] == hour for row in held.values())
            # Of a deleted hour nothing says which of its rows were cancelled, or expired.
            assert counted <= rows <= counted + len(gone), f"the seal of hour {hour} counts {rows} rows"
        told, held = ({s: row for s, row in rows.items() if row[0] not in deleted} for rows in (self.outcomes(), held))
        assert told == held, f"dispatch logs and targets differ: {_difference(told, held)}"
        cancelled = self.cancelled()
        missing = {
            sequence
            for sequence in self.outside.cancelled - cancelled.keys()
            if sequence not in self._rows_of_deleted_hours(deleted)
        }
        assert not missing, f"answered CANCELLED, and without that outcome: {sorted(missing)}"
        strange = cancelled.keys() - asked
        assert not strange, f"CANCELLED, and nobody asked for it: {sorted(strange)}"
        given = {sequence for target in self.outside.targets.values() for sequence in target.given}
        assert not cancelled.keys() & given, f"CANCELLED, and consumers had it: {sorted(cancelled.keys() & given)}"
        assert not self.disk.closed_unsynced, f"closed with unsynced writes: {self.disk.closed_unsynced}"

    def check_sealing(self) -> None:
        """Once every hour has ended: schedule and dispatch side agree row by row, and the server itself sees that."""
        self.pass_ms(2_000)
        last = max((hour for hour, _ in list_dispatch_logs(self.disk, FOLDER)), default=0)
        over_ms = hour_start_ms(last + 1) + 1_000 - self.clock.now_ms()
        if over_ms > 0:
            self.clock.advance(over_ms)
        self.pass_ms(3_000)
        self.checkpoint()
        deleted = self.deleted()
        told = {sequence: row for sequence, row in self.outcomes().items() if row[0] not in deleted}
        scheduled = self.scheduled()
        cancelled = {sequence: hour for sequence, hour in self.cancelled().items() if hour not in deleted}
        decided = {sequence: row[0] for sequence, row in told.items()} | cancelled
        assert scheduled == decided, "scheduled and decided rows differ"
        self.server.sweep()
        self.settle()
        unsealed = self.hours().unsealed(hour_of_ms(self.clock.now_ms()) - 1)
        assert not unsealed, f"hours {unsealed} do not seal"
        broken = verify_seals(DATA, disk=self.disk).broken
        assert not broken, f"seals that the files contradict: {broken}"

    def hours(self) -> HourTable:
        """The hour table of the state."""
        return hours_of(self.state)

    def deleted(self) -> dict[int, int]:
        """See `files.deleted_rows`."""
        return deleted_rows(self.disk, self.hours())

    def outcomes(self) -> dict[int, tuple[int, int, int, int]]:
        """See `files.told_outcomes`."""
        return told_outcomes(self.disk, self.server.log_id)

    def cancelled(self) -> dict[int, int]:
        """See `delay_files.cancelled_outcomes`."""
        return cancelled_outcomes(self.disk, self.server.log_id)

    def expired(self) -> dict[int, int]:
        """By sequence: when the rows were claimed that the dispatch logs call EXPIRED; here nobody sends an expiry."""
        return {}

    def _cancel_asked(self) -> set[int]:
        """The rows that may have ended before they were due: somebody wanted to cancel them, or they were moved."""
        newest = {self.outside.newest(sequence, 0)[0] for sequence in self.outside.cancel_asked}
        return self.outside.cancel_asked | newest | self.outside.moved_rows.keys()

    def _rows_of_deleted_hours(self, deleted: dict[int, int]) -> set[int]:
        """The sequences of accepted and moved rows whose hours are deleted."""
        filed = {
            accepted.base_sequence + index: max(due, accepted.appended_at_ms)
            for sent, accepted in self.outside.accepted.values()
            for index, (due, _, _) in enumerate(sent.wanted)
        }
        filed |= {other: filed_ms for other, _, filed_ms in self.outside.moved_rows.values()}
        return {sequence for sequence, filed_ms in filed.items() if hour_of_ms(filed_ms) in deleted}

    def scheduled(self) -> dict[int, int]:
        """See `files.filed_rows`."""
        return filed_rows(self.disk, self.server.log_id, self.hours(), self.deleted())


def _difference(told: dict[int, tuple[int, int, int, int]], held: dict[int, tuple[int, int, int, int]]) -> str:
    return (
        f"only told {sorted(set(told) - set(held))}, only held {sorted(set(held) - set(told))}, "
        f"otherwise {[(s, told[s], held[s]) for s in told if s in held and told[s] != held[s]]}"
    )
