"""Quarantine: messages whose stored batch can't be read any more are passed over, and all else goes on (rules L5, L10).

Invariant: these messages are not acknowledged, so retention keeps their bytes (rule Q3). They are tried again after a
while: once the file was restored from a copy, or can be read again, they are delivered without a restart.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from delayd.errors import DamagedData, DataError
from delayd.machine.alarms import Alarms
from delayd.wire.status import Decision, Quarantined

from .group_window import GroupWord, Offer
from .groups import Group
from .subject_index import Run, StoredBatches, Subject

# Unreadable batches per pull: each costs a read and a checksum, and nobody else is served meanwhile.
BATCHES_A_PULL = 64
BATCHES_A_TRY = 64
RETRY_MS = 30_000
SEQUENCES_TOLD = 10

log = logging.getLogger(__name__)


class Rotten(Exception):
    """A batch whose messages were about to be delivered can't be read."""

    def __init__(self, offer: Offer, run: Run, damage: DamagedData) -> None:
        super().__init__(damage.message)
        self.offer = offer
        self.run = run
        self.damage = damage


@dataclass(slots=True)
class Bad:
    """One unreadable batch: what is wrong with it, and which groups passed over which of its messages."""

    subject: Subject
    offset: int
    damage: DamagedData
    since_ms: int
    rows: int = 0
    passed: list[tuple[Group, Offer]] = field(default_factory=list)

    @property
    def id(self) -> str:
        """The name by which an operator refers to it."""
        return f"rows/{self.subject.name}/{self.offset}"


class UnreadableMessages:
    """Batches that were found unreadable in this life; belongs to the loop."""

    def __init__(self, stored: StoredBatches, alarms: Alarms) -> None:
        self.on_released: Callable[[Sequence[Group]], None] = lambda groups: None
        self._retry = alarms.alarm(self._try_some)
        self._stored = stored
        self._clock = alarms.clock
        self._bad: dict[int, Bad] = {}  # By the offset of the batch.
        self._untried: list[int] = []  # Entries that the present round has not tried yet.

    def rows_of(self, subject: Subject) -> int:
        """Messages of a subject that can't be read, as far as they were pulled."""
        return sum(bad.rows for bad in self._bad.values() if bad.subject is subject)

    def take(self, group: Group, found: Rotten) -> None:
        """Pass over the messages of a batch that a group would have got."""
        window = group.changing()
        window.tell(GroupWord.UNREADABLE, found.offer.consume_first, found.offer.consume_first + found.offer.messages)
        window.forget_order()
        run = found.run
        bad = self._bad.get(run.offset)
        if bad is None:
            bad = self._bad[run.offset] = Bad(group.subject, run.offset, found.damage, self._clock.now_ms())
        # A run may end before its batch does; a later run then knows of more rows.
        bad.rows = max(bad.rows, run.row + run.rows)
        bad.passed.append((group, found.offer))
        if self._retry.at_ms is None:
            self._retry.after(RETRY_MS)

    def tell(self, group: Group, found: Sequence[Rotten]) -> None:
        """Log one line for everything that one pull came upon: the messages by their numbers here and at the delay
        server.
        """
        sequences = [number for one in found for number in self._sequences(one)]
        ranges = [(one.offer.consume_first, one.offer.consume_first + one.offer.messages) for one in found]
        log.critical(
            "rows_quarantined subject=%s group=%s rows=%d consume_ranges=%s origin_sequences=%s path=%s position=%d "
            "reason=%r fix=restore_the_file_from_a_copy",
            *(group.subject.name, group.name, sum(one.offer.messages for one in found), ranges[:SEQUENCES_TOLD]),
            *(_told(sequences), found[0].damage.details["path"], found[0].damage.position, found[0].damage.what),
        )

    def _try_some(self) -> None:
        """Try entries again, as many as one turn may."""
        if not self._untried:
            self._untried = list(self._bad)
        part, self._untried = self._untried[:BATCHES_A_TRY], self._untried[BATCHES_A_TRY:]
        self._try([self._bad[offset] for offset in part if offset in self._bad])
        if self._bad:
            self._retry.after(0 if self._untried else RETRY_MS)

    def try_soon(self) -> None:
        """Try all entries in the next turn, because a file is back."""
        if self._retry.at_ms is not None:
            self._retry.soon()

    def release(self, bad: Bad) -> bool:
        """Try an entry again now; return whether it could be read."""
        self._try([bad])
        return bad.offset not in self._bad

    def drop(self, bad: Bad) -> None:
        """Forget an entry whose messages were given up."""
        del self._bad[bad.offset]

    def find(self, id_: str) -> Bad | None:
        """The entry that an operator named."""
        return next((bad for bad in self._bad.values() if bad.id == id_), None)

    def forget(self, group: Group) -> None:
        """Forget what a deleted group passed over."""
        for bad in list(self._bad.values()):
            bad.passed = [(each, offer) for each, offer in bad.passed if each is not group]
            if not bad.passed:
                del self._bad[bad.offset]

    def listing(self) -> Iterator[Quarantined]:
        """All entries, as requests list them."""
        for bad in self._bad.values():
            groups = ", ".join(sorted({group.name for group, _ in bad.passed}))
            yield Quarantined(
                id=bad.id,
                path=bad.damage.path,
                position=bad.damage.position,
                reason=bad.damage.what,
                rows=bad.rows,
                since_ms=bad.since_ms,
                subject=bad.subject.name,
                costs={
                    Decision.TAKE: "it is read again now, and delivered if it checks; that is also done every 30 s",
                    Decision.GIVE_UP: f"its {bad.rows} messages are never delivered to {groups}; retention may remove "
                    "them",
                },
            )

    def _try(self, some: Sequence[Bad]) -> None:
        self._stored.forget_read()
        groups: dict[Group, None] = {}
        for bad in some:
            if self._bad.get(bad.offset) is not bad:
                continue  # While an operator's word waited for a look at its file, it was released or given up.
            try:
                self._stored.fetch(bad.offset)
            except DataError:
                continue
            del self._bad[bad.offset]
            for group, offer in bad.passed:
                window = group.changing()
                window.tell(GroupWord.READABLE, offer.consume_first, offer.consume_first + offer.messages)
                window.forget_order()
                groups[group] = None
            log.info("rows_released subject=%s rows=%d offset=%d", bad.subject.name, bad.rows, bad.offset)
        if groups:
            self.on_released(list(groups))

    def _sequences(self, found: Rotten) -> list[int]:
        """The delay server's numbers, if the columns of the batch are whole."""
        begin = found.run.row
        return self._stored.sequences_of(found.run.offset)[begin : begin + found.offer.messages]


def _told(sequences: Sequence[int]) -> str:
    if not sequences:
        return "unknown"
    return f"{list(sequences[:SEQUENCES_TOLD])}{'...' if len(sequences) > SEQUENCES_TOLD else ''}"
