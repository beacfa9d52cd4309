"""One random walk: steps of the real core in memory and of the model, compared after each.

Servers are stopped, killed and lose their power, with fsyncs of the pull log that are not done yet, so that answers are
lost whose doing is durable, and doings are lost that were not answered. Batches rot and are restored. Several consumers
pull, wait, acknowledge, repeat themselves in later lives, and give back. What they want later lives on at the delay
server, and comes again. Retention removes what it may.

Invariant: after a power loss the model goes back to the moment whose pull log the server found, so nothing that the
server decides from then on is open.

Some messages are of recurring schedules. UNFINISHED, when it is asked, names the schedules of which the model has a
message, and no others.

In an ordered walk the groups keep an order (rule Q8). Their answers wait for an fsync, so it is done before the model
is compared, wherever a PULL may have been served. In a bounded walk the consumers of each group hold no more messages
together than a number that each PULL names (rule Q10).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from random import Random
from typing import NamedTuple

import msgpack

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ColumnId
from delayd.batch.labels import REASON, SCHEDULE, decode_headers
from delayd.batch.names import parse_retry_subject, retry_subject
from delayd.errors import DelaydError
from delayd.testing.executor import StepExecutor
from delayd.testing.tree import PowerLoss
from delayd.wire.consuming import read_groups, read_stale, read_subjects
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    need_maps,
    need_rows,
    need_str,
    need_u64,
)
from delayd.wire.recurring import AskedSchedule, read_unfinished, schedules_head
from delayd.wire.requests import RequestType
from tests.groups.model import AGAIN, Fate, GroupModel, Handle, State, Word, Wrong
from tests.worlds.dispatch_batches import ORIGIN, bodies_of, dispatch_batch, split
from tests.worlds.realtime import SimPeer, World, pull_head

STEPS = 30
SUBJECTS = ("mail", "orders")
GROUPS = (("mail", "a"), ("orders", "a"), ("orders", "b"))
RETENTION_MS = 1_000
SETTINGS = {"segment_bytes": 4096, "retention_ms": RETENTION_MS, "free_bytes_all": 0, "checkpoint_every_ms": 3_600_000}
LEASES_MS = (700, 5_000, 40_000)
LEASE_MS_MAX = max(LEASES_MS)
TIMES_MS = (10, 100, 700, 2_000, 5_000, 31_000)
WORDS = {
    Word.ACK: (RequestType.ACK, {}),
    Word.NACK: (RequestType.NACK, {}),
    Word.UNCOUNTED: (RequestType.NACK, {"uncounted": True}),
    Word.RETRY: (RequestType.RETRY, {}),
    Word.REJECT: (RequestType.REJECT, {}),
}
LATER: dict[Word, tuple[str, tuple[HeadValue, ...]]] = {
    Word.RETRY: ("retries", (0, "no")),
    Word.REJECT: ("rejects", ("bad", "no")),
}
OFTEN = (Word.ACK, Word.ACK, Word.NACK, Word.UNCOUNTED, Word.RETRY, Word.REJECT)
CRASHES = tuple(PowerLoss)
KEYS = (0, 1, 1, 2, 3)  # Ordering keys of the messages of ordered walks.
PUT_OFF_MS = (0, 300, 6_000)
SCHEDULES = ("daily", "", "hourly", "", "weekly")  # The messages of a subject have them by turns; "": none.
ASKS_SHARE = 0.2  # How often UNFINISHED is asked where it may be.
BOUNDS = (1, 2, 3, 5)  # How many messages a group of a bounded walk may have in flight.

Name = tuple[str, str]
"""Subject and group."""
ASKED = [AskedSchedule(subject, name) for subject in SUBJECTS for name in SCHEDULES if name]


class Kind(Enum):
    """What the groups of a walk are like."""

    PLAIN = "plain"
    ORDERED = "ordered"
    BOUNDED = "bounded"


class Sent(NamedTuple):
    """A batch that was dispatched."""

    batch_id: int
    offset: int
    subject: str
    first: int
    bodies: list[bytes]


class Asked(NamedTuple):
    """A PULL that is not answered yet."""

    peer: SimPeer
    request_id: int
    name: Name
    most: int
    ahead: int
    waits: bool
    lease_ms: int


class Moment(NamedTuple):
    """The groups as they were when the pull log ended there."""

    pull_end: int
    groups: dict[Name, GroupModel]


class Walk:
    """One directory over several lives."""

    def __init__(self, seed: int, kind: Kind = Kind.PLAIN) -> None:
        self.random, self.asks = Random(seed), Random(seed)
        self.ordered = kind is Kind.ORDERED
        bounds = BOUNDS if kind is Kind.BOUNDED else (0,)
        self.bounds = {name: Random(seed).choice(bounds) for name in GROUPS}  # 0: any number.
        self.left_out = LEFT_OUT[kind]
        self.keys = defaultdict[str, dict[int, int]](dict)  # By subject and consume sequence: ordering keys.
        self.schedules = defaultdict[str, list[str]](list)  # By subject: of each message its schedule, or "".
        self.late = defaultdict[str, set[int]](set)  # By subject: what could not be read at some time.
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.sync = StepExecutor()
        self.settings = {**SETTINGS, "tail_bytes": self.random.choice((0, 0, 600))}
        self.world = World(pulls=self.sync, settings=self.settings)
        self.session = 0
        self.batches: list[Sent] = []
        self.ends = defaultdict[str, int](int)
        self.rotten: set[int] = set()  # Batch ids.
        self.unreadable: set[int] = set()  # Those that are rotten, or were in this life and were not tried again since.
        self.groups: dict[Name, GroupModel] = {}
        self.asked: list[Asked] = []
        self.peers: list[SimPeer] = []
        self.moments: list[Moment] = []
        # What the delay server has taken: each batch by its producer and number, once (rule I1).
        self.taken: dict[tuple[int, int], Batch] = {}
        self.to_come: list[Batch] = []  # Those of them that are not dispatched yet.
        self.lost: dict[Name, set[Handle]] = {}  # Handles of pulls that were lost with the power.
        self.body_bytes = self.random.choice((30, 250, 1_500))
        self._begin()
        for name in self.random.sample(GROUPS, self.random.randint(1, len(GROUPS))):
            self._make(name)

    def run(self, steps: int = STEPS) -> None:
        """Take steps, then see that all that was sent and not acknowledged comes, and nothing else."""
        # Some kinds happen often in one walk, and hardly ever in another: rare chains of steps come up sooner.
        weights = [weight * self.random.choice((0.2, 1, 1, 4)) for weight in KINDS.values()]
        weights = [0 if step in self.left_out else weight for step, weight in zip(KINDS, weights, strict=True)]
        for step in self.random.choices(list(KINDS), weights, k=steps):
            self.counts[step.__name__.strip("_")] += 1
            step(self)
            self._compare()
        self._end()

    # Steps.

    def _dispatch(self) -> None:
        subject, _ = self.random.choice(list(self.groups))
        first = self.ends[subject]
        sequences = range(first, first + self.random.randint(1, 4))
        bodies = [f"{subject}-{sequence}-".encode().ljust(self.body_bytes, b".") for sequence in sequences]
        names = [SCHEDULES[sequence % len(SCHEDULES)] for sequence in sequences]
        self._hand_over(subject, bodies, [msgpack.packb({SCHEDULE: name}) if name else b"" for name in names])

    def _courier(self) -> None:
        """The delay server takes what is to come again; it may not be told that it was heard."""
        for undone in list(self.world.core.retries.waiting(ORIGIN)):
            try:
                batch = parse(self.world.core.retries.batch_of(undone))
            except DelaydError as error:
                if not self.rotten:
                    raise Wrong(f"batch {undone} can't be made: {error!r}") from error
                continue
            key = (undone.producer, undone.number)
            if key not in self.taken:
                self.taken[key] = batch
                self.to_come.append(batch)
                self._tell(f"the delay server took {key}: {bodies_of(batch.buffer)}")
            if self.random.random() < 0.7:
                self.world.core.retries.accepted(undone)
        if self.random.random() < 0.5:
            self.sync.run_all()

    def _lose_what_leaves(self) -> None:
        """The power goes between a decision and its fsync, and what may have left by then has left."""
        self._settle((Word.RETRY,), 0.0)
        self._courier()
        self._lose_power()

    def _come_again(self) -> None:
        if self.to_come:
            batch = self.to_come.pop(self.random.randrange(len(self.to_come)))
            (subject,) = batch.subjects()
            self._hand_over(subject.decode(), bodies_of(batch.buffer), _headers(batch))

    def _pull(self) -> None:
        name = self.random.choice(list(self.groups))
        peer = self.random.choice(self.peers)
        most, ahead = self.random.choice((1, 2, 3, 20)), self.random.choice((0, 0, 0, 2))
        lease_ms, wait_ms = self.random.choice(LEASES_MS), self.random.choice((0, 0, 600))
        self._ask(Asked(peer, 0, name, most, ahead, wait_ms > 0, lease_ms), wait_ms)

    def _settle(self, words: Sequence[Word] = OFTEN, synced: float = 0.8) -> None:
        name = self.random.choice(list(self.groups))
        group = self.groups[name]
        handles = group.held() if self.random.random() < 0.7 else list(group.fates)
        if not handles:
            return
        some = sorted(self.random.sample(handles, self.random.randint(1, min(len(handles), 6))))
        word = self.random.choice(words)
        now_ms = self.world.clock.monotonic_ms()
        peer = self.random.choice(self.peers)
        kind, more = WORDS[word]
        ranges = _ranges(some)
        field, rest = LATER.get(word, ("handles", ()))
        delay_ms = 0
        if self.ordered and word is Word.RETRY:
            word, delay_ms = Word.NACK, self.random.choice(PUT_OFF_MS)  # It keeps its place, and waits there.
            rest = (delay_ms, "no")
        head: Head = {"subject": name[0], "group": name[1], field: [[*each, *rest] for each in ranges], **more}
        request_id = self.world.send(peer, kind, head)
        if request_id in peer.answers:
            raise Wrong("it was answered before its fsync")
        if request_id in peer.errors:
            if word not in LATER or not self.rotten:
                raise Wrong(f"{word.value} was refused: {peer.errors[request_id]!r}")
            return  # Nobody can read what is to come again.
        stale = {handle for handle in some if group.settle(word, handle, now_ms, delay_ms)}
        self._tell(f"{name} {word.value} {some}, stale {stale}")
        if self.random.random() < synced:
            self.sync.run_all()
            ((answer, _),) = peer.answers.pop(request_id)
            rows = read_stale(answer)
            found = {(life, at + row) for life, at, count, _ in rows for row in range(count)}
            if found != stale:
                raise Wrong(f"stale are {found}, and should be {stale}")
            for life, at, count, why in rows:
                if why != (should := group.why([(life, at + row) for row in range(count)])):
                    raise Wrong(f"stale for reason {why}, and should be for {should}: {life, at, count}")

    def _work(self) -> None:
        """Everything that is offered to a group is acknowledged, so that retention may remove it."""
        self._pull_all(self.random.choice(list(self.groups)), ack=True)

    def _settle_for_others(self) -> None:
        """Nobody acknowledges what another one holds, or what nobody was given."""
        name = self.random.choice(list(self.groups))
        held = self.groups[name].held()
        at = self.random.choice(held)[1] if held else self.world.core._pulls.next_pull
        others = [peer for peer in self.peers if not self._gave(peer, held)]
        if not others:
            return
        incarnation = self.world.core._pulls.incarnation_of(self.random.choice(others))
        if (incarnation, at) in self.groups[name].fates:
            return
        handle = [incarnation, at, 1]
        head: Head = {"subject": name[0], "group": name[1], "handles": [handle]}
        request_id = self.world.send(self.peers[0], self.random.choice((RequestType.ACK, RequestType.NACK)), head)
        self.sync.run_all()
        ((answer, _),) = self.peers[0].answers.pop(request_id)
        if answer["stale"] != [handle]:
            raise Wrong(f"{handle} is held by somebody else, and was acknowledged")

    def _move(self) -> None:
        """An operator rewinds a group, or has it skip messages."""
        name = self.random.choice(list(self.groups))
        index = self.world.core._index
        first, end = index.first(index.subject(name[0])), self.ends[name[0]]
        to = self.random.choice((first, end, self.random.randint(first, end)))
        value: HeadValue = {first: "earliest", end: "latest"}.get(to, {"sequence": to})
        head: Head = {"subject": name[0], "group": name[1], "to": value}
        self._collect()
        request_id = self.world.send(self.peers[0], RequestType.MOVE_GROUP, head)
        if request_id in self.peers[0].answers:
            raise Wrong("a move was answered before its fsync")
        self.groups[name].move(to)
        self._tell(f"{name} moves to {to}")
        if self.random.random() < 0.7:
            self.sync.run_all()

    def _time_passes(self) -> None:
        self._pass(self.random.choice(TIMES_MS))

    def _checkpoint(self) -> None:
        self.world.core.checkpoint()
        self.sync.run_all()

    def _retain(self) -> None:
        self.world.core.retain()
        self.sync.run_all()

    def _disconnect(self) -> None:
        at = self.random.randrange(len(self.peers))
        peer, self.peers[at] = self.peers[at], SimPeer()
        self.world.core.disconnected(peer)
        self.asked = [asked for asked in self.asked if asked.peer is not peer]

    def _remake(self) -> None:
        if self.random.random() < 0.7:
            return
        name = self.random.choice(list(self.groups))
        self.asked = [asked for asked in self.asked if asked.name != name]
        self.world.send(self.peers[0], RequestType.DELETE_GROUP, {"subject": name[0], "group": name[1]})
        self.sync.run_all()
        self._tell(f"{name} deleted")
        self.lost.pop(name, None)
        del self.groups[name]
        self._make(name)

    def _stop(self) -> None:
        self.sync.run_all()
        self._collect()
        stopped: list[bool] = []
        self.world.core.stop(lambda: stopped.append(True))
        self.sync.run_all()
        if not stopped:
            raise Wrong("a stop does not end")
        self.world.core.close()
        self.world.lock.release()
        old, self.sync = self.world, StepExecutor()
        self.world = World(old.disk, old.state, old.clock.restarted(), pulls=self.sync, settings=self.settings)
        self._begin()

    def _kill(self) -> None:
        self._collect()
        old, self.sync = self.world, StepExecutor()
        # Nobody looks at the disk of the dead server again, so the next one takes it over as it is.
        old.lock.release()
        state = old.state.after_crash(old.disk)
        self.world = World(old.disk, state, old.clock.restarted(), pulls=self.sync, settings=self.settings)
        self._begin()

    def _lose_power(self) -> None:
        self._collect()
        self._note()
        old, self.sync = self.world, StepExecutor()
        disk = old.disk.after_crash(self.random.choice(CRASHES), self.random.randrange(1000))
        state = old.state.after_crash(disk)
        self.world = World(disk, state, old.clock.reboot(), pulls=self.sync, settings=self.settings)
        pull_log = self.world.recovered.pull_log
        assert pull_log is not None, self.world.recovered.pull_damage
        end = pull_log.end
        found = [moment for moment in self.moments if moment.pull_end == end]
        if not found:
            raise Between
        self._tell(f"the pull log goes back from {self.moments[-1].pull_end} to {end}")
        for name, group in self.groups.items():
            after = found[-1].groups[name].fates if name in found[-1].groups else {}
            self.lost.setdefault(name, set()).update(group.fates.keys() - after.keys())
        self.groups = found[-1].groups
        for name, group in self.groups.items():
            group.came(self.ends[name[0]])
            group.came_again(self.ends[self._again_of(name)])
        self._begin()

    def _rot(self) -> None:
        marks = self.world.core._checkpoints.last
        below = min(marks.indexed_offset, marks.window_offset)
        kept = self.world.recovered.message_log.start
        whole = [each for each in self.batches if kept <= each.offset < below and each.batch_id not in self.rotten]
        if whole:
            # One that is still to be pulled says more than one that is held.
            batch = self.random.choice([each for each in whole if self._is_new(each)] or whole)
            self._flip(batch)
            self.rotten.add(batch.batch_id)
            self.unreadable.add(batch.batch_id)
            self.late[batch.subject].update(range(batch.first, batch.first + len(batch.bodies)))
            self._tell(f"batch {batch.batch_id} rots: {batch.subject} from {batch.first} on")

    def _restore(self) -> None:
        """A file is restored from a copy."""
        if self.rotten:
            batch_id = self.random.choice(sorted(self.rotten))
            self._flip(self.batches[batch_id - 1])
            self.rotten.remove(batch_id)
            self._tell(f"batch {batch_id} is restored")
            if self.random.random() < 0.5:
                self._release()

    def _release(self) -> None:
        """An operator has what was quarantined tried again."""
        for id_ in self._quarantined():
            self.world.send(self.peers[0], RequestType.MEND, {"id": id_, "decision": "take"})
            self.unreadable = set(self.rotten)
        self.world.core.wake()
        self._collect()

    def _drop(self) -> None:
        """An operator gives up what is quarantined, in each group that has met it."""
        for name in self.groups:
            self._pull_all(name)
        listed = self._quarantined()
        for id_ in listed:
            offset = int(id_.rpartition("/")[2])
            (batch,) = [each for each in self.batches if each.offset == offset]
            for name, group in self.groups.items():
                for sequence in set(self._rows_for(name, batch)) & set(group.offered()):
                    group.give_up(sequence)
            self.world.send(self.peers[0], RequestType.MEND, {"id": id_, "decision": "give-up"})
            self._tell(f"{id_} is dropped")
        self.sync.run_all()

    # What the steps need.

    def _hand_over(self, subject: str, bodies: list[bytes], headers: list[bytes]) -> None:
        """The delay server dispatches messages."""
        first = self.ends[subject]
        batch_id = len(self.batches) + 1
        w = (1, batch_id - 1) if batch_id > 1 else (0, 0)
        ordering = self.random.choices(KEYS, k=len(bodies)) if self.ordered and subject in SUBJECTS else []
        self.keys[subject].update(enumerate(ordering, first))
        self.schedules[subject] += [_schedule(packed) for packed in headers]
        data = dispatch_batch(batch_id, bodies, subject=subject, w=w, headers=headers, ordering=ordering)
        _, ((_, offset),) = self.world.dispatch(self.delay, self.session, data)
        self.batches.append(Sent(batch_id, offset, subject, first, bodies))
        self.ends[subject] = first + len(bodies)
        for name, group in self.groups.items():
            if name[0] == subject:
                group.came(self.ends[subject])
            elif self._again_of(name) == subject:
                group.came_again(self.ends[subject])
        self._tell(f"dispatched {len(bodies)} of {subject} from {first} on")

    def _again_of(self, name: Name) -> str:
        """The retry subject of a group."""
        group = self.world.core._pulls.groups.get(name)
        return retry_subject(self.world.core.log_id, 0 if group is None else group.group_id)

    def _rows_for(self, name: Name, batch: Sent) -> range:
        """A batch's messages as the model of a group numbers them; none when they are not for it."""
        first = batch.first if batch.subject == name[0] else AGAIN + batch.first
        ours = batch.subject in (name[0], self._again_of(name))
        return range(first, first + len(batch.bodies)) if ours else range(0)

    def _begin(self) -> None:
        """A life begins: consumers connect, and so does the delay server."""
        self.session += 1
        self.delay, self.peers, self.asked = SimPeer(), [SimPeer(), SimPeer(), SimPeer()], []
        self.unreadable = set(self.rotten)
        self.world.hello(self.delay, self.session, w=(1, len(self.batches)) if self.batches else (0, 0))
        now_ms = self.world.clock.monotonic_ms()
        for group in self.groups.values():
            group.began_anew(now_ms)
        self.moments = []
        self._note()

    def _make(self, name: Name) -> None:
        """Make a group by its first PULL, which asks for one message and waits for none."""
        subject = self.world.core._index.subject(name[0])
        first = self.world.core._index.first(subject)
        self.groups[name] = GroupModel(first, self.keys[name[0]], self.late[name[0]])
        self.groups[name].came(self.ends[name[0]])
        self._ask(Asked(self.peers[0], 0, name, 1, 0, False, LEASES_MS[0]), 0)
        self.sync.run_all()
        self._collect()

    def _ask(self, asked: Asked, wait_ms: int) -> None:
        subject, group = asked.name
        head = pull_head(group, subject, asked.most, 1 << 20, wait_ms, asked.lease_ms, asked.ahead, stands=asked.waits)
        if self.ordered:
            head["ordered"] = True
        if bound := self.bounds[asked.name]:
            head["in_flight_max"] = bound
        self.asked.append(asked._replace(request_id=self.world.send(asked.peer, RequestType.PULL, head)))

    def _pass(self, ms: int) -> None:
        self.world.clock.advance(ms)
        now_ms = self.world.clock.monotonic_ms()
        for group in self.groups.values():
            group.time_came(now_ms)
        self._tell(f"{ms} ms pass")
        self.world.core.wake()
        while self.world.core.next_wake_ms() <= now_ms:
            self.world.core.wake()
        if self.random.random() < 0.5:
            self.sync.run_all()

    def _pull_all(self, name: Name, *, ack: bool = False) -> None:
        peer = self.peers[0]
        while True:
            before = len(self.groups[name].offered())
            self._ask(Asked(peer, 0, name, 100, 0, False, LEASE_MS_MAX), 0)
            self.sync.run_all()
            self._collect()
            if ack and (handles := self.groups[name].held()):
                self._ack_all(name, handles)
            elif len(self.groups[name].offered()) == before:
                return

    def _ack_all(self, name: Name, handles: list[Handle]) -> None:
        if any(self.groups[name].settle(Word.ACK, handle, 0) for handle in handles):
            raise Wrong("what is held is not stale")
        head: Head = {"subject": name[0], "group": name[1], "handles": _ranges(sorted(handles))}
        request_id = self.world.send(self.peers[0], RequestType.ACK, head)
        self.sync.run_all()
        ((answer, _),) = self.peers[0].answers.pop(request_id)
        if answer["stale"]:
            raise Wrong(f"stale are {answer['stale']}, and all of them are held")

    def _quarantined(self) -> list[str]:
        request_id = self.world.send(self.peers[0], RequestType.MEND_LIST, {"after": "", "limit": 100})
        ((answer, _),) = self.peers[0].answers.pop(request_id)
        return [need_str(entry, "id") for entry in need_maps(answer, "entries")]

    def _flip(self, batch: Sent) -> None:
        message_log = self.world.recovered.message_log
        if batch.offset < message_log.start:
            return  # Retention has removed it.
        path, position = message_log.file_position(batch.offset)
        file = self.world.disk.open(path, write=True)
        at = file.pread(file.size(), 0).find(batch.bodies[0][1:], position) - 1
        (before,) = file.pread(1, at)
        file.pwritev([bytes([before ^ 1])], at)
        file.sync()
        file.close()

    def _is_new(self, batch: Sent) -> bool:
        """Whether a group was never given its first message."""
        of_subject = [group for (subject, _), group in self.groups.items() if subject == batch.subject]
        found = [group.messages.get(batch.first) for group in of_subject]
        return any(message is not None and message.attempt == 1 for message in found)

    def _gave(self, peer: SimPeer, handles: list[Handle]) -> bool:
        incarnation = self.world.core._pulls.incarnation_of(peer)
        return any(handle[0] == incarnation for handle in handles)

    def _note(self) -> None:
        """Remember the groups as they are, for a power loss may bring back this moment."""
        end = self.world.core._pull_log.end
        moment = Moment(end, {name: group.copy() for name, group in self.groups.items()})
        if self.moments and self.moments[-1].pull_end == end:
            self.moments[-1] = moment
        else:
            self.moments.append(moment)

    def _tell(self, what: str) -> None:
        self.trace.append(what)

    # Comparisons.

    def _compare(self) -> None:
        if self.ordered and self.asked:
            self.sync.run_all()
        self._collect()
        if self.world.failures:
            raise Wrong(f"the server stopped: {self.world.failures[0]!r}")
        for asked in self.asked:
            if asked.waits and not asked.ahead and (readable := self._readable(asked.name)):
                raise Wrong(f"{asked.name} waits while {readable} are offered")
        if not (self.sync.waiting or self.sync.ran):
            self._compare_figures()
        self._note()

    def _compare_figures(self) -> None:
        """What is told of each group is how many messages it holds, and how many it has yet to get."""
        head: Head = {"subject": None, "limit": 100, "ages": True}
        request_id = self.world.send(self.peers[0], RequestType.GROUPS, head)
        ((answer, _),) = self.peers[0].answers.pop(request_id)
        told = {(each.subject, each.group): each for each in read_groups(answer)[0]}
        for name, group in self.groups.items():
            info, held = told[name], len(group.held())
            left = info.end - info.next + info.redelivering + info.quarantined
            if (info.outstanding, left) != (held, len(group.messages) - held):
                raise Wrong(f"{name} has {held} held of {sorted(group.messages.items())}, and is told as {info}")
            if not self.unreadable and (info.oldest_ms_ago is None) == bool(group.messages or info.leaving):
                raise Wrong(f"{name} has {sorted(group.messages)}, and its oldest one is {info.oldest_ms_ago} ms old")
        request_id = self.world.send(self.peers[0], RequestType.SUBJECTS, {"prefix": "", "after": "", "limit": 100})
        ((answer, _),) = self.peers[0].answers.pop(request_id)
        for subject in read_subjects(answer)[0]:
            groups = sum(subject.name == of for of, _ in self.groups)
            if (subject.end, subject.groups) != (self.ends[subject.name], groups):
                raise Wrong(f"{self.ends[subject.name]} messages came for {groups} groups, and told is {subject}")
        # The answer syncs the pull log, so with each of them no power cut would take anything.
        if self.asks.random() < ASKS_SHARE:
            self._compare_unfinished()

    def _compare_unfinished(self) -> None:
        """A schedule is unfinished while a group has one of its messages, or has let it go to come again."""
        request_id = self.world.send(self.peers[0], RequestType.UNFINISHED, schedules_head(ASKED))
        self.sync.run_all()
        ((answer, _),) = self.peers[0].answers.pop(request_id)
        told = read_unfinished(answer, len(ASKED))
        found = {ASKED[place] for place in told.unfinished}
        sure, may_be = self._unfinished()
        if told.unknown or told.ungrouped or not sure <= found <= sure | may_be:
            raise Wrong(f"unfinished are {sorted(sure)}, and perhaps {sorted(may_be)}, and told is {sorted(found)}")
        for name in self.groups:
            if any(batch.subjects() == [self._again_of(name).encode()] for batch in self.taken.values()):
                group_id = self.world.core._pulls.groups[name].group_id
                if group_id not in told.again:
                    raise Wrong(f"messages came to {name} again, and told is {told.again}")

    def _unfinished(self) -> tuple[set[AskedSchedule], set[AskedSchedule]]:
        """The schedules that are unfinished, and those that may be called so because a batch can't be read."""
        sure, may_be = set[AskedSchedule](), set[AskedSchedule]()
        for name, group in self.groups.items():
            subject, again = name[0], self._again_of(name)
            bad = {row for batch_id in self.unreadable for row in self._rows_for(name, self.batches[batch_id - 1])}
            for sequence, message in group.messages.items():
                schedules = self.schedules[again if sequence >= AGAIN else subject]
                (may_be if sequence in bad else sure).add(AskedSchedule(subject, schedules[sequence % AGAIN]))
                if sequence in bad and message.state is State.HELD:
                    may_be.update(each for each in ASKED if each.subject == subject)
            for undone in self.world.core.retries.waiting(ORIGIN):
                try:
                    batch = parse(self.world.core.retries.batch_of(undone))
                except DelaydError:
                    may_be.update(ASKED)
                    continue
                if batch.subjects() == [again.encode()]:
                    lives = [decode_headers(packed) for packed in _headers(batch)]
                    left = [life.get(SCHEDULE, "") for life in lives if REASON not in life]
                    sure.update(AskedSchedule(subject, str(each)) for each in left)
        return {each for each in sure if each.name}, may_be

    def _collect(self) -> None:
        """Take in what PULLs were answered."""
        left: list[Asked] = []
        for asked in self.asked:
            if asked.request_id in asked.peer.errors:
                raise Wrong(f"a PULL was refused: {asked.peer.errors[asked.request_id]!r}")
            found = asked.peer.answers.pop(asked.request_id, None)
            if found is None:
                left.append(asked)
                continue
            for head, body in found:
                self._given(asked, head, body)
                asked = asked._replace(most=asked.most - sum(part[2] for part in need_rows(head, "parts", 4)))
            if asked.request_id in asked.peer.going_on:
                left.append(asked)
        self.asked = left

    def _given(self, asked: Asked, head: Head, body: bytes) -> None:
        group = self.groups[asked.name]
        incarnation, parts = need_u64(head, "incarnation"), need_rows(head, "parts", 4)
        self._tell(f"{asked.name} was given {parts} by {incarnation}")
        if not parts and not asked.waits and (readable := self._readable(asked.name)):
            raise Wrong(f"{asked.name} was given nothing while {readable} are offered")
        if not parts:
            return
        now_ms = self.world.clock.monotonic_ms()
        for (pull_first, consume_first, count, attempt), batch in zip(parts, split(body), strict=True):
            (subject,) = batch.subjects()
            again = AGAIN if parse_retry_subject(subject.decode()) is not None else 0
            for row, found in zip(range(count), bodies_of(batch.buffer), strict=True):
                sequence = consume_first + row
                group.gave((incarnation, pull_first + row), sequence + again, attempt, now_ms, asked.lease_ms)
                if found != self._body(subject.decode(), sequence):
                    raise Wrong(f"another message came as {sequence}")
        if (bound := self.bounds[asked.name]) and len(group.held()) > bound:
            raise Wrong(f"{len(group.held())} messages are in flight, and at most {bound} may be")
        if sum(part[2] for part in parts) > asked.most:
            raise Wrong(f"more than {asked.most} messages came")

    def _readable(self, name: Name) -> list[int]:
        """Messages that are offered and that nothing keeps from being read, while there is room for one in flight."""
        if (bound := self.bounds[name]) and len(self.groups[name].held()) >= bound:
            return []
        offered = self.groups[name].may_come()
        if not offered or not self.unreadable:
            return offered
        bad = {row for batch_id in self.unreadable for row in self._rows_for(name, self.batches[batch_id - 1])}
        return [sequence for sequence in offered if sequence not in bad]

    def _body(self, subject: str, sequence: int) -> bytes:
        """The body of a message."""
        return next(
            batch.bodies[sequence - batch.first]
            for batch in self.batches
            if batch.subject == subject and batch.first <= sequence < batch.first + len(batch.bodies)
        )

    def _all_come_again(self) -> None:
        """What was to live on is at the delay server, once."""
        for _ in range(20):
            self._courier()
            self.sync.run_all()
        if list(self.world.core.retries.waiting(ORIGIN)):
            raise Wrong("messages that are to come again were not taken")
        for name, group in self.groups.items():
            again = self._again_of(name)
            left = [self._body(again if at >= AGAIN else name[0], at % AGAIN) for at in group.left()]
            taken = [
                body
                for batch in self.taken.values()
                if batch.subjects() == [again.encode()]
                for body in bodies_of(batch.buffer)
            ]
            if sorted(left) != sorted(taken):
                raise Wrong(f"{name} let {sorted(left)} go, and the delay server has {sorted(taken)}")
        while self.to_come:
            self._come_again()
        self._collect()

    def _end(self) -> None:
        self._tell("the end")
        while self.rotten:
            self._restore()
        self.sync.run_all()
        self._all_come_again()
        self.sync.run_all()
        self._pass(LEASE_MS_MAX)
        self.sync.run_all()
        self._collect()
        self._release()
        self.unreadable.clear()
        for name, group in self.groups.items():
            fates = dict(group.fates)
            self._pull_all(name, ack=True)
            if group.messages:
                raise Wrong(f"{name} never got {sorted(group.messages)}")
            self._repeat(name, fates)
        self._dispatch()
        self._pass(RETENTION_MS)
        self._retain()
        self.counts["ends_with_removed_messages"] += self.world.recovered.message_log.start > 0
        self._kill()
        for name, group in self.groups.items():
            self._pull_all(name)
            self._repeat(name, group.fates)

    def _repeat(self, name: Name, fates: dict[Handle, tuple[Fate, int]]) -> None:
        """All that was ever said is said again: what is durable is done."""
        lost = self.lost.get(name, set())
        handles = [[*handle, 1] for handle in sorted(lost | fates.keys())]
        head: Head = {"subject": name[0], "group": name[1], "handles": handles}
        request_id = self.world.send(self.peers[0], RequestType.ACK, head)
        self.sync.run_all()
        ((answer, _),) = self.peers[0].answers.pop(request_id)
        found = {(life, at + row) for life, at, count in need_rows(answer, "stale", 3) for row in range(count)}
        stale = lost | {handle for handle, (fate, _) in fates.items() if fate not in (Fate.ACKED, Fate.HELD)}
        if found != stale:
            raise Wrong(f"{name}: stale are {sorted(found)}, and should be {sorted(stale)}")


class Between(Exception):
    """The server found a pull log that ends within a step: what the model was then is not known. The walk ends."""


def _headers(batch: Batch) -> list[bytes]:
    """The headers of each message."""
    starts, ends = batch.region(ColumnId.HEADERS_END)
    return [bytes(batch.heap[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _schedule(packed: bytes) -> str:
    """The schedule that a message says it is of."""
    return str(decode_headers(packed).get(SCHEDULE, ""))


def _ranges(handles: list[Handle]) -> list[list[int]]:
    """Handles as requests name them: neighbours are one range."""
    ranges = [[*handles[0], 1]]
    for before, handle in pairwise(handles):
        if handle == (before[0], before[1] + 1):
            ranges[-1][2] += 1
        else:
            ranges.append([*handle, 1])
    return ranges


KINDS = {
    Walk._dispatch: 8,
    Walk._pull: 14,
    Walk._settle: 14,
    Walk._courier: 5,
    Walk._lose_what_leaves: 0.5,
    Walk._come_again: 5,
    Walk._work: 2,
    Walk._settle_for_others: 2,
    Walk._move: 1,
    Walk._time_passes: 4,
    Walk._checkpoint: 3,
    Walk._retain: 2,
    Walk._disconnect: 1,
    Walk._remake: 1,
    Walk._stop: 1,
    Walk._kill: 2,
    Walk._lose_power: 2,
    Walk._rot: 2,
    Walk._restore: 2,
    Walk._release: 1,
    Walk._drop: 0.3,
}
# What some walks leave out. A message of an ordered group that is put off keeps its place, so it does not leave. When a
# batch is dropped, such a walk does not know which of its messages still wait for others, and a bounded one not whether
# each group has met it; those messages are not given up.
LEFT_OUT = {Kind.PLAIN: (), Kind.ORDERED: (Walk._lose_what_leaves, Walk._drop), Kind.BOUNDED: (Walk._drop,)}
