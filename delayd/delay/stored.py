"""Stored batches: where a verified batch stands in a log."""

from typing import NamedTuple

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind
from delayd.log.group import CommitGroup


class Stored(NamedTuple):
    """A verified batch in a log: its offset there, and the sequence of its first row."""

    offset: int
    base_sequence: int
    batch: Batch


def stored_batches(group: CommitGroup) -> list[Stored]:
    """The batches of messages of a data group, with their places and first sequences.

    A CONTROL batch that stands before them has decisions about rows, and no row of its own.
    """
    stored: list[Stored] = []
    sequence = group.header.base_sequence
    for offset, batch in group.batches():
        if batch.kind is BatchKind.CONTROL:
            continue
        stored.append(Stored(offset, sequence, batch))
        sequence += batch.count
    return stored
