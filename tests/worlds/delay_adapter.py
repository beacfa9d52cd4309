"""The delay server as judges see it: the one module that knows its insides, beside the bugs that are planted there.

Invariant: methods are named by what a judge wants. A server that is built anew needs this module anew, and no judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol, cast
from unittest.mock import patch

import numpy as np

from delayd.address import Endpoint
from delayd.batch.batch import Batch
from delayd.batch.columns import Int64s
from delayd.batch.content import Names, slots_of_names
from delayd.config import DelayConfig
from delayd.delay import recovery
from delayd.delay.books.outcomes import list_dispatch_logs, read_outcomes
from delayd.delay.core import DelayCore, Surroundings, Threads
from delayd.delay.ending.requested import RequestWish
from delayd.delay.filing import pending
from delayd.delay.filing.hour_table import (
    OUTCOME_PREFIX,
    PREFIX,
    HourFile,
    HourTable,
    OutcomeEnd,
    load_hours,
    load_outcome_ends,
)
from delayd.delay.filing.schedule_log import scan_schedule_log
from delayd.delay.handoff.wire import OnAnswer, Wire
from delayd.delay.producers import AcceptedBatch, Allowance, Waiter
from delayd.delay.quarantine import OnWord, SetAsideEntry, SetAsideKind
from delayd.delay.requests import Requests
from delayd.delay.rows import Stored
from delayd.delay.timers.wheel import Wheel
from delayd.errors import DelaydError
from delayd.log import checkpoint
from delayd.log.checkpoint import read_checkpoint
from delayd.log.hour import REMOVED, EndedRows, decode_hours
from delayd.testing.clock import SimClock
from delayd.testing.disk import MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.wire.asked import AnswerRows, Asked
from delayd.wire.meta import SLOTS, SlotOwners, slot_set

__all__ = [
    "AcceptedBatch",
    "DelayCore",
    "HourFile",
    "HourTable",
    "OnAnswer",
    "RequestWish",
    "Requests",
    "Stored",
    "Threads",
    "Wire",
    "list_dispatch_logs",
    "read_outcomes",
    "scan_schedule_log",
]

SLOT_BYTES = 4_096
TABLE_ROWS = 64  # The first size of tables in memory, which grow by themselves; small, so that tests see them grow.

Connected = Callable[[Wire], None]
OnAnswerRows = Callable[[AnswerRows | DelaydError], None]


class Around(Protocol):
    """What a judge is to the server: its network, meta, and chance."""

    disk: MemoryDisk
    state: MemoryState
    clock: SimClock
    asked: list[list[bytes]]  # Subjects whose routes the server wants to hear.

    def slots(self) -> SlotOwners | DelaydError:
        """What meta says about keys."""

    def begin_anew(self, why: str) -> None:
        """Stop the server soon, and start it on what it leaves."""

    def dial(self, endpoint: Endpoint, connected: Callable[[Wire], None], lost: Callable[[DelaydError], None]) -> None:
        """Begin to connect to a target."""


class SetAside(NamedTuple):
    """Something that the server can't read, under the name by which an operator decides on it."""

    id: str
    hour: int | None
    is_dispatch_log: bool


class DelayAdapter:
    """One life of a delay server."""

    def __init__(
        self,
        around: Around,
        settings: Mapping[str, object],
        new_thread: Callable[[], StepExecutor],
        random_id: Callable[[], int],
        core: type[DelayCore] = DelayCore,
    ) -> None:
        """Start it, on whatever its disk and state hold; raises what the start meets."""
        self.config = DelayConfig(**settings)  # type: ignore[arg-type]
        self.threads = Threads(new_thread(), new_thread(), new_thread())
        surroundings = Surroundings(
            clock=around.clock,
            dial=around.dial,
            ask_routes=around.asked.append,
            ask_slots=lambda wanted, answer: answer(around.slots()),
            random_id=random_id,
            evidence=around.clock.restart_evidence,
            rest=_rest,
            begin_anew=around.begin_anew,
        )
        self.core = core(around.disk, around.state, self.config, self.threads, surroundings)
        self._clock = around.clock

    @property
    def log_id(self) -> int:
        """Of its directory."""
        return self.core.site.identity.log_id

    @property
    def epoch(self) -> int:
        """The number of this life."""
        return self.core.site.identity.epoch

    # Its loop.

    def wake(self) -> None:
        """Do what is due."""
        self.core.wake()

    def sleep_ms(self, most: int) -> int:
        """How long its loop would sleep now."""
        sleep = min(most, self.core.next_wake_ms() - self._clock.monotonic_ms())
        due_ms = self.core.next_due_ms()
        return sleep if due_ms is None else min(sleep, due_ms - self._clock.now_ms())

    def checkpoint(self, done: Callable[[int], None]) -> None:
        """Begin a checkpoint; ``done`` gets its replay offset."""
        self.core.checkpoint(done)

    def sweep(self) -> None:
        """Seal and remove hours that may be."""
        self.core.sweep()

    def stop(self, done: Callable[[], None]) -> None:
        """Stop cleanly."""
        self.core.stop(done)

    def close(self) -> None:
        """Close all files, after a stop."""
        self.core.close()

    # Producers and callers.

    def send(self, batch: Batch, heard: Waiter) -> None:
        """Take a batch of a producer."""
        self.core.send(batch, heard)

    def send_again(self, batch: Batch, heard: Waiter) -> None:
        """Take a batch of messages that come again."""
        self.core.send_again(batch, heard, Allowance())

    def answer_to(self, producer: int, number: int) -> AcceptedBatch | None:
        """What it remembers of a batch."""
        return self.core.logs.producers.find(producer, number)

    def cancel(self, asked: Asked, heard: OnAnswerRows) -> None:
        """End messages by their receipts."""
        self.core.asked.endings.cancel(asked, heard)

    def reschedule(self, asked: Asked, wanted_at_ms: Int64s, heard: OnAnswerRows) -> None:
        """Move messages by their receipts."""
        self.core.asked.endings.reschedule(asked, wanted_at_ms, heard)

    def get(self, asked: Asked, heard: OnAnswerRows) -> None:
        """Ask what became of messages by their receipts."""
        self.core.asked.endings.get(asked, heard)

    def ask_by_key(
        self, wish: RequestWish, names: Batch, heard: OnAnswerRows, wanted_at_ms: Int64s | None = None
    ) -> None:
        """Cancel, move or ask about the newest messages of keys."""
        self.core.asked.endings.ask_by_key(wish, names, heard, wanted_at_ms)

    def own_all_keys(self) -> None:
        """Have the server ask meta for all slots of keys."""
        self.core.asked.endings.owned_slots.admit(np.arange(SLOTS, dtype=np.uint16), lambda error: None)

    def release_keys(self, subjects: Sequence[bytes], keys: Sequence[bytes]) -> None:
        """Have the server give up the slots of these keys."""
        slots = slot_set(slots_of_names(Names.of_lists(subjects, keys)))
        self.core.asked.endings.owned_slots.release(slots, lambda told: None)

    def whenever_rows_end(self, heard: Callable[[EndedRows], None]) -> None:
        """Hear of all rows that decisions end, those of earlier lives first."""
        heard(self.core.memory.ledger.owed.all())
        take = self.core.memory.ledger.owed.take

        def take_and_tell(rows: EndedRows) -> None:
            heard(rows)
            take(rows)

        self.core.memory.ledger.owed.take = take_and_tell  # type: ignore[method-assign]

    def frames(
        self, *, with_status: bool = False, soon: Callable[[Callable[[], None]], object] | None = None
    ) -> Requests:
        """What serves frames of a connection: `received` and `disconnected`; ``soon`` gets what the next turn does."""
        core = self.core
        if not with_status:
            return Requests(core, self._clock, dict, soon)
        return Requests(
            core,
            self._clock,
            lambda: {**core.standing.counters(), "waits": [list(wait) for wait in core.standing.waits()]},
        )

    # Meta and the targets.

    def hears_routes(self, routes: dict[bytes, int], unrouted: list[bytes]) -> None:
        """Meta says where subjects go."""
        self.core.handoff.dispatcher.routed(routes, unrouted)

    @property
    def wants_places(self) -> bool:
        """Whether it wants to hear where targets listen."""
        return self.core.handoff.dispatcher.wants_places

    def hears_place(self, target: int, host: str, port: int = 1) -> None:
        """Meta says where a target listens."""
        self.core.handoff.dispatcher.place(target, Endpoint(host, port))

    @property
    def targets(self) -> dict[bytes, int]:
        """Where the messages of each subject go."""
        return self.core.handoff.dispatcher.targets

    def end_of(self, target: int) -> int:
        """How far a target's log went, as far as outcomes tell it."""
        return self.core.handoff.ends.of(target)

    @property
    def unread_hours(self) -> set[int]:
        """Hours whose outcomes are not all known."""
        return self.core.handoff.ends.unread

    def knows(self, target: int) -> bool:
        """Whether it has to do with a target."""
        return target in self.core.handoff.dispatcher.links

    def is_refused_by(self, target: int) -> bool:
        """Whether a target has refused the last hello."""
        return self.core.handoff.dispatcher.links[target].refusal is not None

    def is_alarmed_at(self, target: int) -> bool:
        """Whether a target answered what can't be."""
        return self.knows(target) and bool(self.core.handoff.dispatcher.links[target].alarm)

    def has_given_up(self, target: int) -> bool:
        """Whether an operator has given a target up."""
        link = self.core.handoff.dispatcher.links.get(target)
        return self.core.handoff.targets._words.is_freed(target) if link is None else link.is_lost

    def accept(self, target: int, told: Callable[[DelaydError | str], None]) -> None:
        """An operator accepts a target as it is."""
        self.core.handoff.targets.accept(target, told)

    def lose(self, target: int, told: Callable[[DelaydError | str], None]) -> None:
        """An operator gives a target up."""
        self.core.handoff.targets.lose(target, told)

    # What it says of itself.

    @property
    def is_fenced(self) -> bool:
        """Whether it serves nobody."""
        return self.core.fence.is_up

    @property
    def fences(self) -> list[object]:
        """Why it serves nobody."""
        return list(self.core.fence.waits())

    @property
    def set_aside(self) -> list[SetAside]:
        """All that it can't read."""
        return [_set_aside(entry) for entry in self.core.memory.quarantine]

    @property
    def has_set_aside(self) -> bool:
        """Whether there is anything that it can't read."""
        return bool(len(self.core.memory.quarantine))

    @property
    def dispatch_log_is_damaged(self) -> bool:
        """Whether some hour's dispatch log is set aside."""
        return any(entry.kind is SetAsideKind.DISPATCH for entry in self.core.memory.quarantine)

    def told_of_damage(self) -> object:
        """What an operator is shown of it."""
        return self.core.memory.quarantine.listing()

    def has(self, set_aside: str) -> bool:
        """Whether something is set aside under this name."""
        return self.core.memory.quarantine.find(set_aside) is not None

    def drop(self, set_aside: str, told: OnWord) -> None:
        """An operator gives something up that is set aside."""
        self.core.repair.words.drop(set_aside, told)

    def release(self, set_aside: str, told: OnWord) -> None:
        """An operator has something read again that is set aside."""
        self.core.repair.words.release(set_aside, told)

    def dropped_rows(self, hour: int) -> int:
        """Rows of an hour that an operator gave up and of which nothing else tells."""
        return self.core._dropped.get(hour, 0)

    @property
    def appended_at_ms(self) -> int:
        """The last instant that it stamped."""
        return self.core.logs.intake.appended_at_ms

    @property
    def queued_bytes(self) -> int:
        """What waits for the disk."""
        return self.core.logs.intake.queued_bytes

    @property
    def loaded_until(self) -> int:
        """The last hour whose rows are in memory."""
        return self.core.memory.hours.loaded_until

    @property
    def writes_no_outcomes(self) -> bool:
        """Whether every outcome that it knows is durable."""
        return self.core.logs.outcomes.idle

    def has_counted_all_outcomes(self, hour: int) -> bool:
        """Whether the last checkpoint counts all outcomes of an hour that are durable."""
        counted = load_outcome_ends(self.core.site.state.scan(OUTCOME_PREFIX)).get(hour)
        return self.core.logs.outcomes.ends[hour] == counted


def dispatch_log_name(hour_name: str) -> str:
    """Under which name a dispatch log is set aside."""
    return f"{SetAsideKind.DISPATCH}/{hour_name}"


def hours_of(state: MemoryState) -> HourTable:
    """The hours that a state names."""
    return load_hours(state.scan(PREFIX))


def counted_outcomes(state: MemoryState, hour: int) -> OutcomeEnd:
    """What the last checkpoint counts of an hour's dispatch log."""
    return load_outcome_ends(state.scan(OUTCOME_PREFIX)).get(hour, OutcomeEnd())


def removed_hours(disk: MemoryDisk, folder: str, log_id: int) -> list[int] | None:
    """The hours that the published table calls removed; None when nothing is published."""
    published = read_checkpoint(disk, folder, log_id)
    if published is None:
        return None
    rows = decode_hours(cast(bytes, published["hours"]))
    removed: list[int] = rows["hour"][(rows["flags"] & REMOVED) != 0].tolist()
    return removed


@contextmanager
def small_slots() -> Iterator[None]:
    """Checkpoint files and tables of a few KB, where many disks are copied and many servers started."""
    payload_bytes_max = SLOT_BYTES - checkpoint.HEADER.size
    small_wheel = partial(Wheel, TABLE_ROWS)
    with (
        patch.multiple(checkpoint, SLOT_BYTES=SLOT_BYTES, PAYLOAD_BYTES_MAX=payload_bytes_max),
        patch.object(pending, "BLOCK_ROWS", TABLE_ROWS),
        patch.object(recovery, "Wheel", small_wheel),
    ):
        yield


def _set_aside(entry: SetAsideEntry) -> SetAside:
    return SetAside(entry.id, entry.hour, entry.kind is SetAsideKind.DISPATCH)


def _rest() -> None:
    """Nothing else needs the disk."""
