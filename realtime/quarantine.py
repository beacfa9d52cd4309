"""Quarantine: messages whose stored batch does not check any more are passed over, and all else goes on (rule L5).

Invariant: nothing is acknowledged for them, so retention keeps their bytes (rule Q3), and the next start offers them
again: once the file was restored from a copy they are delivered, else they are found and told again.
"""

import logging
from collections.abc import Sequence

from delayd.errors import DamagedData

from .groups import Group
from .index import Run, Subject
from .offers import Offer
from .stored import StoredBatches

BATCHES_A_PULL = 64  # Each costs a read and a checksum, and nobody else is served meanwhile.
SEQUENCES_TOLD = 10

log = logging.getLogger(__name__)


class Rotten(Exception):
    """The batch of messages that were about to be delivered does not check."""

    def __init__(self, offer: Offer, run: Run, damage: DamagedData) -> None:
        super().__init__(damage.message)
        self.offer = offer
        self.run = run
        self.damage = damage


class Quarantine:
    """What was found in this life; belongs to the loop."""

    def __init__(self, stored: StoredBatches) -> None:
        self._stored = stored
        self._rows: dict[Subject, dict[int, int]] = {}  # By the offset of a batch: its rows.

    def rows_of(self, subject: Subject) -> int:
        """Messages of a subject that can't be read, as far as they were pulled."""
        return sum(self._rows.get(subject, {}).values())

    def take(self, group: Group, found: Rotten) -> None:
        """Pass over what one group would have got of a batch."""
        group.quarantine(found.offer)
        run, batches = found.run, self._rows.setdefault(group.subject, {})
        # A run may end before its batch does, and a later one then knows of more rows.
        batches[run.offset] = max(batches.get(run.offset, 0), run.row + run.rows)

    def tell(self, group: Group, found: Sequence[Rotten]) -> None:
        """One line for all that one pull came upon: whose they are, by their numbers here and at the delay server."""
        sequences = [number for one in found for number in self._sequences(one)]
        ranges = [(one.offer.consume_first, one.offer.consume_first + one.offer.count) for one in found]
        log.critical(
            "rows_quarantined subject=%s group=%s rows=%d consume_ranges=%s origin_sequences=%s path=%s position=%d "
            "reason=%r fix=restore_the_file_from_a_copy_and_restart",
            *(group.subject.name, group.name, sum(one.offer.count for one in found), ranges[:SEQUENCES_TOLD]),
            *(_told(sequences), found[0].damage.details["path"], found[0].damage.position, found[0].damage.what),
        )

    def _sequences(self, found: Rotten) -> list[int]:
        """The delay server's numbers, if the part of the batch that holds them is whole."""
        begin = found.run.row
        return self._stored.sequences_of(found.run.offset)[begin : begin + found.offer.count]


def _told(sequences: Sequence[int]) -> str:
    if not sequences:
        return "unknown"
    return f"{list(sequences[:SEQUENCES_TOLD])}{'...' if len(sequences) > SEQUENCES_TOLD else ''}"
